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

from agentr_core.system import end_with_parent, importing
from agentr_core.training.job import EVENT, JOB, Event, TrainingJob


def main(arguments: list[str]) -> int:
    """Do this process's part of the job in JOB_FILE; return exit status 0. If the job fails, the
    process exits in `work`.
    """
    job_file, events_file = (Path(argument) for argument in arguments)
    end_with_parent()
    work(JOB.validate_json(job_file.read_bytes()), events_file)
    return 0


def work(job: TrainingJob, events_file: Path) -> None:
    """Do this process's part of a job. If it fails, write a `Fault` to the events file and exit the
    process with status 1.
    """
    with events_file.open("ab", buffering=0) as events:

        def tell(event: Event) -> None:
            events.write(EVENT.dump_json(event) + b"\n")

        try:
            with importing():
                from agentr_core.training.run import run

            run(job, tell)
        except Exception as error:
            traceback.print_exc()
            from agentr_core.training.run import describe

            tell(describe(error, job.work.root))
            # Exit at once: the error's frames keep alive what is left of a process group, and to
            # free that, or to leave the group, could mean waiting for processes that are gone.
            _leave(1)


def _leave(status: int) -> NoReturn:
    """Exit this process at once, without the interpreter's cleanup."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    status = 1
    # Registered first, so run last: all other handlers run, but the interpreter is not finalised.
    # During that, a thread of Gloo, which outlives its process group, might free a tensor, and so
    # abort a training that is done (pytorch issue 190489).
    atexit.register(lambda: _leave(status))
    status = main(sys.argv[1:])
