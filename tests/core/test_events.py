"""What Prefect is told of an iteration, and that nobody has to listen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentr_core.methods.faults import parse
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, end_iteration, start_run
from agentr_core.store.codec.ledger import checkpoint_rows
from agentr_core.store.codec.samples import dataset_rows
from tasks import events
from tasks.wiring import RunRef, quiet_context, viewer_page

DEAF = """
from prefect.events import emit_event
assert emit_event("agentr.test", {"prefect.resource.id": "agentr.test"}) is not None
print("goes on")
"""


@pytest.fixture
def ctx(tmp_path: Path) -> RunContext:
    """A run whose first iteration has begun."""
    server = {"backend": "openai", "server": {"model": "m", "base_url": "http://nowhere/v1"}}
    recipe = parse({"name": "r", "model": server})
    context = quiet_context(RunRef(workspace=str(tmp_path / "ws"), run_id="r"), recipe)
    asyncio.run(start_run(context))
    asyncio.run(begin_iteration(context, 1))
    return context


def publish(ctx: RunContext) -> None:
    iteration_id = ctx.iteration_id(1)
    ctx.store.write(dataset_rows("d", [], iteration_id=iteration_id, content_hash="h", counts={}))
    ctx.store.write(checkpoint_rows("c", path="p", weights_sha256="w", config={}, iteration_id=iteration_id))
    ctx.store.update("iteration", {"iteration_id": iteration_id, "checkpoint_out": "c"})


@pytest.mark.slow
def test_each_thing_is_told_once_with_where_it_belongs(ctx: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    monkeypatch.setattr(events, "emit_event", lambda name, resource, **more: calls.append((name, resource, more)))
    monkeypatch.setenv("AGENTR_VIEW_URL", "http://viewer:4280/?token=secret")
    for _ in range(2):
        with events.send_product_events(ctx, 1, events.products_of_iteration(ctx, 1)):
            publish(ctx)
        with events.send_product_events(ctx, 1, events.products_of_iteration(ctx, 1)):
            asyncio.run(end_iteration(ctx, 1))
    with events.send_product_events(ctx, 0, events.products_of_iteration(ctx, 0)):
        asyncio.run(end_iteration(ctx, 0))
    assert [name for name, *_ in calls] == [events.DATASET, events.CHECKPOINT, events.FINISHED]
    assert len({more["id"] for *_, more in calls}) == 3
    for _, resource, more in calls:
        id_by_role = {each["prefect.resource.role"]: each["prefect.resource.id"] for each in more["related"]}
        iteration = f"agentr.iteration.{ctx.iteration_id(1)}"
        assert id_by_role["run"] == "agentr.run.r"
        assert id_by_role["store"] == f"agentr.store.{ctx.store.path}"
        assert iteration in (id_by_role.get("iteration"), resource["prefect.resource.id"])
        assert more["payload"]["page"].startswith("http://viewer:4280/")
        assert "secret" not in str(more)


def test_without_a_viewer_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTR_VIEW_URL", raising=False)
    assert viewer_page("run", "r") == ""
    monkeypatch.setenv("AGENTR_VIEW_URL", "http://127.0.0.1:4280/")
    assert viewer_page("run", "a/b") == "http://127.0.0.1:4280/run/a%2Fb"


@pytest.mark.slow
def test_a_server_that_does_not_listen_holds_nothing_up(tmp_path: Path) -> None:
    env = os.environ | {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = subprocess.run([sys.executable, "-c", DEAF], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
