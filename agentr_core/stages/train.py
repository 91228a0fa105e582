"""Training: a checkpoint from the dataset of an iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.runtime.place import Workplace
from agentr_core.stages.dataset import dataset_file, dataset_id
from agentr_core.store.codec import checkpoint_rows, metric_rows, training_step_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.training import TrainingJob, TrainingStep, read_history
from agentr_core.training import train as fine_tune

STAGE = "train"


async def train(place: Workplace, iteration: int) -> dict[str, Any]:
    """Fine-tune on the dataset of an iteration, or find the checkpoint that an earlier try
    published.

    Raises:
        TrainingFault: the trainer ended without a checkpoint; the last intermediate one is kept for
            the next try.
        DataFault: the dataset is not there.
    """
    job = job_of(place, iteration)

    def show(step: TrainingStep) -> None:
        place.progress(step.step, step.total_steps, f"steps, loss {step.loss:.3f}")

    with place.timed(STAGE, iteration) as clock:
        result = await fine_tune(job, on_progress=show)
        clock.add({"train": result.seconds})
        clock.tokens = result.trained_tokens
    checkpoint_id, loss = job.output_dir.name, job.preference
    iteration_id = place.iteration_id(iteration)
    place.store.write(
        merge(
            [
                checkpoint_rows(
                    checkpoint_id,
                    path=str(_relative(result.path)),
                    weights_sha256=result.weights_sha256,
                    config=job.config if loss is None else {**vars(job.config), "preference": loss},
                    parent_id=job.parent,
                    dataset_id=dataset_id(place, iteration),
                    iteration_id=iteration_id,
                ),
                *_steps(checkpoint_id, result.path),
                metric_rows("iteration", iteration_id, "train_loss", result.final_loss),
                metric_rows("iteration", iteration_id, "trained_tokens", float(result.trained_tokens)),
            ]
        )
    )
    place.store.update("iteration", {"iteration_id": iteration_id, "checkpoint_out": checkpoint_id})
    return {
        "checkpoint": checkpoint_id,
        "loss": result.final_loss,
        "trained_tokens": result.trained_tokens,
        "ended_by": result.ended_by,
    }


def job_of(place: Workplace, iteration: int) -> TrainingJob:
    """Return the training of an iteration; its output folder has the name of the checkpoint that it
    makes.

    Raises `DataFault` when the dataset is not there.
    """
    row = place.one("select hash from dataset where dataset_id = ?", dataset_id(place, iteration))
    if row is None:
        raise DataFault(f"iteration {iteration} of run {place.run_id} has no dataset yet; build it first")
    objective = place.plan(iteration).objective
    if objective is None:
        raise DataFault(f"iteration {iteration} of run {place.run_id} trains nothing; train one of its arms")
    config, epochs, loss = objective.config, objective.num_train_epochs, objective.preference
    parent = place.trained(0) if objective.anew else place.policy(iteration)
    seed = derive_seed(place.recipe.seed, "train", iteration) % 2**31
    about = (parent.id, row[0], config.anywhere(), epochs, seed)
    checkpoint_id = fingerprint("checkpoint", *about, *([] if loss is None else [loss]))
    return TrainingJob(
        model_dir=parent.path,
        dataset_file=dataset_file(place, iteration),
        output_dir=place.root / "checkpoints" / checkpoint_id,
        config=config,
        num_train_epochs=epochs,
        seed=seed,
        parent=parent.id,
        dataset_hash=row[0],
        preference=loss,
    )


def _steps(checkpoint_id: str, path: Path) -> list[Rows]:
    return [
        training_step_rows(
            checkpoint_id,
            step.step,
            loss=step.loss,
            trained_tokens=step.trained_tokens,
            seconds=step.seconds,
            scores=step.scores,
        )
        for step in read_history(path)
    ]


def _relative(path: Path) -> Path:
    """Return a path relative to the working directory where it lies below it, so that a workspace
    can be moved.
    """
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
