"""Datasets and the samples in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from agentr_core.store.database import Store
from agentr_core.store.queries.runs import GATHERED_SOURCES

# Evaluations, how far they are, and their metrics.


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """One evaluation of the checkpoint that an iteration made (0: the base model)."""

    evaluation_id: str
    iteration: int
    name: str
    split: str


@dataclass(frozen=True, slots=True)
class StoredMetric:
    """One number with its 95% interval; `low` and `high` are None where it has none."""

    name: str
    value: float
    low: float | None
    high: float | None
    n: int


def finished_evaluations(store: Store, run_id: str, *, after: int) -> list[StoredEvaluation]:
    """Return the finished evaluations of a run's iterations after a given one."""
    return _finished_evaluations(store, "i.run_id = ? and i.iteration > ?", run_id, after)


def evaluations_of_checkpoint(store: Store, checkpoint_id: str) -> list[StoredEvaluation]:
    """Return the finished evaluations of a checkpoint."""
    return _finished_evaluations(store, "e.checkpoint_id = ?", checkpoint_id)


def _finished_evaluations(store: Store, condition: str, *params: str | int) -> list[StoredEvaluation]:
    rows = store.rows(
        "select e.evaluation_id, i.iteration, e.name, e.split from evaluation e join iteration i using (iteration_id) "
        f"where {condition} and e.finished order by i.iteration, e.name",
        *params,
    )
    return [StoredEvaluation(*row) for row in rows]


def is_finished(store: Store, evaluation_id: str) -> bool:
    """Return whether an evaluation is marked as finished: all its episodes have ended, and its
    measures are stored.
    """
    return bool(store.count("select count(*) from evaluation where evaluation_id = ? and finished", evaluation_id))


def unfinished_evaluations(store: Store, evaluation_ids: Sequence[str]) -> dict[str, int]:
    """Return the number of stored episodes of each of the given evaluations that has begun and is
    not finished, by evaluation id.
    """
    rows = store.rows(
        "select e.evaluation_id, count(p.evaluation_id) from evaluation e left join episode p using (evaluation_id) "
        "where e.evaluation_id in (select unnest(?)) and not e.finished group by all",
        list(evaluation_ids),
    )
    return {key: int(episodes) for key, episodes in rows}


def evaluation_metrics(store: Store, evaluation_id: str) -> list[StoredMetric]:
    """Return the metrics of a finished evaluation; none while it is not finished."""
    rows = store.rows(
        "select m.name, m.value, m.low, m.high, m.n from metric m join evaluation e on e.evaluation_id = m.scope_id "
        "where m.scope = 'evaluation' and e.evaluation_id = ? and e.finished",
        evaluation_id,
    )
    return [StoredMetric(*row) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDataset:
    """The content hash and the composition of a dataset."""

    hash: str
    counts: dict[str, Any]


class SampleHead(NamedTuple):
    """All that is known about a sample except its messages; `used`: whether a dataset has it."""

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


def calls_by_sample(store: Store, sample_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the tool calls in the trajectories that samples are made from, in order, by sample id;
    samples without any are left out.
    """
    return {key: json.loads(calls) for key, calls in store.rows(_CALLS, list(sample_ids))}


class RlInstance(NamedTuple):
    """An instance that an iteration of reinforcement learning chose or played, and one of its
    rollouts.
    """

    run_id: str
    recipe: str
    iteration: int
    iteration_id: str
    instance_id: str
    trajectory_id: str


def find_rl_instances(store: Store, prefix: str) -> list[RlInstance]:
    """Return the instances that iterations of reinforcement learning train on, each once per
    iteration, in the order of iterations, where the id of the iteration or its run begins with a
    prefix.

    They are those that the iteration's selection chose, in the order of their ids; of an iteration
    without a selection, those of its groups, in the order of their first groups.
    """
    return [RlInstance(*row) for row in store.rows(_GROUPED, prefix)]


def rl_step_numbers(store: Store, iteration_id: str) -> list[int]:
    """Return the numbers of the steps of reinforcement learning of an iteration, sorted."""
    rows = store.rows("select distinct step from rl_group where iteration_id = ? order by step", iteration_id)
    return [step for (step,) in rows]


def find_datasets(store: Store, prefix: str) -> list[DatasetHead]:
    """Return the datasets whose own id, or that of their iteration or run, begins with a prefix, in
    the order of their iterations.
    """
    return [DatasetHead(*row) for row in store.rows(_DATASETS, prefix)]


def stored_dataset(store: Store, dataset_id: str) -> StoredDataset | None:
    """Return the hash and the counts of a dataset; None if it is not stored."""
    rows = store.rows("select hash, counts from dataset where dataset_id = ?", dataset_id)
    return _dataset(rows)


def dataset_of_iteration(store: Store, iteration_id: str) -> StoredDataset | None:
    """Return the dataset of an iteration, the last one if it has several; None if it has none."""
    rows = store.rows(
        "select hash, counts from dataset where iteration_id = ? order by created_at desc limit 1", iteration_id
    )
    return _dataset(rows)


def complete_dataset_hashes(store: Store, iteration_id: str) -> list[str]:
    """Return the hashes of those datasets of an iteration that have all their rows in the store,
    with their samples.
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


def run_that_made(store: Store, kind: str, key: str) -> tuple[str, datetime] | None:
    """Return the run that made a stored `sample` or `trajectory`, and when it started; None if it
    is not known.
    """
    rows = store.rows(
        "select r.run_id, r.started_at from (select 'sample' as kind, sample_id as id, iteration_id from sample "
        "union all select 'trajectory', trajectory_id, iteration_id from trajectory) "
        "join iteration using (iteration_id) join run r using (run_id) where kind = ? and id = ?",
        *(kind, key),
    )
    return next(((run_id, start_time.replace(tzinfo=UTC)) for run_id, start_time in rows), None)


def _dataset(rows: Iterable[tuple[Any, ...]]) -> StoredDataset | None:
    return next((StoredDataset(hash=digest, counts=json.loads(counts)) for digest, counts in rows), None)


_HEADS = """
select s.sample_id, i.run_id, i.iteration, s.kind, s.instance_id, s.pair_id, s.trajectory_id, s.tree_id,
    s.provenance.good_leaf, s.provenance.bad_leaf, s.provenance.cut, s.provenance.good_reward,
    s.provenance.bad_reward, s.num_tokens, s.num_trained_tokens,
    exists (from dataset_row w where w.sample_id = s.sample_id)
from sample s left join iteration i using (iteration_id)
where s.sample_id in (select unnest(?))
"""
_CALLS = """
select s.sample_id, to_json(list({
    'position': c.position, 'tool': c.tool, 'provider': c.provider, 'parameters': c.parameters::json, 'key': c.key,
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
), whole as (
    select sample_id from sample semi join wanted using (sample_id) where len(messages) > 0
)
select d.hash from dataset d join dataset_row w using (dataset_id) join whole using (sample_id)
where d.iteration_id = $1
group by d.dataset_id, d.hash, d.counts
having count(*) = coalesce((d.counts->>'$.rows')::bigint, count(*))
"""


# The counts of each stage of data construction: how many items passed, and how many were rejected
# and why.


@dataclass(frozen=True, slots=True)
class TreeCounts:
    """The counts of what an iteration that grows trees made; `led` are trees with steps of the
    expert, `paths` those that ended.
    """

    trees: int
    led: int
    paths: int
    pairs: int
    critiques: int
    spliced: int
    verified: int


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """The number of episodes of one source that an iteration has, and of successes among them."""

    played: int
    solved: int


def tree_counts(store: Store, iteration_id: str) -> TreeCounts | None:
    """Return the counts of what an iteration made from its trees; None before it has begun."""
    rows = store.rows(
        "select trees, led, leaves, pairs, critiques, spliced, verified from v_funnel f, (select "
        "count(distinct tree_id) filter (n.duplicates = 0) as led from node n join tree t using (tree_id) "
        "where t.iteration_id = $1) where f.iteration_id = $1",
        iteration_id,
    )
    return next((TreeCounts(*row) for row in rows), None)


def episode_counts(store: Store, iteration_id: str, source: str) -> EpisodeCounts:
    """Return how many episodes of a source an iteration has."""
    (counts,) = store.rows(
        "select count(*), count(*) filter (success) from trajectory where iteration_id = ? and source = ?",
        iteration_id,
        source,
    ) or [(0, 0)]
    return EpisodeCounts(*counts)


def episodes_by_source(store: Store, iteration_id: str) -> dict[str, int]:
    """Return the number of trajectories of an iteration by source, sorted by source."""
    return dict(
        store.rows(
            "select source, count(*) from trajectory where iteration_id = ? group by source order by source",
            iteration_id,
        )
    )


def count_preferences(store: Store, iteration_id: str) -> int:
    """Return how many preference pairs an iteration made."""
    return store.count("select count(*) from preference where iteration_id = ?", iteration_id)


def count_samples(store: Store, iteration_id: str) -> int:
    """Return how many samples an iteration made."""
    return store.count("select count(*) from sample where iteration_id = ?", iteration_id)


def count_revised_pairs(store: Store, iteration_id: str) -> int:
    """Return how many pairs of an iteration became revision samples."""
    return store.count(
        "select count(distinct pair_id) from sample where iteration_id = ? and kind = 'revision'", iteration_id
    )


def count_continuations(store: Store, iteration_id: str) -> tuple[int, int]:
    """Return how many episodes continued bad paths in an iteration, and how many succeeded."""
    query = "select count(*) from trajectory where iteration_id = ? and source = 'rollout'"
    return store.count(query, iteration_id), store.count(f"{query} and success", iteration_id)


def count_trained_rows(store: Store, iteration_id: str) -> int:
    """Return how many rows the dataset of an iteration has."""
    return store.count(
        "select count(*) from dataset d join dataset_row using (dataset_id) where d.iteration_id = ?",
        iteration_id,
    )


def rejection_counts(store: Store, iteration_id: str) -> dict[str, dict[str, int]]:
    """Return the number of rejections in an iteration by stage and reason, the most frequent reason
    first.
    """
    counts: dict[str, dict[str, int]] = {}
    for stage, reason, count in store.rows(
        "select stage, reason, count(*) from rejection where iteration_id = ? "
        "group by all order by count(*) desc, reason",
        iteration_id,
    ):
        counts.setdefault(stage, {})[reason] = count
    return counts


# Preference pairs of an iteration, and how training on them went.


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceCounts:
    """The numbers of pairs that an iteration made, by what made the difference and by their
    margin.
    """

    kinds: dict[str, int]
    """The most frequent first."""
    margins: dict[float, int]
    """By the lower end of the tenth that contains the margin of reward; pairs without rewards are
    left out.
    """
    cut: int
    """Pairs whose rejected side was cut."""


@dataclass(frozen=True, slots=True)
class PreferenceTrainingStep:
    """One optimizer step of preference training: means over its pairs."""

    step: int
    loss: float
    reward_accuracy: float
    chosen_logps: float
    rejected_logps: float
    chosen_rewards: float
    rejected_rewards: float


class CurvePoint(NamedTuple):
    """An optimizer step of a training; None stands for what was not measured."""

    step: int
    loss: float
    learning_rate: float | None
    grad_norm: float | None


class PreferenceHead(NamedTuple):
    """A pair of samples, of which one is preferred."""

    preference_id: str
    run_id: str | None
    iteration: int | None
    kind: str
    instance_id: str | None
    chosen_sample_id: str
    rejected_sample_id: str
    chosen_reward: float | None
    rejected_reward: float | None
    margin: float | None
    dropped_steps: int | None


def preference_head(store: Store, preference_id: str) -> PreferenceHead | None:
    """Return a preference; None if it is not stored."""
    return next((PreferenceHead(*row) for row in store.rows(_HEAD, preference_id)), None)


def preference_counts(store: Store, iteration_id: str) -> PreferenceCounts:
    """Return the counts of the pairs of an iteration."""
    kinds = store.rows(
        "select kind, count(*) from preference where iteration_id = ? group by kind order by count(*) desc, kind",
        iteration_id,
    )
    # A margin of 1 belongs to the last tenth.
    margins = store.rows(
        "select least(floor(margin * 10 + 1e-6), 9) / 10 as low, count(*) from preference "
        "where iteration_id = ? and margin is not null group by low order by low",
        iteration_id,
    )
    cut = store.count("select count(*) from preference where iteration_id = ? and dropped_steps > 0", iteration_id)
    return PreferenceCounts(kinds=dict(kinds), margins=dict(margins), cut=cut)


def preference_training_steps(store: Store, iteration_id: str) -> list[PreferenceTrainingStep]:
    """Return the steps of an iteration's preference training in their order; none for any other
    training.
    """
    return [PreferenceTrainingStep(*row) for row in store.rows(_STEPS, iteration_id)]


def training_curve(store: Store, iteration_id: str) -> list[CurvePoint]:
    """Return the optimizer steps of an iteration's training in order. Of more than 1,500 only some:
    the steps are divided into about 300 parts, and of each part the first step and those with the
    lowest and highest loss and gradient norm are returned.
    """
    return [CurvePoint(*row) for row in store.rows(_CURVE, iteration_id)]


_CURVE = """
with done as (
    select t.step, t.loss, t.learning_rate, t.grad_norm, t.step * 300 // max(t.step) over () as part
    from iteration i join training_step t on t.checkpoint_id = i.checkpoint_out
    where i.iteration_id = ? and i.iteration > 0
), shown as (
    select unnest([
        min(step), arg_min(step, loss), arg_max(step, loss), arg_min(step, grad_norm), arg_max(step, grad_norm)
    ]) as step
    from done group by part
)
select step, loss, learning_rate, grad_norm from done
where step in (from shown) or (select count(*) from done) <= 1500
order by step
"""
_HEAD = """
select p.preference_id, i.run_id, i.iteration, p.kind, p.instance_id, p.chosen_sample_id, p.rejected_sample_id,
    p.chosen_reward, p.rejected_reward, p.margin, p.dropped_steps
from preference p left join iteration i using (iteration_id)
where p.preference_id = ?
"""
_STEPS = """
select t.step, t.loss, t.reward_accuracy, t.chosen_logps, t.rejected_logps, t.chosen_rewards, t.rejected_rewards
from iteration i join training_step t on t.checkpoint_id = i.checkpoint_out
where i.iteration_id = ? and t.reward_accuracy is not null
order by t.step
"""


# How episodes ended: why they stopped, what was refused, and which were lost to errors.


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """The number of errors of one class in one phase, and of the units that such an error ended for
    good; a unit counts once, however often it was retried.
    """

    error: str
    phase: str
    count: int
    lost: int


@dataclass(frozen=True, slots=True)
class InstanceTraits:
    """The stored difficulty class of an instance, and the key of the instance it is a variant of,
    or its own.
    """

    depth: int | None
    origin: str


def collected_stop_counts(store: Store, iteration_id: str) -> dict[str, int]:
    """Return how many paths of trees and rollouts of an iteration ended for each reason."""
    return dict(store.rows(_COLLECTED, iteration_id))


def evaluated_stop_counts(store: Store, evaluation_ids: Sequence[str]) -> dict[str, int]:
    """Return how many episodes of the given evaluations ended for each reason; only finished
    evaluations count.
    """
    rows = store.rows(
        "select t.stop, count(*) from episode e join trajectory t using (trajectory_id) "
        "join evaluation v on v.evaluation_id = e.evaluation_id "
        "where e.evaluation_id in (select unnest(?)) and v.finished group by t.stop",
        list(evaluation_ids),
    )
    return dict(rows)


def error_counts(store: Store, iteration_id: str) -> list[ErrorCount]:
    """Return the errors of an iteration by class and phase."""
    rows = store.rows(
        "select \"class\", phase, count(*), count(distinct subject) filter (level = 'error') from event "
        "where iteration_id = ? group by all order by all",
        iteration_id,
    )
    return [ErrorCount(*row) for row in rows]


def failed_subjects(store: Store, iteration_id: str, stage: str) -> list[str]:
    """Return the names of the subjects that had an error in a stage of an iteration."""
    rows = store.rows("select distinct subject from event where iteration_id = ? and stage = ?", iteration_id, stage)
    return [subject for (subject,) in rows]


def refusal_counts(store: Store, iteration_id: str, *, limit: int) -> dict[str, int]:
    """Return the number of collected actions that the environment refused, by the first three words
    of its observation (without a tag before them); only the `limit` most frequent, in this order.
    """
    return dict(store.rows(_REFUSED, iteration_id, limit))


def rejected_subjects(store: Store, *, stage: str, reason: str, prefix: str) -> list[str]:
    """Return the subjects of the rejections of a stage for a reason, sorted, if they begin with a
    prefix.
    """
    rows = store.rows(
        "select subject from rejection where stage = ? and reason = ? and starts_with(subject, ?) order by subject",
        stage,
        reason,
        prefix,
    )
    return [subject for (subject,) in rows]


def instance_traits(store: Store, keys: Sequence[str]) -> dict[str, InstanceTraits]:
    """Return the stored traits of instances, by their key."""
    rows = store.rows(
        "select instance_id, depth, coalesce(origin_id, instance_id) from instance "
        "where instance_id in (select unnest(?))",
        list(keys),
    )
    return {key: InstanceTraits(*traits) for key, *traits in rows}


_COLLECTED = f"""
select stop, count(*) from (
    select n.stop from node n join tree t using (tree_id) where t.iteration_id = $1 and n.stop is not null
    union all
    select stop from trajectory where iteration_id = $1 and source in {GATHERED_SOURCES}
)
group by stop
"""
_REFUSED = f"""
with refused as (
    select n.step.observation as said from node n join tree t using (tree_id)
    where t.iteration_id = $1 and not n.step.valid
    union all
    select s.observation from step s join trajectory t using (trajectory_id)
    where t.iteration_id = $1 and t.source in {GATHERED_SOURCES} and not s.valid
)
select array_to_string(regexp_extract_all(regexp_replace(said, '^\\s*<\\w+>', ''), '\\S+')[1:3], ' ') as opening,
    count(*)
from refused
group by opening
order by count(*) desc, opening
limit $2
"""


# The states from which the revision test of a run continues.


@dataclass(frozen=True, slots=True)
class RevisionState:
    """The first `cut` steps of a failed episode, which is number `repeat` of its instance."""

    trajectory_id: str
    repeat: int
    cut: int


def revision_states(store: Store, run_id: str) -> list[RevisionState]:
    """Return the states of a run's revision test in their order; none before they are chosen."""
    rows = store.rows(
        "select trajectory_id, repeat, cut from revision_state where run_id = ? order by position", run_id
    )
    return [RevisionState(*row) for row in rows]
