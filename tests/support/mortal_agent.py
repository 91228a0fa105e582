"""The README's agent as a copy of a launcher that dies at any of its calls, or with its reward in
its hand: `mortal_agent.py AGENT LOG`.

Each reply of a copy that lives to report becomes a line of the log: episode, reply.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
from pathlib import Path

import httpx
import httpx2
import openai

CHANCE = random.Random(os.environ["AGENTR_EPISODE"])
REPLIES: list[str] = []


def die_perhaps() -> None:
    if CHANCE.random() < 0.08:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(httpx2.HTTPTransport):
    """Dies before a call or after it, and keeps the replies."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        die_perhaps()
        response = super().handle_request(request)
        text = response.read()
        die_perhaps()
        if response.status_code == httpx2.codes.OK:
            REPLIES.append(json.loads(text)["choices"][0]["message"]["content"])
        return httpx2.Response(response.status_code, headers=response.headers, content=text)


if __name__ == "__main__":
    play = runpy.run_path(sys.argv[1])["play"]
    client = openai.OpenAI(http_client=httpx2.Client(transport=Mortal(), timeout=60))
    reward = play(client, os.environ["AGENTR_SPLIT"], int(os.environ["AGENTR_INDEX"]))
    die_perhaps()
    # Before the post: an episode that is over ends its copy.
    with Path(sys.argv[2]).open("a", encoding="utf-8") as log:
        log.write("".join(json.dumps([os.environ["AGENTR_EPISODE"], reply]) + "\n" for reply in REPLIES))
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    where = f"{os.environ['AGENTR_EPISODE_URL']}/reward"
    httpx.post(where, headers=headers, json={"reward": reward}).raise_for_status()
