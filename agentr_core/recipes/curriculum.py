"""What section `et_agent` of a recipe says about an `rl` iteration: which questions it trains on,
and what their answers are worth.

Section `grpo` says how groups are sampled and trained on. Defaults are the numbers of the ET-Agent
paper (arXiv 2601.06860) and of its published launch files, unless a field says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Count, Positive, Unit, record

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
    call_costs: dict[str, _Weight] = later(default_factory=dict)
    """The cost of a tool call in the reward, by the tool's name: for example, its seconds in
    `v_tool_calls`. A tool that is not named costs 1, as published."""
    refused_calls: bool = later(False)
    """Whether a call that was refused, since none was left, counts as a call in the reward and in
    the measures of evaluations: the published code counts what is written. The selection counts
    calls that were made, as published."""
    boxed_only: bool = later(False)
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
    of_calls = {
        "call_costs": "steps have none",
        "refused_calls": "steps are none",
        "boxed_only": "where steps are counted, there are no answers in boxes",
    }
    unused = [
        f"et_agent.curriculum.{name}: {why}; leave it out"
        for name, why in of_calls.items()
        if curriculum.counts == "steps" and getattr(curriculum, name)
    ]
    return unused + [
        f"et_agent.curriculum.{name}: the recipe has {stages} iterations rl and {len(found)} numbers; give one for each"
        for name, found in sigmas.items()
        if len(found) < stages
    ]
