"""Find what went wrong in a failed episode: its refused, looping and losing steps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from agentr_core.evaluation.metrics import all_loops
from agentr_core.types import StopReason

_LOST_STOPS: Final = (StopReason.FAILURE, StopReason.DISASTER)
_MAX_EXCERPT_LENGTH: Final = 90
"""The maximum length of an action or an answer in a sentence."""


class StepLike(Protocol):
    """A step of an episode, from a trajectory or from the store's table."""

    @property
    def reply(self) -> str:
        """What the model wrote."""

    @property
    def action(self) -> str:
        """What the environment's parser found in `reply`."""

    @property
    def observation(self) -> str:
        """What the world answered."""

    @property
    def valid(self) -> bool | None:
        """Whether the world accepted the action; None if it does not report that."""


class FailureStep(NamedTuple):
    """A step with which a failed episode went wrong."""

    kind: str
    """`refused`, `loop`, `lost`, or `ended`: the last step of an episode with none of the
    others.
    """
    step: int
    """Its position, from 0; of a loop, that of its first action."""
    words: str
    """What went wrong, as the rest of a sentence that begins with `step 3`."""
    actions: list[str]
    """Its action, or its reply if that has no action; of a loop, the actions of one pass."""
    answer: str
    """What the world answered; empty for a loop."""

    @property
    def sentence(self) -> str:
        """One line about the step, with long texts cut."""
        actions, answer = "; ".join(map(_excerpt, self.actions)), _excerpt(self.answer)
        return f"step {self.step} {self.words}: {actions}{f' → {answer}' if answer else ''}"


def failure_steps(steps: Sequence[StepLike], stop: str) -> list[FailureStep]:
    """Return the first refused step, the first loop, the longest loop if that is another one, and
    the losing step of a failed episode, as far as it has them, the earliest first; with none of
    these, its last step. Empty for an episode without steps.

    Args:
        stop: why the episode ended, a `StopReason`.
    """
    if not steps:
        return []

    def failure_at(kind: str, position: int, words: str) -> FailureStep:
        step = steps[position]
        return FailureStep(kind, position, words, [step.action or step.reply], step.observation)

    first_refusal = next((position for position, step in enumerate(steps) if step.valid is False), None)
    loops = list(all_loops([step.action for step in steps]))
    last_position = len(steps) - 1
    failures = [] if first_refusal is None else [failure_at("refused", first_refusal, "is the first that was refused")]
    shown_loops = loops[:1]
    # A first loop may be of use, such as one that gathers what the goal needs.
    if loops and (longest := max(loops, key=lambda loop: loop.stop - loop.start)) != loops[0]:
        shown_loops.append(longest)
    for loop in shown_loops:
        loop_name = "a loop" if loop is loops[0] else "the longest loop"
        words = f"begins {loop_name}, {loop.times} times in a row up to step {loop.stop - 1}"
        actions = [step.action or step.reply for step in steps[loop.start : loop.start + loop.length]]
        failures.append(FailureStep("loop", loop.start, words, actions, ""))
    if stop in _LOST_STOPS:
        failures.append(failure_at("lost", last_position, "lost the episode"))
    # Sorted stably: a step that was refused and begins a loop was refused first.
    last_failure = failure_at("ended", last_position, f"is the last, ended by {stop.replace('_', ' ')}")
    return sorted(failures, key=lambda failure: failure.step) or [last_failure]


def _excerpt(text: str) -> str:
    """Return a text in one short line."""
    return textwrap.shorten(text, _MAX_EXCERPT_LENGTH, placeholder="…")
