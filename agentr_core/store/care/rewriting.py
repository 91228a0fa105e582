"""Rewriting a store into a new file, which replaces the old one once it is complete.

If a full disk, Ctrl-C or a kill ends the work before that, the old file stays as it is. Tables,
views and macros that others have put into it are copied by DuckDB, which runs none of them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import duckdb

from agentr_core.errors import CorruptStore, StoreError
from agentr_core.models.checkpoint_dir import (
    checkpoint_entries,
    current_weights_folder,
    iteration_of,
    shared_weights_folders,
)
from agentr_core.store import lock
from agentr_core.store.connection import literal, open_connection, quoted, raise_store_errors
from agentr_core.store.database import Store
from agentr_core.store.migrations import stored_columns
from agentr_core.store.tables import TABLES
from agentr_core.system import flush_to_disk

# The sizes of the tables of a store.


class TableSize(NamedTuple):
    """The number of rows of a table, and the bytes of the blocks that hold them."""

    table: str
    rows: int
    size: int


class StoreSizes(NamedTuple):
    """The tables of a store, the largest first, and the unused bytes in its file."""

    tables: tuple[TableSize, ...]
    num_unused_bytes: int


def table_sizes(store: Store) -> StoreSizes:
    """Return the sizes in bytes of the tables in a store's file, the largest first, and of its
    unused space; rows that are only in the log are not counted yet.

    Sizes are multiples of DuckDB's block of 256 KiB. A block that small tables share counts for
    each. Raises as `Store.reading` does.
    """
    with store.reading() as con:
        ((block, idle),) = con.execute(_BLOCKS).fetchall()
        tables = [
            TableSize(table, *con.execute(_SIZE.format(table=quoted(table)), [block]).fetchall()[0]) for table in TABLES
        ]
    return StoreSizes(
        tuple(sorted(tables, key=lambda table: (-table.size, -table.rows, table.table))), int(block * idle)
    )


_BLOCKS = "select block_size, free_blocks from pragma_database_size() where database_name = current_database()"
_SIZE = """
select (select count(*) from {table}), count(distinct block) * ?::bigint
from (
    select unnest(list_prepend(block_id, additional_block_ids)) as block
    from pragma_storage_info('{table}') where persistent
)
where block >= 0
"""


T = TypeVar("T")
OLD_DATABASE = "old"
"""The name of the old file in the connection to the new one, which is named `store`."""
_NO_CONDITIONS: Mapping[str, str] = {}


class RewriteResult(NamedTuple):
    """The size of the file before and after, in bytes, and the number of rows that each table lost,
    for tables whose number of rows changed.
    """

    bytes_before: int
    bytes_after: int
    num_removed_by_table: Mapping[str, int]


def rewrite(
    store: Store, fill: Callable[[Any], T], *, replace_file: bool = True, other_databases: Sequence[Path] = ()
) -> tuple[RewriteResult, T]:
    """Rewrite a store; return what changed, and the result of `fill`.

    Args:
        fill: called with a connection; copies from the old file, attached as `old`, to the new one,
            `store`, which has no tables yet.
        replace_file: whether the new file replaces the old one; otherwise this is a dry run.
        other_databases: other database files that `fill` reads.

    Raises:
        StoreError: there is no store, the new file would have dangling references, or the disk is
            full. Nothing is changed then.
        StoreBusy, CorruptStore: as for `Store.transaction`.
    """
    store.checkpoint()
    deadline = time.monotonic() + store.wait_s
    draft = store.path.with_name(f"{store.path.name}.rewritten")
    with lock.hold(store.path, exclusive=True, deadline=deadline), raise_store_errors(store.path):
        with open_connection(store.path, deadline, read_only=False) as con:
            # Other processes may have written since; rows in the log would be lost with the old
            # file.
            con.execute("checkpoint")
        try:
            _remove_draft(draft)
            removed_counts, result = _fill_draft(store, draft, fill, deadline, other_databases)
            changes = RewriteResult(store.path.stat().st_size, draft.stat().st_size, removed_counts)
            if replace_file:
                _replace_file(draft, store.path)
        finally:
            _remove_draft(draft)
    return changes, result


def copy(con: Any, conditions: Mapping[str, str] = _NO_CONDITIONS) -> None:
    """Copy everything from the old file to the new one; of our tables in `conditions` only the rows
    that meet the SQL condition.

    Raises:
        StoreError: a row of another program's table refers to a row that is not copied.
    """
    # DuckDB would copy rows, too, but not in the order that foreign keys ask for, and fails then.
    con.execute(f"copy from database {OLD_DATABASE} to store (schema)")
    statements = []
    for schema, table, columns in stored_columns(con, OLD_DATABASE, "store"):
        condition = conditions.get(table.lower(), "true") if schema == "main" else "true"
        name = f"{quoted(schema)}.{quoted(table)}"
        statements.append(
            f"insert into store.{name} ({columns}) select {columns} from {OLD_DATABASE}.{name} where {condition}"
        )
    while statements:
        deferred = []
        for statement in statements:
            try:
                con.execute(statement)
            except duckdb.ConstraintException:
                deferred.append(statement)
        if len(deferred) == len(statements):
            raise StoreError(
                "nothing was changed: a table that is not agentr's refers to rows that would go; remove what refers to "
                "them first"
            )
        statements = deferred


def compact(store: Store) -> RewriteResult:
    """Rewrite a store without the unused space in its file, and return what changed. Raises as
    `rewrite` does.
    """
    changes, _ = rewrite(store, copy)
    return changes


@contextmanager
def attach_read_only(con: Any, path: Path, name: str) -> Iterator[None]:
    """Attach the database file at `path` to the connection under a name, read-only, for the body.
    The path must be one of those `beside` the connection's own; the caller holds its lock.
    """
    con.execute(f"attach {literal(str(path.absolute()))} as {quoted(name)} (read_only)")
    try:
        yield
    finally:
        con.execute(f"detach {quoted(name)}")


def _fill_draft(
    store: Store, draft: Path, fill: Callable[[Any], T], deadline: float, other_databases: Sequence[Path]
) -> tuple[dict[str, int], T]:
    with (
        raise_store_errors(draft),
        open_connection(draft, deadline, read_only=False, other_databases=(store.path, *other_databases)) as con,
    ):
        with attach_read_only(con, store.path, OLD_DATABASE):
            result = fill(con)
            # References that the old file does not have.
            dangling = con.execute(_ORPHANS).fetchall()
            if dangling:
                raise StoreError(
                    f"{store.path} was left as it is: written anew it would have {len(dangling)} references that point "
                    f"nowhere, such as {' '.join(map(str, dangling[0]))}; look at it with `agentr store check`"
                )
            counts = {table: con.execute(_NUM_REMOVED.format(table=quoted(table))).fetchall()[0][0] for table in TABLES}
        con.execute("checkpoint")
    return {table: count for table, count in counts.items() if count}, result


def _replace_file(draft: Path, path: Path) -> None:
    """Replace the old file with a finished one, and sync the file and its new name to the disk."""
    log = path.with_name(f"{path.name}.wal")
    if log.exists() and log.stat().st_size:
        raise StoreError(f"{log} has rows that are not in {path} yet; try again when nobody else writes")
    flush_to_disk(draft)
    draft.replace(path)
    flush_to_disk(path.parent)


def _remove_draft(draft: Path) -> None:
    for leftover in (draft, draft.with_name(f"{draft.name}.wal")):
        leftover.unlink(missing_ok=True)


# The schema is named, too: somebody may have one that is called `old` or `store`.
_NUM_REMOVED = "select (select count(*) from old.main.{table}) - (select count(*) from store.main.{table})"
_ORPHANS = "select * from store.main.v_orphans except select * from old.main.v_orphans order by all limit 100"


# Merging the rows of other stores, such as those of other machines, into one.

_MACHINE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "run": ("workspace",),
    "checkpoint": ("path",),
    "tree": ("writer",),
    # Two runs may train on the same chat, say: as within one store, it belongs to the iteration
    # that had it first, and is counted with the tokenizer of that iteration.
    "sample": ("iteration_id", "num_tokens", "num_trained_tokens"),
    # Two versions of a world may tell other facts of an instance.
    "instance_facts": ("facts",),
    # Of two answers of a tool to the same call, either will do.
    "answered_call": ("provider", "status", "milliseconds", "cached", "output"),
}
"""Columns that may differ between two stores' rows of the same key: the existing row is kept."""
_LATE_COLUMNS: Mapping[str, tuple[str, ...]] = {"instance": ("depth", "origin_id"), "checkpoint": ("parent_id",)}
"""Columns that may be null in one store and have a value in the other: the value is kept."""


def merge_stores(store: Store, sources: Sequence[Store]) -> RewriteResult:
    """Merge the rows of other stores into one, each row once, and return what changed.

    Only rows of our tables are taken: tables that somebody else has put into another store stay
    there, as do the weights, datasets and reports that rows name. Nothing is written to the other
    stores, nor beside them.

    Raises:
        StoreError: two stores have rows of the same id with different content, one of the others is
            the store itself, or as for `rewrite`. Nothing is changed then.
    """
    for source in sources:
        if source.path.exists() and store.path.exists() and source.path.samefile(store.path):
            raise StoreError(f"{source.path} is the store itself; name another one to merge")
    folder = store.path.with_name(f"{store.path.name}.merged")
    # What a killed process may have left.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        copies = {folder / f"{number}.duckdb": source.path for number, source in enumerate(sources)}
        for copy_path, path in copies.items():
            _copy_store(path, copy_path, time.monotonic() + store.wait_s)

        def fill(con: Any) -> None:
            copy(con)
            for copy_path, path in copies.items():
                _merge_copy(con, copy_path, path)

        changes, _ = rewrite(store, fill, other_databases=tuple(copies))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return changes


def _copy_store(path: Path, copy_path: Path, deadline: float) -> None:
    """Copy the file of another store with its log, and bring the copy up to date.

    Raises `StoreError` for a file that is no store, and `StoreBusy`.
    """
    no_store = StoreError(
        f"{path} is no store of agentr, or damaged; nothing was merged: name a workspace, or the file of a store"
    )
    try:
        # While DuckDB has the file open for reading, nobody writes to it, and no lock file of ours
        # is needed beside it.
        with (
            lock.hold_if_lock_files_exist(path, deadline),
            raise_store_errors(path),
            open_connection(path, deadline, read_only=True),
        ):
            copy_path.parent.mkdir(exist_ok=True)
            for suffix in ("", ".wal"):
                source = path.with_name(f"{path.name}{suffix}")
                if source.exists():
                    shutil.copyfile(source, copy_path.with_name(f"{copy_path.name}{suffix}"))
        state = Store(copy_path)
        # A database without tables would be migrated to a store, too.
        if not state.version():
            raise no_store
        state.checkpoint()
    except CorruptStore as error:
        # Its advice is for one's own store.
        raise no_store from error
    except OSError as error:
        raise StoreError(
            f"{path} cannot be copied to {copy_path.parent}: {error.strerror}; free some disk space"
        ) from error
    except StoreError as error:
        # The sentence is about the store, not about our copy of it.
        raise type(error)(str(error).replace(str(copy_path), str(path))) from error


def _merge_copy(con: Any, copy_path: Path, path: Path) -> None:
    with attach_read_only(con, copy_path, "other"):
        for table, table_spec in TABLES.items():
            late_columns = _LATE_COLUMNS.get(table, ())
            columns = [name for (name,) in con.execute(_COLUMNS, [table]).fetchall()]
            equal_columns = [
                name
                for name in columns
                if name not in {*table_spec.key, *late_columns, *_MACHINE_COLUMNS.get(table, ())}
            ]
            _check_conflicts(con, path, table, equal_columns, late_columns)
            key = ", ".join(map(quoted, table_spec.key))
            matching = " and ".join(f"t.{quoted(column)} = o.{quoted(column)}" for column in table_spec.key)
            for column in late_columns:
                con.execute(_FILL_NULLS.format(table=quoted(table), column=quoted(column), matching=matching))
            names = ", ".join(map(quoted, (*columns, "created_at")))
            con.execute(_ADD_ROWS.format(table=quoted(table), key=key, columns=names))


def _check_conflicts(
    con: Any, path: Path, table: str, equal_columns: Sequence[str], late_columns: Sequence[str]
) -> None:
    """Raise `StoreError` if a row is in both stores and differs."""
    key = TABLES[table].key
    difference_by_column = {
        **{name: f"s.{quoted(name)} is distinct from o.{quoted(name)}" for name in equal_columns},
        **{name: f"s.{quoted(name)} <> o.{quoted(name)}" for name in late_columns},
    }
    if not difference_by_column:
        return
    sql = _CONFLICT.format(
        table=quoted(table),
        key=", ".join(map(quoted, key)),
        condition=" or ".join(difference_by_column.values()),
        columns=", ".join(difference_by_column.values()),
    )
    row = con.execute(sql).fetchone()
    if row is not None:
        names = [name for name, differing in zip(difference_by_column, row[len(key) :], strict=True) if differing]
        raise StoreError(
            f"{table} {', '.join(map(str, row[: len(key)]))} is in both stores and differs in {', '.join(names)}; "
            f"nothing was taken from {path}: prune one of the two, or keep them apart"
        )


# Of a table of ours somebody may have more columns.
_COLUMNS = """
select s.column_name from duckdb_columns() s join duckdb_columns() o using (schema_name, table_name, column_name)
where s.database_name = 'store' and o.database_name = 'other' and schema_name = 'main' and table_name = ?
    and column_name <> 'created_at' order by s.column_index
"""
_CONFLICT = """
select {key}, {columns} from store.main.{table} s join other.main.{table} o using ({key}) where {condition} limit 1
"""
_FILL_NULLS = """
update store.main.{table} t set {column} = o.{column}
from other.main.{table} o where {matching} and t.{column} is null and o.{column} is not null
"""
_ADD_ROWS = """
insert into store.main.{table} ({columns})
select {columns} from other.main.{table} anti join store.main.{table} using ({key})
"""


# Pruning runs from a store, so that the lineage of everything that stays is complete.
#
# Iterations stay or go as a whole: all iterations of the other runs stay, and those iterations of
# the pruned runs that made something from which the others were made, however far back. Such an
# iteration stays with all its rows.


class PruneResult(NamedTuple):
    """The changes that pruning made.

    `needed_iterations` are the iterations of the pruned runs that stay because other runs need
    them, as run and number; `unnamed_paths` are the folders and files of the workspace that no row
    names any longer, which pruning leaves in place: weights, finished or not, with their logs,
    datasets, reports, progress files, and weights that samplers shared.
    """

    rewrite_result: RewriteResult
    needed_iterations: tuple[tuple[str, int], ...]
    unnamed_paths: tuple[str, ...]


def prune(store: Store, run_ids: Collection[str], *, replace_file: bool = True) -> PruneResult:
    """Rewrite a store without the rows of some runs, except those that other runs need; return what
    changed.

    Args:
        replace_file: whether the rewritten file replaces the old one; otherwise this is a dry run.

    Raises:
        StoreError, StoreBusy, CorruptStore: as for `rewrite`. Nothing is changed then.
    """

    def fill(con: Any) -> tuple[list[Any], list[Any]]:
        con.execute(_CREATE_KEPT, [list(run_ids)])
        for name, sql in _KEPT_ID_QUERIES.items():
            con.execute(f"create temp table {name} as {sql}")
        copy(con, CONDITIONS)
        # After all rows that may refer to them.
        referring_tables = con.execute(_REFERRING_TABLES, [list(TABLES)]).fetchall()
        subquery = " union ".join(
            f"select instance_id from store.main.{quoted(table)}" for (table,) in referring_tables
        )
        con.execute(_ADD_INSTANCES.format(named=subquery))
        # The origin of a variant is an instance, too.
        con.execute(_ADD_ORIGINS)
        con.execute(_ADD_FACTS)
        iterations = con.execute(_NEEDED, [list(run_ids)]).fetchall()
        return iterations, [con.execute(sql).fetchall() for sql in (_UNNAMED, _GONE_FILES, _KEPT_IDS)]

    rewritten, (iterations, (weights, files, ids)) = rewrite(store, fill, replace_file=replace_file)
    paths = {current_weights_folder(store.path.parent, key, path) for key, path in weights}
    root = store.path.parent
    paths |= {str(root / name) for (name,) in files if (root / name).exists()}
    # Files of trainings whose checkpoint is gone, or whose iteration does not stay. Unfinished work
    # of earlier versions, which names no iteration, is left out.
    removed_ids, kept_ids = {key for key, _ in weights}, {key for (key,) in ids}
    for key, entries in checkpoint_entries(root).items():
        origins = {origin for entry in entries if (origin := iteration_of(entry))}
        if key not in kept_ids and (key in removed_ids or (origins and not origins & kept_ids)):
            paths |= {str(path) for path in (*entries, *shared_weights_folders(root, key))}
    return PruneResult(rewritten, tuple((run, number) for run, number in iterations), tuple(sorted(paths)))


_EDGES = """
with made_by as (
    select checkpoint_id, case when iteration_id is null then 'c' || checkpoint_id else 'i' || iteration_id end as maker
    from old.main.checkpoint
), played as (
    select trajectory_id, 'i' || coalesce(t.iteration_id, e.iteration_id) as maker, tree_id, copied_from, source
    from old.main.trajectory t left join old.main.evaluation e using (evaluation_id)
), grown as (
    select tree_id, 'i' || iteration_id as maker, checkpoint_id, copied_from from old.main.tree
), sampled as (
    select sample_id, 'i' || iteration_id as maker, pair_id, trajectory_id, tree_id from old.main.sample
)
select 'i' || iteration_id as needs, 'r' || run_id as needed from old.main.iteration
union select 'i' || iteration_id, maker from (
    unpivot (select iteration_id, checkpoint_in, checkpoint_out, promoted, collected_by from old.main.iteration)
    on checkpoint_in, checkpoint_out, promoted, collected_by into name role value checkpoint_id
) join made_by using (checkpoint_id)
union select m.maker, p.maker from old.main.checkpoint c join made_by m using (checkpoint_id)
    join made_by p on p.checkpoint_id = c.parent_id
union select m.maker, 'i' || d.iteration_id from old.main.checkpoint c join made_by m using (checkpoint_id)
    join old.main.dataset d on d.dataset_id = c.dataset_id
union select 'i' || d.iteration_id, s.maker from old.main.dataset d join old.main.dataset_row using (dataset_id)
    join sampled s using (sample_id)
union select s.maker, 'i' || p.iteration_id from sampled s join old.main.pair p using (pair_id)
union select s.maker, t.maker from sampled s join played t using (trajectory_id)
union select s.maker, t.maker from sampled s join grown t using (tree_id)
union select t.maker, m.maker from grown t join made_by m using (checkpoint_id)
union select t.maker, o.maker from grown t join grown o on o.tree_id = t.copied_from
union select t.maker, g.maker from played t join grown g using (tree_id)
union select t.maker, o.maker from played t join played o on o.trajectory_id = t.copied_from
union select 'i' || j.iteration_id, t.maker from old.main.judgement j
    join grown t on t.tree_id in (j.tree_id, j.copied_from)
union select 'i' || p.iteration_id, t.maker from old.main.pair p join grown t using (tree_id)
union select 'i' || c.iteration_id, 'i' || p.iteration_id from old.main.critique c join old.main.pair p using (pair_id)
union select 'i' || d.iteration_id, t.maker from old.main.derivation d
    join played t on t.trajectory_id in (d.child_id, d.parent_id)
union select 'i' || e.iteration_id, m.maker from old.main.evaluation e join made_by m using (checkpoint_id)
union select 'i' || e.iteration_id, t.maker from old.main.evaluation e join old.main.episode using (evaluation_id)
    join played t using (trajectory_id)
union select 'i' || p.iteration_id, s.maker from old.main.preference p
    join sampled s on s.sample_id in (p.chosen_sample_id, p.rejected_sample_id)
union select 'i' || o.iteration_id, t.maker from old.main.rl_rollout o join played t using (trajectory_id)
union select 'i' || v.iteration_id, t.maker from old.main.rl_validation v join played t using (trajectory_id)
union select 'i' || f.iteration_id, m.maker from old.main.family f join made_by m using (checkpoint_id)
union select 'r' || s.run_id, t.maker from old.main.revision_state s join played t using (trajectory_id)
union select 'r' || r.run_id, 'i' || i.iteration_id from old.main.run r join old.main.iteration i
    on i.run_id in (r.config->>'$.compare.pool', r.config->>'$.compare.samples', r.config->>'$.compare.trees',
        r.config->>'$.evaluation.revision_test.states')
"""
"""Pairs of a thing and one that it needs: iterations (`i` and id), runs (`r`), checkpoints that no
iteration made (`c`). A thing that an iteration made is represented by the iteration."""
_CREATE_KEPT = f"""
create temp table kept as
with recursive edges as materialized ({_EDGES}),
closed(thing) as (
    select unnest(['r' || run_id, 'i' || iteration_id])
    from old.main.run left join old.main.iteration using (run_id) where run_id not in (select unnest(?::varchar[]))
    union
    select needed from closed join edges on needs = thing
)
select distinct thing from closed where thing is not null
"""
_KEPT_ID_QUERIES: Mapping[str, str] = MappingProxyType(
    {
        "kept_run": "select run_id from old.main.run semi join kept on thing = 'r' || run_id",
        "kept_iteration": "select iteration_id from old.main.iteration semi join kept on thing = 'i' || iteration_id",
        "kept_checkpoint": "select checkpoint_id from old.main.checkpoint c semi join kept "
        "on thing in ('i' || c.iteration_id, 'c' || c.checkpoint_id)",
        "kept_evaluation": "select evaluation_id from old.main.evaluation "
        "semi join kept_iteration using (iteration_id)",
        "kept_trajectory": "select trajectory_id from old.main.trajectory "
        "left join old.main.evaluation e using (evaluation_id) "
        "where coalesce(trajectory.iteration_id, e.iteration_id) in (select iteration_id from kept_iteration)",
        "kept_tree": "select tree_id from old.main.tree semi join kept_iteration using (iteration_id)",
        "kept_sample": "select sample_id from old.main.sample semi join kept_iteration using (iteration_id)",
        "kept_pair": "select pair_id from old.main.pair semi join kept_iteration using (iteration_id)",
        "kept_dataset": "select dataset_id from old.main.dataset semi join kept_iteration using (iteration_id)",
    }
)
"""Queries for the ids that stay, ordered so that each needs only earlier ones."""


def _kept_condition(column: str) -> str:
    return f"{column}_id in (select {column}_id from kept_{column})"


_BY_ITERATION = (
    *("iteration", "chosen_instance", "planned_rollout", "tree", "judgement", "derivation", "family", "edit", "pair"),
    *("critique", "sample", "rejection", "preference", "dataset", "evaluation", "selection", "rl_step", "rl_group"),
    *("rl_rollout", "rl_validation", "timing", "alarm"),
)
CONDITIONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_BY_ITERATION, _kept_condition("iteration")),
        **dict.fromkeys(("run", "stage_input", "revision_state"), _kept_condition("run")),
        **dict.fromkeys(
            ("trajectory", "assessment", "rl_credit", "rl_score", "note", "regrade"), _kept_condition("trajectory")
        ),
        **dict.fromkeys(("checkpoint", "training_step"), _kept_condition("checkpoint")),
        **dict.fromkeys(("node", "oracle_verdict", "leaf_regrade"), _kept_condition("tree")),
        "dataset_row": _kept_condition("dataset"),
        "episode": _kept_condition("evaluation"),
        "event": f"{_kept_condition('run')} and (iteration_id is null or {_kept_condition('iteration')})",
        "metric": "case scope when 'run' then scope_id in (select run_id from kept_run) "
        "when 'iteration' then scope_id in (select iteration_id from kept_iteration) "
        "else scope_id in (select evaluation_id from kept_evaluation) end",
        # Any later run may reuse the answer of a tool, and a recipe may name a scoring.
        **dict.fromkeys(("answered_call", "scoring"), "true"),
        **dict.fromkeys(("instance", "instance_facts"), "false"),
    }
)
"""The condition on the rows of each table that are copied. Instances come after all rows that refer
to them.
"""
_REFERRING_TABLES = """
select table_name from duckdb_columns()
where database_name = 'store' and schema_name = 'main' and lower(column_name) = 'instance_id'
    and lower(table_name) in (select unnest(?)) and lower(table_name) <> 'instance'
"""
_ADD_INSTANCES = """
insert into store.main.instance by name select * from old.main.instance where instance_id in ({named})
"""
_ADD_ORIGINS = """
insert into store.main.instance by name select * from old.main.instance
where instance_id in (
    select v.origin_id from store.main.instance v anti join store.main.instance o on o.instance_id = v.origin_id
)
"""
_ADD_FACTS = """
insert into store.main.instance_facts by name
select * from old.main.instance_facts semi join store.main.instance using (instance_id)
"""
_NEEDED = """
select run_id, iteration from store.main.iteration where run_id in (select unnest(?::varchar[])) order by all
"""
_UNNAMED = """
select checkpoint_id, path from old.main.checkpoint
where iteration_id is not null and path not in (select path from store.main.checkpoint)
"""
_GONE_FILES = """
select 'datasets/' || dataset_id || '.parquet' from old.main.dataset anti join store.main.dataset using (dataset_id)
union all select 'reports/' || run_id from old.main.run anti join store.main.run using (run_id)
union all select 'live/' || run_id || '.json' from old.main.run anti join store.main.run using (run_id)
union all select 'live/' || i.run_id || '-' || i.iteration || '.jsonl'
    from old.main.iteration i anti join store.main.run using (run_id)
"""
_KEPT_IDS = "select checkpoint_id from store.main.checkpoint union all select iteration_id from store.main.iteration"
