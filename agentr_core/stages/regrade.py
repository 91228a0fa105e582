"""Stored episodes, scored again by another grader, or by the world as it is now, without a model
that plays them.

The new rewards are rows beside the old ones, which stay (tables `scoring` and `regrade`). What was
scored is not scored again: the id of a scoring is a hash of all that determines its rewards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentr_core.environment import Environment, Repeatability
from agentr_core.episodes.grading import UnreadableGrade, grade, scored_again
from agentr_core.episodes.rollout import SharedEnvironments
from agentr_core.episodes.units import UnitError, run_all
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.protocols import Grader
from agentr_core.runtime.equipment import identity
from agentr_core.runtime.place import Workplace, helpers
from agentr_core.runtime.start import contents, played_from
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Writer
from agentr_core.store.queries.scorings import load_regrades, scorable
from agentr_core.store.tables import Regrade, row_of
from agentr_core.types import Trajectory

STAGE = "regrade"
_AT_ONCE = 16
_LOADED = 1000
"""Episodes that are in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A way of scoring episodes: `grader`, or the world itself where that is None.

    `settings` are plain data: all that determines the rewards.
    """

    name: str
    settings: Mapping[str, Any]
    grader: Grader | None

    # The run is no part of it: a later run has copies of these episodes, whose score is this one,
    # and its recipe names the scoring in data.scoring.
    @property
    def id(self) -> str:
        """The id, which is that of an equal scoring in any run."""
        return fingerprint("scoring", self.name, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """What came of a scoring: how many episodes there are, how many were scored now, and the
    reasons why others have no score.
    """

    episodes: int
    new: int
    faults: Sequence[str]


def by_world(place: Workplace) -> Scoring:
    """Return the scoring of a recipe's worlds as they are installed now.

    Raises `ConfigError` for a world that has no grader and does not repeat itself, and
    `DataFileError` if one of its files cannot be read.
    """
    worlds: dict[str, Any] = {}
    with place.worlds() as opened:
        for recipe, env in opened:
            options = recipe.environment.options
            unrepeatable = Repeatability(env.repeatability) is Repeatability.NEVER or env.has(Environment.relay)
            if env.grader is None and unrepeatable:
                raise ConfigError(f"world {env.name} does not repeat itself, so it cannot score again; choose another")
            worlds[env.name] = {
                "name": recipe.environment.name,
                "options": options,
                "version": env.version_of(options),
                "asks": asked_model(place, env.grader.asks) if env.grader and env.grader.asks else None,
            }
    files = {name: contents(Path(path), place.recipe) for name, path in played_from(place.recipe).items()}
    return Scoring(name="world", settings={"worlds": worlds, "files": files}, grader=None)


def asked_model(place: Workplace, role: Any) -> dict[str, str]:
    """Return which model a recipe has for a role, for the settings of a scoring. Raises
    `ModelDirectoryError` for unsound weights.
    """
    model = place.recipe.model_of(role)
    return {"role": role, "model": model.label, "identity": identity(model)}


async def regrade(
    place: Workplace, scoring: Scoring, *, evaluations: bool | None = None, iteration: int | None = None
) -> Regraded:
    """Score the episodes of a run that a scoring has not scored yet, and store their new rewards.

    An episode on which the grader fails gets no reward: the failure is stored as an event, and the
    next call tries the episode again. A reply without a readable grade is stored as it is.

    Args:
        evaluations: only the episodes of evaluations, or only the others; None: all.
        iteration: only those of this one; None: of all.

    Raises:
        ConfigError: there is no episode to score.
        ErrorBudgetSpent: the grader fails on more episodes than the recipe allows.
    """
    episodes = scorable(place.store, place.run_id, evaluations=evaluations, iteration=iteration)
    if not episodes:
        raise ConfigError(
            f"run {place.run_id} has no such episodes, and paths of search trees are none; `select * from v_episodes` "
            "lists those it has"
        )
    originals = list(dict.fromkeys(episodes.values()))
    stored = load_regrades(place.store, scoring.id, originals)
    left = [key for key in originals if key not in stored]
    settings = json.dumps(scoring.settings, sort_keys=True)
    place.store.write({"scoring": [{"scoring_id": scoring.id, "grader": scoring.name, "settings": settings}]})
    faults: list[str] = []
    count = len(stored)
    path = place.trained(0).path
    with closing(SharedEnvironments(lambda name: place.make_environment(place.recipe.world_name(name)))) as lent:
        async with Writer(place.store) as writer, helpers(place, path, None, writer) as models:
            store_event = place.on_error(writer, STAGE, 0)

            async def score(trajectory: Trajectory) -> Regrade:
                await writer.room()
                try:
                    if scoring.grader is not None:
                        grading = await grade(scoring.grader, trajectory, models.ask, seed=place.recipe.seed)
                    else:
                        async with lent.lend(trajectory.instance) as env:
                            grading = await scored_again(env, trajectory, models.ask, seed=place.recipe.seed)
                except UnreadableGrade as unreadable:
                    return Regrade(reward=None, success=None, answer=unreadable.answer)
                return Regrade(reward=grading.grade.reward, success=grading.grade.success, answer=grading.answer)

            def on_error(error: UnitError) -> None:
                store_event(error)
                if error.final:
                    faults.append(f"{error.kind}: {error.message}")

            def on_result(key: str, result: Regrade) -> None:
                nonlocal count
                count += 1
                writer.add({"regrade": [row_of("regrade", result, scoring_id=scoring.id, trajectory_id=key)]})
                place.progress(count, len(originals), f"episodes scored by {scoring.name}")

            for start in range(0, len(left), _LOADED):
                played = load_trajectories(place.store, left[start : start + _LOADED])
                await run_all(
                    list(played.items()),
                    lambda episode: score(episode[1]),
                    key=lambda episode: episode[0],
                    errors=place.recipe.errors,
                    on_error=on_error,
                    on_result=on_result,
                    concurrency=_AT_ONCE,
                )
    return Regraded(episodes=len(originals), new=count - len(stored), faults=faults)


def scored_by(place: Workplace, trajectories: Mapping[str, Trajectory]) -> dict[str, Trajectory]:
    """Return trajectories with the rewards that the recipe's `data.scoring` gives them, by id; as
    they are without one. Those whose grade is unreadable are left out.

    Raises `ConfigError` for a scoring that there is not, and for trajectories that it has not
    scored.
    """
    scoring = place.recipe.data.scoring
    if not scoring:
        return dict(trajectories)
    if place.store.missing("scoring", [scoring]):
        raise ConfigError(
            f"data.scoring: there is no scoring {scoring}; `select * from v_scorings` lists those there are"
        )
    regrades = load_regrades(place.store, scoring, list(trajectories))
    if missing := len(trajectories) - len(regrades):
        raise ConfigError(
            f"data.scoring: {missing} of {len(trajectories)} episodes have no score of scoring {scoring}; "
            f"`agentr regrade {place.run_id}` by the same grader gives them; then run again"
        )
    return {
        key: dataclasses.replace(trajectory, reward=again.reward, success=bool(again.success))
        for key, trajectory in trajectories.items()
        if (again := regrades[key]).reward is not None
    }
