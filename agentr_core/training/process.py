"""A trainer's process seen from outside: it is started, followed through its events, and ended with
this one.

Training has its own process so that a crash, a lack of memory or a cancellation ends only that
process, and so that its memory is freed when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Generic, TypeVar

from agentr_core.errors import (
    AgentrError,
    ConfigError,
    DataFault,
    ModelDirectoryError,
    NonFiniteLoss,
    OutOfMemory,
    TrainingFault,
)
from agentr_core.lifetime import python_path
from agentr_core.training.job import Fault, WorkFolder, write_whole
from agentr_core.writing import writing

POLL = 0.2
"""Seconds between two readings of the events."""
LINGER = 60.0
"""Seconds a trainer has to end by itself once its checkpoint is published."""
TAIL = 15
"""Lines of the log in an error message."""
KINDS: dict[str, type[AgentrError]] = {
    kind.__name__: kind
    for kind in (ConfigError, DataFault, ModelDirectoryError, NonFiniteLoss, OutOfMemory, TrainingFault)
}
"""The errors that a trainer reports, by their names."""

Step = TypeVar("Step")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProcess(Generic[Step]):
    """How a trainer's process is started, read and ended.

    The process is `python -m MODULE JOB_FILE EVENTS_FILE`, in `environment`; `job` is the content
    of the first file. `read` parses a line of the events; `published` says whether the result is
    there. `less_memory` tells a user which fields need less memory. `grace` is the seconds that a
    cancelled trainer has to end by itself.
    """

    module: str
    work: WorkFolder
    job: bytes
    environment: Mapping[str, str]
    read: Callable[[bytes], Step | Fault]
    published: Callable[[], bool]
    less_memory: str
    grace: float = 5.0

    async def run(self, on_progress: Callable[[Step], None]) -> None:
        """Run the process to its end. If it fails, raise the `AgentrError` that it reported, or the
        one that its exit status stands for. Raises `DiskError` if the work folder cannot be made or
        written to.
        """
        with writing(self.work.root):
            self.work.root.mkdir(parents=True, exist_ok=True)
            write_whole(self.work.job_file, self.job)
        log = self.work.log_file
        earlier = log.stat().st_size if log.exists() else 0
        exit_status, fault = await self._follow(on_progress)
        if exit_status:
            raise self._translate(exit_status, fault, log.read_bytes()[earlier:])

    async def _follow(self, on_progress: Callable[[Step], None]) -> tuple[int, Fault | None]:
        """Return the exit status of the process (negative: the signal that ended it) and the fault
        that it reported.

        Once the checkpoint is published, the training is done: processes that do not end by
        themselves, since those of a group may wait for each other for ever, are ended.
        """
        fault: Fault | None = None
        published: float | None = None
        with (
            self.work.log_file.open("ab") as log,
            # A new file for each attempt: the events of earlier ones have been reported already.
            tempfile.NamedTemporaryFile(dir=self.work.root, prefix="events-", suffix=".jsonl") as events,
        ):
            process = await self._started(events.name, log)
            exited = asyncio.ensure_future(process.wait())
            rest = b""
            try:
                while True:
                    await asyncio.wait({exited}, timeout=POLL)
                    ended = exited.done()
                    *lines, rest = (rest + events.read()).split(b"\n")
                    for line in lines:
                        event = self.read(line)
                        if isinstance(event, Fault):
                            # The first fault is the cause: other processes then report only that
                            # one is gone.
                            fault = fault or event
                        else:
                            on_progress(event)
                    if ended:
                        return exited.result(), fault
                    if published is None and self.published():
                        published = time.monotonic()
                    if published is not None and time.monotonic() - published > LINGER:
                        return 0, fault
            finally:
                await self._end(process, exited)

    async def _started(self, events: str, log: BinaryIO) -> asyncio.subprocess.Process:
        """Return the process, which writes what happens to the file `events`."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.module,
            str(self.work.job_file),
            events,
            # Never written to: the trainer sees this pipe end when this process dies, however that
            # happens.
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**self.environment, "PYTHONPATH": python_path()},
            # An interrupt at the terminal is for this process, which then shuts the trainer down.
            start_new_session=True,
        )

    async def _end(self, process: asyncio.subprocess.Process, exited: asyncio.Future[int]) -> None:
        if exited.done():
            return
        try:
            _signal(process, signal.SIGTERM)
            await asyncio.wait({exited}, timeout=self.grace)
        finally:
            if not exited.done():
                _signal(process, signal.SIGKILL)
                await asyncio.wait({exited})

    def _translate(self, exit_status: int, fault: Fault | None, log: bytes) -> AgentrError:
        """Return the error of a process that failed; `log` is what it wrote, without earlier
        attempts.
        """
        lines = log.decode("utf-8", errors="replace").splitlines()[-TAIL:]
        if fault is not None:
            kind, message = KINDS[fault.kind], fault.message
        # A launcher reports this only in its log.
        elif exit_status == -signal.SIGKILL or any("SIGKILL" in line for line in lines):
            kind = OutOfMemory
            message = (
                "the trainer was killed by the system, probably because memory ran out; "
                f"{self.less_memory}, or give the machine more memory"
            )
        elif exit_status < 0:
            kind, message = TrainingFault, f"the trainer was ended by signal {signal.Signals(-exit_status).name}"
        else:
            kind, message = TrainingFault, f"the trainer ended with exit status {exit_status} and gave no reason"
        kept = "; its last intermediate checkpoint is kept" if any(self.work.checkpoints.glob("checkpoint-*")) else ""
        return kind("\n".join([f"{message}{kept}. End of {self.work.log_file}:", *(f"    {line}" for line in lines)]))


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a trainer and to the launcher of its processes, which passes it on to
    them.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
