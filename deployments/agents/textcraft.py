"""An outside agent on the plain `openai` client: it plays TextCraft as a gateway offers it."""

import os
import sys
import threading

import httpx
from openai import APIStatusError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from agentr_core.environments.crafting.textcraft import TextCraft


def play(client: OpenAI, split: str, index: int) -> float:
    world, reward, over = TextCraft(), 0.0, False
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": world.instruction},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": world.reset(world.instances(split)[index])},
    ]
    while not over and len(messages) < 43:
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        observation, reward, over, _, _ = world.step(world.parse(reply))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": observation}]
    return reward


def work(gateway: httpx.Client, client: OpenAI) -> None:
    while True:
        if (answer := gateway.post("/episodes")).status_code == httpx.codes.OK:
            told = answer.json()
            try:
                reward = play(client.with_options(base_url=told["base_url"]), told["split"], told["index"])
                gateway.post(f"/episodes/{told['episode']}/reward", json={"reward": reward})
            except APIStatusError as refusal:
                sys.stderr.write(f"{refusal.message}\n")


if __name__ == "__main__":
    # A gateway that other machines reach prints a token.
    token = os.environ.get("AGENTR_GATEWAY_TOKEN", "none")
    headers = {"Authorization": f"Bearer {token}"}
    shared = httpx.Client(base_url=sys.argv[1], headers=headers, timeout=60, limits=httpx.Limits(max_connections=None))
    for _ in range(int(sys.argv[2])):
        threading.Thread(target=work, args=(shared, OpenAI(api_key=token))).start()
