"""The documents to search: a JSONL file with one object per line, read in place."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from agentr_core.errors import DataFileError
from agentr_core.texts import lone_surrogate, placed

Starts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of a corpus, or a page that a web search found. `title` may be empty."""

    id: str
    title: str
    contents: str

    @property
    def text(self) -> str:
        """The text that is searched and shown: the title, if any, on its own line, and the
        contents.
        """
        return f"{self.title}\n{self.contents}" if self.title else self.contents


class CorpusFile(Sequence[Document]):
    """The documents of a file in its order. The file is memory-mapped, so that any size costs
    little memory; threads may share it.

    Args:
        starts: the byte offset of each document's line; see `scan`.
    """

    def __init__(self, path: Path, starts: Starts) -> None:
        self._path = path
        self._starts = starts
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, row: int) -> Document: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Document]: ...
    def __getitem__(self, row: int | slice) -> Document | Sequence[Document]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        start = int(self._starts[row])
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : len(self._bytes) if end < 0 else end]
        return _document(line, f"{self._path}, at byte {start}")


def scan(path: Path) -> Iterator[tuple[int, Document]]:
    """Yield each document of a corpus file with the byte offset of its line; blank lines are
    skipped.

    A line is an object with the texts `id` (or a whole number) and `contents`, and optionally
    `title`.

    Raises `DataFileError` if the file cannot be read, has no document, or a line is malformed.
    """
    found = False
    start = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found = True
                    yield start, _document(line, f"{path}:{number}")
                start += len(line)
    except OSError as error:
        raise DataFileError(f"corpus {placed(path)} cannot be read ({error.strerror}); name a JSONL file") from error
    if not found:
        raise DataFileError(f'corpus {path} has no document; write {{"id", "title", "contents"}} on each line')


def _document(line: bytes, where: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"{where} is not JSON in UTF-8 ({error}); write one object on each line") from None
    if not isinstance(record, dict):
        raise DataFileError(f"{where} is a {type(record).__name__}; write one JSON object on each line")
    identifier = record.get("id")
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    return Document(
        _text(identifier, "id", where),
        _text(record.get("title") or "", "title", where, blank=True),
        _text(record.get("contents"), "contents", where),
    )


def _text(value: Any, name: str, where: str, *, blank: bool = False) -> str:
    if not isinstance(value, str) or not (blank or value.strip()):
        what = "missing" if value is None else "blank" if isinstance(value, str) else f"a {type(value).__name__}"
        raise DataFileError(f'{where}: "{name}" is {what}; a document has the texts "id", "title" and "contents"')
    if (place := lone_surrogate(value)) is not None:
        raise DataFileError(f'{where}: "{name}" has half a surrogate pair at {place}; correct the text')
    return value
