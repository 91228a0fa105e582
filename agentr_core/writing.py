"""Files and folders written atomically; an error becomes one sentence."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentr_core.errors import DiskError
from agentr_core.fingerprint import file_sha256, fingerprint

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
        raise DiskError(f"{path} cannot be written ({_cause(error)}); {_cure(error)}") from error


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
    known, now = _hashes_in(memory) if large else {}, time.time_ns()
    found: dict[str, str] = {}
    new: dict[str, list[Any]] = {}
    for file, (name, state) in zip(files, states.items(), strict=True):
        seen = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        *before, content = known.get(name) or [""]
        found[name] = content if before == seen else file_sha256(file)
        if max(state.st_mtime_ns, state.st_ctime_ns) < now - _YOUNG_NS:
            new[name] = [*seen, found[name]]
    if large and new != known:
        write_text(memory, json.dumps(new))
    return fingerprint(list(found.items())) if folder else found["."]


def _files_in(folder: Path, within: tuple[os.stat_result, ...]) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it, also of linked ones. Raises `OSError`
    for one that cannot be listed.
    """
    here = folder.stat()
    if any(os.path.samestat(here, other) for other in within):
        return  # a link back to a folder that it is in
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_in(path, (*within, here))
        elif path.is_file():
            yield path


def _hashes_in(memory: Path) -> dict[str, list[Any]]:
    """Return what a file of the cache says of each file; nothing if it has to be made anew."""
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


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


def _cause(error: OSError | UnicodeEncodeError) -> str:
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error).splitlines()[0]


def _cure(error: OSError | UnicodeEncodeError) -> str:
    if any(sign in str(error) for sign in ("No space left", "File too large", "Disk quota")):
        return "free some disk space and run the same command again, nothing stored is lost"
    return "make its folder accessible to you, or name another place"
