"""The sections of a recipe that say which world, or worlds, an agent acts in."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.fields import (
    Count,
    EpisodeFields,
    Natural,
    Positive,
    Repeats,
    SamplingFields,
    Temperature,
    Unit,
    record,
)
from agentr_core.replies import ActionChoice, LabelStyle

# The section of a recipe that says how a model is measured.

TEST, REVISION = "test", "revision_test"
"""The names of the evaluations that every recipe has; further sets have other names."""

SetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


@record
class RevisionTestConfig:
    """Recovery from failed prefixes of the base model. Source: Agent-R table 3."""

    enabled: bool = True
    cuts: Count = 1
    """Number of random cuts of each failed episode of the base model."""
    limit: Natural = 0
    """The most cuts that are played, spread evenly over all; 0 means all."""
    max_steps: Count = 50
    states: str = later_field("")
    """The id of a run in the same workspace whose states are used instead of this run's own, to
    test another model on the failures of that run's first model.
    """


@record
class EvaluationSetConfig(SamplingFields):
    """One more set of held-out instances besides `instances.test`, with the same limits on steps
    and tokens and its own sampling settings.
    """

    split: str
    environment: str = later_field("")
    """The world whose split it is, in a recipe of several worlds: one of `environments`."""
    limit: Natural = 0
    """How many instances are played; 0 means all."""
    spread: bool = True
    """Whether the instances are spread evenly over the split, and over the instances that they are
    variants of, or are its first ones; a split may be endless.
    """
    episodes: Count = 1
    """Episodes for each instance; with several, pass@k is measured for k = 1, 2, 4, ..."""
    temperature: Temperature = 0.0
    models: Literal["all", "base"] = "all"
    """Whether the model of every iteration plays it, or only the one that the run starts from."""


@record
class EvaluationConfig(SamplingFields, EpisodeFields):
    """Held-out evaluation, greedy by default."""

    max_steps: Count = 100
    temperature: Temperature = 0.0
    episodes: Count = 1
    """Episodes for each instance; more than one only makes sense at a temperature above 0."""
    max_new_tokens: Count = 500
    revision_test: RevisionTestConfig = RevisionTestConfig()
    disaster_counts: Annotated[float, Field(ge=-1, le=0)] = later_field(0.0)
    """The reward that an episode ending in a disaster counts as in a report's mean: published means
    for ScienceWorld count a wrong focus as -1. In data and in the search it is always 0.
    """
    repeats: Repeats = later_field(0)
    """An episode ends without success once the model has given the same reply in the same state
    this many times (stop reason `repeats`); 0 never ends it this way. Only for environments that
    report their state.
    """
    sets: dict[SetName, EvaluationSetConfig] = later_field(default_factory=dict)
    """Further sets by name."""
    development: str = later_field("")
    """The set in `sets` by which a run chooses between checkpoints (`promote`), and which group RL
    plays between its steps (`grpo.eval_steps`)."""

    def development_faults(self, *, readers: Sequence[str]) -> list[str]:
        """Return what is wrong with the development set of a recipe, one sentence each.

        Args:
            readers: the fields of the recipe that need one.
        """
        path, name = "evaluation.development", self.development
        if not name:
            return [f"{path}: {reader} needs a development set; name one of evaluation.sets" for reader in readers]
        if not readers:
            return [f"{path}: nothing is chosen by it; set promote to best, or leave it out"]
        if name not in self.sets:
            names = ", ".join(self.sets) or "none yet"
            return [
                f"{path}: name one of evaluation.sets ({names}); what is chosen by the test set is no longer tested"
            ]
        if self.sets[name].models == "base":
            return [f"evaluation.sets.{name}.models: every model must play the development set; set it to all"]
        return []

    def faults(self) -> list[str]:
        """Return what is wrong with the section `evaluation` of a recipe, one sentence each."""
        faults = []
        if self.episodes > 1 and self.temperature == 0:
            faults.append("evaluation.episodes: more than one episode at temperature 0 would repeat the same one")
        for name, evaluation_set in self.sets.items():
            path = f"evaluation.sets.{name}"
            if name in (TEST, REVISION):
                faults.append(f"{path}: every recipe has an evaluation of this name; choose another")
            if evaluation_set.episodes > 1 and evaluation_set.temperature == 0:
                faults.append(f"{path}.episodes: more than one episode at temperature 0 would repeat the same one")
        return faults


# The section of a recipe that says which instances are collected from and which are held out.

RANGE = re.compile(r"\[\s*(\d{1,18})\s*,\s*(\d{1,18})\s*\)")


def _checked_range(value: Any) -> Any:
    if isinstance(value, str) and not RANGE.fullmatch(value.strip()):
        raise ValueError('give a list of numbers, or a range as a text, such as "[0, 100)"')
    return value


@record
class ChangedInstancesConfig:
    """Fields of section `instances` that change in the course of a run; None: as before."""

    train_limit: Count | None = later_field(None)
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
    mix: dict[str, Unit] = later_field(default_factory=dict)
    """Further splits to collect from, each with its share of `train_limit`: `{shaped: 0.5}`;
    `train` has the rest. Files that name instances by number mean those of `train`."""
    only: Annotated[str | tuple[Natural, ...], BeforeValidator(_checked_range)] = later_field(())
    """The training instances of this run, by their numbers: a list, or a range without its end,
    written as the text `"[0, 100)"`. `train_limit` draws from these. Empty: the whole split."""
    depths: dict[int, Positive] = later_field(default_factory=dict)
    """The share of `train_limit` that each depth has: `{1: 0.1, 2: 0.5, 3: 0.4}`; others are
    left out. Empty: instances are drawn whatever their depth."""
    expert_steps: tuple[Count, Count] | None = later_field(None)
    """The fewest and the most steps of the expert in a training instance: `[6, 16]` leaves out what
    is mastered, and what no episode has steps enough for. None: instances are drawn however many it
    takes."""
    from_iteration: dict[Annotated[int, Field(ge=2)], ChangedInstancesConfig] = later_field(default_factory=dict)
    """What changes from an iteration on: `{2: {depths: {2: 0.4, 3: 0.6}}}` for longer tasks as the
    policy gets better."""
    draw: Literal["fresh", "fixed"] = later_field("fresh")
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

    def at_iteration(self, iteration: int) -> InstancesConfig:
        """Return the section as it is in an iteration, counted from 1."""
        config = dataclasses.replace(self, from_iteration={})
        for first, change in sorted(self.from_iteration.items()):
            if first <= iteration:
                changes = {name: value for name, value in vars(change).items() if value is not None}
                config = dataclasses.replace(config, **changes)
        return config

    def changing_iterations(self, num_iterations: int) -> list[int]:
        """Return the iterations in which the section differs from the one before, and the first."""
        return [1, *sorted(first for first in self.from_iteration if first <= num_iterations)]

    def numbers(self) -> Sequence[int]:
        """Return the numbers that `only` names, in that order; none if it is empty."""
        if not isinstance(self.only, str):
            return self.only
        match = RANGE.fullmatch(self.only.strip())
        assert match is not None, "checked when the recipe was parsed"
        return range(int(match[1]), int(match[2]))

    def faults(self) -> list[str]:
        """Return what is wrong with the section `instances` of a recipe, one sentence each."""
        faults = _faults(self.at_iteration(1))
        for first in sorted(self.from_iteration):
            new_faults = [fault for fault in _faults(self.at_iteration(first)) if fault not in faults]
            faults += [f"from iteration {first} on, {fault}" for fault in new_faults]
        return faults


def _faults(instances: InstancesConfig) -> list[str]:
    faults = []
    if instances.train == instances.test:
        faults.append(f"instances: train and test are the same split ({instances.train!r})")
    if instances.mix:
        for name in ("train", "test"):
            if getattr(instances, name) in instances.mix:
                faults.append(f"instances.mix: {getattr(instances, name)} is the split {name}; name others only")
        if sum(instances.mix.values()) >= 1:
            faults.append(f"instances.mix: the shares leave nothing for {instances.train}; their sum must be below 1")
        elif min(instances.training_splits.values()) < 1:
            faults.append("instances.mix: a split has less than one instance; raise instances.train_limit or its share")
        if instances.only:
            faults.append("instances.mix: instances.only has numbers of one split; leave out one of the two")
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
        duplicates = sorted({number for number in numbers if numbers.count(number) > 1})
        faults.append(f"instances.only: named twice: {', '.join(map(str, duplicates))}")
    return faults


TranscriptKind = Literal["own", "native"]
ExamplesAs = Literal["text", "turns"]


@record
class PromptConfig:
    """What stands before the first observation, where it differs from the world's own prompt. It is
    part of the training samples, without loss on any of it."""

    system: str = ""
    """A system turn; where the world's instruction already is one, this text begins it."""
    instruction_file: str = ""
    """A text file that replaces the world's instruction."""
    examples: Natural = 0
    """How many episodes, the first of `examples_file`, are shown as examples."""
    examples_file: str = ""
    """Conversations that begin with the problem's turn, as `agentr env examples` writes them.
    Empty: the examples shipped for the world."""
    examples_as: ExamplesAs = later_field("text")
    """`turns`: as turns of user and assistant before the first observation, for which recipes are
    read that show examples and do not say. `text`: in the instruction's turn, as earlier versions
    did."""

    def faults(self, section: str, transcript: TranscriptKind) -> list[str]:
        """Return what is wrong with the prompt of the world in a section, one sentence each."""
        faults = []
        if self.examples_file and not self.examples:
            faults.append(f"{section}.prompt.examples: say how many of examples_file are shown")
        if self.examples_as != "text" and not self.examples:
            faults.append(f"{section}.prompt.examples: say how many are shown as {self.examples_as}")
        if self.examples and transcript == "native":
            faults.append(f"{section}.prompt.examples: examples have labels and no calls; leave transcript: native out")
        return faults


@record
class ActionConfig:
    """How the action in a reply is read."""

    labels: LabelStyle = later_field("lenient")
    """What stands before an action. `lenient`: `Action:`, also with a number, in another case or in
    Markdown, and the action without the quotes, brackets or marks around it. `published`: as
    Agent-R's code reads replies in its searches, all that follows the last `Action:` or `Action
    1:`, less a number such as `1.`, and the last line of a reply without a label."""
    take: ActionChoice = later_field("last")
    """Which action counts in a reply with several. `first`: a reply ends there, so that nothing
    that the model invents after it is read, played or trained; recipes are read so whose examples
    are turns, if they do not say. `last`: the reply stays as it is, as published."""

    def faults(self, section: str, transcript: TranscriptKind) -> list[str]:
        """Return what is wrong with how replies are read, one sentence each; `section` is the
        world's section.
        """
        if transcript == "native" and self != ActionConfig():
            name = "labels" if self.labels != "lenient" else "take"
            return [f"{section}.action.{name}: native calls have no labels; leave it or transcript: native out"]
        if self.take == "first" and self.labels == "published":
            return [
                f"{section}.action.take: published labels are read from the end of a reply; leave one of the two out"
            ]
        return []


@record
class EnvironmentConfig:
    """The environment and its own options (checked by the environment)."""

    name: str = "textcraft"
    options: dict[str, Any] = field(default_factory=dict)
    transcript: TranscriptKind = later_field("own")
    """How steps become a conversation: in the world's own form, or as messages with native tool
    calls, for models that were trained on these."""
    prompt: PromptConfig = later_field(PromptConfig())
    action: ActionConfig = later_field(ActionConfig())


@record
class WorldSearchConfig:
    """The fields of section `search` that differ in a world; None: no difference."""

    dives: Count | None = None
    depth: Count | None = None


@record
class WorldExploreConfig:
    """The fields of section `eto.explore` that differ in a world; None: no difference."""

    max_steps: Count | None = None
    repeats: Repeats | None = later_field(None)


@record
class WorldEvaluationConfig:
    """The fields of section `evaluation` that differ in a world; None: no difference."""

    max_steps: Count | None = None
    repeats: Repeats | None = None


@record
class WorldConfig:
    """One of several worlds in which one model acts. Its key is the name that its instances carry;
    most worlds are also installed under it.
    """

    name: str = ""
    """The environment, where it is installed under a name other than the key, such as `gymnasium`.
    """
    options: dict[str, Any] = field(default_factory=dict)
    transcript: TranscriptKind = later_field("own")
    prompt: PromptConfig = later_field(PromptConfig())
    action: ActionConfig = later_field(ActionConfig())
    instances: InstancesConfig = InstancesConfig()
    share: Unit = 0.0
    """This world's share of the training samples of all worlds, general data aside: as many samples
    are drawn as the shares of all worlds allow. 0 in every world: all samples."""
    search: WorldSearchConfig = WorldSearchConfig()
    explore: WorldExploreConfig = WorldExploreConfig()
    """What differs from `eto.explore`."""
    evaluation: WorldEvaluationConfig = WorldEvaluationConfig()


def worlds_faults(worlds: Mapping[str, WorldConfig]) -> list[str]:
    """Return what is wrong with the section `environments` of a recipe, one sentence each."""
    faults = [f"environments.{name}.{fault}" for name, world in worlds.items() for fault in world.instances.faults()]
    faults += [
        fault
        for name, world in worlds.items()
        for fault in (
            *world.prompt.faults(f"environments.{name}", world.transcript),
            *world.action.faults(f"environments.{name}", world.transcript),
        )
    ]
    shares = [world.share for world in worlds.values()]
    if any(shares) and (not all(shares) or not math.isclose(sum(shares), 1.0, abs_tol=1e-6)):
        faults.append("environments: give every world a share, of 1 in all, or none of them")
    return faults
