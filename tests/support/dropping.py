"""The agent of the README behind a network that breaks half of its calls: `dropping.py AGENT URL
COPIES LOG SEED`.

The client of the agent repeats what was broken, as `openai` does by itself; now and then its agent
says something more before. Each reply that arrived becomes a line of the log: episode, split,
index, reply.
"""

from __future__ import annotations

import json
import random
import runpy
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import httpx2
import openai

LATE = {"role": "user", "content": "You did not answer in time."}


class Dropping(httpx2.HTTPTransport):
    """Breaks half of the calls: before the reply, when it is there and unread, or in the middle of
    it.
    """

    def __init__(self, log: Path, chance: random.Random) -> None:
        super().__init__()
        self._log = log
        self._chance = chance
        self._lock = threading.Lock()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if not request.url.path.endswith("/chat/completions"):
            return super().handle_request(request)
        with self._lock:
            broken, way, words = self._chance.random() < 0.5, self._chance.randrange(4), self._chance.random() < 0.25
        if broken:
            self._break(request, way, more=words)
            raise httpx2.ReadTimeout("the network broke", request=request)
        response = super().handle_request(request)
        text = response.read()
        if response.status_code == httpx2.codes.OK:
            reply = json.loads(text)["choices"][0]["message"]["content"]
            with self._lock, self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps([request.url.path.split("/")[2], reply]) + "\n")
        return httpx2.Response(response.status_code, headers=response.headers, content=text)

    def _break(self, request: httpx2.Request, way: int, *, more: bool) -> None:
        """Send a call, in other words if `more`, and close the connection in one of four ways."""
        payload = json.loads(request.content)
        if more:
            payload["messages"].append(LATE)
        body = json.dumps(payload)
        head = f"POST {request.url.path} HTTP/1.1\r\nHost: {request.url.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((request.url.host, request.url.port or 80), timeout=60) as door:
            door.sendall((head + body).encode())
            if way == 1:
                time.sleep(0.05)
            elif way > 1:
                door.recv(1, socket.MSG_PEEK)
            if way == 3:
                door.recv(20)


if __name__ == "__main__":
    agent = runpy.run_path(sys.argv[1])
    gateway = httpx.Client(base_url=sys.argv[2], timeout=60)
    transport = Dropping(Path(sys.argv[4]), random.Random(int(sys.argv[5])))
    client = openai.OpenAI(api_key="none", max_retries=30, http_client=httpx2.Client(transport=transport, timeout=60))
    for _ in range(int(sys.argv[3])):
        threading.Thread(target=agent["work"], args=(gateway, client)).start()
