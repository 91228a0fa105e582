"""Kill and resume: whatever dies when, the rerun ends where an undisturbed run ends and does nothing twice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wheel import PATIENCE, agentr, kill_group, started, write_recipe

from agentr_core.store import Store
from agentr_core.store.tables import TABLES

Row = tuple[Any, ...]
PAUSE = "environment.options.pause=0.03"
SEED = 20


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_nothing_had_been(
    tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    calm, rough = (Store(tmp_path / name / "store.duckdb") for name in ("calm", "rough"))
    command = ("run", write_recipe(tmp_path, door_model, workspace="rough"), "-o", PAUSE)
    known: set[Row] = set()

    for moment in moments(rough, random.Random(SEED)):
        with started(*command, env=process_env) as process:
            deadline = time.monotonic() + PATIENCE
            while not moment():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            kill_group(process)
        rows = all_rows(rough)
        assert known < rows
        known = rows

    ended = agentr(*command, env=process_env)
    assert ended.returncode == 0, ended.stderr
    assert known < all_rows(rough)
    assert rough.query("select * from v_orphans").empty
    assert rough.query("select status from run")["status"].tolist() == ["finished"]

    undisturbed = agentr(*command, "-o", f"workspace={tmp_path / 'calm'}", env=process_env)
    assert undisturbed.returncode == 0, undisturbed.stderr
    for question in (
        "select hash from dataset",
        "select checkpoint_id, weights_sha256 from checkpoint order by 1",
        "select * exclude (created_at) from node order by tree_id, node_index",
        "select * exclude (created_at) from judgement order by tree_id, node_index",
        "select iteration, success, reward, episodes, revision_success from v_iterations order by 1",
    ):
        assert rough.query(question).equals(calm.query(question)), question


def moments(store: Store, rng: random.Random) -> list[Callable[[], bool]]:
    """Return when to kill: in collection, right after judging, in training, and in the last evaluation."""

    def count(sql: str, least: int) -> Callable[[], bool]:
        return lambda: store.path.exists() and int(store.query(f"select count(*) as n from {sql}")["n"][0]) >= least

    def training() -> bool:
        begun = any((store.path.parent / "checkpoints").glob(".*/lock"))
        if begun:
            time.sleep(rng.uniform(0, 2))
        return begun

    last = "episode join evaluation using (evaluation_id) join iteration using (iteration_id) where iteration = 1"
    return [
        count("node", rng.randint(10, 40)),
        count("judgement", 1),
        training,
        count(last, rng.randint(1, 6)),
    ]


def all_rows(store: Store) -> set[Row]:
    """Return the key of every row of the store with the time at which it was written."""
    with store.reading() as con:
        return {
            (name, *row)
            for name, table in TABLES.items()
            for row in con.execute(f"select {', '.join(table.key)}, created_at from {name}").fetchall()
        }
