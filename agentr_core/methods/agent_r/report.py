"""Agent-R's part of a report."""

from __future__ import annotations

from agentr_core.reports.records import FunnelStage
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report_funnels import episode_funnel, tree_funnel


def funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return what came out of each stage of data construction: of trees, or of the expert where it
    is cloned.
    """
    if place.recipe.data.use == "expert":
        return episode_funnel(place, iteration, ("expert",))
    return tree_funnel(place, iteration)
