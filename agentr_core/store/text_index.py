"""Full-text search over the texts of a store."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

from agentr_core.errors import StoreError
from agentr_core.store.database import Store, snapshot

_CHUNK: Final = 10_000
"""How many texts are read from the store at a time."""
RANKED: Final = 5_000
"""If there are more matches than this, only the newest are ranked."""
_WORDS: Final = re.compile(r'"([^"]*)"|(\S+)')


@dataclass(frozen=True, slots=True)
class Matches:
    """The texts that match, best first, by their row in table `text`; `total` is at most
    `RANKED`.
    """

    rows: list[int]
    total: int


class TextIndex:
    """A full-text index (FTS5) of the texts of a store, in a SQLite file of its own at `path`.

    It holds words, not texts, and takes in new texts when it is refreshed. Threads may share it,
    and processes its file. Texts are identified by row number, because table `text` only grows. An
    index of another store at the same path is rebuilt.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self._store = store
        self._path = path
        self._refreshing = threading.Lock()

    def refresh(self, *, seconds: float) -> bool:
        """Take in new texts for about `seconds`, and return whether all are in.

        Raises `StoreError` if the file cannot be written; otherwise as `Store.reading`.
        """
        deadline = monotonic() + seconds
        with self._refreshing, self._opened() as index:
            while self._take(index):
                if monotonic() >= deadline:
                    return False
        return True

    def search(self, words: str, *, offset: int, limit: int) -> Matches:
        """Return the texts that contain all of the words, and the phrases in double quotes; none
        for an empty search.

        Raises `StoreError` if the file cannot be written.
        """
        # Within quotes there are no operators.
        wanted = " ".join('"' + phrase.replace('"', " ") + '"' for phrase in phrases(words))
        if not wanted:
            return Matches([], 0)
        with self._opened() as index:
            ((total,),) = index.execute(_COUNT, (wanted, RANKED))
            rows = [row for (row,) in index.execute(_BEST, (wanted, RANKED, limit, offset))]
        return Matches(rows, total)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            index = sqlite3.connect(self._path, timeout=30, isolation_level=None)
            try:
                index.executescript(_SCHEMA)
                yield index
            finally:
                index.close()
        except (OSError, sqlite3.DatabaseError) as error:
            raise StoreError(
                f"the index of texts {self._path} cannot be used ({error}); delete it, make its folder writable to "
                "you, or name another one with --index"
            ) from error

    def _take(self, index: sqlite3.Connection) -> bool:
        """Take in some more texts; return whether there were any."""
        index.execute("begin immediate")
        ((last, known),) = index.execute(_LAST)
        with snapshot(self._store) as state:
            if last >= 0 and state.rows(_TEXT_AT, last) != [(known,)]:
                index.execute("insert into texts(texts) values ('delete-all')")
                last = -1
            found = state.rows(_NEXT, last, last + _CHUNK)
        if found:
            index.executemany("insert into texts(rowid, text) values (?, ?)", [(row, text) for row, _, text in found])
            index.execute("update known set row = ?, text_id = ?", found[-1][:2])
        index.execute("commit")
        return bool(found)


def phrases(words: str) -> list[str]:
    """Return the words and phrases of a search, spelled as in the texts."""
    found = _WORDS.findall(words.replace("\0", " "))
    return [phrase or word for phrase, word in found if (phrase or word).strip()]


def found_texts(store: Store, rows: Sequence[int]) -> list[tuple[str, str]]:
    """Return ids and texts by the rows of table `text`, in the order given."""
    found = {row: (key, text) for row, key, text in store.rows(_TEXTS, list(rows))} if rows else {}
    return [found[row] for row in rows if row in found]


_SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = off;
create virtual table if not exists texts using fts5(text, content='');
create table if not exists known (row integer not null, text_id text not null);
insert into known select -1, '' where not exists (select 1 from known);
"""
_LAST = "select row, text_id from known"
_COUNT = "select count(*) from (select 1 from texts where texts match ? limit ?)"
_BEST = """
select rowid from (
    select rowid, rank as score from texts where texts match ? order by rowid desc limit ?
) order by score, rowid limit ? offset ?
"""
_TEXT_AT = "select text_id from text where rowid = ?"
_NEXT = "select rowid, text_id, text from text where rowid > ? and rowid <= ? order by rowid"
_TEXTS = "select rowid, text_id, text from text where rowid in (select unnest(?::bigint[]))"
