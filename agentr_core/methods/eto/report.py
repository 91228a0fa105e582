"""ETO's part of a report."""

from __future__ import annotations

from agentr_core.methods.eto import clones, phase_of
from agentr_core.reports.records import FunnelStage
from agentr_core.runtime.place import Workplace
from agentr_core.stages.report_funnels import Part, episode_funnel


def funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return what came out of each stage of data construction."""
    eto = place.recipe.eto
    parts: dict[str, tuple[Part, ...]] = {
        "sft": ("expert",),
        "rft": (*(("expert",) if clones(eto, iteration) else ()), "explored", "successes"),
        "dpo": ("expert", "explored", "pairs"),
    }
    return episode_funnel(place, iteration, parts[phase_of(eto, iteration)])
