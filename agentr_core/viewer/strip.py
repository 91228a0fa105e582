"""An episode at a glance: its actions line by line, and the step at which it leaves another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentr_core.evaluation.metrics import IN_A_ROW, all_loops
from agentr_core.store.queries.trees import PathStep


class Line(NamedTuple):
    """One action of a fold with all its repetitions, shown as one line."""

    position: int
    """The position of its first occurrence."""
    action: str
    times: int
    refused: list[int]
    """The positions at which the world refused it."""
    parting: int | None
    """The position of the step at which two episodes part, if it is one of these; else None."""
    summary: bool
    """Whether it is not an action but a summary of the history."""


class Fold(NamedTuple):
    """A sequence of actions that occurs `times` times in a row, a line for each of the actions; a
    single action is a fold, too.
    """

    lines: list[Line]
    times: int
    loop: bool
    """Whether the evaluation metrics count this as a loop."""

    @property
    def end(self) -> int:
        """The position of the last step."""
        return self.lines[0].position + len(self.lines) * self.times - 1


def folds(steps: Sequence[PathStep], parting: int | None = None) -> list[Fold]:
    """Return the steps of an episode in order, with loops and repeated actions folded.

    One of the folds is a loop exactly if `metrics.is_stuck` is true of the episode's actions.
    """
    actions = [step.action for step in steps]
    strip = []
    at = 0
    loops = all_loops(actions)
    loop = next(loops, None)
    while at < len(steps):
        length = times = 1
        if loop and loop.start == at:
            length, times = loop.length, loop.times
            loop = next(loops, None)
        else:
            end = loop.start if loop else len(steps)
            while at + times < end and actions[at + times] == actions[at]:
                times += 1
        lines = []
        for place in range(at, at + length):
            alike = steps[place : at + length * times : length]
            refusals = [step.position for step in alike if step.valid is False]
            here = next((step.position for step in alike if step.position == parting), None)
            summary = steps[place].summary_of is not None
            lines.append(Line(steps[place].position, steps[place].action, times, refusals, here, summary))
        strip.append(Fold(lines, times, times >= IN_A_ROW))
        at += length * times
    return strip


def parting(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the position of the first action in which two episodes differ; if one is the beginning
    of the other, the position after its last action.
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (here, there) in pairs if here != there), min(len(first), len(second)))


def same_before(first: str, steps: Sequence[PathStep]) -> dict[int, int]:
    """Return, by the position of each step whose observation already occurred in the episode, the
    position of the step where it occurred first, -1 for the first observation `first`.
    """
    positions = {first: -1}
    firsts = [(step.position, positions.setdefault(step.observation, step.position)) for step in steps]
    return {position: at for position, at in firsts if at != position}
