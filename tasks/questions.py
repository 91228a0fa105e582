"""What a person wants of the store of a workspace: answers to questions, and a copy."""

from __future__ import annotations

from pathlib import Path

from agentr_core.store.answers import FORMATS
from tasks.wiring import open_store


def answer(workspace: Path, sql: str, form: str, *, files: bool = False) -> str:
    """Return the answer to a question in SQL in one of the `FORMATS`; with `files` it may read and write files.

    Raises `ConfigError` for wrong SQL, and `StoreError` where there is no store.
    """
    return FORMATS[form](open_store(workspace, must_exist=True).answer(sql, files=files))


def runs_of(workspace: Path) -> str:
    """Return the runs of a workspace as a table. Raises `StoreError` where there is no store."""
    return answer(
        workspace, "select run_id, recipe, status, started_at, finished_at from run order by started_at", "table"
    )


def back_up(workspace: Path, file: Path) -> str:
    """Write the store of a workspace to one file and say how large it is. Raises `StoreError`."""
    open_store(workspace, must_exist=True).backup(file)
    return f"{file}: {file.stat().st_size / 2**20:.1f} MiB, the whole store of {workspace}"
