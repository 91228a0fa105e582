"""Search trees to rows and back; a half-grown tree resumes from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from agentr_core.fingerprint import canonical
from agentr_core.store.codec.calls import call_rows, grade_rows, load_calls
from agentr_core.store.codec.generations import TOKENS_ONLY, Draw, draw_row, has_tokens, step_tokens
from agentr_core.store.codec.steps import COLUMNS, read_step, step_columns
from agentr_core.store.codec.texts import instance_row, text_id, text_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import Row, Rows, merge
from agentr_core.types import Generation, Grading, Instance, Node, StopReason, Tree


class NodeDraw(Protocol):
    """One sampled reply, and the node that represents it."""

    @property
    def node(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def generation(self) -> Generation: ...


class Growth(Protocol):
    """The changes that one expansion made to a tree, such as
    `agentr_core.search.tree.Expansion`.
    """

    @property
    def created(self) -> Sequence[Node]: ...
    @property
    def changed(self) -> Sequence[Node]: ...
    @property
    def draws(self) -> Sequence[NodeDraw]: ...
    @property
    def gradings(self) -> Sequence[tuple[int, Grading]]: ...
    @property
    def dives_done(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeHead:
    """The facts about a tree that do not change while it grows. `checkpoint_id` is the policy that
    searches, `config` plain data.

    `writer` marks the process that stores the rows; rows of another process are refused.
    """

    tree_id: str
    iteration_id: str
    checkpoint_id: str
    config: Any
    instance: Instance
    first_observation: str
    seed: int
    writer: str | None = None


def claim_trees(store: Store, tree_ids: Sequence[str], writer: str) -> None:
    """Make `writer` the only process that may grow those of the trees that are stored; from then
    on, rows of an earlier writer are refused.
    """
    with store.transaction() as con:
        con.execute("update tree set writer = ? where tree_id in (select unnest(?))", [writer, list(tree_ids)])


def tree_rows(head: TreeHead, tree: Tree) -> Rows:
    """Return the rows of a whole tree, such as one that is only a root; they are one unit."""
    return merge(
        [
            {"instance": [instance_row(head.instance)], "text": text_rows([head.first_observation])},
            {"tree": [_tree_row(head, tree.dives_done, finished=False)]},
            _node_rows(head.tree_id, tree.nodes, (), drawn=()),
        ]
    )


def growth_rows(head: TreeHead, growth: Growth) -> Rows:
    """Return the rows of one expansion: new nodes with all sampled replies, and nodes whose
    statistics changed.

    They are one unit. If they are stored after each expansion, a loaded tree is as it was after
    some expansion, whenever the process was killed. The tree itself, with its root, must have been
    stored before (`tree_rows`).
    """
    return merge(
        [
            {"tree": [_tree_row(head, growth.dives_done, finished=False)]},
            _node_rows(head.tree_id, growth.created, growth.changed, drawn=growth.draws),
            *(grade_rows("node", head.tree_id, node, grading) for node, grading in growth.gradings),
        ]
    )


def finished_rows(head: TreeHead, tree: Tree) -> Rows:
    """Return the row that marks a tree as finished; its nodes must have been stored before."""
    return {"tree": [_tree_row(head, tree.dives_done, finished=True)]}


def load_trees(store: Store, tree_ids: Sequence[str]) -> dict[str, Tree]:
    """Return those of the trees that are stored, finished or not, by id in the order given."""
    if not store.path.exists():
        return {}
    with store.reading() as con:
        heads = con.execute(_TREES, [list(tree_ids)]).fetchall()
        records = con.execute(_NODES, [list(tree_ids)]).fetchall()
        calls = load_calls(con, "node", list(tree_ids))
    nodes = {
        tree_id: tuple(_node(record, calls) for record in group)
        for tree_id, group in groupby(records, key=itemgetter(0))
    }
    trees = {
        tree_id: Tree(
            instance=Instance(environment=environment, split=split, index=index),
            first_observation=first_observation,
            nodes=nodes.get(tree_id, ()),
            dives_done=dives_done,
            seed=seed,
        )
        for tree_id, environment, split, index, first_observation, dives_done, seed in heads
    }
    return {tree_id: trees[tree_id] for tree_id in tree_ids if tree_id in trees}


def unfinished_trees(store: Store, tree_ids: Sequence[str]) -> list[str]:
    """Return the ids of the trees whose search is not finished, or not begun, in their order."""
    rows = store.rows("select tree_id from tree where finished and tree_id in (select unnest(?))", list(tree_ids))
    finished = {tree_id for (tree_id,) in rows}
    return [tree_id for tree_id in tree_ids if tree_id not in finished]


def finished_trees(store: Store, iteration_id: str, checkpoint_id: str) -> list[str]:
    """Return the ids of the finished trees that a policy grew in an iteration, by instance."""
    rows = store.rows(
        "select t.tree_id from tree t join instance i using (instance_id) "
        "where t.finished and t.iteration_id = ? and t.checkpoint_id = ? "
        "order by i.environment, i.split, i.instance_index, t.tree_id",
        iteration_id,
        checkpoint_id,
    )
    return [tree_id for (tree_id,) in rows]


def finished_trees_of_run(store: Store, run_id: str) -> list[str]:
    """Return the ids of the finished trees of a run, sorted."""
    rows = store.rows(
        "select t.tree_id from tree t join iteration i using (iteration_id) "
        "where i.run_id = ? and t.finished order by t.tree_id",
        run_id,
    )
    return [tree_id for (tree_id,) in rows]


def stored_trees(store: Store, tree_ids: Sequence[str]) -> frozenset[str]:
    """Return the ids among `tree_ids` of stored trees, finished or not."""
    rows = store.rows("select tree_id from tree where tree_id in (select unnest(?))", list(tree_ids))
    return frozenset(tree_id for (tree_id,) in rows)


def _tree_row(head: TreeHead, dives_done: int, *, finished: bool) -> Row:
    return {
        "tree_id": head.tree_id,
        "iteration_id": head.iteration_id,
        "instance_id": head.instance.key,
        "checkpoint_id": head.checkpoint_id,
        "seed": head.seed,
        "config": canonical(head.config),
        "first_observation_id": text_id(head.first_observation),
        "dives_done": dives_done,
        "finished": finished,
        "writer": head.writer,
    }


def _node_rows(tree_id: str, created: Sequence[Node], changed: Sequence[Node], *, drawn: Sequence[NodeDraw]) -> Rows:
    # The step of a node that was merged from siblings is made from the first of them.
    made_of: dict[int, int] = {}
    for draw in drawn:
        made_of.setdefault(draw.node, draw.number)
    steps = [(node.index, node.step) for node in created if node.step is not None]
    rows = {
        "text": text_rows(
            [
                *(text for _, step in steps for text in (step.reply, step.observation)),
                *(draw.generation.text for draw in drawn),
            ]
        ),
        "node": [_node_row(tree_id, node, made_of.get(node.index)) for node in (*changed, *created)],
        "generation": [
            *(
                draw_row(
                    "node", tree_id, draw.node, Draw(seed=draw.seed, number=draw.number, generation=draw.generation)
                )
                for draw in drawn
            ),
            *(
                row
                for index, step in steps
                if index not in made_of
                for row in step_tokens("node", tree_id, index, step)
            ),
        ],
    }
    return merge([rows, call_rows("node", tree_id, steps)])


def _node_row(tree_id: str, node: Node, draw: int | None) -> Row:
    step = node.step
    if draw is None and step is not None and has_tokens(step):
        draw = TOKENS_ONLY
    return {
        "tree_id": tree_id,
        "node_index": node.index,
        "parent": node.parent,
        "depth": node.depth,
        **step_columns(step),
        "visits": node.visits,
        "value_sum": float(node.value_sum),
        "terminal": node.terminal,
        "stop": None if node.stop is None else str(node.stop),
        "dive": node.dive,
        "duplicates": node.duplicates,
        "draw": draw,
    }


def _node(record: tuple[Any, ...], calls: Mapping[tuple[str, int], Mapping[str, Any]]) -> Node:
    tree_id, index, parent, depth, visits, value_sum, terminal, stop, dive, duplicates, *step = record
    return Node(
        index=index,
        parent=parent,
        depth=depth,
        step=None if step[0] is None else read_step(step, calls.get((tree_id, index), {})),
        visits=visits,
        value_sum=value_sum,
        terminal=terminal,
        stop=None if stop is None else StopReason(stop),
        dive=dive,
        duplicates=duplicates,
    )


_TREES = """
select t.tree_id, i.environment, i.split, i.instance_index, o.text, t.dives_done, t.seed
from tree t
join instance i using (instance_id)
join text o on o.text_id = t.first_observation_id
where t.tree_id in (select unnest(?))
"""
_NODES = f"""
select s.tree_id, s.node_index, s.parent, s.depth, s.visits, s.value_sum, s.terminal, s.stop, s.dive, s.duplicates,
    {COLUMNS}
from node s
left join text r on r.text_id = s.reply_id
left join text o on o.text_id = s.observation_id
left join generation g on g.kind = 'node' and g.owner_id = s.tree_id and g.position = s.node_index and g.draw = s.draw
where s.tree_id in (select unnest(?))
order by s.tree_id, s.node_index
"""
