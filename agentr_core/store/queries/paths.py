"""Sequences of steps with their texts: of a trajectory, or of nodes of a tree."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from agentr_core.store.database import Store


class PathStep(NamedTuple):
    """A step of a trajectory or a tree. Fields that only nodes have are None for a trajectory's
    step.
    """

    position: int
    """From 0, also in the path of a tree."""
    node: int | None
    reply: str
    action: str
    valid: bool
    observation: str
    reward: float
    success: bool
    disaster: bool
    dropped: int | None
    """Exchanges that were left out of its prompt."""
    tokens: int | None
    """Tokens of the reply."""
    finish_reason: str | None
    visits: int | None
    value: float | None
    advantage: float | None
    """The step's own advantage in group RL, if steps have one."""


class TrajectoryHead(NamedTuple):
    """What is known about a trajectory as a whole."""

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
    """The steps at its beginning that it took over from the trajectory that it goes on from."""


class ToolCall(NamedTuple):
    """A call of a tool in a step."""

    position: int
    tool: str
    key: str
    status: str
    milliseconds: float
    cached: bool
    output: str


class Derivation(NamedTuple):
    """A member of a family; `parent_id` is None if it was made from no other."""

    child_id: str
    parent_id: str | None
    operator: str
    position: int | None
    reward: float
    success: bool
    stop: str
    num_steps: int


def trajectory_head(store: Store, trajectory_id: str) -> TrajectoryHead | None:
    """Return what is known about a trajectory; None if it is not stored."""
    return next((TrajectoryHead(*row) for row in store.rows(_HEAD, trajectory_id)), None)


def trajectory_steps(store: Store, trajectory_id: str) -> list[PathStep]:
    """Return the steps of a trajectory in their order."""
    return [PathStep(*row) for row in store.rows(_STEPS, trajectory_id)]


def node_steps(store: Store, tree_id: str, nodes: Collection[int]) -> list[PathStep]:
    """Return the steps of some nodes of a tree, from the root down; a root has none."""
    return [PathStep(*row) for row in store.rows(_NODES, tree_id, list(nodes))]


def tool_calls(store: Store, kind: str, owner_id: str) -> list[ToolCall]:
    """Return the tool calls in the steps of a trajectory (`step`) or the nodes of a tree (`node`),
    in order.
    """
    return [ToolCall(*row) for row in store.rows(_CALLS, kind, owner_id)]


def family(store: Store, trajectory_id: str) -> list[Derivation]:
    """Return a trajectory with all its ancestors and all their descendants: one row for each parent
    of a member, the oldest first.

    Empty if nothing was derived.
    """
    return [Derivation(*row) for row in store.rows(_FAMILY, trajectory_id)]


_HEAD = """
select t.trajectory_id, t.source, i.run_id, i.iteration, t.evaluation_id, e.name, t.instance_id, n.depth, x.text,
    t.reward, t.success, t.stop, t.num_steps, t.tree_id, t.leaf, r.iteration_id, r.step, r.number, r.advantage,
    (select count(*) from derivation d where $1 in (d.child_id, d.parent_id)),
    (select coalesce(max(d.position), 0) from derivation d where d.child_id = $1)
from trajectory t
join instance n using (instance_id)
join text x on x.text_id = t.first_observation_id
left join evaluation e using (evaluation_id)
left join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)
left join rl_rollout r using (trajectory_id)
where t.trajectory_id = $1
"""
_STEPS = """
with mine as (from step where trajectory_id = $1),
drawn as (from generation where kind = 'step' and owner_id = $1),
texts as (
    select text_id, text from text
    where text_id in (select reply_id from mine union all select observation_id from mine)
)
select s.position, null, r.text, s.action, s.valid, o.text, s.reward, s.success, s.disaster, s.dropped,
    g.completion_tokens, g.finish_reason, null, null, c.advantage
from mine s
join texts r on r.text_id = s.reply_id
join texts o on o.text_id = s.observation_id
left join drawn g on g.position = s.position and g.draw = s.draw
left join rl_credit c on c.trajectory_id = $1 and c.position = s.position
order by s.position
"""
_NODES = """
with mine as materialized (
    from node where tree_id = $1 and node_index in (select unnest($2::integer[])) and reply_id is not null
),
drawn as materialized (from generation where kind = 'node' and owner_id = $1),
texts as materialized (
    select text_id, text from text
    where text_id in (select reply_id from mine union all select observation_id from mine)
)
select n.depth - 1, n.node_index, r.text, n.action, n.valid, o.text, n.reward, n.success, n.disaster, n.dropped,
    g.completion_tokens, g.finish_reason, n.visits, n.value_sum / nullif(n.visits, 0), null
from mine n
join texts r on r.text_id = n.reply_id
join texts o on o.text_id = n.observation_id
left join drawn g on g.position = n.node_index and g.draw = n.draw
order by n.depth, n.node_index
"""
_CALLS = """
select c.position, c.tool, c.key, c.status, c.milliseconds, c.cached, x.text
from tool_call c join text x on x.text_id = c.output_id
where c.kind = ? and c.owner_id = ? order by c.position, c.number
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
