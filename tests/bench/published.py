"""The published way of growing trees, to measure ours against.

One tree at a time; each reply is a request of its own to Transformers' `generate`; the environment
is a server, and each child of a node is reached by a reset and a replay of the whole way. Source:
the released code of Agent-R (arXiv 2501.11425) on AgentGym's environment servers (arXiv
2406.04151). This one is a little faster: connections are kept open, and the first child of a node
is stepped where the environment stands.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import torch
from measures import Clock
from transformers import AutoModelForCausalLM

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.samples.rendering import Renderer
from agentr_core.search.grow import grow
from agentr_core.types import Generation, Instance, Request, Transition, Tree

Replies = Mapping[tuple[str, int], Sequence[Generation]]
"""Recorded replies by session and seed of the request."""


class ServedTextCraft(TextCraft):
    """TextCraft behind HTTP, without snapshots. It parses replies and lists instances itself."""

    can_snapshot = False
    blocking = True

    def __init__(self, url: str) -> None:
        super().__init__()
        self._client = httpx.Client(base_url=url)
        self._id = self._client.post("/create").json()["id"]

    def reset(self, instance: Instance) -> str:
        body = {"id": self._id, "split": instance.split, "index": instance.index}
        return str(self._client.post("/reset", json=body).json()["observation"])

    def step(self, action: str) -> Transition:
        return Transition(**self._client.post("/step", json={"id": self._id, "action": action}).json())

    def processor_seconds(self) -> float:
        """Return the processor time of the server so far."""
        return float(self._client.get("/processor_seconds").json())

    def close(self) -> None:
        self._client.close()


@contextmanager
def environment_server() -> Iterator[str]:
    """Run the server in a process of its own for the length of the block; return its address."""
    command = [sys.executable, str(Path(__file__).with_name("environment_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


class OneByOne:
    """Asks `generate` for one reply at a time, as long as the recorded one, and returns the
    recorded one.

    So the slow way grows the very trees that the fast way grew, with as many tokens. `replies`
    counts them. `threads` are those of a matrix product on a CPU.
    """

    def __init__(
        self, path: Path, renderer: Renderer, recorded: Replies, *, dtype: str, device: torch.device, threads: int
    ) -> None:
        self.replies = 0
        self._threads = threads
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
        self._renderer = renderer
        self._recorded = recorded

    async def sample(self, request: Request) -> list[Generation]:
        """Return the recorded replies to a request."""
        generations = self._recorded[request.session, request.seed]
        for generation in generations:
            await asyncio.to_thread(self._draw, request, len(generation.token_ids))
            self.replies += 1
        return list(generations)

    @torch.inference_mode()
    def _draw(self, request: Request, tokens: int) -> None:
        # Here, for each thread of Python has a number of its own.
        torch.set_num_threads(self._threads)
        prompt = torch.tensor([self._renderer.render_prompt(request.messages)], device=self._model.device)
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )


def _without_states(tree: Tree) -> Tree:
    nodes = (replace(node, step=node.step and replace(node.step, state_key=None)) for node in tree.nodes)
    return replace(tree, nodes=tuple(nodes))


async def grow_one_by_one(
    trees: Sequence[Tree], config: SearchConfig, sampler: OneByOne, url: str, clock: Clock
) -> float:
    """Grow trees again, one after the other, and return the seconds it took, in processor time with
    the server's.

    Raises `ValueError` if one comes out differently.
    """
    env = ServedTextCraft(url)
    try:
        start, server_start = clock(), env.processor_seconds()
        for tree in trees:
            new_tree = await grow(tree.instance, env, sampler.sample, config, seed=tree.seed)
            # The published way has its world behind HTTP, whose state is not known here.
            if _without_states(new_tree) != _without_states(tree):
                raise ValueError(f"the tree of {tree.instance.key} came out differently")
        seconds = clock() - start
        return seconds + (env.processor_seconds() - server_start if clock is time.process_time else 0.0)
    finally:
        env.close()
