"""This process and its machine: threads, interrupts, waiting, files that are written whole, and the
names of this host.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import fcntl
import gc
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

from agentr_core.errors import ConfigError, DataFileError, DiskError
from agentr_core.fingerprint import file_sha256, fingerprint

# When a failed request to a server is tried again: one policy, as pure functions.

_BASE_SECONDS = 0.5
_CAP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The limits of retrying: `retries` tries after the first, none begun more than `seconds` after
    the first.
    """

    retries: int
    seconds: float


def wait_before_retry(
    policy: RetryPolicy, *, failures: int, elapsed: float, uniform: float, retry_after: float | None = None
) -> float | None:
    """Return how many seconds to wait before the next try, or None if the policy allows no more.

    The wait is drawn from zero to a bound that doubles with each failure from 0.5 to 30 seconds
    ("full jitter"). If the server says when to come back, the jitter is added to that time, so that
    many clients that were told the same do not come back at once.

    Args:
        failures: tries that have failed, at least 1.
        elapsed: seconds since the first try began.
        uniform: a random number in [0, 1).
        retry_after: the seconds that the server asked for, if it did.
    """
    if failures > policy.retries:
        return None
    # Beyond 2**16 the cap has long been reached.
    wait = uniform * min(_CAP_SECONDS, _BASE_SECONDS * 2 ** min(failures - 1, 16)) + max(retry_after or 0.0, 0.0)
    return wait if elapsed + wait <= policy.seconds else None


def seconds_told(header: str, *, now: float) -> float | None:
    """Return the seconds to wait according to a `Retry-After` header, a number or a date; None if
    it is neither.

    Args:
        now: seconds since 1970.
    """
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - now)
    except ValueError:
        return None


# Files and folders written atomically; an error becomes one sentence.

_LARGE = 8 * 2**20
"""Bytes from which hashes are remembered: fewer are hashed faster than a user notices."""
_YOUNG_NS = 60 * 10**9


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error while the body writes `path`, or something below it, into a `DiskError`.

    Raises:
        DiskError: the disk is full, access is denied, or a folder is missing or is a file.
    """
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
        remedy = "make its folder accessible to you, or name another place"
        if any(sign in str(error) for sign in ("No space left", "File too large", "Disk quota")):
            remedy = "free some disk space and run the same command again, nothing stored is lost"
        raise DiskError(f"{path} cannot be written ({cause}); {remedy}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside a new one, which takes its name once the block has ended without
    an error: what is in it appears as a whole or not at all.

    Raises:
        ConfigError: the folder exists already.
        DiskError: it cannot be written; nothing is left of it.
    """
    if folder.exists():
        raise ConfigError(f"{folder} already exists; name a new folder")
    draft = folder.with_name(f".{folder.name}.new")
    with writing(folder):
        try:
            # Of a process that was killed.
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            yield draft
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text to a file atomically, so that it is never seen half written; its folder is made.
    Raises `DiskError`.
    """
    with writing(path):
        content = text.encode("utf-8")
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, as `write_text` does. A link stays one, and its target is written; a
    pipe or a device, such as /dev/stdout, is written into.
    """
    if path.is_file():
        path = path.resolve()
    elif path.exists() and not path.is_dir():
        with writing(path):
            path.write_bytes(content)
        return
    draft = path.with_name(f".{path.name}.new-{os.getpid()}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def content_sha256(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, or that of the names and contents of all files in a folder.

    Gigabytes take a while, so the hashes of large ones are remembered in a file of `cache`. One is
    used again only while size, times and inode of its file are the same. The time of the last
    change of an inode counts, which no program can set back as it can the time of modification; and
    a file that was written less than a minute before is hashed again, since a file system may give
    two changes the same time.

    Raises `OSError` when something cannot be read, and `DiskError` when the cache cannot be
    written.
    """
    folder = path.is_dir()
    files = sorted(_files_in(path, ())) if folder else [path]
    states = {str(file.relative_to(path)): file.stat() for file in files}
    memory = cache / "hashes" / f"{fingerprint(str(path.resolve()))}.json"
    large = sum(state.st_size for state in states.values()) >= _LARGE
    cached_hashes: dict[str, list[Any]] = {}
    if large:
        # What cannot be read is made anew.
        with suppress(OSError, ValueError):
            stored_value = json.loads(memory.read_bytes())
            cached_hashes = stored_value if isinstance(stored_value, dict) else {}
    now = time.time_ns()
    hashes: dict[str, str] = {}
    new: dict[str, list[Any]] = {}
    for file, (name, state) in zip(files, states.items(), strict=True):
        stat_key = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        *before, content = cached_hashes.get(name) or [""]
        hashes[name] = content if before == stat_key else file_sha256(file)
        if max(state.st_mtime_ns, state.st_ctime_ns) < now - _YOUNG_NS:
            new[name] = [*stat_key, hashes[name]]
    if large and new != cached_hashes:
        write_text(memory, json.dumps(new))
    return fingerprint(list(hashes.items())) if folder else hashes["."]


def _files_in(folder: Path, within: tuple[os.stat_result, ...]) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it, also of linked ones. Raises `OSError`
    for one that cannot be listed.
    """
    stat = folder.stat()
    if any(os.path.samestat(stat, other) for other in within):
        return  # a link back to a folder that it is in
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_in(path, (*within, stat))
        elif path.is_file():
            yield path


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(draft: Path, folder: Path) -> None:
    """Rename a finished draft to `folder`; if another process got there first, its folder stays."""
    try:
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(draft)


# Functions in threads: one of its own for a function, long work that ends soon after its caller is
# cancelled, as by Ctrl-C, and a thread for coroutines.

P = ParamSpec("P")
T = TypeVar("T")

_stop_event: ContextVar[threading.Event | None] = ContextVar("agentr_stop_event", default=None)


def started(function: Callable[[], T], *, name: str, daemon: bool = False) -> Future[T]:
    """Return the coming result of a function, which runs in a new thread with a copy of the
    caller's context; the end of the process waits for it unless it is a daemon.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(function))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return result


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that calls `check_wanted` every now and then in a thread; return its result.

    A cancellation is passed on once the thread has ended: what the caller closes then is no longer
    in use.
    """
    stop_event = threading.Event()
    token = _stop_event.set(stop_event)
    try:
        # A task copies the context when it is made; the thread gets that copy.
        work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    finally:
        _stop_event.reset(token)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop_event.set()
        await asyncio.wait({work})
        raise


def check_wanted() -> None:
    """Raise `CancelledError` in a thread of `in_thread` whose caller was cancelled; do nothing
    anywhere else.
    """
    stop_event = _stop_event.get()
    if stop_event is not None and stop_event.is_set():
        raise asyncio.CancelledError


class LoopThread:
    """An event loop in its own thread, to which other threads give coroutines to run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Raises what the coroutine raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine that nobody waits for."""
        self._loop.call_soon_threadsafe(self._loop.create_task, coroutine)

    def close(self) -> None:
        """End the thread. Calling it twice is harmless."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


DISTRIBUTION = "agentr-flywheel"
"""What pip calls this program; `agentr` on the package index is another one."""

# The location of the shipped data.

_PACKAGE = Path(__file__).resolve().parent
ROOTS = (_PACKAGE / "_data", _PACKAGE.parent / "data")
"""An installed package has its data inside itself, a checkout beside the packages; the first one
that has a path is used.
"""


def data_path(*parts: str) -> Path:
    """Return the path of a shipped file or folder, named by its parts below `data/`.

    Raises:
        DataFileError: neither the installed package nor a checkout has it.
    """
    for root in ROOTS:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    roots = " and ".join(str(root) for root in ROOTS)
    raise DataFileError(f"shipped data {'/'.join(parts)} is missing below {roots}; install the package again")


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the shipped recipes by their names, in order."""
    folders = (_PACKAGE / "_data" / "recipes", _PACKAGE.parent / "deployments" / "recipes")
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def shipped_models() -> dict[str, Path]:
    """Return the directories of the shipped models by their names, in order."""
    return {file.parent.name: file.parent for file in sorted(data_path("models").glob("*/model.safetensors"))}


# Helpers for our child processes: the location of the package, faster imports, an end together
# with the parent process, and folders that do not outlive it for long.

_YOUNG_SECONDS = 60.0
"""A folder of this age may be one that is not held yet."""


def python_path() -> str:
    """Return PYTHONPATH for a child process that imports this very package."""
    return os.pathsep.join(filter(None, (source_folder(), os.environ.get("PYTHONPATH"))))


def source_folder() -> str:
    """Return the folder that contains this very package."""
    return str(Path(__file__).resolve().parents[1])


@contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection while the body imports, and exempt what it imported for good.

    Torch, Transformers and TRL make millions of objects that stay: scanning them again and again
    takes a fifth of their import time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


class Scratch:
    """A temporary folder that is removed by `close`, or when this process ends.

    If the process is killed, the next one that makes a folder of the same name removes it: a folder
    that nobody holds a lock on is nobody's.
    """

    def __init__(self, name: str) -> None:
        prefix = f"agentr-{name}-"
        # Folders of processes that were killed are removed.
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                    continue
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(descriptor)
        self.path = tempfile.mkdtemp(prefix=prefix)
        lock_fd = os.open(self.path, os.O_RDONLY)
        fcntl.flock(lock_fd, fcntl.LOCK_SH)
        self._close = weakref.finalize(self, _remove, self.path, lock_fd, os.getpid())

    def close(self) -> None:
        """Remove the folder. Calling it twice is harmless."""
        self._close()


def _remove(path: str, lock_fd: int, process: int) -> None:
    os.close(lock_fd)
    # Not at the exit of a process forked from this one, whose children still use the folder.
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def end_with_parent() -> None:
    """Make this process end as soon as the far end of its standard input is closed."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    # Reads past Python's own buffer: a thread must not hold its lock when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


# The number of processors available for computing.


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# A setting of the C library's allocator that spares tensor programs most page faults.

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
    options = ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, LARGEST), (M_ARENA_MAX, 1))
    return all([mallopt(option, value) for option, value in options])


# The host that a request names, and who may reach one.

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
"""The names by which a machine refers to itself."""


def host_in(header: str) -> str | None:
    """Return the host in a `Host` header, without its port; None if it cannot be read."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def token_for(host: str) -> str | None:
    """Return a new token for a server that listens on a host; None if only this machine reaches
    it.
    """
    return None if host in LOOPBACK else secrets.token_urlsafe(24)
