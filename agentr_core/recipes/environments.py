"""The sections of a recipe that say which world, or worlds, an agent acts in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from agentr_core.fingerprint import later
from agentr_core.protocols.abilities import Labels, Take
from agentr_core.recipes.fields import Count, Natural, Repeats, Unit, record
from agentr_core.recipes.instances import InstancesConfig, instances_faults

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
    examples_as: ExamplesAs = later("text")
    """`turns`: as turns of user and assistant before the first observation, for which recipes are
    read that show examples and do not say. `text`: in the instruction's turn, as earlier versions
    did."""


@record
class ActionConfig:
    """How the action in a reply is read."""

    labels: Labels = later("lenient")
    """What stands before an action. `lenient`: `Action:`, also with a number, in another case or in
    Markdown, and the action without the quotes, brackets or marks around it. `published`: as
    Agent-R's code reads replies in its searches, all that follows the last `Action:` or `Action
    1:`, less a number such as `1.`, and the last line of a reply without a label."""
    take: Take = later("last")
    """Which action counts in a reply with several. `first`: a reply ends there, so that nothing
    that the model invents after it is read, played or trained; recipes are read so whose examples
    are turns, if they do not say. `last`: the reply stays as it is, as published."""


@record
class EnvironmentConfig:
    """The environment and its own options (checked by the environment)."""

    name: str = "textcraft"
    options: dict[str, Any] = field(default_factory=dict)
    transcript: TranscriptKind = later("own")
    """How steps become a conversation: in the world's own form, or as messages with native tool
    calls, for models that were trained on these."""
    prompt: PromptConfig = later(PromptConfig())
    action: ActionConfig = later(ActionConfig())


@record
class WorldSearchConfig:
    """The fields of section `search` that differ in a world; None: no difference."""

    dives: Count | None = None
    depth: Count | None = None


@record
class WorldExploreConfig:
    """The fields of section `eto.explore` that differ in a world; None: no difference."""

    max_steps: Count | None = None
    repeats: Repeats | None = later(None)


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
    transcript: TranscriptKind = later("own")
    prompt: PromptConfig = later(PromptConfig())
    action: ActionConfig = later(ActionConfig())
    instances: InstancesConfig = InstancesConfig()
    share: Unit = 0.0
    """This world's share of the training samples of all worlds, general data aside: as many samples
    are drawn as the shares of all worlds allow. 0 in every world: all samples."""
    search: WorldSearchConfig = WorldSearchConfig()
    explore: WorldExploreConfig = WorldExploreConfig()
    """What differs from `eto.explore`."""
    evaluation: WorldEvaluationConfig = WorldEvaluationConfig()


def prompt_faults(section: str, prompt: PromptConfig, transcript: TranscriptKind) -> list[str]:
    """Return what is wrong with the prompt of a world, one sentence each; `section` is the world's
    section.
    """
    faults = []
    if prompt.examples_file and not prompt.examples:
        faults.append(f"{section}.prompt.examples: say how many of examples_file are shown")
    if prompt.examples_as != "text" and not prompt.examples:
        faults.append(f"{section}.prompt.examples: say how many are shown as {prompt.examples_as}")
    if prompt.examples and transcript == "native":
        faults.append(f"{section}.prompt.examples: examples have labels and no calls; leave transcript: native out")
    return faults


def action_faults(section: str, action: ActionConfig, transcript: TranscriptKind) -> list[str]:
    """Return what is wrong with how a world's replies are read, one sentence each; `section` is the
    world's section.
    """
    if transcript == "native" and action != ActionConfig():
        name = "labels" if action.labels != "lenient" else "take"
        return [f"{section}.action.{name}: native calls have no labels; leave it or transcript: native out"]
    if action.take == "first" and action.labels == "published":
        return [f"{section}.action.take: published labels are read from the end of a reply; leave one of the two out"]
    return []


def with_examples(section: Any) -> Any:
    """Return the section of a world as it stands in a recipe, with what it does not say about its
    examples: they are turns, and replies end at their first action.

    The defaults of the records are those of recipes that earlier versions stored.
    """
    prompt = section.get("prompt") if isinstance(section, dict) else None
    if not isinstance(prompt, dict) or not prompt.get("examples") or section.get("transcript") == "native":
        return section
    prompt = {"examples_as": "turns", **prompt}
    action = section.get("action", {})
    if prompt["examples_as"] == "turns" and isinstance(action, dict) and action.get("labels") != "published":
        section = {**section, "action": {"take": "first", **action}}
    return {**section, "prompt": prompt}


def worlds_faults(worlds: Mapping[str, WorldConfig]) -> list[str]:
    """Return what is wrong with the section `environments` of a recipe, one sentence each."""
    faults = [
        f"environments.{name}.{fault}" for name, world in worlds.items() for fault in instances_faults(world.instances)
    ]
    faults += [
        fault
        for name, world in worlds.items()
        for fault in (
            *prompt_faults(f"environments.{name}", world.prompt, world.transcript),
            *action_faults(f"environments.{name}", world.action, world.transcript),
        )
    ]
    shares = [world.share for world in worlds.values()]
    if any(shares) and (not all(shares) or not math.isclose(sum(shares), 1.0, abs_tol=1e-6)):
        faults.append("environments: give every world a share, of 1 in all, or none of them")
    return faults
