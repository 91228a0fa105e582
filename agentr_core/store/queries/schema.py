"""The schema as the database has it: tables and views, their columns, and the references between
them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from agentr_core.store.database import Store

_REFERENCE = re.compile(
    r"'(\w+)'(?: as child)?, '(\w+)'(?:(?!union all).)*?anti join \(?\"?(\w+)", re.IGNORECASE | re.DOTALL
)


class Column(NamedTuple):
    """A column; `about` is empty if its name says everything."""

    name: str
    kind: str
    key: bool
    about: str


class Relation(NamedTuple):
    """A table, or a view, with its columns in their order."""

    name: str
    about: str
    columns: tuple[Column, ...]
    view: bool


class Reference(NamedTuple):
    """A column whose values are keys of another table."""

    table: str
    column: str
    to: str


def relations(store: Store) -> list[Relation]:
    """Return tables, then views, each in the order of their names."""
    groups: dict[tuple[bool, str, str], list[Column]] = {}
    for view, name, about, column, kind, key, description in store.rows(_COLUMNS):
        groups.setdefault((view, name, about), []).append(Column(column, kind, key, description or ""))
    return [Relation(name, about, tuple(columns), view) for (view, name, about), columns in groups.items()]


def references(store: Store) -> list[Reference]:
    """Return the references between tables, as view v_orphans checks them, sorted."""
    ((view,),) = store.rows("select sql from duckdb_views() where view_name = 'v_orphans'")
    tables = {name for (name,) in store.rows("select table_name from duckdb_tables()")}
    candidates = {Reference(*match) for match in _REFERENCE.findall(view)}
    return sorted(reference for reference in candidates if reference.table in tables and reference.to in tables)


_COLUMNS = """
with relation as (
    select table_name as name, comment, false as view from duckdb_tables() where database_name = current_database()
    union all
    select view_name, comment, true from duckdb_views() where database_name = current_database() and not internal
), keys as (
    select table_name, unnest(constraint_column_names) as column_name
    from duckdb_constraints() where database_name = current_database() and constraint_type = 'PRIMARY KEY'
)
select r.view, r.name, r.comment, c.column_name, c.data_type, k.column_name is not null, c.comment
from relation r
join duckdb_columns() c on c.table_name = r.name and c.database_name = current_database()
left join keys k on k.table_name = r.name and k.column_name = c.column_name
where c.column_name <> 'created_at' or r.view
order by r.view, r.name, c.column_index
"""
