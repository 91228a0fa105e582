"""One process of a training: `python -m agentr_core.training.rank JOB_FILE EVENTS_FILE`, started by
`process.start_launcher`.

It ends when its standard input closes, so that it never outlives the process that waits for its
checkpoint.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from agentr_core.system import end_with_parent, gc_paused_for_imports
from agentr_core.training.job import EVENT, JOB, Event, TrainingJob


def main(arguments: list[str]) -> int:
    """Do this process's part of the job in JOB_FILE; return exit status 0. If the job fails, the
    process exits in `run_job`.
    """
    job_file, events_file = (Path(argument) for argument in arguments)
    end_with_parent()
    run_job(JOB.validate_json(job_file.read_bytes()), events_file)
    return 0


def run_job(job: TrainingJob, events_file: Path) -> None:
    """Do this process's part of a job. If it fails, write a `Fault` to the events file and exit the
    process with status 1.
    """
    with events_file.open("ab", buffering=0) as events:

        def write_event(event: Event) -> None:
            events.write(EVENT.dump_json(event) + b"\n")

        try:
            with gc_paused_for_imports():
                from agentr_core.training.run import run

            run(job, write_event)
        except Exception as error:
            traceback.print_exc()
            from agentr_core.training.run import make_fault

            write_event(make_fault(error, job.work_folder.root))
            # Exit at once: the error's frames keep alive what is left of a process group, and to
            # free that, or to leave the group, could mean waiting for processes that are gone.
            _exit_now(1)


def _exit_now(status: int) -> NoReturn:
    """Exit this process at once, without the interpreter's cleanup."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    status = 1
    # Registered first, so run last: all other handlers run, but the interpreter is not finalised.
    # During that, a thread of Gloo, which outlives its process group, might free a tensor, and so
    # abort a training that is done (pytorch issue 190489).
    atexit.register(lambda: _exit_now(status))
    status = main(sys.argv[1:])
