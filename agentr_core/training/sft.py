"""Fine-tuning from outside: from a job to a finished checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError

from agentr_core.errors import DataFault, ModelDirectoryError, TrainingFault
from agentr_core.models.files import adapter_base
from agentr_core.training.checkpoints import Manifest, is_complete, read_manifest
from agentr_core.training.job import EVENT, JOB, LESS_MEMORY, TrainingJob, TrainingStep
from agentr_core.training.launch import PLACES
from agentr_core.training.process import TrainerProcess

WORKER = "agentr_core.training.worker"


async def train(job: TrainingJob, *, on_progress: Callable[[TrainingStep], None] = lambda step: None) -> Manifest:
    """Return the manifest of a job's checkpoint: trained, continued after an interruption, or
    already there.

    `on_progress` is called after each optimizer step. Cancelling ends the trainer's process;
    calling again continues from its last intermediate checkpoint, to the same weights as without
    the interruption on the same processor and number of threads. A trainer whose parent was killed
    ends by itself.

    Raises:
        NonFiniteLoss: loss or gradient became NaN or infinite. The weights were not changed by it.
        OutOfMemory: memory ran out, or the system killed the trainer, which is how Linux reports
            that.
        TrainingFault: another fault, for example a full disk, or a foreign directory at
            `output_dir`.
        DataFault: the dataset is missing or has broken rows.
        ModelDirectoryError: the model directory cannot be loaded.
        ConfigError: the settings ask for a package, a device or a name that is not available.
        DiskError: the folder of the job cannot be made or written to.
    """
    if job.output_dir.exists():
        return _finished(job)
    _check_inputs(job)
    _leave_foreign_work(job)
    process = TrainerProcess(
        module=WORKER,
        work=job.work,
        job=JOB.dump_json(job, indent=1),
        environment=_environment(job),
        read=EVENT.validate_json,
        published=lambda: is_complete(job.output_dir),
        less_memory=LESS_MEMORY,
    )
    await process.run(on_progress)
    return _finished(job)


def _check_inputs(job: TrainingJob) -> None:
    base = adapter_base(job.model_dir) or job.model_dir
    if not (base / "config.json").is_file():
        raise ModelDirectoryError(f"{base} has no config.json; give a Hugging Face model directory")
    if not job.dataset_file.is_file():
        raise DataFault(f"dataset file {job.dataset_file} does not exist; build the dataset before training on it")


def _leave_foreign_work(job: TrainingJob) -> None:
    """Remove unfinished work of the same job that began with other weights: a parent that is
    trained on what it samples may come out otherwise under the same id.
    """
    if not job.work.job_file.exists():
        return
    with suppress(ValidationError):
        before = JOB.validate_json(job.work.job_file.read_bytes()).parent_weights
        if before in ("", job.parent_weights):
            return
    shutil.rmtree(job.work.root)


def _finished(job: TrainingJob) -> Manifest:
    if not is_complete(job.output_dir):
        raise TrainingFault(f"{job.output_dir} exists and is not a complete checkpoint; remove it or train elsewhere")
    manifest = read_manifest(job.output_dir)
    if manifest.job != job.fingerprint:
        raise TrainingFault(
            f"{job.output_dir} holds the checkpoint of another training (job {manifest.job}, not {job.fingerprint}); "
            "remove it or train elsewhere"
        )
    if job.work.root.exists():
        shutil.rmtree(job.work.root)
    return manifest


def _environment(job: TrainingJob) -> dict[str, str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in PLACES},
        # Everything the trainer reads is local; a query to the hub would only add the network to
        # what can fail.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "TENSORBOARD_LOGGING_DIR": str(job.reports),
    }
    if job.config.launch is None:
        # Otherwise the Trainer would split each batch over all visible devices.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = "0" if visible is None else visible.split(",")[0]
    if job.config.num_threads:
        environment["OMP_NUM_THREADS"] = str(job.config.num_threads)
    return environment
