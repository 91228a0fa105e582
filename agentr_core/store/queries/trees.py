"""Search trees and the pairs that were taken from them."""

from __future__ import annotations

from typing import NamedTuple

from agentr_core.store.database import Store


class TreeHead(NamedTuple):
    """What is known about a tree as a whole."""

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


def tree_head(store: Store, tree_id: str) -> TreeHead | None:
    """Return what is known about a tree; None if it is not stored."""
    return next((TreeHead(*row) for row in store.rows(_HEAD, tree_id)), None)


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


def samples_of_pair(store: Store, pair_id: str) -> list[SampleOfPair]:
    """Return the samples that were made from a pair."""
    return [SampleOfPair(*row) for row in store.rows(_SAMPLES, pair_id)]


_HEAD = """
select t.tree_id, i.run_id, i.iteration, t.instance_id, n.depth, t.seed, t.dives_done, t.finished,
    t.checkpoint_id, x.text
from tree t
join instance n using (instance_id)
join text x on x.text_id = t.first_observation_id
left join iteration i using (iteration_id)
where t.tree_id = ?
"""
_NODES = """
select n.node_index, n.parent, n.depth, n.action, n.visits, n.value_sum / nullif(n.visits, 0), n.reward,
    coalesce(n.success, false), coalesce(n.disaster, false), coalesce(n.valid, true), n.stop, n.duplicates, j.verdict
from node n
left join judgement j on j.tree_id = n.tree_id and j.node_index = n.node_index
where n.tree_id = ?
order by n.node_index
"""
_PAIR = """
select p.pair_id, i.run_id, i.iteration, p.tree_id, t.instance_id, x.text, p.good_leaf, p.bad_leaf, p.shared_steps,
    p.good_reward, p.bad_reward, c.pair_id is not null, c.first_error
from pair p
join tree t using (tree_id)
join text x on x.text_id = t.first_observation_id
left join iteration i on i.iteration_id = p.iteration_id
left join critique c using (pair_id)
where p.pair_id = ?
"""
_VERDICTS = """
select v.position, v.verdict, x.text from verdict v join text x on x.text_id = v.reply_id
where v.pair_id = ? order by v.position
"""
_SAMPLES = """
select sample_id, kind, cut, exists (from dataset_row w where w.sample_id = s.sample_id)
from sample s where pair_id = ? order by created_at, sample_id
"""
