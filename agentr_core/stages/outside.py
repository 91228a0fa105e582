"""Import of a training that another program did as an iteration: its weights become the checkpoint
of the iteration, and its rollouts the groups of its steps.

Everything is read and checked first, and then stored in one transaction, at the end of which the
folder of the weights gets its name. So a killed import has happened either wholly or not at all,
and repeating it completes it.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.errors import ConfigError, DataFileError, EnvironmentFault, ModelDirectoryError, StoreError
from agentr_core.exchange import verl
from agentr_core.exchange.verl import Rollout
from agentr_core.fingerprint import canonical, file_sha256, fingerprint
from agentr_core.models.checkpoint_dir import (
    ADAPTER_CONFIG,
    adapter_base,
    checkpoint_folder,
    weight_files,
    weights_sha256,
)
from agentr_core.reports.document import Column, Row, Section, Table
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.equipment import Checkpoint
from agentr_core.runtime.instances import held_out_by_set
from agentr_core.runtime.start import step_rows_hash
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.store.codec.ledger import (
    VALIDATION,
    Group,
    checkpoint_rows,
    group_rows,
    iteration_rows,
    rl_step_rows,
    validation_rows,
)
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import single_transaction
from agentr_core.store.queries.listings import stored_instances
from agentr_core.store.queries.runs import checkpoint_of_iteration, count_finished_iterations, outside_trainings
from agentr_core.store.queries.trees import step_hashes
from agentr_core.store.tables import Rows, merge
from agentr_core.texts import count_text, path_for_message, quoted
from agentr_core.training.checkpoints import HISTORY, Manifest, is_complete, publish, read_manifest, relative_to_cwd
from agentr_core.training.group.advantages import group_advantages, has_contrast
from agentr_core.training.job import write_atomically
from agentr_core.types import Instance, Trajectory

PROGRAM = "verl"
_MERGE_COMMAND = "python -m verl.model_merger merge --backend {backend} --local_dir {folder} --target_dir MERGED"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_OTHER_FILES = ("manifest.json", "job.json", "README.md", ADAPTER_CONFIG, HISTORY, "model.safetensors.index.json")
_IGNORED_CONFIG_KEYS = (
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "transformers_version",
)
_TIED_WEIGHTS = ("lm_head.weight",)
"""Weights tied to the input embedding: files of the same model may or may not have a copy of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideTraining:
    """A training by another program, read from its folder. `weights` is the hash of its weights,
    `files` that of weights and rollouts; `left_out` says which files were not read, and why.
    """

    folder: Path
    checkpoint: Path
    weights: str
    rollouts: tuple[Rollout, ...]
    files: str
    left_out: tuple[str, ...] = ()


def read_training(folder: Path) -> OutsideTraining:
    """Return the checkpoint and the rollouts in a folder, or in folders below it.

    Raises `ConfigError` or `ModelDirectoryError` unless there is exactly one whole checkpoint in
    the format of Hugging Face, and `DataFileError` if a file of rollouts is malformed.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{path_for_message(folder)} is no folder; name that of a training, with its checkpoint and rollouts"
        )
    checkpoint = _checkpoint_in(folder)
    weights = weights_sha256(checkpoint)
    candidates = verl.rollout_files(folder)
    prompts = [file for file in candidates if verl.has_prompts_only(file)]
    files = [file for file in candidates if file not in prompts]
    rollouts = tuple(rollout for file in files for rollout in verl.read_rollouts(file))
    hashes = [(str(file.relative_to(folder)), file_sha256(file)) for file in files]
    return OutsideTraining(
        folder=folder,
        checkpoint=checkpoint,
        weights=weights,
        rollouts=rollouts,
        files=fingerprint("outside", weights, hashes),
        left_out=tuple(f"{file} has prompts without replies" for file in prompts),
    )


def _checkpoint_in(folder: Path) -> Path:
    folders = sorted({file.parent for file in folder.rglob("*.safetensors") if (file.parent / "config.json").is_file()})
    if len(folders) > 1:
        raise ConfigError(
            f"{folder} has {len(folders)} checkpoints ({folders[0]} and {folders[1]} among them), and one is an "
            "iteration; leave one in the folder"
        )
    if folders:
        return folders[0]
    for pattern, backend, num_levels in (("model_world_size_*_rank_*.pt", "fsdp", 1), ("*.distcp", "megatron", 2)):
        if shard := next(iter(sorted(folder.rglob(pattern))), None):
            command = _MERGE_COMMAND.format(backend=backend, folder=shard.parents[num_levels - 1])
            raise ConfigError(
                f"{shard.parents[num_levels - 1]} has the shards of a checkpoint, which verl itself merges; run "
                f"`{command}`, with MERGED a folder below {folder}, and import again"
            )
    raise ModelDirectoryError(
        f"{folder} has no checkpoint: no folder with config.json and weights in *.safetensors; save the model with "
        "save_pretrained, or merge the shards of verl with `python -m verl.model_merger`"
    )


def find_import(ctx: RunContext, training: OutsideTraining) -> tuple[int, bool] | None:
    """Return the iteration of the run as which a training was imported, and whether that import is
    finished; None if it was not imported.
    """
    matches = [record for record in outside_trainings(ctx.store, ctx.run_id) if record.files == training.files]
    return (matches[-1].iteration, matches[-1].finished) if matches else None


def next_iteration(ctx: RunContext) -> int:
    """Return the number of the first iteration that is not finished: an imported training becomes
    this one.

    Raises `ConfigError` if it has begun to train here.
    """
    number = count_finished_iterations(ctx.store, ctx.run_id) + 1
    key = ctx.iteration_id(number)
    if checkpoint_of_iteration(ctx.store, key) is not None or step_hashes(ctx.store, key):
        raise ConfigError(
            f"iteration {number} of run {ctx.run_id} has a training of its own, and is not finished; end it with "
            "`agentr run`, and import what was trained outside as the next one"
        )
    return number


def import_training(ctx: RunContext, iteration: int, training: OutsideTraining) -> str:
    """Check that a training outside fits the run, store it as an iteration, and return a sentence
    that says what was stored.

    Raises:
        ConfigError: the iteration cannot be of this run.
        ModelDirectoryError: architecture, tokenizer or weights do not fit the run's model.
        DataFileError: a rollout is of a question that the store does not know, or a training
            rollout of one that is held out.
    """
    check_plan(ctx, iteration)
    policy = ctx.policy(iteration)
    _check_model(training.checkpoint, policy.path)
    iteration_id = ctx.iteration_id(iteration)
    checkpoint_id = fingerprint("checkpoint", "outside", iteration_id, training.files)
    tokenizer = load_tokenizer(policy.path)
    rollouts = _recall_rollouts(ctx, iteration, training, Renderer(tokenizer, at=ctx.started_at()), tokenizer)
    steps = _rows_by_step(
        ctx,
        iteration,
        checkpoint_id,
        [episode for episode in rollouts if not episode.rollout.is_validation],
        tokenizer,
    )
    rows = [*steps.values()]
    validations: dict[int, list[str]] = {}
    for episode in rollouts:
        if episode.rollout.is_validation:
            validations.setdefault(episode.rollout.step, []).append(episode.key)
    rows += [validation_rows(iteration_id, step, keys) for step, keys in validations.items()]
    for episode in rollouts:
        source = VALIDATION if episode.rollout.is_validation else "rollout"
        rows.append(trajectory_rows(episode.key, episode.trajectory, source=source, iteration_id=iteration_id))
    _store_training(ctx, iteration, training, policy, checkpoint_id, merge(rows), sorted(steps))
    counts = (
        f"{count_text(len(training.rollouts), 'rollout')} of "
        f"{count_text(len({p.instance for p in rollouts}), 'question')}"
    )
    note = "" if _has_tokenizer(training.checkpoint) else "; it has no tokenizer, so the run's goes on"
    return "; ".join(
        [f"iteration {iteration} of run {ctx.run_id}: checkpoint {checkpoint_id}, {counts}{note}", *training.left_out]
    )


def check_plan(ctx: RunContext, iteration: int) -> None:
    """Raise `ConfigError` if the run has no such iteration, if that trains nothing, or if the run
    belongs to a comparison.
    """
    reason = next(iter(ctx.method.faults(replace(ctx.recipe, iterations=iteration))), "")
    if ctx.method.flow != "flywheel" or ctx.recipe.compare.pool:
        reason = "it belongs to a comparison"
    if reason or not any(stage.makes == "checkpoint" for stage in ctx.plan(iteration).stages):
        raise ConfigError(
            f"run {ctx.run_id} has no iteration {iteration} that trains: {reason or 'its recipe plans none'}"
        )


def _check_model(checkpoint: Path, policy: Path) -> None:
    """Raise `ModelDirectoryError` unless a checkpoint has the architecture, the tokenizer and the
    weights of the model that the iteration begins with, by name and shape.
    """
    from transformers import AutoConfig

    try:
        their_config = AutoConfig.from_pretrained(checkpoint, local_files_only=True).to_dict()
    # What a foreign file makes the library raise is anyone's guess.
    except Exception as error:
        raise ModelDirectoryError(f"{checkpoint / 'config.json'} cannot be read: {' '.join(str(error).split())}") from (
            error
        )
    our_config = AutoConfig.from_pretrained(adapter_base(policy) or policy, local_files_only=True).to_dict()
    for name in sorted(our_config.keys() | their_config.keys()):
        if name in _IGNORED_CONFIG_KEYS or name.endswith("token_id") or name == "use_cache":
            continue
        if our_config.get(name) != their_config.get(name):
            raise ModelDirectoryError(
                f"{checkpoint} is another model than {policy}, with which the iteration begins: its {name} is "
                f"{quoted(repr(their_config.get(name)), 60)} and not {quoted(repr(our_config.get(name)), 60)}"
            )
    shapes, their_shapes = (
        dict(_weight_shapes(adapter_base(policy) or policy)),
        dict(_weight_shapes(checkpoint, finite=True)),
    )
    for name in sorted(shapes.keys() | their_shapes.keys()):
        if our_config.get("tie_word_embeddings") and name in _TIED_WEIGHTS:
            continue
        if shapes.get(name) != their_shapes.get(name):
            in_checkpoint, in_policy = (
                f"has shape {model_shapes[name]}" if name in model_shapes else "is missing"
                for model_shapes in (their_shapes, shapes)
            )
            raise ModelDirectoryError(
                f"{checkpoint} does not fit {policy}, with which the iteration begins: weight {name} "
                f"{in_checkpoint} there and {in_policy} here"
            )
    if not _has_tokenizer(checkpoint):
        return
    their_tokenizer, our_tokenizer = load_tokenizer(checkpoint), load_tokenizer(policy)
    if their_tokenizer.get_vocab() != our_tokenizer.get_vocab():
        raise ModelDirectoryError(
            f"the tokenizer in {checkpoint} is not that of {policy}, with which the iteration begins: they differ in "
            "their tokens"
        )
    if (
        their_tokenizer.chat_template
        and our_tokenizer.chat_template
        and their_tokenizer.chat_template.strip() != our_tokenizer.chat_template.strip()
    ):
        raise ModelDirectoryError(
            f"the chat template in {checkpoint} is not that of {policy}, with which the iteration begins; train with "
            "that one"
        )


def _weight_shapes(folder: Path, *, finite: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if finite and not bool(tensors.get_tensor(name).isfinite().all()):
                    raise ModelDirectoryError(f"{file}: weight {name} has numbers that are not finite; train it again")
                yield name, tuple(tensors.get_slice(name).get_shape())


def _has_tokenizer(checkpoint: Path) -> bool:
    return any((checkpoint / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredRollout:
    """A rollout as an episode, to be stored under the id `key`."""

    key: str
    rollout: Rollout
    instance: Instance
    trajectory: Trajectory


def _recall_rollouts(
    ctx: RunContext, iteration: int, training: OutsideTraining, renderer: Renderer, tokenizer: Any
) -> list[_StoredRollout]:
    if not training.rollouts:
        return []
    episodes: list[_StoredRollout] = []
    with ctx.worlds() as worlds:
        for _, env in worlds:
            _check_world(env, training)
        questions = _InstancesByPrompt(ctx, renderer, tokenizer)
        for number, rollout in enumerate(training.rollouts):
            instance = questions.instance_of(rollout)
            env = worlds.env_of(instance)
            assert env.has(Environment.recall)
            # A score outside [0, 1] is no reward but has a penalty or a bonus: where the dump tells
            # nothing else, the world's rule decides.
            scores = (rollout.correctness, rollout.score)
            reward = next((score for score in scores if score is not None and 0 <= score <= 1), None)
            episodes.append(
                _StoredRollout(
                    key=fingerprint("outside", ctx.iteration_id(iteration), training.files, number),
                    rollout=rollout,
                    instance=instance,
                    trajectory=env.recall(instance, rollout.reply, reward),
                )
            )
    return episodes


def _check_world(env: Environment, training: OutsideTraining) -> None:
    if not env.has(Environment.recall) or not isinstance(transcript_of(env), Continuation):
        raise DataFileError(
            f"{training.rollouts[0].where}: episodes of {env.name} are turns, which a dump has as one text that cannot "
            "be parted; move the rollouts out of the folder to import its checkpoint alone"
        )


class _InstancesByPrompt:
    """The instances that a store knows, by the texts of their prompts."""

    def __init__(self, ctx: RunContext, renderer: Renderer, tokenizer: Any) -> None:
        self._store = ctx.store
        self._held_out = {instance.key for instances in held_out_by_set(ctx).values() for instance in instances}
        self._by_id: dict[str, Instance] = {}
        self._by_text: dict[str, Instance] = {}
        self._instructions: set[str] = set()
        with ctx.worlds() as worlds:
            names = {env.name for _, env in worlds}
            for instance in stored_instances(ctx.store):
                if instance.environment in names:
                    self._add(instance, worlds.env_of(instance), renderer, tokenizer)

    def _add(self, instance: Instance, env: Environment, renderer: Renderer, tokenizer: Any) -> None:
        try:
            messages = transcript_of(env).prompt(env, env.reset(instance), ())
        except EnvironmentFault:
            # The environment of this recipe does not have it: it is of another run.
            return
        prompt = _single_spaced(tokenizer.decode(renderer.render_prompt(messages), skip_special_tokens=True))
        instruction = _single_spaced(messages[0].text)
        self._instructions.add(instruction)
        self._by_id[instance.key] = instance
        turns = verl.canonical_turns(verl.prompt_turns(messages))
        for text in (prompt, prompt[max(0, prompt.find(instruction)) :], turns, _single_spaced(messages[-1].text)):
            self._by_text.setdefault(text, instance)

    def instance_of(self, rollout: Rollout) -> Instance:
        """Return the instance of a rollout's question. Raises `DataFileError` if the store does not
        know it, or training must not see it.
        """
        instance = self._by_id.get(rollout.instance_id) or self._find_by_text(rollout)
        if instance is None:
            raise DataFileError(
                f"{rollout.where}: {self._store.path} knows no question with the prompt "
                f"{quoted(rollout.prompt or rollout.canonical_prompt, 120)}; import into the workspace of the run "
                "whose prompts were exported"
            )
        if instance.key in self._held_out and not rollout.is_validation:
            raise DataFileError(
                f"{rollout.where}: {instance.key} is held out for evaluation, and a training must not see it; train on "
                "other questions, or put dumps of a validation into a folder `validation`"
            )
        return instance

    def _find_by_text(self, rollout: Rollout) -> Instance | None:
        if rollout.canonical_prompt:
            return self._by_text.get(rollout.canonical_prompt)
        prompt = _single_spaced(rollout.prompt)
        if prompt in self._by_text:
            return self._by_text[prompt]
        # Some templates write something before the instruction, such as the date.
        starts = [at for instruction in self._instructions if instruction and (at := prompt.find(instruction)) >= 0]
        return next((self._by_text[prompt[at:]] for at in starts if prompt[at:] in self._by_text), None)


def _single_spaced(text: str) -> str:
    return " ".join(text.split())


def _rows_by_step(
    ctx: RunContext, iteration: int, checkpoint_id: str, rollouts: Sequence[_StoredRollout], tokenizer: Any
) -> dict[int, Rows]:
    """Return the rows of each step, by its number: its groups, one for each instance, and its
    measures.
    """
    rollouts_by_step: dict[int, dict[str, list[_StoredRollout]]] = {}
    for attempt in rollouts:
        rollouts_by_step.setdefault(attempt.rollout.step, {}).setdefault(attempt.instance.key, []).append(attempt)
    rows_by_step: dict[int, Rows] = {}
    for step, members in sorted(rollouts_by_step.items()):
        groups: list[Group] = []
        for number, attempts in enumerate(members.values()):
            scores = [attempt.rollout.score for attempt in attempts]
            groups.append(
                Group(
                    number=number,
                    draw=0,
                    policy=f"{checkpoint_id}@{step - 1}",
                    instance=attempts[0].instance,
                    episodes={attempt.key: attempt.trajectory for attempt in attempts},
                    shaped_rewards=None if None in scores else tuple(score for score in scores if score is not None),
                )
            )
        tokens = [
            [len(tokenizer(attempt.rollout.reply, add_special_tokens=False)["input_ids"]) for attempt in attempts]
            for attempts in members.values()
        ]
        rows = [
            group_rows(
                group,
                group_advantages(group.compared_rewards, scale=ctx.recipe.grpo.scale_rewards),
                iteration_id=ctx.iteration_id(iteration),
                step=step,
                has_contrast=has_contrast(group.compared_rewards),
            )
            for group in groups
        ]
        episodes = [episode for group in groups for episode in group.episodes.values()]
        shaped_rewards = [reward for group in groups for reward in group.shaped_rewards or ()]
        mixed_flags = [has_contrast(group.compared_rewards) for group in groups]
        counts = [count for lengths in tokens for count in lengths]
        # Rollouts say nothing of the updates, so these measures stay unknown.
        unknown = ("loss", "entropy", "kl", "sampler_kl", "clip_share", "grad_norm", "recovered", "cut_share")
        measures = {
            "reward": fmean(episode.reward for episode in episodes),
            "shaped": fmean(shaped_rewards) if shaped_rewards else None,
            "pass_at_1": fmean(episode.success for episode in episodes),
            "pass_at_n": fmean(group.num_wins > 0 for group in groups),
            "mixed_share": fmean(mixed_flags),
            "drawn_again": 0,
            "episode_tokens": fmean(counts),
            "episode_steps": fmean(len(episode.steps) for episode in episodes),
            "sampled_tokens": sum(counts),
            "trained_tokens": sum(
                sum(lengths) for lengths, is_mixed in zip(tokens, mixed_flags, strict=True) if is_mixed
            ),
            **dict.fromkeys((*unknown, "learning_rate", "sampling_seconds", "training_seconds")),
        }
        rows_by_step[step] = merge([*rows, rl_step_rows(ctx.iteration_id(iteration), step, measures)])
    return rows_by_step


def _store_training(
    ctx: RunContext,
    iteration: int,
    training: OutsideTraining,
    policy: Checkpoint,
    checkpoint_id: str,
    rows: Rows,
    steps: Sequence[int],
) -> None:
    iteration_id, destination = ctx.iteration_id(iteration), checkpoint_folder(ctx.root, checkpoint_id)
    record = {
        "program": PROGRAM,
        "source": str(training.folder.resolve()),
        "files": training.files,
        "rollouts": len(training.rollouts),
        "steps": len(steps),
    }
    staging = None if is_complete(destination) else _stage_files(destination, training, policy, iteration_id)
    iteration_row = iteration_rows(
        iteration_id, run_id=ctx.run_id, iteration=iteration, checkpoint_in=policy.id, checkpoint_out=checkpoint_id
    )
    with single_transaction(ctx.store) as state:
        state.write(merge([iteration_row, rows]))
        rows_hash = step_rows_hash(replace(ctx, store=state), iteration_id)
        if staging is not None:
            publish(staging, destination, _manifest(training, policy, iteration_id, rows_hash, len(steps)))
        elif read_manifest(destination).rows != rows_hash:
            raise StoreError(f"{destination} was made of other rollouts; move that folder away and import again")
        state.write(
            checkpoint_rows(
                checkpoint_id,
                path=str(relative_to_cwd(destination)),
                weights_sha256=training.weights,
                config={"outside": record},
                parent_id=policy.id,
                iteration_id=iteration_id,
            )
        )
    shutil.rmtree(_staging_parent(destination), ignore_errors=True)


def _staging_parent(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.import")


def _stage_files(destination: Path, training: OutsideTraining, policy: Checkpoint, iteration_id: str) -> Path:
    """Copy the weights into a staging folder beside `destination`, with all other files of the
    model that the iteration begins with, so that tokenizer and configuration stay the same. Return
    the folder.
    """
    if destination.exists():
        raise StoreError(f"{destination} exists and is not a complete checkpoint; remove it")
    parent = _staging_parent(destination)
    staging = parent / "staging"
    shutil.rmtree(parent, ignore_errors=True)
    staging.mkdir(parents=True)
    # `agentr store prune` reads in it which iteration the folder belongs to.
    write_atomically(parent / "job.json", canonical({"iteration": iteration_id}).encode())
    for file in weight_files(training.checkpoint):
        shutil.copyfile(file, staging / file.name)
    # An adapter has the configuration of its base model, but a tokenizer of its own.
    for folder in filter(None, (adapter_base(policy.path), policy.path)):
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and file.name not in _OTHER_FILES:
                shutil.copyfile(file, staging / file.name)
    index = training.checkpoint / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, staging / index.name)
    (staging / HISTORY).write_bytes(b"")
    # The hash is cached here, so that the transaction below is short.
    weights_sha256(staging)
    return staging


def _manifest(training: OutsideTraining, policy: Checkpoint, iteration_id: str, rows_hash: str, steps: int) -> Manifest:
    """Return the manifest of a training of which neither settings, nor loss, nor time are known."""
    return Manifest(
        job=training.files,
        parent=policy.id,
        dataset_hash="",
        config={},
        seed=0,
        steps=steps,
        epochs=0.0,
        trained_tokens=0,
        final_loss=0.0,
        seconds=0.0,
        versions={"python": platform.python_version()},
        ended_by=PROGRAM,
        rows=rows_hash,
        parent_weights=policy.weights_sha256,
        iteration=iteration_id,
    )


def outside_section(ctx: RunContext, iteration: int) -> tuple[Section, ...]:
    """Return the report's section on a training by another program; none for our own trainings."""
    for training in outside_trainings(ctx.store, ctx.run_id):
        if training.iteration == iteration:
            facts: Mapping[str, str] = {
                "Program": training.program,
                "Folder": training.source,
                "Hash of its files": training.files,
                "Rollouts": str(training.rollouts),
                "Steps with rollouts": str(len(step_hashes(ctx.store, ctx.iteration_id(iteration)))),
            }
            table = Table((Column("Of the training", "text"), Column("", "text")), tuple(map(Row, facts.items())))
            note = (
                "This iteration was trained by another program, outside of agentr, which took back weights and "
                "rollouts: settings, loss and time of the training are not known here. Rewards are those in its "
                "rollouts; a worth is what a rollout was worth to its training."
            )
            return (Section("outside", "Training outside", (table,), note),)
    return ()
