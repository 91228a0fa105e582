"""Evaluation with side questions: votes on conciseness, and nudges after wrong answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.episodes.units import describe, run_all
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.et_agent.conciseness import vote
from agentr_core.methods.et_agent.flywheel.prompts import HINTS
from agentr_core.methods.et_agent.flywheel.turns import manner_of
from agentr_core.methods.et_agent.measures import CONCISENESS, NUDGED, answers_of
from agentr_core.models.samplers import Sampler
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.evaluation import TEST
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.sampling import sampling_of
from agentr_core.runtime.equipment import following, in_flight, speed
from agentr_core.runtime.helpers import answer
from agentr_core.runtime.place import Workplace
from agentr_core.stages.evaluate import Series, evaluation_id, keep_measures, measure_evaluation, play_evaluations
from agentr_core.stages.evaluate import evaluate as evaluate_policy
from agentr_core.stages.lost_episodes import counted_episodes
from agentr_core.stages.measures import measure, measure_rows
from agentr_core.store.codec.calls import answer_rows, load_answers
from agentr_core.store.codec.trajectories import Episode, load_episodes
from agentr_core.types import Answer, Instance, Trajectory

STAGE = "evaluate"


class Vote(NamedTuple):
    """A vote: number `number` on episode `repeat` of an instance."""

    trajectory_id: str
    trajectory: Trajectory
    repeat: int
    problem: Problem
    number: int

    @property
    def key(self) -> str:
        """The key that distinguishes this vote from others."""
        return f"{self.trajectory_id}#{self.number}"


async def evaluate(place: Workplace, iteration: int) -> dict[str, Any]:
    """Evaluate as every method does, then ask the recipe's side questions about the test set;
    return the success of each evaluation. Stored answers are not requested again.

    Raises as `stages.evaluate.evaluate`.
    """
    scores = await evaluate_policy(place, iteration)
    config = place.recipe.et_agent.behaviour
    if config.nudge:
        await _nudge(place, iteration)
    if config.votes:
        await _vote(place, iteration)
    if config.nudge or config.votes:
        found = measure_evaluation(place, iteration, TEST)
        place.store.write(measure_rows(evaluation_id(place, iteration, TEST), found))
    return scores


def check_asking(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` where a recipe asks about episodes that answer no question."""
    config = recipe.et_agent.behaviour
    if (config.votes or config.nudge) and not isinstance(env, ReasoningWorld):
        raise ConfigError(f"et_agent.behaviour: world {env.name} has no questions to ask about; leave it out")
    if config.nudge and not isinstance(transcript_of(env), Continuation):
        raise ConfigError(
            "et_agent.behaviour.nudge: a hint goes into the reasoning of a growing turn, which transcript native has "
            "not; leave it out"
        )


async def _nudge(place: Workplace, iteration: int) -> None:
    """Let the policy go on after each wrong answer with one hint."""
    evaluation = place.recipe.evaluation
    wrong = [
        one for one in load_episodes(place.store, evaluation_id(place, iteration, TEST)) if not one.trajectory.success
    ]
    with place.worlds() as worlds:
        plans = tuple(_nudged(place, one, worlds.of(one.instance)) for one in wrong)
    series = Series(
        evaluation_id=evaluation_id(place, iteration, NUDGED),
        name=NUDGED,
        split=place.recipe.instances.test,
        plans=plans,
        sampling=sampling_of(evaluation),
        max_steps=evaluation.max_steps,
        repeats=evaluation.repeats,
        limits=evaluation.limits,
        config=evaluation,
    )
    await play_evaluations(place, iteration, [series])
    found = measure(
        counted_episodes(place, series.evaluation_id), disaster_counts=place.recipe.evaluation.disaster_counts
    )
    kept = {name: one for name, one in found.items() if name in ("success", "reward")}
    keep_measures(place, iteration, [(series, kept)])


def _nudged(place: Workplace, wrong: Episode, env: Environment) -> EpisodePlan:
    manner = manner_of(env, wrong.instance)
    seed = derive_seed(place.recipe.seed, NUDGED, wrong.instance.key, wrong.repeat)
    hint = random.Random(seed).choice(HINTS[manner.domain])
    prefix = manner.hinted(wrong.trajectory.steps, hint).prefix
    return EpisodePlan(instance=wrong.instance, number=wrong.repeat, seed=seed, prefix=prefix)


async def _vote(place: Workplace, iteration: int) -> None:
    """Have the judge vote on each episode of the test set."""
    votes = _votes(place, load_episodes(place.store, evaluation_id(place, iteration, TEST)))
    stored = load_answers(place.store, CONCISENESS, [one.trajectory_id for one in votes])
    left = [one for one in votes if one.number not in stored.get(one.trajectory_id, {})]
    if left:
        await _ask_all(place, iteration, left, total=len(votes))


async def _ask_all(place: Workplace, iteration: int, left: Sequence[Vote], *, total: int) -> None:
    recipe = place.recipe
    path, stage = place.trained(iteration).path, f"{STAGE} {CONCISENESS}"
    async with place.asking("judge", path, stage, iteration) as (sampler, writer, readings):
        done = 0

        async def ask(one: Vote) -> Answer | None:
            try:
                return await _ask(sampler, one, recipe.seed)
            except PromptTooLong as error:
                # Such an episode has no vote, however often it is tried.
                failed(describe(one.key, error, final=True))
                return None

        def keep(key: str, answer: Answer | None) -> None:
            nonlocal done
            done, one = done + 1, by_key[key]
            position = max(0, len(one.trajectory.steps) - 1)
            if answer is not None:
                writer.add(answer_rows(one.trajectory_id, position, CONCISENESS, one.number, answer))
                readings.count(answer)
            show()

        def show() -> None:
            place.progress(done, len(left), f"votes, {speed(sampler)}")

        by_key = {one.key: one for one in left}
        failed = place.on_error(writer, STAGE, iteration)
        async with following(sampler, show):
            await run_all(
                left,
                ask,
                key=lambda one: one.key,
                errors=recipe.errors,
                total=total,
                on_error=failed,
                concurrency=in_flight(sampler, 1, wanted=recipe.scale.concurrency),
                on_result=keep,
            )


async def _ask(sampler: Sampler, one: Vote, seed: int) -> Answer:
    own = derive_seed(seed, CONCISENESS, one.trajectory.instance.key, one.repeat, one.number)
    return await answer(sampler, vote(one.trajectory, one.problem.golds), seed=own, session=one.trajectory_id)


def _votes(place: Workplace, episodes: Sequence[Episode]) -> list[Vote]:
    """Return all votes on episodes that answer a question."""
    answered = zip(episodes, answers_of(place, [one.trajectory for one in episodes]), strict=True)
    return [
        Vote(episode.trajectory_id, episode.trajectory, episode.repeat, one.problem, number)
        for episode, one in answered
        if one.problem is not None
        for number in range(place.recipe.et_agent.behaviour.votes)
    ]
