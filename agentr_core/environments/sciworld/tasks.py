"""ScienceWorld's tasks in the order of its curriculum, and the numbers that benchmarks give to
their variations.

Source: ScienceWorld (arXiv 2203.07540), version 1.2.3; the enumerations are AgentGym's (arXiv
2406.04151) and ETO's (arXiv 2403.02502).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Numbering = Literal["agentgym", "agentgym-shipped", "eto", "all"]

VARIATIONS: Mapping[str, int] = {
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "grow-plant": 126,
    "grow-fruit": 126,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}
"""The number of variations of each task, in the order of the curriculum."""

_PLANES_AND_GENES = tuple(task for task in VARIATIONS if task.startswith(("inclined-plane", "mendelian")))
_UNKNOWN_MELTING = "measure-melting-point-unknown-substance"

_EXCLUDED_TASKS: Mapping[Numbering, tuple[str, ...]] = {
    "agentgym": (_UNKNOWN_MELTING, "grow-plant", "grow-fruit", *_PLANES_AND_GENES),
    "agentgym-shipped": ("grow-plant", "grow-fruit", *_PLANES_AND_GENES),
    "eto": (_UNKNOWN_MELTING, *_PLANES_AND_GENES),
    "all": (),
}

ETO_STEP_LIMITS: Mapping[str, int] = {
    "boil": 100,
    "melt": 80,
    "freeze": 80,
    "change-the-state-of-matter-of": 80,
    "use-thermometer": 30,
    "measure-melting-point-known-substance": 120,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 30,
    "test-conductivity": 30,
    "test-conductivity-of-unknown-substances": 30,
    "find-living-thing": 15,
    "find-non-living-thing": 15,
    "find-plant": 15,
    "find-animal": 15,
    "grow-plant": 30,
    "grow-fruit": 60,
    "chemistry-mix": 60,
    "chemistry-mix-paint-secondary-color": 15,
    "chemistry-mix-paint-tertiary-color": 30,
    "lifespan-longest-lived": 10,
    "lifespan-shortest-lived": 10,
    "lifespan-longest-lived-then-shortest-lived": 12,
    "identify-life-stages-1": 30,
    "identify-life-stages-2": 30,
}
"""The number of steps after which ETO cuts an episode of a task; it has no limits for the tasks
that its numbering leaves out.
"""


class Variation(NamedTuple):
    """One problem of the simulator: a task and the number of its variation, from 0."""

    task: str
    number: int


def tasks(numbering: Numbering) -> tuple[str, ...]:
    """Return the tasks that a numbering includes, in its order.

    `agentgym` is the list that AgentGym's published training and test numbers follow: 4339
    variations of 22 tasks. AgentGym's server includes one more task, the melting point of unknown
    substances, so that from number 1096 on it plays the variation that is 300 places earlier in
    that list; `agentgym-shipped` (4639) numbers as that server does. `eto` has ETO's 24 tasks, and
    `all` the simulator's 30.
    """
    return tuple(task for task in VARIATIONS if task not in _EXCLUDED_TASKS[numbering])


def find_variation(numbering: Numbering, number: int) -> Variation | None:
    """Return the variation that has a number, or None if none has."""
    if number < 0:
        return None
    for task in tasks(numbering):
        if number < VARIATIONS[task]:
            return Variation(task, number)
        number -= VARIATIONS[task]
    return None


def first_numbers(numbering: Numbering) -> dict[str, int]:
    """Return the number of the first variation of each task."""
    numbers: dict[str, int] = {}
    total = 0
    for task in tasks(numbering):
        numbers[task] = total
        total += VARIATIONS[task]
    return numbers
