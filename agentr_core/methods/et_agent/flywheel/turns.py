"""Steps in worlds where reply and observation alternate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.environments.reasoning.grammar import PYTHON, SEARCH
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.methods.et_agent.flywheel.drafts import Draft, Manner, Unmade
from agentr_core.methods.et_agent.flywheel.prompts import IN_TURNS, Domain
from agentr_core.methods.et_agent.flywheel.tagged import Tagged
from agentr_core.protocols.environment import Environment
from agentr_core.types import Instance, Step, Trajectory


@dataclass(frozen=True, slots=True)
class Turns:
    """The form of steps in worlds with alternating turns. See `drafts.Manner`.

    A hint is a reply like any other: the world answers that there is no action in it.
    """

    domain: Domain = "steps"
    form: str = IN_TURNS

    def ends(self, steps: Sequence[Step]) -> list[int]:
        """Return the end of each step: each recorded step is one."""
        return list(range(1, len(steps) + 1))

    def text(self, steps: Sequence[Step]) -> str:
        """Return reply and observation as one text."""
        return "\n".join(f"{step.reply}\nObservation: {step.observation}" for step in steps)

    def edited(self, before: Sequence[Step], text: str) -> Draft | Unmade:
        """Return a draft that goes on with a rewritten reply, which is carried out."""
        if not text.strip():
            return Unmade("empty-step")
        return Draft(prefix=tuple(before), reply=text.strip(), position=len(before))

    def hinted(self, steps: Sequence[Step], hint: str) -> Draft:
        """Return a draft that goes on with a hint; a step that ended the episode is left out."""
        kept = tuple(steps[:-1] if steps and steps[-1].terminated else steps)
        return Draft(prefix=kept, reply=hint, position=len(kept))

    def cost(self, trajectory: Trajectory) -> int:
        """Return the number of steps."""
        return len(trajectory.steps)


def manner_of(env: Environment, instance: Instance) -> Manner:
    """Return the form of steps in the world of an instance."""
    if not isinstance(transcript_of(env), Continuation):
        return Turns()
    return Tagged(_domain(env, instance) if isinstance(env, ReasoningWorld) else "knowledge")


def _domain(world: ReasoningWorld, instance: Instance) -> Domain:
    """Return the kind of hints for a question; without the tool that they speak of, the general
    one.
    """
    domain = world.problem(instance).domain
    return domain if {"math": PYTHON, "knowledge": SEARCH}[domain] in world.tools else "steps"
