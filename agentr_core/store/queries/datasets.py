"""Datasets and the samples in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDataset:
    """The content hash and the composition of a dataset."""

    hash: str
    counts: dict[str, Any]


class SampleHead(NamedTuple):
    """What is known about a sample besides its messages."""

    sample_id: str
    run_id: str | None
    iteration: int | None
    kind: str
    instance_id: str | None
    pair_id: str | None
    trajectory_id: str | None
    tree_id: str | None
    good_leaf: int | None
    bad_leaf: int | None
    cut: int | None
    good_reward: float | None
    bad_reward: float | None
    num_tokens: int | None
    num_trained_tokens: int | None
    used: bool


class DatasetHead(NamedTuple):
    """A dataset and the iteration that it belongs to; `counts` is its composition, as JSON."""

    dataset_id: str
    hash: str
    counts: str
    run_id: str
    recipe: str
    method: str
    iteration: int
    iteration_id: str


def sample_head(store: Store, sample_id: str) -> SampleHead | None:
    """Return what is known about a sample; None if it is not stored."""
    return sample_heads(store, [sample_id]).get(sample_id)


def sample_heads(store: Store, sample_ids: Sequence[str]) -> dict[str, SampleHead]:
    """Return what is known about samples, by id; those that are not stored are left out."""
    heads = (SampleHead(*row) for row in store.rows(_HEADS, list(sample_ids)))
    return {head.sample_id: head for head in heads}


def calls_behind(store: Store, sample_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the tool calls in the episodes that samples are made from, in order, by sample;
    samples without any are left out.
    """
    return {key: json.loads(calls) for key, calls in store.rows(_CALLS, list(sample_ids))}


class GroupedInstance(NamedTuple):
    """An instance that an iteration of reinforcement learning chose or played, and one of its
    rollouts.
    """

    run_id: str
    recipe: str
    iteration: int
    iteration_id: str
    instance_id: str
    trajectory_id: str


def grouped_beginning(store: Store, prefix: str) -> list[GroupedInstance]:
    """Return the instances that iterations of reinforcement learning train on, whose iteration's or
    run's id begins with a prefix, each once per iteration, in the order of iterations.

    They are those that the iteration's selection chose, in the order of their ids; of an iteration
    without a selection, those of its groups, in the order of their first groups.
    """
    return [GroupedInstance(*row) for row in store.rows(_GROUPED, prefix)]


def datasets_beginning(store: Store, prefix: str) -> list[DatasetHead]:
    """Return the datasets whose own id, or that of their iteration or run, begins with a prefix, in
    the order of their iterations.
    """
    return [DatasetHead(*row) for row in store.rows(_DATASETS, prefix)]


def stored_dataset(store: Store, dataset_id: str) -> StoredDataset | None:
    """Return what is known about a dataset; None if it is not stored."""
    rows = store.rows("select hash, counts from dataset where dataset_id = ?", dataset_id)
    return _dataset(rows)


def dataset_of(store: Store, iteration_id: str) -> StoredDataset | None:
    """Return the dataset of an iteration, the last one if it has several; None if it has none."""
    rows = store.rows(
        "select hash, counts from dataset where iteration_id = ? order by created_at desc limit 1", iteration_id
    )
    return _dataset(rows)


def whole_datasets(store: Store, iteration_id: str) -> list[str]:
    """Return the hashes of those datasets of an iteration that have all their rows in the store,
    with their samples, turns and texts.
    """
    return [digest for (digest,) in store.rows(_WHOLE, iteration_id)]


def trained_revisions(store: Store, iteration_id: str) -> list[tuple[str, str | None]]:
    """Return the ids of the revision samples in an iteration's dataset, each with the id of its
    pair, sorted.
    """
    rows = store.rows(
        "select distinct s.sample_id, s.pair_id from dataset d join dataset_row w using (dataset_id) "
        "join sample s using (sample_id) where d.iteration_id = ? and s.kind = 'revision' order by s.sample_id",
        iteration_id,
    )
    return [(sample_id, pair_id) for sample_id, pair_id in rows]


def run_of(store: Store, kind: str, key: str) -> tuple[str, datetime] | None:
    """Return the run that made a stored `sample` or `trajectory`, and when it started; None if it
    is not known.
    """
    rows = store.rows(
        "select r.run_id, r.started_at from (select 'sample' as kind, sample_id as id, iteration_id from sample "
        "union all select 'trajectory', trajectory_id, iteration_id from trajectory) "
        "join iteration using (iteration_id) join run r using (run_id) where kind = ? and id = ?",
        *(kind, key),
    )
    return next(((run_id, started.replace(tzinfo=UTC)) for run_id, started in rows), None)


def _dataset(rows: Iterable[tuple[Any, ...]]) -> StoredDataset | None:
    return next((StoredDataset(hash=digest, counts=json.loads(counts)) for digest, counts in rows), None)


_HEADS = """
select s.sample_id, i.run_id, i.iteration, s.kind, s.instance_id, s.pair_id, s.trajectory_id, s.tree_id, s.good_leaf,
    s.bad_leaf, s.cut, s.good_reward, s.bad_reward, s.num_tokens, s.num_trained_tokens,
    exists (from dataset_row w where w.sample_id = s.sample_id)
from sample s left join iteration i using (iteration_id)
where s.sample_id in (select unnest(?))
"""
_CALLS = """
select s.sample_id, to_json(list({
    'position': c.position, 'tool': c.tool, 'provider': c.provider, 'parameters': c.parameters, 'key': c.key,
    'status': c.status, 'milliseconds': c.milliseconds, 'cached': c.cached
} order by c.position, c.number))
from sample s join tool_call c on c.kind = 'step' and c.owner_id = s.trajectory_id
where s.sample_id in (select unnest(?))
group by s.sample_id
"""
_GROUPED = """
with wanted as (
    select r.run_id, r.recipe, i.iteration, i.iteration_id
    from iteration i join run r using (run_id)
    where starts_with(i.iteration_id, $1) or starts_with(r.run_id, $1)
), found as (
    select iteration_id, s.instance_id, min(p.trajectory_id) as trajectory_id, 0 as step, 0 as number
    from wanted join selection s using (iteration_id) join planned_rollout p using (iteration_id, instance_id)
    semi join trajectory using (trajectory_id)
    where s.selected group by all
    union all
    select iteration_id, g.instance_id, arg_min(o.trajectory_id, (o.step, o.number, o.episode)),
        min((o.step, o.number))[1], min((o.step, o.number))[2]
    from wanted join rl_group g using (iteration_id) join rl_rollout o using (iteration_id, step, number)
    anti join selection s using (iteration_id)
    group by all
)
select run_id, recipe, iteration, iteration_id, instance_id, trajectory_id
from wanted join found using (iteration_id)
order by run_id, iteration, step, number, instance_id
"""
_DATASETS = """
select d.dataset_id, d.hash, d.counts, r.run_id, r.recipe, r.method, i.iteration, i.iteration_id
from dataset d join iteration i using (iteration_id) join run r using (run_id)
where starts_with(d.dataset_id, $1) or starts_with(i.iteration_id, $1) or starts_with(r.run_id, $1)
order by r.started_at, r.run_id, i.iteration, d.created_at
"""
_WHOLE = """
with wanted as (
    select distinct sample_id from dataset join dataset_row using (dataset_id) where iteration_id = $1
), broken as (
    select sample_id from message semi join wanted using (sample_id) anti join text using (text_id)
    union
    select sample_id from message_span semi join wanted using (sample_id) anti join text using (text_id)
), whole as (
    select sample_id from wanted semi join sample using (sample_id) semi join message using (sample_id)
    anti join broken using (sample_id)
)
select d.hash from dataset d join dataset_row w using (dataset_id) join whole using (sample_id)
where d.iteration_id = $1
group by d.dataset_id, d.hash, d.counts
having count(*) = coalesce((d.counts->>'$.rows')::bigint, count(*))
"""
