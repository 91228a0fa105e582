"""Agent-R, and then group RL from its end: one line of checkpoints through both runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import groups
import pytest
from turning import turn
from wheel import LIGHT, write_recipe

from agentr_core.errors import ConfigError
from agentr_core.store.database import Store
from flows.commands.exporting import export_folder
from flows.flywheel import flywheel
from flows.preflight.checks import check
from tasks.wiring import load_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
FURTHER = (
    "iterations=2",
    "promote=best",
    "evaluation.sets={dev: {split: dev}}",
    "evaluation.development=dev",
    "grpo.credit=siblings",
    "grpo.steps=2",
    "grpo.groups=2",
    "grpo.eval_steps=1",
)


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_run_goes_on_from_what_another_method_promoted(tmp_path: Path, door_model: Path) -> None:
    first_run = asyncio.run(flywheel(str(write_recipe(tmp_path, door_model))))
    store = Store(tmp_path / "runs" / "store.duckdb")
    ((checkpoint, path),) = store.rows("select promoted, path from v_promotions where iteration = 1")

    file = groups.write(tmp_path, door_model)
    after = [*FURTHER, f"model.from_run='{first_run['run_id'][:10]}'"]
    assert load_recipe(file, after).model.path == path
    second_run = asyncio.run(flywheel(str(file), after))

    lines = store.query(
        "select a.checkpoint_id, a.generation, a.ancestor_id, a.method, a.iteration from v_ancestors a "
        "join checkpoint using (checkpoint_id) join iteration i on i.iteration_id = checkpoint.iteration_id "
        f"where i.run_id = '{second_run['run_id']}' and i.iteration = 1 order by generation"
    )
    # The model of the second run, the checkpoint of the first that it is, and the model of that.
    assert lines["generation"].tolist() == [1, 2, 3]
    assert lines["ancestor_id"].tolist()[1] == checkpoint
    assert lines["method"].tolist()[1] == "agent-r"

    iterations = store.rows(
        "select iteration, promoted, checkpoint_in from iteration where run_id = ? order by iteration",
        second_run["run_id"],
    )
    assert [went_on for *_, went_on in iterations[1:]] == [chosen for _, chosen, _ in iterations[:-1]]
    assert store.rows(
        "select parent_id from checkpoint join iteration on checkpoint_out = checkpoint_id "
        "where run_id = ? and iteration = 2",
        second_run["run_id"],
    ) == [(iterations[2][2],)]

    credit = store.query(
        "select r.trajectory_id, t.num_steps, count(c.position) as credited from rl_rollout r "
        "join trajectory t using (trajectory_id) left join rl_credit c using (trajectory_id) group by all"
    )
    assert (credit["num_steps"] == credit["credited"]).all()
    validations = store.query("select iteration, step from v_rl_validations order by all")
    assert validations.to_numpy().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert store.query("select * from v_orphans").empty
    page = Path(second_run["report"]).read_text(encoding="utf-8")
    assert "Validation by step" in page
    assert "Promoted: " in page
    assert "Promoted: " in second_run["table"]


@pytest.mark.usefixtures("prefect_server")
def test_an_expert_is_cloned_and_then_searched_from(tmp_path: Path, door_model: Path) -> None:
    phases = [
        "iterations=2",
        "agent_r.phases=[clone, sft]",
        "data.use=both+expert",
        "search.dives=6",
        "environment.options.knows=true",
    ]
    fewer = "instances.from_iteration={2: {train_limit: 3}}"
    run = asyncio.run(flywheel(str(write_recipe(tmp_path, door_model)), [*phases, fewer]))
    store = Store(tmp_path / "runs" / "store.duckdb")
    samples = store.query(
        "select i.iteration, s.kind, count(*) as samples from dataset_row join dataset d using (dataset_id) "
        "join iteration i on i.iteration_id = d.iteration_id join sample s using (sample_id) "
        f"where i.run_id = '{run['run_id']}' group by all order by all"
    )
    kinds = {number: set(part["kind"]) for number, part in samples.groupby("iteration")}
    assert kinds[1] == {"expert"}
    assert "expert" in kinds[2]
    trees = store.rows("select iteration, count(*) from tree join iteration using (iteration_id) group by all")
    assert trees == [(2, 3)]
    assert store.query("select * from v_orphans").empty


def test_a_run_that_is_not_finished_promotes_nothing_yet(tmp_path: Path, door_model: Path) -> None:
    file = groups.write(tmp_path, door_model)
    ctx = asyncio.run(groups.begun(file))
    with pytest.raises(ConfigError, match="is not finished; let it go on, or give"):
        load_recipe(file, [f"model.from_run='{ctx.run_id}'"])


def test_what_a_later_iteration_collects_from_is_checked_at_the_start(tmp_path: Path, door_model: Path) -> None:
    file = write_recipe(tmp_path, door_model)
    further = ["iterations=2", "instances.train_limit=4", "instances.from_iteration={2: {mix: {attic: 0.5}}}"]
    with pytest.raises(ConfigError, match=r"^door has no split 'attic'$"):
        check(load_recipe(file, further))


def test_one_recipe_searches_first_and_reinforces_then(tmp_path: Path, door_model: Path) -> None:
    groups_of = "{steps: 2, groups: 3, num_generations: 4, max_steps: 3, max_new_tokens: 6, learning_rate: 2.0e-3}"
    further = ["iterations=2", "agent_r.phases=[sft, rl]", f"grpo={groups_of}"]
    further += ["instances.train_limit=4", "instances.from_iteration={2: {mix: {dev: 0.5}}}"]
    done = asyncio.run(turn(write_recipe(tmp_path, door_model), *further, *LIGHT))

    store = done.store
    (base, *_), (checkpoint, parent, dataset), (_, went_on_from, none) = store.rows(
        "select checkpoint_out, parent_id, c.dataset_id from iteration "
        "join checkpoint c on checkpoint_out = checkpoint_id order by iteration"
    )
    assert (parent, went_on_from) == (base, checkpoint)
    assert dataset is not None
    assert none is None
    assert store.rows("select distinct iteration from v_rl_steps") == [(2,)]
    assert store.rows(
        "select iteration, split, count(*) from chosen_instance join iteration using (iteration_id) "
        "join instance using (instance_id) where name = 'train' group by all order by all"
    ) == [(1, "train", 4), (2, "dev", 2), (2, "train", 2)]
    assert store.rows("select distinct iteration from tree join iteration using (iteration_id)") == [(1,)]
    rates = [rate for (rate,) in store.rows("select learning_rate from v_rl_steps order by step")]
    assert max(rates) <= 2.0e-3
    assert store.query("select * from v_orphans").empty

    first, last = (done.report.with_name(f"iteration-0{number}.html").read_text("utf-8") for number in (1, 2))
    assert "Reinforcement learning by step" in last
    assert "Reinforcement learning by step" not in first
    assert "groups with contrast" in last
    assert "groups with contrast" not in first

    workspace = tmp_path / "runs"
    sets = {
        (form, number): export_folder(workspace, done.run_id, tmp_path / f"{form}-{number}", form, iteration=number)
        for form, number in (("trl", 1), ("trl", None), ("verl", 1), ("verl", 2), ("verl", None))
    }
    assert {where: " of door-1 in " in message for where, message in sets.items()} == {
        ("trl", 1): True,
        ("trl", None): True,
        ("verl", 1): True,
        ("verl", 2): False,
        ("verl", None): False,
    }
    with pytest.raises(ConfigError, match=r"iteration 2 of run .* is group RL, which has no dataset; only --format"):
        export_folder(workspace, done.run_id, tmp_path / "none", "trl", iteration=2)
