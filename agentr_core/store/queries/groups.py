"""Reinforcement learning on groups: what was sampled for an iteration, and how its steps went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """The numbers of groups and episodes that an iteration sampled."""

    groups: int
    mixed: int
    """Groups whose rewards differ: those that are trained on."""
    alike_with_wins: int
    """Groups whose rewards do not differ, with a success."""
    episodes: int
    trained_episodes: int


class GroupStep(NamedTuple):
    """One row of table rl_step; see the comments of its columns."""

    step: int
    reward: float
    pass_at_1: float
    pass_at_n: float
    mixed_share: float
    episode_tokens: float
    cut_share: float | None
    """None, like most of what follows, if another program trained."""
    tokens_per_second: float | None
    """None if its episodes were already in the store."""
    entropy: float | None
    """None, like the next fields, if the step trained nothing."""
    sampler_kl: float | None
    kl: float | None
    clip_share: float | None
    shaped: float | None
    """The mean worth of the episodes; None if that is their reward."""
    recovered: float | None
    """None if no episode continued a failed one."""


class Validation(NamedTuple):
    """The development set, played greedily after a step."""

    step: int
    episodes: int
    success: float
    reward: float


class GroupHead(NamedTuple):
    """One row of table rl_group with its run; see the comments of its columns."""

    iteration_id: str
    run_id: str
    iteration: int
    step: int
    number: int
    instance_id: str
    policy: str
    reward: float
    wins: int
    contrast: bool
    prefix: int


class GroupRollout(NamedTuple):
    """An episode of a group."""

    trajectory_id: str
    episode: int
    advantage: float
    reward: float
    success: bool
    stop: str
    num_steps: int


def group_head(store: Store, iteration_id: str, step: int, number: int) -> GroupHead | None:
    """Return a group of a step; None if it is not stored."""
    return next((GroupHead(*row) for row in store.rows(_GROUP, iteration_id, step, number)), None)


def group_rollouts(store: Store, iteration_id: str, step: int, number: int) -> list[GroupRollout]:
    """Return the episodes of a group in their order."""
    return [GroupRollout(*row) for row in store.rows(_ROLLOUTS, iteration_id, step, number)]


def group_counts(store: Store, iteration_id: str) -> GroupCounts:
    """Return the numbers of groups and episodes that an iteration sampled."""
    (counts,) = store.rows(_COUNTS, iteration_id) or [(0,) * 5]
    return GroupCounts(*counts)


def group_steps(store: Store, iteration_id: str) -> list[GroupStep]:
    """Return the steps of an iteration in their order."""
    return [GroupStep(*row) for row in store.rows(_STEPS, iteration_id)]


def step_hashes(store: Store, iteration_id: str) -> dict[int, str]:
    """Return a hash of all that each finished step of an iteration sampled, by step: its groups
    with their episodes, replies and advantages, and its validation.

    Rows that are missing change it, and so do texts that are missing.
    """
    return dict(store.rows(_STEP_HASHES, iteration_id))


def validation_of(store: Store, iteration_id: str, step: int) -> Validation | None:
    """Return the validation after a step; None if there is none."""
    return next((one for one in validations(store, iteration_id) if one.step == step), None)


def validations(store: Store, iteration_id: str) -> list[Validation]:
    """Return the validations of an iteration in the order of their steps."""
    return [Validation(*row) for row in store.rows(_VALIDATIONS, iteration_id)]


_GROUP = """
select g.iteration_id, i.run_id, i.iteration, g.step, g.number, g.instance_id, g.policy, g.reward, g.wins, g.contrast,
    g.prefix
from rl_group g join iteration i using (iteration_id)
where g.iteration_id = ? and g.step = ? and g.number = ?
"""
_ROLLOUTS = """
select r.trajectory_id, r.episode, r.advantage, t.reward, t.success, t.stop, t.num_steps
from rl_rollout r join trajectory t using (trajectory_id)
where r.iteration_id = ? and r.step = ? and r.number = ?
order by r.episode
"""
_VALIDATIONS = """
select v.step, count(*), avg(t.success::integer), avg(t.reward)
from rl_validation v
join trajectory t using (trajectory_id)
where v.iteration_id = ?
group by v.step
order by v.step
"""
_COUNTS = """
select count(*), count(*) filter (contrast), count(*) filter (not contrast and wins > 0),
    coalesce(sum(episodes), 0), coalesce(sum(episodes) filter (contrast), 0)
from rl_group
where iteration_id = ?
"""
_STEPS = """
select step, reward, pass_at_1, pass_at_n, mixed_share, episode_tokens, cut_share,
    sampled_tokens / nullif(sampling_seconds, 0), entropy, sampler_kl, kl, clip_share, shaped, recovered
from rl_step
where iteration_id = ?
order by step
"""
# Hashes of hashes, since one string of all tokens would not fit into memory. Log-probabilities are
# only counted: computed again, they differ in their last digits with what else is in the batch.
_STEP_HASHES = """
with member as (
    select step, 'group' as part, number, episode, trajectory_id,
        json_array(instance_id, policy, draw, prefix, episodes, advantage, shaped) as about
    from rl_group left join rl_rollout using (iteration_id, step, number)
    where iteration_id = $1
    union all
    select step, 'validation', null, null, trajectory_id, null from rl_validation where iteration_id = $1
), wanted as (
    select distinct trajectory_id from member
), played as (
    select trajectory_id, sha256(string_agg(json_array(
        position, r.text_id, action, o.text_id, reward, terminated, success, disaster, draw, matched, valid, dropped
    )::varchar, ' ' order by position)) as hash
    from step semi join wanted using (trajectory_id)
    left join text r on r.text_id = reply_id
    left join text o on o.text_id = observation_id
    group by all
), sampled as (
    select owner_id as trajectory_id, sha256(string_agg(
        sha256(json_array(position, draw, len(logprobs))::varchar || token_ids::varchar), ' '
        order by position, draw
    )) as hash
    from generation semi join wanted on owner_id = trajectory_id
    where kind = 'step'
    group by all
), origin as (
    select child_id as trajectory_id,
        string_agg(json_array(parent_id, operator, position)::varchar, ' ' order by parent_id) as words
    from derivation semi join wanted on child_id = trajectory_id
    group by all
), credit as (
    select trajectory_id, string_agg(json_array(position, advantage)::varchar, ' ' order by position) as words
    from rl_credit semi join wanted using (trajectory_id)
    group by all
), episode_of_step as (
    select step, part, number, episode, trajectory_id, sha256(json_array(
        about, t.instance_id, f.text_id, t.reward, t.success, t.stop, t.num_steps, played.hash, sampled.hash,
        origin.words, credit.words
    )::varchar) as hash
    from member
    left join trajectory t using (trajectory_id)
    left join text f on f.text_id = t.first_observation_id
    left join played using (trajectory_id)
    left join sampled using (trajectory_id)
    left join origin using (trajectory_id)
    left join credit using (trajectory_id)
)
select step, sha256(coalesce(string_agg(
    concat_ws(' ', part, number, episode, trajectory_id, hash), ' ' order by part, number, episode, trajectory_id
), ''))
from rl_step left join episode_of_step using (step)
where iteration_id = $1
group by step
order by step
"""
