"""A schedule that asks for one more iteration each night: every night does new work, and one that
was cut short is taken up by the next.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import groups
import pytest
from click.testing import CliRunner

from agentr_core.errors import ConfigError, DataFault
from agentr_core.store.database import Store
from flows.cli import cli
from flows.commands.stores import faults
from flows.flywheel import flywheel
from flows.serving import deployments
from flows.stages import flow_of_stage
from tasks import stages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
FINISHED = "select iteration, checkpoint_in, checkpoint_out from iteration where status = 'finished' order by iteration"


@pytest.mark.long
def test_each_night_is_an_iteration_more(tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first night has the main of it, in test_schedules.py; that a run goes on where it was cut
    short, test_resume.py.
    """
    file = groups.write(tmp_path, door_model, more="grpo: {steps: 2, groups: 2}")
    store = Store(tmp_path / "runs" / "store.duckdb")

    def night() -> str:
        return str(asyncio.run(flywheel(str(file), more=1))["run_id"])

    run_id = night()
    with monkeypatch.context() as patch:
        perform = stages.perform

        async def cut_short(run: Any, iteration: int, name: str) -> Any:
            if (name, iteration) == ("evaluate", 2):
                raise RuntimeError("the power fails")
            return await perform(run, iteration, name)

        patch.setattr(stages, "perform", cut_short)
        with pytest.raises(RuntimeError, match="the power fails"):
            night()
    assert [iteration for iteration, *_ in store.rows(FINISHED)] == [0, 1]

    assert night() == run_id, "what was begun is taken to its end, and no further"
    done = store.rows(FINISHED)
    assert [iteration for iteration, *_ in done] == [0, 1, 2]
    assert [checkpoint_in for _, checkpoint_in, _ in done[1:]] == [checkpoint_out for *_, checkpoint_out in done[:-1]]
    assert len({checkpoint_out for *_, checkpoint_out in done}) == 3
    assert store.rows("select status, (config->>'$.iterations')::int from run") == [("finished", 2)]

    workspace = str(store.path.parent)
    with pytest.raises(DataFault, match="no checkpoint of iteration 3 yet"):
        asyncio.run(flow_of_stage("reinforce")(run_id, 4, workspace))
    with pytest.raises(ConfigError, match="iteration 3 has not begun; run its first stage, reinforce, before"):
        asyncio.run(flow_of_stage("evaluate")(run_id, 3, workspace))
    assert len(store.rows("select 1 from iteration")) == 3
    assert faults(store.path.parent) == []


def test_where_a_run_ends_is_said_once(tmp_path: Path, door_model: Path) -> None:
    file = groups.write(tmp_path, door_model)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"iterations": 3, "more": 1}, "iterations and more"),
        ({"more": 1, "overrides": ["seed=1", "iterations=3"]}, "more and override iterations=3"),
        ({"iterations": 2, "overrides": ["iterations=3"]}, "iterations and override iterations=3"),
    ]
    for arguments, names in cases:
        with pytest.raises(ConfigError, match=f"^{names}: .*; give only one$"):
            asyncio.run(flywheel(str(file), **arguments))
    result = CliRunner().invoke(cli, ["run", str(file), "--more", "1", "-o", "iterations=3"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "--more 1 and -o iterations=3 both say how far the run goes; give one of them"
    assert not (tmp_path / "runs").exists()


def test_the_form_of_a_deployment_checks_its_numbers(tmp_path: Path, door_model: Path) -> None:
    (deployment, *stage_deployments) = deployments([groups.write(tmp_path, door_model)])
    fields = deployment._parameter_openapi_schema.properties
    for name in ("iterations", "more"):
        assert (fields[name]["type"], fields[name]["minimum"], fields[name]["maximum"]) == ("integer", 0, 10_000)
    (evaluate,) = (entry for entry in stage_deployments if (entry.flow_name, entry.name) == ("stage", "evaluate"))
    stage = evaluate._parameter_openapi_schema.properties
    assert stage["iteration"]["minimum"] == 0
    assert stage["run_id"]["minLength"] == 1
