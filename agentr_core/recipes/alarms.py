"""The section `alarms` of a recipe, and the table of what is watched: `RULES`.

A rule looks at one measure: at its history in a training, step by step, or at what a stage that has
just ended made of it. Whoever has a history asks `AlarmsConfig.find_crossings`; nobody else knows a
threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Literal

from agentr_core.errors import AlarmRaised
from agentr_core.recipes.fields import Positive, Unit, record

Reaction = Literal["tell", "stop", "back"]
Measures = Mapping[str, float | None]
"""Measures of a training step, or of a stage, by name; None where one does not apply."""


_MIN_STEPS_BEFORE = 2
"""The number of steps from which on they have a usual value."""
_MEDIAN_STEPS = 100
"""The number of steps that a median is taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A threshold that was crossed: the name of the rule, the value, and a sentence on what has
    happened and what to do. `step` is None where it was in no step of a training.
    """

    name: str
    value: float
    threshold: float
    message: str
    step: int | None = None

    def to_error(self, resumption: str) -> AlarmRaised:
        """Return the error with which a run ends here; `resumption` says what the same command
        does once the alarm is silent.
        """
        location = f" in step {self.step}" if self.step else ""
        return AlarmRaised(
            f"alarm {self.name}{location}: {self.message}; alarms.reaction ends the run here, and with another "
            f"alarms.{self.name} (null: silent) or alarms.reaction the same command {resumption}"
        )


@record
class AlarmsConfig:
    """What is watched while a run works, and what an alarm does. A threshold of null silences its
    alarm. Nothing of this is part of the id of a run: a stopped run goes on with other thresholds.
    """

    reaction: Reaction = "tell"
    """`tell`: a row in table `alarm`, a line on the terminal and in the report, an event of
    Prefect's. `stop`: the run also ends, and the same command goes on later. `back`: a training in
    which it was raised also ends, and publishes the last weights that were saved before."""
    entropy: Unit | None = 0.2
    """Least entropy of the policy in group RL, as a share of that of its first step."""
    clip_share: Unit | None = 0.1
    """Greatest share of a step's tokens whose ratio is clipped."""
    sampler_kl: Positive | None = 0.05
    """Greatest divergence of the trainer's log-probabilities from the sampler's, in nats a
    token."""
    contrast: Unit | None = 0.1
    """Least share of groups with contrast, averaged over three steps."""
    gradient_norm: Positive | None = 10.0
    """Greatest norm of a step's gradient, in multiples of the median of the steps before."""
    cut_replies: Unit | None = 0.3
    """Greatest share of replies that their token limit cuts."""
    empty_replies: Unit | None = 0.05
    """Greatest share of replies without a word."""
    chosen_drop: Positive | None = 30.0
    """How many nats the chosen side of preference pairs may become less likely, averaged over five
    steps."""
    unreadable_replies: Unit | None = 0.2
    """Greatest share of verdicts, and of other replies of helpers, that cannot be read."""
    judge_agreement: Unit | None = 0.3
    """Least share of judged paths on which the judge names the same first error as the tree's
    values, or as the world's oracle."""
    judge_drift: Unit | None = 0.0
    """How far that share may surely fall below the one of the run's first judged iteration."""
    held_out_drop: Unit | None = 0.0
    """How far held-out success may surely fall while the training's own reward rises or its loss
    falls."""
    error_budget: Unit | None = 0.5
    """Share of `errors.budget` that a stage may spend."""

    def find_crossings(
        self, history: Sequence[Any], measures_of: Callable[[Any], Measures] = dict, *, step: int | None = None
    ) -> list[Crossing]:
        """Return the thresholds that the last entry of a history has crossed, in the order of
        `RULES`.

        Args:
            measures_of: returns the measures of an entry.
            step: that of the last entry.
        """
        recent, crossings = [measures_of(entry) for entry in history[-_MEDIAN_STEPS:]], []
        for rule in RULES if recent else ():
            threshold: float | None = getattr(self, rule.name)
            values = (value for entry in history if (value := measures_of(entry).get(rule.name)) is not None)
            value = None if threshold is None else rule.value(recent, partial(next, values))
            if threshold is None or value is None:
                continue
            if (
                value < threshold
                if rule.is_minimum
                else value > threshold or (rule.includes_threshold and value == threshold)
            ):
                message = f"{rule.message.format(value=value, threshold=threshold)}; {rule.advice}"
                crossings.append(Crossing(name=rule.name, value=value, threshold=threshold, message=message, step=step))
        return crossings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A measure that is watched. `name` is that of its threshold in `AlarmsConfig`."""

    name: str
    message: str
    """What has happened, with the places `value` and `threshold`."""
    advice: str
    is_minimum: bool = False
    """Whether the alarm is raised below the threshold, not above."""
    includes_threshold: bool = False
    """Whether it is raised at the threshold itself, too."""
    num_steps: int = 1
    """The number of steps that the value is a mean over."""
    relative: Literal["", "first", "median"] = ""
    """Whether the value is divided by the first one of the history, or by the median of those
    before it."""

    def value(self, recent: Sequence[Measures], first: Callable[[], float]) -> float | None:
        """Return what is compared with the threshold; None where the history is too short, its
        last entry lacks the measure, or the reference is not positive.

        Args:
            recent: the end of the history.
            first: returns the measure's first value in the whole history.
        """
        if recent[-1].get(self.name) is None:
            return None
        values = [value for entry in recent if (value := entry.get(self.name)) is not None]
        latest, before = values[-self.num_steps :], values[: -self.num_steps]
        if len(latest) < self.num_steps:
            return None
        if not self.relative:
            return fmean(latest)
        has_reference = len(before) >= (1 if self.relative == "first" else _MIN_STEPS_BEFORE)
        reference = (first() if self.relative == "first" else median(before)) if has_reference else 0.0
        return fmean(latest) / reference if reference > 0 else None


RULES = (
    Rule(
        name="entropy",
        message="the policy's entropy has fallen to {value:.0%} of that of the first step, below {threshold:.0%}",
        advice="it hardly explores any more; raise grpo.epsilon_high, or lower grpo.learning_rate",
        is_minimum=True,
        num_steps=2,
        relative="first",
    ),
    Rule(
        name="clip_share",
        message="{value:.0%} of the step's tokens are clipped, more than {threshold:.0%}",
        advice="the policy moves too far in a step; lower grpo.learning_rate, grpo.minibatches or grpo.num_iterations",
    ),
    Rule(
        name="sampler_kl",
        message="sampler and trainer are {value:.3g} nats a token apart, more than {threshold:g}",
        advice="the trainer reads the tokens as another policy's; compare model.dtype with training.bf16, and lower "
        "grpo.learning_rate",
    ),
    Rule(
        name="contrast",
        message="only {value:.0%} of the groups of the last three steps have contrast, less than {threshold:.0%}",
        advice="there is little to learn from; take harder or easier instances, or raise grpo.num_generations",
        is_minimum=True,
        num_steps=3,
    ),
    Rule(
        name="gradient_norm",
        message="the gradient's norm is {value:.3g} times the median of the steps before, more than {threshold:g}",
        advice="look at the data of this step, lower the learning rate, or lengthen the warm-up",
        relative="median",
    ),
    Rule(
        name="cut_replies",
        message="{value:.0%} of the replies are cut by their token limit, more than {threshold:.0%}",
        advice="raise max_new_tokens of the section that asks, or see whether the model repeats itself",
    ),
    Rule(
        name="empty_replies",
        message="{value:.0%} of the replies are empty, more than {threshold:.0%}",
        advice="look at the chat template and at the weights; after a training, lower its learning rate",
    ),
    Rule(
        name="chosen_drop",
        message="the chosen side has become {value:.3g} nats less likely, more than {threshold:g}",
        advice="both sides are being unlearned; lower eto.dpo.learning_rate, or add sft to eto.dpo.loss_type",
        num_steps=5,
    ),
    Rule(
        name="unreadable_replies",
        message="at least {value:.0%} of a helper's replies cannot be read, more than {threshold:.0%}",
        advice="raise its max_new_tokens, or give it another model",
    ),
    Rule(
        name="judge_agreement",
        message="the judge names the same first error as the tree or the oracle on at most {value:.0%} of the paths, "
        "less than {threshold:.0%}",
        advice="read some of its replies in `agentr view`; name another model in models.judge",
        is_minimum=True,
    ),
    Rule(
        name="judge_drift",
        message="the judge agrees with the tree or the oracle at least {value:.1%} less often than in the first judged "
        "iteration, more than {threshold:.1%}",
        advice="a policy that is trained may forget how to judge; name a fixed model in models.judge",
    ),
    Rule(
        name="held_out_drop",
        message="held-out success has fallen by at least {value:.1%}, more than {threshold:.1%}, while training itself "
        "went on to improve",
        advice="it learns what does not hold elsewhere; look at its episodes, train less, or set promote to best",
    ),
    Rule(
        name="error_budget",
        message="{value:.0%} of the error budget is spent, no less than {threshold:.0%}",
        advice="table event has the errors; fix their cause before the stage stops",
        includes_threshold=True,
    ),
)
"""Everything that is watched, in the order of the manual's table."""
