"""The trainer's first process: `python -m agentr_core.training.worker JOB_FILE EVENTS_FILE`,
started by `process.train`.

It holds the lock of the job, and trains by itself or starts the processes that do.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentr_core.errors import TrainingFault
from agentr_core.system import end_with_parent
from agentr_core.training.checkpoints import is_complete
from agentr_core.training.job import EVENT, JOB, Fault
from agentr_core.training.process import start_launcher
from agentr_core.training.rank import run_job

LOCK_WAIT_SECONDS = 30.0
"""Seconds to wait for another trainer of the same job to end: one whose parent was killed takes a
moment to notice.
"""


def main(arguments: list[str]) -> int:
    """Run a job; return the exit status: 0 when the checkpoint is published, else that of the
    failed process.

    The reason for a failure is written to the events file, as a `Fault`.
    """
    job_file, events_file = (Path(argument) for argument in arguments)
    end_with_parent()
    job = JOB.validate_json(job_file.read_bytes())
    try:
        with hold_lock(job.work_folder.lock_file) as lock_fd:
            if is_complete(job.output_dir):
                return 0
            if job.config.launch is None:
                run_job(job, events_file)
                return 0
            return start_launcher(job, job_file=job_file, events_file=events_file, inherited_fd=lock_fd).wait()
    except TrainingFault as fault:
        with events_file.open("ab") as events:
            events.write(EVENT.dump_json(Fault(kind=TrainingFault.__name__, message=str(fault))) + b"\n")
        return 1


@contextmanager
def hold_lock(file: Path) -> Iterator[int]:
    """Hold the lock of a job, an exclusive lock of `file`, during the block; yield the file's
    descriptor.

    Raises `TrainingFault` if another process still holds it after `LOCK_WAIT_SECONDS` seconds.
    """
    with file.open("a+") as stream:
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    stream.seek(0)
                    raise TrainingFault(
                        f"process {stream.read().strip()} trains this job already; wait for it or end it"
                    ) from None
                time.sleep(0.1)
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield stream.fileno()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
