"""Describes faults of the trainer's process to its parent, in one sentence each."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from agentr_core.errors import ConfigError, DataFault, ModelDirectoryError, OutOfMemory, TrainingFault
from agentr_core.training.job import LESS_MEMORY, Fault

# Writers in Rust and C++ report a failed write only in their message; torch's does not give the
# cause.
_WRITE_FAILED = ("No space left on device", "PytorchStreamWriter failed", "inline_container")
_MEMORY = ("can't allocate memory", "CUDA out of memory")


def describe(error: BaseException, folder: Path, *, less_memory: str = LESS_MEMORY) -> Fault:
    """Return the fault for an exception: its kind, what happened and what to do.

    `folder` is where the training writes; after a failed write, the message says how much space is
    left there. `less_memory` tells a user which fields need less memory.
    """
    if isinstance(error, ConfigError | DataFault | ModelDirectoryError | TrainingFault):
        return Fault(kind=type(error).__name__, message=str(error))
    chain = list(_chain(error))
    if any(_is_failed_write(link) for link in chain):
        room = shutil.disk_usage(folder).free / 1e6
        return _fault(
            TrainingFault,
            f"a checkpoint could not be written to {folder}: {_line(error)}; its disk has {room:.1f} MB left, free "
            "some and train again",
        )
    if any(_is_memory(link) for link in chain):
        return _fault(OutOfMemory, f"memory ran out ({_line(error)}); {less_memory}")
    return _fault(TrainingFault, f"the trainer failed with {type(error).__name__}: {_line(error)}")


def _fault(kind: type[TrainingFault], message: str) -> Fault:
    return Fault(kind=kind.__name__, message=message)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _is_failed_write(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(text in str(error) for text in _WRITE_FAILED)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
