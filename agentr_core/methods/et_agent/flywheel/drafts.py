"""What an operator makes of a parent, before world and policy complete it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from agentr_core.methods.et_agent.flywheel.prompts import Domain
from agentr_core.types import Step, Trajectory


class Unmade(NamedTuple):
    """The reason why an operator makes no child: a slug, and details."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The beginning of a child.

    `prefix` holds recorded steps. `reply` is a reply, written by a model, that the world gets after
    them; it is empty if the policy goes on at once. `position` is the step at which the child
    leaves its parent, or None if it differs as a whole. `whole` is a finished child, which needs
    neither world nor policy. `prompt_hash` is the hash of the prompt that a model was given for it,
    or of the policy's hint.
    """

    prefix: tuple[Step, ...] = ()
    reply: str = ""
    position: int | None = None
    whole: Trajectory | None = None
    prompt_hash: str = ""

    @property
    def given(self) -> int:
        """The number of the child's first steps that were recorded before; their tools are not
        called again.
        """
        return len(self.prefix if self.whole is None else self.whole.steps)


class Manner(Protocol):
    """The form of steps in a kind of world: what counts as a step, and how a text becomes one.

    A numbered step may consist of several recorded ones, such as a hint and the reply that follows
    it.
    """

    @property
    def form(self) -> str:
        """How a step is written, as a phrase for prompts."""
        ...

    @property
    def domain(self) -> Domain:
        """The kind of hints that suit the world."""
        ...

    def ends(self, steps: Sequence[Step]) -> list[int]:
        """Return for each numbered step how many recorded steps there are up to its end."""
        ...

    def text(self, steps: Sequence[Step]) -> str:
        """Return one numbered step, given as recorded steps, as text."""
        ...

    def edited(self, before: Sequence[Step], text: str) -> Draft | Unmade:
        """Return the draft that goes on from recorded steps with a rewritten step."""
        ...

    def hinted(self, steps: Sequence[Step], hint: str) -> Draft:
        """Return the draft that goes on from recorded steps with a hint; an answer, or any other
        end of the episode, is undone.
        """
        ...

    def cost(self, trajectory: Trajectory) -> int:
        """Return the number of tool calls, or of steps where there are no tools."""
        ...


def numbered(manner: Manner, steps: Sequence[Step], upto: int | None = None) -> str:
    """Return steps as a numbered list, all of them or the first few."""
    ends = manner.ends(steps)[:upto]
    starts = [0, *ends]
    return "\n\n".join(
        f"### Step {number}\n{manner.text(steps[start:end]).strip()}"
        for number, (start, end) in enumerate(zip(starts, ends, strict=False), start=1)
    )


def at_step(manner: Manner, steps: Sequence[Step], number: int) -> tuple[int, int] | Unmade:
    """Return where a numbered step begins and ends among recorded ones, or `Unmade` if the number
    is out of range.
    """
    ends = manner.ends(steps)
    if not 1 <= number <= len(ends):
        return Unmade("step-out-of-range", f"step {number} of {len(ends)}")
    return ([0, *ends][number - 1], ends[number - 1])


def written(step: Step, reply: str) -> Step:
    """Return a recorded step with another reply, which the policy did not sample."""
    return replace(step, reply=reply, token_ids=(), logprobs=None, finish_reason=None, tokenizer=None)
