"""How a run ends: its status, and one file that is the whole store."""

from __future__ import annotations

import asyncio
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from agentr_core.methods.faults import parse
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import start_run
from agentr_core.store.codec.ledger import run_rows
from agentr_core.store.database import Store
from tasks import runs
from tasks.wiring import RunRef, quiet_context
from tasks.workspaces import STORE_FILE


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    """A run that is under way, with a log of the database beside its file."""
    store = Store(tmp_path / "ws" / STORE_FILE)
    config = {"name": "r", "model": {"path": "m"}}
    store.write(run_rows("r", recipe="x", method="agent-r", config=config, versions={}, workspace="ws"))
    assert store.path.with_name(f"{STORE_FILE}.wal").stat().st_size
    return RunRef(workspace=str(store.path.parent), run_id="r")


async def end(run: RunRef, error: BaseException | None) -> None:
    async with runs.status_recorded(run):
        if error is not None:
            raise error


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [(None, "finished"), (RuntimeError("x"), "failed")])
def test_the_database_file_alone_is_the_store_after_a_run(
    run: RunRef, tmp_path: Path, error: BaseException | None, status: str
) -> None:
    if error is None:
        asyncio.run(end(run, None))
    else:
        with pytest.raises(RuntimeError):
            asyncio.run(end(run, error))
    copy = tmp_path / "alone.duckdb"
    shutil.copyfile(Path(run.workspace) / STORE_FILE, copy)
    assert Store(copy).query("select status from run")["status"].tolist() == [status]


def test_an_interrupted_run_stays_under_way(run: RunRef) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(end(run, asyncio.CancelledError()))
    store = Store(Path(run.workspace) / STORE_FILE)
    assert store.query("select status from run")["status"].tolist() == ["running"]


async def record_evaluation(run: RunRef) -> None:
    async with runs.status_recorded(run, evaluates=True):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("running", "running"), ("failed", "failed"), ("finished", "finished"), ("evaluating", "finished")],
)
def test_an_evaluation_ends_no_run_but_its_own(run: RunRef, before: str, after: str) -> None:
    store = Store(Path(run.workspace) / STORE_FILE)
    store.update("run", {"run_id": "r", "status": before})
    asyncio.run(record_evaluation(run))
    assert store.query("select status from run")["status"].tolist() == [after]


def context_of(run: RunRef, *overrides: str) -> RunContext:
    server = {"backend": "openai", "server": {"model": "m", "base_url": "http://nowhere/v1"}}
    return quiet_context(run, parse({"name": "r", "model": server}, overrides))


def row(store: Store) -> tuple[object, ...]:
    (record,) = store.answer(
        "select status, finished_at, config->>'$.iterations' as n, config->>'$.scale.concurrency' as c from run"
    ).to_pylist()
    return tuple(record.values())


@pytest.mark.slow
@pytest.mark.parametrize("status", ["running", "failed", "finished"])
def test_an_evaluation_of_a_begun_run_takes_new_settings_and_leaves_the_rest(tmp_path: Path, status: str) -> None:
    run = RunRef(workspace=str(tmp_path / "ws"), run_id="r")
    ctx = context_of(run, "iterations=5")
    asyncio.run(start_run(ctx))
    finished_at = None if status == "running" else datetime(2026, 1, 2)
    ctx.store.update("run", {"run_id": "r", "status": status, "finished_at": finished_at})
    asyncio.run(start_run(context_of(run, "iterations=2", "scale.concurrency=7"), evaluates=True))
    assert row(ctx.store) == (status, finished_at, "5", "7")


@pytest.mark.slow
def test_an_evaluation_alone_is_one_until_it_is_done(tmp_path: Path) -> None:
    run = RunRef(workspace=str(tmp_path / "ws"), run_id="r")
    ctx = context_of(run)
    for _ in range(2):
        asyncio.run(start_run(ctx, evaluates=True))
        assert row(ctx.store)[0] == "evaluating"
    asyncio.run(record_evaluation(run))
    assert row(ctx.store)[0] == "finished"
    asyncio.run(start_run(ctx))
    assert row(ctx.store)[:2] == ("running", None)
