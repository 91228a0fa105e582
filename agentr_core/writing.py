"""Files and folders written atomically; an error becomes one sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentr_core.errors import DiskError
from agentr_core.fingerprint import file_sha256, fingerprint


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


def remembered_sha256(file: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, cached in a folder under the file's path, size and modification
    time: hashing gigabytes takes a while. Raises `DiskError` when the folder cannot be written.
    """
    state = file.stat()
    known = cache / "hashes" / fingerprint(str(file.resolve()), state.st_size, state.st_mtime_ns)
    if not known.is_file():
        write_text(known, file_sha256(file))
    return known.read_text(encoding="utf-8")


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
