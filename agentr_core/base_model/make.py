"""A base model from outside: from a recipe's section `base` to a finished model directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from agentr_core.base_model.job import EVENT, JOB, BaseJob, BaseStep
from agentr_core.training.process import TrainerProcess

WORKER = "agentr_core.base_model.worker"
LESS_MEMORY = "lower base.batch_tokens or the sizes of the model"
GRACE = 60.0
"""Seconds a cancelled training has for its current step and a checkpoint."""


async def make(job: BaseJob, *, on_progress: Callable[[BaseStep], None]) -> Path:
    """Return the directory of a base model: made, continued after an interruption, or already
    there.

    The directory appears only when it is complete; its `recipe.json` says what it was made of.
    Cancelling lets the training save a checkpoint after its current step; calling again goes on
    from there.

    Raises:
        OutOfMemory: memory ran out, or the system killed the training.
        TrainingFault: another fault, for example a full disk, or another process that makes the
            same model in this folder.
        DiskError: the folder cannot be made or written to.
    """
    if job.is_made():
        return job.output
    process = TrainerProcess(
        module=WORKER,
        work=job.work,
        job=JOB.dump_json(job, indent=1),
        environment=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        read=EVENT.validate_json,
        published=job.is_made,
        less_memory=LESS_MEMORY,
        grace=GRACE,
    )
    await process.run(on_progress)
    return job.output
