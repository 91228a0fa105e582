"""The runs that a process is working on. A killed process could not record its end, so what a store
says of its runs is not enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentr_core.store.lock import holders

LOCKS = "locks"
"""The folder of a workspace with a file for each run, locked while a process works on it."""


def tell_runs_at_work(con: Any, workspace: Path) -> None:
    """Set the variable by which view v_runs tells a run that a process of this machine is working
    on from one that has stopped; it stays unset if the kernel does not tell.
    """
    folder = workspace / LOCKS
    try:
        held = holders()
        found = [file.name for file in folder.iterdir() if file.stat().st_ino in held] if folder.exists() else []
    except OSError:
        return
    con.execute("set variable runs_at_work = ?::varchar[]", [found])
