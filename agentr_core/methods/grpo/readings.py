"""What a scorer reads of the policy's episodes (`grpo.distil`).

A scorer is given the tokens that the policy sampled, after what the policy read and records that
it did not: its own episode to the end, the expert's, or others of the same instance that pass
through the same states. A record says what was done, not what was thought. It stands at the end of
the last turn before the reply, so that the policy's own turns, and with them the ids of its tokens,
stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from agentr_core.environment import Environment, Part
from agentr_core.episodes.transcript import conversations, readable_turns
from agentr_core.errors import DataFault, EnvironmentFault, Transient
from agentr_core.methods.grpo.cuts import STAGE
from agentr_core.recipes.grpo import DistilConfig, StateKey
from agentr_core.search.tree import leaf_paths
from agentr_core.stages.demonstrate import expert_trajectory
from agentr_core.store.codec.ledger import load_records
from agentr_core.store.codec.trajectories import load_trajectories, load_trees
from agentr_core.store.database import Store
from agentr_core.types import Instance, Message, Rejection, Trajectory, grown_turn

HINDSIGHT = "For reference: this whole episode, as it went. {mark} marks the step that is next here."
EXPERT = "For reference: an expert's whole episode of this task."
WON_FROM_HERE = "For reference: another episode of this task, a success. {mark} marks what it did in this state."
WON_FROM_BEFORE = (
    "For reference: another episode of this task, a success. {mark} marks what it did where the first took step {step}."
)
WON_ELSEWHERE = "For reference: another episode of this task, a success. So far the first was in none of its states."
LOST = (
    "For reference: another episode of this task, a failure. {mark} marks what it did at the first one's step {step}."
)
_MARK = ">>>"


def record(trajectory: Trajectory, *, marked: int | None = None) -> str:
    """Return what was done in an episode and what came of it, without thoughts. The step with the
    position `marked` has a mark.
    """
    lines = [trajectory.first_observation]
    for position, step in enumerate(trajectory.steps):
        # A summary does nothing.
        if step.summary_of is None:
            lines.append(f"{f'{_MARK} ' if position == marked else ''}Action: {step.action}")
            lines += readable_turns(step.observation)
    ending = "a success" if trajectory.success else "no success"
    return "\n".join([*filter(None, lines), f"The end: {ending}, reward {trajectory.reward:g}."])


def states_of(trajectory: Trajectory, key: StateKey) -> tuple[str | None, ...]:
    """Return what tells the state apart in which each step was taken; None of a summary, and where
    the world did not tell its state.
    """
    if key == "world":
        return tuple(step.state_key for step in trajectory.steps)
    before = (trajectory.first_observation, *(step.observation for step in trajectory.steps))
    states = zip(trajectory.steps, before, strict=False)
    return tuple(None if step.summary_of is not None else observation for step, observation in states)


# Not only the state of the step that is scored: the last one from which a win is known says where
# the episode left the way.
def records_beside(trajectory: Trajectory, position: int, others: Sequence[Trajectory], key: StateKey) -> Iterator[str]:
    """Yield what other episodes of the instance show of the step of an episode at a position: the
    one that wins in the fewest steps from the step's state, unless the episode itself does.
    Where none wins from there: one that wins from the latest state before, or any that wins; and
    one that fails and shares the latest state.

    Source: arXiv 2609.37522, selection of records.
    """
    states = states_of(trajectory, key)
    of_others = [(other, states_of(other, key)) for other in others]

    def nearest(at: int, *, won: bool) -> tuple[int, Trajectory, int] | None:
        """Return the fewest steps left from the state of a step, with the episode and its place."""
        best = None
        for other, path in of_others:
            if other.success == won and states[at] is not None and states[at] in path:
                place = max(n for n, state in enumerate(path) if state == states[at])
                if best is None or len(path) - place < best[0]:
                    best = len(path) - place, other, place
        return best

    if (win := nearest(position, won=True)) is not None or trajectory.success:
        if win is not None and not (trajectory.success and len(states) - position <= win[0]):
            _, other, place = win
            yield f"{WON_FROM_HERE.format(mark=_MARK)}\n\n{record(other, marked=place)}"
        return
    before = range(position - 1, -1, -1)
    anchors = ((at, candidate) for at in before if (candidate := nearest(at, won=True)) is not None)
    if (anchor := next(anchors, None)) is not None:
        at, (_, other, place) = anchor
        yield f"{WON_FROM_BEFORE.format(mark=_MARK, step=at + 1)}\n\n{record(other, marked=place)}"
    elif wins := [other for other in others if other.success]:
        yield f"{WON_ELSEWHERE}\n\n{record(min(wins, key=lambda other: len(other.steps)))}"
    failures = ((at, candidate) for at in (position, *before) if (candidate := nearest(at, won=False)) is not None)
    if (failure := next(failures, None)) is not None:
        at, (_, other, place) = failure
        yield f"{LOST.format(mark=_MARK, step=at + 1)}\n\n{record(other, marked=place)}"


def context_of(distil: DistilConfig, trajectory: Trajectory, position: int, others: Sequence[Trajectory]) -> str | None:
    """Return what a scorer is told before the step of an episode at a position; the empty string if
    that is nothing, None if there is no record to tell.

    Args:
        others: the expert's episode of the instance, where it has one; with `context: records`, all
            other episodes of the instance that may be told.
    """
    if distil.context == "none":
        return ""
    if distil.context == "expert":
        return f"{EXPERT}\n\n{record(others[0])}" if others else None
    hindsight = f"{HINDSIGHT.format(mark=_MARK)}\n\n{record(trajectory, marked=position)}"
    beside = records_beside(trajectory, position, others, distil.key) if distil.context == "records" else ()
    return "\n\n".join([hindsight, *beside])


def until_reply(messages: Sequence[Message], number: int) -> tuple[Message, ...]:
    """Return a conversation up to the reply with a number, counted from 0 among those that carry
    loss or are part of a turn that grew.
    """
    before = 0
    for place, message in enumerate(messages):
        replies = (len(message.spans) + 1) // 2 if message.spans else int(message.train)
        if number < before + replies:
            last = grown_turn(message.spans[: 2 * (number - before) + 1]) if message.spans else message
            return (*messages[:place], last)
        before += replies
    raise DataFault(f"a conversation of {before} replies has no reply {number + 1}")


def with_context(messages: Sequence[Message], context: str) -> tuple[Message, ...]:
    """Return a conversation that ends with a reply, with a text at the end of the last turn before
    it that is not the model's.
    """
    if not context:
        return tuple(messages)
    place = max(place for place, message in enumerate(messages) if message.role != "assistant")
    turn = replace(messages[place], text=f"{messages[place].text}\n\n{context}")
    return (*messages[:place], turn, *messages[place + 1 :])


class Reading(NamedTuple):
    """A conversation that a scorer reads, with all that it is told: some steps of an episode, by
    their positions, of which the first `num_given` are not scored.
    """

    messages: tuple[Message, ...]
    positions: tuple[int, ...]
    num_given: int


def readings(
    env: Environment, trajectory: Trajectory, distil: DistilConfig, others: Sequence[Trajectory], *, given: int
) -> Iterator[Reading]:
    """Yield what a scorer reads of an episode whose first `given` steps are not trained: each step
    with what it is told there, or each conversation at once if it is told nothing. `others` are as
    in `context_of`.
    """
    parts: Sequence[Part] = conversations(env, trajectory) if trajectory.steps else ()
    for part in parts:
        if part.is_left_out:
            continue
        num_given = sum(position < given for position in part.positions)
        if distil.context == "none":
            yield Reading(part.messages, part.positions, num_given)
            continue
        for number in range(num_given, len(part.positions)):
            context = context_of(distil, trajectory, part.positions[number], others)
            if context is not None:
                messages = with_context(until_reply(part.messages, number), context)
                yield Reading(messages, part.positions[: number + 1], number)


def other_episodes(
    store: Store, iteration_id: str, group: Mapping[str, Mapping[str, Trajectory]], *, until: int
) -> dict[str, list[Trajectory]]:
    """Return the episodes of some instances that a run stored, by instance: those of the given
    groups, by instance and id, and as in `load_records`; of searches the paths that ended.
    """
    others: dict[str, list[Trajectory]] = {key: list(episodes.values()) for key, episodes in group.items()}
    for key, ids in load_records(store, iteration_id, sorted(group), until=until).items():
        earlier = [name for name in ids.trajectories if name not in group[key]]
        others[key] += load_trajectories(store, earlier).values()
        for tree_id, tree in load_trees(store, ids.trees).items():
            others[key] += [path.trajectory for path in leaf_paths(tree, tree_id)]
    return others


def expert_of(env: Environment, instance: Instance) -> Trajectory | Rejection | None:
    """Return the expert's episode of an instance, or why what it claims to solve is no success;
    None where it knows no solution. Raises `Transient` faults of the world.
    """
    try:
        return expert_trajectory(env, instance)
    except Transient:
        raise
    except EnvironmentFault as fault:
        return Rejection(stage=STAGE, subject=instance.key, reason="failed-replay", detail=str(fault))
