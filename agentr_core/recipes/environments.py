"""The sections of a recipe that say which world an agent acts in, or which several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Count, Natural, Unit, record
from agentr_core.recipes.instances import InstancesConfig, instances_faults

TranscriptKind = Literal["own", "native"]


@record
class PromptConfig:
    """What stands before the first observation, where it is not as the world has it. The model is
    trained with what it reads, without loss on any of it."""

    system: str = ""
    """A system turn; where the world's instruction is one already, this begins it."""
    instruction_file: str = ""
    """A text file that takes the place of the world's instruction."""
    examples: Natural = 0
    """How many episodes are shown as examples, in the instruction's turn: the first of
    `examples_file`."""
    examples_file: str = ""
    """Conversations that begin with the problem's turn, as `agentr env examples` writes them. Empty
    means: those that come along for the world."""


@record
class EnvironmentConfig:
    """Which environment, and its own options (checked by the environment)."""

    name: str = "textcraft"
    options: dict[str, Any] = field(default_factory=dict)
    transcript: TranscriptKind = later("own")
    """How steps become a conversation: as the world has it, or as messages with native tool calls,
    for models that were trained on these."""
    prompt: PromptConfig = later(PromptConfig())


@record
class WorldSearchConfig:
    """What of section `search` differs in a world; None: nothing."""

    dives: Count | None = None
    depth: Count | None = None


@record
class WorldExploreConfig:
    """What of section `eto.explore` differs in a world; None: nothing."""

    max_steps: Count | None = None


@record
class WorldEvaluationConfig:
    """What of section `evaluation` differs in a world; None: nothing."""

    max_steps: Count | None = None
    repeats: Natural | None = None


@record
class WorldConfig:
    """One of several worlds in which one model acts. Its key is the name that its instances carry,
    which most worlds are installed under, too.
    """

    name: str = ""
    """The environment, where it is installed under another name than the key, such as
    `gymnasium`."""
    options: dict[str, Any] = field(default_factory=dict)
    transcript: TranscriptKind = later("own")
    prompt: PromptConfig = later(PromptConfig())
    instances: InstancesConfig = InstancesConfig()
    share: Unit = 0.0
    """The part of the training samples of all worlds, general data aside, that is of this one: the
    most samples that hold the shares of all worlds are drawn. 0 in every world: all samples."""
    search: WorldSearchConfig = WorldSearchConfig()
    explore: WorldExploreConfig = WorldExploreConfig()
    """Of `eto.explore`."""
    evaluation: WorldEvaluationConfig = WorldEvaluationConfig()


def prompt_faults(section: str, prompt: PromptConfig, transcript: TranscriptKind) -> list[str]:
    """Return what is wrong with the prompt of a world, one sentence each; `section` is that of the
    world.
    """
    faults = []
    if prompt.examples_file and not prompt.examples:
        faults.append(f"{section}.prompt.examples: say how many of examples_file are shown")
    if prompt.examples and transcript == "native":
        faults.append(f"{section}.prompt.examples: examples are texts and show no calls; leave transcript: native out")
    return faults


def worlds_faults(worlds: Mapping[str, WorldConfig]) -> list[str]:
    """Return what is wrong with the section `environments` of a recipe, one sentence each."""
    faults = [
        f"environments.{name}.{fault}" for name, world in worlds.items() for fault in instances_faults(world.instances)
    ]
    faults += [
        fault
        for name, world in worlds.items()
        for fault in prompt_faults(f"environments.{name}", world.prompt, world.transcript)
    ]
    shares = [world.share for world in worlds.values()]
    if any(shares) and (not all(shares) or not math.isclose(sum(shares), 1.0, abs_tol=1e-6)):
        faults.append("environments: give every world a share, of 1 in all, or none of them")
    return faults
