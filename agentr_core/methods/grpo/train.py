"""Training on groups: sampler, policy and optimizer stay loaded together for all steps of an
iteration.

Each step samples with the weights after the previous step (or, with `grpo.staleness`, the one
before that), and everything that was sampled is stored before it is trained on. After an
interruption, the steps since the last saved state are trained again from the store, which gives the
same weights.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from agentr_core.episodes.transcript import conversations
from agentr_core.errors import ConfigError, DataFault, TrainingFault
from agentr_core.fingerprint import canonical, derive_seed, fingerprint
from agentr_core.methods.grpo.credit import (
    credit_measures,
    episode_advantages,
    is_trained_on,
    step_advantages,
    with_credit,
)
from agentr_core.methods.grpo.cuts import STAGE
from agentr_core.methods.grpo.distil import ScoresByStep, Scoring
from agentr_core.methods.grpo.rollouts import Rollouts, reward_tallies
from agentr_core.models.checkpoint_dir import (
    SHARED_MEMORY,
    adapter_base,
    checkpoint_folder,
    shared_folder_name,
    weight_files,
)
from agentr_core.protocols import ChatModel, Reloading, Sleeping
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.recipe import replace, resolved
from agentr_core.runtime.alarms import watch_step
from agentr_core.runtime.context import Clock, RunContext, helpers
from agentr_core.runtime.equipment import Checkpoint, Effort, Worlds
from agentr_core.runtime.instances import trained_instances
from agentr_core.runtime.start import check_weights, step_rows_hash
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.stages.train import idle_reason, store_checkpoint
from agentr_core.store.codec.ledger import Group, group_rows, load_group_outcomes, load_groups, rl_step_rows
from agentr_core.store.database import Writer
from agentr_core.store.queries.datasets import instance_traits
from agentr_core.store.queries.trees import GroupCounts, group_counts, step_hashes, validation_of
from agentr_core.store.tables import merge
from agentr_core.system import raise_if_cancelled, run_in_thread
from agentr_core.training.checkpoints import (
    Manifest,
    is_complete,
    publish,
    publish_step,
    read_history,
    read_manifest,
)
from agentr_core.training.group.advantages import has_contrast
from agentr_core.training.group.learner import (
    Learner,
    ProcessLearner,
    load_snapshot,
    make_learner,
    open_step_reporter,
    remove_snapshots,
    save_snapshot,
)
from agentr_core.training.group.policy import PolicyRow, Totals, policy_row
from agentr_core.training.group.scoring import add_scorer_terms, divergence_from_scorer
from agentr_core.training.job import GroupRelative, OnlineJob, TrainingStep, write_atomically
from agentr_core.training.parent import meta_model
from agentr_core.training.run import limited_threads
from agentr_core.types import Instance

# Measures of a training step, as columns of table rl_step, and the message if there was nothing to
# train on.


def measures(groups: Sequence[Group], totals: Totals, grpo: GrpoConfig) -> dict[str, float | None]:
    """Return the measures of a training step's episodes and of the updates on them, by column of
    table rl_step; None where a measure does not apply.

    `reward`, `pass_at_1` and `pass_at_n` are measured over the groups that begin at the start,
    `recovered` over those that go on from a failed episode.
    """
    fresh_groups = [group for group in groups if not group.prefix]
    fresh_episodes = [episode for group in fresh_groups for episode in group.episodes.values()]
    recovery_episodes = [
        episode for group in groups if group.prefix and not group.is_expert_led for episode in group.episodes.values()
    ]
    sampled_episodes = [steps for group in groups for steps in group.sampled_steps]
    replies = [step for steps in sampled_episodes for step in steps]
    shaped_rewards = [reward for group in groups for reward in group.shaped_rewards or ()]
    num_tokens = sum(len(reply.token_ids) for reply in replies)
    update_measures: dict[str, float | None] = dict.fromkeys(
        ("loss", "entropy", "kl", "sampler_kl", "clip_share", "grad_norm")
    )
    if totals.updates:
        update_measures = {
            "loss": totals.loss / totals.updates,
            "entropy": totals.mean("entropy"),
            "kl": totals.mean("kl") if grpo.beta else None,
            "sampler_kl": totals.mean("sampler_kl"),
            "clip_share": totals.mean("clipped"),
            "grad_norm": totals.norm / totals.updates,
        }
    return {
        "reward": fmean(episode.reward for episode in fresh_episodes) if fresh_episodes else 0.0,
        "shaped": fmean(shaped_rewards) if shaped_rewards else None,
        "pass_at_1": sum(episode.success for episode in fresh_episodes) / max(1, len(fresh_episodes)),
        "pass_at_n": sum(group.num_wins > 0 for group in fresh_groups) / max(1, len(fresh_groups)),
        "recovered": fmean(episode.success for episode in recovery_episodes) if recovery_episodes else None,
        "mixed_share": sum(has_contrast(group.compared_rewards) for group in groups) / max(1, len(groups)),
        "drawn_again": sum(group.draw > 0 for group in groups),
        "episode_tokens": num_tokens / max(1, len(sampled_episodes)),
        "episode_steps": len(replies) / max(1, len(sampled_episodes)),
        "cut_share": sum(reply.finish_reason == "length" for reply in replies) / max(1, len(replies)),
        "sampled_tokens": num_tokens,
        "trained_tokens": totals.tokens,
        **credit_measures(groups, grpo),
        **update_measures,
    }


def untrained_reason(counts: GroupCounts) -> str:
    """Return as a sentence why an iteration trained nothing; the empty string if some group could
    be trained on.
    """
    if counts.mixed:
        return ""
    num_winless = counts.groups - counts.alike_with_wins
    return (
        f"nothing was trained, and the weights are those that the iteration began with: in each of the "
        f"{counts.groups} groups all episodes have the same reward, so none is better than another ({num_winless} "
        f"groups without a win, {counts.alike_with_wins} with wins); take easier or harder instances, or raise "
        "grpo.num_generations"
    )


# The training of an iteration as a job, and the checkpoint that it publishes.

_PACKAGES = ("torch", "transformers")
_MAX_COPIES = 8
"""An upper limit on the copies of the weights that are shared at once: the weights of two steps, or
those of one with the state of a training, which passes from one process to another, each in up to
twice the stored bytes.
"""


def job_of(ctx: RunContext, iteration: int) -> OnlineJob:
    """Return the training job of an iteration; its output folder is named after the checkpoint that
    it makes.

    Raises `DataFault` when the iteration does not train on groups, or when the policy that it
    starts from is missing.
    """
    training = ctx.plan(iteration).training
    if training is None or not isinstance(training.objective, GroupRelative):
        raise DataFault(f"iteration {iteration} of run {ctx.run_id} does not train on groups")
    parent = ctx.trained_checkpoint(0) if training.from_base else ctx.policy(iteration)
    seed = derive_seed(ctx.recipe.seed, "train", iteration) % 2**31
    experience = ctx.iteration_id(iteration)
    objective = training.objective
    identity = (parent.id, experience, training.config.without_addresses(), seed, *objective.settings.values())
    return OnlineJob(
        model_dir=parent.path,
        output_dir=checkpoint_folder(ctx.root, fingerprint("checkpoint", objective.kind, *identity)),
        config=training.config,
        seed=seed,
        parent=parent.id,
        parent_weights=parent.weights_sha256,
        iteration=experience,
        objective=objective,
        experience=experience,
    )


def publish_policy(
    job: OnlineJob,
    learner: Learner | ProcessLearner,
    history: list[TrainingStep],
    rows_hash: str,
    config: dict[str, Any],
    *,
    ended_by: str = "steps",
) -> None:
    """Publish a policy as the checkpoint of a job. The learner can only be closed afterwards.

    Args:
        rows_hash: the hash of the rows that its steps sampled, by `runtime.start.step_rows_hash`.
        config: the section `training` of the recipe as plain data.
        ended_by: the setting that ended the training, as in `Manifest`.
    """
    learner.write_result(job, history)
    publish(job.work_folder.staging, job.output_dir, _manifest(job, history, ended_by, rows_hash, config))


def publish_policy_step(
    job: OnlineJob,
    learner: Learner | ProcessLearner,
    history: list[TrainingStep],
    rows_hash: str,
    config: dict[str, Any],
) -> None:
    """Publish the policy after the last step of its history, as `publish_policy` does, while its
    training goes on.
    """
    learner.write_result(job, history, training_continues=True)
    manifest = _manifest(job, history, "save_steps", rows_hash, config)
    publish_step(job.work_folder.staging, job.output_dir, manifest, max_folders=job.config.save_total_limit)


def _manifest(
    job: OnlineJob, history: list[TrainingStep], ended_by: str, rows_hash: str, config: dict[str, Any]
) -> Manifest:
    launch = job.config.launch
    packages = (*_PACKAGES, "deepspeed") if launch is not None and launch.deepspeed else _PACKAGES
    return Manifest(
        job=job.fingerprint,
        parent=job.parent,
        dataset_hash="",
        config=config,
        seed=job.seed,
        steps=len(history),
        epochs=float(job.objective.grpo.num_iterations),
        trained_tokens=history[-1].trained_tokens,
        final_loss=history[-1].loss,
        seconds=history[-1].seconds,
        ended_by=ended_by,
        rows=rows_hash,
        parent_weights=job.parent_weights,
        iteration=job.iteration,
        versions={"python": platform.python_version(), **{name: version(name) for name in packages}},
    )


@contextmanager
def shared_folder(job: OnlineJob) -> Iterator[Path]:
    """Lend a folder for files that processes share: in memory if the system supports that and has
    room, else beside the unfinished training.

    Its name depends only on the checkpoint, so that a rerun removes what a killed process left:
    memory that nothing else would ever free.
    """
    weight_bytes = sum(file.stat().st_size for file in weight_files(adapter_base(job.model_dir) or job.model_dir))
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > _MAX_COPIES * weight_bytes
    folder = (SHARED_MEMORY if in_memory else job.work_folder.root) / shared_folder_name(job.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


_log = logging.getLogger(__name__)


async def reinforce(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Train the policy of an iteration on episodes that it samples meanwhile, or find the
    checkpoint that an earlier try published; return a summary with its name, steps, loss and
    trained tokens.

    Raises:
        AlarmRaised: an alarm ended the training.
        ErrorBudgetSpent: more episodes of a step failed than the recipe allows.
        TrainingFault: all replies of a step are empty, the keys of states do not tell them apart,
            or the output folder exists and is no complete checkpoint.
        NonFiniteLoss: loss or gradient became NaN or infinite; the last state is kept.
        ConfigError: the weights of the sampler cannot be replaced.
        DataFault: training and test instances overlap, or the policy is missing.
        StoreError: the store lacks rows that made the checkpoint.
    """
    instances = await trained_instances(ctx, iteration)
    job = job_of(ctx, iteration)
    was_complete = is_complete(job.output_dir)
    with ctx.timed(STAGE, iteration) as clock:
        if not was_complete:
            if job.output_dir.exists():
                raise TrainingFault(f"{job.output_dir} exists and is not a complete checkpoint; remove it")
            await _train(ctx, iteration, instances, job, clock)
        else:
            check_weights(ctx, iteration, job.output_dir, parent_weights=job.parent_weights)
    if job.work_folder.root.exists():
        shutil.rmtree(job.work_folder.root)
    manifest = read_manifest(job.output_dir)
    store_checkpoint(ctx, iteration, job, job.objective.settings, manifest)
    if not was_complete:
        manifest.check_ending()
    note = untrained_reason(group_counts(ctx.store, ctx.iteration_id(iteration)))
    grpo, training = job.objective.grpo, ctx.plan(iteration).training
    if not note and training is not None and grpo.steps * grpo.num_iterations * grpo.minibatches == 1:
        section = "grpo" if training.section == "training" else training.section
        note = idle_reason(section) if read_history(job.output_dir)[0].learning_rate == 0 else ""
    return {
        **({"note": note} if note else {}),
        "checkpoint": job.output_dir.name,
        "steps": manifest.steps,
        "loss": manifest.final_loss,
        "trained_tokens": manifest.trained_tokens,
    }


async def _train(ctx: RunContext, iteration: int, instances: Sequence[Instance], job: OnlineJob, clock: Clock) -> None:
    """Start sampler, models of other roles and writer, and run the training with them."""
    async with (
        ctx.sampling(job.model_dir) as sampler,
        Writer(ctx.store) as writer,
        helpers(ctx, job.model_dir, sampler, writer) as helper_models,
    ):
        if not isinstance(sampler.model, Reloading):
            raise ConfigError("model.backend: these weights cannot be replaced; set it to transformers or vllm")
        shares_gpus = ctx.recipe.model.shares_gpus
        if shares_gpus:
            # The sampler must free the GPU before the trainer loads its weights there.
            await _sleeping_model(sampler.model).sleep()
        renderer = load_renderer(job.model_dir, at=ctx.started_at())
        rollouts = Rollouts(
            ctx=ctx,
            iteration=iteration,
            reward=job.objective.reward,
            vocabulary_size=renderer.vocabulary_size,
            instances=instances,
            sampler=sampler,
            helper=helper_models.ask,
            writer=writer,
        )
        with limited_threads(job.config.num_threads), shared_folder(job) as folder:
            scoring = None if job.objective.grpo.distil is None else Scoring(ctx, job, renderer)
            try:
                await _Training(rollouts, job, clock, folder, renderer, shares_gpus, scoring).run()
            finally:
                if scoring is not None:
                    scoring.close()
        clock.tokens = (clock.tokens or 0) + helper_models.effort().tokens


class _SampledStep(NamedTuple):
    """The groups of a step, the effort that they took, and the seconds of their sampling, None if
    they were loaded from the store.
    """

    groups: list[Group]
    effort: Effort
    seconds: float | None


# This is not built on TRL's GRPOTrainer, which owns its loop: it takes prompts from a data loader,
# after a restart it samples again what it had sampled, and it cannot draw other groups in place of
# those without contrast.
@dataclass(slots=True)
class _Training:
    """A training in progress."""

    rollouts: Rollouts
    job: OnlineJob
    clock: Clock
    weights_folder: Path
    """The folder in which the sampler finds the weights of a step."""
    renderer: Renderer
    shares_gpus: bool
    """Whether trainer and sampler use the GPU alternately."""
    scoring: Scoring | None = None
    history: list[TrainingStep] = field(default_factory=list)
    loaded_step: int = -1
    """The step after which the sampler's weights were taken; -1: it sleeps, or has the weights that
    it was started with.
    """
    is_learner_resting: bool = False
    """Whether the learner has left the GPU to the sampler."""
    next_sampling: asyncio.Task[_SampledStep] | None = None
    """The sampling of the next step during the training of this one (`grpo.staleness`)."""
    resume_weights: tuple[int, Path] | None = None
    """The step and file of the weights with which the step after a saved state is sampled, if these
    are not the state's own.
    """

    async def run(self) -> None:
        """Do all remaining steps, and publish the checkpoint. Raises as `reinforce`."""
        ctx, job, grpo = self.rollouts.ctx, self.job, self.job.objective.grpo
        max_tokens = grpo.max_steps * grpo.max_new_tokens
        job.work_folder.root.mkdir(parents=True, exist_ok=True)
        # The file tells pruning to which iteration this unfinished training belongs.
        write_atomically(job.work_folder.job_file, canonical({"iteration": job.iteration}).encode())
        learner = await run_in_thread(
            make_learner,
            job.model_dir,
            job.config,
            grpo,
            updates=grpo.steps * grpo.num_iterations * grpo.minibatches,
            max_tokens=min(max_tokens, grpo.max_episode_tokens or max_tokens),
            folder=self.weights_folder,
            seed=job.seed,
        )
        publish_last: Callable[..., None] = publish_policy
        try:
            first_step = 1 + await self._resume(learner)
            # Loggers look at a model's configuration and shape, and others may hold its weights.
            model_shape = meta_model(adapter_base(job.model_dir) or job.model_dir) if job.config.report_to else None
            with ctx.worlds() as worlds, open_step_reporter(job, model_shape) as log_step:
                for step in range(first_step, grpo.steps + 1):
                    step_measures = await self._run_step(step, learner, worlds)
                    if grpo.eval_steps and step % grpo.eval_steps == 0:
                        step_measures |= await self._validate(step, learner)
                    # Loggers get the totals up to here, as from a training on a dataset.
                    last_step = self.history[-1]
                    log_step(
                        step,
                        {**step_measures, "trained_tokens": last_step.trained_tokens, "seconds": last_step.seconds},
                    )
                    if reason := watch_step(ctx, self.rollouts.iteration, STAGE, step, step_measures):
                        if not await self._restore_saved_weights(learner):
                            # Everything that was sampled stays, and so do the last saved weights.
                            raise reason.to_error("trains on")
                        publish_last = partial(publish_policy, ended_by=f"alarms.{reason.name}")
                        break
                    if step % grpo.save_steps == 0 and step < grpo.steps:
                        await self._save(step, learner)
            await self._publish(publish_last, learner)
        finally:
            if self.next_sampling is not None:
                self.next_sampling.cancel()
                await asyncio.gather(self.next_sampling, return_exceptions=True)
            await asyncio.to_thread(learner.close)

    async def _restore_saved_weights(self, learner: Learner | ProcessLearner) -> bool:
        """Restore the last saved weights if the recipe says so (`alarms.reaction: back`) and there
        are any; return whether that was done.
        """
        snapshot = load_snapshot(self.job.work_folder.checkpoints)
        if snapshot is None or self.rollouts.ctx.recipe.alarms.reaction != "back":
            return False
        await self._wake_learner(learner)
        await run_in_thread(learner.restore, snapshot.learner_state, snapshot.parts_folder)
        self.history = snapshot.history
        return True

    async def _save(self, step: int, learner: Learner | ProcessLearner) -> None:
        """Publish the weights after a step if the recipe asks for that, then save the state. In
        this order, since a training that goes on from the state does not publish them again.
        """
        job = self.job
        if job.config.save_total_limit != 0:
            await self._publish(publish_policy_step, learner)
        await self._wake_learner(learner)
        save = partial(
            save_snapshot,
            sampler_weights=(self.loaded_step, self._weights_file(self.loaded_step)) if self.next_sampling else None,
        )
        await run_in_thread(
            save, job.work_folder.checkpoints, step, learner.state, self.history, self._input_hashes(step)
        )

    async def _publish(self, publish_function: Callable[..., None], learner: Learner | ProcessLearner) -> None:
        ctx, job = self.rollouts.ctx, self.job
        config = resolved(replace(ctx.recipe, training=job.config))["training"]
        rows_hash = step_rows_hash(ctx, job.iteration)
        await self._wake_learner(learner)
        await run_in_thread(publish_function, job, learner, self.history, rows_hash, config)

    async def _resume(self, learner: Learner | ProcessLearner) -> int:
        """Restore the last saved state, and return its step; 0 if there is none. If the store lacks
        the rows that a state was trained on, remove all states and return 0: all steps are then
        trained again, and those that the store lacks are sampled again.
        """
        checkpoints_folder = self.job.work_folder.checkpoints
        if (snapshot := load_snapshot(checkpoints_folder)) is None:
            return 0
        if snapshot.input_hashes != self._input_hashes(snapshot.step):
            _log.warning(
                "the state of training after step %s was not made of the rows of %s; its steps are trained again",
                snapshot.step,
                self.rollouts.ctx.store.path,
            )
            remove_snapshots(checkpoints_folder)
            return 0
        await run_in_thread(learner.restore, snapshot.learner_state, snapshot.parts_folder)
        self.history, self.resume_weights = snapshot.history, snapshot.sampler_weights
        return snapshot.step

    def _input_hashes(self, step: int) -> list[str]:
        """Return the hashes of all that determines the weights after a step: of the weights that
        the training starts from, and of the stored rows of each step, empty for a missing one.
        """
        rows = step_hashes(self.rollouts.ctx.store, self.job.iteration)
        return [self.job.parent_weights, *(rows.get(number, "") for number in range(1, step + 1))]

    async def _run_step(self, step: int, learner: Learner | ProcessLearner, worlds: Worlds) -> dict[str, float | None]:
        """Sample a step, train on it, store its measures and return them, by name."""
        ctx, job, iteration_id = self.rollouts.ctx, self.job, self.job.experience
        sampling_start = time.perf_counter()
        groups, effort, sampling_seconds = await self._groups_of_step(step, learner, worlds)
        replies = [reply for group in groups for steps in group.sampled_steps for reply in steps]
        # More steps would not change that.
        if replies and not any(reply.reply.strip() for reply in replies):
            raise TrainingFault(
                f"all {len(replies)} replies of step {step} are empty, so the policy answers nothing and cannot be "
                "reinforced; if it answered in earlier steps, lower training.learning_rate and begin a new run, else "
                "look at the chat template and the weights of its directory"
            )
        sampling_end, grpo = time.perf_counter(), job.objective.grpo
        if grpo.staleness and step < grpo.steps and not load_groups(ctx.store, iteration_id, step + 1):
            policy = await self._load_weights(step - 1, learner)
            self.next_sampling = asyncio.create_task(self._sample(step + 1, policy, worlds))
        ctx.progress(step - 1, grpo.steps, f"steps, training on what step {step} sampled")
        await self._wake_learner(learner)
        scores = None if self.scoring is None else await self.scoring.scores(groups, step, worlds)
        rows = [row for group in groups for row in self._token_rows(group, worlds, scores)]
        learning_rate, totals = await run_in_thread(_update, learner, rows, job, step)
        training_end = time.perf_counter()
        previous = self.history[-1] if self.history else None
        self.history.append(
            TrainingStep(
                step=step,
                total_steps=job.objective.grpo.steps,
                loss=totals.loss / max(1, totals.updates),
                trained_tokens=totals.tokens + (previous.trained_tokens if previous else 0),
                seconds=training_end - sampling_start + (previous.seconds if previous else 0.0),
                learning_rate=learning_rate,
                grad_norm=totals.norm / totals.updates if totals.updates else None,
            )
        )
        step_measures = measures(groups, totals, job.objective.grpo) | {
            "learning_rate": learning_rate,
            "scorer_kl": divergence_from_scorer(rows),
            "sampling_seconds": sampling_seconds,
            "training_seconds": training_end - sampling_end,
        }
        ctx.store.write(rl_step_rows(iteration_id, step, step_measures))
        num_empty = sum(not reply.reply.strip() for reply in replies)
        step_measures |= {"empty_share": num_empty / max(1, len(replies))}
        self.clock.add({"generate": sampling_end - sampling_start, "train": training_end - sampling_end})
        self.clock.tokens = (self.clock.tokens or 0) + effort.tokens
        mixed_share = sum(has_contrast(group.compared_rewards) for group in groups) / max(1, len(groups))
        ctx.progress(step, job.objective.grpo.steps, f"steps, {mixed_share:.0%} of the groups mixed")
        return step_measures

    async def _validate(self, step: int, learner: Learner | ProcessLearner) -> dict[str, float | None]:
        """Play the development set with the weights after a step, unless its episodes are stored;
        return their mean success and reward by name.
        """
        start_time, store = time.perf_counter(), self.rollouts.ctx.store
        if self.next_sampling is not None:
            # Until it is done, the sampler needs the weights before the step.
            await asyncio.wait({self.next_sampling})
            # After one that failed, a saved state would name newer weights as its sampler's.
            self.next_sampling.result()
        if validation_of(store, self.job.experience, step) is None:
            tokens_before = self.rollouts.sampler.stats().completion_tokens
            await self.rollouts.validate(step, await self._load_weights(step, learner))
            self.clock.add({"generate": time.perf_counter() - start_time})
            self.clock.tokens = (
                (self.clock.tokens or 0) + self.rollouts.sampler.stats().completion_tokens - tokens_before
            )
        validation = validation_of(store, self.job.experience, step)
        return {} if validation is None else {"eval_success": validation.success, "eval_reward": validation.reward}

    async def _load_weights(self, step: int, learner: Learner | ProcessLearner) -> Checkpoint:
        """Load the weights after a step into the sampler unless it has them, and return the policy
        that then samples.
        """
        model = self.rollouts.sampler.model
        assert isinstance(model, Reloading)
        if self.loaded_step != step:
            # A new folder each time: the previous file stays until all samplers have the new one.
            file = self._weights_file(step)
            dtype = getattr(torch, self.rollouts.ctx.recipe.model.dtype)
            # If the file exists, the sampler had these weights and has slept since.
            if not file.exists():
                file.parent.mkdir()
                if self.resume_weights is not None and self.resume_weights[0] == step:
                    shutil.copyfile(self.resume_weights[1], file)
                else:
                    await self._wake_learner(learner)
                    await run_in_thread(learner.write_weights, file, dtype)
            if self.shares_gpus:
                await run_in_thread(learner.offload)
                self.is_learner_resting = True
            await model.reload(file)
            for old_folder in self.weights_folder.glob("step-*"):
                if old_folder != file.parent:
                    shutil.rmtree(old_folder)
            self.loaded_step = step
        return Checkpoint(id=f"{self.job.output_dir.name}@{step}", path=self.job.model_dir, weights_sha256="")

    def _weights_file(self, step: int) -> Path:
        return self.weights_folder / f"step-{step}" / "model.safetensors"

    async def _wake_learner(self, learner: Learner | ProcessLearner) -> None:
        """Return the GPU to the learner, if the sampler has it: put the sampler to sleep first."""
        if self.is_learner_resting:
            await _sleeping_model(self.rollouts.sampler.model).sleep()
            self.loaded_step, self.is_learner_resting = -1, False
            await run_in_thread(learner.load_to_gpu)

    async def _groups_of_step(self, step: int, learner: Learner | ProcessLearner, worlds: Worlds) -> _SampledStep:
        """Return the groups of a step: those that were sampled ahead or are stored, or new ones."""
        if self.next_sampling is not None:
            sampled_step, self.next_sampling = await self.next_sampling, None
            return sampled_step
        if groups := load_groups(self.rollouts.ctx.store, self.job.experience, step):
            return _SampledStep(groups, Effort(), None)
        # With `behind` set, only the first step after a saved state gets here.
        weights_step = step - 1 if self.resume_weights is None else self.resume_weights[0]
        return await self._sample(step, await self._load_weights(weights_step, learner), worlds)

    async def _sample(self, step: int, policy: Checkpoint, worlds: Worlds) -> _SampledStep:
        """Sample and store the groups of a step with the sampler's policy, and return them."""
        ctx, grpo, start_time = self.rollouts.ctx, self.job.objective.grpo, time.perf_counter()
        # The past rewards of instances, by key. Variants of one instance, such as goals under other
        # names, share them.
        outcomes = load_group_outcomes(ctx.store, self.job.experience, last_step=step - 1)
        tallies_by_origin = reward_tallies(((o.origin, o.episodes, o.reward) for o in outcomes), memory=grpo.memory)
        traits = instance_traits(ctx.store, [instance.key for instance in self.rollouts.instances])
        tallies = {
            key: tallies_by_origin[traits[key].origin] for key in traits if traits[key].origin in tallies_by_origin
        }
        tokens_before = self.rollouts.sampler.stats().completion_tokens
        groups, effort = await self.rollouts.play(step, policy, tallies, worlds)
        effort += Effort(tokens=self.rollouts.sampler.stats().completion_tokens - tokens_before)
        # Other episodes may be under way (`grpo.staleness`).
        groups = await run_in_thread(with_credit, groups, grpo, ctx.store, self.job.experience, step)
        ctx.store.write(
            merge(
                group_rows(
                    group,
                    episode_advantages(group, grpo),
                    iteration_id=self.job.experience,
                    step=step,
                    has_contrast=is_trained_on(group, grpo),
                )
                for group in groups
            )
        )
        return _SampledStep(groups, effort, time.perf_counter() - start_time)

    def _token_rows(self, group: Group, worlds: Worlds, scores: ScoresByStep | None) -> Iterator[PolicyRow]:
        """Yield the token rows of a group's episodes that have anything to train: a step with an
        advantage other than 0, or tokens with a score.
        """
        grpo = self.job.objective.grpo
        if not is_trained_on(group, grpo):
            return
        env = worlds.env_of(group.instance)
        for (key, trajectory), advantages in zip(group.episodes.items(), step_advantages(group, grpo), strict=True):
            scores_by_step = None if scores is None else scores.get(key, {})
            if not (scores_by_step or any(advantages) or scores is None):
                continue
            rows = [
                policy_row(
                    part.messages,
                    [trajectory.steps[position] for position in part.positions],
                    self.renderer,
                    [advantages[position] for position in part.positions],
                    num_given=sum(position < group.prefix for position in part.positions),
                    scores=None
                    if scores_by_step is None
                    else [scores_by_step.get(position, ()) for position in part.positions],
                )
                for part in (conversations(env, trajectory) if trajectory.steps else ())
                if not part.is_left_out
            ]
            num_tokens = sum(len(part.positions) for part in rows)
            yield from (part._replace(episode_tokens=num_tokens) for part in rows if part.positions)


def _sleeping_model(model: ChatModel) -> Sleeping:
    """Return a model that can sleep. Raises `ConfigError` if it cannot."""
    if not isinstance(model, Sleeping):
        raise ConfigError("model.vllm.sleep: this backend cannot sleep; leave it out")
    return model


def _update(
    learner: Learner | ProcessLearner, rows: list[PolicyRow], job: OnlineJob, step: int
) -> tuple[float, Totals]:
    """Train on the rows of a step, in minibatches that a seed shuffles; return the learning rate of
    the first update, and the totals of all updates. The learning-rate schedule also advances by the
    planned updates for which there were no rows.
    """
    grpo, totals, learning_rate = job.objective.grpo, Totals(), learner.learning_rate
    rows = learner.remove_rounding_noise(rows) if rows else rows
    if grpo.distil is not None:
        # Only now: `remove_rounding_noise` replaces log-probabilities of the sampler that
        # differ by rounding.
        rows = add_scorer_terms(rows, grpo.distil)
    for number in range(grpo.num_iterations if rows else 0):
        generator = torch.Generator().manual_seed(derive_seed(job.seed, "minibatches", step, number) % 2**63)
        order = torch.randperm(len(rows), generator=generator)
        for minibatch in order.tensor_split(min(grpo.minibatches, len(rows))):
            raise_if_cancelled()
            totals += learner.update([rows[int(index)] for index in minibatch])
    learner.skip(grpo.num_iterations * grpo.minibatches - totals.updates)
    return learning_rate, totals
