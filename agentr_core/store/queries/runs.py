"""The stored runs, their recipes, and how far they got."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from agentr_core.store.codec.ledger import Status, in_utc
from agentr_core.store.database import Store
from agentr_core.store.weights import weights_now

ALL_RUNS = "select run_id, recipe, seed, model, status, started_at, finished_at from v_runs order by started_at"
"""A query that shows a person the runs of a workspace, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run; `finished_at` is in UTC, None while it goes on."""

    status: Status
    finished_at: datetime | None
    iterations: int
    """The number of iterations that its recipe asks for."""


@dataclass(frozen=True, slots=True)
class CheckpointMade:
    """A checkpoint that an iteration of a run made; `config` is the resolved recipe as JSON."""

    checkpoint_id: str
    path: str
    weights_sha256: str
    run_id: str
    iteration: int
    config: str


def checkpoints_beginning(store: Store, prefix: str) -> list[CheckpointMade]:
    """Return the checkpoints whose id begins with a prefix, by id; models that runs begin with are
    left out. Those of a step of a training are named with the step, as in `ab12@30`.
    """
    head, at, step = prefix.partition("@")
    rows = store.rows(
        "select c.checkpoint_id, c.path, c.weights_sha256, r.run_id, i.iteration, r.config from checkpoint c "
        "join iteration i using (iteration_id) join run r using (run_id) "
        "where starts_with(c.checkpoint_id, ?) and split_part(c.checkpoint_id, '@', 2) = ? order by c.checkpoint_id",
        head,
        step if at else "",
    )
    return [CheckpointMade(key, weights_now(store, key, path), *others) for key, path, *others in rows]


def runs_beginning(store: Store, prefix: str) -> list[str]:
    """Return the run ids that begin with a prefix, the oldest first."""
    rows = store.rows("select run_id from run where starts_with(run_id, ?) order by started_at", prefix)
    return [run_id for (run_id,) in rows]


def run_state(store: Store, run_id: str) -> RunState | None:
    """Return the state of a run; None if it is not stored."""
    rows = store.rows("select status, finished_at, (config->>'$.iterations')::bigint from run where run_id = ?", run_id)
    for status, ended, iterations in rows:
        return RunState(status=status, finished_at=in_utc(ended), iterations=iterations)
    return None


def checkpoint_with(store: Store, weights_sha256: str) -> str | None:
    """Return the id of the first checkpoint of the workspace that a training made with these
    weights; None if there is none.
    """
    rows = store.rows(
        "select checkpoint_id from checkpoint where weights_sha256 = ? and iteration_id is not null "
        "order by created_at, checkpoint_id limit 1",
        weights_sha256,
    )
    return next((key for (key,) in rows), None)


def run_config(store: Store, run_id: str) -> str | None:
    """Return the resolved recipe of a run as JSON; None if it is not stored."""
    return next((config for (config,) in store.rows("select config from run where run_id = ?", run_id)), None)


def run_seed(store: Store, run_id: str) -> int | None:
    """Return the seed of a run's recipe; None if it is not stored."""
    rows = store.rows("select (config->>'$.seed')::bigint from run where run_id = ?", run_id)
    return next((int(seed) for (seed,) in rows), None)


def run_versions(store: Store, run_id: str) -> dict[str, str]:
    """Return the versions with which a run began, by name; none if it is not stored."""
    found: dict[str, str] = {}
    for (versions,) in store.rows("select versions from run where run_id = ?", run_id):
        found = json.loads(versions)
    return found


def configs_on_pool(store: Store, pool: str) -> dict[str, str]:
    """Return the resolved recipes, as JSON, of the runs that train on a comparison's pool, by run,
    the oldest first.
    """
    rows = store.rows("select run_id, config from run where (config->>'$.compare.pool') = ? order by started_at", pool)
    return dict(rows)


def uses_of_pool(store: Store, pool: str) -> list[str]:
    """Return what the runs with a dataset of the samples of a pool train on, as `data.use` names
    it.
    """
    rows = store.rows(
        "select distinct r.config->>'$.data.use' from run r join iteration using (run_id) "
        "join dataset using (iteration_id) "
        "where coalesce(nullif(r.config->>'$.compare.samples', ''), r.config->>'$.compare.pool') = ?",
        pool,
    )
    return [use for (use,) in rows]


def spliced_anew(store: Store, pool: str) -> bool:
    """Return whether a run of a comparison has a dataset whose samples were made of the trees of
    the comparison's pool, but in a run of their own.
    """
    return bool(
        store.count(
            "select count(*) from run r join iteration using (run_id) join dataset using (iteration_id) "
            "where (r.config->>'$.compare.pool') = ? and (r.config->>'$.compare.samples') <> ''",
            pool,
        )
    )


def configs_of_all(store: Store) -> dict[str, str]:
    """Return the resolved recipes, as JSON, of all runs, by run, the oldest first."""
    return dict(store.rows("select run_id, config from run order by started_at"))


def count_finished_runs(store: Store, run_ids: Sequence[str]) -> int:
    """Return how many of some runs are finished."""
    return store.count(
        "select count(*) from run where status = 'finished' and run_id in (select unnest(?))", list(run_ids)
    )


def count_trees(store: Store, run_id: str) -> int:
    """Return how many trees a run has, finished or not."""
    return store.count("select count(*) from tree join iteration using (iteration_id) where run_id = ?", run_id)
