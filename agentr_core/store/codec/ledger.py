"""Rows of the records about a run: what ran, what was rejected, what went wrong, what was measured;
and back.

Each function `*_rows` returns the rows of one unit, by table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal, NamedTuple

from agentr_core.episodes.units import UnitError
from agentr_core.fingerprint import canonical, fingerprint
from agentr_core.store.codec.trajectories import instance_row, load_trajectories
from agentr_core.store.database import Store, insert_rows
from agentr_core.store.tables import Alarm, Rows, load_records, row_of
from agentr_core.types import Instance, Rejection, Step, StopReason, Trajectory

Status = Literal["running", "evaluating", "collecting", "finished", "failed"]
"""`evaluating`: the run consists only of `agentr eval`, which is under way or was interrupted.
`collecting`: the run consists only of gathered episodes.
"""
TimingPart = Literal["generate", "environment", "train", "store", "other"]
PREFERENCE_MEASURES = ("chosen_logps", "rejected_logps", "chosen_rewards", "rejected_rewards", "reward_accuracy")
"""The measures of each step of preference training, as columns of table training_step."""


def run_rows(
    run_id: str,
    *,
    recipe: str,
    method: str,
    config: Any,
    versions: Mapping[str, str],
    workspace: str,
    status: Status = "running",
    started_at: datetime | None = None,
    finished_at: datetime | None = None,
) -> Rows:
    """Return the row of a run. `recipe` is the recipe's name, `config` the resolved recipe; times
    are timezone-aware.

    The order of the recipe's fields is kept. Stored again for the same run, only `config`, `status`
    and `finished_at` take effect: a run may continue with more iterations, or on other machines.
    """
    return {
        "run": [
            {
                "run_id": run_id,
                "recipe": recipe,
                "method": method,
                "config": json.dumps(config, ensure_ascii=False),
                "versions": canonical(dict(versions)),
                "workspace": workspace,
                "status": status,
                "started_at": (started_at or datetime.now(UTC)).astimezone(UTC).replace(tzinfo=None),
                "finished_at": None if finished_at is None else finished_at.astimezone(UTC).replace(tzinfo=None),
            }
        ]
    }


def run_start_time(store: Store, run_id: str) -> datetime | None:
    """Return when a run was first started, in UTC; None if it is not stored."""
    rows = store.rows("select started_at from run where run_id = ?", run_id)
    return next((as_utc(moment) for (moment,) in rows), None)


def as_utc(timestamp: datetime | None) -> datetime | None:
    """Return a stored time, which has no time zone, as a time in UTC; None for None."""
    return None if timestamp is None else timestamp.replace(tzinfo=UTC)


def iteration_rows(
    iteration_id: str,
    *,
    run_id: str,
    iteration: int,
    checkpoint_in: str | None = None,
    checkpoint_out: str | None = None,
    collected_by: str | None = None,
) -> Rows:
    """Return the row of an iteration that is running, counted from 1 (0: the evaluation of the
    base). Stored again, it is updated.
    """
    return {
        "iteration": [
            {
                "iteration_id": iteration_id,
                "run_id": run_id,
                "iteration": iteration,
                "checkpoint_in": checkpoint_in,
                "checkpoint_out": checkpoint_out,
                "status": "running",
                "finished_at": None,
            }
            | ({} if collected_by is None else {"collected_by": collected_by})
        ]
    }


def checkpoint_rows(
    checkpoint_id: str,
    *,
    path: str,
    weights_sha256: str,
    config: Any,
    parent_id: str | None = None,
    dataset_id: str | None = None,
    iteration_id: str | None = None,
) -> Rows:
    """Return the row of a checkpoint. The model a run starts from has no dataset or iteration, and
    a parent only where it is another run's checkpoint.
    """
    return {
        "checkpoint": [
            {
                "checkpoint_id": checkpoint_id,
                "parent_id": parent_id,
                "dataset_id": dataset_id,
                "iteration_id": iteration_id,
                "path": path,
                "weights_sha256": weights_sha256,
                "config": canonical(config),
            }
        ]
    }


def evaluation_rows(
    evaluation_id: str,
    *,
    iteration_id: str,
    checkpoint_id: str,
    name: str,
    split: str,
    config: Any,
    finished: bool = False,
) -> Rows:
    """Return the row of an evaluation; `name` is "revision_test" for recovery from failed prefixes,
    else free.
    """
    return {
        "evaluation": [
            {
                "evaluation_id": evaluation_id,
                "iteration_id": iteration_id,
                "checkpoint_id": checkpoint_id,
                "name": name,
                "split": split,
                "config": canonical(config),
                "finished": finished,
            }
        ]
    }


def rejection_rows(rejections: Iterable[Rejection], *, iteration_id: str) -> Rows:
    """Return the rows of the rejections of a filter."""
    return {"rejection": [row_of("rejection", rejection, iteration_id=iteration_id) for rejection in rejections]}


def metric_rows(
    scope: Literal["run", "iteration", "evaluation"],
    scope_id: str,
    name: str,
    value: float | None,
    *,
    low: float | None = None,
    high: float | None = None,
    n: int | None = None,
) -> Rows:
    """Return the row of a metric with its 95% interval; stored again, it is replaced."""
    return {
        "metric": [
            {"scope": scope, "scope_id": scope_id, "name": name, "value": value, "low": low, "high": high, "n": n}
        ]
    }


def event_rows(error: UnitError, *, run_id: str, iteration_id: str, stage: str) -> Rows:
    """Return the row of a failed attempt: an error if it was the last one, otherwise a warning."""
    return {
        "event": [
            {
                "event_id": fingerprint(run_id, iteration_id, stage, error, time.time_ns()),
                "run_id": run_id,
                "iteration_id": iteration_id,
                "stage": stage,
                "level": "error" if error.is_final else "warning",
                "class": error.kind,
                "phase": error.phase,
                "subject": error.key,
                "message": error.message,
                "traceback": error.traceback,
            }
        ]
    }


def load_alarms(store: Store, iteration_id: str) -> list[Alarm]:
    """Return the alarms of an iteration, the earliest first."""
    with store.reading() as con:
        rows = load_records(con, "alarm", "iteration_id = ? order by created_at, name", (iteration_id,))
    return [alarm for (alarm,) in rows]


def timing_rows(
    iteration_id: str, stage: str, seconds_by_part: Mapping[TimingPart, float], *, tokens: int | None = None
) -> Rows:
    """Return a row for each part of one attempt at a stage, in seconds; `tokens` were generated or,
    where nothing was, trained in it.
    """
    timestamp = datetime.now(UTC).isoformat()
    token_part = "generate" if "generate" in seconds_by_part else "train"
    return {
        "timing": [
            {
                "timing_id": fingerprint(iteration_id, stage, part, timestamp),
                "iteration_id": iteration_id,
                "stage": stage,
                "part": part,
                "seconds": float(seconds),
                "tokens": tokens if part == token_part else None,
            }
            for part, seconds in seconds_by_part.items()
        ]
    }


def training_step_rows(
    checkpoint_id: str,
    step: int,
    *,
    loss: float,
    trained_tokens: int,
    seconds: float,
    preference_measures: Mapping[str, float],
    learning_rate: float | None = None,
    grad_norm: float | None = None,
) -> Rows:
    """Return the row of an optimizer step. `preference_measures` are those of preference training
    by column; none otherwise.
    """
    return {
        "training_step": [
            {
                "checkpoint_id": checkpoint_id,
                "step": step,
                "loss": loss,
                "trained_tokens": trained_tokens,
                "seconds": seconds,
                **{name: preference_measures.get(name) for name in PREFERENCE_MEASURES},
                "learning_rate": learning_rate,
                "grad_norm": grad_norm,
            }
        ]
    }


# Groups of episodes, and the steps of reinforcement learning on them, to rows and back.

VALIDATION = "validation"
"""Source of the trajectories that a policy plays on the development set between its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one instance in a step, by the ids of their trajectories, in order.

    `number` counts the groups of the step from 0; `draw` is how often groups without contrast had
    been redrawn when this one was drawn; `policy` names the policy that sampled it. `prefix` is the
    number of given steps in each episode: the beginning of a failed one, or of the expert's if the
    group is `is_expert_led`. `given` overrides this number for single episodes, by id, such as
    branches of others. `shaped_rewards` is the shaped reward of each episode, None if training uses
    the plain one. `step_advantages` has the advantage of each step of each episode, None if all
    steps have that of their episode.
    """

    number: int
    draw: int
    policy: str
    instance: Instance
    prefix: int = 0
    is_expert_led: bool = False
    episodes: Mapping[str, Trajectory]
    shaped_rewards: tuple[float, ...] | None = None
    given: Mapping[str, int] = field(default_factory=dict)
    step_advantages: tuple[tuple[float, ...], ...] | None = None

    @property
    def num_given_steps(self) -> list[int]:
        """How many of the first steps of each episode were not sampled for it."""
        return [self.given.get(key, self.prefix) for key in self.episodes]

    @property
    def sampled_steps(self) -> list[tuple[Step, ...]]:
        """The sampled steps of each episode, without those that it was given."""
        counts = zip(self.episodes.values(), self.num_given_steps, strict=True)
        return [episode.steps[count:] for episode, count in counts]

    @property
    def compared_rewards(self) -> tuple[float, ...]:
        """The reward of each episode that is compared within the group: `shaped_rewards`, if it has
        any.
        """
        return self.rewards if self.shaped_rewards is None else self.shaped_rewards

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each episode."""
        return tuple(episode.reward for episode in self.episodes.values())

    @property
    def num_wins(self) -> int:
        """The number of episodes that succeeded."""
        return sum(episode.success for episode in self.episodes.values())


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The result of an instance in a step or a search: the mean reward of `episodes` episodes, but
    where all earned the same 1, or 0 if that was nothing: the chance of contrast is read from it.
    `origin` is the id of the instance it is a variant of, or its own.
    """

    origin: str
    episodes: int
    reward: float


def group_rows(
    group: Group,
    advantages: Sequence[float],
    *,
    iteration_id: str,
    step: int,
    has_contrast: bool,
) -> Rows:
    """Return the rows of a group, of the place and advantage of each of its episodes, and of its
    credit.

    Args:
        advantages: the advantage of each episode, in order.
        has_contrast: whether the group is trained on.
    """
    group_key = {"iteration_id": iteration_id, "step": step, "number": group.number}
    return {
        "instance": [instance_row(group.instance)],
        "rl_group": [
            {
                **group_key,
                "instance_id": group.instance.key,
                "policy": group.policy,
                "draw": group.draw,
                "prefix": group.prefix,
                "episodes": len(group.episodes),
                "reward": fmean(group.rewards),
                "wins": group.num_wins,
                "contrast": has_contrast,
            }
        ],
        "rl_rollout": [
            {"trajectory_id": key, **group_key, "episode": episode, "advantage": advantage, "shaped": shaped_reward}
            for episode, (key, advantage, shaped_reward) in enumerate(
                zip(group.episodes, advantages, group.shaped_rewards or [None] * len(group.episodes), strict=True)
            )
        ],
        "rl_credit": [
            {"trajectory_id": key, "position": position, "advantage": advantage}
            for key, values in zip(group.episodes, group.step_advantages or [()] * len(group.episodes), strict=True)
            for position, advantage in enumerate(values)
        ],
    }


def scorer_logprob_rows(scores: Mapping[str, Mapping[int, Sequence[float]]]) -> Rows:
    """Return the rows of a scorer's log-probabilities of sampled tokens, given by trajectory id and
    position of the step.
    """
    return {
        "rl_score": [
            {"trajectory_id": key, "position": position, "logprobs": list(logprobs)}
            for key, logprobs_by_position in scores.items()
            for position, logprobs in logprobs_by_position.items()
        ]
    }


def load_scorer_logprobs(store: Store, trajectory_ids: Sequence[str]) -> dict[str, dict[int, tuple[float, ...]]]:
    """Return the scorer's stored log-probabilities of sampled tokens, by trajectory id and position
    of the step.
    """
    scores: dict[str, dict[int, tuple[float, ...]]] = {}
    for key, position, logprobs in store.rows(_SCORES, list(trajectory_ids)):
        scores.setdefault(key, {})[position] = tuple(logprobs)
    return scores


_SCORES = """
select trajectory_id, position, logprobs from rl_score where list_contains($1::varchar[], trajectory_id)
order by trajectory_id, position
"""


def validation_rows(iteration_id: str, step: int, trajectory_ids: Sequence[str]) -> Rows:
    """Return the rows of a validation after a step: its episodes, of source `VALIDATION`."""
    return {
        "rl_validation": [{"trajectory_id": key, "iteration_id": iteration_id, "step": step} for key in trajectory_ids]
    }


def rl_step_rows(iteration_id: str, step: int, measures: Mapping[str, float | None]) -> Rows:
    """Return the row of a step; `measures` has the other columns."""
    return {"rl_step": [{"iteration_id": iteration_id, "step": step, **measures}]}


def load_groups(store: Store, iteration_id: str, step: int) -> list[Group]:
    """Return the groups of a step in their order; none before all of them are stored, with all
    their episodes.
    """
    rows = store.rows(
        "select g.number, g.draw, g.policy, g.prefix, g.episodes, r.trajectory_id, r.shaped, d.position, d.operator, "
        "(select list(c.advantage order by c.position) from rl_credit c where c.trajectory_id = r.trajectory_id) "
        "from rl_group g left join rl_rollout r using (iteration_id, step, number) "
        "left join derivation d on d.child_id = r.trajectory_id where g.iteration_id = ? and g.step = ? "
        "order by g.number, r.episode",
        iteration_id,
        step,
    )
    trajectories = load_trajectories(store, [row[5] for row in rows if row[5] is not None])
    groups = []
    for (number, draw, policy, prefix, num_episodes), members in groupby(rows, key=itemgetter(0, 1, 2, 3, 4)):
        *_, trajectory_ids, shaped_rewards, given_counts, operators, step_advantages = zip(*members, strict=True)
        if len(trajectories.keys() & {*trajectory_ids}) != num_episodes:
            return []
        episodes = {key: trajectories[key] for key in trajectory_ids}
        groups.append(
            Group(
                number=number,
                draw=draw,
                policy=policy,
                prefix=prefix,
                is_expert_led="continuation" in operators,
                instance=episodes[trajectory_ids[0]].instance,
                episodes=episodes,
                shaped_rewards=None if None in shaped_rewards else shaped_rewards,
                step_advantages=tuple(tuple(advantages or ()) for advantages in step_advantages)
                if any(step_advantages)
                else None,
                given={
                    key: steps for key, steps in zip(trajectory_ids, given_counts, strict=True) if steps is not None
                },
            )
        )
    return groups


def load_group_outcomes(store: Store, iteration_id: str, *, last_step: int) -> list[GroupOutcome]:
    """Return the results of instances so far, the earliest first: from finished searches and groups
    of the run's earlier iterations, and from this iteration's groups up to step `last_step`. Groups
    that continued another episode do not count, nor do paths that continued the expert's first
    steps.
    """
    return [GroupOutcome(*row) for row in store.rows(_OUTCOMES, iteration_id, last_step)]


def load_failed_ids(store: Store, iteration_id: str, *, last_step: int) -> dict[str, list[str]]:
    """Return ids of failed trajectories of at least two steps, by the key of their instance: those
    in the instance's latest group that has any. Groups of the run's earlier iterations count, and
    of this one's up to step `last_step`, if their episodes began at the initial state.
    """
    failures: dict[str, list[str]] = {}
    for instance_id, trajectory_id in store.rows(_FAILURES, iteration_id, last_step):
        failures.setdefault(instance_id, []).append(trajectory_id)
    return failures


class StoredStep(NamedTuple):
    """A stored step, as an edge of a graph of states."""

    instance_id: str
    state_key: str | None
    action: str
    next_state_key: str | None
    """None at an end of an episode or of a path."""
    previous_observation: str
    """The last observation before the step."""
    observation: str
    stop: StopReason | None
    """Why an episode or path ends with the step; None if it goes on."""
    reward: float
    """The final reward of the episode, as it was trained, or, for a step of a search, the reward
    after the step.
    """


def load_steps(store: Store, iteration_id: str, instance_ids: Sequence[str], *, last_step: int) -> list[StoredStep]:
    """Return the steps that a run stored on some instances: in the searches and groups of its
    earlier iterations, and in this iteration's groups up to step `last_step`.
    """
    steps = [StoredStep(*row) for row in store.rows(_STEPS, iteration_id, last_step, list(instance_ids))]
    return [step._replace(stop=StopReason(step.stop)) if step.stop else step for step in steps]


class RecordIds(NamedTuple):
    """The ids of the whole episodes, and of the searches, that a run stored on an instance."""

    trajectories: list[str]
    trees: list[str]


def load_record_ids(
    store: Store, iteration_id: str, instance_ids: Sequence[str], *, last_step: int
) -> dict[str, RecordIds]:
    """Return the ids of what a run stored on some instances, by instance: the episodes (the
    expert's too) and finished searches of its earlier iterations, and this iteration's groups up to
    step `last_step`.
    """
    records: dict[str, RecordIds] = {}
    for instance_id, trajectories, trees in store.rows(_RECORDS, iteration_id, last_step, list(instance_ids)):
        records[instance_id] = RecordIds(trajectories or [], trees or [])
    return records


def find_rl_step(store: Store, trajectory_id: str) -> tuple[str, int] | None:
    """Return the iteration and the step of group RL that an episode was sampled for, if any."""
    rows = store.rows("select iteration_id, step from rl_rollout where trajectory_id = ?", trajectory_id)
    return rows[0] if rows else None


def load_group_members(store: Store, trajectory_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the ids of the trajectories in the same group as each given one, itself included, in
    the order of the group.
    """
    members_by_id: dict[str, list[str]] = {}
    for trajectory_id, member_id in store.rows(_COMPANIONS, list(trajectory_ids)):
        members_by_id.setdefault(trajectory_id, []).append(member_id)
    return members_by_id


_COMPANIONS = """
select o.trajectory_id, m.trajectory_id from rl_rollout o join rl_rollout m using (iteration_id, step, number)
where o.trajectory_id in (select unnest(?::varchar[])) order by o.trajectory_id, m.episode
"""
_EARLIER_ITERATIONS = """
with recursive earlier as (
    select before.iteration_id, before.iteration from iteration now
    join iteration before on before.run_id = now.run_id and before.iteration < now.iteration
    where now.iteration_id = $1
), group_of_run as (
    select * from rl_group join earlier using (iteration_id) where prefix = 0
    union all by name
    select null as iteration, * from rl_group where iteration_id = $1 and step <= $2 and prefix = 0
)
"""
_FAILURES = f"""
{_EARLIER_ITERATIONS}
select g.instance_id, trajectory_id
from group_of_run g join rl_rollout using (iteration_id, step, number) join trajectory t using (trajectory_id)
where not t.success and t.num_steps >= 2
qualify dense_rank() over (partition by g.instance_id order by g.iteration desc nulls first, step desc) = 1
order by g.instance_id, episode
"""
_OUTCOMES = f"""
{_EARLIER_ITERATIONS}, led as (
    select tree_id, node_index from node join tree using (tree_id) join earlier using (iteration_id)
    where duplicates = 0
    union
    select node.tree_id, node.node_index from node
    join led on node.tree_id = led.tree_id and node.parent = led.node_index
), outcome as (
    select iteration, step, number, instance_id, episodes, if(contrast, reward, (reward > 0)::double) as reward
    from group_of_run
    union all
    select iteration, 0, 0, instance_id, count(*),
        if(max(node.step.reward) > min(node.step.reward), avg(node.step.reward), (max(node.step.reward) > 0)::double)
    from tree join earlier using (iteration_id) join node using (tree_id) anti join led using (tree_id, node_index)
    where tree.finished and node.stop is not null group by all
)
select coalesce(i.origin_id, i.instance_id), o.episodes, o.reward from outcome o join instance i using (instance_id)
order by o.iteration nulls last, o.step, o.number, o.instance_id
"""
_RECORDS = f"""
{_EARLIER_ITERATIONS}, stored as (
    select t.instance_id, t.trajectory_id, null as tree_id from trajectory t join earlier using (iteration_id)
    where t.tree_id is null and t.evaluation_id is null and t.source not in ('bare', 'ungraded')
    union all
    select t.instance_id, t.trajectory_id, null from rl_rollout r join trajectory t using (trajectory_id)
    where r.iteration_id = $1 and r.step <= $2
    union all
    select tree.instance_id, null, tree_id from tree join earlier using (iteration_id) where tree.finished
)
select instance_id, list(trajectory_id order by trajectory_id) filter (trajectory_id is not null),
    list(tree_id order by tree_id) filter (tree_id is not null)
from stored where list_contains($3::varchar[], instance_id) group by instance_id order by instance_id
"""
_STEPS = f"""
{_EARLIER_ITERATIONS}, rollout as (
    select r.trajectory_id, r.shaped from rl_rollout r
    join rl_group g using (iteration_id, step, number)
    where list_contains($3::varchar[], g.instance_id)
        and ((r.iteration_id = $1 and r.step <= $2) or r.iteration_id in (select iteration_id from earlier))
), played as (
    select t.instance_id, t.trajectory_id, s.position, s.state_key, s.action,
        lead(s.state_key) over path as next_state_key,
        coalesce(lag(s.observation) over path, t.first_observation) as before, s.observation,
        if(s.position = t.num_steps - 1, t.stop, null) as stop, coalesce(rollout.shaped, t.reward) as reward
    from rollout join trajectory t using (trajectory_id) join step s using (trajectory_id)
    window path as (partition by s.trajectory_id order by s.position)
), searched as (
    select tree.instance_id, child.tree_id, child.node_index, child.step.state_key as state_key,
        child.step.action as action,
        (select min(n.step.state_key) from node n where n.tree_id = child.tree_id and n.parent = child.node_index)
            as next_state_key,
        coalesce(parent.step.observation, tree.first_observation) as before, child.step.observation as observation,
        child.stop as stop, child.step.reward as reward
    from tree join earlier using (iteration_id) join node child using (tree_id)
    join node parent on parent.tree_id = child.tree_id and parent.node_index = child.parent
    where list_contains($3::varchar[], tree.instance_id)
)
select instance_id, state_key, action, next_state_key, before, observation, stop, reward from (
    select *, trajectory_id as owner from played
    union all by name
    select *, tree_id as owner, node_index as position from searched
)
order by instance_id, owner, position
"""


# The output of a stage in an iteration, stored in place of that of an earlier pass.


def replace_stage_output(
    store: Store, rows: Rows, *, iteration_id: str, stage: str, sample_kinds: Collection[str]
) -> None:
    """Store all samples, preferences and rejections that a stage made in an iteration, and remove
    those that an earlier pass of the stage made and this one did not, unless a dataset has them.

    A second pass may see other episodes: some failed at first, or were not begun.

    Args:
        sample_kinds: the kinds of the samples, which no other stage of the iteration makes.

    Raises:
        StoreBusy, CorruptStore, StoreError: as `Store.transaction`; then nothing has changed.
    """
    old_params = {"iteration_id": iteration_id, "kinds": list(sample_kinds)}
    new_ids = {name: [row[f"{name}_id"] for row in rows.get(name, ())] for name in ("sample", "preference")}
    rejections = rows.get("rejection", ())
    with store.transaction() as con:
        insert_rows(con, rows)
        con.execute(_REMOVE_PREFERENCES, {**old_params, "made": new_ids["preference"]})
        con.execute(_REMOVE_SAMPLES, {**old_params, "made": new_ids["sample"]})
        con.execute(
            _REMOVE_REJECTIONS,
            {
                "iteration_id": iteration_id,
                "stage": stage,
                "subjects": [row["subject"] for row in rejections],
                "reasons": [row["reason"] for row in rejections],
            },
        )


_OLD_SAMPLES = """
select sample_id from sample
where iteration_id = $iteration_id and list_contains($kinds::varchar[], kind)
    and sample_id not in (select sample_id from dataset_row)
"""
_REMOVE_PREFERENCES = f"""
delete from preference
where iteration_id = $iteration_id and preference_id not in (select unnest($made::varchar[]))
    and chosen_sample_id in ({_OLD_SAMPLES})
"""
_REMOVE_SAMPLES = f"""
delete from sample
where sample_id in ({_OLD_SAMPLES}) and sample_id not in (select unnest($made::varchar[]))
"""
_REMOVE_REJECTIONS = """
delete from rejection
where iteration_id = $iteration_id and stage = $stage
    and (subject, reason) not in (select unnest($subjects::varchar[]), unnest($reasons::varchar[]))
"""
