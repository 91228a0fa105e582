"""Demonstrations of actions alone, and an editor whose thoughts are scripted; run as a program, it
is killed before an answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asked import run_id_of
from door import Door
from planned import perform

from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.replies import after_label
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.store.database import Store
from agentr_core.types import Generation, Message, Request

WRONG, RIGHT = "say  Please!", "open"
Reply = Callable[[str, int], str]
"""(prompt, seed) -> the editor's reply."""


class Porch(Door):
    """A door that opens to the action `open` after a label."""

    def parse(self, reply: str) -> str:
        return after_label(reply)


class Editor(ScriptedModel):
    """Writes down each request that it answers; is killed before the answer of number `fatal`."""

    def __init__(self, reply: Reply, log: Path, fatal: int = 0) -> None:
        def say(messages: tuple[Message, ...], seed: int, number: int) -> str:
            return reply(messages[0].text, seed)

        super().__init__(say, name="editor")
        self._log, self._fatal = log, fatal

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        replies = []
        for request in requests:
            if self._fatal and len(answered(self._log)) + 1 == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            replies += await super().generate([request])
            with self._log.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps([request.messages[0].text, request.seed]) + "\n")
        return replies


def answered(log: Path) -> list[str]:
    """Return the requests that were answered, each as a line."""
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def musing(prompt: str, seed: int) -> str:
    """Think of how much was done before."""
    return f"Thought: I have seen {prompt.count('Observation:')} answers and try another."


def bare(folder: Path, *words: str, doors: int = 6) -> Path:
    """Return a file of demonstrations of a door each, with actions alone."""
    file = folder / "actions.jsonl"
    lines = []
    for index in range(doors):
        turns = [("human", "You stand."), ("gpt", "Ok."), ("human", f"Door {index}")]
        for word in words or (WRONG, RIGHT):
            turns += [("gpt", word), ("human", "So.")]
        messages = [{"from": role, "value": text} for role, text in turns[:-1]]
        lines.append(json.dumps({"id": index, "conversations": messages}))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def workplace(
    folder: Path, model: Path, file: Path, *overrides: str, reply: Reply = musing, fatal: int = 0
) -> RunContext:
    """Return a workplace of ETO whose expert's actions are in a file; the editor's answers are
    written down in `answered` of the folder.
    """
    recipe = parse(
        {
            "name": "porch",
            "method": "eto",
            "iterations": 2,
            "environment": {"name": "door"},
            "model": {"path": str(model)},
            "models": {"editor": {"path": str(model), "max_batch": 1}},
            "instances": {"train_limit": 0},
            "eto": {"phases": ["sft", "dpo"], "expert": {"file": str(file), "thoughts": {"enabled": True}}},
            "data": {"max_length": 4096},
            "evaluation": {"max_steps": 5, "revision_test": {"enabled": False}},
        },
        overrides,
    )
    return RunContext(
        recipe=recipe,
        method=method_of(recipe),
        run_id=run_id_of(recipe),
        root=folder / "runs",
        store=Store(folder / "runs" / "store.duckdb"),
        make_environment=lambda _: Porch(),
        load_model=lambda role, path: Editor(reply, folder / "answered", fatal),
        progress=lambda done, total, note: None,
    )


async def thought_of(ctx: RunContext, iteration: int = 1) -> dict[str, int]:
    """Do the stages of an iteration up to the thoughts; return what the last one tells."""
    await start_run(ctx)
    await begin_iteration(ctx, iteration)
    await perform("demonstrate", ctx, iteration)
    counts: dict[str, int] = await perform("think", ctx, iteration)
    return counts


if __name__ == "__main__":
    here, model, file = map(Path, sys.argv[1:4])
    asyncio.run(partial(thought_of, workplace(here, model, file, "scale.concurrency=1", fatal=int(sys.argv[4])))())
