"""Learning curves: what a training measured at its steps, as figures for reports and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from agentr_core.reports import plots
from agentr_core.reports.document import Figure
from agentr_core.store.queries.trees import GroupStep, Validation

StepValues = Iterable[tuple[int, float | None]]
"""Pairs of step and value; the value is None where the step has none."""
OptimizerSteps = Sequence[tuple[int, float, float | None, float | None]]
"""Optimizer steps: number, loss, learning rate, gradient norm."""


def curve_figure(caption: str, **series: StepValues) -> list[Figure]:
    """Return a list of one figure with the given curves over steps; an empty list unless a curve
    has two points.

    An underscore in a curve's keyword becomes a space in its name.
    """
    curves = {
        name.replace("_", " "): [(step, value) for step, value in values if value is not None and isfinite(value)]
        for name, values in series.items()
    }
    curves = {name: points for name, points in curves.items() if points}
    if max(map(len, curves.values()), default=0) < 2:
        return []
    return [Figure(plots.curves(curves, caption), caption)]


def fine_tuning_figures(steps: OptimizerSteps) -> list[Figure]:
    """Return the curves of a training on a dataset, by optimizer step."""
    return [
        *curve_figure("Loss by optimizer step.", loss=((step, loss) for step, loss, _, _ in steps)),
        *curve_figure("Learning rate by optimizer step.", rate=((step, rate) for step, _, rate, _ in steps)),
        *curve_figure("Norm of the gradient before it is clipped.", norm=((step, norm) for step, _, _, norm in steps)),
    ]


def group_rl_figures(steps: Sequence[GroupStep], validations: Sequence[Validation], group_size: int) -> list[Figure]:
    """Return the figures of a training by group RL, by step, with its validations on the
    development set.

    Args:
        group_size: the number of episodes in a group, the k of its pass@k.
    """
    suffix = " and of the development set" if validations else ""
    success = {
        "pass@1": [(row.step, row.pass_at_1) for row in steps],
        f"pass@{group_size}": [(row.step, row.pass_at_n) for row in steps],
        "mixed": [(row.step, row.mixed_share) for row in steps],
        "validation": [(validation.step, validation.success) for validation in validations],
    }
    caption = f"Shares of successful episodes{suffix}, of groups with a success and of mixed groups."
    return [
        *curve_figure(
            f"Mean reward of the episodes of a step{suffix}.",
            reward=((row.step, row.reward) for row in steps),
            validation=((validation.step, validation.reward) for validation in validations),
        ),
        *curve_figure(caption, **success),
        *curve_figure(
            "Of the episodes that went on from a failed one, the share that succeeded.",
            recovered=((row.step, row.recovered) for row in steps),
        ),
        *curve_figure(
            "Shares of steps: compared with another in the same state; of praised ones, those that do not help; of "
            "punished ones, those that do.",
            compared=((row.step, row.compared_share) for row in steps),
            praised=((row.step, row.praised_unhelpful) for row in steps),
            punished=((row.step, row.punished_helpful) for row in steps),
        ),
        *curve_figure("Entropy of the policy in nats a token.", entropy=((row.step, row.entropy) for row in steps)),
        *curve_figure("Share of tokens whose ratio is clipped.", clipped=((row.step, row.clip_share) for row in steps)),
        *curve_figure("KL to the sampler in nats a token.", sampler=((row.step, row.sampler_kl) for row in steps)),
        *curve_figure("KL to the start in nats a token.", start=((row.step, row.kl) for row in steps)),
        *curve_figure("Norm of the gradient before it is clipped.", norm=((row.step, row.grad_norm) for row in steps)),
        *curve_figure("Learning rate.", rate=((row.step, row.learning_rate) for row in steps)),
        *curve_figure(
            "Loss: it says little here, since the data changes with each step.",
            loss=((row.step, row.loss) for row in steps),
        ),
        *curve_figure("Sampled tokens of an episode.", tokens=((row.step, row.episode_tokens) for row in steps)),
    ]
