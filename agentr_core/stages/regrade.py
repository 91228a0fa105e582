"""Stored episodes, scored again by another grader, or by the world as it is now, without a model
that plays them.

The new rewards are rows beside the old ones, which stay (tables `scoring` and `regrade`). What was
scored is not scored again: the id of a scoring is a hash of all that determines its rewards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from agentr_core.environment import Environment, Repeatability
from agentr_core.environments import registry
from agentr_core.episodes.rollout import (
    EpisodeTimer,
    Helper,
    SharedEnvironments,
    UnreadableGrade,
    call,
    diverged,
    grade,
    graded,
    repeat_step,
)
from agentr_core.episodes.units import UnitError, run_all
from agentr_core.errors import ConfigError, IllTypedAnswer
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.protocols import Grader
from agentr_core.recipes.models import ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.equipment import Readings, Sink, identity, readings_of
from agentr_core.runtime.place import Workplace, answer
from agentr_core.runtime.start import input_files
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Writer
from agentr_core.store.queries.scorings import (
    load_regrades,
    regrade_row,
    scorable,
    scoring_row,
    scorings_beginning,
)
from agentr_core.store.tables import Regrade
from agentr_core.types import Answer, Question, Trajectory

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


def by_world(recipe: Recipe) -> Scoring:
    """Return the scoring of a recipe's worlds as they are installed now.

    Raises `ConfigError` where a world has no grader and does not repeat itself, and
    `DataFileError` for a file of it that cannot be read.
    """
    roles: set[str] = set()
    for name, own in recipe.worlds().items():
        kind = registry.checked(own.environment.name, own.environment.options)
        if registry.asks_models(own.environment.name):
            roles |= {"judge", "summariser"} & set(recipe.own_models())
        elif Repeatability(kind.repeatability) is Repeatability.NEVER or kind.has(Environment.relay):
            raise ConfigError(f"world {name} does not repeat itself, so it cannot score again; choose another grader")
    worlds = {
        name: {
            "name": own.environment.name,
            "options": own.environment.options,
            "version": registry.version_of(own.environment.name, own.environment.options),
        }
        for name, own in recipe.worlds().items()
    }
    played = {file for own in recipe.worlds().values() for file in _files(own)}
    files = {name: sha256 for name, sha256 in input_files(recipe).items() if name in played}
    models = {role: asked_model(recipe, role) for role in sorted(roles)}
    return Scoring(name="world", settings={"worlds": worlds, "files": files, "models": models}, grader=None)


def _files(recipe: Recipe) -> Sequence[str]:
    return list(registry.files_of(recipe.environment.name, recipe.environment.options, os.environ))


def asked_model(recipe: Recipe, role: str) -> dict[str, str]:
    """Return which model a recipe has for a role, for the settings of a scoring. Raises
    `ConfigError` for an unknown role, and `ModelDirectoryError` for unsound weights.
    """
    model = recipe.model_of(_role(role))
    return {"role": role, "model": model.label, "identity": identity(model)}


def _role(name: str) -> ModelRole:
    for role in get_args(ModelRole):
        if role == name:
            found: ModelRole = role
            return found
    raise IllTypedAnswer(f"a model of role {name!r} is asked; the roles are {', '.join(get_args(ModelRole))}")


async def regrade(
    place: Workplace, scoring: Scoring, *, evaluations: bool | None = None, iteration: int | None = None
) -> Regraded:
    """Score the episodes of a run that a scoring has not scored yet, and store their new rewards.

    An episode that a grader fails on gets no reward: it is told as an event, and tried again the
    next time. A reply that gives no grade is stored as it is.

    Args:
        evaluations: only the episodes of evaluations, or only the others; None: all.
        iteration: only those of this one; None: of all.

    Raises:
        ConfigError: there is no episode to score.
        ErrorBudgetSpent: the grader fails on more episodes than the recipe allows.
    """
    wanted = scorable(place.store, place.run_id, evaluations=evaluations, iteration=iteration)
    if not wanted:
        raise ConfigError(f"run {place.run_id} has no such episodes; `select * from v_episodes` lists those it has")
    originals = list(dict.fromkeys(wanted.values()))
    known = load_regrades(place.store, scoring.id, originals)
    left = [key for key in originals if key not in known]
    place.store.write(scoring_row(scoring.id, scoring.name, json.dumps(scoring.settings, sort_keys=True)))
    faults: list[str] = []
    done = len(known)
    with closing(SharedEnvironments(lambda name: place.make_environment(place.recipe.world_name(name)))) as lent:
        async with Writer(place.store) as writer, AsyncExitStack() as opened:
            ask = _asking(place, opened)
            store_event = place.on_error(writer, STAGE, 0)

            def on_error(error: UnitError) -> None:
                store_event(error)
                if error.final:
                    faults.append(f"{error.kind}: {error.message}")

            def on_result(key: str, found: Regrade) -> None:
                nonlocal done
                done += 1
                writer.add({"regrade": [regrade_row(scoring.id, key, found)]})
                place.progress(done, len(originals), f"episodes scored by {scoring.name}")

            for start in range(0, len(left), _LOADED):
                played = load_trajectories(place.store, left[start : start + _LOADED])
                await run_all(
                    list(played),
                    lambda key: _regraded(place, scoring, lent, key, played[key], ask, writer),  # noqa: B023
                    key=str,
                    errors=place.recipe.errors,
                    on_error=on_error,
                    on_result=on_result,
                    concurrency=_AT_ONCE,
                )
    return Regraded(episodes=len(originals), new=done - len(known), faults=faults)


async def _regraded(
    place: Workplace,
    scoring: Scoring,
    lent: SharedEnvironments,
    key: str,
    trajectory: Trajectory,
    ask: Helper,
    sink: Sink,
) -> Regrade:
    await sink.room()
    seed = derive_seed(place.recipe.seed, STAGE, key)
    try:
        if scoring.grader is not None:
            found = await grade(scoring.grader, trajectory, ask, seed=seed, session=key)
            return Regrade(reward=found.grade.reward, success=found.grade.success, answer=found.answer)
        async with lent.lend(trajectory.instance) as env:
            if env.grader is None:
                return await call(env, EpisodeTimer(), partial(_replayed, env, trajectory))
            again, grading = await graded(env, trajectory, ask, seed=seed, session=key)
        return Regrade(reward=again.reward, success=again.success, answer=grading.answer if grading else None)
    except UnreadableGrade as unreadable:
        return Regrade(reward=None, success=None, answer=unreadable.answer)


def _replayed(env: Environment, trajectory: Trajectory) -> Regrade:
    """Return the reward of the recorded actions, whatever the world answers to them now."""
    steps = trajectory.steps
    if env.has(Environment.resume) and steps:
        # Tools that were called again might answer otherwise.
        env.resume(trajectory.instance, steps[:-1])
        steps = steps[-1:]
    else:
        env.reset(trajectory.instance)
    found = Regrade(reward=0.0, success=False)
    for step in steps:
        env.hear(step.reply)
        transition = repeat_step(env, step.action, step.answers)
        if transition.info.get("question") is not None:
            raise diverged(env, f"{step.action!r} asks a model more often than when it was recorded")
        disaster = transition.reward < 0
        found = Regrade(reward=max(transition.reward, 0.0), success=transition.info["success"] and not disaster)
        if transition.terminated or transition.truncated or disaster:
            break
    return found


def _asking(place: Workplace, opened: AsyncExitStack) -> Helper:
    """Return a helper that asks the models of roles; each is loaded when it is first asked."""
    samplers: dict[ModelRole, tuple[Sampler, Readings]] = {}
    loading = asyncio.Lock()

    async def ask(question: Question, *, seed: int, session: str) -> Answer:
        role = _role(question.role)
        async with loading:
            if role not in samplers:
                sampler = await opened.enter_async_context(place.sampling(place.trained(0).path, role))
                samplers[role] = sampler, opened.enter_context(readings_of(role, sampler.model.name))
        sampler, readings = samplers[role]
        said = await answer(sampler, question, seed=seed, session=session)
        readings.count(said)
        return said

    return ask


def check_scoring(place: Workplace) -> None:
    """Raise `ConfigError` if the recipe names a scoring that the store does not have."""
    named = place.recipe.data.scoring
    if named and named not in scorings_beginning(place.store, named):
        raise ConfigError(
            f"data.scoring: there is no scoring {named}; `select * from v_scorings` lists those there are"
        )


def scored_by(place: Workplace, trajectories: Mapping[str, Trajectory]) -> dict[str, Trajectory]:
    """Return trajectories with the rewards that the recipe's `data.scoring` gives them, by id; as
    they are without one. Those whose grade is unreadable are left out.

    Raises `ConfigError` for trajectories that the scoring has not scored.
    """
    scoring = place.recipe.data.scoring
    if not scoring:
        return dict(trajectories)
    found = load_regrades(place.store, scoring, list(trajectories))
    if missing := len(trajectories) - len(found):
        raise ConfigError(
            f"data.scoring: {missing} of {len(trajectories)} episodes have no score of scoring {scoring}; "
            f"`agentr regrade {place.run_id}` by the same grader gives them; then run again"
        )
    return {
        key: dataclasses.replace(trajectory, reward=again.reward, success=bool(again.success))
        for key, trajectory in trajectories.items()
        if (again := found[key]).reward is not None
    }
