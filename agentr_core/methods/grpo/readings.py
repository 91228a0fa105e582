"""What a scorer reads of the policy's episodes (`grpo.distil`).

A scorer is given the tokens that the policy sampled, after what the policy read and a record that
it did not: its own episode to the end, or the expert's. A record says what was done, not what was
thought. It stands at the end of the last turn before the reply, so that the policy's own turns, and
with them the ids of its tokens, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from agentr_core.environment import Environment, Part
from agentr_core.episodes.transcript import conversations, readable_turns
from agentr_core.errors import DataFault, EnvironmentFault, Transient
from agentr_core.methods.grpo.cuts import STAGE
from agentr_core.recipes.grpo import DistilConfig
from agentr_core.stages.demonstrate import expert_trajectory
from agentr_core.types import Instance, Message, Rejection, Trajectory, grown_turn

HINDSIGHT = "For reference: this whole episode, as it went. {mark} marks the step that is next here."
EXPERT = "For reference: an expert's whole episode of this task."
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


def context_of(distil: DistilConfig, trajectory: Trajectory, position: int, expert: Trajectory | None) -> str | None:
    """Return what a scorer is told before the step of an episode at a position; the empty string if
    that is nothing, None if there is no record to tell.

    Args:
        expert: the expert's episode of the instance, where it has one.
    """
    if distil.context == "hindsight":
        return f"{HINDSIGHT.format(mark=_MARK)}\n\n{record(trajectory, marked=position)}"
    if distil.context == "expert":
        return None if expert is None else f"{EXPERT}\n\n{record(expert)}"
    return ""


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
    env: Environment, trajectory: Trajectory, distil: DistilConfig, expert: Trajectory | None, *, given: int
) -> Iterator[Reading]:
    """Yield what a scorer reads of an episode whose first `given` steps are not trained: each step
    with what it is told there, or each conversation at once if it is told nothing.
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
            context = context_of(distil, trajectory, part.positions[number], expert)
            if context is not None:
                messages = with_context(until_reply(part.messages, number), context)
                yield Reading(messages, part.positions[: number + 1], number)


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
