"""A report of runs side by side, filled from the store: episodes paired, intervals over the same
instances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from agentr_core.errors import ConfigError
from agentr_core.recipes.evaluation import REVISION, TEST
from agentr_core.reports import wording
from agentr_core.reports.records import Estimate
from agentr_core.reports.runs import PairedScore, RunColumn, RunsReport
from agentr_core.reports.unfinished import unfinished
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.lost_episodes import ended_episodes
from agentr_core.stages.measures import by_depth, gain, given_steps
from agentr_core.stages.report import build_outline, promoted
from agentr_core.stages.report_beside import differing_sections
from agentr_core.stages.report_scores import Scoreboard, estimate, finite
from agentr_core.store.codec.trajectories import Episode
from agentr_core.store.queries.evaluations import finished_evaluations
from agentr_core.store.queries.iterations import iterations_of


def build_runs(places: Sequence[Workplace], *, viewer: str = "") -> RunsReport:
    """Return the report of runs side by side, in which the others are compared with the first.

    Raises `ConfigError` where a run has no model that was evaluated, or is named twice.
    """
    names = [place.run_id for place in places]
    if len(set(names)) < len(names):
        raise ConfigError(f"a run is named twice: {', '.join(names)}; name different runs")
    first, last = places[0], _last(places[0])
    columns = tuple(_column(place, first, last) for place in places)
    return RunsReport(runs=columns, date=wording.moment(datetime.now(UTC)), viewer=viewer)


def _last(place: Workplace) -> int:
    """Return the iteration whose model a run ends with so far: the last one that was evaluated, or
    the one that this iteration promotes.
    """
    ended = {one.evaluation_id for one in finished_evaluations(place.store, place.run_id, after=-1)}
    numbers = [n for n in iterations_of(place.store, place.run_id) if evaluation_id(place, n, TEST) in ended]
    if not numbers:
        raise ConfigError(_why_not(place))
    chosen = promoted(place, numbers[-1])
    return chosen.iteration if chosen else numbers[-1]


def _why_not(place: Workplace) -> str:
    """Return why a run cannot be compared yet."""
    begun = Scoreboard(place).unfinished(max(iterations_of(place.store, place.run_id), default=0))
    if not begun:
        return f"run {place.run_id} has no model that was evaluated, so there is nothing to compare"
    return f"run {place.run_id} cannot be compared yet; {unfinished(begun)[-1]}"


def _column(place: Workplace, first: Workplace, last_of_first: int) -> RunColumn:
    iteration, board = _last(place), Scoreboard(place)
    outlines = [build_outline(place, number, board) for number in range(1, iteration + 1)]
    tokens = [one.tokens for one in outlines if one.tokens]
    return RunColumn(
        run_id=place.run_id,
        recipe_name=place.recipe.name,
        method=place.method.title,
        model=place.recipe.model.label,
        seed=place.recipe.seed,
        iteration=iteration,
        scores=board.up_to(iteration),
        sets=tuple(_paired_scores(place, iteration, first, last_of_first, board)),
        seconds=sum(seconds for one in outlines for seconds in one.time.values()),
        prompt=sum(one.prompt for one in tokens),
        completion=sum(one.completion for one in tokens),
        trained=sum(one.all_trained for one in tokens),
        differs=() if place is first else tuple(differing_sections(first.recipe, place.recipe)),
    )


def _paired_scores(
    place: Workplace, iteration: int, first: Workplace, last_of_first: int, board: Scoreboard
) -> Iterator[PairedScore]:
    for name in (TEST, *place.recipe.evaluation.sets, REVISION):
        own = ended_episodes(place, evaluation_id(place, iteration, name))
        if not own:
            continue
        measured = board.measured(iteration, name)
        success = estimate(measured.get("success_clustered", measured["success"]))
        theirs = [] if place is first else ended_episodes(first, evaluation_id(first, last_of_first, name))
        yield _paired(wording.label(name), success, own, theirs)


def _paired(name: str, success: Estimate, own: Sequence[Episode], theirs: Sequence[Episode]) -> PairedScore:
    solved = {_key(one): one.trajectory.success for one in theirs if _is_known(one)}
    shared = [one for one in own if _is_known(one) and _key(one) in solved]
    apart = [(one.trajectory.success, solved[_key(one)]) for one in shared]
    depths = ((depth, finite(gain(some, theirs))) for depth, some in by_depth(shared))
    return PairedScore(
        name=name,
        success=success,
        difference=finite(gain(shared, theirs)) if shared else None,
        shared=len(shared),
        won=apart.count((True, False)),
        lost=apart.count((False, True)),
        depths=tuple((depth, found) for depth, found in depths if found is not None),
    )


def _is_known(episode: Episode) -> bool:
    """Return whether it is known how an episode began: one of a revision test that failed for good
    has no steps that would tell.
    """
    return not episode.cut or bool(episode.trajectory_id)


def _key(episode: Episode) -> tuple[str, int, int, tuple[str, ...]]:
    """Return what makes an episode the same in two runs: their revision tests go on from failures
    of their own first models, which may differ though instance, number and cut are equal.
    """
    return episode.instance.key, episode.repeat, episode.cut, given_steps(episode)
