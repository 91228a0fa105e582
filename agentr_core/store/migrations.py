"""The numbered schema: its migrations, and bringing a database up to the newest one.

Tables and columns are changed by numbered scripts, one after another; the first one makes the
tables. Views hold no rows, so all of them are dropped and made anew from `schema/views`.

A store may come from anywhere, so its catalogue is read before any statement of ours names
something in it: tables that differ from those of the scripts are refused, views under our names are
made anew, and others are not touched.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb

from agentr_core.errors import StoreError
from agentr_core.fingerprint import fingerprint
from agentr_core.store.connection import open_connection, quoted, raise_store_errors
from agentr_core.store.tables import TABLES
from agentr_core.texts import path_for_message

VIEWS_NUMBER = 122
"""The number of the script of all views. Raise it above every other when one of them changes, or a
table that they show.
"""
CATALOGUE_FINGERPRINT = "cdf0346d019d3cf4"
"""The fingerprint of the SQL of our tables and views, as the pinned version of DuckDB prints it. A
store with another one is compared in detail, which takes a second.
"""
FIRST_NUMBER = 100
"""The number of the first script. Stores of lower versions had other tables, and cannot be read."""
_VERSION_TABLE = "schema_version"
# Tables have no foreign keys: with them, DuckDB cannot update a row that others refer to. View
# v_orphans lists references to rows that do not exist, and tests keep it empty.
_OWN_TABLES = frozenset({*TABLES, _VERSION_TABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One SQL script. Numbers ascend from `FIRST_NUMBER`; at gaps, scripts only made views."""

    number: int
    name: str
    sql: str


def available() -> tuple[Migration, ...]:
    """Return the migrations that come with this version, in order."""
    return _load_migrations()


@cache
def _load_migrations() -> tuple[Migration, ...]:
    folder = resources.files("agentr_core.store").joinpath("schema")
    tables = [
        Migration(number=int(name.split("_", 1)[0]), name=name, sql=sql) for name, sql in _scripts(folder).items()
    ]
    views = Migration(number=VIEWS_NUMBER, name="views", sql="\n".join(_scripts(folder / "views").values()))
    return tuple(sorted([*tables, views], key=lambda migration: migration.number))


def _scripts(folder: Traversable) -> dict[str, str]:
    # Each file system has an order of its own.
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.name.endswith(".sql")}


@dataclass(frozen=True, slots=True)
class _Catalogue:
    """The tables and views in the main schema of a database that have our names.

    `tables` and `views` are SQL by name in lower case; `other_tables` are names.
    """

    tables: Mapping[str, str]
    views: Mapping[str, str]
    other_tables: tuple[str, ...]


def schema_version(con: Any, path: Path) -> int:
    """Return the schema version of an open database; 0 for an empty one.

    Raises:
        StoreError: the database holds tables of another program, or something of its own where we
            look for ours.
    """
    return _version(con, path, _catalogue(con, path))


def has_newest_schema(con: Any, path: Path, newest_version: int, *, unchanged: bool = False) -> bool:
    """Return whether an open database has the newest schema; False means it needs `migrate`.

    Args:
        unchanged: whether the file has not changed since a check of it returned True or `migrate`
            ended; then only the version is looked at.

    Raises:
        StoreError: the database was written by a newer version, belongs to something else, or has
            tables under our names that are not ours.
    """
    catalogue = None if unchanged else _catalogue(con, path)
    current = _newest_version(con) if catalogue is None else _version(con, path, catalogue)
    if 0 < current < FIRST_NUMBER:
        raise StoreError(
            f"{path} is of schema version {current}, which this version of agentr does not read; the version that made "
            "it writes its views as Parquet: `agentr sql 'select * from v_steps' --output FILE.parquet`"
        )
    if current > newest_version:
        raise StoreError(
            f"{path} has schema version {current}, but this version of agentr knows only up to {newest_version}; "
            "update agentr, or name another workspace or store"
        )
    if catalogue is None:
        return current == newest_version
    if current == VIEWS_NUMBER and _fingerprint(catalogue) == CATALOGUE_FINGERPRINT:
        return current == newest_version
    # Tables must be as the scripts up to this version make them: only columns without a default,
    # and indexes, may have been added.
    reference, expected_tables = _expected_schema(current)
    missing = expected_tables.keys() - catalogue.tables.keys()
    if missing:
        raise StoreError(f"{path} has no table {min(missing)}, so it is no whole store of agentr; name another one")
    conflicting_tables = catalogue.tables.keys() - expected_tables.keys()
    if conflicting_tables:
        raise _name_conflict(path, min(conflicting_tables))
    parts_by_table = _parts(con, frozenset(expected_tables))
    for table, (columns, expected_constraints) in expected_tables.items():
        present, constraints = parts_by_table[table]
        odd_columns = [name for name, facts in columns.items() if present.get(name) != facts]
        odd_columns += [name for name, (_, default) in present.items() if name not in columns and default is not None]
        if odd_columns or expected_constraints != constraints:
            difference = f"column {min(odd_columns)!r}" if odd_columns else "a constraint"
            raise StoreError(
                f"{path} has a table {table} that agentr did not make ({difference} differs), and is not opened; put "
                "it right with the duckdb shell, or name another workspace or store"
            )
    return current == newest_version and catalogue.views == reference.views


def migrate(con: Any, path: Path, migrations: tuple[Migration, ...], *, unchanged: bool = False) -> None:
    """Bring an open database up to the last of the migrations, each in a transaction of its own,
    and fold them into the file; make our views anew where they are not ours. Raises as
    `has_newest_schema` does.
    """
    if has_newest_schema(con, path, migrations[-1].number, unchanged=unchanged):
        return
    current = _version(con, path, _catalogue(con, path))
    for migration in migrations:
        if current < migration.number or migration.number == VIEWS_NUMBER:
            _apply(con, path, migration)
    # Opened by a program other than agentr, DuckDB cannot replay all changes of a table from a log.
    con.execute("checkpoint")


def _apply(con: Any, path: Path, migration: Migration) -> None:
    con.begin()
    try:
        if migration.number == FIRST_NUMBER:
            con.execute(_CREATE_VERSION_TABLE)
        if migration.number == VIEWS_NUMBER:
            for view in _view_names(migration.sql):
                con.execute(f"drop view if exists main.{quoted(view)}")
        con.execute(migration.sql)
        con.execute(
            f"insert or ignore into {_VERSION_TABLE} (version, name) values (?, ?)", [migration.number, migration.name]
        )
    except duckdb.CatalogException as error:
        con.rollback()
        name = re.search(r'with name "(.+?)" already exists', str(error))
        if name is None:
            raise
        raise _name_conflict(path, name[1]) from error
    except BaseException:
        con.rollback()
        raise
    con.commit()


def _name_conflict(path: Path, name: str) -> StoreError:
    return StoreError(
        f"{path} has something of its own named {name!r}, which is a name of agentr's; give it another name with the "
        "duckdb shell"
    )


@cache
def _view_names(sql: str) -> tuple[str, ...]:
    return tuple(re.findall(r"^create view (\w+)", sql, re.M))


def _catalogue(con: Any, path: Path) -> _Catalogue:
    """Return the catalogue of an open database.

    Raises:
        StoreError: it has a view where we look for a table, a table where we look for a view, or
            functions or types in place of those of DuckDB, which our queries use.
    """
    names = _view_names(next(migration.sql for migration in _load_migrations() if migration.number == VIEWS_NUMBER))
    # Where the database is not the default, nothing of it is looked up: neither its macros, which
    # come before DuckDB's functions and even operators, nor its types.
    con.execute("use memory")
    try:
        tables = con.execute(_TABLES).fetchall()
        views = con.execute(_VIEWS).fetchall()
        definitions = con.execute(_FUNCTIONS_AND_TYPES, {"database": "store", "internal": False}).fetchall()
        # DuckDB's are thousands, and hardly a store has any of its own.
        builtin = definitions and con.execute(_FUNCTIONS_AND_TYPES, {"database": "system", "internal": True}).fetchall()
    finally:
        con.execute("use store.main")
    if shadows := {*definitions} & {*builtin}:
        raise StoreError(
            f"{path} has a function or type of its own in place of DuckDB's {min(shadows)[0]}, which agentr does not "
            "run; drop it with the duckdb shell, or name another workspace or store"
        )
    main_tables = {name.lower(): sql for schema, name, sql in tables if schema == "main"}
    main_views = {name.lower(): sql for schema, name, sql in views if schema == "main"}
    conflicts = [
        *(name for name in _OWN_TABLES if name in main_views),
        *(name for name in names if name in main_tables),
    ]
    if conflicts:
        raise _name_conflict(path, min(conflicts))
    return _Catalogue(
        {name: sql for name, sql in main_tables.items() if name in _OWN_TABLES},
        # DuckDB keeps what a star leaves out in no order.
        {name: _EXCLUDED.sub(_sort_excluded, sql) for name, sql in main_views.items() if name in names},
        tuple(name for schema, name, _ in tables if schema != "main" or name.lower() not in _OWN_TABLES),
    )


def _sort_excluded(match: re.Match[str]) -> str:
    return f"EXCLUDE ({', '.join(sorted(match[1].split(', ')))})"


def _version(con: Any, path: Path, catalogue: _Catalogue) -> int:
    if _VERSION_TABLE in catalogue.tables:
        return _newest_version(con)
    names = (*catalogue.other_tables, *catalogue.tables)
    if names:
        raise StoreError(
            f"{path} is a DuckDB database of something else (it has a table {names[0]!r}); name another "
            "workspace or store"
        )
    return 0


def _newest_version(con: Any) -> int:
    return int(con.execute(f"select coalesce(max(version), 0) from main.{_VERSION_TABLE}").fetchall()[0][0])


def _fingerprint(catalogue: _Catalogue) -> str:
    return fingerprint(sorted(catalogue.tables.items()), sorted(catalogue.views.items()))


_Parts = dict[str, tuple[dict[str, tuple[str, str | None]], frozenset[tuple[str, str]]]]
"""By table: the type and default of its columns, and the text and columns of its constraints."""


def _parts(con: Any, tables: frozenset[str]) -> _Parts:
    parts_by_table: _Parts = {}
    constraints = con.execute(_CONSTRAINTS).fetchall()
    for table in sorted(tables):
        columns = con.execute(f"select name, type, dflt_value from pragma_table_info('main.{table}')").fetchall()
        parts_by_table[table] = (
            {column.lower(): (kind, default) for column, kind, default in columns},
            frozenset(
                (constraint, constraint_columns)
                for name, constraint, constraint_columns in constraints
                if name.lower() == table
            ),
        )
    return parts_by_table


@cache
def _expected_schema(version: int) -> tuple[_Catalogue, _Parts]:
    """Return the catalogue, and columns and constraints, that the scripts up to version `version`
    make.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.duckdb"
        with open_connection(path, time.monotonic(), read_only=False) as con:
            for migration in _load_migrations():
                if migration.number <= version:
                    _apply(con, path, migration)
            con.execute("checkpoint")
        # DuckDB writes types in a view in another way before it has read the view from a file.
        with open_connection(path, time.monotonic(), read_only=True) as con:
            catalogue = _catalogue(con, path)
            return catalogue, _parts(con, frozenset(catalogue.tables))


_EXCLUDED = re.compile(r"EXCLUDE \(([^()]*)\)")
_TABLES = "select schema_name, table_name, sql from duckdb_tables() where database_name = 'store'"
_VIEWS = "select schema_name, view_name, sql from duckdb_views() where database_name = 'store' and not internal"
_FUNCTIONS_AND_TYPES = """
select lower(function_name) from duckdb_functions() where database_name = $database and schema_name = 'main'
    and internal = $internal
union select lower(type_name) from duckdb_types() where database_name = $database and schema_name = 'main'
    and internal = $internal
"""
_CONSTRAINTS = """
select table_name, constraint_text, constraint_column_names::varchar from duckdb_constraints()
where database_name = 'store' and schema_name = 'main'
"""
_CREATE_VERSION_TABLE = """
create table schema_version (
    version integer primary key,
    name varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table schema_version is 'The migrations this database has been through.';
"""


# Copies of database files.


def copy_verified(source: Path, target: Path, newest_version: int) -> None:
    """Copy a database to `target` while nobody writes to it; `target` appears once the copy is
    complete and every block of it can be read.

    Args:
        newest_version: the schema version of the source.

    Raises:
        StoreError: `target` exists, its folder is missing or a file, or the disk is full.
        CorruptStore: the copy cannot be read.
    """
    if target.exists():
        raise StoreError(f"{path_for_message(target)} exists already; name another file")
    if not target.parent.is_dir():
        raise StoreError(
            f"{target} cannot be written: {path_for_message(target.parent)} is no folder; make it, or name another file"
        )
    draft = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        shutil.copyfile(source, draft)
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        with raise_store_errors(draft), open_connection(draft, time.monotonic(), read_only=True) as con:
            has_newest_schema(con, draft, newest_version)
            # DuckDB checks the sum of a block only when it is read.
            con.execute("copy from database store to memory (schema)")
            for schema, table, columns in stored_columns(con, "store", "memory"):
                con.execute(f"select count(hash({columns})) from store.{quoted(schema)}.{quoted(table)}")
        # If a file has appeared there meanwhile, a link fails; a rename would replace the file.
        os.link(draft, target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written ({error.strerror}); name another file, or free space") from error
    finally:
        draft.unlink(missing_ok=True)


def stored_columns(con: Any, database: str, writable_database: str) -> list[tuple[str, str, str]]:
    """Return schema, name and quoted columns of each table in an attached database.

    Generated columns are left out: their expressions may come from anybody, and are not run.

    Args:
        writable_database: one that is attached and has the same tables; nothing is written to it.
    """
    columns: dict[tuple[str, str], list[str]] = {}
    for schema, table, column in con.execute(_COLUMNS, [database]).fetchall():
        columns.setdefault((schema, table), []).append(column)
    tables = []
    for schema, table, has_generated_columns in con.execute(_TABLES_OF_A_DATABASE, [database]).fetchall():
        names = columns[schema, table]
        if has_generated_columns:
            names = [name for name in names if _is_insertable(con, writable_database, schema, table, name)]
        tables.append((schema, table, ", ".join(map(quoted, names))))
    return tables


def _is_insertable(con: Any, database: str, schema: str, table: str, column: str) -> bool:
    """Return whether a column can be inserted into. DuckDB lists generated columns like others, so
    an insert into it is planned, not run.
    """
    try:
        con.execute(f"explain insert into {database}.{quoted(schema)}.{quoted(table)} ({quoted(column)}) values (null)")
    except duckdb.BinderException as error:
        if "generated column" not in str(error):
            raise
        return False
    return True


_TABLES_OF_A_DATABASE = """
select schema_name, table_name, contains(sql, 'GENERATED ALWAYS') from duckdb_tables() where database_name = ?
order by table_oid
"""
_COLUMNS = """
select schema_name, table_name, column_name from duckdb_columns() where database_name = ? order by column_index
"""
