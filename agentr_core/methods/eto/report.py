"""ETO's part of a report, read from the store."""

from __future__ import annotations

from agentr_core.methods.catalogue import DEMONSTRATE, EXPLORE, PREFER
from agentr_core.methods.eto.preferences import STAGE
from agentr_core.methods.eto.report_sections import PreferenceRecord, preferences, preferences_of_run
from agentr_core.reports.document import Section
from agentr_core.reports.records import FunnelStage
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report_funnels import expert_episodes, rejected_by, to_rows
from agentr_core.store.queries import funnels
from agentr_core.store.queries.preferences import preference_counts, preference_training


def funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return what came out of each stage that an iteration has."""
    source, has = place.source_id(iteration), {stage.name for stage in place.plan(iteration).stages}
    made: list[FunnelStage] = []
    if DEMONSTRATE.name in has:
        made.append(expert_episodes(place, iteration))
    explored = funnels.episode_counts(place.store, source, "rollout")
    if EXPLORE.name in has:
        made.append(FunnelStage(name="explored episodes", count=explored.played))
    if PREFER.name in has:
        paired = funnels.count_preferences(place.store, source)
        made.append(FunnelStage(name="preference pairs", count=paired, rejected=rejected_by(place, source, STAGE)))
    else:
        made.append(FunnelStage(name="successes", count=explored.solved))
    return to_rows(place, iteration, made)


def preference_record(place: Workplace, iteration: int) -> PreferenceRecord | None:
    """Return the record of the pairs of an iteration; None if it makes no pairs."""
    if not place.plan(iteration).pairs:
        return None
    iteration_id, source_id = place.iteration_id(iteration), place.source_id(iteration)
    made = preference_counts(place.store, source_id)
    return PreferenceRecord(
        kinds=made.kinds,
        rejected=rejected_by(place, source_id, STAGE),
        margins=made.margins,
        cut=made.cut,
        steps=tuple(preference_training(place.store, iteration_id)),
    )


def pair_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on the pairs of an iteration; none if it makes no pairs."""
    record = preference_record(place, iteration)
    return () if record is None else (preferences(record),)


def run_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on pairs and their training over all iterations up to one; none without a
    pair.
    """
    found = {number: preference_record(place, number) for number in range(1, iteration + 1)}
    records = {number: record for number, record in found.items() if record is not None}
    return (preferences_of_run(records),) if records else ()
