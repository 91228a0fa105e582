"""One model in several worlds compared with a model for each world. Source: Agent-R (arXiv
2501.11425), table 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentr_core.errors import ConfigError
from agentr_core.recipes.evaluation import TEST
from agentr_core.recipes.recipe import Recipe, identifying
from agentr_core.reports.beside import BesideScore
from agentr_core.reports.records import Estimate
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import evaluation_id
from agentr_core.stages.lost_episodes import counted_episodes
from agentr_core.stages.measures import of_world
from agentr_core.stages.report_scores import Scoreboard, estimate
from agentr_core.store.queries.iterations import iterations_of

TOGETHER, APART = "one model", "a model a world"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The scores of a model in one world, and the instances that it played."""

    success: Estimate
    reward: Estimate
    instances: frozenset[str]


def beside(place: Workplace, others: Sequence[Workplace]) -> tuple[BesideScore, ...]:
    """Return the held-out scores of a run of several worlds, and those of runs of one world each,
    by iteration, starting with the model that the runs began with.

    Raises `ConfigError` when a run has other worlds than it should, or played other instances.
    """
    worlds = place.recipe.world_names
    if len(worlds) < 2:
        raise ConfigError(f"run {place.run_id} has one world; name a run of several worlds first")
    by_name = _by_world(others, worlds, place.run_id)
    together = _scores(place)
    apart = {name: _scores(other) for name, other in by_name.items()}
    for name, other in by_name.items():
        _check_instances(place, other, name, together, apart[name])
    last = max([0, *together, *(number for found in apart.values() for number in found)])
    found = []
    for iteration in range(last + 1):
        rows = {
            TOGETHER: together.get(iteration, {}),
            APART: {name: one[iteration][name] for name, one in apart.items() if name in one.get(iteration, {})},
        }
        found += [
            BesideScore(
                iteration=iteration,
                mode=mode,
                success={name: one.success for name, one in played.items()},
                reward={name: one.reward for name, one in played.items()},
            )
            for mode, played in rows.items()
            if played
        ]
    return tuple(found)


def differences(place: Workplace, others: Sequence[Workplace]) -> list[str]:
    """Return the recipe sections in which each run of one world differs from the run of several,
    one sentence each.
    """
    told = []
    for other in others:
        (name,) = other.recipe.world_names
        if differing := differing_sections(place.recipe.in_world(name), other.recipe.in_world(name)):
            told.append(f"run {other.run_id} also differs in {', '.join(differing)}")
    return told


def differing_sections(recipe: Recipe, other: Recipe) -> list[str]:
    """Return the names of the sections in which two recipes differ, sorted; names, descriptions and
    sections that change no result are left out.
    """
    mine, theirs = _asked(recipe), _asked(other)
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def _asked(recipe: Recipe) -> dict[str, object]:
    return {
        name: value
        for name, value in identifying(recipe).items()
        if name not in ("name", "description", "workspace", "scale")
    }


def _by_world(others: Sequence[Workplace], worlds: Sequence[str], run_id: str) -> dict[str, Workplace]:
    found: dict[str, Workplace] = {}
    for other in others:
        own = other.recipe.world_names
        if len(own) > 1 or own[0] not in worlds:
            raise ConfigError(f"run {other.run_id} is of {', '.join(own)}; name runs of one world of run {run_id} each")
        if own[0] in found:
            raise ConfigError(f"runs {found[own[0]].run_id} and {other.run_id} are both of {own[0]}; name one of them")
        found[own[0]] = other
    return found


def _scores(place: Workplace) -> dict[int, dict[str, _Played]]:
    """Return the scores in each world, by iteration."""
    board = Scoreboard(place)
    numbers = iterations_of(place.store, place.run_id)
    return {number: found for number in numbers if (found := dict(_played(place, board, number)))}


def _played(place: Workplace, board: Scoreboard, number: int) -> Iterator[tuple[str, _Played]]:
    found = board.measured(number, TEST)
    instances = [e.instance for e in counted_episodes(place, evaluation_id(place, number, TEST))]
    for name in place.recipe.world_names:
        if own := of_world(found, name) if place.recipe.environments else found:
            yield (
                name,
                _Played(
                    success=estimate(own["success_clustered"]),
                    reward=estimate(own["reward"]),
                    instances=frozenset(i.key for i in instances if place.recipe.world_name(i.environment) == name),
                ),
            )


def _check_instances(
    place: Workplace,
    other: Workplace,
    name: str,
    together: Mapping[int, Mapping[str, _Played]],
    apart: Mapping[int, Mapping[str, _Played]],
) -> None:
    for mine, theirs in ((together[number], apart[number]) for number in together.keys() & apart.keys()):
        if name in mine and name in theirs and mine[name].instances != theirs[name].instances:
            raise ConfigError(
                f"run {other.run_id} played other held-out instances of {name} than run {place.run_id}; compare runs "
                "with the same test split and test_limit"
            )
