"""A comparison of whole runs under Prefect: each arm has a method of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentr_core.errors import ConfigError
from agentr_core.methods.comparison import arms_of
from agentr_core.methods.faults import load
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.store.database import Store
from flows.commands.plan import describe
from flows.compare import compare
from flows.local import compare_recipe
from tasks.reporting import write_reports

RECIPE = """\
name: doors
method: compare-runs
workspace: {workspace}
environment: {{name: door}}
model: {{path: {model}, device: cpu, dtype: float32, max_batch: 16, workers: 1}}
search: {{dives: 2, width: 2, depth: 4, max_new_tokens: 6}}
compare:
  seeds: [0]
  metrics: [success_clustered, "test:loops@1", revision_test:success]
  arms:
    searched: [method=agent-r, iterations=1, data.use=good, "grpo={{}}"]
    reinforced: [method=grpo, iterations=1, "data={{}}", "training={{bf16: false, num_threads: 1}}"]
data: {{use: good}}
training: {{max_tokens: 60, per_device_train_batch_size: 4, learning_rate: 1.0e-3, bf16: false, num_threads: 1}}
grpo: {{steps: 1, groups: 2, num_generations: 4, max_steps: 3, max_new_tokens: 6}}
evaluation: {{max_steps: 4, max_new_tokens: 6, revision_test: {{max_steps: 4}}}}
"""


def write_recipe(folder: Path, model: Path, **changes: str) -> Path:
    """Write the recipe into a folder, with some of its texts replaced."""
    text = RECIPE.format(workspace=folder / "runs", model=model)
    for old, new in changes.items():
        text = text.replace(old, new)
    file = folder / "doors.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "door_installed")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("chosen", [["reinforced"], pytest.param(["searched", "reinforced"], marks=pytest.mark.long)])
def test_each_arm_is_a_run_of_its_own_and_one_table_tells_them(
    tmp_path: Path, door_model: Path, chosen: list[str]
) -> None:
    file = write_recipe(tmp_path, door_model)
    assert "already done: 0 of 2 trainings" in describe(file, [])
    done: dict[str, Any] = asyncio.run(compare(str(file), arms=chosen))

    store = Store(tmp_path / "runs" / "store.duckdb")
    runs = store.query("select run_id, recipe, status from run order by recipe")
    assert runs["recipe"].tolist() == ["doors", *sorted(f"doors.{name}" for name in chosen)]
    assert set(runs["status"]) == {"finished"}
    head, base, *arms = done["table"].splitlines()
    for column in ("success clustered %", "test: loops@1", "revision test: success %"):
        assert column in head
    assert base.startswith("base ")
    assert len(base.split()) > 7, "what the base reached stands there, too"
    assert [arm.split()[0] for arm in arms] == chosen
    page = Path(done["report"]).with_suffix(".md").read_text("utf-8")
    num_sampled = store.query("select sum(sampled_tokens)::bigint n from rl_step")["n"][0]
    assert "Each seed is a whole run" in page
    assert "one pool" not in page
    assert f"{num_sampled:,}" in page, "what group RL sampled is what the report says"
    assert store.query("select count(*) n from v_orphans")["n"][0] == 0
    assert f"already done: {len(chosen)} of 2 trainings" in describe(file, [])
    assert write_reports(tmp_path / "runs", done["run_id"]) == [Path(done["report"])]

    num_checkpoints = store.query("select count(*) n from checkpoint")["n"][0]
    assert asyncio.run(compare(str(file), arms=chosen)) == done
    assert store.query("select count(*) n from checkpoint")["n"][0] == num_checkpoints


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("method=grpo, iterations=1", "iterations=1", "reinforced: name the method of its run once"),
        ("method=grpo", "method=compare", "name the method of its run once, as method=NAME, one of agent-r, eto, grpo"),
        ("method=grpo", "evaluation.max_steps=9, method=grpo", "'evaluation.max_steps=9' is the same for all arms"),
        ("method=grpo", "seed=4, method=grpo", "'seed=4' is the same for all arms, or comes from compare.seeds"),
        ('"data={}", ', "", "data: group RL makes no dataset; leave it out"),
        ("seeds: [0]", "seeds: [0, 0]", "compare.seeds: a seed comes twice"),
    ],
)
def test_what_is_wrong_with_an_arm_is_told(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        arms_of(load(write_recipe(tmp_path, tmp_path, **{old: new})))
    assert said in str(error.value)


@pytest.mark.usefixtures("door_installed")
@pytest.mark.parametrize(("method", "view"), [("compare-runs", "v_comparisons"), ("compare", "v_arms")])
def test_what_to_ask_next_has_rows_for_arms_of_the_kind(
    tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch, method: str, view: str
) -> None:
    result = {"run_id": "aaaa000000000001", "table": "", "report": ""}
    monkeypatch.setattr("flows.local._run", lambda *args: result)
    file = write_recipe(tmp_path, door_model)
    if method == "compare":
        text = file.read_text("utf-8").replace("method: compare-runs", "method: compare")
        lines = [
            line for line in text.splitlines() if not line.startswith(("grpo:", "    searched:", "    reinforced:"))
        ]
        new_lines = [line.replace("  arms:", "  arms: {both: [], good: [data.use=good]}") for line in lines]
        file.write_text("\n".join(new_lines).replace("data: {use: good}\n", ""), encoding="utf-8")
    assert f'"select * from {view}"' in compare_recipe(file, [], [], [])


def test_an_arm_keeps_only_the_sections_that_its_method_reads(tmp_path: Path) -> None:
    search_arm, rl_arm = arms_of(load(write_recipe(tmp_path, tmp_path)))
    assert (search_arm.recipe.search.dives, rl_arm.recipe.search.dives) == (2, SearchConfig().dives)
    assert (search_arm.recipe.method, rl_arm.recipe.method) == ("agent-r", "grpo")
    assert search_arm.recipe.evaluation == rl_arm.recipe.evaluation
    assert not search_arm.recipe.compare.arms
