"""Comparisons under Prefect: a part of one, then the whole on the same pool, and again with nothing
left to do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from wheel import all_rows

from agentr_core.errors import ArmsFailed, ConfigError
from agentr_core.store.database import Store
from flows.cli import cli
from flows.commands.exporting import export_folder
from flows.commands.plan import describe
from flows.commands.stores import faults, merged, pruned
from flows.compare import compare
from flows.flywheel import flywheel
from flows.local import run_recipe
from flows.serving import deployments
from tasks.reporting import write_reports
from tasks.wiring import load_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
RECIPE = """\
name: doors
method: compare
workspace: {workspace}
environment: {{name: door}}
model: {{path: {model}, device: cpu, max_batch: 16}}
search: {{dives: 2, width: 2, depth: 4, max_new_tokens: 6}}
eto:
  explore: {{samples: 4, max_steps: 4, max_new_tokens: 6}}
  preferences: {{against: own}}
  dpo: {{learning_rate: [1.0e-3], per_device_train_batch_size: 2, gradient_accumulation_steps: 1}}
compare:
  seeds: [0, 1]
  arms:
    good: [data.use=good]
    eto: [data.use=preferences]
data: {{use: good}}
training:
  max_tokens: 60
  per_device_train_batch_size: 4
  learning_rate: 1.0e-3
  bf16: false
  num_threads: 1
evaluation:
  max_steps: 2
  max_new_tokens: 6
  revision_test: {{enabled: false}}
"""


class Comparison:
    """A part of the recipe, then all of it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.recipe = folder / "doors.yaml"
        self.root = folder / "runs"
        self.recipe.write_text(RECIPE.format(workspace=self.root, model=model), encoding="utf-8")
        self.part: dict[str, Any] = asyncio.run(compare(str(self.recipe), arms=["good"], seeds=[1]))
        self.pool = self.ask(POOL)
        self.whole: dict[str, Any] = asyncio.run(compare(str(self.recipe)))

    def ask(self, sql: str) -> pd.DataFrame:
        return Store(self.root / "store.duckdb").query(sql)


POOL = "select tree_id, node_index, visits, created_at from node order by all"


@pytest.fixture(scope="module")
def compared(
    prefect_server: None, door_installed: None, door_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Comparison:
    return Comparison(tmp_path_factory.mktemp("compare"), door_model)


def test_all_arms_and_seeds_are_trained_from_one_model_on_one_pool(compared: Comparison) -> None:
    arms = compared.ask("select * from v_arms order by arm, seed")
    parents = compared.ask(
        "select distinct c.parent_id, b.checkpoint_out as base from v_arms a join checkpoint c using (checkpoint_id) "
        "join iteration b on b.run_id = a.comparison_id and b.iteration = 0"
    )

    assert arms[["arm", "seed", "status"]].values.tolist() == [
        [arm, seed, "finished"] for arm in ("eto", "good") for seed in (0, 1)
    ]
    assert set(arms["comparison_id"]) == {compared.whole["run_id"]} == {compared.part["run_id"]}
    assert arms["checkpoint_id"].nunique() == 4
    assert (arms["trained_tokens"] >= 60).all()
    assert len(parents) == 1
    assert (parents["parent_id"] == parents["base"]).all()
    assert compared.ask(POOL).equals(compared.pool), "the pool was not touched again"
    assert compared.ask("select count(*) n from evaluation where name = 'test'")["n"].tolist() == [5]
    assert compared.ask("select status from run")["status"].tolist() == ["finished"] * 5
    assert compared.ask("select * from v_orphans").empty


def test_a_checkpoint_leads_back_to_the_trees_of_the_pool(compared: Comparison) -> None:
    rows = compared.ask(
        "select l.run_id, l.tree_seed from v_arms a join v_lineage l using (checkpoint_id) where a.arm = 'good'"
    )
    assert set(rows["run_id"]) == {compared.whole["run_id"]}
    assert not rows["tree_seed"].isna().any()


def test_one_table_has_intervals_once_there_are_several_seeds(compared: Comparison) -> None:
    (part,) = (line for line in compared.part["table"].splitlines() if line.startswith("good"))
    (good, eto) = (line for line in compared.whole["table"].splitlines() if line.startswith(("good", "eto")))
    page = Path(compared.whole["report"])

    assert " to " not in part
    assert " to " in good
    assert " to " in eto
    assert "eto" not in compared.part["table"]
    differences = len((("good", "base"), ("eto", "base"), ("eto", "good")))
    rows = len(("base", "good", "eto")) + differences + len(("good", "eto")) + 4
    assert page.read_text("utf-8").count("<tr") == 4 + rows
    for run in compared.ask("select run_id from v_arms")["run_id"]:
        assert f"`{run}`" in page.with_suffix(".md").read_text("utf-8")
    assert write_reports(compared.root, compared.whole["run_id"]) == [page]
    arm_page, _ = write_reports(compared.root, compared.ask("select run_id from v_arms where arm = 'eto'")["run_id"][0])
    assert "Reward accuracy" in arm_page.with_suffix(".md").read_text("utf-8")


@pytest.mark.long
def test_the_same_flow_again_does_nothing_new(compared: Comparison) -> None:
    tables = ("node", "trajectory", "sample", "preference", "dataset", "checkpoint", "training_step", "episode")

    def state() -> dict[str, Any]:
        return {
            name: compared.ask(f"select count(*) n, max(created_at) as latest from {name}").iloc[0].tolist()
            for name in tables
        }

    before = state()
    assert asyncio.run(compare(str(compared.recipe))) == compared.whole
    assert state() == before


def test_pairs_of_an_arm_are_exported(compared: Comparison, tmp_path: Path) -> None:
    run, rows = compared.ask(
        "select a.run_id, count(*) n from v_arms a join dataset_row using (dataset_id) where arm = 'eto' "
        "group by a.run_id order by 1"
    ).iloc[0]
    message = export_folder(compared.root, run, tmp_path / "parquet", "parquet")
    assert message.startswith(f"{rows // 2} preference pairs of ")


def test_arms_are_pruned_apart_and_merged_again_and_their_pool_stays(compared: Comparison, tmp_path: Path) -> None:
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    for folder in (whole, first, second):
        folder.mkdir()
        Store(compared.root / "store.duckdb").backup(folder / "store.duckdb")
    before = all_rows(Store(whole / "store.duckdb"))
    arms = compared.ask("select run_id from v_arms order by arm, seed")["run_id"].tolist()

    message = pruned(whole, [compared.whole["run_id"]], dry_run=False)
    assert f"iteration 1 of run {compared.whole['run_id']} stays: other runs are made of it" in message
    assert all_rows(Store(whole / "store.duckdb")) == before

    pruned(first, arms[:3], dry_run=False)
    pruned(second, arms[1:], dry_run=False)
    runs = Store(first / "store.duckdb").query("select run_id from v_arms")["run_id"].tolist()
    assert runs == arms[3:]
    for folder in (first, second):
        store = Store(folder / "store.duckdb")
        assert all_rows(store) < before
        assert store.query("select * from v_orphans").empty
        assert faults(folder) == []
        assert store.query(POOL).equals(compared.pool)
    merged(first, [second, whole / "store.duckdb"])
    assert all_rows(Store(first / "store.duckdb")) == before


def test_the_plan_names_the_pool_and_the_arms(compared: Comparison) -> None:
    text = describe(compared.recipe, [])
    assert "the pool: collect, splice, explore, prefer on 6 instances, once" in text
    assert "each arm: 60 trained tokens, 2 seeds, then 6 held-out episodes" in text
    assert "  eto: data.use=preferences" in text
    assert "already done: 4 of 4 trainings" in text
    best = describe(compared.recipe, ["compare.arms={best: [data.use=good, 'pairs.alpha=[1.0]']}"])
    assert "the pool: collect on 6 instances, once" in best
    assert "  best: data.use=good pairs.alpha=[1.0] (samples of its own, in run " in best


def test_what_cannot_be_compared_is_said_in_one_sentence(compared: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")

    def message_of(*words: str) -> str:
        error = CliRunner().invoke(cli, ["compare", str(compared.recipe), *words]).exception
        assert isinstance(error, ConfigError)
        return str(error)

    assert message_of("--arm", "dagger") == "recipe doors has no arm 'dagger'; it has good, eto"
    assert "training.max_tokens: give the number of trained tokens" in message_of("-o", "training.max_tokens=0")
    assert "environment door has no expert" in message_of("-o", "eto.preferences.against=expert")
    assert "is of method agent-r and has no arms" in message_of(
        "-o", "method=agent-r", "-o", "compare={}", "-o", "eto={}"
    )


def test_the_wheel_does_not_take_a_comparison(compared: Comparison) -> None:
    with pytest.raises(ConfigError, match="recipe doors compares arms; run it with `agentr compare"):
        run_recipe(compared.recipe, [])
    with pytest.raises(ConfigError, match="recipe doors compares arms"):
        asyncio.run(flywheel(str(compared.recipe)))


def test_a_comparison_is_served_as_one(compared: Comparison) -> None:
    assert load_recipe(compared.recipe, []).method == "compare"
    assert deployments([compared.recipe])[0].flow_name == "compare"


@pytest.mark.long
def test_an_arm_that_cannot_be_made_does_not_stop_the_others(compared: Comparison) -> None:
    best = "[data.use=good, 'pairs.alpha=[1.0]']"
    arms = f"compare.arms={{short: [data.use=good, data.max_length=8], best: {best}}}"
    with pytest.raises(ArmsFailed) as error:
        asyncio.run(compare(str(compared.recipe), overrides=[arms], seeds=[1]))

    message = str(error.value)
    assert message.startswith("1 of 2 runs of the comparison could not be made (arm short, seed 1: ")
    assert "the same command tries these again" in message
    runs = compared.ask("select arm, status, run_id from v_arms where arm in ('best', 'short') order by arm")
    assert runs[["arm", "status"]].values.tolist() == [["best", "finished"], ["short", "failed"]]
    num_trees = compared.ask("select count(*) n from tree where copied_from is null")["n"][0]
    assert num_trees == compared.pool["tree_id"].nunique(), "the arm with samples of its own took over the trees"
    assert compared.ask("select distinct status from iteration where iteration = 0")["status"].tolist() == ["finished"]
    page = next(Path(word) for word in message.split() if word.endswith("comparison.html")).with_suffix(".md")
    has_best, has_short = (f"`{run}`" in page.read_text("utf-8") for run in runs["run_id"])
    assert has_best
    assert not has_short
    with pytest.raises(ArmsFailed, match="1 of 1 runs"):
        asyncio.run(compare(str(compared.recipe), overrides=[arms], arms=["short"], seeds=[1]))
