"""An episode at a glance: its actions line by line, and the step at which it leaves another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentr_core.evaluation.metrics import IN_A_ROW, all_loops
from agentr_core.store.queries.trees import PathStep


class Line(NamedTuple):
    """Equal actions of a fold, as one line."""

    position: int
    """Of the first of them."""
    action: str
    times: int
    refused: list[int]
    """The positions of those that the world refused."""
    parting: int | None
    """The position of the step at which two episodes part, if it is among them."""
    summary: bool
    """Whether it is no action, but a summary of the history."""


class Fold(NamedTuple):
    """Actions that come `times` in a row, one line each; a single action is a fold, too."""

    lines: list[Line]
    times: int
    loop: bool
    """Whether that is a loop, as evaluations count looping episodes."""

    @property
    def end(self) -> int:
        """The position of the last step."""
        return self.lines[0].position + len(self.lines) * self.times - 1


def folds(steps: Sequence[PathStep], parting: int | None = None) -> list[Fold]:
    """Return the steps of an episode from the first to the last, loops and equal actions folded.

    An episode has a loop exactly if `metrics.is_stuck` is true of its actions.
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
    """Return the position of the first action in which two episodes differ; where one goes on from
    the other, of the first action after that.
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (here, there) in pairs if here != there), min(len(first), len(second)))


def same_before(first: str, steps: Sequence[PathStep]) -> dict[int, int]:
    """Return, for each step whose observation the episode has had before, the position of the step
    that had it first, -1 for the start.
    """
    positions = {first: -1}
    firsts = [(step.position, positions.setdefault(step.observation, step.position)) for step in steps]
    return {position: at for position, at in firsts if at != position}
