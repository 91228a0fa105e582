"""Trees and trajectories as rows, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from agentr_core.store.database import Store, snapshot
from agentr_core.store.tables import Draw, DrawRecord, Row, Rows, TreeHead, load_records, merge, row_of
from agentr_core.types import (
    Answer,
    Critique,
    Generation,
    Grading,
    Instance,
    Judgement,
    Node,
    PathPair,
    Step,
    ToolCall,
    Trajectory,
    Tree,
    Verdict,
)


def instance_row(instance: Instance, depth: int | None = None, origin: Instance | None = None) -> Row:
    """Return the row of table `instance`; `depth` is its difficulty class, `origin` the instance it
    is a variant of, if any.

    The first row stored for an instance is kept: store the row with depth and origin before any
    other row of the instance.
    """
    origin_id = None if origin is None or origin == instance else origin.key
    return row_of("instance", instance, instance_id=instance.key, depth=depth, origin_id=origin_id)


# The sampled replies from which steps were made.


def draw_record(step: Step, draw: Draw | None) -> DrawRecord | None:
    """Return the fields of `draw`, from which `step` was made, that the step lacks; None without a
    draw.

    Raises `ValueError` if text, tokens or log-probabilities of step and draw differ.
    """
    if draw is None:
        return None
    reply = draw.generation
    if (reply.text, reply.token_ids, reply.logprobs) != (step.reply, step.token_ids, step.logprobs):
        raise ValueError(f"a step does not have the reply that it was made of: {step.reply!r} and {reply.text!r}")
    return DrawRecord(
        seed=draw.seed,
        number=draw.number,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        thinks=reply.thinks,
    )


def load_draws(
    store: Store, kind: Literal["node", "step"], owner_ids: Sequence[str]
) -> dict[str, dict[int, tuple[Draw, ...]]]:
    """Return the sampled replies behind the nodes of trees or the steps of trajectories, by owner
    id, then by index of the node or position of the step; several replies merged in a node are
    sorted by number.

    Steps that were not sampled (replayed or imported ones) are left out.
    """
    draws: dict[str, dict[int, tuple[Draw, ...]]] = {}
    if not store.path.exists():
        return draws
    with store.reading() as con:
        if kind == "step":
            rows = load_records(
                con, "trajectory", _IN_TRAJECTORIES, [list(owner_ids)], extra_columns=("trajectory_id", "asked")
            )
            for key, requests, trajectory in rows:
                for position, (step, request) in enumerate(zip(trajectory.steps, requests, strict=True)):
                    if request is not None:
                        draws.setdefault(key, {})[position] = (_draw(step, request),)
        else:
            in_trees = "tree_id in (select unnest(?::varchar[])) order by tree_id, node_index"
            rows = load_records(con, "node", in_trees, [list(owner_ids)], extra_columns=("tree_id", "asked", "merged"))
            for key, request, merged_draws, node in rows:
                if request is not None:
                    replies = sorted((_draw(node.step, request), *merged_draws), key=lambda draw: draw.number)
                    draws.setdefault(key, {})[node.index] = tuple(replies)
    return draws


def _draw(step: Step, request: DrawRecord) -> Draw:
    assert step.finish_reason is not None
    generation = Generation(
        text=step.reply,
        token_ids=step.token_ids,
        finish_reason=step.finish_reason,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        logprobs=step.logprobs,
        tokenizer=step.tokenizer,
        thinks=request.thinks,
    )
    return Draw(seed=request.seed, number=request.number, generation=generation)


_IN_TRAJECTORIES = "trajectory_id in (select unnest(?::varchar[]))"


# Answers of models about finished trajectories.

Purpose = str
"""A word that tells apart the questions about a finished episode; the method that asks chooses it.
"""


def answer_rows(trajectory_id: str, purpose: Purpose, number: int, answer: Answer) -> Rows:
    """Return the row of a model's reply about a finished trajectory, as answer `number` for a
    purpose.
    """
    return {"assessment": [row_of("assessment", answer, trajectory_id=trajectory_id, purpose=purpose, number=number)]}


def load_answers(store: Store, purpose: Purpose, trajectory_ids: Sequence[str]) -> dict[str, dict[int, Answer]]:
    """Return models' answers about trajectories for a purpose, by trajectory id and number."""
    answers: dict[str, dict[int, Answer]] = {}
    if store.path.exists():
        with store.reading() as con:
            params = [list(trajectory_ids), purpose]
            condition = f"{_IN_TRAJECTORIES} and purpose = ? order by trajectory_id, number"
            for key, number, answer in load_records(
                con, "assessment", condition, params, extra_columns=("trajectory_id", "number")
            ):
                answers.setdefault(key, {})[number] = answer
    return answers


# Tool answers that later calls reuse.


class AnsweredCalls:
    """Stored answers of tools to calls, which later calls reuse. Safe for several threads and
    processes; objects on the same file are equal.

    Each method is one burst of the store, so it suits tools that take longer than a burst, such as
    a web search.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnsweredCalls) and self._store.path == other._store.path

    def __hash__(self) -> int:
        return hash(self._store.path)

    def identities(self) -> frozenset[str]:
        """Return the identities of all calls with an answer; none if there is no store yet. Raises
        as `Store.reading` does.
        """
        return frozenset(call_id for (call_id,) in self._store.rows("select call_id from answered_call"))

    def find(self, calls: Sequence[ToolCall]) -> dict[str, ToolCall]:
        """Return the calls that have a stored answer, with that answer and its duration, by
        identity. Raises as `Store.reading` does.
        """
        by_identity = {call.identity: call for call in calls}
        return {
            key: replace(by_identity[key], status=status, milliseconds=milliseconds, output=output)
            for key, status, milliseconds, output in self._store.rows(_ANSWERS, list(by_identity))
        }

    def keep(self, calls: Sequence[ToolCall]) -> None:
        """Store answered calls in one transaction; the first answer to each stays. Raises as
        `Store.write` does.
        """
        self._store.write({"answered_call": [row_of("answered_call", call, call_id=call.identity) for call in calls]})


_ANSWERS = """
select call_id, status, milliseconds, output from answered_call where call_id in (select unnest(?::varchar[]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode of an evaluation: number `repeat` of its instance, after `cut` replayed steps."""

    trajectory_id: str
    instance: Instance
    repeat: int
    cut: int
    trajectory: Trajectory
    depth: int | None = None
    origin: str = ""
    """The instance that its instance is a variant of, or that instance itself."""


def trajectory_rows(
    trajectory_id: str,
    trajectory: Trajectory,
    *,
    source: str,
    iteration_id: str | None = None,
    evaluation_id: str | None = None,
    tree_id: str | None = None,
    leaf: int | None = None,
    draws: Mapping[int, Draw] | None = None,
    grading: Grading | None = None,
    num_given_steps: int = 0,
) -> Rows:
    """Return the rows of a trajectory; they are one unit.

    Args:
        source: how it was made: tree, rollout, episode, splice, expert, or a word chosen by the
            method that made it.
        tree_id, leaf: the tree and the index of the last node, if it is a path of a tree.
        draws: the draws that the replies come from, by step position.
        grading: the grade of a trajectory whose reward a grader gave.
        num_given_steps: how many first steps were recorded earlier; their calls were not repeated.
    """
    draws = draws or {}
    row = row_of(
        "trajectory",
        trajectory,
        trajectory_id=trajectory_id,
        instance_id=trajectory.instance.key,
        num_steps=len(trajectory.steps),
        given=num_given_steps,
        asked=tuple(draw_record(step, draws.get(position)) for position, step in enumerate(trajectory.steps)),
        grading=grading,
        source=source,
        iteration_id=iteration_id,
        evaluation_id=evaluation_id,
        tree_id=tree_id,
        leaf=leaf,
    )
    return {"instance": [instance_row(trajectory.instance)], "trajectory": [row]}


def episode_rows(
    trajectory_id: str,
    trajectory: Trajectory,
    *,
    evaluation_id: str,
    iteration_id: str,
    repeat: int = 0,
    cut: int = 0,
    invalid_actions: int | None = None,
    environment_seconds: float | None = None,
    sampling_seconds: float | None = None,
    draws: Mapping[int, Draw] | None = None,
    grading: Grading | None = None,
) -> Rows:
    """Return the rows of one episode of an evaluation with its trajectory; they are one unit.

    `repeat` is its number among the episodes of its instance, in a revision test that of the failed
    episode; `cut` is how many steps were replayed before the model took over.
    """
    episode = {
        "evaluation_id": evaluation_id,
        "instance_id": trajectory.instance.key,
        "repeat": repeat,
        "cut": cut,
        "trajectory_id": trajectory_id,
        "invalid_actions": invalid_actions,
        "environment_seconds": environment_seconds,
        "sampling_seconds": sampling_seconds,
    }
    trajectory_unit = trajectory_rows(
        trajectory_id,
        trajectory,
        source="episode",
        iteration_id=iteration_id,
        evaluation_id=evaluation_id,
        draws=draws,
        grading=grading,
        num_given_steps=cut,
    )
    return merge([trajectory_unit, {"episode": [episode]}])


def load_trajectories(
    store: Store,
    ids: Sequence[str] | None = None,
    *,
    iteration_id: str | None = None,
    source: str | None = None,
) -> dict[str, Trajectory]:
    """Return stored trajectories by id: those of the given ids in their order, or those of an
    iteration and a source sorted by id.
    """
    if not store.path.exists():
        return {}
    conditions = {
        "iteration_id = ?": iteration_id,
        "source = ?": source,
        _IN_TRAJECTORIES: None if ids is None else list(ids),
    }
    given_conditions = {condition: value for condition, value in conditions.items() if value is not None}
    with store.reading() as con:
        condition = " and ".join(given_conditions) or "true"
        trajectories = dict(
            load_records(
                con, "trajectory", condition, list(given_conditions.values()), extra_columns=("trajectory_id",)
            )
        )
    return {key: trajectories[key] for key in (sorted(trajectories) if ids is None else ids) if key in trajectories}


def load_episodes(store: Store, evaluation_id: str) -> list[Episode]:
    """Return the stored episodes of an evaluation, sorted by instance, repeat and cut."""
    if not store.path.exists():
        return []
    with snapshot(store) as state:
        rows = state.rows(_EPISODES, evaluation_id)
        trajectories = load_trajectories(state, [row[0] for row in rows]) if rows else {}
    return [
        Episode(
            trajectory_id=key,
            instance=trajectories[key].instance,
            repeat=repeat,
            cut=cut,
            trajectory=trajectories[key],
            depth=depth,
            origin=origin,
        )
        for key, repeat, cut, depth, origin in rows
    ]


_EPISODES = """
    select e.trajectory_id, e.repeat, e.cut, i.depth, coalesce(i.origin_id, i.instance_id)
    from episode e join instance i using (instance_id)
    where e.evaluation_id = ?
    order by i.environment, i.split, i.instance_index, e.repeat, e.cut
"""


# Search trees to rows and back; a half-grown tree resumes from its rows.

# Pairs of paths and what the judge said about them, to rows and back.


def pair_rows(pair_id: str, pair: PathPair, *, iteration_id: str, position: int = 0) -> Rows:
    """Return the row of table `pair`. The paths themselves follow from the tree, which is stored
    with all its nodes.

    Args:
        position: its place among the pairs of its tree, from 0.
    """
    good_reward, bad_reward = pair.good.trajectory.reward, pair.bad.trajectory.reward
    return {
        "pair": [
            {
                "pair_id": pair_id,
                "iteration_id": iteration_id,
                "tree_id": pair.good.tree_id,
                "good_leaf": pair.good.leaf,
                "bad_leaf": pair.bad.leaf,
                "shared_steps": pair.split,
                "good_reward": float(good_reward),
                "bad_reward": float(bad_reward),
                "gap": float(good_reward - bad_reward),
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
    """The number of steps, from the root on, that both paths share."""


def load_pairs(store: Store, iteration_id: str) -> dict[str, list[StoredPair]]:
    """Return the pairs of an iteration by tree, in the order in which they were made."""
    pairs: dict[str, list[StoredPair]] = {}
    for row in store.rows(
        "select tree_id, good_leaf, bad_leaf, shared_steps from pair where iteration_id = ? order by tree_id, position",
        iteration_id,
    ):
        pair = StoredPair(*row)
        pairs.setdefault(pair.tree_id, []).append(pair)
    return pairs


def judgement_rows(tree_id: str, judgement: Judgement, *, iteration_id: str) -> Rows:
    """Return the rows of a judgement with the judge's replies; they are one unit."""
    row = row_of("judgement", judgement, tree_id=tree_id, iteration_id=iteration_id)
    return {"judgement": [row]}


def load_judgements(store: Store, tree_ids: Sequence[str]) -> dict[str, dict[int, Judgement]]:
    """Return the stored judgements, by tree id and index of the node."""
    judgements: dict[str, dict[int, Judgement]] = {}
    if store.path.exists():
        with store.reading() as con:
            rows = load_records(con, "judgement", _IN_TREES, [list(tree_ids)], extra_columns=("tree_id",))
        for tree_id, judgement in sorted(rows, key=lambda item: (item[0], item[1].node)):
            judgements.setdefault(tree_id, {})[judgement.node] = judgement
    return judgements


def oracle_rows(tree_id: str, verdict_by_node: Mapping[int, Verdict]) -> Rows:
    """Return the rows of the true verdicts on nodes of a tree, by their indices."""
    return {
        "oracle_verdict": [
            {"tree_id": tree_id, "node_index": node, "verdict": str(verdict)}
            for node, verdict in verdict_by_node.items()
        ]
    }


def load_oracle(store: Store, tree_ids: Sequence[str]) -> dict[tuple[str, int], Verdict]:
    """Return the stored true verdicts, by pairs of tree id and index of the node."""
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
    row = row_of("critique", critique, pair_id=pair_id, iteration_id=iteration_id, nodes=tuple(nodes))
    return {"critique": [row]}


def load_critiques(store: Store, pair_ids: Sequence[str]) -> dict[str, Critique]:
    """Return the stored critiques of pairs, by pair id in the order given."""
    if not store.path.exists():
        return {}
    with store.reading() as con:
        critiques = dict(
            load_records(con, "critique", "pair_id in (select unnest(?))", [list(pair_ids)], extra_columns=("pair_id",))
        )
    return {pair_id: critiques[pair_id] for pair_id in pair_ids if pair_id in critiques}


# Trees, judgements, rollouts and evaluations of other runs, copied with all their rows under ids of
# this run.

DATASETS_INPUT = "dataset"
"""The stage whose input is the contents of the general data; no reply depends on them."""
FILES_INPUT = "files"
"""A name in place of a stage, for the hash of all files that a run reads."""


def stage_input_rows(run_id: str, input_id_by_stage: Mapping[str, str]) -> Rows:
    """Return a row for each stage of a run, with the hash of all inputs that affect its output."""
    return {
        "stage_input": [
            {"run_id": run_id, "stage": stage, "input_id": input_id} for stage, input_id in input_id_by_stage.items()
        ]
    }


def stored_input_id(store: Store, run_id: str, stage: str) -> str | None:
    """Return the stored hash of the inputs of a stage of a run; None if there is none."""
    rows = store.rows("select input_id from stage_input where run_id = ? and stage = ?", run_id, stage)
    return next((key for (key,) in rows), None)


def runs_with_same_input(store: Store, run_id: str, stage: str) -> list[str]:
    """Return the ids of other runs that have the same input hash of a stage, the oldest first."""
    return [run for (run,) in store.rows(_RUNS_WITH_SAME_INPUT, run_id, stage)]


def copy_trees(store: Store, original_by_copy: Mapping[str, str], *, iteration_id: str) -> list[str]:
    """Copy finished trees as trees of an iteration; return the ids of the copies.

    A tree that is already stored under its new id, finished or not, is left as it is.

    Args:
        original_by_copy: the id of the tree to copy, by the id of its copy.
    """
    with store.transaction() as con:
        rows = con.execute(_TREES_TO_COPY, [list(original_by_copy), list(original_by_copy.values())]).fetchall()
        new_ids, old_ids = [key for key, _ in rows], [key for _, key in rows]
        con.execute(_COPY_TREE, [new_ids, old_ids, iteration_id])
        con.execute(_COPY_NODES, [new_ids, old_ids])
    return new_ids


def copy_judgements(store: Store, tree_ids: Sequence[str], run_id: str, *, iteration_id: str) -> int:
    """Copy another run's judgements of the nodes of given trees that are not judged here; return
    the number of nodes.

    Trees are the same if one is a copy of the other, or both are copies of a third.
    """
    with store.transaction() as con:
        rows = con.execute(_JUDGEMENTS_TO_COPY, [run_id, list(tree_ids)]).fetchall()
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        if rows:
            con.execute(_COPY_JUDGEMENTS, [*columns, iteration_id])
    return len(rows)


def evaluations_with_same_input(
    store: Store, run_id: str, stage: str, *, iteration: int, name: str, weights_sha256: str
) -> list[str]:
    """Return the ids of other runs' evaluations with this name and iteration, of checkpoints with
    these weights, if the run has the same input hash of the stage; the oldest run first.
    """
    rows = store.rows(_EVALUATIONS_WITH_SAME_INPUT, run_id, stage, iteration, name, weights_sha256)
    return [evaluation_id for (evaluation_id,) in rows]


def copy_trajectories(
    store: Store, original_by_copy: Mapping[str, str], *, iteration_id: str, evaluation_id: str | None = None
) -> list[str]:
    """Copy stored rollouts as rollouts of an iteration, or stored episodes as those of one of its
    evaluations; return the ids of the copies.

    A trajectory that is already stored under its new id is left as it is.

    Args:
        original_by_copy: the id of the trajectory to copy, by the id of its copy.
    """
    source = "episode" if evaluation_id else "rollout"
    with store.transaction() as con:
        rows = con.execute(
            _TRAJECTORIES_TO_COPY, [list(original_by_copy), list(original_by_copy.values()), source]
        ).fetchall()
        new_ids, old_ids = [key for key, _ in rows], [key for _, key in rows]
        con.execute(COPY_TRAJECTORY, [new_ids, old_ids, iteration_id, evaluation_id])
        if evaluation_id:
            con.execute(_COPY_EPISODE, [new_ids, old_ids, evaluation_id])
    return new_ids


COPY_IDS = "with ids as (select unnest(?) as new_id, unnest(?) as old_id)"
"""The ids of copies, each with that of its original, as a common table expression."""
_RUNS_WITH_SAME_INPUT = """
select other.run_id from stage_input mine join stage_input other using (stage, input_id)
where mine.run_id = ? and stage = ? and other.run_id <> mine.run_id
order by other.created_at, other.run_id
"""
_TREES_TO_COPY = f"""
{COPY_IDS}
select new_id, old_id from ids join tree t on t.tree_id = old_id
where t.finished and new_id not in (select tree_id from tree)
"""
_COPY_TREE = f"""
insert into tree by name
{COPY_IDS}
select t.* exclude (created_at) replace (new_id as tree_id, ? as iteration_id, null as writer,
    coalesce(t.copied_from, t.tree_id) as copied_from)
from tree t join ids on t.tree_id = old_id
"""
_COPY_NODES = f"""
insert into node by name
{COPY_IDS}
select n.* exclude (created_at) replace (new_id as tree_id) from node n join ids on n.tree_id = old_id
"""
_JUDGEMENTS_TO_COPY = """
select mine.tree_id, other.tree_id, j.node_index
from tree mine
join tree other on coalesce(other.copied_from, other.tree_id) = coalesce(mine.copied_from, mine.tree_id)
join iteration i on i.iteration_id = other.iteration_id and i.run_id = ?
join judgement j on j.tree_id = other.tree_id
where mine.tree_id in (select unnest(?)) and mine.tree_id <> other.tree_id
    and (mine.tree_id, j.node_index) not in (select (tree_id, node_index) from judgement)
"""
_COPY_JUDGEMENTS = """
insert into judgement by name
with ids as (select unnest(?) as new_id, unnest(?) as old_id, unnest(?) as place)
select j.* exclude (created_at) replace (new_id as tree_id, ? as iteration_id,
    coalesce(j.copied_from, j.tree_id) as copied_from)
from judgement j join ids on j.tree_id = old_id and j.node_index = place
"""
_TRAJECTORIES_TO_COPY = f"""
{COPY_IDS}
select new_id, old_id from ids join trajectory t on t.trajectory_id = old_id
where t.source = ? and new_id not in (select trajectory_id from trajectory)
"""
COPY_TRAJECTORY = f"""
insert into trajectory by name
{COPY_IDS}
select t.* exclude (created_at) replace (new_id as trajectory_id, ? as iteration_id, ? as evaluation_id,
    coalesce(t.copied_from, t.trajectory_id) as copied_from)
from trajectory t join ids on t.trajectory_id = old_id
"""
_EVALUATIONS_WITH_SAME_INPUT = """
select e.evaluation_id
from stage_input mine join stage_input other using (stage, input_id)
join iteration i on i.run_id = other.run_id
join evaluation e using (iteration_id)
join checkpoint c on c.checkpoint_id = e.checkpoint_id
where mine.run_id = ? and stage = ? and other.run_id <> mine.run_id
    and i.iteration = ? and e.name = ? and c.weights_sha256 = ?
order by other.created_at, other.run_id
"""
_COPY_EPISODE = f"""
insert into episode by name
{COPY_IDS}
select e.* exclude (created_at) replace (new_id as trajectory_id, ? as evaluation_id)
from episode e join ids on e.trajectory_id = old_id
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


class TreeExpansion(Protocol):
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


def claim_trees(store: Store, tree_ids: Sequence[str], writer: str) -> None:
    """Make `writer` the only process that may grow the given trees, if they are stored; from then
    on, rows of an earlier writer are refused (`RunBusy`).
    """
    with store.transaction() as con:
        con.execute("update tree set writer = ? where tree_id in (select unnest(?))", [writer, list(tree_ids)])


def tree_rows(head: TreeHead, tree: Tree) -> Rows:
    """Return the rows of a new tree with all its nodes, often only the root; they are one unit."""
    return {
        "instance": [instance_row(head.instance)],
        **_tree_row(head, tree.dives_done, finished=False),
        "node": [_node_row(head.tree_id, node) for node in tree.nodes],
    }


def expansion_rows(head: TreeHead, expansion: TreeExpansion) -> Rows:
    """Return the rows of one expansion: new nodes with all sampled replies, and nodes whose
    statistics changed. Raises `ValueError` if one is graded that is not new.

    They are one unit. If they are stored after each expansion, a tree loaded after a crash is as it
    was after one of its expansions. The tree itself, with its root, must have been stored before
    (`tree_rows`).
    """
    draws: dict[int, list[Draw]] = {}
    for draw in expansion.draws:
        draws.setdefault(draw.node, []).append(Draw(seed=draw.seed, number=draw.number, generation=draw.generation))
    gradings = dict(expansion.gradings)
    # Of a changed node only the statistics are stored again.
    nodes_without_step = (replace(node, step=None) for node in expansion.changed)
    nodes = [
        *(_node_row(head.tree_id, node) for node in nodes_without_step),
        *(
            _node_row(head.tree_id, node, draws.get(node.index, ()), gradings.pop(node.index, None))
            for node in expansion.created
        ),
    ]
    if gradings:
        raise ValueError(f"nodes {sorted(gradings)} are graded, but were made before")
    return {**_tree_row(head, expansion.dives_done, finished=False), "node": nodes}


def finished_tree_rows(head: TreeHead, tree: Tree) -> Rows:
    """Return the row that marks a tree as finished; its nodes must have been stored before."""
    return _tree_row(head, tree.dives_done, finished=True)


def load_trees(store: Store, tree_ids: Sequence[str]) -> dict[str, Tree]:
    """Return those of the trees that are stored, finished or not, by id, in the order given."""
    if not store.path.exists():
        return {}
    with store.reading() as con:
        heads = load_records(con, "tree", _IN_TREES, [list(tree_ids)], extra_columns=("dives_done",))
        rows = load_records(con, "node", _IN_TREES, [list(tree_ids)], extra_columns=("tree_id",))
    nodes: dict[str, list[Node]] = {}
    for tree_id, node in sorted(rows, key=lambda item: (item[0], item[1].index)):
        nodes.setdefault(tree_id, []).append(node)
    trees = {
        head.tree_id: Tree(
            instance=head.instance,
            first_observation=head.first_observation,
            nodes=tuple(nodes.get(head.tree_id, ())),
            dives_done=dives_done,
            seed=head.seed,
        )
        for dives_done, head in heads
    }
    return {tree_id: trees[tree_id] for tree_id in tree_ids if tree_id in trees}


def unfinished_tree_ids(store: Store, tree_ids: Sequence[str]) -> list[str]:
    """Return those of the ids whose tree is not finished or not stored, in the order given."""
    rows = store.rows("select tree_id from tree where finished and tree_id in (select unnest(?))", list(tree_ids))
    finished_ids = {tree_id for (tree_id,) in rows}
    return [tree_id for tree_id in tree_ids if tree_id not in finished_ids]


def finished_tree_ids(store: Store, iteration_id: str, checkpoint_id: str) -> list[str]:
    """Return the ids of the finished trees that a policy grew in an iteration, by instance."""
    rows = store.rows(
        "select t.tree_id from tree t join instance i using (instance_id) "
        "where t.finished and t.iteration_id = ? and t.checkpoint_id = ? "
        "order by i.environment, i.split, i.instance_index, t.tree_id",
        iteration_id,
        checkpoint_id,
    )
    return [tree_id for (tree_id,) in rows]


def finished_tree_ids_of_run(store: Store, run_id: str) -> list[str]:
    """Return the ids of the finished trees of a run, sorted."""
    rows = store.rows(
        "select t.tree_id from tree t join iteration i using (iteration_id) "
        "where i.run_id = ? and t.finished order by t.tree_id",
        run_id,
    )
    return [tree_id for (tree_id,) in rows]


def stored_tree_ids(store: Store, tree_ids: Sequence[str]) -> frozenset[str]:
    """Return the ids among `tree_ids` of stored trees, finished or not."""
    rows = store.rows("select tree_id from tree where tree_id in (select unnest(?))", list(tree_ids))
    return frozenset(tree_id for (tree_id,) in rows)


def _tree_row(head: TreeHead, dives_done: int, *, finished: bool) -> Rows:
    row = row_of("tree", head, instance_id=head.instance.key, dives_done=dives_done, finished=finished)
    return {"tree": [row]}


def _node_row(tree_id: str, node: Node, draws: Sequence[Draw] = (), grading: Grading | None = None) -> Row:
    # If several sampled replies were merged in a node, its step was made from the first.
    first_draw = draw_record(node.step, draws[0]) if draws and node.step is not None else None
    return row_of("node", node, tree_id=tree_id, asked=first_draw, merged=tuple(draws[1:]), grading=grading)


_IN_TREES = "tree_id in (select unnest(?))"
