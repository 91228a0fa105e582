"""A flywheel on a few questions, with models whose words tests fix: real world, real store, code
that is really run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asked import run_id_of
from toolboxes import Bench

from agentr_core.environment import Environment
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.methods.et_agent.evolve import evolve
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ModelRole
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.store.database import Store
from agentr_core.types import Generation, Message, Request

Script = Callable[[str, int], str]
"""What a model says, given what it is asked and the seed. The actor is given its turn so far, or
all turns of a world that has several."""

MATH = Problem(id="m", question="What is 6 times 7, halved?", golds=("21",), source="made", domain="math")
RIVER = Problem(
    id="k", question="On which river does Ostra lie?", golds=("Red River",), source="made", domain="knowledge"
)
PASSAGES = {"Ostra": "Ostra lies on the Red River.", "Red River": "The Red River is 90 km long."}

TWICE = "<think>b</think>\n<python>print(42)</python>"
HALVED = "<think>c</think>\n<python>print(42 // 2)</python>"
RIGHT = "<think>So it is.</think>\n<answer>It is \\boxed{21}.</answer>"
WRONG = "<think>I guess.</think>\n<answer>It is \\boxed{42}.</answer>"


@dataclass
class Staff:
    """The models of a run by role, and what each was asked."""

    scripts: Mapping[str, Script]
    asked: list[tuple[str, Request]] = field(default_factory=list)
    before: Callable[[str, Request], None] = lambda role, request: None
    """Is called before each reply; may raise."""

    def model(self, role: ModelRole, path: Path) -> ScriptedModel:
        return _Member(self, role)

    def requests(self, role: str) -> list[Request]:
        return [request for name, request in self.asked if name == role]


class _Member(ScriptedModel):
    def __init__(self, staff: Staff, role: str) -> None:
        def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
            return staff.scripts[role](_heard("actor" if role == "teacher" else role, messages), seed)

        super().__init__(reply, name=role)
        self._staff = staff
        self._role = role

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        for request in requests:
            self._staff.before(self._role, request)
        self._staff.asked += [(self._role, request) for request in requests]
        return await super().generate(requests)


def _heard(role: str, messages: Sequence[Message]) -> str:
    if role != "actor":
        return "\n".join(message.text for message in messages)
    if messages[0].role == "system":
        return messages[-1].text if messages[-1].role == "assistant" else ""
    return "\n\n".join(message.text for message in messages)


def by_turn(*replies: str, then: str = RIGHT) -> Script:
    """Return an actor that says these replies in their order, counted by results, then `then`."""

    def script(turn: str, seed: int) -> str:
        number = turn.count("</result>")
        return replies[number] if number < len(replies) else then

    return script


async def begun(
    root: Path,
    model: Path,
    staff: Staff,
    flywheel: Mapping[str, Any],
    *,
    problems: Sequence[Problem] = (MATH,),
    make_environment: Callable[[], Environment] | None = None,
    tools: Bench | None = None,
    **more: Any,
) -> RunContext:
    """Return a workplace with its first iteration begun. Reflector and editor are models of their
    own.
    """
    bench = tools or Bench(PASSAGES)
    held_out = (Problem(id="t", question="What is 1 + 1?", golds=("2",), source="made", domain="math"),)
    questions = {"train": tuple(problems), "test": held_out}
    recipe = parse(
        {
            "name": "family",
            "method": "et-agent",
            "environment": {"name": "reasoning"},
            "model": {"path": str(model)},
            # Roles whose models are the same share one.
            "models": {"reflector": {"path": str(model)}, "editor": {"path": str(model), "max_batch": 7}},
            "et_agent": {"phases": ["rft"], "flywheel": dict(flywheel)},
            "evaluation": {"revision_test": {"enabled": False}},
            "errors": {"retries": 0, "budget": 0},
        }
        | more
    )
    ctx = RunContext(
        recipe=recipe,
        method=method_of(recipe),
        run_id=run_id_of(recipe),
        root=root,
        store=Store(root / "store.duckdb"),
        make_environment=lambda _: (
            make_environment() if make_environment else ReasoningWorld(questions, bench, Rules(extra_calls=2))
        ),
        load_model=staff.model,
        progress=lambda done, total, note: None,
    )
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    return ctx


def texts(ctx: RunContext, operator: str) -> list[str]:
    """Return the whole turns of what an operator made, in the order of their names."""
    return [
        text
        for (text,) in ctx.store.rows(
            "select string_agg(s.reply || s.observation, '' order by s.position) from trajectory t "
            "left join derivation d on d.child_id = t.trajectory_id join step s on s.trajectory_id = t.trajectory_id "
            "where t.source = 'flywheel' and coalesce(d.operator, 'fresh') = ? "
            "group by t.trajectory_id, d.round order by d.round, t.trajectory_id",
            operator,
        )
    ]


FAMILY = {"rounds": 3, "correct": ["C0", "C1", "C2"], "incorrect": ["I1", "I2", "I3", "I4"]}
"""A flywheel in which each operator comes to pass with `cast`."""


def cast() -> Staff:
    """Return models that are wrong at first, are hinted to the right answer, and are right from
    there on. What they say depends on what they are asked alone.
    """
    return Staff({"actor": _actor, "editor": _editor, "reflector": _reflector})


def _actor(turn: str, seed: int) -> str:
    if turn.endswith("</result>\n"):
        return RIGHT if "// 2" in turn else WRONG
    if turn:
        return " So I halve it.</think>\n<python>print(42 // 2)</python>"
    return TWICE


def _editor(asked: str, seed: int) -> str:
    if "thoughts" in asked:
        return "\n".join(f"Thought {number + 1}: Short." for number in range(asked.count("\nDone:")))
    if "got it right" in asked:
        return "Step: 1\nAnalysis: Twice.\nCorrected Step: <think>At once.</think><python>print(42 // 2)</python>"
    return "Step: 1\n"


def _reflector(asked: str, seed: int) -> str:
    if asked.endswith(("Analysis:", "again.")):
        return " I forgot to halve."
    return HALVED


def answers_of(ctx: RunContext) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows that a flywheel and its selection leave, without times."""
    return {
        table: ctx.store.rows(f"select * exclude ({left_out}) from {table} order by all")
        for table, left_out in {
            "family": "created_at",
            "edit": "created_at",
            "derivation": "created_at",
            "trajectory": "created_at",
            "rejection": "created_at",
            "sample": "created_at",
        }.items()
    }


async def _run_until_killed(root: Path, model: Path, replies: int) -> None:
    """Grow two families slowly, and be killed before the reply of a number."""
    staff, countdown = cast(), replies

    def count_down(role: str, request: Request) -> None:
        nonlocal countdown
        countdown -= 1
        # What was said before is stored by now.
        time.sleep(0.8)
        if not countdown:
            os.kill(os.getpid(), signal.SIGKILL)

    staff.before = count_down
    await evolve(await begun(root, model, staff, FAMILY, problems=(MATH, RIVER)), 1)


if __name__ == "__main__":
    asyncio.run(_run_until_killed(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
