"""The training of an iteration as a job, and the checkpoint that it publishes."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.files import SHARED_MEMORY, adapter_base, checkpoint_folder, shared_name, weight_files
from agentr_core.runtime.place import Workplace
from agentr_core.training.checkpoints import Manifest, publish, publish_step
from agentr_core.training.group.learner import Learner
from agentr_core.training.group.ranks import Ranks
from agentr_core.training.job import OnlineJob, TrainingStep
from agentr_core.training.objectives import GroupRelative

_PACKAGES = ("torch", "transformers")
_COPIES = 8
"""An upper limit on the copies of the weights that are shared at once: the weights of two steps, or
those of one with the state of a training, which passes from one process to another, each in up to
twice the stored bytes.
"""


def job_of(place: Workplace, iteration: int) -> OnlineJob:
    """Return the training job of an iteration; its output folder is named after the checkpoint that
    it makes.

    Raises `DataFault` when the policy that it starts from is missing.
    """
    training = place.plan(iteration).training
    if training is None or not isinstance(training.objective, GroupRelative):
        raise DataFault(f"iteration {iteration} of run {place.run_id} does not train on groups")
    parent = place.trained(0) if training.anew else place.policy(iteration)
    seed = derive_seed(place.recipe.seed, "train", iteration) % 2**31
    experience = place.iteration_id(iteration)
    objective = training.objective
    about = (parent.id, experience, training.config.anywhere(), seed, *objective.settings.values())
    return OnlineJob(
        model_dir=parent.path,
        output_dir=checkpoint_folder(place.root, fingerprint("checkpoint", objective.kind, *about)),
        config=training.config,
        seed=seed,
        parent=parent.id,
        parent_weights=parent.weights_sha256,
        iteration=experience,
        objective=objective,
        experience=experience,
    )


def publish_policy(
    job: OnlineJob, learner: Learner | Ranks, history: list[TrainingStep], rows: str, config: dict[str, Any]
) -> None:
    """Publish a policy as the checkpoint of a job.

    Args:
        rows: the hash of what its steps sampled, by `runtime.trained_on`.
        config: the section `training` of the recipe as plain data.
    """
    learner.write_result(job, history)
    publish(job.work.staging, job.output_dir, _manifest(job, history, "steps", rows, config))


def publish_policy_step(
    job: OnlineJob, learner: Learner | Ranks, history: list[TrainingStep], rows: str, config: dict[str, Any]
) -> None:
    """Publish a policy whose training goes on, after the last step of its history. Arguments are
    those of `publish_policy`.
    """
    learner.write_result(job, history, goes_on=True)
    manifest = _manifest(job, history, "save_steps", rows, config)
    publish_step(job.work.staging, job.output_dir, manifest, most=job.config.save_total_limit)


def _manifest(
    job: OnlineJob, history: list[TrainingStep], ended_by: str, rows: str, config: dict[str, Any]
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
        rows=rows,
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
    stored = sum(file.stat().st_size for file in weight_files(adapter_base(job.model_dir) or job.model_dir))
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > _COPIES * stored
    folder = (SHARED_MEMORY if in_memory else job.work.root) / shared_name(job.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
