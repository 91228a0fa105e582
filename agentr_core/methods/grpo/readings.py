"""The conversations in which a scorer reads the policy's episodes (`grpo.distil`).

The scorer reads the tokens that the policy sampled in their conversation, with records of episodes
that the policy had not read: its own episode to the end, the expert's, or others of the same
instance that pass through the same states. A record has actions and observations, but no thoughts.
It is put at the end of the last turn before the reply, so that the policy's own turns, and with
them its token ids, stay the same.
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
    """Return the actions, observations and result of an episode as text, without thoughts. The
    step at position `marked` gets a mark.
    """
    lines = [trajectory.first_observation]
    for position, step in enumerate(trajectory.steps):
        # A summary has no action.
        if step.summary_of is None:
            lines.append(f"{f'{_MARK} ' if position == marked else ''}Action: {step.action}")
            lines += readable_turns(step.observation)
    ending = "a success" if trajectory.success else "no success"
    return "\n".join([*filter(None, lines), f"The end: {ending}, reward {trajectory.reward:g}."])


def states_of(trajectory: Trajectory, key: StateKey) -> tuple[str | None, ...]:
    """Return a key of the state in which each step was taken: the world's own or, with
    `observation`, the last observation. None for a summary, and where the world reports no state.
    """
    if key == "world":
        return tuple(step.state_key for step in trajectory.steps)
    before = (trajectory.first_observation, *(step.observation for step in trajectory.steps))
    states = zip(trajectory.steps, before, strict=False)
    return tuple(None if step.summary_of is not None else observation for step, observation in states)


# The state of the scored step is not enough: the last state from which a win is known shows where
# the episode went wrong.
def records_beside(trajectory: Trajectory, position: int, others: Sequence[Trajectory], key: StateKey) -> Iterator[str]:
    """Yield, as texts for the scorer, other episodes of the instance that bear on the step at
    `position`: the one that wins in the fewest steps from the step's state, unless `trajectory`
    wins in as few. If none wins from there and `trajectory` fails: one that wins from the latest
    earlier state, or else the shortest that wins; and one that fails and shares the latest state.

    Source: arXiv 2609.37522, selection of records.
    """
    states = states_of(trajectory, key)
    of_others = [(other, states_of(other, key)) for other in others]

    def nearest(at: int, *, won: bool) -> tuple[int, Trajectory, int] | None:
        """Return, of the other episodes that `won` or not and pass through the state of step `at`,
        the one with the fewest steps left there: that number, the episode and its position.
        """
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
    """Return the records that a scorer reads before the step at `position`, as text; the empty
    string with `context: none`, None if there is no expert's episode with `context: expert`.

    Args:
        others: the expert's episode of the instance, if it has one; with `context: records`, all
            other episodes of the instance that the scorer may read.
    """
    if distil.context == "none":
        return ""
    if distil.context == "expert":
        return f"{EXPERT}\n\n{record(others[0])}" if others else None
    hindsight = f"{HINDSIGHT.format(mark=_MARK)}\n\n{record(trajectory, marked=position)}"
    beside = records_beside(trajectory, position, others, distil.key) if distil.context == "records" else ()
    return "\n\n".join([hindsight, *beside])


def until_reply(messages: Sequence[Message], number: int) -> tuple[Message, ...]:
    """Return a conversation up to and including reply `number`, counted from 0 among the replies
    that carry loss or belong to a grown turn. Raises `DataFault` if it has no such reply.
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
    """Return a conversation with `context` added at the end of its last turn that is not the
    assistant's; unchanged if `context` is empty.
    """
    if not context:
        return tuple(messages)
    place = max(place for place, message in enumerate(messages) if message.role != "assistant")
    turn = replace(messages[place], text=f"{messages[place].text}\n\n{context}")
    return (*messages[:place], turn, *messages[place + 1 :])


class Reading(NamedTuple):
    """A conversation that a scorer reads, records included. `positions` are the steps of the
    episode in it; the first `num_given` of them are not scored.
    """

    messages: tuple[Message, ...]
    positions: tuple[int, ...]
    num_given: int


def readings(
    env: Environment, trajectory: Trajectory, distil: DistilConfig, others: Sequence[Trajectory], *, given: int
) -> Iterator[Reading]:
    """Yield the readings of an episode whose first `given` steps are not trained: one for each
    other step, with its records, or with `context: none` one for each conversation. `others` are as
    in `context_of`; steps for which there is no record are left out.
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
    """Return the episodes of some instances, by instance key: those of `group` (episodes by
    instance key and id), then those that the run stored before, as in `load_records`. Of search
    trees these are the paths at whose end an episode ended.
    """
    others: dict[str, list[Trajectory]] = {key: list(episodes.values()) for key, episodes in group.items()}
    for key, ids in load_records(store, iteration_id, sorted(group), until=until).items():
        earlier = [name for name in ids.trajectories if name not in group[key]]
        others[key] += load_trajectories(store, earlier).values()
        for tree_id, tree in load_trees(store, ids.trees).items():
            others[key] += [path.trajectory for path in leaf_paths(tree, tree_id)]
    return others


def expert_of(env: Environment, instance: Instance) -> Trajectory | Rejection | None:
    """Return the expert's episode of an instance; a rejection if its replay fails, None if the
    expert knows no solution. Raises errors of the world that are `Transient`.
    """
    try:
        return expert_trajectory(env, instance)
    except Transient:
        raise
    except EnvironmentFault as fault:
        return Rejection(stage=STAGE, subject=instance.key, reason="failed-replay", detail=str(fault))
