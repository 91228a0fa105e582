"""Exchange with verl: prompts for its reinforcement learning and a script that starts it, and the
reader of the rollouts that it writes.

Source: verl 0.9.1 (`RLHFDataset`, `trainer.rollout_data_dir`, `main_generation`) and the copy of
verl in ET-Agent's repository, whose reward manager `efficiency` reads `data_source`,
`reward_model.ground_truth` and `extra_info.index`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.errors import ConfigError, DataFileError
from agentr_core.exchange.training_set import Origin, SampleRow, TrainingSet, opening_turns
from agentr_core.samples.record_files import records
from agentr_core.types import Message, Sample, SampleKind

FILE, SCRIPT = "train.parquet", "launch.sh"
SOURCES: Mapping[str, str] = {"math": "math_effi_rl", "knowledge": "qa_effi_rl"}
"""The names of data sources that ET-Agent's reward function knows, by the domain of a question."""
ABILITIES: Mapping[str, str] = {"math": "math", "knowledge": "qa"}
_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_INTERACTION = pa.struct([("name", pa.string()), ("instance_id", pa.string())])
_ORIGIN = ("id", "run_id", "recipe", "dataset_id")


def schema(*, has_questions: bool) -> pa.Schema:
    """Return the schema of the table: the columns that verl defines, with all others as fields of
    `extra_info`.

    Args:
        has_questions: whether there are questions with right answers. If so, `ground_truth` is a
            list of strings, otherwise a string, the key of the instance.
    """
    truth = pa.list_(pa.string()) if has_questions else pa.string()
    question_fields = [("question", pa.string()), ("need_tools_kwargs", pa.bool_())] if has_questions else []
    extra = [
        ("index", pa.int64()),
        ("split", pa.string()),
        *question_fields,
        ("instance_id", pa.string()),
        ("interaction_kwargs", _INTERACTION),
        *((name, pa.string()) for name in _ORIGIN),
        ("iteration", pa.int64()),
    ]
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(_TURN)),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", truth)])),
            ("extra_info", pa.struct(extra)),
        ]
    )


def write(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write a table with a row for each instance, in the order of the set, and, if the set has a
    `launch`, a script that trains on it. Return the table's path by the name of the set.

    Raises `ConfigError` if no sample belongs to an instance.
    """
    has_questions = any(row.question for row in training_set.samples)
    rows = [
        _row(index, key, sample, origin, row, has_questions=has_questions)
        for index, (key, sample, origin, row) in enumerate(_first_sample_by_instance(training_set).values())
    ]
    if not rows:
        raise ConfigError(f"{training_set.name} has no sample of an instance to play; choose another format")
    table = pa.Table.from_pylist(rows, schema=schema(has_questions=has_questions))
    pq.write_table(table, folder / FILE)
    if training_set.launch is not None:
        script = folder / SCRIPT
        # The script uses ET-Agent's reward if all rows are questions, else a reward function that
        # the user names.
        uses_efficiency = {row["data_source"] for row in rows} <= {*SOURCES.values()}
        facts = ", ".join(f"{name} {fact}" for name, fact in training_set.facts.items() if name != "counts")
        script.write_text(
            _LAUNCH.format(
                title=shlex.quote(" ".join(training_set.name.split())),
                facts=" ".join(facts.split()),
                count=len(rows),
                needs=_NEEDS_EFFICIENCY if uses_efficiency else _NEEDS_REWARD,
                reward=_EFFICIENCY.format(launch=training_set.launch) if uses_efficiency else _REWARD,
                model=shlex.quote(training_set.launch.model),
                workspace=shlex.quote(training_set.launch.workspace),
                launch=training_set.launch,
            ),
            encoding="utf-8",
        )
        script.chmod(0o755)
    return {"default": FILE}


def prompts_text(training_set: TrainingSet) -> str:
    """Return the number of prompts, as in "12 prompts"."""
    return f"{len(_first_sample_by_instance(training_set))} prompts"


def tools_note(training_set: TrainingSet) -> str:
    """Return a note on how many prompts offer tools, which are left out, since verl reads tools
    from a separate file; empty if none.
    """
    count = sum(
        sample.messages[0].role == "tools" for _, sample, _, _ in _first_sample_by_instance(training_set).values()
    )
    return (
        f"left out are the tools that {count} prompts offer; name them to verl in `data.tool_config_path`"
        if count
        else ""
    )


def _first_sample_by_instance(training_set: TrainingSet) -> dict[str, tuple[str, Sample, Origin, SampleRow | None]]:
    """Return for each instance, by its key, its first sample: the id and the sample (the chosen
    side of a pair), the origin, and the row, which is None for a pair. Samples of judges are
    skipped, and conversations that come later in an episode, such as from a summary on.
    """
    by_instance: dict[str, tuple[str, Sample, Origin, SampleRow | None]] = {}
    for row in training_set.samples:
        if row.sample.instance is not None and row.sample.kind != SampleKind.JUDGE and not _is_later(row.sample):
            by_instance.setdefault(row.sample.instance.key, (row.id, row.sample, row.origin, row))
    for pair in training_set.pairs:
        chosen = pair.preference.chosen
        if chosen.instance is not None:
            by_instance.setdefault(chosen.instance.key, (pair.id, chosen, pair.origin, None))
    return by_instance


def _is_later(sample: Sample) -> bool:
    # The number of the step that a conversation begins with, where an episode has several.
    return bool(sample.provenance.extra.get("conversation"))


def later_conversations_note(training_set: TrainingSet) -> str:
    """Return a note on how many instances are left out, since the set has only later conversations
    of their episodes; empty if none.
    """
    by_instance = _first_sample_by_instance(training_set)
    samples = [row.sample for row in training_set.samples if _is_later(row.sample)]
    keys = {sample.instance.key for sample in samples if sample.instance is not None}
    count = len(keys - by_instance.keys())
    return f"left out are {count} instances, of whose episodes the set lacks the beginning" if count else ""


def prompt_turns(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    """Return the prompt for verl as `role` and `content` of each turn: the turns before the first
    reply, without the `tools` turn.
    """
    return [
        {"role": message.role, "content": message.text}
        for message in opening_turns(messages)
        if message.role != "tools"
    ]


def _row(
    index: int, key: str, sample: Sample, origin: Origin, row: SampleRow | None, *, has_questions: bool
) -> dict[str, Any]:
    instance, question = sample.instance, row.question if row else None
    assert instance is not None
    ground_truth = list(question.golds) if question else [instance.key] if has_questions else instance.key
    return {
        "data_source": question.data_source if question else instance.environment,
        "prompt": prompt_turns(sample.messages),
        "ability": question.ability if question else "agent",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            # ET-Agent's reward manager groups the rollouts of a prompt by this number.
            "index": index,
            "split": instance.split,
            "question": question.text if question else None,
            "need_tools_kwargs": question is not None,
            "instance_id": instance.key,
            "interaction_kwargs": {"name": instance.environment, "instance_id": instance.key},
            "id": key,
            **{name: origin.get(name) for name in ("run_id", "recipe", "dataset_id", "iteration")},
        },
    }


_NEEDS_EFFICIENCY = """\
# Needs: ARPO, the folder ARPO of ET-Agent's repository, with its environment; SEARCH_URL, a server of
# documents (`agentr retrieve --help`); GPUS cards that hold the model. Its tools, its search and its time
# limits are those of ARPO's configuration, not of the recipe."""
_NEEDS_REWARD = """\
# Needs: verl 0.9.1 with vLLM; REWARD, a Python file whose function compute_score(data_source, solution_str,
# ground_truth, extra_info) plays or scores extra_info.instance_id; GPUS cards that hold the model."""
_EFFICIENCY = """\
: "${{ARPO:?name the folder ARPO of the ET-Agent repository}}" "${{SEARCH_URL:?name the address of a retrieval server}}"
export PYTHONPATH="$ARPO/verl_arpo_entropy:${{PYTHONPATH:-}}"
OWN=(
  --config-path="$ARPO/scripts/config" --config-name=ppo_trainer.yaml
  reward_model.reward_manager=efficiency
  reward_model.reward_kwargs.sigma_tool={launch.sigma_calls}
  reward_model.reward_kwargs.sigma_length={launch.sigma_length}
  custom_reward_function.path="$ARPO/verl_arpo_entropy/verl/utils/reward_score/efficiency.py"
  custom_reward_function.name=compute_score
  actor_rollout_ref.rollout.mode=sync_with_tool
  actor_rollout_ref.rollout.initial_rollouts=$(((N + 1) / 2))
  actor_rollout_ref.rollout.beam_size=2
  actor_rollout_ref.rollout.branch_probability=0.5
  actor_rollout_ref.rollout.entropy_weight=0.2
  actor_rollout_ref.rollout.tools.tool_instances.search.use_local_search=True
  actor_rollout_ref.rollout.tools.tool_instances.search.params.localsearch.local_search_url="$SEARCH_URL"
)
MERGE=("$ARPO/verl_arpo_entropy/scripts/model_merger.py")"""
_REWARD = """\
: "${REWARD:?name a Python file with a function compute_score}"
OWN=(custom_reward_function.path="$REWARD" custom_reward_function.name=compute_score)
MERGE=(-m verl.model_merger)"""
_LAUNCH = """\
#!/usr/bin/env bash
# Reinforcement learning in groups with verl on the {count} prompts of train.parquet: {title}.
# Exported by agentr: {facts}.
#
# What ran where: the rows were made where the run is, and files of this form were read by RLHFDataset of
# verl 0.9.1 on a CPU (`make test-verl`). The training below has NOT been run by agentr: it needs GPUs. The
# settings are the recipe's where it has them, else those of ET-Agent's scripts for four cards of 80 GB.
#
{needs}
# Afterwards: the last lines merge the shards and bring weights and rollouts back as an iteration.
set -euo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
MODEL=${{MODEL:-{model}}}          # the policy that the training starts from
WORKSPACE=${{WORKSPACE:-{workspace}}}
OUT=${{OUT:-$HERE/training}}
GPUS=${{GPUS:-4}} N=${{N:-{launch.generations}}} BATCH=${{BATCH:-{launch.groups}}} EPOCHS=${{EPOCHS:-3}}
PROMPT=${{PROMPT:-2000}} RESPONSE=${{RESPONSE:-4096}}
PYTHON=${{PYTHON:-python3}}
{reward}
mkdir -p "$OUT"
"$PYTHON" -m verl.trainer.main_ppo "${{OWN[@]}}" \\
  algorithm.adv_estimator=grpo \\
  algorithm.kl_ctrl.kl_coef=0.0 \\
  data.train_files="$HERE/train.parquet" \\
  data.val_files="$HERE/train.parquet" \\
  data.prompt_key=prompt \\
  data.train_batch_size="$BATCH" \\
  data.max_prompt_length="$PROMPT" \\
  data.max_response_length="$RESPONSE" \\
  data.filter_overlong_prompts=False \\
  data.truncation=error \\
  actor_rollout_ref.model.path="$MODEL" \\
  actor_rollout_ref.model.enable_gradient_checkpointing=True \\
  actor_rollout_ref.model.use_remove_padding=True \\
  actor_rollout_ref.actor.optim.lr={launch.learning_rate} \\
  actor_rollout_ref.actor.ppo_mini_batch_size={launch.minibatch} \\
  actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * (PROMPT + RESPONSE))) \\
  actor_rollout_ref.actor.use_kl_loss=False \\
  actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.n="$N" \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((4 * (PROMPT + RESPONSE))) \\
  trainer.critic_warmup=0 \\
  trainer.logger=[console] \\
  trainer.project_name=agentr \\
  trainer.experiment_name={title} \\
  trainer.nnodes=1 \\
  trainer.n_gpus_per_node="$GPUS" \\
  trainer.total_epochs="$EPOCHS" \\
  trainer.save_freq=30 \\
  trainer.test_freq=-1 \\
  trainer.val_before_train=False \\
  trainer.default_local_dir="$OUT/shards" \\
  trainer.rollout_data_dir="$OUT/rollouts" \\
  "$@"
LAST="$OUT/shards/global_step_$(cat "$OUT/shards/latest_checkpointed_iteration.txt")"
"$PYTHON" "${{MERGE[@]}}" merge --backend fsdp --local_dir "$LAST/actor" --target_dir "$OUT/merged"
agentr import "$OUT" --as iteration --run {launch.run_id} -w "$WORKSPACE"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A reply that verl sampled, from a dump of its trainer or a table of `main_generation`.

    In a dump, `prompt` is the text of the prompt, decoded without special tokens. In a table it is
    empty, and `canonical_prompt` has it (see `canonical_turns`). `score` is the reward in training,
    None for a reply that was not scored. `correctness` is the score without penalties for cost or
    format, None if the reward function did not report it. `is_validation` says whether the rollout
    is of a validation.
    """

    where: str
    step: int
    prompt: str
    reply: str
    score: float | None
    correctness: float | None
    canonical_prompt: str = ""
    instance_id: str = ""
    is_validation: bool = False


def rollout_files(folder: Path) -> list[Path]:
    """Return the JSONL and Parquet files in a folder and its subfolders, sorted by path."""
    return sorted(file for file in folder.rglob("*") if file.suffix in (".jsonl", ".parquet") and file.is_file())


def has_prompts_only(file: Path) -> bool:
    """Return whether a file is a table of prompts without replies, such as `write` makes. Raises
    `DataFileError` when a Parquet file cannot be read.
    """
    if file.suffix != ".parquet":
        return False
    try:
        names = set(pq.read_schema(file).names)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataFileError(f"file {file} cannot be read: {error}; copy it again") from error
    return {"prompt", "reward_model"} <= names and not names & {"output", "responses"}


def read_rollouts(file: Path) -> Iterator[Rollout]:
    """Yield the rollouts of a file in order. The file is a dump with `input` and `output`, as JSONL
    or Parquet, or a table of prompts with a list of `responses` each.

    If the name of its folder begins with `val`, its rollouts are of a validation. Raises
    `DataFileError` when the file cannot be read or a row is malformed.
    """
    is_validation = any(part.startswith("val") for part in file.parent.parts[-1:])
    for number, row in records(file, setting="FOLDER"):
        where = f"{file}:{number}"
        if isinstance(row.get("responses"), list):
            yield from _table_rollouts(row, where, _step(row, file, where), is_validation=is_validation)
        else:
            yield _dump_rollout(row, where, _step(row, file, where), is_validation=is_validation)


def _dump_rollout(row: Mapping[str, Any], where: str, step: int, *, is_validation: bool) -> Rollout:
    prompt, reply = row.get("input"), row.get("output")
    if not isinstance(prompt, str) or not isinstance(reply, str):
        raise DataFileError(
            f"{where} has no texts `input` and `output`, so it is no rollout of verl; move the file out of the folder"
        )
    raw_score = _number(row, "raw_score", where)
    return Rollout(
        where=where,
        step=step,
        prompt=prompt,
        reply=reply,
        score=_number(row, "score", where),
        correctness=_number(row, "acc", where) if raw_score is None else raw_score,
        instance_id=_instance_id(row),
        is_validation=is_validation,
    )


def _table_rollouts(row: Mapping[str, Any], where: str, step: int, *, is_validation: bool) -> Iterator[Rollout]:
    for reply in row["responses"]:
        if not isinstance(reply, str) or not isinstance(row.get("prompt"), list):
            raise DataFileError(f"{where}: `responses` must be texts, beside a list of turns `prompt`; write it again")
        yield Rollout(
            where=where,
            step=step,
            prompt="",
            reply=reply,
            score=None,
            correctness=None,
            canonical_prompt=canonical_turns(row["prompt"]),
            instance_id=_instance_id(row),
            is_validation=is_validation,
        )


def canonical_turns(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the roles and contents of turns as JSON text, to compare prompts by."""
    return json.dumps([[message.get("role"), message.get("content")] for message in messages], ensure_ascii=False)


def _instance_id(row: Mapping[str, Any]) -> str:
    extra = row.get("extra_info")
    instance_id = extra.get("instance_id") if isinstance(extra, Mapping) else None
    return instance_id if isinstance(instance_id, str) else ""


def _step(row: Mapping[str, Any], file: Path, where: str) -> int:
    step = row.get("step", int(file.stem) if file.stem.isdecimal() and len(file.stem) < 10 else 1)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**31:
        raise DataFileError(f"{where}: step is {step!r}; it must be a whole number from 0")
    return step


def _number(row: Mapping[str, Any], key: str, where: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise DataFileError(f"{where}: {key} is {value!r}; it must be a finite number")
    return float(value)
