"""The report of an iteration, filled from the store alone: it can be rewritten at any time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import yaml

from agentr_core.recipes.evaluation import REVISION, TEST
from agentr_core.recipes.recipe import Recipe, shown
from agentr_core.reports import wording
from agentr_core.reports.document import Section, Transcripts
from agentr_core.reports.records import (
    ErrorRecord,
    FaultCount,
    IterationReport,
    Promoted,
    StopCount,
    TokenCounts,
)
from agentr_core.runtime.place import Position, Workplace
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.outside import outside_section
from agentr_core.stages.report_costs import bills
from agentr_core.stages.report_scores import Scoreboard
from agentr_core.store.queries import outcomes, usage
from agentr_core.store.queries.datasets import dataset_of
from agentr_core.store.queries.iterations import checkpoint_made, iteration_state, promotion_of
from agentr_core.store.queries.overview import iteration_lines
from agentr_core.store.queries.runs import run_versions
from agentr_core.store.queries.tool_calls import providers
from agentr_core.store.queries.worlds import made_by_world

_LISTS = ("trees", "trajectories", "pairs", "preferences", "groups", "samples", "rejections")
"""Lists of the viewer that are filtered by run and iteration."""
INTERVALS = (
    "success by Wilson's score, reward by bootstrap; differences are paired by instance; all are clustered where "
    "several episodes are of one instance, or of one under different names"
)


def build_report(
    place: Workplace, iteration: int, board: Scoreboard | None = None, *, viewer: str = ""
) -> IterationReport:
    """Return the report of an iteration; parts that were not measured are left out.

    Args:
        board: the scores of the run, for a caller that writes several reports.
        viewer: where `agentr view` shows the workspace; empty for a page without links there.
    """
    return replace(
        build_outline(place, iteration, board or Scoreboard(place), viewer=viewer),
        worlds=_worlds(place, iteration),
        data=(*outside_section(place, iteration), *_said_by_method(place, iteration, "data")),
        errors=_errors(place, iteration),
        samples=tuple(_linked(section, viewer) for section in _said_by_method(place, iteration, "samples")),
        hashes=_hashes(place, iteration),
    )


def build_outline(place: Workplace, iteration: int, board: Scoreboard, *, viewer: str = "") -> IterationReport:
    """Return the parts of an iteration's report that the page of the whole run and tables show."""
    recipe = place.recipe
    funnel = place.plan(iteration).funnel if iteration else None
    return IterationReport(
        recipe_name=recipe.name,
        run_id=place.run_id,
        iteration=iteration,
        date=finished_at(place, iteration),
        environment=", ".join(recipe.world_names),
        model=recipe.model.label,
        roles=roles(recipe),
        scores=board.up_to(iteration),
        unfinished=board.unfinished(iteration),
        versus_base=board.difference(iteration, 0),
        versus_previous=board.difference(iteration, iteration - 1) if iteration > 1 else None,
        interval_method=INTERVALS,
        promoted=promoted(place, iteration),
        funnel_title=funnel.title if funnel else "Training data",
        funnel=funnel.stages(place, iteration) if funnel else (),
        time=_time(place, iteration),
        tokens=_tokens(place, iteration),
        recipe_yaml=yaml.safe_dump(shown(recipe), sort_keys=False),
        versions=run_versions(place.store, place.run_id) | _tools(place),
        viewer=viewer,
        rows=_rows(place, iteration),
    )


def with_run(place: Workplace, report: IterationReport) -> IterationReport:
    """Return the outline of the last iteration of a run with its method's sections on the whole
    run.
    """
    return replace(report, run=_said_by_method(place, report.iteration, "run"))


def _linked(section: Section, viewer: str) -> Section:
    """Return a section whose samples lead to the viewer."""
    blocks = (
        Transcripts(tuple(replace(one, viewer=viewer) for one in block.examples))
        if isinstance(block, Transcripts)
        else block
        for block in section.blocks
    )
    return replace(section, blocks=tuple(blocks))


def _rows(place: Workplace, iteration: int) -> dict[str, int]:
    """Return how many rows each list of the viewer has for an iteration."""
    for line in iteration_lines(place.store, place.run_id):
        if line.iteration == iteration:
            counts = {name: getattr(line, name) for name in _LISTS}
            return {name: count for name, count in counts.items() if count}
    return {}


def _said_by_method(place: Workplace, iteration: int, position: Position) -> tuple[Section, ...]:
    parts = [part for part in place.method.report if part.position == position]
    return tuple(section for part in parts for section in part.sections(place, iteration))


def promoted(place: Workplace, iteration: int) -> Promoted | None:
    """Return the model that an iteration promoted as the best; None before it is known, or if the
    recipe promotes the last one.
    """
    if place.recipe.promote == "last":
        return None
    found = promotion_of(place.store, place.run_id, iteration)
    if found is None or found.success is None:
        return None
    return Promoted(iteration=found.iteration, development=found.development, success=found.success)


def roles(recipe: Recipe) -> dict[str, str]:
    """Return the models of the roles, other than the actor, that have their own, by role."""
    return {role: model.label for role, model in recipe.own_models().items() if role != "actor"}


def finished_at(place: Workplace, iteration: int) -> str:
    """Return the time when an iteration ended, or the present time while it runs, to the minute."""
    state = iteration_state(place.store, place.iteration_id(iteration))
    ended = state.finished_at if state else None
    return wording.moment(ended or datetime.now(UTC))


def _tools(place: Workplace) -> dict[str, str]:
    """Return who answered the calls of each tool in the run: for Python, how far code was
    confined.
    """
    return {f"tool {tool}": names for tool, names in providers(place.store, place.run_id).items()}


def _worlds(place: Workplace, iteration: int) -> dict[str, dict[str, int]]:
    """Return what each of several worlds contributed to the training data."""
    if not place.recipe.environments:
        return {}
    made = made_by_world(place.store, place.source_id(iteration), place.iteration_id(iteration))
    return {name: made.get(name, {}) for name in place.recipe.environments}


def _time(place: Workplace, iteration: int) -> dict[str, float]:
    seconds = usage.seconds_by_part(place.store, place.iteration_id(iteration))
    order = ("generate", "environment", "train", "store", "other")
    return {part: seconds[part] for part in order if part in seconds}


def _tokens(place: Workplace, iteration: int) -> TokenCounts:
    used = usage.token_use(place.store, place.iteration_id(iteration))
    built = dataset_of(place.store, place.iteration_id(iteration))
    online = usage.trained_online(place.store, place.iteration_id(iteration))
    # An objective that samples while it trains has no dataset.
    trained = built.counts["trained_tokens"] if built else {"sampled episodes": online} if online else {}
    return TokenCounts(
        prompt=used.prompt,
        completion=used.completion,
        trained=dict(sorted(trained.items())),
        in_training=usage.trained_offline(place.store, place.iteration_id(iteration)) if built else 0,
        cut=usage.cut_replies(place.store, place.iteration_id(iteration)),
        unreadable=usage.unreadable_replies(place.store, place.iteration_id(iteration)),
        bills=bills(place, iteration),
    )


def _errors(place: Workplace, iteration: int) -> ErrorRecord:
    iteration_id = place.iteration_id(iteration)
    evaluations = [evaluation_id(place, iteration, name) for name in (TEST, REVISION, *place.recipe.evaluation.sets)]
    collected = outcomes.collected_stops(place.store, iteration_id)
    evaluated = outcomes.evaluated_stops(place.store, evaluations)
    refused = outcomes.refusals(place.store, iteration_id, limit=8)
    return ErrorRecord(
        refused={opening or "(nothing)": count for opening, count in refused.items()},
        stops=tuple(
            StopCount(reason=reason, collected=collected.get(reason, 0), evaluated=evaluated.get(reason, 0))
            for reason in sorted(collected.keys() | evaluated.keys())
        ),
        faults=tuple(
            FaultCount(error=one.error, phase=one.phase, count=one.count, lost=one.lost)
            for one in outcomes.error_counts(place.store, iteration_id)
        ),
    )


def _hashes(place: Workplace, iteration: int) -> dict[str, str]:
    made = checkpoint_made(place.store, place.iteration_id(iteration))
    if made is None or made.parent_id is None:
        return {}
    hashes = {
        "checkpoint": made.checkpoint_id,
        "parent": made.parent_id,
        "dataset": made.dataset_hash,
        "weights": made.weights_sha256,
    }
    return {name: text for name, text in hashes.items() if text}
