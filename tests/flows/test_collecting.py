"""The wheel in two halves: experience is gathered, in several goes, and trained on later; Prefect's
server is told of both.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import Counter
from pathlib import Path
from typing import Any

import groups
import pytest
from click.testing import CliRunner
from finished import finish
from prefect.client.orchestration import get_client
from readme import command
from wheel import LIGHT, PATIENCE

from agentr_core.errors import ConfigError
from agentr_core.store.codec.ledger import iteration_rows
from agentr_core.store.codec.samples import dataset_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import merge
from flows import local
from flows.cli import cli
from flows.collecting import collect_only, improve
from flows.serving import deployments
from flows.stages import flow_of_stage
from tasks.experience import report_collected
from tasks.wiring import RunRef

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
TREES = (
    "select i.iteration, count(*) from tree t join iteration i using (iteration_id) where t.finished group by 1 "
    "order by 1"
)


async def events_of(run_id: str, expected: Counter[str]) -> list[dict[str, Any]]:
    """Return the events of a run as the server has them, once there are as many of each name as
    expected. They are sent in the background, those of each flow by themselves.
    """
    query = {"filter": {"related": {"id": [f"agentr.run.{run_id}"]}, "event": {"prefix": ["agentr."]}}}
    deadline = time.monotonic() + PATIENCE
    async with get_client() as client:
        while True:
            events: list[dict[str, Any]] = (await client._client.post("/events/filter", json=query)).json()["events"]
            if expected <= Counter(event["event"] for event in events):
                return events
            assert time.monotonic() < deadline, events
            await asyncio.sleep(0.5)


def test_experience_is_gathered_in_goes_and_trained_on_as_it_is(recipe: Path) -> None:
    store = Store(recipe.parent / "runs" / "store.duckdb")
    first = asyncio.run(collect_only(str(recipe), LIGHT, limit=2, enough=1000))
    assert first["iteration"] == 1
    assert first["new"] == first["trajectories"] > 0
    assert store.rows(TREES) == [(1, 2)]
    assert store.rows("select status from run") == [("collecting",)]
    second = asyncio.run(collect_only(str(recipe), LIGHT, limit=2))
    assert second["trajectories"] - second["new"] == first["trajectories"]
    assert store.rows(TREES) == [(1, 4)]
    assert not store.rows("select * from dataset")

    idle_result = asyncio.run(improve(str(recipe), LIGHT, enough=second["trajectories"] + 1))
    assert not idle_result["trained"]
    assert store.rows("select count(*) from critique") == [(0,)]
    result = asyncio.run(improve(str(recipe), LIGHT, enough=second["trajectories"]))
    assert result["trained"]
    assert store.rows(TREES) == [(1, 4)], "improve gathers nothing"
    assert store.rows("select iteration, status from iteration order by 1") == [(0, "finished"), (1, "finished")]
    assert store.rows("select status from run") == [("finished",)]

    assert asyncio.run(flow_of_stage("collect")(first["run_id"], 1, str(store.path.parent))) is None
    assert store.rows(TREES) == [(1, 4)], "what has a dataset is complete"
    assert not asyncio.run(improve(str(recipe), LIGHT))["trained"], "nothing was gathered since"

    expected = Counter(
        {
            "agentr.trajectories.collected": 2,
            "agentr.dataset.published": 1,
            "agentr.checkpoint.published": 1,
            "agentr.iteration.finished": 1,
        }
    )
    # A random model's replies raise alarms, too.
    events = [
        event for event in asyncio.run(events_of(first["run_id"], expected)) if event["event"] != "agentr.alarm.raised"
    ]
    assert Counter(event["event"] for event in events) == expected
    event_by_key = {(event["event"], event["resource"].get("agentr.enough")): event for event in events}
    assert ("agentr.trajectories.collected", "false") in event_by_key
    collection = event_by_key["agentr.trajectories.collected", "true"]
    assert collection["payload"]["parameters"] == {"recipe": str(recipe), "overrides": LIGHT, "enough": 1}
    (checkpoint,) = store.rows("select checkpoint_out, iteration_id from iteration where iteration = 1")
    publication = event_by_key["agentr.checkpoint.published", None]
    assert publication["resource"]["prefect.resource.id"] == f"agentr.checkpoint.{checkpoint[0]}"
    id_by_role = {
        resource["prefect.resource.role"]: resource["prefect.resource.id"] for resource in publication["related"]
    }
    assert id_by_role["run"] == f"agentr.run.{first['run_id']}"
    assert id_by_role["iteration"] == f"agentr.iteration.{checkpoint[1]}"
    assert id_by_role["store"] == f"agentr.store.{store.path}"
    assert id_by_role["flow-run"].startswith("prefect.flow-run.")


@pytest.mark.parametrize(
    ("status", "data", "events"),
    [("collecting", [], 1), ("finished", [], 1), ("running", [], 2), ("running", ["d"], 2), ("failed", ["d"], 2)],
)
def test_a_training_that_came_to_no_end_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, data: list[str], events: int
) -> None:
    ctx = finish(tmp_path, "aaaa000000000001", [set()])
    ctx.store.update("run", {"run_id": ctx.run_id, "status": status})
    iteration_id = ctx.iteration_id(1)
    data_rows = [dataset_rows(key, [], iteration_id=iteration_id, content_hash="feed", counts={}) for key in data]
    ctx.store.write(merge([iteration_rows(iteration_id, run_id=ctx.run_id, iteration=1), *data_rows]))
    ids: list[Any] = []
    monkeypatch.setattr("tasks.events.emit_event", lambda *words, id, **more: ids.append(id))
    run = RunRef(workspace=str(tmp_path), run_id=ctx.run_id)
    for _ in range(2):
        report_collected(run, ctx.recipe, 1, enough=1, training_parameters={})
    assert (len(ids), len(set(ids))) == (2, events), "the server keeps one of several events with the same id"


def test_training_that_samples_for_itself_is_not_taken_apart(tmp_path: Path, door_model: Path) -> None:
    file = groups.write(tmp_path, door_model)
    for half in (collect_only, improve):
        with pytest.raises(ConfigError, match=r"iteration 1 of recipe groups .* gathers nothing before it trains"):
            asyncio.run(half(str(file)))
    assert [deployment.flow_name for deployment in deployments([file])][:2].count("collect-only") == 0


def test_the_command_that_is_told_can_be_copied(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe.rename(recipe.with_name("my door.yaml"))
    done = {"new": 1, "trajectories": 2, "iteration": 1, "run_id": "r", "table": "", "report": ""}
    monkeypatch.setattr(local, "_run", lambda *_, **__: done)

    collect_words = local.collect_recipe(path, ["seed=2"], limit=None, enough=1).splitlines()[-1]
    run_words = local.run_recipe(path, ["workspace=my runs"]).splitlines()[-1]

    assert shlex.split(collect_words) == ["train", "agentr", "improve", str(path), "-o", "seed=2"]
    assert shlex.split(run_words)[-2:] == ["-w", "my runs"]


def test_the_commands_of_the_readme_gather_and_train(recipe: Path) -> None:
    def ask(start: str) -> str:
        _, name, _, *options = shlex.split(command(start))
        words = [name, str(recipe), *options, "-o", "instances.train_limit=1"]
        return CliRunner().invoke(cli, words, catch_exceptions=False).output

    output = ask("agentr collect ")
    assert "in all for iteration 1" in output
    assert f"agentr improve {recipe}" in output
    assert "of 400 trajectories are gathered; nothing is trained" in ask("agentr improve ")
