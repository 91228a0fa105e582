"""Group RL from its plan to its report, and killed on the way: nothing that was sampled is sampled
again, and the weights come out the same.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import door
import groups
import pyarrow.parquet as pq
import pytest
from atif_schema import faults
from training_jobs import unread, watched
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from turning import turn
from wheel import PATIENCE, all_rows, kill_group, launched

from agentr_core.errors import ConfigError, EnvironmentFault, StoreError, TrainingFault
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.faults import load
from agentr_core.methods.grpo import readings, train
from agentr_core.methods.grpo.credit import with_credit
from agentr_core.methods.grpo.rollouts import Rollouts
from agentr_core.methods.grpo.train import reinforce
from agentr_core.models.checkpoint_dir import weights_sha256
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.training import UNREAD_FIELDS
from agentr_core.runtime.equipment import Checkpoint
from agentr_core.runtime.start import check_run_weights, start_run
from agentr_core.store.care.rewriting import prune
from agentr_core.store.codec.ledger import load_groups
from agentr_core.store.database import Store
from agentr_core.training import requirements
from agentr_core.types import Generation
from flows.commands.exporting import export_folder
from flows.commands.plan import describe
from flows.commands.publishing import publish_checkpoint
from flows.preflight.checks import check
from tasks.wiring import RunRef, quiet_context, run_reference

pytestmark = pytest.mark.slow
STEPS, SIZE = 4, 4


def store_of(file: Path) -> Store:
    return Store(file.parent / "runs" / "store.duckdb")


def weights_of(file: Path) -> list[str]:
    """Return the hash of the weights that a training published."""
    hashes = store_of(file).query("select weights_sha256 from checkpoint where parent_id is not null")
    return [str(sha256) for sha256 in hashes["weights_sha256"]]


@pytest.mark.usefixtures("door_installed")
def test_a_recipe_runs_from_its_plan_to_its_report(
    tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[tuple[int, dict[str, Any]]] = []

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            records.append((state.global_step, logs))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", Recorder)
    monkeypatch.setattr(requirements, "get_available_reporting_integrations", lambda: ["recorder"])
    file = groups.write(tmp_path, door_model)
    plan = describe(file, [])
    assert "each iteration: 4 steps of 3 groups of 4 episodes of 6 instances" in plan
    done = asyncio.run(turn(file, "training.report_to=[recorder]"))

    store = done.store
    steps = store.query("select * from rl_step order by step")
    assert [step for step, _ in records] == steps["step"].tolist()
    names = "loss, learning_rate, grad_norm, trained_tokens, seconds"
    view_rows = store.rows(f"select {names} from v_training_steps where iteration = 1 order by step")
    # What a step did not measure is not logged; all else is, as by a training on a dataset.
    assert [[logs.get(name) for name in names.split(", ")] for _, logs in records] == [
        [None if logs.get(name) is None else value for name, value in zip(names.split(", "), row, strict=True)]
        for (_, logs), row in zip(records, view_rows, strict=True)
    ]
    assert all(
        {"learning_rate", "trained_tokens", "seconds", "reward", "pass_at_1"} <= logs.keys() for _, logs in records
    )
    assert any({"loss", "grad_norm", "entropy"} <= logs.keys() for _, logs in records)
    assert steps["step"].tolist() == list(range(1, STEPS + 1))
    assert (steps["sampled_tokens"] > 0).all()
    assert steps["trained_tokens"].sum() > 0
    assert store.rows("select steps, trained_tokens from v_trainings") == [(STEPS, steps["trained_tokens"].sum())]
    timed_tokens = store.rows("select sum(tokens)::int from timing where starts_with(stage, 'reinforce')")
    assert timed_tokens == [(steps["sampled_tokens"].sum(),)]
    view = store.query("select learning_rate, grad_norm from v_training_steps where iteration = 1 order by step")
    measures = steps[["learning_rate", "grad_norm"]].astype(float)
    assert view.astype(float).equals(measures), "both tables tell the same of a step"
    group_rows = store.query("select * from rl_group order by step, number")
    assert (group_rows["episodes"] == SIZE).all()
    assert (group_rows.groupby("step")["number"].count() >= 3).all()
    assert group_rows["policy"].str[-2:].tolist() == [f"@{step - 1}" for step in group_rows["step"]]
    rollouts = store.query(
        "select number, step, avg(advantage) mean, count(*) n, count(distinct episode) d from rl_rollout group by all"
    )
    assert rollouts["mean"].tolist() == pytest.approx([0.0] * len(rollouts), abs=1e-9)
    assert (rollouts["n"] == SIZE).all()
    assert (rollouts["d"] == SIZE).all()
    unknown = "select count(*) n from rl_rollout join generation on owner_id = trajectory_id where logprobs is null"
    assert store.query(unknown)["n"].tolist() == [0]
    assert store.query("select * from v_orphans").empty
    lineage = store.query(
        "select checkpoint_in, parent_id, dataset_id from iteration join checkpoint on checkpoint_out = checkpoint_id "
        "where iteration = 1"
    )
    assert lineage["parent_id"].tolist() == lineage["checkpoint_in"].tolist()
    assert lineage["dataset_id"].isna().all()
    assert store.query("select max(iteration) as newest from v_evaluations")["newest"].tolist() == [1]
    page = done.report.read_text(encoding="utf-8")
    assert "Reinforcement learning by step" in page
    assert "groups with contrast" in page
    assert "KL to sampler" in page
    # Without a penalty for it, there is nothing to tell.
    assert "KL to start" not in page

    export_folder(file.parent / "runs", done.run_id, tmp_path / "verl", "verl")
    rows = pq.read_table(tmp_path / "verl" / "train.parquet").to_pylist()
    instance_ids = store.query("select distinct instance_id from rl_group")["instance_id"]
    assert sorted(row["extra_info"]["instance_id"] for row in rows) == sorted(instance_ids)
    for row in rows:
        house = f"Door {row['extra_info']['instance_id'].split('/')[-1]} of the train house."
        assert [turn["content"] for turn in row["prompt"]] == ["You stand before a door. Say the word.", "Ok.", house]
    with pytest.raises(
        ConfigError, match="which has no dataset; only --format verl, atif, claude-code, codex and pi take it"
    ):
        export_folder(file.parent / "runs", done.run_id, tmp_path / "trl", "trl")

    export_folder(file.parent / "runs", done.run_id, tmp_path / "atif", "atif")
    trajectories = [json.loads(path.read_text("utf-8")) for path in (tmp_path / "atif" / "trajectories").iterdir()]
    assert [faults(trajectory) for trajectory in trajectories] == [[]] * len(trajectories)
    rewards = {trajectory["trajectory_id"]: trajectory["extra"]["reward"] for trajectory in trajectories}
    # Replies of groups without contrast are not trained.
    with pytest.raises(ConfigError, match="carry none, and a session has no flags"):
        export_folder(file.parent / "runs", done.run_id, tmp_path / "pi", "pi")
    export_folder(file.parent / "runs", done.run_id, tmp_path / "pi", "pi", without_mask=True)
    assert len(list((tmp_path / "pi" / "sessions").iterdir())) == len(trajectories)
    query = "select trajectory_id, reward from rl_rollout join trajectory using (trajectory_id)"
    assert rewards == dict(store.rows(query))
    replies = [
        step for trajectory in trajectories for step in trajectory["steps"] if step.get("extra", {}).get("train")
    ]
    assert all(len(step["metrics"]["logprobs"]) == step["metrics"]["completion_tokens"] > 0 for step in replies)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.usefixtures("door_installed")
async def test_what_group_rl_does_not_read_is_refused(tmp_path: Path, door_model: Path) -> None:
    ctx = await groups.begun(
        groups.write(tmp_path, door_model, more="training: {lora_r: 4}\ngrpo: {steps: 2, save_steps: 1}")
    )
    config, fields = watched(ctx.recipe.training)
    await reinforce(replace(ctx, recipe=replace(ctx.recipe, training=config)), 1)
    assert unread(fields) | {"num_train_epochs", "save_steps"} == set(UNREAD_FIELDS["grpo"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, door_model: Path, door_installed: None) -> Path:
    """The recipe of a training that nobody disturbed."""
    file = groups.write(tmp_path_factory.mktemp("calm"), door_model)
    asyncio.run(groups.trained(file))
    return file


def kill_when(file: Path, env: dict[str, str], reached: Callable[[], bool]) -> None:
    """Start the training and kill it once something was reached."""
    with launched([sys.executable, "-m", "groups", str(file)], env=env | {"DOOR_PAUSE": "0.05"}) as process:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kill_group(process)


def kill_before(file: Path, step: int, env: dict[str, str]) -> None:
    """Run the training to where it kills itself: before it trains on a step."""
    command = [sys.executable, "-m", "groups", str(file), str(step)]
    # With this variable it starts from what is imported already.
    with launched(command, env=env | {"HF_HUB_OFFLINE": "1"}) as process:
        output = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL, output


def count(file: Path, question: str) -> int:
    store = store_of(file)
    return int(store.query(f"select count(*) n from {question}")["n"][0]) if store.path.exists() else 0


def has_samples(file: Path, wanted: int) -> bool:
    return count(file, "trajectory where source = 'rollout'") >= wanted


def whole_and_cut(folder: Path, model: Path, env: dict[str, str], *, more: str, killed_at: int) -> tuple[Path, Path]:
    """Return the recipes of a training that nobody disturbed, and of one that was killed before it
    trained on a step and went on; their weights are the same.
    """
    whole, cut = (groups.write(folder / name, model, more=more) for name in ("whole", "cut"))
    asyncio.run(groups.trained(whole))
    kill_before(cut, killed_at, env)
    asyncio.run(groups.trained(cut))
    assert weights_of(cut) == weights_of(whole)
    return whole, cut


# PEFT asks for an attribute that Transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.usefixtures("door_installed")
@pytest.mark.long
def test_adapters_come_out_the_same_after_a_kill_and_are_published_beside_a_whole_model(
    tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    """All weights after a kill have a test below; adapters that go on from a state are in
    tests/core/test_group_rows.py.
    """
    more = "training: {lora_r: 4, learning_rate: 1.0e-2, save_total_limit: null}"
    for file in whole_and_cut(tmp_path, door_model, process_env, more=more, killed_at=3):
        paths = store_of(file).query("select path from checkpoint where parent_id is not null order by path")["path"]
        assert [Path(path).name[-2:] == "@2" for path in paths] == [False, True]
        for path in paths:
            assert (Path(path) / "model.safetensors").is_file()
            assert (Path(path) / "adapter" / "adapter_model.safetensors").is_file()


def test_checkpoints_of_steps_stay_are_published_and_go_with_their_run(
    calm: Path, tmp_path: Path, door_model: Path
) -> None:
    file, root = (
        groups.write(tmp_path, door_model, more="training: {save_total_limit: 1}\ngrpo: {save_steps: 1}"),
        tmp_path / "runs",
    )
    asyncio.run(groups.trained(file))
    store = store_of(file)
    checkpoints = store.query(
        "select checkpoint_id, parent_id, path, weights_sha256 from checkpoint where iteration_id is not null "
        "order by checkpoint_id"
    )
    key, early = checkpoints["checkpoint_id"]
    assert early == f"{key}@3", "of three before the last, the newest one"
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == [key, early]
    assert len(set(checkpoints["parent_id"])) == 1
    assert checkpoints["weights_sha256"][0] == weights_of(calm)[0] != checkpoints["weights_sha256"][1]
    assert store.query("select * from v_orphans").empty
    (policy,) = set(store.query("select policy from rl_group where step = 4")["policy"])
    assert policy == early, "what sampled the next step has this name"
    asyncio.run(groups.trained(file))
    assert len(store.query("select * from checkpoint")) == 3, "the model it began with, and these"

    for prefix, folder, at in ((early, tmp_path / "early", 1), (key[:8], tmp_path / "last", 0)):
        publish_checkpoint(root, prefix, folder, base_model="", licence="")
        assert weights_sha256(folder) == checkpoints["weights_sha256"][at]
    with pytest.raises(ConfigError, match=r"no checkpoints in .* begin with"):
        publish_checkpoint(root, f"{key}@2", tmp_path / "none", base_model="", licence="")
    second_file = groups.write(tmp_path / "again", door_model, more=f"model: {{path: {checkpoints['path'][1]}}}")
    recipe = load(second_file, [f"workspace={root}"])
    asyncio.run(start_run(quiet_context(run_reference(recipe), recipe)))
    bases = store.query("select parent_id from checkpoint where iteration_id is null order by created_at")["parent_id"]
    assert bases.tolist()[-1] == early, "a run knows what it begins with"
    runs = store.query("select run_id from run")["run_id"].tolist()
    assert {str(root / "checkpoints" / name) for name in (key, early)} <= set(prune(store, runs).unnamed_paths)


def test_killed_between_two_states_it_trains_from_the_store_to_the_same_weights(
    calm: Path, tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    file = groups.write(tmp_path, door_model)
    kill_before(file, 3, process_env)
    (draft,) = (tmp_path / "runs" / "checkpoints").glob(".*")
    output = draft.with_name(draft.name[1:].rpartition(".")[0])
    folders = list(Path("/dev/shm").glob(f"agentr-weights-{fingerprint(str(output))}"))
    assert folders or not Path("/dev/shm").is_dir()
    assert [path.name for path in (tmp_path / "runs" / "checkpoints").glob(".*/checkpoints/*.pt")] == ["step-000002.pt"]
    rows_before = all_rows(store_of(file))
    asyncio.run(groups.trained(file))

    assert rows_before <= all_rows(store_of(file)), "what was stored stays as it was"
    assert store_of(file).query("select * from v_orphans").empty
    assert weights_of(file) == weights_of(calm)
    assert not list((tmp_path / "runs" / "checkpoints").glob(".*"))
    # What the killed process left in memory is freed.
    assert not folders or not folders[0].exists()


STALE = "grpo: {staleness: 1}"


@pytest.mark.usefixtures("door_installed")
def test_a_step_may_be_sampled_while_the_one_before_is_trained(
    tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, update, play = groups.write(tmp_path / "whole", door_model, more=STALE), train._update, Rollouts.play
    events = {step: threading.Event() for step in range(1, STEPS + 1)}

    async def play_with_event(self: Rollouts, step: int, *rest: Any) -> Any:
        result = await play(self, step, *rest)
        events[step].set()
        return result

    def after_the_next_is_sampled(learner: Any, rows: Any, job: Any, step: int) -> Any:
        assert events[min(step + 1, STEPS)].wait(PATIENCE)
        return update(learner, rows, job, step)

    monkeypatch.setattr(Rollouts, "play", play_with_event)
    monkeypatch.setattr(train, "_update", after_the_next_is_sampled)
    asyncio.run(groups.trained(whole))
    monkeypatch.undo()
    step_policies = store_of(whole).query("select distinct step, policy from rl_group order by step")
    assert step_policies["policy"].str[-2:].tolist() == ["@0", "@0", "@1", "@2"]
    # The second step plays anew the instances that the first one had, though the same policy plays.
    num_of_groups = store_of(whole).rows("select step, sum(episodes)::int from rl_group group by step order by step")
    assert store_of(whole).rows("select step, count(*) from rl_rollout group by step order by step") == num_of_groups

    # It ends while a step is sampled, after the state that it goes on from has newer weights.
    cut = groups.write(tmp_path / "cut", door_model, more=STALE)

    async def fail_play(self: Rollouts, step: int, *rest: Any) -> Any:
        while step == 3:
            if list((cut.parent / "runs" / "checkpoints").glob(".*/checkpoints/step-000002.pt")):
                raise EnvironmentFault("gone")
            await asyncio.sleep(0.02)
        return await play(self, step, *rest)

    monkeypatch.setattr(Rollouts, "play", fail_play)
    with pytest.raises(EnvironmentFault, match="gone"):
        asyncio.run(groups.trained(cut))
    monkeypatch.undo()
    asyncio.run(groups.trained(cut))
    assert store_of(cut).query("select distinct step, policy from rl_group order by step").equals(step_policies)
    # Log-probabilities, and with them weights, differ in the last digits with what is in a batch.
    tokens = (
        "select trajectory_id, g.position, g.token_ids from rl_rollout join generation g on owner_id = trajectory_id "
        "where step <= 3 order by all"
    )
    assert store_of(cut).rows(tokens) == store_of(whole).rows(tokens)


SAMPLED = (
    "select g.* exclude (created_at), r.* exclude (created_at) from rl_group g join rl_rollout r "
    "using (iteration_id, step, number) order by all",
    # Their log-probabilities differ in the last digits.
    "select * exclude (logprobs) from step order by all",
    "select owner_id, position, draw, token_ids from generation order by all",
    "select iteration_id, step, reward, loss, trained_tokens from rl_step order by all",
    "select checkpoint_id, weights_sha256 from checkpoint order by all",
)


def test_weights_whose_rows_are_gone_are_not_gone_on_from(
    calm: Path, tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, backup, update = groups.write(tmp_path, door_model), tmp_path / "backup.duckdb", train._update
    store = store_of(file)

    def interrupted(learner: Any, rows: Any, job: Any, step: int) -> Any:
        if step == 1:
            store.backup(backup)
        if step == 3:
            raise KeyboardInterrupt
        return update(learner, rows, job, step)

    monkeypatch.setattr(train, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(groups.trained(file))
    monkeypatch.undo()
    (work,) = (tmp_path / "runs" / "checkpoints").glob(".*")
    assert list(work.glob("checkpoints/step-000002.pt"))

    # The backup has the groups of step 1 and nothing of step 2.
    put_back(backup, store)
    asyncio.run(groups.trained(file))
    assert "the state of training after step 2 was not made of the rows of" in caplog.text
    for question in SAMPLED:
        assert store.rows(question) == store_of(calm).rows(question), question

    put_back(backup, store)
    with pytest.raises(StoreError, match=r"was trained on rows that .* lacks or has otherwise .*move that folder away"):
        asyncio.run(groups.trained(file))
    (weights,) = (tmp_path / "runs" / "checkpoints").glob("*")
    manifest = json.loads((weights / "manifest.json").read_bytes())
    (run_id,) = store.query("select run_id from run")["run_id"]
    assert str(weights) in prune(store, [run_id]).unnamed_paths
    with pytest.raises(StoreError, match="was trained on rows that"):
        asyncio.run(groups.trained(file))
    # As an earlier version left them, without a hash: the store must have as many steps.
    (weights / "manifest.json").write_text(json.dumps(manifest | {"rows": "", "parent_weights": ""}))
    with pytest.raises(StoreError, match="was trained on rows that"):
        asyncio.run(groups.trained(file))


def put_back(backup: Path, store: Store) -> None:
    """Put a copy of a backup in the place of a store."""
    store.path.with_name(f"{store.path.name}.wal").unlink(missing_ok=True)
    shutil.copyfile(backup, store.path)


def test_a_run_does_not_go_on_from_weights_that_its_store_does_not_account_for(calm: Path, tmp_path: Path) -> None:
    shutil.copytree(calm.parent, tmp_path / "site")
    recipe = load(calm)
    root = tmp_path / "site" / "runs"
    ctx = quiet_context(RunRef(workspace=str(root), run_id=run_reference(recipe).run_id), recipe)
    check_run_weights(ctx)
    weights = Path(ctx.trained_checkpoint(1).path)
    assert weights.is_relative_to(root)
    record = json.loads((weights / "manifest.json").read_bytes())

    (weights / "manifest.json").write_text(json.dumps(record | {"weights_sha256": "other"}))
    with pytest.raises(StoreError, match=r"are not those that iteration 1 of run .* made according to"):
        asyncio.run(start_run(ctx))
    # Of an earlier version, with all steps in the store.
    (weights / "manifest.json").write_text(json.dumps(record | {"rows": "", "parent_weights": "", "iteration": ""}))
    check_run_weights(ctx)
    (weights / "manifest.json").write_text(json.dumps(record))
    with ctx.store.transaction() as con:
        con.execute("delete from rl_rollout where step = 2 and number = 0 and episode = 0")
    with pytest.raises(StoreError, match=r"was trained on rows that .* lacks or has otherwise"):
        asyncio.run(start_run(ctx))
    assert not load_groups(ctx.store, ctx.iteration_id(1), 2), "a step without all its episodes is not whole"


@pytest.mark.long
@pytest.mark.usefixtures("door_installed")
def test_groups_that_go_on_from_failures_are_the_same_after_a_kill(
    tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    # More groups than instances: some come twice in a step.
    more = "grpo: {groups: 8, revision_share: 0.5, resample: 0}"
    whole, _ = whole_and_cut(tmp_path, door_model, process_env, more=more, killed_at=4)
    assert "groups of 4 episodes of 6 instances, at most 50% of the groups after a failed beginning" in describe(
        whole, []
    )

    store = store_of(whole)
    assert store.query("select * from v_orphans").empty
    prefix_groups = store.query("select step, instance_id, prefix, episodes from rl_group where prefix > 0")
    assert prefix_groups["step"].min() > 1, "before the first step nothing has failed"
    assert len(prefix_groups) > 0
    assert prefix_groups.groupby("step").size().max() <= 4
    assert not prefix_groups.duplicated(["step", "instance_id"]).any()
    derivations = store.query(
        "select d.operator, d.position, g.prefix, g.step, o.step as earlier, h.prefix as earlier_prefix, p.success "
        "from derivation d join rl_rollout r on r.trajectory_id = d.child_id "
        "join rl_group g on (g.iteration_id, g.step, g.number) = (r.iteration_id, r.step, r.number) "
        "join trajectory p on p.trajectory_id = d.parent_id "
        "join rl_rollout o on o.trajectory_id = d.parent_id "
        "join rl_group h on (h.iteration_id, h.step, h.number) = (o.iteration_id, o.step, o.number)"
    )
    assert len(derivations) == prefix_groups["episodes"].sum()
    assert set(derivations["operator"]) == {"revision"}
    assert (derivations["position"] == derivations["prefix"]).all()
    assert (derivations["earlier"] < derivations["step"]).all()
    assert (derivations["earlier_prefix"] == 0).all()
    assert not derivations["success"].any()
    steps = store.query("select step, recovered from v_rl_steps order by step")
    assert steps["recovered"].notna().tolist() == [step in set(prefix_groups["step"]) for step in steps["step"]]


GRAPH = "grpo: {credit: graph, states: {key: observation, episode_weight: 0}, graph: {reach: run}}"


@pytest.mark.usefixtures("door_installed")
def test_steps_are_compared_by_the_graph_of_all_that_the_run_stored_and_are_the_same_after_a_kill(
    calm: Path, tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    whole, cut = (groups.write(tmp_path / name, door_model, more=GRAPH) for name in ("whole", "cut"))
    asyncio.run(groups.trained(whole))
    kill_before(cut, 4, process_env)
    asyncio.run(groups.trained(cut))
    assert weights_of(cut) == weights_of(whole) != weights_of(calm)

    store = store_of(whole)
    ((iteration_id,),) = store.rows("select distinct iteration_id from rl_group")
    for step in range(1, STEPS + 1):
        grpo = load(whole).grpo
        step_groups = load_groups(store, iteration_id, step)
        bare = [replace(group, step_advantages=None) for group in step_groups]
        assert with_credit(bare, grpo, store, iteration_id, step) == step_groups, "what comes later has no part in it"
    # An episode that opens the door at once was in one state alone.
    steps = store.query("select * from v_rl_steps order by step")
    assert steps["compared_share"].between(0.5, 1).all()
    assert (steps["praised_unhelpful"].dropna() == 0).all(), "in a state it is right to open, and nothing else"
    assert (steps["state_conflicts"].dropna() == 0).all()
    assert store.query("select * from v_orphans").empty


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.usefixtures("door_installed")
def test_groups_that_go_on_from_the_expert_are_the_same_after_a_kill(
    killed: bool, tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    more = (
        "environment: {options: {knows: true}}\n"
        "grpo: {groups: 5, num_generations: 2, expert_share: 0.5, resample: 0, max_steps: 1}\n"
    )
    if killed:
        whole, _ = whole_and_cut(tmp_path, door_model, process_env, more=more, killed_at=4)
    else:
        whole = groups.write(tmp_path, door_model, more=more)
        asyncio.run(groups.trained(whole))
    assert "episodes of 6 instances, at most 50% after the expert's first steps" in describe(whole, [])

    store = store_of(whole)
    assert store.query("select * from v_orphans").empty
    prefix_groups = store.query("select step, instance_id, prefix, episodes from rl_group where prefix > 0")
    assert len(prefix_groups) > 0
    assert set(prefix_groups["prefix"]) == {1}
    assert prefix_groups.groupby("step").size().max() <= 2
    lost_before = (
        "select count(*) from rl_group h where h.instance_id = g.instance_id and h.step < g.step and h.prefix = 0"
    )
    counts = store.query(
        f"select ({lost_before} and h.wins > 0) as won, ({lost_before}) as played from rl_group g where g.prefix > 0"
    )
    assert set(counts["won"]) == {0}, "only what was never won"
    assert counts["played"].min() > 0
    derivations = store.query(
        "select d.operator, p.source, p.success from derivation d join trajectory p on p.trajectory_id = d.parent_id"
    )
    assert len(derivations) == prefix_groups["episodes"].sum()
    assert set(derivations["operator"]) == {"continuation"}
    assert set(derivations["source"]) == {"expert"}
    assert derivations["success"].all()
    assert store.query("select recovered from v_rl_steps")["recovered"].isna().all(), "no failed episode is mended"


@pytest.mark.usefixtures("door_installed")
def test_a_step_may_have_more_groups_than_there_are_instances(tmp_path: Path, door_model: Path) -> None:
    more = (
        "environment: {options: {knows: true}}\n"
        "grpo: {groups: 9, num_generations: 2, expert_share: 0.5, resample: 1, max_steps: 1}\n"
    )
    file = groups.write(tmp_path, door_model, more=more)
    asyncio.run(groups.trained(file))
    store = store_of(file)
    group_rows = store.query("select step, draw, instance_id, prefix from rl_group")
    assert (group_rows.query("draw == 0").groupby("step").size() == 9).all()
    steps = store.query(
        "select g.step from rl_group g join rl_rollout r using (iteration_id, step, number) "
        "join derivation d on d.child_id = r.trajectory_id where d.operator = 'continuation' and exists "
        "(select * from rl_group h where h.step = g.step and h.draw = g.draw and h.instance_id = g.instance_id "
        "and h.number <> g.number)"
    )
    assert len(steps) > 0, "an instance has a group from the start and one after the expert's first steps"


@pytest.mark.usefixtures("door_installed")
def test_an_expert_that_fails_an_instance_is_told_and_the_training_goes_on(
    tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(env: object, instance: object) -> None:
        raise EnvironmentFault(f"the expert does not solve {instance}")

    monkeypatch.setattr(readings, "expert_trajectory", failing)
    more = (
        "environment: {options: {knows: true}}\n"
        "grpo: {groups: 5, num_generations: 2, expert_share: 0.5, resample: 0, max_steps: 1}\n"
    )
    file = groups.write(tmp_path, door_model, more=more)
    asyncio.run(groups.trained(file))
    rejections = store_of(file).query("select distinct stage, reason from rejection")
    assert rejections.to_numpy().tolist() == [["reinforce", "failed-replay"]]
    assert (store_of(file).query("select prefix from rl_group")["prefix"] == 0).all()


@pytest.mark.usefixtures("door_installed")
def test_groups_without_contrast_say_that_nothing_was_trained_and_why(
    tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door.Door, "parse", lambda self, reply: "wrong")
    file = groups.write(tmp_path, door_model, more="grpo: {steps: 2, resample: 0, max_steps: 1}")
    why = (
        "othing was trained, and the weights are those that the iteration began with: in each of the 6 groups all "
        "episodes have the same reward, so none is better than another (6 groups without a win, 0 with wins)"
    )
    done = asyncio.run(turn(file))
    assert f"N{why}" in done.report.read_text(encoding="utf-8")
    assert why in asyncio.run(groups.trained(file))["note"], "a training that is over says it, too"
    assert len(set(weights_of(file))) == 1
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.usefixtures("door_installed")
def test_an_only_update_that_is_warm_up_says_that_nothing_was_trained(tmp_path: Path, door_model: Path) -> None:
    file = groups.write(tmp_path, door_model, more="grpo: {steps: 1, minibatches: 1}")
    note = asyncio.run(groups.trained(file))["note"]
    assert note.startswith("nothing was trained, and the weights are those that the iteration began with")
    assert note.endswith("set grpo.warmup_ratio=0, or train for more steps")
    assert "note" not in asyncio.run(groups.trained(file, "grpo.warmup_ratio=0"))


@pytest.mark.usefixtures("door_installed")
def test_a_policy_that_answers_nothing_ends_the_training_in_a_sentence(
    tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, mute = TransformersModel._generation, [False]

    def generate(self: TransformersModel, *others: Any) -> Generation:
        reply = whole(self, *others)
        return replace(reply, text="", token_ids=reply.token_ids[-1:], logprobs=(0.0,)) if mute[0] else reply

    monkeypatch.setattr(TransformersModel, "_generation", generate)
    file = groups.write(tmp_path, door_model, more="grpo: {steps: 3, resample: 0, max_steps: 1}")
    play = Rollouts.play

    async def play_muted(self: Rollouts, step: int, *others: Any) -> Any:
        mute[0] = step == 2
        return await play(self, step, *others)

    monkeypatch.setattr(Rollouts, "play", play_muted)
    # The second time from the store.
    for _ in range(2):
        with pytest.raises(TrainingFault, match=r"^all 12 replies of step 2 are empty, so the policy answers nothing"):
            asyncio.run(groups.trained(file))
    assert store_of(file).query("select step from rl_step")["step"].tolist() == [1]


@pytest.mark.usefixtures("door_installed")
def test_without_an_expert_no_group_can_go_on_from_one(tmp_path: Path, door_model: Path) -> None:
    file = groups.write(tmp_path, door_model, more="grpo: {expert_share: 0.5}")
    with pytest.raises(ConfigError, match=r"^grpo.expert_share: environment door has no expert; leave it out$"):
        check(load(file))


@pytest.mark.long
def test_killed_while_it_samples_it_samples_only_what_is_missing(
    calm: Path, tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    file = groups.write(tmp_path, door_model)
    num_rollouts = count(calm, "rl_rollout where step < 2") + 1
    kill_when(file, process_env, partial(has_samples, file, num_rollouts))
    rows_before = all_rows(store_of(file))
    asyncio.run(groups.trained(file))

    assert rows_before <= all_rows(store_of(file))
    texts = (
        "select r.step, r.number, r.episode, s.position, s.reply, s.reward "
        "from rl_rollout r join step s using (trajectory_id) order by all"
    )
    assert store_of(file).query(texts).equals(store_of(calm).query(texts))
    assert weights_of(file) == weights_of(calm)


@pytest.mark.long
@pytest.mark.usefixtures("door_installed")
def test_a_validation_that_is_stored_is_not_played_again(
    calm: Path, tmp_path: Path, door_model: Path, process_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = groups.write(tmp_path, door_model, more=groups.WATCHED)
    kill_before(file, 4, process_env)
    rows_before = all_rows(store_of(file))
    steps = []
    validate = Rollouts.validate

    async def record_validation(rollouts: Rollouts, step: int, policy: Checkpoint) -> None:
        steps.append(step)
        await validate(rollouts, step, policy)

    monkeypatch.setattr(Rollouts, "validate", record_validation)
    asyncio.run(groups.trained(file))

    assert steps == [4], "the state is that of step 2, and the validation of step 3 was there"
    assert rows_before <= all_rows(store_of(file))
    validations = store_of(file).query("select step, episodes, success, reward from v_rl_validations")
    assert validations["step"].tolist() == [1, 2, 3, 4]
    assert (validations["episodes"] == 6).all()
    instances = "select distinct instance_id from rl_validation join trajectory using (trajectory_id)"
    assert sorted(store_of(file).query(instances)["instance_id"]) == [f"door/dev/{index}" for index in range(6)]
    assert store_of(file).query("select * from v_orphans").empty
    assert weights_of(file) == weights_of(calm), "to watch a training changes nothing about it"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grpo.num_generations=1", "grpo.num_generations"),
        ("grpo.repeats=1", "grpo.repeats: 1 would end every episode"),
        ("training.max_tokens=5", "training.max_tokens: grpo.steps says how long it trains"),
        ("data.replay=true", "data: group RL makes no dataset"),
        ("grpo.eval_steps=2", "evaluation.development: grpo.eval_steps needs a development set"),
        ("grpo.states.discount=0.9", "grpo.states: credit episode compares no states"),
        ("grpo.graph.reach=run", "grpo.graph: credit episode makes no graph"),
        ("context=window", "context: method grpo trains whole conversations"),
        ("method=agent-r", "grpo: has no use without an iteration rl"),
        ("method=eto", "grpo: belongs to another method than eto"),
    ],
)
def test_a_wrong_recipe_is_told(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(groups.write(tmp_path, tmp_path), [override])
    assert said in str(caught.value)
