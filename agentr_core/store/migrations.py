"""The numbered schema: its migrations, and bringing a database up to the newest one.

Tables and columns are changed by numbered scripts, one after another. Views hold no rows: those of
before are dropped, and `schema/views` has them as they are now.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import duckdb

from agentr_core.errors import StoreError

VIEWS = 39
"""The number of the script of all views. Raise it above every other when one of them changes, or a
table that they show.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One SQL script. Numbers ascend from 1; those of scripts that only made views are free."""

    number: int
    name: str
    sql: str


@cache
def available() -> tuple[Migration, ...]:
    """Return the migrations that come with this version, in order."""
    folder = resources.files("agentr_core.store").joinpath("schema")
    tables = [
        Migration(number=int(name.split("_", 1)[0]), name=name, sql=sql) for name, sql in _scripts(folder).items()
    ]
    views = Migration(number=VIEWS, name="views", sql="\n".join(_scripts(folder / "views").values()))
    return tuple(sorted([*tables, views], key=lambda migration: migration.number))


def _scripts(folder: Traversable) -> dict[str, str]:
    # Each file system has an order of its own.
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.name.endswith(".sql")}


def version(con: Any, path: Path) -> int:
    """Return the schema version of an open database; 0 for an empty one.

    Raises:
        StoreError: the database holds tables of another program.
    """
    try:
        return int(con.execute("select coalesce(max(version), 0) from schema_version").fetchall()[0][0])
    except duckdb.CatalogException:
        tables = con.execute(
            "select table_name from duckdb_tables() where database_name = current_database()"
        ).fetchall()
    if tables:
        raise StoreError(
            f"{path} is a DuckDB database of something else (it has a table {tables[0][0]!r}); name another "
            "workspace or store"
        )
    return 0


def check(con: Any, path: Path, newest: int) -> bool:
    """Return whether an open database has the newest schema; False means it needs `migrate`.

    Raises:
        StoreError: the database was written by a newer version, or belongs to something else.
    """
    current = version(con, path)
    if current > newest:
        raise StoreError(
            f"{path} has schema version {current}, but this version of agentr knows only up to {newest}; "
            "update agentr, or name another workspace or store"
        )
    return current == newest


def migrate(con: Any, path: Path, migrations: tuple[Migration, ...]) -> None:
    """Bring an open database up to the last of the migrations, each in a transaction of its own,
    and fold them into the file.

    Raises:
        StoreError: the database was written by a newer version, or belongs to something else.
    """
    if check(con, path, migrations[-1].number):
        return
    current = version(con, path)
    for migration in (one for one in migrations if one.number > current):
        con.begin()
        try:
            if migration.number == 1:
                con.execute(_VERSION_TABLE)
            if migration.number == VIEWS:
                _drop_views(con)
            con.execute(migration.sql)
            con.execute("insert into schema_version (version, name) values (?, ?)", [migration.number, migration.name])
        except BaseException:
            con.rollback()
            raise
        con.commit()
    # Opened by a program other than agentr, DuckDB cannot replay all changes of a table from a log.
    con.execute("checkpoint")


def _drop_views(con: Any) -> None:
    # Names of views begin with `v_`; others are somebody's own.
    found = con.execute(
        "select view_name from duckdb_views() where database_name = current_database() and starts_with(view_name, 'v_')"
    ).fetchall()
    for (view,) in found:
        con.execute(f"drop view {view}")


_VERSION_TABLE = """
create table schema_version (
    version integer primary key,
    name varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table schema_version is 'The migrations this database has been through.';
"""
