"""The store: one DuckDB file, opened in short bursts under one lock.

DuckDB lets no second process in while a writer has the file open, and several processes that open
and close one file have been seen to lose committed rows (duckdb 2.0.0). So every burst takes our
own lock, opens the file, works, closes it and releases the lock. Between the bursts of a running
program, `agentr sql` and notebooks can use the file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import duckdb
import pyarrow as pa

from agentr_core.errors import ConfigError, CorruptStore, RunBusy, StoreBusy, StoreError
from agentr_core.store import connection, lock, migrations, questions
from agentr_core.store.connection import (
    cursor,
    open_connection,
    open_instance,
    quoted,
    raise_store_errors,
    set_runs_at_work,
)
from agentr_core.store.keep_alive import KeepAlive, OpenFile
from agentr_core.store.records import to_arrow_table
from agentr_core.store.tables import TABLES, Row, Rows, merge, merge_by_key, unit_size
from agentr_core.texts import path_for_message

if TYPE_CHECKING:
    import pandas as pd


class Store:
    """The trajectory store in the DuckDB file at `path`; `<path>.wal`, `.lock` and `.queue` are
    beside it.

    `wait_s` is the longest wait for other processes, in seconds; a run waits without end
    (`math.inf`), since what it has sampled would be sampled again. Long waits are logged by
    `agentr_core.store.lock`. Making a `Store` touches no file: the first write creates it, and
    reading a file that does not exist is an error. Several processes and threads may use stores on
    one file at once. Do not nest bursts on one file: the inner one would wait for the outer one,
    and fails after a minute.
    """

    def __init__(self, path: Path, wait_s: float = 60) -> None:
        self.path = path
        self.wait_s = wait_s
        self._migrations = migrations.available()
        self._newest_version = self._migrations[-1].number
        self._idle_instances: list[tuple[str, Any]] = []
        self._keep_alive: KeepAlive | None = None
        # Device and inode of the file whose catalogue was checked: that takes longer than a burst.
        self._checked_file: tuple[int, int] | None = None

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Yield a connection for one write burst: committed at the end of the body, rolled back if
        it raises.

        Committed rows survive the death of the process.

        Raises:
            StoreBusy: another process held the file for longer than `wait_s`.
            CorruptStore: the file is damaged.
            StoreError: the file cannot be opened or has a newer schema, or the disk is full.
        """
        deadline = time.monotonic() + self.wait_s
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the folder {self.path.parent} cannot be made: {error.strerror}; name another workspace"
            ) from error
        with self._locked_connection(deadline, read_only=False) as con:
            self._migrate(con)
            con.begin()
            try:
                yield con
            except BaseException:
                # A connection that DuckDB has given up on cannot roll back; closing it has the same
                # effect.
                with suppress(duckdb.Error):
                    con.rollback()
                raise
            con.commit()

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Yield a connection for one read burst, in which all statements see the same state.

        Raises:
            StoreBusy, CorruptStore, StoreError: as in `transaction`; also when there is no store at
                the path yet.
        """
        with self._read_connection() as con:
            yield con

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Return the rows of one of the store's own queries; none if there is no store yet.

        Raises:
            StoreBusy, CorruptStore, StoreError: as in `reading`.
        """
        if not self.path.exists():
            return []
        with self.reading() as con:
            rows: list[tuple[Any, ...]] = con.execute(sql, list(params)).fetchall()
        return rows

    def count(self, sql: str, *params: Any) -> int:
        """Return the single number of a counting query; 0 if there is no store yet. Raises as
        `rows` does.
        """
        return sum(int(number) for (number,) in self.rows(sql, *params))

    def query(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any] = (),
        *,
        files: bool = False,
        seconds: float = questions.DEFAULT_TIME_LIMIT_S,
    ) -> pd.DataFrame:
        """Return the rows of a user's query as a frame with Arrow columns. Raises as `answer`
        does.
        """
        import pandas as pd

        frame: pd.DataFrame = self.answer(sql, params, files=files, seconds=seconds).to_pandas(
            types_mapper=pd.ArrowDtype
        )
        return frame

    def answer(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any] = (),
        *,
        files: bool = False,
        seconds: float = questions.DEFAULT_TIME_LIMIT_S,
    ) -> pa.Table:
        """Return the rows of a user's query as an Arrow table; the query cannot change the store.
        `params` are the values of the query's parameters, by position or by name.

        Integers keep 64 bits; intervals and other types that Arrow lacks become their text in SQL.
        Other files are neither read nor written unless `files` is given. Writers wait while a query
        reads.

        Raises:
            ConfigError: the SQL is wrong, or does more than query, or takes longer than `seconds`.
            StoreBusy, CorruptStore, StoreError: as in `reading`.
        """
        # The file is opened for this query alone and read-only, whatever the query says.
        with self._read_connection(internal=False, allow_files=files) as con:
            set_runs_at_work(con, self.path.parent)
            try:
                with questions.time_limit(con, seconds):
                    table = questions.run_query(con, sql, params, self.path, allow_files=files)
            except duckdb.Error as error:
                raise questions.as_file_access_error(error) or connection.as_query_error(error, self.path) from error
        if table is None:
            raise ConfigError("SQL: there is no statement to run; try `select * from v_iterations`")
        return table

    def write(self, rows: Rows) -> None:
        """Store the rows of many tables in one transaction.

        A row whose key is already stored is left as it is, except that columns that may change take
        the new value (`TABLES` says which).

        Raises:
            KeyError: a table is unknown.
            ValueError: rows of one table differ in their columns.
            RunBusy: a row is stored already and was made by another writer.
            StoreBusy, CorruptStore, StoreError: as in `transaction`; then nothing of it is stored.
        """
        with self.transaction() as con:
            insert_rows(con, rows)

    def update(self, table: str, row: Row) -> None:
        """Change columns of one stored row; `row` has all its key columns and the new values of
        others.

        Raises:
            KeyError: there is no row with that key.
            StoreBusy, CorruptStore, StoreError: as in `transaction`.
        """
        key = TABLES[table].key
        changes = [column for column in row if column not in key]
        sql = (
            f"update {quoted(table)} set {', '.join(f'{quoted(column)} = ${column}' for column in changes)} "
            f"where {' and '.join(f'{quoted(column)} = ${column}' for column in key)} returning true"
        )
        with self.transaction() as con:
            if not con.execute(sql, dict(row)).fetchall():
                raise KeyError(f"{table} has no row {[row[column] for column in key]}")

    def missing(self, table: str, ids: Sequence[str]) -> list[str]:
        """Return the ids that a table with a single key column does not have yet, in the order
        given.

        All of them if there is no store yet: this is how a rerun finds what is left to do.
        """
        (column,) = TABLES[table].key
        if not ids:
            return []
        rows = self.rows(
            f"select {quoted(column)} from {quoted(table)} where {quoted(column)} in (select unnest(?))", list(ids)
        )
        present = {identifier for (identifier,) in rows}
        return [identifier for identifier in ids if identifier not in present]

    def version(self) -> int:
        """Return the schema version of the file, without migrating it; 0 for an empty database.
        Raises as `reading`.
        """
        self._check_exists()
        with self._locked_connection(time.monotonic() + self.wait_s, read_only=True) as con:
            return migrations.schema_version(con, self.path)

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the database file, so that this one file is the whole store
        and can be copied. Do nothing if there is no store. Raises as `transaction`.
        """
        deadline = time.monotonic() + self.wait_s
        if self.path.exists():
            with self._locked_connection(deadline, read_only=False) as con:
                self._migrate(con)
                con.execute("checkpoint")

    def backup(self, target: Path) -> None:
        """Write the whole store, as it is now, to one file at `target`; other processes wait
        meanwhile.

        The file appears under its name once it is complete and all of it could be read.

        Raises:
            StoreError: there is no store, `target` exists or cannot be written, or the disk is
                full.
            StoreBusy, CorruptStore: as in `transaction`.
        """
        self._check_exists()
        self.checkpoint()
        deadline = time.monotonic() + self.wait_s
        with lock.hold(self.path, exclusive=True, deadline=deadline), raise_store_errors(self.path):
            # Other processes may have written since; the log must be empty while the file is
            # copied.
            with open_connection(self.path, deadline, read_only=False) as con:
                con.execute("checkpoint")
            migrations.copy_verified(self.path, target, self._newest_version)

    def _check_exists(self) -> None:
        if not self.path.exists():
            raise StoreError(
                f"there is no store at {path_for_message(self.path)}; name the workspace of a run, "
                "or run a recipe first"
            )

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keep the file open for a moment after each burst of the body, so that the next one need
        not open it; it is closed earlier if another process waits for it, and at the end of the
        body.
        """
        if self._keep_alive is not None:
            yield
            return
        with KeepAlive(self.path) as self._keep_alive:
            try:
                yield
            finally:
                self._keep_alive = None

    @contextmanager
    def _read_connection(self, *, internal: bool = True, allow_files: bool = False) -> Iterator[Any]:
        """Yield a connection as `reading` does, after migrating the file if it has an older schema.
        For a query that is not `internal`, the file is opened for that query alone and read-only;
        with `allow_files` the query may use other files, too.
        """
        deadline = time.monotonic() + self.wait_s
        self._check_exists()
        with self._locked_connection(deadline, read_only=True, internal=internal, allow_files=allow_files) as con:
            con.begin()
            file_identity = self._file_identity()
            if migrations.has_newest_schema(
                con, self.path, self._newest_version, unchanged=self._checked_file == file_identity
            ):
                self._checked_file = file_identity
                yield con
                return
        with self.transaction():
            pass
        with self._locked_connection(deadline, read_only=True, internal=internal, allow_files=allow_files) as con:
            con.begin()
            yield con

    @contextmanager
    def _locked_connection(
        self, deadline: float, *, read_only: bool, internal: bool = True, allow_files: bool = False
    ) -> Iterator[Any]:
        """Yield a connection under the lock. An `internal` burst within `keep_open` reuses the file
        that an earlier one left open, if there is any, and leaves its own open unless it fails.
        """
        keep_alive = self._keep_alive if internal else None
        with lock.burst_deadline(self.path, deadline) as burst_deadline, raise_store_errors(self.path):
            file = keep_alive.take(read_only=read_only) if keep_alive is not None else None
            if file is None:
                file = self._open_file(burst_deadline, read_only=read_only, allow_files=allow_files)
            with file.stack as stack:
                with cursor(file.instance, self.path, internal=internal) as con:
                    yield con
                if keep_alive is not None:
                    keep_alive.give(OpenFile(file.instance, file.read_only, stack.pop_all()))

    def _open_file(self, deadline: float, *, read_only: bool, allow_files: bool) -> OpenFile:
        with ExitStack() as stack:
            stack.enter_context(lock.hold_file_locks(self.path, exclusive=not read_only, deadline=deadline))
            if not read_only:
                self._create_file()
            instance = stack.enter_context(
                open_instance(
                    self.path,
                    deadline,
                    read_only=read_only,
                    idle_instances=self._idle_instances,
                    allow_files=allow_files,
                )
            )
            return OpenFile(instance, read_only, stack.pop_all())

    def _migrate(self, con: Any) -> None:
        file_identity = self._file_identity()
        migrations.migrate(con, self.path, self._migrations, unchanged=self._checked_file == file_identity)
        self._checked_file = file_identity

    def _file_identity(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_dev, status.st_ino

    def _create_file(self) -> None:
        """Make the file with all tables under another name first, because a half-made database
        cannot be opened again.
        """
        if self.path.exists():
            return
        wal_path = self.path.with_name(self.path.name + ".wal")
        if wal_path.exists():
            raise CorruptStore(
                f"{wal_path} is the log of a database that is gone; bring {self.path} back, or move the log away"
            )
        draft = self.path.with_name(self.path.name + ".new")
        for leftover in (draft, draft.with_name(draft.name + ".wal")):
            leftover.unlink(missing_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(_empty_database_bytes(self._migrations))
                os.fsync(file.fileno())
            draft.replace(self.path)
            self._checked_file = self._file_identity()
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror}); free some disk space or name another workspace"
            ) from error


# A process that makes several stores, as tests do by the hundred, runs all migrations only once.
@cache
def _empty_database_bytes(scripts: tuple[migrations.Migration, ...]) -> bytes:
    """Return a database file with all tables and no rows."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.duckdb"
        with open_connection(path, time.monotonic(), read_only=False) as con:
            migrations.migrate(con, path, scripts)
            con.execute("checkpoint")
        return path.read_bytes()


def insert_rows(con: Any, rows: Rows) -> None:
    """Store the rows of many tables within a transaction. Raises as `Store.write` does."""
    unknown = rows.keys() - TABLES.keys()
    if unknown:
        raise KeyError(f"the store has no table {sorted(unknown)}; its tables are {sorted(TABLES)}")
    for table, table_rows in rows.items():
        if not table_rows:
            continue
        columns = tuple(table_rows[0])
        for row in table_rows:
            if row.keys() != table_rows[0].keys():
                raise ValueError(
                    f"rows of {table} differ in their columns: {sorted(row.keys() ^ table_rows[0].keys())}"
                )
        mutable_columns = [column for column in TABLES[table].mutable_columns if column in columns]
        distinct_rows = merge_by_key(table, table_rows, mutable_columns) if mutable_columns else table_rows
        arrow_table = to_arrow_table(distinct_rows, columns, TABLES[table].column_types)
        action = "on conflict do nothing"
        if mutable_columns:
            key = ", ".join(map(quoted, TABLES[table].key))
            assignments = ", ".join(f"{quoted(column)} = excluded.{quoted(column)}" for column in mutable_columns)
            action = f"on conflict ({key}) do update set {assignments}"
        con.register("incoming", arrow_table)
        try:
            _check_writer(con, table, [column for column in TABLES[table].fixed_columns if column in columns])
            con.execute(f"insert into {quoted(table)} by name select * from incoming {action}")
        finally:
            con.unregister("incoming")


def _check_writer(con: Any, table: str, fixed_columns: Sequence[str]) -> None:
    """Raise `RunBusy` if stored rows with the keys of `incoming` were made by another writer."""
    if not fixed_columns:
        return
    key = ", ".join(map(quoted, TABLES[table].key))
    row = con.execute(
        f"select {key} from incoming join {quoted(table)} stored using ({key}) where "
        + " or ".join(f"incoming.{quoted(column)} is distinct from stored.{quoted(column)}" for column in fixed_columns)
        + " limit 1"
    ).fetchone()
    if row is not None:
        raise RunBusy(
            f"{table} {', '.join(map(str, row))} is being written by another process, too; let one of the two go "
            "on alone, and run the same command again when it has ended"
        )


# The buffering writer between an asyncio program and the store.

_MAX_TIME_SHARE = 0.05
"""The share of wall time that the store may take: after a burst of t seconds the next one waits for
t / share seconds, but for no longer than `_MAX_PAUSE_S`.
"""
_MAX_PAUSE_S = 5.0
_MAX_WAITING_BURSTS = 3

log = logging.getLogger(__name__)


class Writer:
    """A buffer that collects units of rows and stores them together, every `interval_s` seconds or
    `max_rows` rows, in a thread; a step of a trajectory counts as a row, too.

    A unit (the rows of one `add`) is stored as a whole or not at all. It is stored for certain once
    the context, or a `flush` begun after its `add`, has ended without error; until then it is lost
    if the process is killed. Leaving the context stores what is left, even if the body was
    cancelled or failed.

    Unstored rows are held in memory. A producer awaits `room` before it makes more rows: this
    blocks while the rows of three bursts are waiting.

    `seconds` is the time spent in the store so far, waiting for other processes included.
    """

    def __init__(self, store: Store, *, interval_s: float = 0.5, max_rows: int = 20_000) -> None:
        self.seconds = 0.0
        self._store = store
        self._interval_s = interval_s
        self._max_rows = max_rows
        self._max_waiting_rows = _MAX_WAITING_BURSTS * max_rows
        self._units: list[Rows] = []
        self._num_waiting_rows = 0
        self._num_rows_in_flight = 0
        self._write_ended = asyncio.Event()
        self._last_write_s = 0.0
        self._write_lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        # One thread: the C library keeps freed memory for each thread that asked for some.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store writer")

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._flush_periodically(), name="store writer")
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            # Its error, if any, is ignored: rows that it failed to store are kept, and the flush
            # below tries them again.
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self.flush()
        except Exception as flush_error:
            if error is None:
                raise
            error.add_note(f"and {self._num_waiting_rows} rows could not be stored: {flush_error}")
        finally:
            self._thread.shutdown(wait=False)

    def add(self, unit: Rows) -> None:
        """Take the rows of one unit, by table.

        Raises:
            RuntimeError: the writer is not open.
            AgentrError: an earlier write in the background failed, with another error than
                `StoreBusy`.
        """
        self._check_open()
        self._units.append(unit)
        self._num_waiting_rows += unit_size(unit)
        if self._num_waiting_rows >= self._max_rows:
            self._wake.set()

    async def room(self) -> None:
        """Return once fewer rows are waiting than three bursts hold. Raises as `add` does."""
        self._check_open()
        while self._num_waiting_rows + self._num_rows_in_flight >= self._max_waiting_rows:
            self._write_ended.clear()
            await self._write_ended.wait()
            self._check_open()

    async def flush(self) -> None:
        """Store all units added so far. Raises as `Store.write`; the units are then kept for
        another attempt.
        """
        # A cancelled caller must not leave the thread's outcome unnoticed.
        await asyncio.shield(asyncio.ensure_future(self._write()))

    def _check_open(self) -> None:
        if self._task is None or self._is_closing:
            raise RuntimeError("a Writer takes rows only within its context: `async with Writer(store) as writer`")
        if self._task.done():
            self._task.result()

    async def _write(self) -> None:
        async with self._write_lock:
            units, self._units = self._units, []
            if not units:
                return
            self._num_rows_in_flight, self._num_waiting_rows = self._num_waiting_rows, 0
            start = time.perf_counter()
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._store.write(merge(units)))
            except BaseException:
                self._units = [*units, *self._units]
                self._num_waiting_rows += self._num_rows_in_flight
                raise
            finally:
                self._num_rows_in_flight = 0
                self._write_ended.set()
                self._last_write_s = time.perf_counter() - start
                self.seconds += self._last_write_s

    async def _flush_periodically(self) -> None:
        while not self._is_closing:
            pause = max(self._interval_s, min(self._last_write_s / _MAX_TIME_SHARE, _MAX_PAUSE_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._write()
            except StoreBusy as error:
                log.warning("%d rows wait for the store: %s", self._num_waiting_rows, error)


# Several reads of one state of a store, in one burst.

T = TypeVar("T")


class _SnapshotStore(Store):
    def __init__(self, store: Store, con: Any) -> None:
        super().__init__(store.path, store.wait_s)
        self._con = con
        self.deferred_units: list[Rows] = []

    def write(self, rows: Rows) -> None:
        self.deferred_units.append(rows)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        yield self._con


@contextmanager
def snapshot(store: Store) -> Iterator[_SnapshotStore]:
    """Yield a store whose queries all see the same state; the file is opened only once, which takes
    longer than most queries.

    Writers wait until the body ends, so keep it short. Rows that the body itself writes are stored
    once it has ended, unless it failed. Raises as `Store.reading` and `Store.write` do.
    """
    with store.reading() as con:
        snapshot_store = _SnapshotStore(store, con)
        yield snapshot_store
    for rows in snapshot_store.deferred_units:
        store.write(rows)


class _TransactionStore(_SnapshotStore):
    def write(self, rows: Rows) -> None:
        insert_rows(self._con, rows)


@contextmanager
def single_transaction(store: Store) -> Iterator[Store]:
    """Yield a store whose queries see what the body has written to it: all of that is stored once
    the body has ended, and nothing of it if the body fails or the process dies.

    Other processes wait until then, so keep it short. Raises as `Store.transaction` does.
    """
    with store.transaction() as con:
        yield _TransactionStore(store, con)


def read_consistently(store: Store, read: Callable[[Store], T]) -> T:
    """Return the result of `read` on one state of a store. If `read` itself writes rows, they are
    stored, and it is run once more on a state that has them. Raises as `snapshot` does, and what
    `read` raises.
    """
    with snapshot(store) as snapshot_store:
        result = read(snapshot_store)
    if not any(snapshot_store.deferred_units):
        return result
    with snapshot(store) as snapshot_store:
        return read(snapshot_store)
