"""Iterations: their status, and the checkpoints that they made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from agentr_core.store.codec.ledger import Status, in_utc
from agentr_core.store.database import Store
from agentr_core.store.weights import weights_now


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationState:
    """The state of an iteration; `finished_at` is in UTC, None while it goes on."""

    status: Status
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint that an iteration made, and what it was made from."""

    checkpoint_id: str
    path: Path
    weights_sha256: str
    parent_id: str | None
    dataset_hash: str | None
    """None for the model that a run begins with."""
    trained: bool
    """Whether an iteration made it. Runs that begin with the same weights share one row for them,
    whose path is that of the last one that began."""


class Promotion(NamedTuple):
    """The model with which a run goes on after an iteration: one row of view v_promotions; see the
    comments of its columns.
    """

    iteration: int
    """The iteration that made it; 0: the model that its run begins with."""
    path: str
    development: str
    success: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTraining:
    """A finished training on the samples of a pool."""

    checkpoint_id: str
    dataset_hash: str
    counts: dict[str, Any]
    """The composition of its dataset."""
    trained_tokens: int
    seconds: float


def iteration_state(store: Store, iteration_id: str) -> IterationState | None:
    """Return the state of an iteration; None if it has not begun."""
    rows = store.rows("select status, finished_at from iteration where iteration_id = ?", iteration_id)
    for status, ended in rows:
        return IterationState(status=status, finished_at=in_utc(ended))
    return None


def checkpoint_made(store: Store, iteration_id: str) -> StoredCheckpoint | None:
    """Return the checkpoint that an iteration made, for iteration 0 the model its run begins with;
    None before there is one.
    """
    return _checkpoint(store, iteration_id, promoted=False)


def checkpoint_promoted(store: Store, iteration_id: str) -> StoredCheckpoint | None:
    """Return the checkpoint that an iteration promoted, if its recipe goes on with the best one;
    None before the promotion.
    """
    return _checkpoint(store, iteration_id, promoted=True)


def promotion_of(store: Store, run_id: str, iteration: int) -> Promotion | None:
    """Return the model with which a run goes on after an iteration; None before there is one."""
    return _promotion(store, store.rows(_PROMOTION, run_id, iteration))


def last_promotion(store: Store, run_id: str) -> Promotion | None:
    """Return the model with which a run ended after its last iteration; None before the run is
    finished.
    """
    return _promotion(store, store.rows(_LAST_PROMOTION, run_id))


def _promotion(store: Store, rows: Sequence[tuple[Any, ...]]) -> Promotion | None:
    for key, iteration, path, development, success in rows:
        return Promotion(iteration, weights_now(store, key, path), development, success)
    return None


def _checkpoint(store: Store, iteration_id: str, *, promoted: bool) -> StoredCheckpoint | None:
    for key, path, weights, parent, dataset, trained in store.rows(_CHECKPOINT, promoted, iteration_id):
        return StoredCheckpoint(
            checkpoint_id=key,
            path=Path(weights_now(store, key, path)),
            weights_sha256=weights,
            parent_id=parent,
            dataset_hash=dataset,
            trained=trained,
        )
    return None


class Outside(NamedTuple):
    """A training by another program that a run took back as an iteration."""

    iteration: int
    checkpoint_id: str
    program: str
    source: str
    """The folder that it was read from."""
    files: str
    """The hash of the weights and rollouts in that folder."""
    rollouts: int
    finished: bool
    """Whether the iteration is."""


def trained_outside(store: Store, run_id: str) -> list[Outside]:
    """Return the iterations of a run that another program trained, in their order."""
    return [Outside(*row) for row in store.rows(_OUTSIDE, run_id)]


def training_made(store: Store, iteration_id: str) -> StoredTraining | None:
    """Return the training of an iteration; None before the iteration is finished."""
    for key, dataset, counts, tokens, seconds in store.rows(_TRAINING, iteration_id):
        return StoredTraining(
            checkpoint_id=key,
            dataset_hash=dataset,
            counts=json.loads(counts),
            trained_tokens=tokens,
            seconds=seconds,
        )
    return None


def trained_by(store: Store, run_id: str) -> tuple[int, float]:
    """Return the trained tokens and the seconds of training of all iterations of a run."""
    ((tokens, seconds),) = store.rows(_TRAINED, run_id) or [(0, 0.0)]
    return int(tokens), float(seconds)


def iterations_of(store: Store, run_id: str) -> list[int]:
    """Return the numbers of a run's iterations that have begun, 0 among them, in their order."""
    rows = store.rows("select iteration from iteration where run_id = ? order by 1", run_id)
    return [int(number) for (number,) in rows]


def trained_iterations(store: Store, run_id: str) -> list[int]:
    """Return the numbers of a run's iterations that made a checkpoint, without 0, in their
    order.
    """
    rows = store.rows(
        "select iteration from iteration where run_id = ? and iteration > 0 and checkpoint_out is not null order by 1",
        run_id,
    )
    return [int(number) for (number,) in rows]


def count_finished_iterations(store: Store, run_id: str) -> int:
    """Return how many iterations of a run are finished, without 0."""
    return store.count(
        "select count(*) from iteration where run_id = ? and iteration > 0 and status = 'finished'", run_id
    )


_CHECKPOINT = """
select c.checkpoint_id, c.path, c.weights_sha256, c.parent_id, d.hash, c.iteration_id is not null
from iteration i
join checkpoint c on c.checkpoint_id = case when ? then i.promoted else i.checkpoint_out end
left join dataset d using (dataset_id)
where i.iteration_id = ?
"""
_PROMOTION = """
select promoted, promoted_iteration, path, development, success
from v_promotions
where run_id = ? and iteration = ?
"""
_LAST_PROMOTION = """
select promoted, promoted_iteration, path, development, success
from v_promotions
join run using (run_id)
where run_id = ? and status = 'finished'
order by iteration desc
limit 1
"""
_OUTSIDE = """
select i.iteration, c.checkpoint_id, c.config->>'$.outside.program', c.config->>'$.outside.source',
    c.config->>'$.outside.files', (c.config->>'$.outside.rollouts')::bigint, i.status = 'finished'
from iteration i join checkpoint c on c.checkpoint_id = i.checkpoint_out
where i.run_id = ? and i.iteration > 0 and (c.config->>'$.outside.files') is not null
order by i.iteration
"""
_TRAINED = """
select coalesce(sum(tokens), 0)::bigint, coalesce(sum(seconds), 0)
from (
    select max(t.trained_tokens) as tokens, max(t.seconds) as seconds
    from iteration i
    join training_step t on t.checkpoint_id = i.checkpoint_out
    where i.run_id = ? and i.iteration > 0
    group by i.iteration
)
"""
_TRAINING = """
select c.checkpoint_id, d.hash, d.counts, max(t.trained_tokens), max(t.seconds)
from iteration i
join checkpoint c on c.checkpoint_id = i.checkpoint_out
join dataset d on d.iteration_id = i.iteration_id
join training_step t on t.checkpoint_id = c.checkpoint_id
where i.iteration_id = ? and i.status = 'finished'
group by all
"""
