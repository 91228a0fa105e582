"""The lock every open of a store goes through: many readers or one writer, across processes and
threads.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from agentr_core.errors import StoreBusy, StoreError

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
_FIRST_WORD_S = 10.0
_NEXT_WORD_S = 60.0
_LOOK_S = 1.0
"""A wait is logged after `_FIRST_WORD_S` seconds, then every `_NEXT_WORD_S`; while it lasts, the
holder of the lock is looked up every `_LOOK_S`.
"""
_OWN_S = 60.0
"""The longest wait of a thread that holds the lock itself, since that wait is a deadlock."""

log = logging.getLogger(__name__)
_last_word: dict[Path, float] = {}
"""The time of the last log message about a wait, by database, whichever thread waited."""
_own = threading.local()


@contextmanager
def held(path: Path, *, exclusive: bool, deadline: float) -> Iterator[None]:
    """Hold the lock of the database at `path` for the body, in one thread: `exclusive` for a
    writer, shared for readers.

    Args:
        path: the database file; the lock lives in `<path>.lock` and `<path>.queue`.
        exclusive: whether the body writes.
        deadline: `time.monotonic()` at which to give up; infinite: never. Long waits are logged.

    Raises:
        StoreBusy: the lock was not free before the deadline.
        StoreError: the lock files cannot be made or locked.
    """
    with burst(path, deadline) as nearer, locked(path, exclusive=exclusive, deadline=nearer):
        yield


@contextmanager
def burst(path: Path, deadline: float) -> Iterator[float]:
    """Count the body as a burst of this thread on `path`, and yield its deadline: that given, but
    within a minute if the thread is already in another burst on `path`, which would be a deadlock.
    """
    paths: list[Path] = _own.__dict__.setdefault("paths", [])
    nearer = min(deadline, time.monotonic() + _OWN_S) if path in paths else deadline
    paths.append(path)
    try:
        yield nearer
    finally:
        paths.remove(path)


@contextmanager
def locked(path: Path, *, exclusive: bool, deadline: float) -> Iterator[None]:
    """Hold the lock as `held` does; another thread may end the body.

    A second side file is a turnstile that a waiting writer keeps shut. Without it readers that come
    one after the other would keep a writer out for ever, since a lock goes to whichever process
    happens to ask next.
    """
    with _opened(path, ".queue", exclusive) as queue, _opened(path, ".lock", exclusive) as lock:
        _acquire(queue, path, exclusive, deadline)
        try:
            _acquire(lock, path, exclusive, deadline)
        finally:
            fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def wanted(path: Path) -> bool:
    """Return whether a thread or process waits for the lock; True also if the queue file cannot be
    opened.
    """
    try:
        with _opened(path, ".queue", exclusive=False) as queue:
            fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, StoreError):
        return True
    return False


@contextmanager
def held_if_shared(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of the database at `path` for the body as a reader, if its lock files exist;
    otherwise run the body without, so that no lock files appear beside another program's database.
    Raises as `held` does.
    """
    if all(path.with_name(path.name + suffix).exists() for suffix in (".queue", ".lock")):
        with held(path, exclusive=False, deadline=deadline):
            yield
    else:
        yield


def busy(path: Path, holder: int | None) -> StoreBusy:
    """Return the error that the database at `path` is in use, with its holder's PID if known."""
    return StoreBusy(f"{path} is held by {_who(holder)}; wait until it is done, or stop it, and try again")


def _who(holder: int | None) -> str:
    if holder is None:
        return "another process"
    return f"another {'part of this process' if holder == os.getpid() else 'process'} (PID {holder})"


class Wait:
    """A wait for the database at `path` that logs a warning from time to time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = self._looked = time.monotonic()
        self._holder: int | None = None
        self._since = datetime.now()

    def tell(self, holder: Callable[[], int | None]) -> None:
        """Look up who holds the database, at most once a second, and log a warning if due."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        pid = holder()
        if pid != self._holder:
            self._holder, self._since = pid, datetime.now()
        if now - self._began < _FIRST_WORD_S or now - _last_word.get(self._path, -_NEXT_WORD_S) < _NEXT_WORD_S:
            return
        _last_word[self._path] = now
        since = f"{self._since:%H:%M:%S}"
        sentence = f"waiting for the store {self._path}, which {_who(pid)} has held since {since} at least"
        log.warning("%s; nothing is lost meanwhile", sentence)


@contextmanager
def _opened(path: Path, suffix: str, exclusive: bool) -> Iterator[int]:
    # A reader opens read-only, so that a workspace that someone else owns can be read.
    flags = os.O_CREAT | (os.O_RDWR if exclusive else os.O_RDONLY)
    name = path.with_name(path.name + suffix)
    try:
        try:
            descriptor = os.open(name, flags, 0o666)
        except OSError as error:
            if error.errno != errno.EROFS or exclusive:
                raise
            # A database without lock files on a read-only file system: lock the file itself.
            descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{name} cannot be opened ({error.strerror}); make its folder accessible to you") from error
    try:
        yield descriptor
    finally:
        # Closing is not enough: a child forked meanwhile would share the lock and keep it. Errors
        # are ignored: on a file system without locks, locking has failed already.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, exclusive: bool, deadline: float) -> None:
    operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    pause = _FIRST_PAUSE_S
    wait = Wait(path)
    while True:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise busy(path, _holder(path)) from None
            wait.tell(lambda: _holder(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be locked ({error.strerror}); keep workspaces on a local disk") from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _holder(path: Path) -> int | None:
    """Return the PID of a process that holds the lock, or None if the kernel does not tell."""
    with suppress(OSError):
        return holders().get(path.with_name(path.name + ".lock").stat().st_ino) or None
    return None


def holders() -> dict[int, int]:
    """Return the PID that holds each `flock` of this machine, by the inode of its file; 0 for a
    process that this one cannot see. Raises `OSError` if the kernel does not list its locks.
    """
    pids = {}
    for line in Path("/proc/locks").read_text().splitlines():
        # 3: FLOCK  ADVISORY  WRITE 4711 fe:00:2147983 0 EOF; an arrow marks one that waits.
        fields = line.split()
        if fields[1] == "FLOCK":
            pids[int(fields[5].rpartition(":")[2])] = int(fields[4])
    return pids
