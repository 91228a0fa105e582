"""The section of a recipe that says how a model is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Count, Natural, Repeats, Temperature, record
from agentr_core.recipes.sampling import EpisodeFields, SamplingFields

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
    states: str = later("")
    """The id of a run in the same workspace whose states are used instead of this run's own, to
    test another model on the failures of that run's first model.
    """


@record
class EvaluationSetConfig(SamplingFields):
    """One more set of held-out instances besides `instances.test`, with the same limits on steps
    and tokens and its own sampling settings.
    """

    split: str
    environment: str = later("")
    """The world whose split it is, in a recipe of several worlds: one of `environments`."""
    limit: Natural = 0
    """How many instances are played; 0 means all."""
    spread: bool = True
    """Whether the instances are spread evenly over the split or are its first ones; a split may be
    endless.
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
    disaster_counts: Annotated[float, Field(ge=-1, le=0)] = later(0.0)
    """The reward that an episode ending in a disaster counts as in a report's mean: published means
    for ScienceWorld count a wrong focus as -1. In data and in the search it is always 0.
    """
    repeats: Repeats = later(0)
    """An episode ends without success once the model has given the same reply in the same state
    this many times (stop reason `repeats`); 0 never ends it this way. Only for environments that
    report their state.
    """
    sets: dict[SetName, EvaluationSetConfig] = later(default_factory=dict)
    """Further sets by name."""
    development: str = later("")
    """The set in `sets` by which a run chooses between checkpoints (`promote`), and which group RL
    plays between its steps (`grpo.eval_steps`)."""


def development_faults(evaluation: EvaluationConfig, *, readers: Sequence[str]) -> list[str]:
    """Return what is wrong with the development set of a recipe, one sentence each.

    Args:
        readers: the fields of the recipe that need one.
    """
    where, name = "evaluation.development", evaluation.development
    if not name:
        return [f"{where}: {reader} needs a development set; name one of evaluation.sets" for reader in readers]
    if not readers:
        return [f"{where}: nothing is chosen by it; set promote to best, or leave it out"]
    if name not in evaluation.sets:
        known = ", ".join(evaluation.sets) or "none yet"
        return [f"{where}: name one of evaluation.sets ({known}); what is chosen by the test set is no longer tested"]
    if evaluation.sets[name].models == "base":
        return [f"evaluation.sets.{name}.models: every model must play the development set; set it to all"]
    return []


def evaluation_faults(evaluation: EvaluationConfig) -> list[str]:
    """Return what is wrong with the section `evaluation` of a recipe, one sentence each."""
    faults = []
    if evaluation.episodes > 1 and evaluation.temperature == 0:
        faults.append("evaluation.episodes: more than one episode at temperature 0 would repeat the same one")
    for name, chosen in evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        if name in (TEST, REVISION):
            faults.append(f"{where}: every recipe has an evaluation of this name; choose another")
        if chosen.episodes > 1 and chosen.temperature == 0:
            faults.append(f"{where}.episodes: more than one episode at temperature 0 would repeat the same one")
    return faults
