"""Learning curves: what a training measured in its steps, as figures of reports and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from agentr_core.reports import plots
from agentr_core.reports.document import Figure
from agentr_core.store.queries.trees import GroupStep, Validation

Values = Iterable[tuple[int, float | None]]
"""Numbers by step, None where a step has none."""
Steps = Sequence[tuple[int, float, float | None, float | None]]
"""Optimizer steps: number, loss, learning rate, gradient norm."""


def figure(caption: str, **series: Values) -> list[Figure]:
    """Return curves over steps as a figure; none before one of them has two points.

    A space in the name of a curve is written `_`.
    """
    drawn = {
        name.replace("_", " "): [(step, value) for step, value in values if value is not None and isfinite(value)]
        for name, values in series.items()
    }
    drawn = {name: points for name, points in drawn.items() if points}
    if max(map(len, drawn.values()), default=0) < 2:
        return []
    return [Figure(plots.curves(drawn, caption), caption)]


def fine_tuning(steps: Steps) -> list[Figure]:
    """Return the curves of a training on a dataset, by optimizer step."""
    return [
        *figure("Loss by optimizer step.", loss=((step, loss) for step, loss, _, _ in steps)),
        *figure("Learning rate by optimizer step.", rate=((step, rate) for step, _, rate, _ in steps)),
        *figure("Norm of the gradient before it is clipped.", norm=((step, norm) for step, _, _, norm in steps)),
    ]


def group_learning(steps: Sequence[GroupStep], validated: Sequence[Validation], size: int) -> list[Figure]:
    """Return the curves of reinforcement learning by step, with the development set beside.

    Args:
        size: the episodes of a group.
    """
    held = " and of the development set" if validated else ""
    success = {
        "pass@1": [(one.step, one.pass_at_1) for one in steps],
        f"pass@{size}": [(one.step, one.pass_at_n) for one in steps],
        "mixed": [(one.step, one.mixed_share) for one in steps],
        "validation": [(one.step, one.success) for one in validated],
    }
    about = f"Shares of successful episodes{held}, of groups with a success and of mixed groups."
    return [
        *figure(
            f"Mean reward of the episodes of a step{held}.",
            reward=((one.step, one.reward) for one in steps),
            validation=((one.step, one.reward) for one in validated),
        ),
        *figure(about, **success),
        *figure(
            "Of the episodes that went on from a failed one, the share that succeeded.",
            recovered=((one.step, one.recovered) for one in steps),
        ),
        *figure("Entropy of the policy in nats a token.", entropy=((one.step, one.entropy) for one in steps)),
        *figure("Share of tokens whose ratio is clipped.", clipped=((one.step, one.clip_share) for one in steps)),
        *figure("KL to the sampler in nats a token.", sampler=((one.step, one.sampler_kl) for one in steps)),
        *figure("KL to the start in nats a token.", start=((one.step, one.kl) for one in steps)),
        *figure("Norm of the gradient before it is clipped.", norm=((one.step, one.grad_norm) for one in steps)),
        *figure("Learning rate.", rate=((one.step, one.learning_rate) for one in steps)),
        *figure(
            "Loss: it says little here, since the data changes with each step.",
            loss=((one.step, one.loss) for one in steps),
        ),
        *figure("Sampled tokens of an episode.", tokens=((one.step, one.episode_tokens) for one in steps)),
    ]
