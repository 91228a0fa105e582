"""The section `et_agent` of a recipe: tool-integrated reasoning with calibrated behaviour.

Unless a field says otherwise, defaults are the numbers of the ET-Agent paper (arXiv 2601.06860) and
of its published launch files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from agentr_core.recipes.curriculum import CurriculumConfig
from agentr_core.recipes.fields import Count, Natural, Temperature, record
from agentr_core.recipes.sampling import DrawingConfig, EpisodeFields, SamplingFields, TopP

Calibration = Literal["rft", "rl"]
"""What an iteration does: a flywheel and supervised training on the trajectories it made, or
reinforcement learning on questions that it selects."""
OfCorrect = Literal["C0", "C1", "C2"]
"""How a right trajectory is varied. C0: a fresh one; C1: its first redundant step is rewritten, and
it is continued from there; C2: all its thoughts are rewritten, with the same actions.
"""
OfIncorrect = Literal["I1", "I2", "I3", "I4"]
"""How a wrong trajectory is varied. I1: its first flawed step is corrected by the reflector, and it
is continued from there; I2: a hint after that step; I3: a hint at the end; I4: the reflector's
review at the end.
"""


@record
class HelperConfig(DrawingConfig):
    """How the reflector or the editor of a flywheel is asked."""

    max_new_tokens: Natural = 0
    """0: as many as a reply of the policy may have, `et_agent.flywheel.max_new_tokens`."""


@record
class FlywheelConfig(SamplingFields, EpisodeFields):
    """How a question's trajectories are varied, round by round. Grading is the world's."""

    fresh: Count = 1
    """How many trajectories of each question are sampled before the first round. With `rounds` 0
    there are no others: fine-tuning without the flywheel.
    """
    rounds: Natural = 3
    policy: Literal["best-one", "expand-all"] = "best-one"
    """Which members of a family a round varies: the best one that has not been varied yet (as in
    the published code), or all (as in the paper)."""
    correct: tuple[OfCorrect, ...] = ("C0", "C1", "C2")
    incorrect: tuple[OfIncorrect, ...] = ("I1", "I2", "I3")
    most_members: Count = 64
    """The most trajectories of a question; no round exceeds it."""
    most_tokens: Natural = 0
    """Once models have written this many tokens for a question, no further round begins; 0: no
    limit.
    """
    temperature: Temperature = 1.0
    """The policy's temperature. The other sampling settings are the policy's, too; `max_new_tokens`
    limits each reply.
    """
    top_p: TopP = 0.95
    max_new_tokens: Count = 4096
    max_steps: Count = 24
    """The most replies of the policy in a trajectory, not counting those that it continues from."""
    reflector: HelperConfig = HelperConfig()
    """How the model of role `reflector` is asked to review a wrong trajectory and correct it."""
    editor: HelperConfig = HelperConfig()
    """How the model of role `editor` is asked to find a step and to rewrite it."""

    def __post_init__(self) -> None:
        # Settled here, so that the id of a run with a limit is the same whether or not it is left
        # to the policy's.
        for name in ("reflector", "editor"):
            if not (helper := getattr(self, name)).max_new_tokens:
                object.__setattr__(self, name, replace(helper, max_new_tokens=self.max_new_tokens))


@record
class RftConfig:
    """The trajectories that are trained on: right ones, in the strict format, without a failed
    call.
    """

    per_question: Natural = 0
    """The most trajectories of a question, drawn from all that qualify; 0: no limit."""


@record
class BehaviourConfig:
    """Questions to models in an evaluation on the test set, beyond what its episodes show; only in
    the reasoning world.
    """

    votes: Natural = 0
    """How often the model of role `judge` is asked whether an episode was concise (published: 10);
    0: never.
    """
    nudge: bool = False
    """Whether the policy gets one hint after a wrong answer and goes on, to see how many it
    corrects.
    """


@record
class EtAgentConfig:
    """ET-Agent: what each iteration does, and how."""

    phases: tuple[Calibration, ...] = ("rft", "rl", "rl", "rl")
    """What each iteration does; the last entry counts for all later iterations."""
    flywheel: FlywheelConfig = FlywheelConfig()
    rft: RftConfig = RftConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    behaviour: BehaviourConfig = BehaviourConfig()


def et_agent_faults(et_agent: EtAgentConfig) -> list[str]:
    """Return what is wrong with the section `et_agent` of a recipe, one sentence each."""
    faults = []
    if not et_agent.phases:
        faults.append("et_agent.phases: name at least one of rft and rl")
    return [*faults, *(_flywheel_faults(et_agent.flywheel) if "rft" in et_agent.phases else [])]


def _flywheel_faults(flywheel: FlywheelConfig) -> list[str]:
    where, faults = "et_agent.flywheel", []
    for name, operators in (("correct", flywheel.correct), ("incorrect", flywheel.incorrect)):
        if len(set(operators)) < len(operators):
            faults.append(f"{where}.{name}: an operator is named twice; name each once")
    if flywheel.rounds and not (flywheel.correct or flywheel.incorrect):
        faults.append(f"{where}: rounds without an operator make nothing; name some in correct or incorrect")
    if flywheel.most_members < flywheel.fresh:
        faults.append(f"{where}.most_members: {flywheel.most_members} leaves no room for {flywheel.fresh} fresh ones")
    if flywheel.temperature == 0 and (flywheel.fresh > 1 or "C0" in flywheel.correct):
        faults.append(f"{where}.temperature: at 0 all fresh trajectories of a question are one; raise it")
    return faults
