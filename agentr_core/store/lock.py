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
"""After so many seconds a wait is told, then again and again; so often the holder is asked for."""
_OWN_S = 60.0
"""The longest wait of a thread that holds the lock itself, which would wait for itself for ever."""

log = logging.getLogger(__name__)
_last_word: dict[Path, float] = {}
"""When a wait for each database was told last, whichever thread told it."""
_own = threading.local()


@contextmanager
def held(path: Path, *, exclusive: bool, deadline: float) -> Iterator[None]:
    """Hold the lock of the database at `path` for the body, in one thread: `exclusive` for a
    writer, shared for readers.

    Args:
        path: the database file; the lock lives in `<path>.lock` and `<path>.queue`.
        exclusive: whether the body writes.
        deadline: `time.monotonic()` at which to give up; infinite: never. Long waits are told to
            the log.

    Raises:
        StoreBusy: the lock was not free before the deadline.
        StoreError: the lock files cannot be made or locked.
    """
    with burst(path, deadline) as nearer, locked(path, exclusive=exclusive, deadline=nearer):
        yield


@contextmanager
def burst(path: Path, deadline: float) -> Iterator[float]:
    """Return the deadline of this thread for the lock of `path`: nearer inside another burst, which
    would wait for itself for ever.
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
    """Hold the lock as `held` does, whichever thread ends the body.

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
    """Return whether somebody, in this process or another, waits for the lock; true also where the
    lock files are gone.
    """
    try:
        with _opened(path, ".queue", exclusive=False) as queue:
            fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, StoreError):
        return True
    return False


@contextmanager
def held_if_shared(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of the database at `path` for the body as a reader, if there is one; make none
    for a file that no process of ours has opened where it is. Raises as `held` does.
    """
    if all(path.with_name(path.name + suffix).exists() for suffix in (".queue", ".lock")):
        with held(path, exclusive=False, deadline=deadline):
            yield
    else:
        yield


def busy(path: Path, holder: int | None) -> StoreBusy:
    """Return the error that says who holds the database at `path`, if that is known."""
    return StoreBusy(f"{path} is held by {_who(holder)}; wait until it is done, or stop it, and try again")


def _who(holder: int | None) -> str:
    if holder is None:
        return "another process"
    return f"another {'part of this process' if holder == os.getpid() else 'process'} (PID {holder})"


class Wait:
    """A wait for the database at `path`, of which the log is told now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = self._looked = time.monotonic()
        self._holder: int | None = None
        self._since = datetime.now()

    def tell(self, holder: Callable[[], int | None]) -> None:
        """Ask who holds the database, and tell it if it is time."""
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
            # A copy without its side files, where nobody can write: its own lock does.
            descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{name} cannot be opened ({error.strerror}); make its folder accessible to you") from error
    try:
        yield descriptor
    finally:
        # Closing is not enough: a child forked meanwhile would share the lock and keep it. A file
        # system without locks has said so before.
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
