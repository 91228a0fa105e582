"""Trajectories, and the episodes of an evaluation, to rows and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentr_core.store.database import Store, snapshot
from agentr_core.store.tables import Asked, Draw, Row, Rows, load, merge, row_of
from agentr_core.types import Answer, Generation, Grading, Instance, Step, ToolCall, Trajectory


def instance_row(instance: Instance, depth: int | None = None, origin: Instance | None = None) -> Row:
    """Return the row of table `instance`; `depth` is its difficulty class, `origin` the instance it
    is a variant of, if any.

    The first row of an instance stays: store those with a depth before anything refers to them.
    """
    other = None if origin is None or origin == instance else origin.key
    return row_of("instance", instance, instance_id=instance.key, depth=depth, origin_id=other)


# The replies that steps came of.


def asked(step: Step, draw: Draw | None) -> Asked | None:
    """Return what a step itself does not have of the reply that it came of; None if it came of
    none.

    Raises `ValueError` if it came of another one.
    """
    if draw is None:
        return None
    reply = draw.generation
    if (reply.text, reply.token_ids, reply.logprobs) != (step.reply, step.token_ids, step.logprobs):
        raise ValueError(f"a step does not have the reply that it was made of: {step.reply!r} and {reply.text!r}")
    return Asked(
        seed=draw.seed,
        number=draw.number,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        thinks=reply.thinks,
    )


def load_draws(
    store: Store, kind: Literal["node", "step"], owner_ids: Sequence[str]
) -> dict[str, dict[int, tuple[Draw, ...]]]:
    """Return the stored replies of trees or trajectories: by owner, then by position, in the order
    of their numbers.

    Steps that came of no request (a replayed or imported step) are left out.
    """
    draws: dict[str, dict[int, tuple[Draw, ...]]] = {}
    if not store.path.exists():
        return draws
    with store.reading() as con:
        if kind == "step":
            stored = load(con, "trajectory", _AMONG, [list(owner_ids)], also=("trajectory_id", "asked"))
            for key, requests, trajectory in stored:
                for at, (step, request) in enumerate(zip(trajectory.steps, requests, strict=True)):
                    if request is not None:
                        draws.setdefault(key, {})[at] = (_draw(step, request),)
        else:
            of_trees = "tree_id in (select unnest(?::varchar[])) order by tree_id, node_index"
            stored = load(con, "node", of_trees, [list(owner_ids)], also=("tree_id", "asked", "merged"))
            for key, request, merged, node in stored:
                if request is not None:
                    replies = sorted((_draw(node.step, request), *merged), key=lambda draw: draw.number)
                    draws.setdefault(key, {})[node.index] = tuple(replies)
    return draws


def _draw(step: Step, request: Asked) -> Draw:
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


_AMONG = "trajectory_id in (select unnest(?::varchar[]))"


# What models said of finished trajectories.

Purpose = str
"""A word chosen by the method that asks about a finished episode."""


def answer_rows(trajectory_id: str, purpose: Purpose, number: int, answer: Answer) -> Rows:
    """Return the row of a model's reply about a finished trajectory, as answer `number` for a
    purpose.
    """
    return {"assessment": [row_of("assessment", answer, trajectory_id=trajectory_id, purpose=purpose, number=number)]}


def load_answers(store: Store, purpose: Purpose, trajectory_ids: Sequence[str]) -> dict[str, dict[int, Answer]]:
    """Return the answers of models about trajectories for a purpose, by trajectory and number."""
    answers: dict[str, dict[int, Answer]] = {}
    if store.path.exists():
        with store.reading() as con:
            params = [list(trajectory_ids), purpose]
            condition = f"{_AMONG} and purpose = ? order by trajectory_id, number"
            for key, number, answer in load(con, "assessment", condition, params, also=("trajectory_id", "number")):
                answers.setdefault(key, {})[number] = answer
    return answers


# Tool answers that later calls reuse.


class AnsweredCalls:
    """The tool answers in a store. Threads and processes may share one; two on the same file are
    equal.

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
        asked = {call.identity: call for call in calls}
        return {
            key: replace(asked[key], status=status, milliseconds=milliseconds, output=output)
            for key, status, milliseconds, output in self._store.rows(_ANSWERS, list(asked))
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
    given: int = 0,
) -> Rows:
    """Return the rows of a trajectory; they are one unit.

    Args:
        source: where it comes from: tree, rollout, episode, splice, expert, or a word chosen by the
            method that made it.
        tree_id, leaf: the tree and the last node, if it is a path of a tree.
        draws: the draws that the replies come from, by step position.
        grading: the grade of a trajectory whose reward a grader gave.
        given: how many of its first steps were recorded earlier; their calls were not made again.
    """
    draws = draws or {}
    row = row_of(
        "trajectory",
        trajectory,
        trajectory_id=trajectory_id,
        instance_id=trajectory.instance.key,
        num_steps=len(trajectory.steps),
        given=given,
        asked=tuple(asked(step, draws.get(position)) for position, step in enumerate(trajectory.steps)),
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
    steps = trajectory_rows(
        trajectory_id,
        trajectory,
        source="episode",
        iteration_id=iteration_id,
        evaluation_id=evaluation_id,
        draws=draws,
        grading=grading,
        given=cut,
    )
    return merge([steps, {"episode": [episode]}])


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
    wanted = {"iteration_id = ?": iteration_id, "source = ?": source, _AMONG: None if ids is None else list(ids)}
    chosen = {condition: value for condition, value in wanted.items() if value is not None}
    with store.reading() as con:
        condition = " and ".join(chosen) or "true"
        found = dict(load(con, "trajectory", condition, list(chosen.values()), also=("trajectory_id",)))
    return {key: found[key] for key in (sorted(found) if ids is None else ids) if key in found}


def load_episodes(store: Store, evaluation_id: str) -> list[Episode]:
    """Return the episodes of an evaluation that are stored, by instance, repeat and cut."""
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
