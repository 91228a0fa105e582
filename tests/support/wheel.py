"""A recipe that turns the whole wheel in seconds, and the command line as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from agentr_core.store.database import Store
from agentr_core.store.tables import TABLES

Row = tuple[Any, ...]
SUPPORT = Path(__file__).parent
PIPE_BYTES = 1 << 20
"""What a program may print before somebody reads it; Linux allows no more without privileges."""
PATIENCE = 600.0
"""Seconds that a test waits for what must come; only a failure takes so long, however busy the
machine is.
"""
RECIPE = """\
name: {name}
workspace: {workspace}
iterations: 1
environment: {{name: door}}
model: {{path: {model}, device: cpu, max_batch: 16}}
search: {{dives: 2, width: 2, depth: 4, max_new_tokens: 6}}
critique: {{max_new_tokens: 6, unparsable: bad}}
pairs: {{alpha: [0.5], beta: 0.2}}
splice: {{mode: verified, no_error: reject}}
training:
  num_train_epochs: [1]
  per_device_train_batch_size: 4
  learning_rate: 1.0e-3
  bf16: false
  num_threads: 1
evaluation:
  temperature: 1.0
  episodes: 2
  max_steps: 4
  max_new_tokens: 6
  revision_test: {{max_steps: 4}}
"""

LIGHT = ["evaluation.episodes=1", "evaluation.max_steps=2", "evaluation.revision_test={enabled: false}"]
"""Overrides for a run whose scores are not what a test is about."""


def write_recipe(folder: Path, model: Path, *, workspace: str = "runs", name: str = "door") -> Path:
    """Write the recipe of the door into a folder; its workspace lies there, too."""
    file = folder / "door.yaml"
    file.write_text(RECIPE.format(name=name, workspace=folder / workspace, model=model), encoding="utf-8")
    return file


def environment(site: Path, home: Path, **more: str) -> dict[str, str]:
    """Return the variables of a process that sees the packages in `site` and keeps Prefect's files
    in `home`.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AGENTR_"))}
    paths = {"PREFECT_HOME": str(home), "PYTHONPATH": os.pathsep.join(map(str, (site, SUPPORT, SUPPORT / "warm")))}
    patience = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(PATIENCE))}
    return variables | paths | patience | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | more


def agentr(*words: str | Path, env: Mapping[str, str], timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    with started(*words, env=env) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(*words: str | Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start the command line in a process group of its own; whatever is left of the group is killed
    at the end.
    """
    with launched([sys.executable, "-m", "flows.cli", *map(str, words)], env=env) as process:
        yield process


@contextmanager
def launched(command: list[str], *, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a process group of its own; whatever is left of the group is killed at the
    end.
    """
    with subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Servers and workers are read at their end only; at a full pipe they would stop.
        pipesize=PIPE_BYTES,
        text=True,
        start_new_session=True,
        # A shell starts what runs in its background with interrupts ignored, and children inherit
        # that.
        preexec_fn=_heed_interrupts,
    ) as process:
        try:
            yield process
        finally:
            kill_group(process)


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process with all its children, as `kill -9` does, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Process(Protocol):
    """What goes on while somebody waits: a process, or what can be asked as one."""

    def poll(self) -> object: ...

    def communicate(self) -> object: ...


def wait_for(process: Process, moment: Callable[[], bool], store: Store | None = None, *, every: float = 0.02) -> None:
    """Wait until something is so, while a process goes on; look `every` so many seconds.

    What is asked of a store is asked again only after a write: a look costs 40 ms of a processor,
    and holds the lock that the process wants.
    """
    deadline = time.monotonic() + PATIENCE
    last_state: object = None
    while True:
        state = None if store is None else file_stats(store)
        if store is None or state != last_state:
            if moment():
                return
            last_state = state
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(every)


def file_stats(store: Store) -> tuple[tuple[int, int], ...]:
    """Return what changes with each write to a store: times and sizes of its files."""
    stats = []
    for file in (store.path, store.path.with_name(f"{store.path.name}.wal")):
        with suppress(FileNotFoundError):
            stats.append((file.stat().st_mtime_ns, file.stat().st_size))
    return tuple(stats)


def remove_locks(store: Store) -> None:
    """Remove the files by which processes wait for each other, as a user who tidies up does."""
    for name in (".lock", ".queue"):
        store.path.with_name(store.path.name + name).unlink(missing_ok=True)


def sentence(err: str) -> str:
    """Return what the command line said, without its mark; fail if it is neither one line nor a
    list of faults, a line each.
    """
    assert err.startswith("agentr: ")
    head, *faults = err.splitlines()
    assert not faults or (head.endswith(f"{len(faults)} faults") and all(line.startswith("  ") for line in faults))
    return err.removeprefix("agentr: ").rstrip("\n")


def all_rows(store: Store) -> set[Row]:
    """Return the key of every row of the store with the time at which it was written."""
    with store.reading() as con:
        return {
            (name, *row)
            for name, table in TABLES.items()
            for row in con.execute(f"select {', '.join(table.key)}, created_at from {name}").fetchall()
        }
