"""Kill and resume: whatever dies when, the rerun ends where an undisturbed run ends and does
nothing twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from wheel import Row, agentr, all_rows, kill_group, started, wait_for, write_recipe

from agentr_core.store.database import Store

Moment = tuple[Callable[[], bool], Store | None]
"""What a kill waits for, and the store in which it is seen."""
PAUSE = ("-o", "environment.options.pause=0.03")
SEED = 20
ETO = """\
{phases: [dpo], explore: {samples: 8, max_steps: 4, max_new_tokens: 6}, preferences: {against: own},
dpo: {learning_rate: [1.0e-3], num_train_epochs: [2], per_device_train_batch_size: 2}}"""
LAST_EPISODES = "episode join evaluation using (evaluation_id) join iteration using (iteration_id) where iteration = 1"
OUTCOME = (
    "select hash from dataset",
    "select checkpoint_id, weights_sha256 from checkpoint order by 1",
    "select iteration, success, reward, episodes, revision_success from v_iterations order by 1",
)


@pytest.mark.slow
@pytest.mark.long
def test_killed_again_and_again_it_ends_as_if_nothing_had_been(
    tmp_path: Path, door_model: Path, served_env: dict[str, str]
) -> None:
    command = ("run", write_recipe(tmp_path, door_model, workspace="rough"), *PAUSE)
    rough, rng = Store(tmp_path / "rough" / "store.duckdb"), random.Random(SEED)
    moments = [
        count(rough, "node", rng.randint(10, 40)),
        count(rough, "judgement", 1),
        training(rough, rng),
        count(rough, LAST_EPISODES, rng.randint(1, 6)),
    ]
    grown = (
        "select * exclude (created_at) from node order by tree_id, node_index",
        "select * exclude (created_at) from judgement order by tree_id, node_index",
    )
    check_kills(command, rough, moments, (*OUTCOME, *grown), env=served_env)


@pytest.mark.slow
@pytest.mark.long
def test_eto_too_explores_and_learns_as_if_nothing_had_been(
    tmp_path: Path, door_model: Path, served_env: dict[str, str]
) -> None:
    foreign = [f"{section}={{}}" for section in ("search", "critique", "pairs", "splice")]
    settings = ("method=eto", f"eto={ETO}", "training={bf16: false, num_threads: 1}")
    changes = [word for change in (*settings, *foreign) for word in ("-o", change)]
    recipe = write_recipe(tmp_path, door_model, workspace="rough")
    command: tuple[str | Path, ...] = ("run", recipe, *PAUSE, *changes)
    rough, rng = Store(tmp_path / "rough" / "store.duckdb"), random.Random(SEED)
    moments = [
        count(rough, "trajectory where source = 'rollout'", rng.randint(5, 25)),
        count(rough, "preference", 1),
        training(rough, rng),
    ]
    queries = (
        "select * exclude (created_at) from trajectory order by trajectory_id",
        "select * exclude (created_at) from preference order by preference_id",
    )
    check_kills(command, rough, moments, (*OUTCOME, *queries), env=served_env)
    assert rough.query("select count(*) n from trajectory where source = 'rollout'")["n"].tolist() == [6 * 9]


def check_kills(
    command: Sequence[str | Path],
    rough: Store,
    moments: Sequence[Moment],
    questions: Sequence[str],
    *,
    env: Mapping[str, str],
) -> None:
    """Kill a command at each moment, then let it end; its store must answer as that of an
    undisturbed run does.
    """
    earlier_rows: set[Row] = set()
    for moment in moments:
        with started(*command, env=env) as process:
            wait_for(process, *moment)
            kill_group(process)
        rows = all_rows(rough)
        assert earlier_rows <= rows
        earlier_rows = rows

    result = agentr(*command, env=env)
    assert result.returncode == 0, result.stderr
    assert earlier_rows < all_rows(rough)
    assert rough.query("select * from v_orphans").empty
    assert rough.query("select status from run")["status"].tolist() == ["finished"]

    calm = Store(rough.path.parents[1] / "calm" / "store.duckdb")
    calm_result = agentr(*command, "-o", f"workspace={calm.path.parent}", env=env)
    assert calm_result.returncode == 0, calm_result.stderr
    for question in questions:
        assert rough.query(question).equals(calm.query(question)), question


def count(store: Store, sql: str, least: int) -> Moment:
    """Return whether a store has so many rows of something."""

    def reached() -> bool:
        return store.path.exists() and int(store.query(f"select count(*) as n from {sql}")["n"][0]) >= least

    return reached, store


def training(store: Store, rng: random.Random) -> Moment:
    """Return whether a training has begun, and let it go on for a while, at most to its end: the
    rest of the run is over soon.
    """

    def at_work() -> bool:
        return any((store.path.parent / "checkpoints").glob(".*/lock"))

    def has_begun() -> bool:
        is_training = at_work()
        if is_training:
            end = time.monotonic() + rng.uniform(0, 2)
            while at_work() and time.monotonic() < end:
                time.sleep(0.01)
        return is_training

    return has_begun, None
