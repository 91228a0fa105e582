"""Evaluation with side questions: votes on conciseness, and nudges after wrong answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from agentr_core.answers import readable
from agentr_core.environments.reasoning.grammar import Answers, prediction_of
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.scoring import exact_match
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.episodes.units import describe, run_all
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.evaluation.metrics import Estimate, clustered_share
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.et_agent.behaviour import Attempt, attempt_of, behaviour, gains, is_concise, read_vote, vote
from agentr_core.methods.et_agent.operators import HINTS, manner_of
from agentr_core.protocols import Environment
from agentr_core.recipes.environments import TEST
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.equipment import following, in_flight, speed
from agentr_core.runtime.place import Workplace, answer
from agentr_core.stages.evaluate import (
    Series,
    counted_episodes,
    ended_episodes,
    evaluation_id,
    keep_measures,
    measure,
    measure_evaluation,
    measure_rows,
    play_evaluations,
)
from agentr_core.stages.evaluate import evaluate as evaluate_policy
from agentr_core.store.codec.trajectories import Episode, answer_rows, load_answers, load_episodes
from agentr_core.types import Answer, Instance, Trajectory

# ET-Agent's measures of an evaluation, by name: rows of table metric in addition to those of
# `stages.measures`.
#
# performance, efficiency, tool_productivity, successful_execution,
# successful_execution_as_published, reasoning_length, redundant_calls
#                             see `behaviour.Behaviour`
# performance_gain_over_base, efficiency_gain_over_base
#                             their gains over the base model, paired by question
# f1                          word F1 on knowledge questions, by rule
# judged                      the reward on mathematics questions: by rule, then by the judge
# exact_match                 the share of answers that are a gold one, word for word or in value
# conciseness, nudged_right   on the test set, if the recipe asks for them
# source-s/...                any of these, for one source of questions

NUDGED = "nudged"
"""The name of the evaluation whose episodes go on after wrong answers."""
CONCISENESS = "conciseness"
"""The purpose of votes, as in table `answer`."""
OF_SOURCE = "source-"
"""Begins the names of metrics of one source of questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An episode, and the question that it answers; None in a world that has no questions."""

    attempt: Attempt
    trajectory: Trajectory
    problem: Problem | None
    answers: Answers = "plain"


def measures(place: Workplace, iteration: int, name: str, episodes: Sequence[Episode]) -> dict[str, Estimate]:
    """Return the measures of the episodes of an evaluation, and of those of each source."""
    asked = Asked.of(place, iteration, [one.trajectory_id for one in episodes]) if name == TEST else Asked()
    answered = [
        replace(
            one,
            attempt=replace(
                one.attempt,
                concise=asked.concise(episode.trajectory_id),
                nudged_right=asked.nudged_right(episode),
                origin=episode.origin,
            ),
        )
        for one, episode in zip(answers_of(place, [e.trajectory for e in episodes]), episodes, strict=True)
    ]
    found = _measured(answered)
    if iteration and (base := ended_episodes(place, evaluation_id(place, 0, name))):
        before = answers_of(place, [one.trajectory for one in base])
        gained = gains([one.attempt for one in answered], [one.attempt for one in before])
        found |= {name: estimate for name, estimate in gained.items() if estimate.n}
    for source in sorted({one.attempt.source for one in answered}):
        own = _measured([one for one in answered if one.attempt.source == source])
        found |= {f"{OF_SOURCE}{source}/{name}": estimate for name, estimate in own.items()}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Answers to the side questions of an evaluation: votes by trajectory, and whether a nudge made
    an answer right, by instance and repeat.
    """

    votes: Mapping[str, Mapping[int, Answer]] = field(default_factory=dict)
    nudged: Mapping[tuple[str, int], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Workplace, iteration: int, trajectory_ids: Sequence[str]) -> Asked:
        """Return the stored answers on the given trajectories of an evaluation."""
        played = load_episodes(place.store, evaluation_id(place, iteration, NUDGED))
        return cls(
            votes=load_answers(place.store, CONCISENESS, trajectory_ids),
            nudged={(one.instance.key, one.repeat): one.trajectory.success for one in played},
        )

    def concise(self, trajectory_id: str) -> bool | None:
        """Return whether the votes find an episode concise; None without votes that can be read."""
        said = self.votes.get(trajectory_id)
        return is_concise([read_vote(readable(vote) or "") for vote in said.values()]) if said else None

    def nudged_right(self, episode: Episode) -> bool | None:
        """Return whether a wrong answer became right; None if the policy was not told to think
        on.
        """
        return self.nudged.get((episode.instance.key, episode.repeat))


def answers_of(place: Workplace, trajectories: Sequence[Trajectory]) -> list[Answered]:
    """Return episodes with the questions that they answer; an episode without a question has its
    world as source.
    """
    curriculum = place.recipe.et_agent.curriculum
    found = []
    with place.worlds() as worlds:
        for trajectory in trajectories:
            env = worlds.of(trajectory.instance)
            problem = env.problem(trajectory.instance) if isinstance(env, ReasoningWorld) else None
            source = trajectory.instance.environment if problem is None else problem.source
            attempt = attempt_of(trajectory, source=source, counts=curriculum.counts, refused=curriculum.refused_calls)
            answers = env.answers if isinstance(env, ReasoningWorld) else "plain"
            found.append(Answered(attempt=attempt, trajectory=trajectory, problem=problem, answers=answers))
    return found


def _measured(answered: Sequence[Answered]) -> dict[str, Estimate]:
    of_behaviour = behaviour([one.attempt for one in answered])
    estimates = {metric.name: getattr(of_behaviour, metric.name) for metric in fields(of_behaviour)}
    # Scores of answers that disregard cost.
    known = [(one.trajectory, one.problem, one.answers) for one in answered if one.problem is not None]
    keys = [trajectory.instance.key for trajectory, *_ in known]
    math = [(t.instance.key, t.reward) for t, problem, _ in known if problem.domain == "math"]
    words = [
        (t.instance.key, problem.correctness(prediction_of(t, answers), answers))
        for t, problem, answers in known
        if problem.domain == "knowledge"
    ]
    estimates |= {
        "f1": clustered_share([value for _, value in words], [key for key, _ in words]),
        "judged": clustered_share([value for _, value in math], [key for key, _ in math]),
        "exact_match": clustered_share([float(_exact(*one)) for one in known], keys),
    }
    return {name: estimate for name, estimate in estimates.items() if estimate.n}


def _exact(trajectory: Trajectory, problem: Problem, answers: Answers) -> bool:
    said = prediction_of(trajectory, answers)
    if problem.domain == "math" or problem.options:
        return problem.correctness(said, answers) == 1
    return exact_match(said, problem.golds, answers)


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
    plans: list[EpisodePlan] = []
    with place.worlds() as worlds:
        for episode in load_episodes(place.store, evaluation_id(place, iteration, TEST)):
            if episode.trajectory.success:
                continue
            instance = episode.instance
            manner = manner_of(worlds.of(instance), instance)
            seed = derive_seed(place.recipe.seed, NUDGED, instance.key, episode.repeat)
            hint = random.Random(seed).choice(HINTS[manner.domain])
            prefix = manner.hinted(episode.trajectory.steps, hint).prefix
            plans.append(EpisodePlan(instance=instance, number=episode.repeat, seed=seed, prefix=prefix))
    series = Series(
        evaluation_id=evaluation_id(place, iteration, NUDGED),
        name=NUDGED,
        split=place.recipe.instances.test,
        plans=tuple(plans),
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


async def _vote(place: Workplace, iteration: int) -> None:
    """Have the judge vote on each episode of the test set."""
    episodes = load_episodes(place.store, evaluation_id(place, iteration, TEST))
    answered = zip(episodes, answers_of(place, [episode.trajectory for episode in episodes]), strict=True)
    votes = [
        Vote(episode.trajectory_id, episode.trajectory, episode.repeat, one.problem, number)
        for episode, one in answered
        if one.problem is not None
        for number in range(place.recipe.et_agent.behaviour.votes)
    ]
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
            seed = derive_seed(recipe.seed, CONCISENESS, one.trajectory.instance.key, one.repeat, one.number)
            question = vote(one.trajectory, one.problem.golds)
            try:
                return await answer(sampler, question, seed=seed, session=one.trajectory_id)
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
