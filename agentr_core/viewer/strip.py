"""An episode at a glance: its actions line by line, what first went wrong in it, and the step at
which it leaves another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from agentr_core.evaluation.metrics import IN_A_ROW, LOOP_LENGTHS
from agentr_core.store.queries.trees import PathStep
from agentr_core.types import StopReason

_LOSSES: Final = (StopReason.FAILURE, StopReason.DISASTER)


class Line(NamedTuple):
    """Equal actions of a fold, as one line."""

    position: int
    """Of the first of them."""
    action: str
    times: int
    refused: list[int]
    """The positions of those that the world refused."""
    answer: str
    """What the world answered to the first of those; empty if it refused none."""
    parts: bool
    """Whether the step at which two episodes part is among them."""


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


class Fault(NamedTuple):
    """The first step that was refused, that begins a loop, or that lost the episode."""

    kind: str
    """refused, loop or lost."""
    position: int
    """Of a loop, where its first repeat begins."""
    line: Line
    fold: Fold


def folds(steps: Sequence[PathStep], parting: int | None = None) -> list[Fold]:
    """Return the steps of an episode from the first to the last, loops and equal actions folded.

    An episode has a loop exactly if `metrics.is_stuck` is true of its actions.
    """
    strip = []
    at = 0
    while at < len(steps):
        length, times = _repeats([step.action for step in steps], at)
        lines = []
        for place in range(at, at + length):
            alike = steps[place : at + length * times : length]
            refused = [step for step in alike if step.valid is False]
            line = Line(
                position=steps[place].position,
                action=steps[place].action,
                times=times,
                refused=[step.position for step in refused],
                answer=refused[0].observation if refused else "",
                parts=any(step.position == parting for step in alike),
            )
            lines.append(line)
        strip.append(Fold(lines, times, times >= IN_A_ROW))
        at += length * times
    return strip


def faults(steps: Sequence[PathStep], strip: Sequence[Fold], stop: str) -> list[Fault]:
    """Return the first refused step, the first loop and the losing step of an episode, as far as it
    has them, the earliest first.
    """
    lines = [(line, fold) for fold in strip for line in fold.lines]
    refused = [Fault("refused", line.refused[0], line, fold) for line, fold in lines if line.refused]
    loops = [Fault("loop", one.lines[0].position + len(one.lines), one.lines[0], one) for one in strip if one.loop]
    lost = [Fault("lost", steps[-1].position, *lines[-1])] if steps and stop in _LOSSES else []
    firsts = [*sorted(refused, key=_place)[:1], *loops[:1], *lost]
    return sorted(firsts, key=_place)


def parting(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the position of the first action in which two episodes differ; where one goes on from
    the other, of the first action after that.
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (here, there) in pairs if here != there), min(len(one), len(other)))


def same_before(first: str, steps: Sequence[PathStep]) -> dict[int, int]:
    """Return, for each step whose observation the episode has had before, the position of the step
    that had it first, -1 for the start.
    """
    seen = {first: -1}
    firsts = [(step.position, seen.setdefault(step.observation, step.position)) for step in steps]
    return {position: at for position, at in firsts if at != position}


def _place(fault: Fault) -> int:
    return fault.position


def _repeats(actions: Sequence[str], at: int) -> tuple[int, int]:
    """Return how many actions from a place on repeat, and how often they come in a row: those of
    the loop that reaches furthest, or equal actions.
    """
    counts = []
    for length in LOOP_LENGTHS:
        times = 1
        while actions[at : at + length] == actions[at + times * length : at + (times + 1) * length]:
            times += 1
        counts.append((length, times))
    loops = [(length, times) for length, times in counts if times >= IN_A_ROW]
    return max(loops, key=lambda loop: loop[0] * loop[1], default=counts[0])
