"""Training: a checkpoint from the dataset of an iteration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.checkpoint_dir import checkpoint_folder
from agentr_core.recipes.alarms import Crossing
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.live import write_step
from agentr_core.runtime.start import check_weights
from agentr_core.stages.dataset import check_dataset, dataset_file, dataset_id
from agentr_core.store.codec.ledger import checkpoint_rows, metric_rows, training_step_rows
from agentr_core.store.queries.datasets import stored_dataset
from agentr_core.store.queries.runs import stage_seconds
from agentr_core.store.tables import merge
from agentr_core.training.checkpoints import (
    Manifest,
    is_complete,
    published_steps,
    read_history,
    read_manifest,
    relative_to_cwd,
)
from agentr_core.training.job import Job, Preference, Report, Supervised, TrainingJob
from agentr_core.training.process import train as fine_tune

STAGE = "train"


async def train(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Fine-tune on the dataset of an iteration, unless an earlier attempt published its checkpoint;
    return the checkpoint's name, its final loss, the number of trained tokens, why training ended
    and, if the warm-up left nothing to train with, a note that says so.

    Raises:
        AlarmRaised: an alarm ended the training.
        TrainingFault: the trainer ended without a checkpoint; the last intermediate one is kept for
            the next try.
        DataFault: the dataset is missing.
        StoreError: the store lacks rows that made the checkpoint, or that are to be trained on.
    """
    job, learning_rates = training_job(ctx, iteration), list[float | None]()
    if is_complete(job.output_dir):
        check_weights(ctx, iteration, job.output_dir, parent_weights=job.parent_weights)
    else:
        await asyncio.to_thread(check_dataset, ctx, iteration, job.dataset_hash)

    def on_progress(report: Report) -> None:
        if isinstance(report, Crossing):
            ctx.store.write(ctx.raise_alarms(STAGE, iteration, [report]))
            return
        learning_rates.append(report.learning_rate)
        ctx.progress(report.step, report.total_steps, f"steps, loss {report.loss:.3f}")
        write_step(ctx.root, ctx.run_id, iteration, (report.step, report.loss, report.learning_rate, report.grad_norm))

    was_complete = is_complete(job.output_dir)
    # A training's seconds cover all its attempts. Those that were interrupted have stored theirs,
    # and an attempt that finds the finished checkpoint adds none.
    stored_seconds = stage_seconds(ctx.store, ctx.run_id).get((iteration, STAGE), 0.0)
    with ctx.timed(STAGE, iteration) as clock:
        result = await fine_tune(job, on_progress=on_progress)
        if not was_complete:
            clock.add({"train": max(0.0, result.seconds - stored_seconds)})
            clock.tokens = result.trained_tokens
    dataset_key = dataset_id(ctx, iteration)
    store_checkpoint(ctx, iteration, job, job.objective.settings, result, dataset_id=dataset_key)
    write_step(ctx.root, ctx.run_id, iteration, None)
    if not was_complete:
        result.check_ending()
    training = ctx.plan(iteration).training
    assert training is not None
    return {
        **({"note": idle_reason(training.section)} if learning_rates == [0.0] and result.steps == 1 else {}),
        "checkpoint": job.output_dir.name,
        "loss": result.final_loss,
        "trained_tokens": result.trained_tokens,
        "ended_by": result.ended_by,
    }


def idle_reason(section: str) -> str:
    """Return as a sentence why a training of one update at a learning rate of 0 trained nothing.

    Args:
        section: the section of the recipe with its schedule.
    """
    return (
        "nothing was trained, and the weights are those that the iteration began with: its only update is the first "
        f"of the warm-up, where the learning rate is 0; set {section}.warmup_ratio=0, or train for more steps"
    )


def training_job(ctx: RunContext, iteration: int) -> TrainingJob:
    """Return the training job of an iteration; its output folder is named after the checkpoint that
    it makes.

    Raises `DataFault` when the dataset is missing.
    """
    dataset = stored_dataset(ctx.store, dataset_id(ctx, iteration))
    if dataset is None:
        raise DataFault(f"iteration {iteration} of run {ctx.run_id} has no dataset yet; build it first")
    training = ctx.plan(iteration).training
    if training is None or not isinstance(training.objective, Supervised | Preference):
        raise DataFault(f"iteration {iteration} of run {ctx.run_id} trains on no dataset; train one of its arms")
    config, epochs, objective = training.config, training.num_train_epochs, training.objective
    parent = ctx.trained_checkpoint(0) if training.from_base else ctx.policy(iteration)
    seed = derive_seed(ctx.recipe.seed, "train", iteration) % 2**31
    inputs = (parent.id, dataset.hash, config.without_addresses(), epochs, seed)
    checkpoint_id = fingerprint("checkpoint", *inputs, *objective.settings.values())
    return TrainingJob(
        model_dir=parent.path,
        dataset_file=dataset_file(ctx, iteration),
        output_dir=checkpoint_folder(ctx.root, checkpoint_id),
        config=config,
        num_train_epochs=epochs,
        seed=seed,
        parent=parent.id,
        parent_weights=parent.weights_sha256,
        iteration=ctx.iteration_id(iteration),
        dataset_hash=dataset.hash,
        checkpoint_every=config.save_steps,
        objective=objective,
        alarms=ctx.recipe.alarms,
    )


def store_checkpoint(
    ctx: RunContext,
    iteration: int,
    job: Job,
    settings: Mapping[str, Any],
    manifest: Manifest,
    *,
    dataset_id: str | None = None,
) -> None:
    """Store the published checkpoint of a job as the one that an iteration made, with its training
    steps and results, and the checkpoints that were published after earlier steps.

    Args:
        settings: those of the objective.
        dataset_id: None where the data was sampled while it was trained on.
    """
    checkpoint_id, iteration_id = job.output_dir.name, ctx.iteration_id(iteration)
    earlier_sha256 = {path: read_manifest(path).weights_sha256 for path in published_steps(job.output_dir).values()}
    ctx.store.write(
        merge(
            [
                *(
                    checkpoint_rows(
                        path.name,
                        path=str(relative_to_cwd(path)),
                        weights_sha256=sha256,
                        config={**vars(job.config), **settings} if settings else job.config,
                        parent_id=job.parent,
                        dataset_id=dataset_id,
                        iteration_id=iteration_id,
                    )
                    for path, sha256 in {**earlier_sha256, job.output_dir: manifest.weights_sha256}.items()
                ),
                *(
                    training_step_rows(
                        checkpoint_id,
                        step.step,
                        loss=step.loss,
                        trained_tokens=step.trained_tokens,
                        seconds=step.seconds,
                        learning_rate=step.learning_rate,
                        grad_norm=step.grad_norm,
                        preference_measures=step.scores,
                    )
                    for step in read_history(job.output_dir)
                ),
                metric_rows("iteration", iteration_id, "train_loss", manifest.final_loss),
                metric_rows("iteration", iteration_id, "trained_tokens", float(manifest.trained_tokens)),
            ]
        )
    )
    ctx.store.update("iteration", {"iteration_id": iteration_id, "checkpoint_out": checkpoint_id})
