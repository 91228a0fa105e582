"""Trajectories, groups of episodes, search trees and the pairs taken from them, for display."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from agentr_core.recipes.et_agent import Counts
from agentr_core.store.database import Store
from agentr_core.types import Verdict

# Sequences of steps with their texts: of a trajectory, or of nodes of a tree.


class PathStep(NamedTuple):
    """A step of a trajectory or a tree. Fields that only nodes have are None for a trajectory's
    step.
    """

    position: int
    """From 0, also in the path of a tree."""
    node: int | None
    reply: str
    action: str
    valid: bool | None
    """None from a world that does not say which actions it accepts."""
    observation: str
    reward: float
    success: bool
    disaster: bool
    dropped: int | None
    """The number of exchanges that were left out of its prompt."""
    summary_of: int | None
    """How many first steps it sums up, if it is a summary."""
    tokens: int | None
    """Tokens of the reply."""
    finish_reason: str | None
    visits: int | None
    value: float | None
    advantage: float | None
    """The step's own advantage in group RL, if steps have one."""


class TrajectoryHead(NamedTuple):
    """All that is known about a trajectory except its steps."""

    trajectory_id: str
    source: str
    run_id: str | None
    iteration: int | None
    evaluation_id: str | None
    evaluation: str | None
    instance_id: str
    depth: int | None
    first_observation: str
    reward: float
    success: bool
    stop: str
    num_steps: int
    tree_id: str | None
    leaf: int | None
    group_iteration: str | None
    group_step: int | None
    group_number: int | None
    advantage: float | None
    relatives: int
    """The number of trajectories that it was made from, or that were made from it."""
    given: int
    """The number of its first steps that were recorded before: it goes on from them."""


class StoredToolCall(NamedTuple):
    """A call of a tool in a step."""

    position: int
    tool: str
    key: str
    status: str
    milliseconds: float
    cached: bool
    output: str


class FamilyMember(NamedTuple):
    """A member of a family; `parent_id` is None if it was made from no other."""

    child_id: str
    parent_id: str | None
    operator: str
    position: int | None
    reward: float
    success: bool
    stop: str
    num_steps: int


class SampledTokens(NamedTuple):
    """The tokens of a step as they were sampled; empty lists where the sampler returned none."""

    position: int
    token_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int | None


def trajectory_head(store: Store, trajectory_id: str) -> TrajectoryHead | None:
    """Return what is known about a trajectory; None if it is not stored."""
    return next((TrajectoryHead(*row) for row in store.rows(_TRAJECTORY_HEAD, trajectory_id)), None)


def trajectory_steps(store: Store, trajectory_id: str) -> list[PathStep]:
    """Return the steps of a trajectory in their order."""
    return [PathStep(*row) for row in store.rows(_STEPS_OF_A_TRAJECTORY, trajectory_id)]


def node_steps(store: Store, tree_id: str, nodes: Collection[int]) -> list[PathStep]:
    """Return the steps of some nodes of a tree, from the root down; a root has none."""
    return [PathStep(*row) for row in store.rows(_NODES_OF_A_PATH, tree_id, list(nodes))]


def tool_calls(store: Store, kind: str, owner_id: str) -> list[StoredToolCall]:
    """Return the tool calls in the steps of a trajectory (`step`) or the nodes of a tree (`node`),
    in order.
    """
    return [StoredToolCall(*row) for row in store.rows(_CALLS_OF_A_STEP, kind, owner_id)]


def sampled_tokens(store: Store, trajectory_id: str) -> list[SampledTokens]:
    """Return the tokens of each step of a trajectory, with their natural-log probabilities."""
    return [SampledTokens(*row) for row in store.rows(_SAMPLED, trajectory_id)]


def family_members(store: Store, trajectory_id: str) -> list[FamilyMember]:
    """Return a trajectory with all its ancestors and all their descendants: one row for each parent
    of a member, the oldest first.

    Empty if nothing was derived.
    """
    return [FamilyMember(*row) for row in store.rows(_FAMILY, trajectory_id)]


_TRAJECTORY_HEAD = """
select t.trajectory_id, t.source, i.run_id, i.iteration, t.evaluation_id, e.name, t.instance_id, n.depth,
    t.first_observation, t.reward, t.success, t.stop, t.num_steps, t.tree_id, t.leaf, r.iteration_id,
    r.step, r.number, r.advantage,
    (select count(*) from derivation d where $1 in (d.child_id, d.parent_id)), t.given
from trajectory t
join instance n using (instance_id)
left join evaluation e using (evaluation_id)
left join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)
left join rl_rollout r using (trajectory_id)
where t.trajectory_id = $1
"""
_STEPS_OF_A_TRAJECTORY = """
select s.position, null, s.reply, s.action, s.valid, s.observation, s.reward, s.success, s.disaster, s.dropped,
    s.summary_of, coalesce(s.asked.completion_tokens, nullif(len(s.token_ids), 0)), s.finish_reason, null, null,
    c.advantage
from step s left join rl_credit c on c.trajectory_id = $1 and c.position = s.position
where s.trajectory_id = $1
order by s.position
"""
# A root has no step. To ask for that itself would read all that a step holds: thrice the time.
_NODES_OF_A_PATH = """
select depth - 1, node_index, step.reply, step.action, step.valid, step.observation, step.reward, step.success,
    step.disaster, step.dropped, step.summary_of,
    coalesce(asked.completion_tokens, nullif(len(step.token_ids), 0)), step.finish_reason,
    visits, value_sum / nullif(visits, 0), null
from node
where tree_id = $1 and node_index in (select unnest($2::integer[])) and parent >= 0
order by depth, node_index
"""
_CALLS_OF_A_STEP = """
select c.position, c.tool, c.key, c.status, c.milliseconds, c.cached, c.output
from tool_call c
where c.kind = ? and c.owner_id = ? order by c.position, c.number
"""
_SAMPLED = """
select position, coalesce(token_ids, []), coalesce(logprobs, []), asked.prompt_tokens
from step where trajectory_id = ? order by position
"""
_FAMILY = """
with recursive up as (
    select $1::varchar as id
    union
    select d.parent_id from derivation d join up on d.child_id = up.id
),
down as (
    from up
    union
    select d.child_id from derivation d join down on d.parent_id = down.id
)
select t.trajectory_id, d.parent_id, coalesce(d.operator, t.source), d.position, t.reward, t.success, t.stop,
    t.num_steps
from down
join trajectory t on t.trajectory_id = down.id
left join derivation d on d.child_id = t.trajectory_id
where exists (from derivation where $1 in (child_id, parent_id))
order by t.created_at, t.trajectory_id, d.parent_id
"""


# Reinforcement learning on groups: what was sampled for an iteration, and how its steps went.


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
    loss: float | None
    """None, like `grad_norm`, if the step trained nothing."""
    learning_rate: float | None
    """None if another program trained it."""
    grad_norm: float | None
    compared_share: float | None
    """None, like what follows, where states are not known."""
    praised_unhelpful: float | None
    punished_helpful: float | None
    state_conflicts: float | None
    scorer_kl: float | None
    """None without a scorer."""


class Validation(NamedTuple):
    """The development set, played greedily after a step."""

    step: int
    episodes: int
    success: float
    reward: float


class GroupHead(NamedTuple):
    """One row of table rl_group with its run; see the comments of its columns. `is_expert_led`
    tells whether its first steps are the expert's.
    """

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
    is_expert_led: bool
    first_observation: str


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


def count_revisited_episodes(store: Store, iteration_id: str) -> int:
    """Return the number of failed episodes that groups of an iteration continued from one of their
    steps.
    """
    return store.count(
        "select count(distinct parent_id) from derivation where iteration_id = ? and operator = 'revision'",
        iteration_id,
    )


def group_counts(store: Store, iteration_id: str) -> GroupCounts:
    """Return the numbers of groups and episodes that an iteration sampled."""
    (counts,) = store.rows(_COUNTS, iteration_id) or [(0,) * 5]
    return GroupCounts(*counts)


def group_steps(store: Store, iteration_id: str) -> list[GroupStep]:
    """Return the steps of an iteration in their order."""
    return [GroupStep(*row) for row in store.rows(_RL_STEPS, iteration_id)]


def step_hashes(store: Store, iteration_id: str) -> dict[int, str]:
    """Return a hash of all that each finished step of an iteration sampled, by step: its groups
    with their episodes, replies and advantages, and its validation.

    Rows that are missing change it.
    """
    return dict(store.rows(_STEP_HASHES, iteration_id))


def validation_of(store: Store, iteration_id: str, step: int) -> Validation | None:
    """Return the validation after a step; None if there is none."""
    return next((validation for validation in validations(store, iteration_id) if validation.step == step), None)


def validations(store: Store, iteration_id: str) -> list[Validation]:
    """Return the validations of an iteration in the order of their steps."""
    return [Validation(*row) for row in store.rows(_VALIDATIONS, iteration_id)]


_GROUP = """
with member as (select trajectory_id from rl_rollout where (iteration_id, step, number) = ($1, $2, $3))
select g.iteration_id, i.run_id, i.iteration, g.step, g.number, g.instance_id, g.policy, g.reward, g.wins, g.contrast,
    g.prefix, exists (from member join derivation on child_id = trajectory_id where operator = 'continuation'),
    (select any_value(t.first_observation) from trajectory t semi join member using (trajectory_id))
from rl_group g join iteration i using (iteration_id)
where g.iteration_id = $1 and g.step = $2 and g.number = $3
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
_RL_STEPS = """
select step, reward, pass_at_1, pass_at_n, mixed_share, episode_tokens, cut_share,
    sampled_tokens / nullif(sampling_seconds, 0), entropy, sampler_kl, kl, clip_share, shaped, recovered,
    loss, learning_rate, grad_norm, compared_share, praised_unhelpful, punished_helpful, state_conflicts,
    scorer_kl
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
    select trajectory_id, sha256(string_agg(sha256(json_array(
        position, reply, action, observation, reward, terminated, success, disaster, asked.number, matched, valid,
        dropped, len(logprobs)
    )::varchar || token_ids::varchar), ' ' order by position)) as hash
    from step semi join wanted using (trajectory_id)
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
), score as (
    select trajectory_id, string_agg(json_array(position, len(logprobs))::varchar, ' ' order by position) as words
    from rl_score semi join wanted using (trajectory_id)
    group by all
), episode_of_step as (
    select step, part, number, episode, trajectory_id, sha256(json_array(
        about, t.instance_id, t.first_observation, t.reward, t.success, t.stop, t.num_steps, played.hash, origin.words,
        credit.words
    )::varchar || coalesce(score.words, '')) as hash
    from member
    left join trajectory t using (trajectory_id)
    left join played using (trajectory_id)
    left join origin using (trajectory_id)
    left join credit using (trajectory_id)
    left join score using (trajectory_id)
)
select step, sha256(coalesce(string_agg(
    concat_ws(' ', part, number, episode, trajectory_id, hash), ' ' order by part, number, episode, trajectory_id
), ''))
from rl_step left join episode_of_step using (step)
where iteration_id = $1
group by step
order by step
"""


# The trajectories that a flywheel made, by operator.


@dataclass(frozen=True, slots=True)
class OperatorCount:
    """The counts of what an operator made in an iteration; `fresh` stands for the trajectories
    before the first round.

    `cost` is the mean number of tool calls, or of steps, and `saved` the mean cost of the parents
    of right children minus that of these children; None if there are none. `samples` counts the
    trajectories that became samples.
    """

    operator: str
    children: int
    right: int
    cost: float
    saved: float | None
    samples: int


def operator_counts(store: Store, iteration_id: str, counts: Counts) -> list[OperatorCount]:
    """Return the counts of each operator, `fresh` first, then by name; `counts` says whether the
    cost of a trajectory is its number of steps or of tool calls.
    """
    return [OperatorCount(*row) for row in store.rows(_OPERATORS, iteration_id, counts)]


_OPERATORS = """
with member as (
    select trajectory_id, success,
        if($2 = 'steps', num_steps, coalesce(list_sum([len(step.tool_calls) for step in steps]), 0)) as cost
    from trajectory
    where iteration_id = $1 and source = 'flywheel'
)
select coalesce(d.operator, 'fresh') as made_by, count(*), count(*) filter (m.success), avg(m.cost),
    avg(p.cost - m.cost) filter (m.success),
    count(*) filter (m.trajectory_id in (select trajectory_id from sample where trajectory_id is not null))
from member m
left join derivation d on d.child_id = m.trajectory_id
left join member p on p.trajectory_id = d.parent_id
group by made_by
order by made_by <> 'fresh', made_by
"""


class StoredTreeHead(NamedTuple):
    """All that is known about a tree except its nodes."""

    tree_id: str
    run_id: str | None
    iteration: int | None
    instance_id: str
    depth: int | None
    seed: int
    dives: int
    finished: bool
    checkpoint_id: str
    first_observation: str


class TreeNode(NamedTuple):
    """A node without its texts; the root has no step."""

    number: int
    parent: int
    depth: int
    action: str | None
    visits: int
    value: float | None
    reward: float | None
    success: bool
    disaster: bool
    valid: bool
    stop: str | None
    duplicates: int
    """The number of sampled replies that it represents, its own included."""
    verdict: str | None
    text: str = ""
    """The beginnings of its reply and observation."""


class PairHead(NamedTuple):
    """A good and a bad path of a tree; positions count from 0."""

    pair_id: str
    run_id: str | None
    iteration: int | None
    tree_id: str
    instance_id: str
    first_observation: str
    good_leaf: int
    bad_leaf: int
    shared_steps: int
    good_reward: float
    bad_reward: float
    judged: bool
    first_error: int | None


class VerdictLine(NamedTuple):
    """The judge's verdict on a step of the bad path."""

    position: int
    verdict: str
    reply: str


class SampleOfPair(NamedTuple):
    """A sample that was spliced from a pair."""

    sample_id: str
    kind: str
    cut: int | None
    used: bool


def tree_head(store: Store, tree_id: str) -> StoredTreeHead | None:
    """Return what is known about a tree; None if it is not stored."""
    return next((StoredTreeHead(*row) for row in store.rows(_HEAD, tree_id)), None)


def tree_nodes(store: Store, tree_id: str) -> list[TreeNode]:
    """Return the nodes of a tree by number."""
    return [TreeNode(*row) for row in store.rows(_NODES, tree_id)]


def pairs_of_tree(store: Store, tree_id: str) -> list[tuple[str, int, int]]:
    """Return the pairs of a tree: their ids and the last nodes of the good and the bad path."""
    rows = store.rows("select pair_id, good_leaf, bad_leaf from pair where tree_id = ? order by position, 1", tree_id)
    return [(pair_id, good, bad) for pair_id, good, bad in rows]


def pair_head(store: Store, pair_id: str) -> PairHead | None:
    """Return a pair; None if it is not stored."""
    return next((PairHead(*row) for row in store.rows(_PAIR, pair_id)), None)


def verdicts_of_pair(store: Store, pair_id: str) -> list[VerdictLine]:
    """Return the judge's verdicts on the bad path of a pair, step by step."""
    return [VerdictLine(*row) for row in store.rows(_VERDICTS, pair_id)]


def oracle_verdicts(store: Store, tree_id: str) -> dict[int, str]:
    """Return the true verdicts on nodes of a tree, by number; empty where the world knows none."""
    return dict(store.rows("select node_index, verdict from oracle_verdict where tree_id = ?", tree_id))


def samples_of_pair(store: Store, pair_id: str) -> list[SampleOfPair]:
    """Return the samples that were made from a pair."""
    return [SampleOfPair(*row) for row in store.rows(_SAMPLES, pair_id)]


_HEAD = """
select t.tree_id, i.run_id, i.iteration, t.instance_id, n.depth, t.seed, t.dives_done, t.finished,
    t.checkpoint_id, t.first_observation
from tree t
join instance n using (instance_id)
left join iteration i using (iteration_id)
where t.tree_id = ?
"""
_NODES = """
select n.node_index, n.parent, n.depth, n.step.action, n.visits, n.value_sum / nullif(n.visits, 0), n.step.reward,
    coalesce(n.step.success, false), coalesce(n.step.disaster, false), coalesce(n.step.valid, true), n.stop,
    n.duplicates, j.verdict, coalesce(left(n.step.reply, 300) || chr(10) || left(n.step.observation, 200), '')
from node n
left join judgement j on j.tree_id = n.tree_id and j.node_index = n.node_index
where n.tree_id = ?
order by n.node_index
"""
_PAIR = """
select p.pair_id, i.run_id, i.iteration, p.tree_id, t.instance_id, t.first_observation, p.good_leaf, p.bad_leaf,
    p.shared_steps, p.good_reward, p.bad_reward, c.pair_id is not null, c.first_error
from pair p
join tree t using (tree_id)
left join iteration i on i.iteration_id = p.iteration_id
left join critique c using (pair_id)
where p.pair_id = ?
"""
_VERDICTS = """
select position, verdict, reply from verdict where pair_id = ? order by position
"""
_SAMPLES = """
select sample_id, kind, provenance.cut, exists (from dataset_row w where w.sample_id = s.sample_id)
from sample s where pair_id = ? order by created_at, sample_id
"""


# The judge's verdicts on the pairs of an iteration.


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """The judge's verdict on one step of the bad path of a pair."""

    pair_id: str
    tree_id: str
    bad_leaf: int
    """The last node of the path."""
    position: int
    """The number of the step in the path, from 0."""
    node: int
    verdict: Verdict


class PathAudit(NamedTuple):
    """The first error of a judged path according to judge, tree and oracle, each a position from 0,
    or None for none; one row of view v_critic_audit; see the comments of its columns.
    """

    depth: int | None
    judge_error: int | None
    tree_error: int | None
    oracle_error: int | None
    has_oracle: bool


class JudgedStep(NamedTuple):
    """A judged step and what the tree says about it; one row of view v_critic_steps."""

    verdict: Verdict
    value_drop: float | None
    """How much the value of the step's siblings exceeds its own; None if no sibling was visited."""


def path_audits(store: Store, iteration_id: str) -> list[PathAudit]:
    """Return the first errors of the judged paths of an iteration, according to each source."""
    return [PathAudit(*row) for row in store.rows(_AUDITS, iteration_id)]


def judged_steps(store: Store, iteration_id: str) -> list[JudgedStep]:
    """Return the judged steps of an iteration, each node once."""
    return [JudgedStep(Verdict(verdict), drop) for verdict, drop in store.rows(_CRITIC_STEPS, iteration_id)]


def verdict_counts(store: Store, iteration_id: str) -> dict[str, int]:
    """Return how many judged nodes of an iteration have each verdict.

    Pairs that share a bad path share its verdicts: each judged node counts once.
    """
    rows = store.rows(
        "select verdict, count(distinct (p.tree_id, v.node_index)) from verdict v join pair p using (pair_id) "
        "where p.iteration_id = ? group by verdict order by verdict",
        iteration_id,
    )
    return dict(rows)


def first_errors(store: Store, iteration_id: str) -> list[int | None]:
    """Return the position of the first error of each judged pair of an iteration, None if there is
    none.
    """
    rows = store.rows(
        "select c.first_error from critique c join pair p using (pair_id) where p.iteration_id = ?", iteration_id
    )
    return [first for (first,) in rows]


def revision_lengths(store: Store, iteration_id: str) -> dict[int, int]:
    """Return the number of revised pairs by how many unshared steps of the bad path they keep.

    With an error within the shared steps, none of these are kept.
    """
    return dict(store.rows(_LENGTHS, iteration_id))


def pair_verdicts(store: Store, iteration_id: str) -> list[PairVerdict]:
    """Return every verdict on the pairs of an iteration, sorted by pair and position."""
    return [
        PairVerdict(pair, tree, leaf, position, node, Verdict(verdict))
        for pair, tree, leaf, position, node, verdict in store.rows(_VERDICTS_OF_AN_ITERATION, iteration_id)
    ]


_LENGTHS = """
select greatest(0, c.first_error - p.shared_steps + 1) as length, count(*)
from critique c join pair p using (pair_id)
where p.iteration_id = $1 and c.first_error is not null
    and p.pair_id in (select pair_id from sample where iteration_id = $1 and kind = 'revision')
group by length
order by length
"""
_VERDICTS_OF_AN_ITERATION = """
select p.pair_id, p.tree_id, p.bad_leaf, v.position, v.node_index, v.verdict
from verdict v join pair p using (pair_id)
where p.iteration_id = ?
order by all
"""
_AUDITS = """
select depth, judge_error, tree_error, oracle_error, has_oracle
from v_critic_audit
where (run_id, iteration) = (select (run_id, iteration) from iteration where iteration_id = ?)
"""
_CRITIC_STEPS = """
select verdict, value_drop
from v_critic_steps
where (run_id, iteration) = (select (run_id, iteration) from iteration where iteration_id = ?)
"""


# The calls of tools that an iteration made.


@dataclass(frozen=True, slots=True)
class CallCount:
    """The calls of one tool in an iteration that ended with one status. `provider` is who answered:
    for Python, the level of the sandbox. `cached` is how many reused a stored answer, `seconds` the
    sum of their durations.
    """

    tool: str
    provider: str
    status: str
    calls: int
    cached: int
    seconds: float


def call_counts(store: Store, run_id: str, iteration: int) -> list[CallCount]:
    """Return the counts of an iteration's calls, by tool and provider, the commonest status
    first.
    """
    return [CallCount(*row) for row in store.rows(_CALLS, run_id, iteration)]


def providers_by_tool(store: Store, run_id: str) -> dict[str, str]:
    """Return who answered the calls of each tool in a run, by the tool's name: for Python, the
    levels of the sandbox.
    """
    return {tool: ", ".join(names) for tool, names in store.rows(_PROVIDERS, run_id)}


_PROVIDERS = """
select tool, list(distinct provider order by provider)
from v_tool_calls
where run_id = ? and provider is not null and provider <> ''
group by tool
order by tool
"""
_CALLS = """
select tool, provider, status, sum(calls)::bigint as made, sum(cached)::bigint, sum(seconds)
from v_tool_calls
where run_id = ? and iteration = ?
group by all
order by tool, provider, made desc, status
"""
