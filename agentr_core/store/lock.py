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
_FIRST_WARNING_S = 10.0
_WARNING_INTERVAL_S = 60.0
_LOOKUP_INTERVAL_S = 1.0
"""A wait is logged after `_FIRST_WARNING_S` seconds, then every `_WARNING_INTERVAL_S`; while it
lasts, the holder of the lock is looked up every `_LOOKUP_INTERVAL_S`.
"""
_LONGEST_NESTED_WAIT_S = 60.0
"""The longest wait of a thread that holds the lock itself, since that wait is a deadlock."""

log = logging.getLogger(__name__)
_last_warning_by_path: dict[Path, float] = {}
"""The time of the last log message about a wait, by database, whichever thread waited."""
_this_thread = threading.local()


@contextmanager
def hold(path: Path, *, exclusive: bool, deadline: float) -> Iterator[None]:
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
    with (
        burst_deadline(path, deadline) as capped_deadline,
        hold_file_locks(path, exclusive=exclusive, deadline=capped_deadline),
    ):
        yield


@contextmanager
def burst_deadline(path: Path, deadline: float) -> Iterator[float]:
    """Count the body as a burst of this thread on `path`, and yield its deadline: that given, but
    within a minute if the thread is already in another burst on `path`, which would be a deadlock.
    """
    nested_paths: list[Path] = _this_thread.__dict__.setdefault("paths", [])
    capped_deadline = min(deadline, time.monotonic() + _LONGEST_NESTED_WAIT_S) if path in nested_paths else deadline
    nested_paths.append(path)
    try:
        yield capped_deadline
    finally:
        nested_paths.remove(path)


@contextmanager
def hold_file_locks(path: Path, *, exclusive: bool, deadline: float) -> Iterator[None]:
    """Hold the lock as `hold` does; another thread may end the body.

    A second side file is a turnstile that a waiting writer keeps shut. Without it readers that come
    one after the other would keep a writer out for ever, since a lock goes to whichever process
    happens to ask next.
    """
    with _open_lock_file(path, ".queue", exclusive) as queue_fd, _open_lock_file(path, ".lock", exclusive) as lock_fd:
        _acquire(queue_fd, path, exclusive, deadline)
        try:
            _acquire(lock_fd, path, exclusive, deadline)
        finally:
            fcntl.flock(queue_fd, fcntl.LOCK_UN)
        yield


def has_waiters(path: Path) -> bool:
    """Return whether a thread or process waits for the lock; True also if the queue file cannot be
    opened.
    """
    try:
        with _open_lock_file(path, ".queue", exclusive=False) as queue_fd:
            fcntl.flock(queue_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, StoreError):
        return True
    return False


@contextmanager
def hold_if_lock_files_exist(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of the database at `path` for the body as a reader, if its lock files exist;
    otherwise run the body without, so that no lock files appear beside another program's database.
    Raises as `hold` does.
    """
    if all(path.with_name(path.name + suffix).exists() for suffix in (".queue", ".lock")):
        with hold(path, exclusive=False, deadline=deadline):
            yield
    else:
        yield


def busy_error(path: Path, holder_pid: int | None) -> StoreBusy:
    """Return the error that the database at `path` is in use, with its holder's PID if known."""
    return StoreBusy(
        f"{path} is held by {_describe_holder(holder_pid)}; wait until it is done, or stop it, and try again"
    )


def _describe_holder(pid: int | None) -> str:
    if pid is None:
        return "another process"
    return f"another {'part of this process' if pid == os.getpid() else 'process'} (PID {pid})"


class Wait:
    """A wait for the database at `path` that logs a warning from time to time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_time = self._last_lookup_time = time.monotonic()
        self._holder_pid: int | None = None
        self._held_since = datetime.now()

    def warn_if_due(self, find_holder_pid: Callable[[], int | None]) -> None:
        """Look up who holds the database, at most once a second, and log a warning if due."""
        now = time.monotonic()
        if now - self._last_lookup_time < _LOOKUP_INTERVAL_S:
            return
        self._last_lookup_time = now
        pid = find_holder_pid()
        if pid != self._holder_pid:
            self._holder_pid, self._held_since = pid, datetime.now()
        if (
            now - self._start_time < _FIRST_WARNING_S
            or now - _last_warning_by_path.get(self._path, -_WARNING_INTERVAL_S) < _WARNING_INTERVAL_S
        ):
            return
        _last_warning_by_path[self._path] = now
        held_since = f"{self._held_since:%H:%M:%S}"
        message = (
            f"waiting for the store {self._path}, which {_describe_holder(pid)} has held since {held_since} at least"
        )
        log.warning("%s; nothing is lost meanwhile", message)


@contextmanager
def _open_lock_file(path: Path, suffix: str, exclusive: bool) -> Iterator[int]:
    # A reader opens read-only, so that a workspace that someone else owns can be read.
    flags = os.O_CREAT | (os.O_RDWR if exclusive else os.O_RDONLY)
    lock_path = path.with_name(path.name + suffix)
    try:
        try:
            descriptor = os.open(lock_path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.EROFS or exclusive:
                raise
            # A database without lock files on a read-only file system: lock the file itself.
            descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(
            f"{lock_path} cannot be opened ({error.strerror}); make its folder accessible to you"
        ) from error
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
                raise busy_error(path, _holder_pid(path)) from None
            wait.warn_if_due(lambda: _holder_pid(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be locked ({error.strerror}); keep workspaces on a local disk") from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _holder_pid(path: Path) -> int | None:
    """Return the PID of a process that holds the lock, or None if the kernel does not tell."""
    with suppress(OSError):
        return holder_pid_by_inode().get(path.with_name(path.name + ".lock").stat().st_ino) or None
    return None


def holder_pid_by_inode() -> dict[int, int]:
    """Return the PID that holds each `flock` of this machine, by the inode of its file; 0 for a
    process that this one cannot see. Raises `OSError` if the kernel does not list its locks.
    """
    holder_pids = {}
    for line in Path("/proc/locks").read_text().splitlines():
        # 3: FLOCK  ADVISORY  WRITE 4711 fe:00:2147983 0 EOF; an arrow marks one that waits.
        fields = line.split()
        if fields[1] == "FLOCK":
            holder_pids[int(fields[5].rpartition(":")[2])] = int(fields[4])
    return holder_pids
