"""What came out of the stages of data construction that several methods share."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.reports.records import FunnelStage
from agentr_core.runtime.place import Workplace
from agentr_core.store.queries import funnels


def expert_episodes(place: Workplace, iteration: int) -> FunnelStage:
    """Return how many episodes of the expert there are for an iteration."""
    source = place.source_id(iteration)
    played = funnels.episode_counts(place.store, source, "expert").played
    return FunnelStage(name="expert episodes", count=played, rejected=rejected_by(place, source, "expert"))


def expert_funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return what came out of each stage where the expert is cloned."""
    return to_rows(place, iteration, [expert_episodes(place, iteration)])


def to_rows(place: Workplace, iteration: int, made: Sequence[FunnelStage]) -> tuple[FunnelStage, ...]:
    """Return the given stages, followed by the numbers of samples and of trained rows."""
    own, source = place.iteration_id(iteration), place.source_id(iteration)
    samples, rows = funnels.count_samples(place.store, source), funnels.count_trained_rows(place.store, own)
    return (
        *made,
        FunnelStage(name="samples of the pool" if source != own else "samples", count=samples),
        FunnelStage(name="trained rows", count=rows, rejected=rejected_by(place, own, "filter")),
    )


def rejected_by(place: Workplace, iteration_id: str, stage: str) -> dict[str, int]:
    """Return how many candidates a stage rejected in an iteration, by reason, the most frequent
    first.
    """
    return funnels.rejection_counts(place.store, iteration_id).get(stage, {})
