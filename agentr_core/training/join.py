"""An additional machine for the trainings of a workspace: `python -m agentr_core.training.join
WORKSPACE MACHINE_RANK`.

The run itself is started on the machine of rank 0. On every other machine this command takes part
in each training that asks for it, until it is interrupted. It needs the same checkout and the same
working directory; the workspace's `checkpoints/` and `datasets/` and the folder of the model must
be on a shared file system, under the same paths. The store stays on a local disk of machine 0, and
nothing here reads it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from agentr_core.models.checkpoint_dir import CHECKPOINTS
from agentr_core.training.checkpoints import is_complete
from agentr_core.training.job import JOB, TrainingJob
from agentr_core.training.process import start_launcher

POLL_SECONDS = 2.0
"""Seconds between two searches for a training; after one that failed, its next attempt is joined
again.
"""
LINGER_SECONDS = 30.0
"""Seconds in which processes may end by themselves once their training is done or its files are
gone.
"""
GRACE_SECONDS = 10.0
"""Seconds that a launcher has to end cleanly."""


def main(arguments: list[str]) -> int:
    """Take part in trainings until interrupted; return 2 for wrong arguments."""
    if len(arguments) != 2 or not arguments[1].isdecimal() or int(arguments[1]) < 1:
        sys.stderr.write("usage: python -m agentr_core.training.join WORKSPACE MACHINE_RANK (1, 2, ...)\n")
        return 2
    workspace, machine_rank = Path(arguments[0]), int(arguments[1])
    while True:
        training = latest_unfinished(workspace / CHECKPOINTS, machine_rank)
        if training is not None:
            run_processes(*training, machine_rank)
        time.sleep(POLL_SECONDS)


def run_processes(job_file: Path, job: TrainingJob, machine_rank: int) -> None:
    """Run this machine's processes of a training until they end, the training is done, or another
    one has started.
    """
    # This machine's processes write to its own output; the main machine reports on the training.
    events = job_file.with_name(f"machine-{machine_rank}.jsonl")
    launcher = start_launcher(job, job_file=job_file, events_file=events, machine_rank=machine_rank)
    try:
        unwanted_since: float | None = None
        while not _wait_for_end(launcher, POLL_SECONDS):
            training = latest_unfinished(job_file.parents[1], machine_rank)
            if training is None:
                unwanted_since = unwanted_since or time.monotonic()
                if time.monotonic() - unwanted_since > LINGER_SECONDS:
                    return
            elif training[0] == job_file:
                unwanted_since = None
            else:
                # Another training has started: these processes would wait for a main machine that
                # is gone, and meet that of the new training.
                return
    finally:
        # The launcher's processes end when their standard input closes.
        assert launcher.stdin is not None
        launcher.stdin.close()
        launcher.terminate()
        if not _wait_for_end(launcher, GRACE_SECONDS):
            launcher.kill()
            launcher.wait()


def _wait_for_end(launcher: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait up to some seconds for a launcher to end; return whether it has ended."""
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds)
    return launcher.returncode is not None


def latest_unfinished(checkpoints: Path, machine_rank: int) -> tuple[Path, TrainingJob] | None:
    """Return the job file and the job of the training that was started last, if it is unfinished
    and uses this machine; else None.
    """
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
