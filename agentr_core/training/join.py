"""A further machine for the trainings of a workspace: `python -m agentr_core.training.join WORKSPACE MACHINE_RANK`.

The run itself is started on the machine of rank 0. On each other one this command takes part in every training that
asks for it, until it is interrupted. It needs the same checkout, the same working directory, and under the same paths,
on a shared file system, the workspace's `checkpoints/` and `datasets/` and the folder of the model. The store stays on
a local disk of machine 0, and nothing here reads it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pydantic import ValidationError

from agentr_core.training.checkpoints import is_complete
from agentr_core.training.job import JOB, TrainingJob
from agentr_core.training.launch import launched

POLL = 2.0
"""Seconds between two looks for a training, and after one that failed: its next attempt is joined again."""


def main(arguments: list[str]) -> int:
    """Take part in trainings until interrupted; return 2 for wrong arguments."""
    if len(arguments) != 2 or not arguments[1].isdecimal() or int(arguments[1]) < 1:
        sys.stderr.write("usage: python -m agentr_core.training.join WORKSPACE MACHINE_RANK (1, 2, ...)\n")
        return 2
    workspace, machine_rank = Path(arguments[0]), int(arguments[1])
    while True:
        found = wanted(workspace / "checkpoints", machine_rank)
        if found is not None:
            job_file, job = found
            # What this machine's processes have to say is in its own output; the main machine tells of the training.
            events = job_file.with_name(f"machine-{machine_rank}.jsonl")
            launched(job, job_file=job_file, events_file=events, machine_rank=machine_rank)
        time.sleep(POLL)


def wanted(checkpoints: Path, machine_rank: int) -> tuple[Path, TrainingJob] | None:
    """Return the training that was started last if it is unfinished and wants this machine, else None."""
    files = sorted(checkpoints.glob(".*/job.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for job_file in files[:1]:
        try:
            job = JOB.validate_json(job_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        launch = job.config.launch
        if launch is not None and launch.num_machines > machine_rank and not is_complete(job.output_dir):
            return job_file, job
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
