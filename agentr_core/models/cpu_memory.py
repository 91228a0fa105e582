"""A setting of the C library's allocator that spares tensor programs most page faults."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make the allocator keep freed blocks for the next tensor instead of giving them back; return
    whether it does.

    By default glibc maps every big tensor anew and unmaps it when freed, and each new page costs a
    fault: about a tenth of a training step on a CPU. Threads that start later share the arenas that
    there are by then. All but the first hold no block above 64 MiB, so this is best called before
    any thread has started. With any other C library nothing changes, and the result is False.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, LARGEST), (M_ARENA_MAX, 1))
    return all([mallopt(option, value) for option, value in wanted])
