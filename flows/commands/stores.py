"""Operations on the store of a workspace as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentr_core.errors import StoreError
from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row, Table
from agentr_core.reports.model_card import table_text
from agentr_core.store.care.rewriting import RewriteResult, compact, merge_stores, prune, table_sizes
from agentr_core.store.database import Store
from agentr_core.store.queries.listings import contradictions, dangling_references
from agentr_core.system import report_write_errors
from agentr_core.texts import count_text, path_for_message
from tasks.runs import all_runs_locked
from tasks.workspaces import STORE_FILE, find_run, open_store


def back_up(workspace: Path, target: str) -> str:
    """Write the store of a workspace to the file `target` or, if that is a folder or ends with a
    slash, under its usual name into it; return a line with the file's size.

    Raises `StoreError` if that fails, and `DiskError` if the folder cannot be made.
    """
    store, file = open_store(workspace, must_exist=True), Path(target)
    if target.endswith("/"):
        with report_write_errors(file):
            file.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
        file = file / STORE_FILE
    store.backup(file)
    return f"{file}: {file.stat().st_size / 2**20:.1f} MiB, the whole store of {workspace}"


def faults(workspace: Path) -> list[str]:
    """Return a line for each reference to a missing row and each contradiction in a workspace's
    store; an empty list for a sound one. Raises `StoreError` if there is no store.
    """
    store = open_store(workspace, must_exist=True)
    return [
        *(f"{' '.join(reference)} points nowhere" for reference in dangling_references(store)),
        *(
            f"{contradiction.kind} {contradiction.id}, {contradiction.position}: {contradiction.what}"
            for contradiction in contradictions(store)
        ),
    ]


def sizes_of(workspace: Path) -> str:
    """Return the rows and the size of each table of a workspace's store as a table. Raises
    `StoreError`.
    """
    usage = table_sizes(open_store(workspace, must_exist=True))
    columns = (Column("Table", "text"), Column("Rows"), Column("MiB"))
    rows = [Row((table.table, wording.count(table.rows), _mib(table.size))) for table in usage.tables if table.rows]
    idle = Row(("idle, `agentr store compact` frees it", "", _mib(usage.num_unused_bytes)))
    return table_text(Table(columns, (*rows, idle)))


def compacted(workspace: Path) -> str:
    """Rewrite the store of a workspace without the idle space in its file; return a line with its
    sizes before and after.

    Raises `StoreError`, and `RunBusy` if a run of the workspace is under way; then nothing has
    changed.
    """
    with all_runs_locked(workspace):
        return _sizes(workspace, compact(open_store(workspace, must_exist=True)))


def merged(workspace: Path, others: Sequence[Path]) -> str:
    """Add the rows of other stores, each named by its workspace or file, to the store of a
    workspace; return lines with their numbers by table. Raises as `compacted` does.
    """
    store = open_store(workspace, must_exist=True)
    with all_runs_locked(workspace):
        result = merge_stores(store, [_named(other) for other in others])
    num_rows = sum(-count for count in result.num_removed_by_table.values())
    return (
        f"{count_text(num_rows, 'row')} taken{_by_table(result.num_removed_by_table, -1)}\n{_sizes(workspace, result)}"
    )


def pruned(workspace: Path, runs: Sequence[str], *, dry_run: bool) -> str:
    """Remove runs, named by the beginnings of their ids, from the store of a workspace; with
    `dry_run`, change nothing. Return lines with the numbers of removed rows, the iterations that
    stay since other runs need them, and the paths that no row names any more.

    Raises as `compacted` does, and `ConfigError` for an unknown run.
    """
    names = [find_run(workspace, prefix) for prefix in runs]
    store = open_store(workspace, must_exist=True)
    with all_runs_locked(workspace):
        result = prune(store, names, replace_file=not dry_run)
    counts = result.rewrite_result.num_removed_by_table
    rows = f"{count_text(sum(counts.values()), 'row')} {'would go' if dry_run else 'went'}{_by_table(counts, 1)}"
    dependencies = [
        f"iteration {number} of run {run} stays: other runs are made of it" for run, number in result.needed_iterations
    ]
    folders = [f"no row names {path} {'then' if dry_run else 'any longer'}" for path in result.unnamed_paths]
    return "".join(f"{line}\n" for line in (rows, *dependencies, *folders, _sizes(workspace, result.rewrite_result)))


def _named(place: Path) -> Store:
    store = open_store(place) if place.is_dir() else Store(place)
    if not store.path.exists():
        raise StoreError(
            f"there is no store at {path_for_message(store.path)}; name a workspace, or the file of a store"
        )
    return store


def _by_table(counts: Mapping[str, int], sign: int) -> str:
    parts = [f"{wording.count(sign * count)} of {table}" for table, count in counts.items()]
    return f": {', '.join(parts)}" if parts else ""


def _sizes(workspace: Path, result: RewriteResult) -> str:
    return (
        f"the store of {workspace}: {_mib(result.bytes_before)} MiB before, "
        f"{_mib(result.bytes_after)} MiB as it is written anew"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
