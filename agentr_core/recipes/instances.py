"""The section of a recipe that says which instances are collected from and which are held out."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Count, Natural, Positive, Unit, record

RANGE = re.compile(r"\[\s*(\d{1,18})\s*,\s*(\d{1,18})\s*\)")


def _known_form(value: Any) -> Any:
    if isinstance(value, str) and not RANGE.fullmatch(value.strip()):
        raise ValueError('give a list of numbers, or a range as a text, such as "[0, 100)"')
    return value


@record
class ChangedInstancesConfig:
    """Fields of section `instances` that change in the course of a run; None: as before."""

    train_limit: Count | None = later(None)
    mix: dict[str, Unit] | None = None
    depths: dict[int, Positive] | None = None
    expert_steps: tuple[Count, Count] | None = None


@record
class InstancesConfig:
    """Which instances are collected from and which are held out."""

    train: str = "train"
    train_limit: Natural = 200
    """How many training instances an iteration collects from; 0 means all. They are drawn by the
    seed.
    """
    mix: dict[str, Unit] = later(default_factory=dict)
    """Further splits to collect from, each with its share of `train_limit`: `{shaped: 0.5}`;
    `train` has the rest. Files that name instances by number mean those of `train`."""
    only: Annotated[str | tuple[Natural, ...], BeforeValidator(_known_form)] = later(())
    """The training instances of this run, by their numbers: a list, or a range without its end,
    written as the text `"[0, 100)"`. `train_limit` draws from these. Empty: the whole split."""
    depths: dict[int, Positive] = later(default_factory=dict)
    """The share of `train_limit` that each depth has: `{1: 0.1, 2: 0.5, 3: 0.4}`; others are
    left out. Empty: instances are drawn whatever their depth."""
    expert_steps: tuple[Count, Count] | None = later(None)
    """The fewest and the most steps of the expert in a training instance: `[6, 16]` leaves out what
    is mastered, and what no episode has steps enough for. None: instances are drawn however many it
    takes."""
    from_iteration: dict[Annotated[int, Field(ge=2)], ChangedInstancesConfig] = later(default_factory=dict)
    """What changes from an iteration on: `{2: {depths: {2: 0.4, 3: 0.6}}}` for longer tasks as the
    policy gets better."""
    draw: Literal["fresh", "fixed"] = later("fresh")
    """Whether each iteration draws its training instances anew, or all use those of the first one
    (as published).
    """
    test: str = "test"
    test_limit: Natural = 0
    """How many test instances are evaluated; 0 means all."""

    @property
    def training_splits(self) -> dict[str, int]:
        """How many instances are collected from each training split; 0 means all."""
        further = {split: round(share * self.train_limit) for split, share in sorted(self.mix.items())}
        return {self.train: self.train_limit - sum(further.values())} | further

    def of(self, iteration: int) -> InstancesConfig:
        """Return the section as it is in an iteration, counted from 1."""
        changed = dataclasses.replace(self, from_iteration={})
        for first, change in sorted(self.from_iteration.items()):
            if first <= iteration:
                given = {name: value for name, value in vars(change).items() if value is not None}
                changed = dataclasses.replace(changed, **given)
        return changed

    def stretches(self, iterations: int) -> list[int]:
        """Return the iterations in which the section differs from the one before, and the first."""
        return [1, *sorted(first for first in self.from_iteration if first <= iterations)]

    def numbers(self) -> Sequence[int]:
        """Return the numbers that `only` names, in that order; none if it is empty."""
        if not isinstance(self.only, str):
            return self.only
        found = RANGE.fullmatch(self.only.strip())
        assert found is not None, "checked when the recipe was parsed"
        return range(int(found[1]), int(found[2]))


def instances_faults(instances: InstancesConfig) -> list[str]:
    """Return what is wrong with the section `instances` of a recipe, one sentence each."""
    faults = _faults(instances.of(1))
    for first in sorted(instances.from_iteration):
        new = [fault for fault in _faults(instances.of(first)) if fault not in faults]
        faults += [f"from iteration {first} on, {fault}" for fault in new]
    return faults


def _faults(instances: InstancesConfig) -> list[str]:
    faults = []
    if instances.train == instances.test:
        faults.append(f"instances: train and test are the same split ({instances.train!r})")
    if instances.mix:
        faults += _mix_faults(instances)
    numbers = instances.numbers()
    if instances.depths and not math.isclose(total := sum(instances.depths.values()), 1.0, abs_tol=1e-6):
        faults.append(f"instances.depths: the shares add up to {total:g}; they must add up to 1")
    if instances.depths and not instances.train_limit:
        faults.append("instances.depths: shares of how many? Set instances.train_limit, which is 0")
    if instances.expert_steps and not instances.train_limit:
        faults.append("instances.expert_steps: how many of these? Set instances.train_limit, which is 0")
    if instances.expert_steps and instances.expert_steps[0] > instances.expert_steps[1]:
        faults.append("instances.expert_steps: the fewest steps come first, then the most")
    if isinstance(instances.only, str) and not numbers:
        faults.append(f"instances.only: the range {instances.only} is empty; its end is not part of it")
    if not isinstance(numbers, range) and len(set(numbers)) < len(numbers):
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        faults.append(f"instances.only: named twice: {', '.join(map(str, twice))}")
    return faults


def _mix_faults(instances: InstancesConfig) -> list[str]:
    faults = []
    for name in ("train", "test"):
        if getattr(instances, name) in instances.mix:
            faults.append(f"instances.mix: {getattr(instances, name)} is the split {name}; name others only")
    if sum(instances.mix.values()) >= 1:
        faults.append(f"instances.mix: the shares leave nothing for {instances.train}; their sum must be below 1")
    elif min(instances.training_splits.values()) < 1:
        faults.append("instances.mix: a split has less than one instance; raise instances.train_limit or its share")
    if instances.only:
        faults.append("instances.mix: instances.only has numbers of one split; leave out one of the two")
    return faults
