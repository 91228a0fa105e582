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
from typing import Any, Final, NamedTuple

from agentr_core.errors import StoreError
from agentr_core.fingerprint import fingerprint
from agentr_core.store.database import Store, snapshot

_CHUNK_ROWS: Final = 1_000
"""How many rows are read from the store at a time."""
_MAX_PLACES: Final = 4
"""The most places that are kept for a text."""
MAX_RANKED: Final = 5_000
"""The most matches that are ranked: of more, only the newest are."""
_PHRASE: Final = re.compile(r'"([^"]*)"|(\S+)')


class TextLocation(NamedTuple):
    """A place in the store where a text occurs."""

    kind: str
    """trajectory, node, sample or pair."""
    key: str
    """Its id; for a node, the id of its tree."""
    position: int | None
    """The step of a trajectory, the number of a node, the message of a sample, the judged step of a
    pair; None for the first observation of a trajectory.
    """


@dataclass(frozen=True, slots=True)
class Match:
    """A text that matches a search, by its hash, with up to four places where it occurs."""

    digest: str
    locations: list[TextLocation]


@dataclass(frozen=True, slots=True)
class Matches:
    """The texts that match, best first; `total` is at most `MAX_RANKED`."""

    texts: list[Match]
    total: int


class TextIndex:
    """A full-text index (FTS5) of the texts of a store, in a SQLite file of its own at `path`.

    It holds words, not texts, and indexes the texts of new rows when it is refreshed. Threads may
    share it, and processes its file. An index of another store at the same path is rebuilt.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self._store = store
        self._path = path
        self._refresh_lock = threading.Lock()

    def refresh(self, *, budget_s: float) -> bool:
        """Index new texts for about `budget_s`; return whether all of them are indexed now.

        Raises `StoreError` if the file cannot be written; otherwise as `Store.reading`.
        """
        deadline = monotonic() + budget_s
        with self._refresh_lock, self._open_index() as index:
            while self._index_chunk(index):
                if monotonic() >= deadline:
                    return False
        return True

    def search(self, words: str, *, offset: int, limit: int) -> Matches:
        """Return the texts that contain all of the words, and the phrases in double quotes; none
        for an empty search.

        Raises `StoreError` if the file cannot be written.
        """
        # Within quotes there are no operators.
        query = " ".join('"' + phrase.replace('"', " ") + '"' for phrase in phrases(words))
        if not query:
            return Matches([], 0)
        with self._open_index() as index:
            ((total,),) = index.execute(_MATCH_COUNT, (query, MAX_RANKED))
            matches: dict[str, list[TextLocation]] = {}
            for digest, *place in index.execute(_RANKED_MATCHES, (query, MAX_RANKED, limit, offset)):
                matches.setdefault(digest, []).append(TextLocation(*place))
        return Matches([Match(digest, places) for digest, places in matches.items()], total)

    @contextmanager
    def _open_index(self) -> Iterator[sqlite3.Connection]:
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

    def _index_chunk(self, index: sqlite3.Connection) -> bool:
        """Index the texts of some more rows; return whether there were any."""
        index.execute("begin immediate")
        last_rows = {kind: (row, key) for kind, row, key in index.execute("select kind, row, key from taken")}
        with snapshot(self._store) as snapshot_store:
            if any(snapshot_store.rows(_KEY_QUERIES[kind], row) != [(key,)] for kind, (row, key) in last_rows.items()):
                for statement in _CLEAR_STATEMENTS:
                    index.execute(statement)
                last_rows = {}
            for kind in _TEXT_QUERIES:
                last_rowid = last_rows[kind][0] if kind in last_rows else -1
                chunk_end = snapshot_store.rows(_CHUNK_END_QUERIES[kind], last_rowid, _CHUNK_ROWS)
                if chunk_end:
                    break
            rows = (
                snapshot_store.rows(
                    _TEXT_QUERIES[kind].format(chosen=_ROWID_RANGE, texts=_STEP_TEXTS), last_rowid, chunk_end[0][0]
                )
                if chunk_end
                else []
            )
        for key, position, text in rows:
            digest = fingerprint(text)
            if index.execute("insert or ignore into text (digest) values (?)", (digest,)).rowcount:
                index.execute("insert into words (rowid, text) select id, ? from text where digest = ?", (text, digest))
            index.execute(_ADD_PLACE, (kind, key, position, digest, _MAX_PLACES))
        if chunk_end:
            index.execute("replace into taken values (?, ?, ?)", (kind, *chunk_end[0]))
        index.execute("commit")
        return bool(chunk_end)


def phrases(words: str) -> list[str]:
    """Return the words and phrases of a search, spelled as in the texts."""
    matches = _PHRASE.findall(words.replace("\0", " "))
    return [phrase or word for phrase, word in matches if (phrase or word).strip()]


def load_texts(store: Store, matches: Sequence[Match]) -> dict[str, str]:
    """Return the texts of matches, by hash; those that are no longer in the store are left out."""
    texts: dict[str, str] = {}
    # One query a kind of place: each reads a whole column. Most texts are at their first place. A
    # tree has thousands of texts, so of its nodes only those that are wanted are read.
    for number in range(_MAX_PLACES):
        places: dict[TextLocation, set[str]] = {}
        for match in matches:
            if match.digest not in texts and number < len(match.locations):
                places.setdefault(match.locations[number], set()).add(match.digest)
        for kind in sorted({place.kind for place in places}):
            places_of_kind = [place for place in places if place.kind == kind]
            condition = f"{_KEY_PREFIXES[kind]}_id in (select unnest(?::varchar[]))"
            params: list[Any] = [[place.key for place in places_of_kind]]
            if kind == "node":
                condition = f"rowid in (select rowid from node where {_NODE_CONDITION})"
                params.append([place.position for place in places_of_kind])
            for key, position, text in store.rows(
                _TEXT_QUERIES[kind].format(chosen=condition, texts=_STEP_TEXTS), *params
            ):
                if fingerprint(text) in places.get(TextLocation(kind, key, position), ()):
                    texts[fingerprint(text)] = text
    return texts


_TEXT_QUERIES: Final = {
    "trajectory": """
with chosen as (from trajectory where {chosen}), part as (
    select trajectory_id, generate_subscripts(steps, 1) - 1 as position, unnest(steps) as step from chosen
)
select trajectory_id, null, first_observation from chosen
union all select trajectory_id, position, unnest({texts}) from part
""",
    "node": """
select tree_id, node_index, unnest({texts}) from node where {chosen} and node_index > 0
""",
    "pair": """
select pair_id, v.position, v.reply from (select pair_id, unnest(verdicts) as v from critique where {chosen})
""",
    "sample": """
select sample_id, position, turn.text from (
    select sample_id, generate_subscripts(messages, 1) - 1 as position, unnest(messages) as turn
    from sample where {chosen}
)
""",
}
"""The query for the texts of chosen rows, with their places, by kind of place; the root of a tree,
number 0, has no step.
"""
_STEP_TEXTS: Final = (
    "[step.reply, step.observation] || [call.output for call in step.tool_calls] "
    "|| [said.text for said in step.answers]"
)
_ROWID_RANGE: Final = "rowid > ? and rowid <= ?"
_KEY_PREFIXES: Final = {"trajectory": "trajectory", "node": "tree", "pair": "pair", "sample": "sample"}
_NODE_CONDITION: Final = "(tree_id, node_index) in (select unnest(?::varchar[]), unnest(?::bigint[]))"
_TABLES: Final = {**{kind: kind for kind in _KEY_PREFIXES}, "pair": "critique"}
_KEY_QUERIES: Final = {
    kind: f"select {key}_id from {_TABLES[kind]} where rowid = ?" for kind, key in _KEY_PREFIXES.items()
}
_CHUNK_END_QUERIES: Final = {
    kind: f"from (select rowid, {key}_id from {_TABLES[kind]} where rowid > ? order by rowid limit ?) "
    "order by rowid desc limit 1"
    for kind, key in _KEY_PREFIXES.items()
}
_SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = off;
create virtual table if not exists words using fts5(text, content='');
create table if not exists text (id integer primary key, digest text not null unique);
create table if not exists place (text integer not null, kind text not null, key text not null, position integer);
create unique index if not exists place_of_text on place (text, kind, key, position);
create table if not exists taken (kind text primary key, row integer not null, key text not null);
"""
_CLEAR_STATEMENTS = (
    "insert into words(words) values ('delete-all')",
    *(f"delete from {name}" for name in ("text", "place", "taken")),
)
_ADD_PLACE = """
insert or ignore into place select id, ?, ?, ? from text
where digest = ? and (select count(*) from place where place.text = id) < ?
"""
_MATCH_COUNT = "select count(*) from (select 1 from words where words match ? limit ?)"
_RANKED_MATCHES = """
select digest, kind, key, position from (
    select id, score from (
        select rowid as id, rank as score from words where words match ? order by rowid desc limit ?
    ) order by score, id limit ? offset ?
) join text using (id) join place on place.text = id order by score, id, place.rowid
"""
