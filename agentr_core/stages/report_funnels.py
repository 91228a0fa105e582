"""What came out of each stage of data construction, for the reports of several methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentr_core.methods.eto.preferences import STAGE as PREFERENCE
from agentr_core.reports.records import FunnelStage, Tally
from agentr_core.runtime.place import Workplace

Part = Literal["expert", "explored", "successes", "pairs"]
"""What a funnel without trees is made of."""


def tree_funnel(place: Workplace, iteration: int) -> tuple[FunnelStage, ...]:
    """Return what came out of each stage from trees to trained rows; nothing before there is
    any.
    """
    source, own = place.source_id(iteration), place.iteration_id(iteration)
    row = place.one(
        "select trees, leaves, pairs, critiques, spliced, verified, samples from v_funnel where iteration_id = ?",
        source,
    )
    rows = place.one("select dataset_rows from v_funnel where iteration_id = ?", own)
    if row is None or rows is None:
        return ()
    rejected = {
        stage: tuple(Tally(name=reason, count=count) for reason, count in found)
        for stage, found in (rejections(place, source) | rejections(place, own)).items()
    }
    verify = tuple(tally for tally in rejected.get("splice", ()) if tally.name.startswith("verify-"))
    unspliced = tuple(tally for tally in rejected.get("splice", ()) if not tally.name.startswith("verify-"))
    stages = [
        FunnelStage(name="trees", count=row[0]),
        FunnelStage(name="leaves", count=row[1]),
        FunnelStage(name="candidate pairs", count=row[2], rejected=rejected.get("pairs", ())),
        FunnelStage(name="judged", count=row[3]),
        FunnelStage(name="spliced", count=row[4], rejected=unspliced),
        FunnelStage(name="verified", count=row[5], rejected=verify),
        FunnelStage(name="samples of the pool" if source != own else "samples", count=row[6]),
        FunnelStage(name="trained rows", count=rows[0], rejected=rejected.get("filter", ())),
    ]
    if place.recipe.splice.mode != "verified":
        stages = [stage for stage in stages if stage.name != "verified"]
    return tuple(stages)


def rejections(place: Workplace, iteration_id: str) -> dict[str, list[tuple[str, int]]]:
    """Return how many were turned away in an iteration by stage and reason, the most frequent
    first.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for stage, reason, count in place.all(
        "select stage, reason, count(*) from rejection where iteration_id = ? "
        "group by all order by count(*) desc, reason",
        iteration_id,
    ):
        found.setdefault(stage, []).append((reason, count))
    return found


def episode_funnel(place: Workplace, iteration: int, parts: Sequence[Part]) -> tuple[FunnelStage, ...]:
    """Return what came out of the given parts of data construction, in their order, and how many
    rows were trained.
    """
    own, source = place.iteration_id(iteration), place.source_id(iteration)
    expert, explored, solved, pairs, samples, rows = (
        int(number or 0) for number in place.one(_COUNTS, source, own) or (0,) * 6
    )
    by_expert, preferred = rejected_by(place, source, "expert"), rejected_by(place, source, PREFERENCE)
    stages = {
        "expert": FunnelStage(name="expert episodes", count=expert, rejected=by_expert),
        "explored": FunnelStage(name="explored episodes", count=explored),
        "successes": FunnelStage(name="successes", count=solved),
        "pairs": FunnelStage(name="preference pairs", count=pairs, rejected=preferred),
    }
    return (
        *(stages[part] for part in parts),
        FunnelStage(name="samples of the pool" if source != own else "samples", count=samples),
        FunnelStage(name="trained rows", count=rows, rejected=rejected_by(place, own, "filter")),
    )


def rejected_by(place: Workplace, iteration_id: str, stage: str) -> tuple[Tally, ...]:
    """Return how many a stage turned away in an iteration by reason, the most frequent first."""
    rows = place.all(
        "select reason, count(*) from rejection where iteration_id = ? and stage = ? "
        "group by reason order by count(*) desc, reason",
        iteration_id,
        stage,
    )
    return tuple(Tally(name=reason, count=count) for reason, count in rows)


_COUNTS = """
select
    (select count(*) from trajectory where iteration_id = $1 and source = 'expert'),
    (select count(*) from trajectory where iteration_id = $1 and source = 'rollout'),
    (select count(*) from trajectory where iteration_id = $1 and source = 'rollout' and success),
    (select count(*) from preference where iteration_id = $1),
    (select count(*) from sample where iteration_id = $1),
    (select count(*) from dataset d join dataset_row using (dataset_id) where d.iteration_id = $2)
"""
