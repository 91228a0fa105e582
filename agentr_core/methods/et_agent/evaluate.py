"""Evaluation with side questions: votes on conciseness, and nudges after wrong answers."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any, NamedTuple

from agentr_core.environment import Environment
from agentr_core.environments.native import actions_in, is_misread
from agentr_core.environments.reasoning.grammar import (
    CALLS,
    Answers,
    call_in,
    format_fault,
    prediction_of,
    reasoning_tokens,
    text_of,
)
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.scoring import exact_match
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.episodes.units import describe, run_all
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.evaluation.metrics import NO_ESTIMATE, Estimate, clustered_mean, clustered_share, within
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.et_agent.operators import HINTS, manner_of
from agentr_core.recipes.environments import TEST
from agentr_core.recipes.et_agent import Counts
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.replies import after_thoughts, readable
from agentr_core.runtime.equipment import in_flight, units_done
from agentr_core.runtime.place import Workplace, answer
from agentr_core.stages.evaluate import (
    Series,
    counted_episodes,
    ended_episodes,
    evaluation_id,
    keep_measures,
    mean_gain,
    measure,
    measure_evaluation,
    measure_rows,
    play_evaluations,
)
from agentr_core.stages.evaluate import evaluate as evaluate_policy
from agentr_core.store.codec.trajectories import Episode, answer_rows, load_answers, load_episodes
from agentr_core.types import Answer, Instance, Message, Question, Sampling, ToolCall, Trajectory

# How a policy behaves when it reasons with tools: not only whether it is right, but at what cost.
#
# Every metric has a 95% interval, clustered by question, since a question may be answered several
# times or in several variants. Source: ET-Agent (arXiv 2601.06860), evaluation. Where our metric
# differs from the published one, its description says so.

# The cost of an episode, and whether it keeps the format: in worlds with tools and in others.


def tool_calls(trajectory: Trajectory) -> list[ToolCall]:
    """Return the tool calls of an episode, in order."""
    return [call for step in trajectory.steps for call in step.tool_calls]


def cost(trajectory: Trajectory, counts: Counts, *, refused: bool = False) -> int:
    """Return the number of tool calls that an episode made, including, with `refused`, those that
    the world refused; if `counts` is `steps`, the number of its steps instead.
    """
    return len(_called(trajectory, refused)) if counts == "calls" else len(trajectory.steps)


def weighed_cost(
    trajectory: Trajectory, counts: Counts, weights: Mapping[str, float], *, refused: bool = False
) -> float:
    """Return the cost as `cost` does, but with each call weighted by its tool; a tool without a
    weight counts 1, and steps are not weighted.
    """
    if counts == "steps" or not weights:
        return cost(trajectory, counts, refused=refused)
    return sum(weights.get(tool, 1.0) for tool in _called(trajectory, refused))


def _called(trajectory: Trajectory, refused: bool) -> list[str]:
    """Return the tool of each call that was made, and with `refused` then those of calls that the
    world refused.
    """
    tools = [call.tool for call in tool_calls(trajectory)]
    for step in trajectory.steps if refused else ():
        if step.valid is False:
            # Of several calls in one step, some may have been made.
            call_counts = Counter(call.name for call in map(call_in, actions_in(step.action)) if call is not None)
            unmade_calls = call_counts - Counter(call.tool for call in step.tool_calls)
            tools += [name for name in unmade_calls.elements() if name in CALLS]
    return tools


def well_formed(trajectory: Trajectory, counts: Counts) -> bool:
    """Return whether an episode keeps the format: the tags of a reasoning episode, or, where steps
    are counted, an action in every reply.
    """
    if counts == "calls":
        return not format_fault(text_of(trajectory))
    return all(step.action and not is_misread(step.action) for step in trajectory.steps)


_SOFT = 0.1
"""The constant of tool productivity: with a mean of so many calls it is half the score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt at a question, with the data that the metrics of behaviour need.

    `question` is the key of the question's instance, and `origin` that of the one that it is a
    variant of, empty if there is none. `score` is the attempt's correctness in [0, 1]. `failed`
    counts calls whose status is not ok, `redundant` those that repeat an earlier one.
    `reasoning_tokens` excludes results; None if the number is unknown. `concise` is the outcome of
    the votes, None without any. `nudged_right` says whether a wrong answer became right when the
    policy was given a hint to go on; None for right answers, and if no hint was given.
    """

    question: str
    source: str
    score: float
    calls: int
    failed: int
    redundant: int
    reasoning_tokens: int | None = None
    concise: bool | None = None
    nudged_right: bool | None = None
    origin: str = ""

    @property
    def cluster(self) -> str:
        """The name of the attempt's cluster: attempts of different clusters are independent."""
        return self.origin or self.question


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The metrics of a policy on some questions; an estimate is NaN where no attempt has a value.

    `performance` is the mean score, called P. `efficiency` is score / max(calls, 1).
    `tool_productivity` is P * t / (t + 0.1) * 100 for a mean of t calls. `conciseness` is the share
    of concise attempts. `successful_execution` is score / (1 + failed calls); as published it is
    score / max(failed calls, 1), so that the first failure costs nothing. `reasoning_length` is
    score per 1,000 tokens of reasoning. `redundant_calls` is the redundant share of all calls.
    `nudged_right` is the share of wrong answers that one nudge made right.
    """

    performance: Estimate
    efficiency: Estimate
    tool_productivity: Estimate
    conciseness: Estimate
    successful_execution: Estimate
    successful_execution_as_published: Estimate
    reasoning_length: Estimate
    redundant_calls: Estimate
    nudged_right: Estimate


def attempt_of(trajectory: Trajectory, *, source: str, counts: Counts = "calls", refused: bool = False) -> Attempt:
    """Return an episode as an attempt, without the results of votes and nudges. With `refused`,
    `calls` includes those that the world refused.

    Where steps are counted in place of calls, a step that the environment refused counts as failed,
    and one that recurs with the same observation as redundant.
    """
    calls, steps = tool_calls(trajectory), trajectory.steps
    by_calls = sum(call.status != "ok" for call in calls), redundant_calls(calls)
    by_steps = (
        sum(step.valid is False for step in steps),
        len(steps) - len({(step.action, step.observation) for step in steps}),
    )
    failures, redundant = by_calls if counts == "calls" else by_steps
    return Attempt(
        question=trajectory.instance.key,
        source=source,
        score=trajectory.reward,
        calls=cost(trajectory, counts, refused=refused),
        failed=failures,
        redundant=redundant,
        reasoning_tokens=reasoning_tokens(trajectory),
    )


def redundant_calls(calls: Sequence[ToolCall]) -> int:
    """Return how many calls repeat an earlier one, compared by tool, provider and normalised
    query.
    """
    return len(calls) - len({(call.tool, call.provider, call.key) for call in calls})


def behaviour(attempts: Collection[Attempt]) -> Behaviour:
    """Return the metrics over attempts."""
    lengths = [attempt for attempt in attempts if attempt.reasoning_tokens is not None]
    return Behaviour(
        performance=_bounded(attempts, lambda attempt: attempt.score),
        efficiency=_bounded(attempts, _efficiency),
        tool_productivity=_tool_productivity(attempts),
        conciseness=_share([(attempt, attempt.concise) for attempt in attempts]),
        successful_execution=_bounded(attempts, lambda attempt: attempt.score / (1 + attempt.failed)),
        successful_execution_as_published=_bounded(attempts, lambda attempt: attempt.score / max(attempt.failed, 1)),
        reasoning_length=_mean(
            lengths, lambda attempt: 1000 * attempt.score / max(attempt.reasoning_tokens or 0, 1), 1000
        ),
        redundant_calls=_redundant_share(attempts),
        nudged_right=_share([(attempt, attempt.nudged_right) for attempt in attempts]),
    )


def gains(attempts: Collection[Attempt], before: Collection[Attempt]) -> dict[str, Estimate]:
    """Return the gains in performance and efficiency over `before`, by name of the measure: the
    mean difference over the questions of both, paired by question.
    """
    return {
        "performance_gain_over_base": _gain(attempts, before, lambda attempt: attempt.score),
        "efficiency_gain_over_base": _gain(attempts, before, _efficiency),
    }


def _efficiency(attempt: Attempt) -> float:
    return attempt.score / max(attempt.calls, 1)


def _gain(attempts: Collection[Attempt], before: Collection[Attempt], value: Callable[[Attempt], float]) -> Estimate:
    # By question.
    current: defaultdict[str, list[float]] = defaultdict(list)
    baseline: defaultdict[str, list[float]] = defaultdict(list)
    for values, group in ((current, attempts), (baseline, before)):
        for attempt in group:
            values[attempt.question].append(value(attempt))
    questions = sorted(current.keys() & baseline.keys())
    clusters = {attempt.question: attempt.cluster for attempt in attempts}
    return mean_gain(
        [(fmean(current[question]) - fmean(baseline[question]), clusters[question]) for question in questions]
    )


def _mean(attempts: Collection[Attempt], value: Callable[[Attempt], float], most: float) -> Estimate:
    """Return the mean of values in [0, `most`], whose interval also stays there."""
    return within(
        clustered_mean([value(attempt) for attempt in attempts], [attempt.cluster for attempt in attempts]), 0.0, most
    )


def _bounded(attempts: Collection[Attempt], value: Callable[[Attempt], float]) -> Estimate:
    """Return the mean of values in [0, 1], whose interval also stays within [0, 1]."""
    return clustered_share([value(attempt) for attempt in attempts], [attempt.cluster for attempt in attempts])


def _share(outcomes: Sequence[tuple[Attempt, bool | None]]) -> Estimate:
    values = [(attempt.cluster, float(flag)) for attempt, flag in outcomes if flag is not None]
    return clustered_share([flag for _, flag in values], [cluster for cluster, _ in values])


def _tool_productivity(attempts: Collection[Attempt]) -> Estimate:
    if not attempts:
        return NO_ESTIMATE
    score, calls = fmean(attempt.score for attempt in attempts), fmean(attempt.calls for attempt in attempts)
    weight, slope = calls / (calls + _SOFT), _SOFT / (calls + _SOFT) ** 2

    def part(attempt: Attempt) -> float:
        # Delta method: the metric at the means plus its first-order change for this attempt.
        return 100 * (score * weight + weight * (attempt.score - score) + score * slope * (attempt.calls - calls))

    return _mean(attempts, part, 100)


def _redundant_share(attempts: Collection[Attempt]) -> Estimate:
    with_calls = [attempt for attempt in attempts if attempt.calls]
    if not with_calls:
        return _share([])
    share = sum(attempt.redundant for attempt in with_calls) / sum(attempt.calls for attempt in with_calls)
    usual = fmean(attempt.calls for attempt in with_calls)
    # A ratio of two means, by the delta method.
    parts = [share + (attempt.redundant - share * attempt.calls) / usual for attempt in with_calls]
    return clustered_share(parts, [attempt.cluster for attempt in with_calls])


# Votes of a model on whether an episode avoided redundant and idle calls.
#
# Source of the vote: ET-Agent (arXiv 2601.06860), evaluation; the wording is ours.

VOTE_TOKENS = 128
"""The token limit of the reply with a vote."""
_SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_new_tokens=VOTE_TOKENS)
_VOTE = re.compile(r"<answer>\W*(yes|no)\b", re.IGNORECASE)
_QUESTION = """\
Somebody answered a question with the help of a search tool and Python. Were all calls of tools of use?

Question: {question}
Right answer: {golds}

What was written:
{text}

A call is redundant if it repeats an earlier one, if its result is not used later, or if it brings the answer no \
nearer. A call is idle if its result has nothing to do with what was asked. Whether the final answer is right does \
not matter. Is there a redundant or an idle call? Say <answer>yes</answer> or <answer>no</answer>."""


def vote(trajectory: Trajectory, golds: Sequence[str]) -> Question:
    """Return the question to the judge about an episode; each vote asks it with its own seed."""
    text = _QUESTION.format(
        question=trajectory.first_observation, golds=" or ".join(golds), text=text_of(trajectory).strip()
    )
    return Question(role="judge", messages=(Message(role="user", text=text),), sampling=_SAMPLING)


def read_vote(reply: str) -> bool | None:
    """Return whether a judge's reply finds a redundant or idle call (`<answer>yes</answer>`); None
    if it says neither yes nor no after its thoughts. The last answer counts.
    """
    answers = _VOTE.findall(after_thoughts(reply) or "")
    return answers[-1].lower() == "yes" if answers else None


def is_concise(votes: Sequence[bool | None]) -> bool | None:
    """Return whether at least half of the readable votes found no redundant or idle call.

    None if no vote is readable; the authors' code then takes the episode for concise.
    """
    valid = [vote for vote in votes if vote is not None]
    return 2 * sum(valid) <= len(valid) if valid else None


# ET-Agent's measures of an evaluation, by name: rows of table metric in addition to those of
# `stages.evaluate`.
#
# performance, efficiency, tool_productivity, successful_execution,
# successful_execution_as_published, reasoning_length, redundant_calls
#                             see `Behaviour`
# performance_gain_over_base, efficiency_gain_over_base
#                             their gains over the base model, paired by question
# f1                          word F1 on knowledge questions, by rule
# judged                      the reward on mathematics questions: by rule, or else by the judge
# exact_match                 the share of answers that are a gold one, word for word or in value
# conciseness, nudged_right   on the test set, if the recipe asks for them
# source-s/...                any of these, for one source of questions

NUDGED = "nudged"
"""The name of the evaluation whose episodes go on after wrong answers, with a hint."""
CONCISENESS = "conciseness"
"""The purpose of votes, as in table `answer`."""
OF_SOURCE = "source-"
"""The prefix of the names of metrics for one source of questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionEpisode:
    """An episode, and the question that it answers; None in a world that has no questions."""

    attempt: Attempt
    trajectory: Trajectory
    problem: Problem | None
    answers: Answers = "plain"


def measures(place: Workplace, iteration: int, name: str, episodes: Sequence[Episode]) -> dict[str, Estimate]:
    """Return the measures of the episodes of an evaluation, over all of them and for each source of
    questions, by name.
    """
    side_answers = (
        SideAnswers.of(place, iteration, [episode.trajectory_id for episode in episodes])
        if name == TEST
        else SideAnswers()
    )
    responses = [
        replace(
            response,
            attempt=replace(
                response.attempt,
                concise=side_answers.concise(episode.trajectory_id),
                # None if the policy was not told to think on.
                nudged_right=side_answers.nudged.get((episode.instance.key, episode.repeat)),
                origin=episode.origin,
            ),
        )
        for response, episode in zip(answers_of(place, [e.trajectory for e in episodes]), episodes, strict=True)
    ]
    estimates = _estimates(responses)
    if iteration and (base := ended_episodes(place, evaluation_id(place, 0, name))):
        before = answers_of(place, [episode.trajectory for episode in base])
        gain_estimates = gains([response.attempt for response in responses], [response.attempt for response in before])
        estimates |= {name: estimate for name, estimate in gain_estimates.items() if estimate.n}
    for source in sorted({response.attempt.source for response in responses}):
        source_estimates = _estimates([response for response in responses if response.attempt.source == source])
        estimates |= {f"{OF_SOURCE}{source}/{name}": estimate for name, estimate in source_estimates.items()}
    return estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class SideAnswers:
    """Answers to the side questions of an evaluation: votes by id of the trajectory and number of
    the vote, and whether a nudge made an answer right, by key of the instance and repeat.
    """

    votes: Mapping[str, Mapping[int, Answer]] = field(default_factory=dict)
    nudged: Mapping[tuple[str, int], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Workplace, iteration: int, trajectory_ids: Sequence[str]) -> SideAnswers:
        """Return the stored answers on the given trajectories of an evaluation."""
        episodes = load_episodes(place.store, evaluation_id(place, iteration, NUDGED))
        return cls(
            votes=load_answers(place.store, CONCISENESS, trajectory_ids),
            nudged={(episode.instance.key, episode.repeat): episode.trajectory.success for episode in episodes},
        )

    def concise(self, trajectory_id: str) -> bool | None:
        """Return whether the votes find an episode concise; None if none of them can be read."""
        votes = self.votes.get(trajectory_id)
        return is_concise([read_vote(readable(vote) or "") for vote in votes.values()]) if votes else None


def answers_of(place: Workplace, trajectories: Sequence[Trajectory]) -> list[QuestionEpisode]:
    """Return each trajectory with the question that it answers, in the order given. The source of
    one without a question is its world.
    """
    curriculum = place.recipe.et_agent.curriculum
    responses = []
    with place.worlds() as worlds:
        for trajectory in trajectories:
            env = worlds.of(trajectory.instance)
            problem = env.problem(trajectory.instance) if isinstance(env, ReasoningWorld) else None
            source = trajectory.instance.environment if problem is None else problem.source
            attempt = attempt_of(trajectory, source=source, counts=curriculum.counts, refused=curriculum.refused_calls)
            answers = env.answers if isinstance(env, ReasoningWorld) else "plain"
            responses.append(QuestionEpisode(attempt=attempt, trajectory=trajectory, problem=problem, answers=answers))
    return responses


def _estimates(responses: Sequence[QuestionEpisode]) -> dict[str, Estimate]:
    of_behaviour = behaviour([response.attempt for response in responses])
    estimates = {metric.name: getattr(of_behaviour, metric.name) for metric in fields(of_behaviour)}
    # Scores of the answers alone, whatever they cost.
    questions = [
        (response.trajectory, response.problem, response.answers)
        for response in responses
        if response.problem is not None
    ]
    keys = [trajectory.instance.key for trajectory, *_ in questions]
    math = [(t.instance.key, t.reward) for t, problem, _ in questions if problem.domain == "math"]
    words = [
        (t.instance.key, problem.correctness(prediction_of(t, answers), answers))
        for t, problem, answers in questions
        if problem.domain == "knowledge"
    ]
    exact: list[float] = []
    for trajectory, problem, answers in questions:
        prediction = prediction_of(trajectory, answers)
        if problem.domain == "math" or problem.options:
            exact.append(float(problem.correctness(prediction, answers) == 1))
        else:
            exact.append(float(exact_match(prediction, problem.golds, answers)))
    estimates |= {
        "f1": clustered_share([value for _, value in words], [key for key, _ in words]),
        "judged": clustered_share([value for _, value in math], [key for key, _ in math]),
        "exact_match": clustered_share(exact, keys),
    }
    return {name: estimate for name, estimate in estimates.items() if estimate.n}


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
        """The key of this vote, unique in its evaluation."""
        return f"{self.trajectory_id}#{self.number}"


async def evaluate(place: Workplace, iteration: int) -> dict[str, Any]:
    """Evaluate as every method does, then ask the recipe's side questions about the test set, and
    store the measures; return the success of each evaluation. Nothing stored is asked again.

    Raises as `stages.evaluate.evaluate`.
    """
    scores = await evaluate_policy(place, iteration)
    config = place.recipe.et_agent.behaviour
    if config.nudge:
        await _nudge(place, iteration)
    if config.votes:
        await _vote(place, iteration)
    if config.nudge or config.votes:
        estimates = measure_evaluation(place, iteration, TEST)
        place.store.write(measure_rows(evaluation_id(place, iteration, TEST), estimates))
    return scores


def check_asking(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if the recipe has votes or nudges and the world has no questions, or if
    it has nudges and the world's episodes are not one growing turn.
    """
    config = recipe.et_agent.behaviour
    if (config.votes or config.nudge) and not isinstance(env, ReasoningWorld):
        raise ConfigError(f"et_agent.behaviour: world {env.name} has no questions to ask about; leave it out")
    if config.nudge and not isinstance(transcript_of(env), Continuation):
        raise ConfigError(
            "et_agent.behaviour.nudge: a hint goes into the reasoning of a growing turn, which transcript native has "
            "not; leave it out"
        )


async def _nudge(place: Workplace, iteration: int) -> None:
    """Have the policy go on after each wrong answer of the test set with one hint, and store the
    episodes as evaluation `NUDGED` with its success and reward.
    """
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
    estimates = measure(
        counted_episodes(place, series.evaluation_id), disaster_counts=place.recipe.evaluation.disaster_counts
    )
    scores = {name: estimate for name, estimate in estimates.items() if name in ("success", "reward")}
    keep_measures(place, iteration, [(series, scores)])


async def _vote(place: Workplace, iteration: int) -> None:
    """Have the judge give the missing votes on the episodes of the test set, and store them."""
    episodes = load_episodes(place.store, evaluation_id(place, iteration, TEST))
    responses = zip(episodes, answers_of(place, [episode.trajectory for episode in episodes]), strict=True)
    votes = [
        Vote(episode.trajectory_id, episode.trajectory, episode.repeat, response.problem, number)
        for episode, response in responses
        if response.problem is not None
        for number in range(place.recipe.et_agent.behaviour.votes)
    ]
    stored_votes = load_answers(place.store, CONCISENESS, [ballot.trajectory_id for ballot in votes])
    missing = [ballot for ballot in votes if ballot.number not in stored_votes.get(ballot.trajectory_id, {})]
    if not missing:
        return
    recipe = place.recipe
    path, stage = place.trained(iteration).path, f"{STAGE} {CONCISENESS}"
    async with place.asking("judge", path, stage, iteration) as (sampler, writer, readings):

        async def ask(ballot: Vote) -> Answer | None:
            seed = derive_seed(recipe.seed, CONCISENESS, ballot.trajectory.instance.key, ballot.repeat, ballot.number)
            question = vote(ballot.trajectory, ballot.problem.golds)
            try:
                return await answer(sampler, question, seed=seed, session=ballot.trajectory_id)
            except PromptTooLong as error:
                # A further try would not help: the episode stays without this vote.
                on_error(describe(ballot.key, error, final=True))
                return None

        def keep(key: str, answer: Answer | None) -> None:
            ballot = by_key[key]
            if answer is not None:
                writer.add(answer_rows(ballot.trajectory_id, CONCISENESS, ballot.number, answer))
                readings.count(answer)
            count()

        by_key = {ballot.key: ballot for ballot in missing}
        on_error = place.on_error(writer, STAGE, iteration)
        async with units_done(place.progress, sampler, "votes", total=len(missing)) as count:
            await run_all(
                missing,
                ask,
                key=lambda ballot: ballot.key,
                errors=recipe.errors,
                total=len(votes),
                on_error=on_error,
                concurrency=in_flight(sampler, 1, wanted=recipe.scale.concurrency),
                on_result=keep,
            )
