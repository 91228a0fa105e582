"""A workspace: the folder of a store, and the recipes of the runs in it."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path

from agentr_core.errors import ConfigError, StoreError
from agentr_core.recipes.parsing import restore_recipe
from agentr_core.recipes.recipe import Recipe
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import find_runs, run_config
from agentr_core.texts import path_for_message

STORE_FILE = "store.duckdb"


def open_store(workspace: Path, *, must_exist: bool = False, patient: bool = False) -> Store:
    """Return the store of a workspace. While other processes hold it, a `patient` one, as a run
    needs, waits without limit.

    Raises `StoreError` if the store must exist and does not, or if the folder cannot be read or has
    an impossible name.
    """
    path = workspace / STORE_FILE
    try:
        # DuckDB inserts the ending of its log's name before a question mark in the path.
        if "?" in str(path.absolute()) or "\0" in str(path):
            raise ValueError
        str(path).encode()
        exists = path.exists()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a character in it is none for the name of a store"
        raise StoreError(f"workspace {str(workspace)!r} cannot be opened ({reason}); name another one") from error
    if must_exist and workspace.is_file():
        raise StoreError(f"{workspace} is a file; a workspace is a folder with a file {STORE_FILE}")
    if must_exist and not exists:
        raise StoreError(
            f"there is no store at {path_for_message(path)}; run a recipe first, or name another --workspace"
        )
    return _store(path, patient)


# Each task of a run calls this, and a store keeps an instance of DuckDB, which is slow to start.
@lru_cache(maxsize=4)
def _store(path: Path, patient: bool) -> Store:
    return Store(path, wait_s=math.inf) if patient else Store(path)


def find_run(workspace: Path, prefix: str) -> str:
    """Return the id of the one run whose id begins with a prefix; with an empty prefix, that of the
    only run. Raises `ConfigError` if there is none or several, `StoreError` if there is no store.
    """
    run_ids = find_runs(open_store(workspace, must_exist=True), prefix)
    if not prefix and len(run_ids) > 1:
        raise ConfigError(
            f"{workspace} has {len(run_ids)} runs, as `agentr runs -w {workspace}` says; name one with --run"
        )
    if len(run_ids) != 1:
        which = f"{len(run_ids)} runs in {workspace} begin" if run_ids else f"no run in {workspace} begins"
        raise ConfigError(f"{which} with {prefix!r}; `agentr runs -w {workspace}` lists them all")
    return run_ids[0]


def stored_recipe(workspace: Path, run_id: str, *, patient: bool = False) -> Recipe:
    """Return the resolved recipe that a run was started with; `patient` as for `open_store`.

    Raises `ConfigError` for an unknown run, and `StoreError` if there is no store.
    """
    config = run_config(open_store(workspace, must_exist=True, patient=patient), run_id)
    if config is None:
        raise ConfigError(f"there is no run {run_id!r} in {workspace}; `agentr runs -w {workspace}` lists them all")
    return _parse(config, f"recipe of run {run_id}")


# Every task of a run needs its recipe.
@lru_cache(maxsize=16)
def _parse(config: str, source: str) -> Recipe:
    return restore_recipe(json.loads(config), source=source)
