"""Rollouts of a taskset of verifiers on a gateway, four at once: `verifiers_rollouts.py PYTHON`,
the Python that `make test-agents` makes.

The policy says some words and not others; prints what is stored, and fails unless each reward is
that of its own task, and a task that cannot be scored is a failure.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from agentr_core.environments.gateway.world import Gateway
from agentr_core.episodes.rollout import EnvironmentPool, roll_out_episode
from agentr_core.errors import EnvironmentFault
from agentr_core.models.scripted import ScriptedModel
from agentr_core.types import Generation, Instance, Message, Request, Sampling, Trajectory

ROOT = Path(__file__).parents[2]
EXPECTED = [("train", 0, 1.0), ("train", 1, 0.0), ("test", 0, 1.0), ("test", 1, "no word of the taskset")]


def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
    word = messages[-1].text.split()[-1]
    return f"It is {word}" if word in ("oak.", "moss.") else "I do not know."


async def episodes(url: str) -> list[Trajectory | BaseException]:
    """Return what becomes of the four tasks, in the order of `EXPECTED`."""
    model = ScriptedModel(reply, context_length=1_000_000)
    pool = EnvironmentPool(lambda _: Gateway(url=url, splits={"train": 2, "test": 2}, patience_s=120))

    async def sample(request: Request) -> list[Generation]:
        (replies,) = await model.generate([request])
        return replies

    async def roll_out(split: str, index: int) -> Trajectory:
        instance = Instance(environment="gateway", split=split, index=index)
        async with pool.lend(instance) as env:
            return await roll_out_episode(instance, env, sample, max_steps=12, sampling=Sampling(), seed=1)

    return await asyncio.gather(*(roll_out(split, index) for split, index, _ in EXPECTED), return_exceptions=True)


def main(python: Path) -> int:
    """Play the tasks; return 1 if one came to something else."""
    serve = [sys.executable, "-c", "from flows.cli import main; main()", "gateway", "--port", "0"]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        (url,) = re.findall(r"(http://\S+)/episodes", gateway.stdout.readline())
        agent = [str(python), str(ROOT / "deployments/agents/verifiers_taskset.py"), url, "guess_taskset", "4"]
        with subprocess.Popen(agent, env=environment) as rollouts:
            try:
                results = asyncio.run(episodes(url))
            finally:
                rollouts.terminate()
                gateway.terminate()
    wrong = 0
    for (split, index, expected), result in zip(EXPECTED, results, strict=True):
        is_right = (
            result.reward == expected
            if isinstance(result, Trajectory)
            else isinstance(result, EnvironmentFault) and str(expected) in str(result)
        )
        wrong += not is_right
        outcome = f"reward {result.reward:g}" if isinstance(result, Trajectory) else str(result)
        sys.stdout.write(f"{split} {index}: {outcome}{'' if is_right else f', and not {expected}'}\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
