"""ETO: own successes, then pairs and DPO, to a report; and again under Prefect, with nothing left
to do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from turning import turn

from agentr_core.errors import ConfigError
from agentr_core.methods.faults import parse
from agentr_core.methods.table import plan_of
from agentr_core.store.database import Store
from flows import local
from flows.commands.exporting import export_folder
from flows.commands.plan import describe
from flows.flywheel import flywheel
from flows.preflight.checks import check
from tasks.wiring import load_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
RECIPE = """\
name: door-eto
method: eto
workspace: {workspace}
iterations: 2
environment: {{name: door}}
model: {{path: {model}, device: cpu, max_batch: 16}}
eto:
  phases: [rft, dpo]
  explore: {{samples: 8, max_steps: 4, max_new_tokens: 6}}
  preferences: {{against: own}}
  dpo:
    learning_rate: [1.0e-3]
    num_train_epochs: [2]
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 1
training:
  num_train_epochs: [1]
  per_device_train_batch_size: 4
  learning_rate: 1.0e-3
  bf16: false
  num_threads: 1
evaluation:
  temperature: 1.0
  max_steps: 4
  max_new_tokens: 6
  revision_test: {{enabled: false}}
"""


def test_published_rejection_sampling_plays_the_expert_first() -> None:
    config = {"name": "r", "method": "eto", "model": {"path": "m"}, "eto": {"phases": ["sft", "rft"]}}
    rest = ["dataset", "train", "evaluate"]
    assert [stage.name for stage in plan_of(parse(config), 2).stages] == ["explore", *rest]
    recipe = parse(config, ["eto.rft=with_expert"])
    assert [stage.name for stage in plan_of(recipe, 2).stages] == ["demonstrate", "explore", *rest]


class DoorRun:
    """A run of the recipe that is over."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.recipe = folder / "door-eto.yaml"
        self.root = folder / "runs"
        self.recipe.write_text(RECIPE.format(workspace=self.root, model=model), encoding="utf-8")
        done = asyncio.run(turn(self.recipe))
        self.run_id, self.report = done.run_id, done.report

    def ask(self, sql: str) -> pd.DataFrame:
        return Store(self.root / "store.duckdb").query(sql)


@pytest.fixture(scope="module")
def turned(door_installed: None, door_model: Path, tmp_path_factory: pytest.TempPathFactory) -> DoorRun:
    return DoorRun(tmp_path_factory.mktemp("eto"), door_model)


def test_each_iteration_trains_the_model_of_the_one_before(turned: DoorRun) -> None:
    rows = turned.ask(
        "select i.iteration, c.parent_id, i.checkpoint_in, (c.config->'preference') is not null as dpo "
        "from iteration i join checkpoint c on c.checkpoint_id = i.checkpoint_out order by 1"
    )

    assert rows["iteration"].tolist() == [0, 1, 2]
    assert rows["dpo"].tolist() == [False, False, True]
    assert (rows["parent_id"] == rows["checkpoint_in"])[1:].all()
    assert turned.ask("select status from run")["status"].tolist() == ["finished"]
    assert turned.ask("select iteration from v_iterations order by 1")["iteration"].tolist() == [0, 1, 2]
    assert turned.ask("select * from v_orphans").empty
    assert turned.ask("select * from event").empty


def test_a_preference_checkpoint_leads_back_to_episodes_and_seeds(turned: DoorRun) -> None:
    lineage = turned.ask(
        "select d.position, p.kind, s.source, s.instance_id, s.seed, p.margin from checkpoint c "
        "join dataset_row d using (dataset_id) "
        "join v_preferences p on d.sample_id in (p.chosen_sample_id, p.rejected_sample_id) "
        "join v_steps s on s.trajectory_id = "
        "if(d.sample_id = p.chosen_sample_id, p.chosen_trajectory_id, p.rejected_trajectory_id) "
        "where (c.config->'preference') is not null"
    )

    assert set(lineage["kind"]) == {"own"}
    assert set(lineage["source"]) == {"rollout"}
    assert (lineage["margin"] == 1).all()
    assert not lineage.isna().any(axis=None)
    assert set(lineage["position"]) == set(range(2 * turned.ask("select count(*) n from preference")["n"][0]))


def test_training_steps_are_stored_and_reported(turned: DoorRun) -> None:
    steps = turned.ask("select * from training_step where reward_accuracy is not null order by step")
    page = turned.report.with_suffix(".md").read_text(encoding="utf-8")

    assert steps["loss"][0] == pytest.approx(0.6931, abs=1e-3), "policy and reference begin as one"
    assert steps["chosen_rewards"].iloc[-1] > steps["rejected_rewards"].iloc[-1]
    assert (steps["grad_norm"] > 0).all()
    assert steps["learning_rate"][0] == 0, "warmup begins there"
    assert (steps["learning_rate"][1:] > 0).all()
    counts = turned.ask("select iteration, count(*) as steps from v_training_steps group by 1 order by 1")
    assert counts["iteration"].tolist() == [1, 2]
    assert counts["steps"].sum() == turned.ask("select count(*) as n from training_step")["n"][0]
    assert "## Preference pairs" in page
    assert "Reward accuracy" in page
    assert 'stroke-dasharray="4 3"' in turned.report.read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_flow_that_finds_all_done_does_nothing_new(turned: DoorRun) -> None:
    growing = ("trajectory", "sample", "preference", "dataset", "checkpoint", "training_step", "episode")

    def state() -> dict[str, Any]:
        return {
            name: turned.ask(f"select count(*) n, max(created_at) as latest from {name}").iloc[0].tolist()
            for name in growing
        }

    before = state()
    result = asyncio.run(flywheel(str(turned.recipe)))
    assert (result["run_id"], result["report"]) == (turned.run_id, str(turned.report))
    assert state() == before


def test_the_command_line_suggests_to_ask_for_pairs(turned: DoorRun, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"run_id": turned.run_id, "table": "", "report": ""}
    monkeypatch.setattr(local, "_run", lambda *_, **__: result)
    question = local.run_recipe(turned.recipe, []).splitlines()[-1].split('"')[1]
    assert len(turned.ask(question)) == min(10, turned.ask("select count(*) n from preference")["n"][0])


def test_pairs_are_exported(turned: DoorRun, tmp_path: Path) -> None:
    run = turned.run_id
    with pytest.raises(ConfigError, match="turns within the sides of pairs carry none, and a trainer masks the prompt"):
        export_folder(turned.root, run, tmp_path / "trl", "trl")
    export_folder(turned.root, run, tmp_path / "trl", "trl", without_mask=True)
    lines = (tmp_path / "trl" / "preference.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == turned.ask("select count(*) n from preference")["n"][0]
    with pytest.raises(ConfigError, match="its pairs have one reply on each side"):
        export_folder(turned.root, run, tmp_path / "factory", "llama-factory")


def test_the_plan_names_phases_and_fields(turned: DoorRun) -> None:
    text = describe(turned.recipe, [])
    assert "iterations: rft, dpo; each ends with 6 held-out episodes" in text
    assert "plays 6 instances, 9 times each" in text
    assert "  eto.dpo.learning_rate = [0.001]" in text
    assert "already done: 2 iterations" in text


def test_an_expert_that_is_not_there_stops_before_anything_starts(turned: DoorRun) -> None:
    with pytest.raises(ConfigError, match=r"^environment door has no expert; name a file of demonstrations"):
        check(load_recipe(turned.recipe, ["eto.phases=[sft]"]))
