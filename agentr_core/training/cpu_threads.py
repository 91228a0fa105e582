"""The number of threads that compute on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use_threads(wanted: int) -> None:
    """Let PyTorch compute on `wanted` threads of this process.

    0 leaves the number to `OMP_NUM_THREADS`; if that is not set and there is no GPU, one thread is
    used. Threads meet at the end of every operation, of which a step has thousands, and spin until
    the last one arrives: when another program takes a core from one of them, all wait.
    """
    if wanted:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        torch.set_num_threads(1)


@contextmanager
def threads(wanted: int) -> Iterator[None]:
    """Let PyTorch compute on `wanted` threads, as with `use_threads`, but only during the block."""
    before = torch.get_num_threads()
    use_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
