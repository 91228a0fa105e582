"""Shards on workers that share nothing with the stage but the bytes they are sent, without a
cluster.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from asked import run_id_of
from door import Door
from echo import Echo

from agentr_core.errors import (
    EnvironmentFault,
    ErrorBudgetSpent,
    ModelDirectoryError,
    ModelUnavailable,
    WorkerLost,
)
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ModelRole
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.equipment import Distribute, Effort, Equipment, Shard, ShardResult, shard_result
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.stages.evaluate import evaluate
from agentr_core.store.database import Store
from agentr_core.types import Instance, Transition

CONTENT = (
    "select * exclude (created_at, writer) from tree order by all",
    "select * exclude (created_at) from node order by all",
    "select * from generation order by all",
    "select * exclude (created_at) from evaluation order by all",
    "select * exclude (created_at, environment_seconds, sampling_seconds) from episode order by all",
    "select * from step order by all",
)


class House(Door):
    """Doors some of which are `broken`."""

    def __init__(self, broken: Sequence[str] = ()) -> None:
        super().__init__()
        self._broken = broken

    def reset(self, instance: Instance) -> str:
        self._key = instance.key
        return super().reset(instance)

    def step(self, action: str) -> Transition:
        if self._key in self._broken:
            raise EnvironmentFault(f"door {self._key} fell out of its frame")
        return super().step(action)


class Workers:
    """Does what a cluster does with the pickled bytes of each shard; answers come back in the wrong
    order.

    After `lose_after` answers the cluster is lost.
    """

    def __init__(self, equipment: Equipment, *, lose_after: int | None = None) -> None:
        self.equipment = equipment
        self.given: list[int] = []
        self._lose_after = lose_after

    async def spread(self, shards: Sequence[Shard]) -> AsyncGenerator[ShardResult, None]:
        for number, shard in enumerate(reversed(shards)):
            if number == self._lose_after:
                raise WorkerLost("the worker is gone")
            self.given.append(len(shard))
            shard_copy = pickle.loads(pickle.dumps(shard))
            yield pickle.loads(pickle.dumps(await shard_result(shard_copy, self.equipment)))


Make = Callable[..., RunContext]


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Make:
    """Return a maker of workplaces with a store of their own each, by name."""

    def make(name: str, *overrides: str, broken: Sequence[str] = ()) -> RunContext:
        recipe = parse(
            {
                "name": "door",
                "environment": {"name": "door"},
                "model": {"path": str(tiny_model_dir)},
                "search": {"dives": 3, "width": 3, "depth": 5},
                "instances": {"train_limit": 0},
                "evaluation": {"max_steps": 5, "revision_test": {"cuts": 2, "max_steps": 5}},
                "scale": {"shard_size": 4},
                "errors": {"budget": 0.4, "retries": 0},
            },
            overrides,
        )
        return RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / name,
            store=open_store(tmp_path / name / "store.duckdb"),
            make_environment=lambda _: House(broken),
            load_model=lambda role, _: ScriptedModel(
                lambda messages, seed, number: f"word {fingerprint(seed, number)}"
            ),
            progress=lambda done, total, note: None,
        )

    return make


def hire(ctx: RunContext, **faults: Any) -> tuple[RunContext, Workers]:
    """Return the workplace with workers, who have its equipment but nothing of its store."""
    workers = Workers(
        Equipment(
            recipe=ctx.recipe,
            run_id=ctx.run_id,
            make_environment=ctx.make_environment,
            load_model=ctx.load_model,
            progress=ctx.progress,
        ),
        **faults,
    )
    distribute: Distribute = workers.spread
    return replace(ctx, distribute=distribute), workers


def content(ctx: RunContext) -> list[pd.DataFrame]:
    return [ctx.store.query(sql) for sql in CONTENT]


def same(one: list[pd.DataFrame], other: list[pd.DataFrame]) -> bool:
    return all(left.equals(right) and len(left) for left, right in zip(one, other, strict=True))


async def run(ctx: RunContext) -> None:
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await evaluate(ctx, 0)
    await collect(ctx, 1)


@pytest.mark.slow
async def test_workers_make_the_same_as_this_process(make: Make) -> None:
    local_ctx, (remote_ctx, workers) = make("here"), hire(make("there"))
    await run(local_ctx)
    await run(remote_ctx)

    assert same(content(local_ctx), content(remote_ctx))
    # Six held-out doors, the cuts of those that stayed shut, and six trees, four at a time.
    assert workers.given[:2] == [2, 4]
    assert workers.given[-2:] == [2, 4]
    spent = remote_ctx.store.query("select stage, sum(tokens) as tokens from timing group by all order by 1")
    assert spent["stage"].tolist() == ["collect", "evaluate revision_test", "evaluate test"]
    assert (spent["tokens"] > 0).all()


async def test_episodes_that_wait_together_wait_once(make: Make, tmp_path: Path) -> None:
    ctx = make("here")

    async def wait_seconds(environment: float, *, generate: float = 0.0) -> float:
        spent = Effort(environment_seconds=environment, generate_seconds=generate)
        batch = await shard_result(Echo(texts=("one",), folder=tmp_path, spent=spent), ctx)
        return batch.effort.environment_seconds

    assert 0 < await wait_seconds(1e6) < 600
    assert await wait_seconds(1e6, generate=1e6) == 0
    assert await wait_seconds(1e-9) == 1e-9


@pytest.mark.slow
async def test_what_came_back_before_the_cluster_was_lost_is_not_done_again(make: Make) -> None:
    local_ctx, broken_ctx = make("here"), make("there")
    await run(local_ctx)
    for stage in (evaluate, collect):
        await start_run(broken_ctx)
        await begin_iteration(broken_ctx, 1)
        with pytest.raises(WorkerLost):
            await stage(hire(broken_ctx, lose_after=1)[0], int(stage is collect))
        if stage is evaluate:
            assert broken_ctx.store.query("select count(*) as n from episode")["n"][0] == 2
            next_ctx, workers = hire(broken_ctx)
            await evaluate(next_ctx, 0)
            assert workers.given[0] == 4
    assert broken_ctx.store.query("select count(*) as n from tree where finished")["n"][0] == 2

    next_ctx, workers = hire(broken_ctx)
    await collect(next_ctx, 1)

    assert workers.given == [4]
    assert same(content(local_ctx), content(next_ctx))


@pytest.mark.slow
async def test_a_half_grown_tree_grows_on_with_a_worker(make: Make) -> None:
    local_ctx, remote_ctx = make("here"), make("there")
    await run(local_ctx)
    await start_run(remote_ctx)
    await begin_iteration(remote_ctx, 1)
    await evaluate(remote_ctx, 0)
    num_reports = 0

    def interrupt(done: int, total: int, note: str) -> None:
        nonlocal num_reports
        num_reports += 1
        if num_reports == 3:
            task.cancel()

    task = asyncio.create_task(collect(replace(remote_ctx, progress=interrupt), 1))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert remote_ctx.store.query("select count(*) as n from tree where not finished")["n"][0] > 0
    assert remote_ctx.store.query("select count(*) as n from node where parent >= 0")["n"][0] > 0

    await collect(hire(remote_ctx)[0], 1)

    assert same(content(local_ctx), content(remote_ctx))


@pytest.mark.slow
async def test_units_lost_on_workers_count_together(make: Make) -> None:
    broken = [f"door/train/{index}" for index in (0, 4, 5)]
    ctx, _ = hire(make("there", broken=broken))
    await start_run(ctx)
    await begin_iteration(ctx, 1)

    with pytest.raises(ErrorBudgetSpent, match=r"^3 of 6 trees failed on the workers and 2 may"):
        await collect(ctx, 1)

    events = ctx.store.query("select class, subject, level from event order by subject")
    assert events["subject"].tolist() == broken
    assert set(events["level"]) == {"error"}
    assert ctx.store.query("select count(*) as n from tree where finished")["n"][0] == 3
    assert ctx.store.query("select count(*) as n from episode")["n"][0] == 0


@pytest.mark.slow
async def test_tolerated_losses_leave_no_result(make: Make) -> None:
    ctx, _ = hire(make("there", broken=["door/test/1"]))
    await start_run(ctx)

    scores = await evaluate(ctx, 0)

    assert scores["test"]["n"] == 5
    assert ctx.store.query("select subject from event")["subject"].tolist() == ["door/test/1#0"]


@pytest.mark.slow
async def test_a_worker_with_other_weights_is_not_heard(make: Make, tmp_path: Path) -> None:
    ctx, _ = hire(make("there"))
    await start_run(ctx)
    ctx.store.update("checkpoint", {"checkpoint_id": ctx.trained_checkpoint(0).id, "weights_sha256": "0" * 64})

    with pytest.raises(ModelDirectoryError, match=r"^worker \S+/\d+: \S+ does not hold the weights of checkpoint"):
        await evaluate(ctx, 0)

    assert ctx.store.query("select count(*) as n from episode")["n"][0] == 0


@pytest.mark.slow
async def test_a_model_that_is_out_for_a_moment_is_for_the_task_to_try_again(make: Make) -> None:
    ctx = make("there")

    def out(role: ModelRole, path: Path) -> Any:
        raise ModelUnavailable("nobody answers")

    worker_ctx, _ = hire(replace(ctx, load_model=out))
    await start_run(worker_ctx)

    with pytest.raises(ModelUnavailable):
        await evaluate(worker_ctx, 0)


@pytest.mark.slow
async def test_a_run_goes_on_over_other_machines(make: Make) -> None:
    first_ctx, second_ctx = make("there"), make("there", "scale.runner=dask", "scale.address='tcp://one:1'")
    await start_run(first_ctx)
    await start_run(second_ctx)

    assert first_ctx.run_id == second_ctx.run_id
    configs = first_ctx.store.query("select config from run")["config"]
    assert len(configs) == 1
    assert "tcp://one:1" in configs[0]
