"""How a run ends: its status, and one file that is the whole store."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from agentr_core.store import Store
from agentr_core.store.codec import run_rows
from tasks import runs
from tasks.wiring import STORE_FILE, RunRef


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    """A run that is under way, with a log of the database beside its file."""
    store = Store(tmp_path / "ws" / STORE_FILE)
    config = {"name": "r", "model": {"path": "m"}}
    store.write(run_rows("r", recipe="x", method="agent-r", config=config, versions={}, workspace="ws"))
    assert store.path.with_name(f"{STORE_FILE}.wal").stat().st_size
    return RunRef(workspace=str(store.path.parent), run_id="r", iterations=1)


async def end(run: RunRef, error: BaseException | None) -> None:
    async with runs.kept(run):
        if error is not None:
            raise error


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


async def evaluated(run: RunRef) -> None:
    async with runs.kept(run, evaluates=True):
        pass


@pytest.mark.parametrize(
    ("before", "after"),
    [("running", "running"), ("failed", "failed"), ("finished", "finished"), ("evaluating", "finished")],
)
def test_an_evaluation_ends_no_run_but_its_own(run: RunRef, before: str, after: str) -> None:
    store = Store(Path(run.workspace) / STORE_FILE)
    store.update("run", {"run_id": "r", "status": before})
    asyncio.run(evaluated(run))
    assert store.query("select status from run")["status"].tolist() == [after]
