"""The section of a recipe that says how a model is measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentr_core.config_fields import Count, Natural, Temperature, record
from agentr_core.fingerprint import later


@record
class RevisionTestConfig:
    """Recovery from failed prefixes of the base model. Source: Agent-R table 3."""

    enabled: bool = True
    cuts: Count = 1
    """Random cuts for each failed episode of the base model."""
    limit: Natural = 0
    """The most cuts that are played, spread evenly over all; 0 means all."""
    max_steps: Count = 50


@record
class EvaluationConfig:
    """Held-out evaluation, greedy unless said otherwise."""

    max_steps: Count = 100
    temperature: Temperature = 0.0
    episodes: Count = 1
    """Episodes for each instance; more than one only makes sense at a temperature above 0."""
    max_new_tokens: Count = 500
    revision_test: RevisionTestConfig = RevisionTestConfig()
    disaster_counts: Annotated[float, Field(ge=-1, le=0)] = later(0.0)
    """What an episode that ended in a disaster counts in the mean reward of a report: published means of ScienceWorld
    count a wrong focus as -1. In data and in the search its reward is 0 in any case."""
