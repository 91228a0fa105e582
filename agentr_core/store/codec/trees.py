"""Search trees to rows and back; a half-grown tree resumes from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from agentr_core.fingerprint import canonical
from agentr_core.store.codec.trajectories import (
    COLUMNS,
    TOKENS_ONLY,
    Draw,
    call_rows,
    draw_row,
    grade_rows,
    has_tokens,
    instance_row,
    load_calls,
    load_draws,
    read_step,
    step_columns,
    step_tokens,
    text_id,
    text_rows,
)
from agentr_core.store.database import Store
from agentr_core.store.tables import Row, Rows, merge
from agentr_core.types import (
    Critique,
    Generation,
    Grading,
    Instance,
    Judgement,
    Node,
    PathPair,
    StepVerdict,
    StopReason,
    Tree,
    Verdict,
)

# Pairs of paths and what the judge said about them, to rows and back.


def pair_rows(pair_id: str, pair: PathPair, *, iteration_id: str, position: int = 0) -> Rows:
    """Return the row of table `pair`. The paths themselves follow from the tree, which is stored
    with all its nodes.

    Args:
        position: its place among the pairs of its tree, from 0.
    """
    good, bad = pair.good.trajectory.reward, pair.bad.trajectory.reward
    return {
        "pair": [
            {
                "pair_id": pair_id,
                "iteration_id": iteration_id,
                "tree_id": pair.good.tree_id,
                "good_leaf": pair.good.leaf,
                "bad_leaf": pair.bad.leaf,
                "shared_steps": pair.split,
                "good_reward": float(good),
                "bad_reward": float(bad),
                "gap": float(good - bad),
                "position": position,
            }
        ]
    }


@dataclass(frozen=True, slots=True)
class StoredPair:
    """A good and a bad path of a tree, each by the index of its last node."""

    tree_id: str
    good_leaf: int
    bad_leaf: int
    shared_steps: int
    """Steps that both have in common from the root."""


def load_pairs(store: Store, iteration_id: str) -> dict[str, list[StoredPair]]:
    """Return the pairs of an iteration by tree, in the order in which they were made."""
    pairs: dict[str, list[StoredPair]] = {}
    for row in store.rows(
        "select tree_id, good_leaf, bad_leaf, shared_steps from pair where iteration_id = ? order by tree_id, position",
        iteration_id,
    ):
        made = StoredPair(*row)
        pairs.setdefault(made.tree_id, []).append(made)
    return pairs


def judgement_rows(tree_id: str, judgement: Judgement, *, iteration_id: str) -> Rows:
    """Return the rows of a judgement with the judge's replies; they are one unit."""
    draws = [
        Draw(seed=judgement.seed, number=number, generation=generation)
        for number, generation in enumerate(judgement.generations)
    ]
    return {
        "text": text_rows(generation.text for generation in judgement.generations),
        "judgement": [
            {
                "tree_id": tree_id,
                "node_index": judgement.node,
                "iteration_id": iteration_id,
                "verdict": str(judgement.verdict),
                "votes": [str(vote) for vote in judgement.votes],
                "dropped_steps": judgement.dropped_steps,
            }
        ],
        "generation": [draw_row("judgement", tree_id, judgement.node, draw) for draw in draws],
    }


def load_judgements(store: Store, tree_ids: Sequence[str]) -> dict[str, dict[int, Judgement]]:
    """Return the stored judgements by tree and node."""
    records = store.rows(
        "select tree_id, node_index, verdict, votes, dropped_steps from judgement "
        "where tree_id in (select unnest(?)) order by tree_id, node_index",
        list(tree_ids),
    )
    draws = load_draws(store, "judgement", tree_ids)
    judgements: dict[str, dict[int, Judgement]] = {}
    for tree_id, node, verdict, votes, dropped_steps in records:
        replies = draws.get(tree_id, {}).get(node, ())
        judgements.setdefault(tree_id, {})[node] = Judgement(
            node=node,
            seed=replies[0].seed if replies else 0,
            dropped_steps=dropped_steps,
            verdict=Verdict(verdict),
            votes=tuple(map(Verdict, votes)),
            generations=tuple(reply.generation for reply in replies),
        )
    return judgements


def oracle_rows(tree_id: str, truth: Mapping[int, Verdict]) -> Rows:
    """Return the rows of the true verdicts on nodes of a tree, by their indices."""
    return {
        "oracle_verdict": [
            {"tree_id": tree_id, "node_index": node, "verdict": str(verdict)} for node, verdict in truth.items()
        ]
    }


def load_oracle(store: Store, tree_ids: Sequence[str]) -> dict[tuple[str, int], Verdict]:
    """Return the stored true verdicts by tree and node."""
    rows = store.rows(
        "select tree_id, node_index, verdict from oracle_verdict where tree_id in (select unnest(?))", list(tree_ids)
    )
    return {(tree_id, node): Verdict(verdict) for tree_id, node, verdict in rows}


def critique_rows(
    pair_id: str,
    critique: Critique,
    *,
    iteration_id: str,
    nodes: Sequence[int] = (),
) -> Rows:
    """Return the rows of a finished critique; they are one unit.

    Args:
        nodes: indices of the bad path's nodes, so that `nodes[position]` is the judged node.
    """
    return {
        "text": text_rows(verdict.reply for verdict in critique.verdicts),
        "critique": [{"pair_id": pair_id, "iteration_id": iteration_id, "first_error": critique.first_error}],
        "verdict": [
            {
                "pair_id": pair_id,
                "position": verdict.position,
                "verdict": str(verdict.verdict),
                "reply_id": text_id(verdict.reply),
                "node_index": nodes[verdict.position] if verdict.position < len(nodes) else None,
            }
            for verdict in critique.verdicts
        ],
    }


def load_critiques(store: Store, pair_ids: Sequence[str]) -> dict[str, Critique]:
    """Return the stored critiques of pairs, by pair id in the order given."""
    if not store.path.exists():
        return {}
    with store.reading() as con:
        first_errors = dict(
            con.execute(
                "select pair_id, first_error from critique where pair_id in (select unnest(?))", [list(pair_ids)]
            ).fetchall()
        )
        records = con.execute(
            "select v.pair_id, v.position, v.verdict, t.text from verdict v join text t on t.text_id = v.reply_id "
            "where v.pair_id in (select unnest(?)) order by v.pair_id, v.position",
            [list(pair_ids)],
        ).fetchall()
    verdicts = {
        pair_id: tuple(
            StepVerdict(position=position, verdict=Verdict(verdict), reply=reply)
            for _, position, verdict, reply in group
        )
        for pair_id, group in groupby(records, key=itemgetter(0))
    }
    return {
        pair_id: Critique(verdicts=verdicts.get(pair_id, ()), first_error=first_errors[pair_id])
        for pair_id in pair_ids
        if pair_id in first_errors
    }


# Trees, judgements and rollouts of other runs, copied with all their rows under ids of this
# run.

OF_DATASETS = "dataset"
"""The stage whose input is the contents of the general data; no reply depends on them."""
OF_FILES = "files"
"""What stands as a stage for the contents of all files that a run reads."""


def stage_input_rows(run_id: str, inputs: Mapping[str, str]) -> Rows:
    """Return a row for each stage of a run, with the hash of the inputs that determine what it
    makes.
    """
    return {
        "stage_input": [{"run_id": run_id, "stage": stage, "input_id": input_id} for stage, input_id in inputs.items()]
    }


def known_input(store: Store, run_id: str, stage: str) -> str | None:
    """Return the hash of the inputs of a stage as a run stored it; None if it stored none."""
    rows = store.rows("select input_id from stage_input where run_id = ? and stage = ?", run_id, stage)
    return next((key for (key,) in rows), None)


def runs_alike(store: Store, run_id: str, stage: str) -> list[str]:
    """Return the other runs with the same inputs of a stage, the oldest first."""
    return [run for (run,) in store.rows(_ALIKE, run_id, stage)]


def copy_trees(store: Store, originals: Mapping[str, str], *, iteration_id: str) -> list[str]:
    """Copy finished trees as trees of an iteration; return the ids of the copies.

    A tree that is already stored under its new id, finished or not, is left as it is.

    Args:
        originals: the id of the tree to copy, by the id of its copy.
    """
    with store.transaction() as con:
        rows = con.execute(_TREES_TO_COPY, [list(originals), list(originals.values())]).fetchall()
        new, old = [key for key, _ in rows], [key for _, key in rows]
        con.execute(_COPY_TREE, [new, old, iteration_id])
        con.execute(_COPY_NODES, [new, old])
        for sql in _COPY_OF_STEPS:
            con.execute(sql, [new, old, "node"])
    return new


def copy_judgements(store: Store, tree_ids: Sequence[str], run_id: str, *, iteration_id: str) -> int:
    """Copy another run's judgements of the same trees, where this run has none; return the number
    of nodes.

    Trees are the same if one is a copy of the other, or both are copies of a third.
    """
    with store.transaction() as con:
        rows = con.execute(_JUDGEMENTS_TO_COPY, [run_id, list(tree_ids)]).fetchall()
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        if rows:
            con.execute(_COPY_JUDGEMENTS, [*columns, iteration_id])
            con.execute(_COPY_REPLIES, columns)
    return len(rows)


def copy_rollouts(store: Store, originals: Mapping[str, str], *, iteration_id: str) -> list[str]:
    """Copy stored rollouts as rollouts of an iteration; return the ids of the copies.

    A rollout that is already stored under its new id is left as it is.

    Args:
        originals: the id of the trajectory to copy, by the id of its copy.
    """
    with store.transaction() as con:
        rows = con.execute(_ROLLOUTS_TO_COPY, [list(originals), list(originals.values())]).fetchall()
        new, old = [key for key, _ in rows], [key for _, key in rows]
        con.execute(_COPY_TRAJECTORY, [new, old, iteration_id])
        con.execute(_COPY_STEPS, [new, old])
        for sql in _COPY_OF_STEPS:
            con.execute(sql, [new, old, "step"])
    return new


_PAIRS = "with ids as (select unnest(?) as new_id, unnest(?) as old_id)"
_ALIKE = """
select other.run_id from stage_input mine join stage_input other using (stage, input_id)
where mine.run_id = ? and stage = ? and other.run_id <> mine.run_id
order by other.created_at, other.run_id
"""
_TREES_TO_COPY = f"""
{_PAIRS}
select new_id, old_id from ids join tree t on t.tree_id = old_id
where t.finished and new_id not in (select tree_id from tree)
"""
_COPY_TREE = f"""
insert into tree by name
{_PAIRS}
select t.* exclude (created_at) replace (new_id as tree_id, ? as iteration_id, null as writer,
    coalesce(t.copied_from, t.tree_id) as copied_from)
from tree t join ids on t.tree_id = old_id
"""
_COPY_NODES = f"""
insert into node by name
{_PAIRS}
select n.* exclude (created_at) replace (new_id as tree_id) from node n join ids on n.tree_id = old_id
"""
_COPY_OWNED = f"""
insert into {{table}} by name
{_PAIRS}
select g.* exclude (created_at) replace (new_id as owner_id) from {{table}} g join ids on g.owner_id = old_id
where g.kind = ?
"""
_COPY_OF_STEPS = [_COPY_OWNED.format(table=table) for table in ("generation", "tool_call", "answer", "grade")]
_JUDGEMENTS_TO_COPY = """
select mine.tree_id, other.tree_id, j.node_index
from tree mine
join tree other on coalesce(other.copied_from, other.tree_id) = coalesce(mine.copied_from, mine.tree_id)
join iteration i on i.iteration_id = other.iteration_id and i.run_id = ?
join judgement j on j.tree_id = other.tree_id
where mine.tree_id in (select unnest(?)) and mine.tree_id <> other.tree_id
    and (mine.tree_id, j.node_index) not in (select (tree_id, node_index) from judgement)
"""
_COPIED = "with ids as (select unnest(?) as new_id, unnest(?) as old_id, unnest(?) as place)"
_COPY_JUDGEMENTS = f"""
insert into judgement by name
{_COPIED}
select j.* exclude (created_at) replace (new_id as tree_id, ? as iteration_id,
    coalesce(j.copied_from, j.tree_id) as copied_from)
from judgement j join ids on j.tree_id = old_id and j.node_index = place
"""
_COPY_REPLIES = f"""
insert into generation by name
{_COPIED}
select g.* exclude (created_at) replace (new_id as owner_id)
from generation g join ids on g.owner_id = old_id and g.position = place
where g.kind = 'judgement'
"""
_ROLLOUTS_TO_COPY = f"""
{_PAIRS}
select new_id, old_id from ids join trajectory t on t.trajectory_id = old_id
where t.source = 'rollout' and new_id not in (select trajectory_id from trajectory)
"""
_COPY_TRAJECTORY = f"""
insert into trajectory by name
{_PAIRS}
select t.* exclude (created_at) replace (new_id as trajectory_id, ? as iteration_id,
    coalesce(t.copied_from, t.trajectory_id) as copied_from)
from trajectory t join ids on t.trajectory_id = old_id
"""
_COPY_STEPS = f"""
insert into step by name
{_PAIRS}
select s.* exclude (created_at) replace (new_id as trajectory_id) from step s join ids on s.trajectory_id = old_id
"""


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
        tree_id: tuple(
            Node(
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
            for _, index, parent, depth, visits, value_sum, terminal, stop, dive, duplicates, *step in group
        )
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
    nodes: list[Row] = []
    for node in (*changed, *created):
        number = made_of.get(node.index)
        if number is None and node.step is not None and has_tokens(node.step):
            number = TOKENS_ONLY
        nodes.append(
            {
                "tree_id": tree_id,
                "node_index": node.index,
                "parent": node.parent,
                "depth": node.depth,
                **step_columns(node.step),
                "visits": node.visits,
                "value_sum": float(node.value_sum),
                "terminal": node.terminal,
                "stop": None if node.stop is None else str(node.stop),
                "dive": node.dive,
                "duplicates": node.duplicates,
                "draw": number,
            }
        )
    steps = [(node.index, node.step) for node in created if node.step is not None]
    rows = {
        "text": text_rows(
            [
                *(text for _, step in steps for text in (step.reply, step.observation)),
                *(draw.generation.text for draw in drawn),
            ]
        ),
        "node": nodes,
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
