"""An episode at a glance: its actions line by line, and the step at which it leaves another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentr_core.evaluation.metrics import MIN_LOOP_REPEATS, all_loops
from agentr_core.store.queries.trees import PathStep


class Line(NamedTuple):
    """One action of a fold with all its repetitions, shown as one line."""

    position: int
    """The position of its first occurrence."""
    action: str
    num_times: int
    refused_positions: list[int]
    """The positions at which the world refused it."""
    parting_position: int | None
    """The position of the step at which two episodes part, if it is one of these; else None."""
    is_summary: bool
    """Whether it is not an action but a summary of the history."""


class Fold(NamedTuple):
    """A sequence of actions that occurs `num_times` times in a row, a line for each of the actions;
    a single action is a fold, too.
    """

    lines: list[Line]
    num_times: int
    is_loop: bool
    """Whether the evaluation metrics count this as a loop."""

    @property
    def end(self) -> int:
        """The position of the last step."""
        return self.lines[0].position + len(self.lines) * self.num_times - 1


def folds(steps: Sequence[PathStep], parting: int | None = None) -> list[Fold]:
    """Return the steps of an episode in order, with loops and repeated actions folded.

    One of the folds is a loop exactly if `metrics.is_stuck` is true of the episode's actions.
    """
    actions = [step.action for step in steps]
    strip = []
    start = 0
    loops = all_loops(actions)
    loop = next(loops, None)
    while start < len(steps):
        length = times = 1
        if loop and loop.start == start:
            length, times = loop.length, loop.times
            loop = next(loops, None)
        else:
            end = loop.start if loop else len(steps)
            while start + times < end and actions[start + times] == actions[start]:
                times += 1
        lines = []
        for index in range(start, start + length):
            repetitions = steps[index : start + length * times : length]
            refused_positions = [step.position for step in repetitions if step.valid is False]
            fold_parting = next((step.position for step in repetitions if step.position == parting), None)
            is_summary = steps[index].summary_of is not None
            lines.append(
                Line(steps[index].position, steps[index].action, times, refused_positions, fold_parting, is_summary)
            )
        strip.append(Fold(lines, times, times >= MIN_LOOP_REPEATS))
        start += length * times
    return strip


def parting_position(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the position of the first action in which two episodes differ; if one is the beginning
    of the other, the position after its last action.
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next(
        (position for position, (first_action, second_action) in pairs if first_action != second_action),
        min(len(first), len(second)),
    )


def first_same_observation(first_observation: str, steps: Sequence[PathStep]) -> dict[int, int]:
    """Return, by the position of each step whose observation already occurred in the episode, the
    position of the step where it occurred first, -1 for `first_observation`.
    """
    positions = {first_observation: -1}
    first_positions = [(step.position, positions.setdefault(step.observation, step.position)) for step in steps]
    return {position: first_position for position, first_position in first_positions if first_position != position}
