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

from agentr_core.environment import Conversation, Environment
from agentr_core.episodes.transcript import conversations, turn_texts
from agentr_core.errors import DataFault, EnvironmentFault, Transient
from agentr_core.methods.grpo.cuts import STAGE
from agentr_core.recipes.grpo import DistilConfig, StateKey
from agentr_core.search.tree import leaf_paths
from agentr_core.stages.demonstrate import expert_trajectory
from agentr_core.store.codec.ledger import load_record_ids
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


def record_text(trajectory: Trajectory, *, marked_position: int | None = None) -> str:
    """Return the actions, observations and result of an episode as text, without thoughts. The
    step at position `marked_position` gets a mark.
    """
    lines = [trajectory.first_observation]
    for position, step in enumerate(trajectory.steps):
        # A summary has no action.
        if step.summary_of is None:
            lines.append(f"{f'{_MARK} ' if position == marked_position else ''}Action: {step.action}")
            lines += turn_texts(step.observation)
    ending = "a success" if trajectory.success else "no success"
    return "\n".join([*filter(None, lines), f"The end: {ending}, reward {trajectory.reward:g}."])


def states_of(trajectory: Trajectory, key: StateKey) -> tuple[str | None, ...]:
    """Return a key of the state in which each step was taken: the world's own or, with
    `observation`, the last observation. None for a summary, and where the world reports no state.
    """
    if key == "world":
        return tuple(step.state_key for step in trajectory.steps)
    observations = (trajectory.first_observation, *(step.observation for step in trajectory.steps))
    states = zip(trajectory.steps, observations, strict=False)
    return tuple(None if step.summary_of is not None else observation for step, observation in states)


# The state of the scored step is not enough: the last state from which a win is known shows where
# the episode went wrong.
def relevant_records(
    trajectory: Trajectory, position: int, others: Sequence[Trajectory], key: StateKey
) -> Iterator[str]:
    """Yield, as texts for the scorer, other episodes of the instance that bear on the step at
    `position`: the one that wins in the fewest steps from the step's state, unless `trajectory`
    wins in as few. If none wins from there and `trajectory` fails: one that wins from the latest
    earlier state, or else the shortest that wins; and one that fails and shares the latest state.

    Source: arXiv 2609.37522, selection of records.
    """
    states = states_of(trajectory, key)
    states_of_others = [(other, states_of(other, key)) for other in others]

    def nearest(anchor_position: int, *, has_won: bool) -> tuple[int, Trajectory, int] | None:
        """Return, of the other episodes that won (or not, by `has_won`) and pass the state of step
        `anchor_position`, the one with the fewest steps left there: that number, the episode and
        its position.
        """
        best = None
        for other, other_states in states_of_others:
            if (
                other.success == has_won
                and states[anchor_position] is not None
                and states[anchor_position] in other_states
            ):
                other_position = max(n for n, state in enumerate(other_states) if state == states[anchor_position])
                if best is None or len(other_states) - other_position < best[0]:
                    best = len(other_states) - other_position, other, other_position
        return best

    if (win := nearest(position, has_won=True)) is not None or trajectory.success:
        if win is not None and not (trajectory.success and len(states) - position <= win[0]):
            _, other, other_position = win
            yield f"{WON_FROM_HERE.format(mark=_MARK)}\n\n{record_text(other, marked_position=other_position)}"
        return
    earlier_positions = range(position - 1, -1, -1)
    anchors = (
        (anchor_position, candidate)
        for anchor_position in earlier_positions
        if (candidate := nearest(anchor_position, has_won=True)) is not None
    )
    if (anchor := next(anchors, None)) is not None:
        anchor_position, (_, other, other_position) = anchor
        yield (
            f"{WON_FROM_BEFORE.format(mark=_MARK, step=anchor_position + 1)}\n\n"
            f"{record_text(other, marked_position=other_position)}"
        )
    elif wins := [other for other in others if other.success]:
        yield f"{WON_ELSEWHERE}\n\n{record_text(min(wins, key=lambda other: len(other.steps)))}"
    failures = (
        (anchor_position, candidate)
        for anchor_position in (position, *earlier_positions)
        if (candidate := nearest(anchor_position, has_won=False)) is not None
    )
    if (failure := next(failures, None)) is not None:
        anchor_position, (_, other, other_position) = failure
        yield (
            f"{LOST.format(mark=_MARK, step=anchor_position + 1)}\n\n"
            f"{record_text(other, marked_position=other_position)}"
        )


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
        return f"{EXPERT}\n\n{record_text(others[0])}" if others else None
    hindsight = f"{HINDSIGHT.format(mark=_MARK)}\n\n{record_text(trajectory, marked_position=position)}"
    beside = relevant_records(trajectory, position, others, distil.key) if distil.context == "records" else ()
    return "\n\n".join([hindsight, *beside])


def conversation_until_reply(messages: Sequence[Message], number: int) -> tuple[Message, ...]:
    """Return a conversation up to and including reply `number`, counted from 0 among the replies
    that carry loss or belong to a grown turn. Raises `DataFault` if it has no such reply.
    """
    num_before = 0
    for position, message in enumerate(messages):
        num_replies = (len(message.spans) + 1) // 2 if message.spans else int(message.train)
        if number < num_before + num_replies:
            last = grown_turn(message.spans[: 2 * (number - num_before) + 1]) if message.spans else message
            return (*messages[:position], last)
        num_before += num_replies
    raise DataFault(f"a conversation of {num_before} replies has no reply {number + 1}")


def with_context(messages: Sequence[Message], context: str) -> tuple[Message, ...]:
    """Return a conversation with `context` added at the end of its last turn that is not the
    assistant's; unchanged if `context` is empty.
    """
    if not context:
        return tuple(messages)
    position = max(position for position, message in enumerate(messages) if message.role != "assistant")
    turn = replace(messages[position], text=f"{messages[position].text}\n\n{context}")
    return (*messages[:position], turn, *messages[position + 1 :])


class Reading(NamedTuple):
    """A conversation that a scorer reads, records included. `positions` are the steps of the
    episode in it; the first `num_given` of them are not scored.
    """

    messages: tuple[Message, ...]
    positions: tuple[int, ...]
    num_given: int


def readings(
    env: Environment, trajectory: Trajectory, distil: DistilConfig, others: Sequence[Trajectory], *, num_untrained: int
) -> Iterator[Reading]:
    """Yield the readings of an episode whose first `num_untrained` steps are not trained: one for
    each other step, with its records, or with `context: none` one for each conversation. `others`
    are as in `context_of`; steps for which there is no record are left out.
    """
    parts: Sequence[Conversation] = conversations(env, trajectory) if trajectory.steps else ()
    for part in parts:
        if part.is_left_out:
            continue
        num_given = sum(position < num_untrained for position in part.positions)
        if distil.context == "none":
            yield Reading(part.messages, part.positions, num_given)
            continue
        for number in range(num_given, len(part.positions)):
            context = context_of(distil, trajectory, part.positions[number], others)
            if context is not None:
                messages = with_context(conversation_until_reply(part.messages, number), context)
                yield Reading(messages, part.positions[: number + 1], number)


def other_episodes(
    store: Store, iteration_id: str, episodes_by_instance: Mapping[str, Mapping[str, Trajectory]], *, until: int
) -> dict[str, list[Trajectory]]:
    """Return the episodes of some instances, by instance key: those of `episodes_by_instance`
    (episodes by instance key and id), then those that the run stored before, as in
    `load_record_ids`. Of search trees these are the paths at whose end an episode ended.
    """
    others: dict[str, list[Trajectory]] = {
        key: list(episodes.values()) for key, episodes in episodes_by_instance.items()
    }
    for key, ids in load_record_ids(store, iteration_id, sorted(episodes_by_instance), last_step=until).items():
        earlier_ids = [
            trajectory_id for trajectory_id in ids.trajectories if trajectory_id not in episodes_by_instance[key]
        ]
        others[key] += load_trajectories(store, earlier_ids).values()
        for tree_id, tree in load_trees(store, ids.trees).items():
            others[key] += [path.trajectory for path in leaf_paths(tree, tree_id)]
    return others


def expert_episode_of(env: Environment, instance: Instance) -> Trajectory | Rejection | None:
    """Return the expert's episode of an instance; a rejection if its replay fails, None if the
    expert knows no solution. Raises errors of the world that are `Transient`.
    """
    try:
        return expert_trajectory(env, instance)
    except Transient:
        raise
    except EnvironmentFault as fault:
        return Rejection(stage=STAGE, subject=instance.key, reason="failed-replay", detail=str(fault))
