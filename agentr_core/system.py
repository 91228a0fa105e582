"""This process and its machine: retries, atomic file writes, threads and interrupts, the shipped
data, child processes, memory, and the names of this host.
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

# When to retry a failed request to a server: one policy, as pure functions.

_FIRST_WAIT_SECONDS = 0.5
_MAX_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The limits of retrying: at most `retries` tries after the first, none of them begun more than
    `seconds` seconds after the first began.
    """

    retries: int
    seconds: float


def wait_before_retry(
    policy: RetryPolicy,
    *,
    num_failures: int,
    elapsed_seconds: float,
    random_fraction: float,
    retry_after: float | None = None,
) -> float | None:
    """Return how many seconds to wait before the next try, or None if the policy allows no more.

    The wait is drawn from zero to a bound that doubles with each failure from 0.5 to 30 seconds
    ("full jitter"). If the server says when to come back, the random wait is added to that time, so
    that many clients that were told the same time do not come back at once.

    Args:
        num_failures: tries that have failed, at least 1.
        elapsed_seconds: seconds since the first try began.
        random_fraction: a random number in [0, 1).
        retry_after: the seconds to wait that the server asked for; None if it did not.
    """
    if num_failures > policy.retries:
        return None
    # Beyond 2**16 the cap has long been reached.
    wait = random_fraction * min(_MAX_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** min(num_failures - 1, 16)) + max(
        retry_after or 0.0, 0.0
    )
    return wait if elapsed_seconds + wait <= policy.seconds else None


def retry_after_seconds(header: str, *, now: float) -> float | None:
    """Return the seconds to wait, at least 0, according to a `Retry-After` header, which is a
    number or a date; None if it is neither.

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

_MIN_CACHED_BYTES = 8 * 2**20
"""Bytes from which on hashes are cached: fewer are hashed faster than a user notices."""
_MIN_AGE_NS = 60 * 10**9


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
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
    """Yield an empty temporary folder, and rename it to `folder` once the block has ended without
    an error, so that the new folder appears complete or not at all.

    Raises:
        ConfigError: the folder exists already.
        DiskError: it cannot be written, or the block raised an `OSError`; nothing is left of it.
    """
    if folder.exists():
        raise ConfigError(f"{folder} already exists; name a new folder")
    draft = folder.with_name(f".{folder.name}.new")
    with report_write_errors(folder):
        try:
            # A process that was killed may have left one.
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            yield draft
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text to a file atomically, so that it is never seen half written; a missing folder is
    created. Raises `DiskError`.
    """
    with report_write_errors(path):
        content = text.encode("utf-8")
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, as `write_text` does. A symbolic link stays a link, and its target
    is replaced; a pipe or a device, such as /dev/stdout, is written to directly. Raises
    `DiskError`.
    """
    if path.is_file():
        path = path.resolve()
    elif path.exists() and not path.is_dir():
        with report_write_errors(path):
            path.write_bytes(content)
        return
    draft = path.with_name(f".{path.name}.new-{os.getpid()}")
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def content_sha256(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, or that of the names and contents of all files in a folder.

    Hashing gigabytes takes a while, so from 8 MiB on the hashes are stored in a file below `cache`.
    A stored hash is used again only while size, times and inode of its file are the same. These
    times include that of the last inode change (ctime), which programs cannot set back as they can
    the time of modification. The hash of a file that was changed within the last minute is not
    stored, since a file system may give two changes the same time.

    Raises `OSError` when something cannot be read, and `DiskError` when the cache cannot be
    written.
    """
    is_folder = path.is_dir()
    files = sorted(_files_in(path, ())) if is_folder else [path]
    states = {str(file.relative_to(path)): file.stat() for file in files}
    cache_file = cache / "hashes" / f"{fingerprint(str(path.resolve()))}.json"
    is_large = sum(state.st_size for state in states.values()) >= _MIN_CACHED_BYTES
    cached_hashes: dict[str, list[Any]] = {}
    if is_large:
        # A cache that cannot be read is built anew.
        with suppress(OSError, ValueError):
            stored_value = json.loads(cache_file.read_bytes())
            cached_hashes = stored_value if isinstance(stored_value, dict) else {}
    now = time.time_ns()
    hashes: dict[str, str] = {}
    new_cache: dict[str, list[Any]] = {}
    for file, (name, state) in zip(files, states.items(), strict=True):
        stat_key = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        *cached_stat_key, cached_hash = cached_hashes.get(name) or [""]
        hashes[name] = cached_hash if cached_stat_key == stat_key else file_sha256(file)
        if max(state.st_mtime_ns, state.st_ctime_ns) < now - _MIN_AGE_NS:
            new_cache[name] = [*stat_key, hashes[name]]
    if is_large and new_cache != cached_hashes:
        write_text(cache_file, json.dumps(new_cache))
    return fingerprint(list(hashes.items())) if is_folder else hashes["."]


def _files_in(folder: Path, ancestors: tuple[os.stat_result, ...]) -> Iterator[Path]:
    """Yield the files in a folder and in its subfolders, linked ones included. `ancestors` holds
    the state of the folders that contain it. Raises `OSError` for one that cannot be listed.
    """
    stat = folder.stat()
    if any(os.path.samestat(stat, ancestor) for ancestor in ancestors):
        return  # a link back to a folder that it is in
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_in(path, (*ancestors, stat))
        elif path.is_file():
            yield path


def flush_to_disk(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_into_place(draft: Path, folder: Path) -> None:
    """Rename the finished folder `draft` to `folder`. If another process has made that in the
    meantime, keep the other's folder and remove `draft`.
    """
    try:
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(draft)


# Threads: for a single function, for long work that ends soon after its caller is cancelled (as by
# Ctrl-C), and for an event loop.

P = ParamSpec("P")
T = TypeVar("T")

_stop_event: ContextVar[threading.Event | None] = ContextVar("agentr_stop_event", default=None)


def start_in_thread(function: Callable[[], T], *, name: str, daemon: bool = False) -> Future[T]:
    """Run a function in a new thread, with a copy of the caller's context, and return the future of
    its result. Unless `daemon` is set, the process does not exit before the function has ended.
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


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread and return its result; it should call `raise_if_cancelled` now and
    then.

    If the caller is cancelled, `raise_if_cancelled` raises in the thread, and the cancellation is
    passed on only after the thread has ended: nothing that the caller then closes is still in use.
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


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if this thread was started by `run_in_thread` and its caller has been
    cancelled; otherwise do nothing.
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
        """Start a coroutine and return at once; its result is not available."""
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
DATA_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent / "data")
"""Where the shipped data may be: inside an installed package, or beside the packages in a checkout.
The first of these folders that has a path is used.
"""


def data_path(*parts: str) -> Path:
    """Return the path of a shipped file or folder, named by its parts below `data/`.

    Raises:
        DataFileError: neither the installed package nor a checkout has it.
    """
    for root in DATA_ROOTS:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    roots = " and ".join(str(root) for root in DATA_ROOTS)
    raise DataFileError(f"shipped data {'/'.join(parts)} is missing below {roots}; install the package again")


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the shipped recipes by name, in alphabetical order; empty if there are
    none.
    """
    folders = (_PACKAGE / "_data" / "recipes", _PACKAGE.parent / "deployments" / "recipes")
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def shipped_models() -> dict[str, Path]:
    """Return the directories of the shipped models by name, in alphabetical order. Raises
    `DataFileError` if the shipped data is missing.
    """
    return {file.parent.name: file.parent for file in sorted(data_path("models").glob("*/model.safetensors"))}


# Helpers for our child processes: the location of the package, faster imports, exit together with
# the parent process, and temporary folders that do not outlive their process for long.

_MIN_AGE_SECONDS = 60.0
"""Younger folders are left alone: their process may not have locked them yet."""


def python_path() -> str:
    """Return the PYTHONPATH with which a child process imports the same copy of this package."""
    return os.pathsep.join(filter(None, (source_folder(), os.environ.get("PYTHONPATH"))))


def source_folder() -> str:
    """Return the folder that contains this copy of the package."""
    return str(Path(__file__).resolve().parents[1])


@contextmanager
def gc_paused_for_imports() -> Iterator[None]:
    """Pause garbage collection while the body imports, and exempt all objects that exist afterwards
    from later collections.

    Torch, Transformers and TRL create millions of permanent objects: scanning them again and again
    takes a fifth of their import time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class Scratch:
    """A temporary folder, at `path`, that is removed by `close` or when this process ends.

    If the process is killed, the next process that makes a `Scratch` of the same name removes the
    folder: it can tell that nobody uses it, because every user holds a lock on its folder.
    """

    def __init__(self, name: str) -> None:
        prefix = f"agentr-{name}-"
        # Folders of processes that were killed are removed.
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime < _MIN_AGE_SECONDS:
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


def _remove(path: str, lock_fd: int, owner_pid: int) -> None:
    os.close(lock_fd)
    # A process that was forked from the owner must not remove the folder at its own exit.
    if os.getpid() == owner_pid:
        shutil.rmtree(path, ignore_errors=True)


def end_with_parent() -> None:
    """Make this process exit, with status 1, as soon as its standard input ends: the parent holds
    the other end open.
    """
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()


def _exit_at_end_of_input() -> None:
    # This bypasses Python's own buffer, whose lock a thread must not hold when the interpreter
    # exits.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


# The number of processors available for computing.


def processors() -> int:
    """Return how many processors (logical CPUs) this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# A setting of the C library's allocator that spares tensor programs most page faults.

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MAX_MALLOPT_VALUE = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make the allocator keep freed blocks for the next tensor instead of returning them to the
    system; return whether it does so now.

    By default glibc maps memory for every big tensor and unmaps it when it is freed, and each new
    page costs a page fault: about a tenth of a training step on a CPU. Call this before any thread
    has started: threads that start later share the arenas that exist by then, and all but the first
    arena hold no block above 64 MiB. With any other C library nothing changes, and the result is
    False.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((M_MMAP_THRESHOLD, MAX_MALLOPT_VALUE), (M_TRIM_THRESHOLD, MAX_MALLOPT_VALUE), (M_ARENA_MAX, 1))
    return all([mallopt(option, value) for option, value in options])


# The host that a request names, and whether a server needs a token.

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
"""The names by which a machine refers to itself."""


def host_in(header: str) -> str | None:
    """Return the host in a `Host` header, without its port; None if it cannot be read."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def token_for(host: str) -> str | None:
    """Return a new random token for a server that listens on `host`; None for a loopback name,
    which only this machine can reach and which needs no token.
    """
    return None if host in LOOPBACK else secrets.token_urlsafe(24)
