"""The section `et_agent` of a recipe: tool-integrated reasoning with calibrated behaviour.

Unless a field says otherwise, defaults are the numbers of the ET-Agent paper (arXiv 2601.06860) and
of its published launch files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.fields import (
    Count,
    DrawingConfig,
    EpisodeFields,
    Natural,
    Positive,
    SamplingFields,
    Temperature,
    TopP,
    Unit,
    record,
)

# What section `et_agent` of a recipe says about an `rl` iteration: which questions it trains on,
# and what their answers are worth.
#
# Section `grpo` says how groups are sampled and trained on. Defaults are the numbers of the ET-
# Agent paper (arXiv 2601.06860) and of its published launch files, unless a field says otherwise.

Counts = Literal["calls", "steps"]
"""What an episode is charged for: tool calls or, in a world without tools, steps."""
_Weight = Annotated[float, Field(ge=0)]


@record
class CurriculumConfig:
    """A stage of the curriculum: rollouts of all questions, a selection of these, and group RL on
    the selected ones with the efficiency reward.

    `sigma_calls` and `sigma_length` have one number per stage, that is, for each `rl` iteration.
    """

    rollouts: Annotated[int, Field(ge=2)] = 16
    """Rollouts of each question before the selection, at temperature 1, with the limits of section
    `grpo`."""
    select: Literal["pareto", "random"] = "pareto"
    """How questions are chosen: by the Pareto order of their dispersions, or at random."""
    questions: Count = 8000
    """How many questions are chosen; all, where there are fewer."""
    mixed_only: bool = True
    """Leave out questions whose rollouts are all right or all wrong, before the choice."""
    counts: Counts = "calls"
    """What an episode is charged for. With `calls` the format is that of the tags; with `steps` a
    reply without an action breaks the format."""
    call_costs: dict[str, _Weight] = later_field(default_factory=dict)
    """The cost of a tool call in the reward, by the tool's name: for example, its seconds in
    `v_tool_calls`. A tool that is not named costs 1, as published."""
    refused_calls: bool = later_field(False)
    """Whether a call that was refused, since none was left, counts as a call in the reward and in
    the measures of evaluations: the published code counts what is written. The selection counts
    calls that were made, as published."""
    boxed_only: bool = later_field(False)
    """Whether only a box is an answer to the reward, as published: for knowledge the one in the
    answer tag, for mathematics the last one of the whole text. Otherwise an answer without a box
    is its text. In both cases it breaks the format."""
    sigma_calls: tuple[_Weight, ...] = (0.10, 0.05, 0.02)
    """How sharply calls, or steps, count. Only the first number is published."""
    sigma_length: tuple[_Weight, ...] = (0.10, 0.05, 0.02)
    """How sharply the tokens of replies count, in standard deviations of the group."""
    decay: bool = False
    """Whether both sigmas fall linearly to 0 within a stage, as in the published code."""
    amplitude: Positive = 2.0
    """A right answer of mean cost is worth 1 with an amplitude of 2, and a quarter with 1, as
    published.
    """
    format_penalty: _Weight = 1.0
    """What an invalid format subtracts from the reward."""
    learning_rate: Positive = 1e-6
    """This field and the two below replace those of section `training`."""
    lr_scheduler_type: str = "constant"
    warmup_ratio: Unit = 0.0


def curriculum_faults(curriculum: CurriculumConfig, stages: int) -> list[str]:
    """Return what is wrong with a curriculum of `stages` stages, one sentence each."""
    sigmas: dict[str, Sequence[float]] = {
        "sigma_calls": curriculum.sigma_calls,
        "sigma_length": curriculum.sigma_length,
    }
    reasons_by_setting = {
        "call_costs": "steps have none",
        "refused_calls": "steps are none",
        "boxed_only": "where steps are counted, there are no answers in boxes",
    }
    faults = [
        f"et_agent.curriculum.{name}: {reason}; leave it out"
        for name, reason in reasons_by_setting.items()
        if curriculum.counts == "steps" and getattr(curriculum, name)
    ]
    return faults + [
        f"et_agent.curriculum.{name}: the recipe has {stages} iterations rl and {len(values)} numbers; give one for "
        "each"
        for name, values in sigmas.items()
        if len(values) < stages
    ]


Phase = Literal["rft", "rl"]
"""What an iteration does: a flywheel and supervised training on the trajectories it made, or
reinforcement learning on questions that it selects."""
CorrectOperator = Literal["C0", "C1", "C2"]
"""How a right trajectory is varied. C0: a fresh one; C1: its first redundant step is rewritten, and
it is continued from there; C2: all its thoughts are rewritten, with the same actions.
"""
IncorrectOperator = Literal["I1", "I2", "I3", "I4"]
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
    correct: tuple[CorrectOperator, ...] = ("C0", "C1", "C2")
    incorrect: tuple[IncorrectOperator, ...] = ("I1", "I2", "I3")
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

    phases: tuple[Phase, ...] = ("rft", "rl", "rl", "rl")
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
    if "rft" not in et_agent.phases:
        return faults
    flywheel, path = et_agent.flywheel, "et_agent.flywheel"
    for name, operators in (("correct", flywheel.correct), ("incorrect", flywheel.incorrect)):
        if len(set(operators)) < len(operators):
            faults.append(f"{path}.{name}: an operator is named twice; name each once")
    if flywheel.rounds and not (flywheel.correct or flywheel.incorrect):
        faults.append(f"{path}: rounds without an operator make nothing; name some in correct or incorrect")
    if flywheel.most_members < flywheel.fresh:
        faults.append(f"{path}.most_members: {flywheel.most_members} leaves no room for {flywheel.fresh} fresh ones")
    if flywheel.temperature == 0 and (flywheel.fresh > 1 or "C0" in flywheel.correct):
        faults.append(f"{path}.temperature: at 0 all fresh trajectories of a question are one; raise it")
    return faults
