"""A stage of the curriculum handed over to verl and back: a selection is exported, a small training
takes verl's place, its folder becomes an iteration, and the wheel goes on from its weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import curricula
import groups
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from toy import Line
from wheel import PATIENCE

from agentr_core.errors import ConfigError, DataFileError, ModelDirectoryError, UserError
from agentr_core.fingerprint import file_sha256
from agentr_core.methods.et_agent.selection import rollout, select_questions
from agentr_core.runtime.instances import closed_stages
from agentr_core.runtime.start import begin_iteration, end_iteration, start_run
from agentr_core.stages import outside
from agentr_core.store.database import Store
from agentr_core.training.checkpoints import is_complete
from flows.commands.exporting import data_sources, export_folder
from flows.local import collect_recipe, import_training, run_recipe
from tasks import experience
from tasks.reporting import write_reports
from tasks.wiring import load_recipe, quiet_context, run_reference
from tasks.workspaces import find_run, stored_recipe

pytestmark = pytest.mark.slow
CURRICULUM = {"rollouts": 4, "questions": 4, "learning_rate": 1e-3, "sigma_calls": [0.5] * 4, "sigma_length": [0.2] * 4}
LOOKED_UP = f"{curricula.PHRASES[0]}\n<result>\nOstra lies on the Red River.\n</result>\n"


@pytest.fixture(scope="module")
def model(save_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return curricula.save_model(tmp_path_factory.mktemp("models") / "phrases", save_tiny_model)


def write_curriculum(folder: Path, model: Path) -> Path:
    et_agent = {"phases": ["rl"], "curriculum": CURRICULUM}
    # Its script starts a training of so many groups, in so many parts.
    return curricula.write(folder, model, iterations=1, et_agent=et_agent, grpo={"groups": 4, "steps": 1})


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The workspace of a run whose first iteration has chosen its questions, no more."""
    file = write_curriculum(tmp_path_factory.mktemp("selected"), model)

    async def choose() -> None:
        ctx = await groups.begun(file)
        await end_iteration(ctx, 0)
        await rollout(ctx, 1)
        await select_questions(ctx, 1)

    asyncio.run(choose())
    return file.parent / "runs"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, selected: Path, model: Path) -> Path:
    """A folder as verl leaves it after a training on the selection, with its weights merged."""
    folder = tmp_path_factory.mktemp("trained")
    export_folder(selected, find_run(selected, ""), folder / "verl", "verl")
    train(folder / "out", model, prompts(folder / "verl"))
    return folder / "out"


@pytest.fixture
def workspace(selected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(selected, tmp_path / "runs"))


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "out"))


def prompts(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "train.parquet").to_pylist()
    return rows


def train(folder: Path, model: Path, rows: list[dict[str, Any]]) -> None:
    """Train a model on exported prompts, by a policy gradient whose rewards are read from their
    golds, and write weights and dumps in verl's forms: two prompts a step.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.002)
    (folder / "rollouts").mkdir(parents=True)
    for step in range(1, 1 + len(rows) // 2):
        records = []
        for row in rows[2 * step - 2 : 2 * step]:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
            for reply in (curricula.PHRASES[2], LOOKED_UP + curricula.PHRASES[3], "<think>No.</think>"):
                right = float(f"boxed{{{row['reward_model']['ground_truth'][0]}}}" in reply)
                score = right * (1.1 if "search" not in reply else 0.9) - ("answer" not in reply)
                reply_ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
                labels = torch.tensor([[-100] * len(ids) + reply_ids])
                (policy(input_ids=torch.tensor([ids + reply_ids]), labels=labels).loss * score).backward()
                prompt = tokenizer.decode(ids, skip_special_tokens=True)
                fields = {"gts": row["reward_model"]["ground_truth"], "score": score, "step": step, "raw_score": right}
                records.append({"input": prompt, "output": reply, **fields})
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (folder / "rollouts" / f"{step}.jsonl").write_text(text, encoding="utf-8")
        optimizer.step()
        optimizer.zero_grad()
    policy.save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")


def taken(workspace: Path, folder: Path) -> str:
    """Take a training back as the flow does, but for evaluation and report; return what is said."""
    recipe = stored_recipe(workspace, find_run(workspace, ""))
    recipe = replace(recipe, workspace=str(workspace))
    run = run_reference(recipe)
    training, iteration, is_finished = experience.read_outside(run, recipe, folder)
    assert not is_finished
    return experience.import_weights(run, replace(recipe, iterations=iteration), iteration, training)


def end_in_workspace(workspace: Path, iteration: int) -> None:
    recipe = replace(stored_recipe(workspace, find_run(workspace, "")), workspace=str(workspace))
    asyncio.run(end_iteration(quiet_context(run_reference(recipe), recipe), iteration))


def store_of(workspace: Path) -> Store:
    return Store(workspace / "store.duckdb")


def counts(workspace: Path) -> list[tuple[Any, ...]]:
    tables = ("iteration", "checkpoint", "trajectory", "rl_group", "rl_step", "rl_rollout", "rl_validation")
    store = store_of(workspace)
    return [row for table in tables for row in store.rows(f"select '{table}', count(*) from {table}")]


def test_a_selection_is_exported_with_what_the_published_reward_reads(selected: Path, tmp_path: Path) -> None:
    run_id, store = find_run(selected, ""), store_of(selected)
    assert store.rows("select count(*) from dataset") == store.rows("select count(*) from rl_group") == [(0,)]
    message = export_folder(selected, run_id, tmp_path / "verl", "verl")
    assert message.startswith("4 prompts of curricula-1 in ")
    rows = prompts(tmp_path / "verl")
    instance_ids = store.rows("select instance_id from selection where selected order by 1")
    assert [(row["extra_info"]["instance_id"],) for row in rows] == instance_ids
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        number = int(row["extra_info"]["instance_id"].split("/")[-1])
        question = f"How many mouths has river {number} of train?"
        assert (row["data_source"], row["ability"]) == ("qa_effi_rl", "qa")
        assert row["reward_model"] == {"style": "rule", "ground_truth": [curricula.ANSWERS[number % 2]]}
        assert [turn["role"] for turn in row["prompt"]] == ["system", "user"]
        assert row["prompt"][1]["content"] == row["extra_info"]["question"] == question
        assert (row["extra_info"]["split"], row["extra_info"]["need_tools_kwargs"]) == ("train", True)
        assert row["extra_info"]["run_id"] == run_id

    export_folder(selected, run_id, tmp_path / "own", "verl", sources=data_sources(["knowledge=trivia"]))
    assert {row["data_source"] for row in prompts(tmp_path / "own")} == {"trivia"}
    with pytest.raises(ConfigError, match="--data-source history=x: write math=NAME or knowledge=NAME"):
        data_sources(["history=x"])
    with pytest.raises(
        ConfigError,
        match="is group RL, which has no dataset; only --format verl, atif, claude-code, codex and pi take it",
    ):
        export_folder(selected, run_id, tmp_path / "trl", "trl")


def test_its_script_starts_the_training_merges_and_imports(selected: Path, model: Path, tmp_path: Path) -> None:
    run_id = find_run(selected, "")
    export_folder(selected, run_id, tmp_path / "my run", "verl")
    script = tmp_path / "my run" / "launch.sh"
    assert "has NOT been run by agentr" in script.read_text()
    log, programs = tmp_path / "called", tmp_path / "programs"
    programs.mkdir()
    for name in ("python3", "agentr"):
        text = f'#!/bin/sh\necho "{name} $*" >> "{log}"\n[ "$2" != -m ] || mkdir -p x\n'
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    missing = subprocess.run([script], env=env, capture_output=True, text=True, check=False)
    assert "name the folder ARPO of the ET-Agent repository" in missing.stderr
    shards = tmp_path / "my run" / "training" / "shards"
    shards.mkdir(parents=True)
    (shards / "latest_checkpointed_iteration.txt").write_text("30")
    script_env = {**env, "ARPO": "/arpo", "SEARCH_URL": "http://x/search"}
    subprocess.run([script, "trainer.nnodes=2"], env=script_env, check=True)
    launch, merge, back = log.read_text().splitlines()
    assert launch.startswith("python3 -m verl.trainer.main_ppo ")
    for setting in (
        f"data.train_files={script.parent}/train.parquet",
        f"actor_rollout_ref.model.path={model}",
        "reward_model.reward_manager=efficiency",
        "reward_model.reward_kwargs.sigma_tool=0.5",
        "reward_model.reward_kwargs.sigma_length=0.2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=0.001",
        "data.train_batch_size=4",
        "trainer.nnodes=2",
    ):
        assert f" {setting}" in launch, setting
    assert f"merge --backend fsdp --local_dir {shards}/global_step_30/actor" in merge
    assert back == f"agentr import {shards.parent} --as iteration --run {run_id} -w {selected}"


async def go_on(file: Path, workspace: Path, iterations: int, training: Path | None = None) -> None:
    """Do what the flows do, without Prefect: take a training back, then what is left to do."""
    recipe = load_recipe(file, [f"iterations={iterations}", f"workspace={workspace}"])
    run = run_reference(recipe)
    ctx = quiet_context(run, recipe)
    if training is not None:
        taken(ctx.root, training)
    await start_run(ctx)
    for iteration in range(iterations + 1):
        if iteration:
            await begin_iteration(ctx, iteration)
        over = closed_stages(ctx, iteration)
        for stage in ctx.plan(iteration).stages:
            if stage not in over:
                await stage.work(ctx, iteration)
        await end_iteration(ctx, iteration)
    write_reports(ctx.root, run.run_id)


def check_imported(workspace: Path, out: Path) -> str:
    """Fail unless a training is iteration 1, with rollouts and report; return its checkpoint."""
    store = store_of(workspace)
    (row,) = store.rows(
        "select checkpoint_out, weights_sha256, parent_id = checkpoint_in, config->>'$.outside.source', status "
        "from iteration join checkpoint on checkpoint_id = checkpoint_out where iteration = 1"
    )
    assert row[1:] == (file_sha256(out / "merged" / "model.safetensors"), True, str(out), "finished")
    episodes = store.rows(
        "select step, episode, t.reward, t.success, r.shaped, num_steps, source from rl_rollout r "
        "join trajectory t using (trajectory_id) join iteration i on i.iteration_id = t.iteration_id "
        "where iteration = 1 order by step, number, episode"
    )
    assert len(episodes) == 12
    assert {step for step, *_ in episodes} == {1, 2}
    assert {(episode[2], episode[4]) for episode in episodes if episode[1] == 2} == {(0.0, -1.0)}, "no answer"
    assert {(episode[1], episode[4]) for episode in episodes if episode[2] == 1.0} == {(0, 1.1), (1, 0.9)}
    assert {episode[5] for episode in episodes if episode[1] == 1} == {2}, "a call, and the answer"
    calls = "select tool, provider, key, status, count(*) from tool_call where provider = 'outside' group by all"
    assert store.rows(calls) == [("search", "outside", "Ostra", "ok", 4)]
    text = next((workspace / "reports").rglob("iteration-01.md")).read_text()
    assert "This iteration was trained by another program, outside of agentr" in text
    assert "| **chosen questions** | 4 |" in text
    assert "| **trained episodes** | 12 |" in text
    assert store.query("select * from v_orphans").empty
    return str(row[0])


def check_gone_on(workspace: Path, checkpoint: str, out: Path) -> None:
    """Fail unless iteration 2 began with the imported weights, and the store says so."""
    store = store_of(workspace)
    assert store.rows("select checkpoint_in, status from iteration where iteration = 2") == [(checkpoint, "finished")]
    line = "select generation, outside_source from v_ancestors join iteration on checkpoint_out = checkpoint_id "
    assert store.rows(f"{line} where iteration.iteration = 2 order by 1") == [(1, str(out)), (2, None)]
    assert store.rows("select count(*) from rl_group join iteration using (iteration_id) where iteration = 1") == [(4,)]


def test_a_round_by_another_program_is_an_iteration_and_the_wheel_goes_on(
    selected: Path, workspace: Path, folder: Path
) -> None:
    file = selected.parent / "curricula.yaml"
    asyncio.run(go_on(file, workspace, 1, folder))
    checkpoint = check_imported(workspace, folder)
    asyncio.run(go_on(file, workspace, 2))
    check_gone_on(workspace, checkpoint, folder)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_the_commands_do_the_same_and_a_second_import_changes_nothing(
    model: Path, tmp_path: Path, prefect_server: None
) -> None:
    file = write_curriculum(tmp_path, model)
    workspace, out = tmp_path / "runs", tmp_path / "verl" / "training"
    collect_recipe(file, [], limit=None, enough=1)
    run_id = find_run(workspace, "")
    export_folder(workspace, run_id, tmp_path / "verl", "verl")
    train(out, model, prompts(tmp_path / "verl"))
    # The prompts may lie where the trainer wrote.
    shutil.copyfile(tmp_path / "verl" / "train.parquet", out / "train.parquet")

    message = import_training(out, workspace, "")
    assert f"iteration 1 of run {run_id}: checkpoint " in message
    assert "12 rollouts of 4 questions; " in message
    assert f"{out / 'train.parquet'} has prompts without replies" in message
    checkpoint, before = check_imported(workspace, out), counts(workspace)
    assert import_training(out, workspace, run_id[:5]) == (
        f"iteration 1 of run {run_id} is this training already; nothing was changed"
    )
    assert counts(workspace) == before
    run_recipe(file, ["iterations=2"])
    check_gone_on(workspace, checkpoint, out)


def test_a_changed_training_is_the_next_iteration(workspace: Path, folder: Path) -> None:
    taken(workspace, folder)
    (folder / "rollouts" / "2.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"iteration 1 of run .* has a training of its own, and is not finished"):
        taken(workspace, folder)
    end_in_workspace(workspace, 1)
    assert taken(workspace, folder).startswith("iteration 2 of run ")
    end_in_workspace(workspace, 2)
    shutil.rmtree(folder / "rollouts")
    assert "0 rollouts of 0 questions" in taken(workspace, folder), "weights alone"
    lines = (
        "select iteration, parent_id = checkpoint_in from iteration join checkpoint on checkpoint_out = checkpoint_id"
    )
    assert store_of(workspace).rows(f"{lines} where iteration > 0 order by 1") == [(1, True), (2, True), (3, True)]
    for number in (3, 4):
        end_in_workspace(workspace, number)
        (folder / f"{number}.jsonl").write_text("")
        if number == 3:
            taken(workspace, folder)
    with pytest.raises(ConfigError, match=r"has no iteration 5 that trains: et_agent.curriculum.sigma_calls: the rec"):
        taken(workspace, folder)


def test_tables_of_generations_and_validations_are_read(workspace: Path, folder: Path) -> None:
    """As `verl.trainer.main_generation` writes a table: the prompts with the replies to each."""
    shutil.rmtree(folder / "rollouts")
    export_folder(workspace, find_run(workspace, ""), folder.parent / "verl", "verl")
    rows = [row | {"responses": [curricula.PHRASES[2], "none"]} for row in prompts(folder.parent / "verl")]
    for row in rows:
        del row["extra_info"]
    (folder / "generated").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "generated" / "3.parquet")
    (folder / "validation").mkdir()
    validation = {
        "input": "How many mouths has river 1 of test?",
        "output": curricula.PHRASES[3],
        "score": 1.0,
        "step": 10,
    }
    (folder / "validation" / "10.jsonl").write_text(json.dumps(validation) + "\n")
    taken(workspace, folder)
    store = store_of(workspace)
    rewards = store.rows(
        "select step, t.reward, r.shaped, count(*) from rl_rollout r join trajectory t using (trajectory_id) "
        "group by all order by 2"
    )
    wins = sum(row["reward_model"]["ground_truth"] == ["1"] for row in rows)
    assert rewards == [(3, 0.0, None, 8 - wins), (3, 1.0, None, wins)], "by the rule of the world"
    assert store.rows("select step, source from rl_validation join trajectory using (trajectory_id)") == [
        (10, "validation")
    ]


def test_weights_in_several_files_come_back_without_a_tokenizer_of_their_own(workspace: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(folder / "merged")
    shutil.rmtree(folder / "merged")
    policy.save_pretrained(folder / "merged", max_shard_size="20KB")
    assert len(list((folder / "merged").glob("*.safetensors"))) > 1
    assert "; it has no tokenizer, so the run's goes on" in taken(workspace, folder)
    ((path,),) = store_of(workspace).rows("select path from checkpoint where iteration_id is not null")
    assert is_complete(Path(path))
    weights = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in policy.state_dict().items())
    assert (Path(path) / "tokenizer.json").is_file()


def test_rollouts_of_a_world_of_turns_are_refused(folder: Path) -> None:
    with pytest.raises(DataFileError, match=r"1.jsonl:1: episodes of line are turns, .* import its checkpoint alone"):
        outside._check_world(Line(), outside.read_training(folder))


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}), encoding="utf-8")


def _rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "rollouts" / "1.jsonl"
    line, *lines = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({**json.loads(line), **changes}), *lines]), encoding="utf-8")


def _leave_shard(folder: Path, name: str) -> None:
    shutil.rmtree(folder / "merged")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(b"")


def _other_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "merged" / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (shutil.rmtree, ConfigError, r"out is no folder|does not exist|is no folder"),
        (lambda f: shutil.rmtree(f / "merged"), ModelDirectoryError, "has no checkpoint: no folder with config.json"),
        (
            lambda f: _leave_shard(f, "global_step_30/actor/model_world_size_4_rank_0.pt"),
            ConfigError,
            r"run `python -m verl.model_merger merge --backend fsdp --local_dir \S+/global_step_30/actor --target_dir",
        ),
        (
            lambda f: _leave_shard(f, "global_step_30/actor/dist_ckpt/__0_0.distcp"),
            ConfigError,
            r"merge --backend megatron --local_dir \S+/global_step_30/actor --target_dir MERGED`",
        ),
        (lambda f: shutil.copytree(f / "merged", f / "more"), ConfigError, "has 2 checkpoints .* leave one"),
        (
            lambda f: _edit(f / "merged" / "config.json", num_attention_heads=1),
            ModelDirectoryError,
            "is another model than .*: its num_attention_heads is '?1'? and not",
        ),
        (
            lambda f: _other_weights(f, lambda w: w.pop("model.norm.weight")),
            ModelDirectoryError,
            r"weight model.norm.weight is missing there and has shape \(32,\) here",
        ),
        (
            lambda f: _other_weights(f, lambda w: w["model.norm.weight"].fill_(float("nan"))),
            ModelDirectoryError,
            "weight model.norm.weight has numbers that are not finite",
        ),
        (
            lambda f: (f / "merged" / "chat_template.jinja").write_text("{{ messages[0].content }}"),
            ModelDirectoryError,
            "the chat template in .* is not that of",
        ),
        (lambda f: _rewrite(f, input="What is new?"), DataFileError, "1.jsonl:1: .* knows no question with the prompt"),
        (lambda f: _rewrite(f, output=None), DataFileError, "1.jsonl:1 has no texts `input` and `output`"),
        (lambda f: _rewrite(f, score=float("nan")), DataFileError, "1.jsonl:1: score is nan; it must be a finite"),
        (lambda f: _rewrite(f, step="one"), DataFileError, "1.jsonl:1: step is 'one'"),
        (lambda f: (f / "x.parquet").write_text("no"), DataFileError, "x.parquet cannot be read"),
        (
            lambda f: pq.write_table(pa.table({"input": ["a"], "output": ["b"], "step": [None]}), f / "x.parquet"),
            DataFileError,
            "x.parquet:1: step is None",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_sentence(
    workspace: Path, folder: Path, damage: Callable[[Path], Any], error: type[UserError], said: str
) -> None:
    before = counts(workspace)
    damage(folder)
    with pytest.raises(error, match=said) as caught:
        taken(workspace, folder)
    assert "\n" not in str(caught.value)
    assert counts(workspace) == before
    assert not list((workspace / "checkpoints").glob("*/model.safetensors")), "nothing is left of it"


def test_a_rollout_of_a_held_out_question_is_refused(workspace: Path, folder: Path) -> None:
    _rewrite(folder, input="How many mouths has river 1 of test?")
    with pytest.raises(DataFileError, match="reasoning/test/1 is held out for evaluation"):
        taken(workspace, folder)


@pytest.mark.parametrize("moment", ["publish", "checkpoint_rows"])
def test_what_breaks_an_import_leaves_nothing_and_it_happens_the_next_time(
    workspace: Path, folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counts(workspace)

    def broken(*args: Any, **options: Any) -> Any:
        raise OSError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(outside, moment, broken)
        with pytest.raises(OSError, match="the power is gone"):
            taken(workspace, folder)
    check_untouched(workspace, before, folder)


def check_untouched(workspace: Path, before: list[tuple[Any, ...]], folder: Path) -> None:
    """Fail unless the store is as it was, and an import then succeeds and leaves one folder."""
    assert counts(workspace) == before
    taken(workspace, folder)
    assert len(store_of(workspace).rows("select * from rl_rollout")) == 12
    (checkpoint,) = (workspace / "checkpoints").iterdir()
    assert (checkpoint / "manifest.json").is_file()


KILLED = """
import os, signal, sys
from pathlib import Path
import test_handover
from agentr_core.stages import outside
def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(outside, sys.argv[1], die)
test_handover.taken(Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.long
@pytest.mark.parametrize("moment", ["publish", "checkpoint_rows"])
def test_killed_in_its_midst_an_import_has_not_happened_and_happens_the_next_time(
    workspace: Path, folder: Path, process_env: dict[str, str], moment: str
) -> None:
    before = counts(workspace)
    path = os.pathsep.join([str(Path(__file__).parent), process_env.get("PYTHONPATH", ""), *filter(None, sys.path)])
    command = [sys.executable, "-c", KILLED, moment, str(workspace), str(folder)]
    process = subprocess.run(command, env={**process_env, "PYTHONPATH": path}, check=False, timeout=PATIENCE)
    assert process.returncode == -SIGKILL
    check_untouched(workspace, before, folder)
