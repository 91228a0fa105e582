"""The sizes of the tables of a store."""

from __future__ import annotations

from typing import NamedTuple

from agentr_core.store.connection import quoted
from agentr_core.store.database import Store
from agentr_core.store.tables import TABLES


class TableSize(NamedTuple):
    """The number of rows of a table, and the bytes of the blocks that hold them."""

    table: str
    rows: int
    size: int


class Sizes(NamedTuple):
    """The tables of a store, the largest first, and the unused bytes in its file."""

    tables: tuple[TableSize, ...]
    idle: int


def sizes(store: Store) -> Sizes:
    """Return the sizes in the file of a store; rows that are only in its log are not counted yet.

    A block has 256 KiB, and small tables may share one: then each counts it. Raises as
    `Store.reading` does.
    """
    with store.reading() as con:
        ((block, idle),) = con.execute(_BLOCKS).fetchall()
        found = [
            TableSize(table, *con.execute(_SIZE.format(table=quoted(table)), [block]).fetchall()[0]) for table in TABLES
        ]
    return Sizes(tuple(sorted(found, key=lambda one: (-one.size, -one.rows, one.table))), int(block * idle))


_BLOCKS = "select block_size, free_blocks from pragma_database_size() where database_name = current_database()"
_SIZE = """
select (select count(*) from {table}), count(distinct block) * ?::bigint
from (
    select unnest(list_prepend(block_id, additional_block_ids)) as block
    from pragma_storage_info('{table}') where persistent
)
where block >= 0
"""
