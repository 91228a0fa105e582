"""Runs that are over, as rows alone: nothing is played or trained."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentr_core.recipes.environments import REVISION, TEST
from agentr_core.runtime.context import RunContext
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.store.codec.ledger import checkpoint_rows, evaluation_rows, iteration_rows, run_rows, timing_rows
from agentr_core.store.codec.trajectories import episode_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Instance, Step, StopReason, Trajectory
from tasks.wiring import RunRef, quiet_context
from tasks.workspaces import STORE_FILE


def finish(
    workspace: Path, run_id: str, wins: list[set[int]], *, episodes: int = 20, method: str = "agent-r", **recipe: Any
) -> RunContext:
    """Store a finished run whose models, from the base on, solve the test instances of the given
    numbers, and return its workplace.
    """
    store = Store(workspace / STORE_FILE)
    config = {"name": f"toy-{method}", "method": method, "model": {"path": "m"}, "environment": {"name": "toy"}}
    run = {"recipe": config["name"], "method": method, "config": config | recipe, "versions": {"agentr": "1"}}
    start = datetime(2026, 1, 2, tzinfo=UTC)
    rows = run_rows(run_id, **run, workspace=str(workspace), started_at=start, status="finished", finished_at=start)  # type: ignore[arg-type]
    store.write(rows)
    ctx = quiet_context(RunRef(workspace=str(workspace), run_id=run_id))
    store.write(merge(unit for number in range(len(wins)) for unit in _iteration(ctx, number, wins, episodes)))
    return ctx


def ended(rows: Rows, *, at: datetime | None = None) -> Rows:
    """Return the row of an iteration as it is once that has ended, at a time in UTC."""
    return {"iteration": [{**row, "status": "finished", "finished_at": at} for row in rows["iteration"]]}


def _iteration(ctx: RunContext, number: int, wins: list[set[int]], episodes: int) -> list[Rows]:
    key, checkpoint = ctx.iteration_id(number), f"{ctx.run_id}-c{number}"
    parent = f"{ctx.run_id}-c{number - 1}" if number else None
    evaluation = evaluation_id(ctx, number, TEST)
    return [
        ended(
            iteration_rows(key, run_id=ctx.run_id, iteration=number, checkpoint_in=parent, checkpoint_out=checkpoint),
            at=datetime(2026, 1, 2, number),
        ),
        checkpoint_rows(
            checkpoint,
            path=f"m{number}",
            weights_sha256=checkpoint,
            config={},
            parent_id=parent,
            iteration_id=key if number else None,
        ),
        evaluation_rows(
            evaluation, iteration_id=key, checkpoint_id=checkpoint, name=TEST, split="test", config={}, finished=True
        ),
        timing_rows(key, "collect", {"generate": 90.0, "environment": 5.0}, tokens=100),
        *(
            episode_rows(
                f"{evaluation}-{index}",
                played(index, success=index in wins[number]),
                evaluation_id=evaluation,
                iteration_id=key,
            )
            for index in range(episodes)
        ),
    ]


def revise(ctx: RunContext, number: int, *, given: str, wins: set[int], episodes: int = 4) -> None:
    """Store the revision test of a model, whose episodes go on from one step with the reply
    `given`.
    """
    key, evaluation = ctx.iteration_id(number), evaluation_id(ctx, number, REVISION)
    ctx.store.write(
        merge(
            [
                evaluation_rows(
                    evaluation,
                    iteration_id=key,
                    checkpoint_id=f"{ctx.run_id}-c{number}",
                    name=REVISION,
                    split="test",
                    config={},
                    finished=True,
                ),
                *(
                    episode_rows(
                        f"{evaluation}-{index}",
                        after(given, played(index, success=index in wins)),
                        evaluation_id=evaluation,
                        iteration_id=key,
                        cut=1,
                    )
                    for index in range(episodes)
                ),
            ]
        )
    )


def after(given: str, trajectory: Trajectory) -> Trajectory:
    """Return an episode that goes on from one step more."""
    step = Step(reply=given, action=given, observation="here", reward=0.0, terminated=False, success=False)
    return replace(trajectory, steps=(step, *trajectory.steps))


def played(index: int, *, success: bool) -> Trajectory:
    """Return an episode of one step."""
    step = Step(
        reply="go",
        action="go",
        observation="there",
        reward=float(success),
        terminated=success,
        success=success,
    )
    return Trajectory(
        instance=Instance(environment="toy", split="test", index=index),
        first_observation="Start.",
        steps=(step,),
        reward=float(success),
        success=success,
        stop=StopReason.SUCCESS if success else StopReason.STEP_LIMIT,
    )
