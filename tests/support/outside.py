"""Outside agents for tests: one that is a plain client, and an episode that it plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import httpx
from openai import OpenAI

from agentr_core.environments.gateway.world import Gateway
from agentr_core.episodes.rollout import EnvironmentPool, roll_out_episode
from agentr_core.models.scripted import ScriptedModel
from agentr_core.protocols import ChatModel
from agentr_core.types import Generation, Instance, Message, Request, Sampling, Trajectory

HELLO: dict[str, Any] = {"role": "user", "content": "Hello."}
GREEDY = Sampling()
Play = Callable[["Agent"], Any]
T = TypeVar("T")


class Agent:
    """An agent that has taken an episode: a plain client with another `base_url`."""

    def __init__(self, url: str, *, token: str = "none", retries: int = 0) -> None:
        self.http = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {token}"})
        self.told = self.http.post("/episodes").json()
        self.client = OpenAI(base_url=self.told["base_url"], api_key=token, max_retries=retries)

    def close(self) -> None:
        self.http.close()
        self.client.close()

    def ask(self, *messages: Any, **more: Any) -> Any:
        return self.client.chat.completions.create(**{"model": "policy", "messages": [*messages], **more})

    def says(self, *messages: Any, **more: Any) -> str:
        return str(self.ask(*messages, **more).choices[0].message.content)

    def end(self, what: str = "reward", **body: Any) -> httpx.Response:
        return self.http.post(f"/episodes/{self.told['episode']}/{what}", json=body)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def world(url: str, **options: Any) -> Gateway:
    return Gateway(url=url, **{"splits": {"train": 3, "test": 2}, **options})


def count(messages: tuple[Message, ...], seed: int, number: int) -> str:
    return f"reply {len(messages)}"


def sent(url: str, play: Callable[[Agent], T], token: str = "none") -> T:
    """Return what an agent returns that takes an episode."""
    with closing(Agent(url, token=token)) as agent:
        return play(agent)


async def played(
    url: str,
    play: Play,
    *,
    reply: Any = count,
    context: int = 1000,
    model: ChatModel | None = None,
    max_steps: int = 9,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> tuple[Trajectory, Any, Gateway]:
    """Return an episode, what its agent returned, and its environment. Without a model, its replies
    are scripted.
    """
    model = model or ScriptedModel(reply, context_length=context)

    async def sample(request: Request) -> list[Generation]:
        (replies,) = await model.generate([request])
        return replies

    envs: list[Gateway] = []

    def make(_: str) -> Gateway:
        envs.append(world(url, **options))
        return envs[-1]

    instance = Instance(environment="gateway", split="train", index=1)
    with ThreadPoolExecutor(1) as outside:
        agent = asyncio.get_running_loop().run_in_executor(outside, sent, url, play, options.get("token", "none"))
        async with EnvironmentPool(make).lend(instance) as env:
            trajectory = await roll_out_episode(instance, env, sample, max_steps=max_steps, sampling=sampling, seed=1)
        return trajectory, await agent, envs[0]
