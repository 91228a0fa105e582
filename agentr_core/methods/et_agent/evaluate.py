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
from agentr_core.episodes.units import run_all, unit_error
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.evaluation.metrics import NO_ESTIMATE, Estimate, clip_interval, clustered_mean, clustered_share
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.et_agent.operators import HINTS, step_form_of
from agentr_core.recipes.environments import TEST
from agentr_core.recipes.et_agent import Counts
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.replies import after_thoughts, answer_text
from agentr_core.runtime.context import RunContext, answer
from agentr_core.runtime.equipment import concurrency_for, count_units
from agentr_core.stages.evaluate import (
    Series,
    counted_episodes,
    ended_episodes,
    evaluation_id,
    mean_gain,
    measure,
    measure_evaluation,
    measure_rows,
    play_evaluations,
    store_measures,
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
    return len(_called_tools(trajectory, refused)) if counts == "calls" else len(trajectory.steps)


def weighted_cost(
    trajectory: Trajectory, counts: Counts, weights: Mapping[str, float], *, refused: bool = False
) -> float:
    """Return the cost as `cost` does, but with each call weighted by its tool; a tool without a
    weight counts 1, and steps are not weighted.
    """
    if counts == "steps" or not weights:
        return cost(trajectory, counts, refused=refused)
    return sum(weights.get(tool, 1.0) for tool in _called_tools(trajectory, refused))


def _called_tools(trajectory: Trajectory, refused: bool) -> list[str]:
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


def is_well_formed(trajectory: Trajectory, counts: Counts) -> bool:
    """Return whether an episode keeps its format: with `calls`, its text has the tags of a
    reasoning episode; with `steps`, every reply has an action that can be read.
    """
    if counts == "calls":
        return not format_fault(text_of(trajectory))
    return all(step.action and not is_misread(step.action) for step in trajectory.steps)


_SOFTENING = 0.1
"""The constant of tool productivity: with a mean of so many calls it is half the score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt at a question, with the data that the metrics of behaviour need.

    `question` is the key of the question's instance, and `origin` that of the one that it is a
    variant of, empty if there is none. `score` is the attempt's correctness in [0, 1]. `num_failed`
    counts calls whose status is not ok, `num_redundant` those that repeat an earlier one.
    `num_reasoning_tokens` excludes results; None if the number is unknown. `concise` is the outcome
    of the votes, None without any. `nudged_right` says whether a wrong answer became right when the
    policy was given a hint to go on; None for right answers, and if no hint was given.
    """

    question: str
    source: str
    score: float
    num_calls: int
    num_failed: int
    num_redundant: int
    num_reasoning_tokens: int | None = None
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
    num_failed, num_redundant = by_calls if counts == "calls" else by_steps
    return Attempt(
        question=trajectory.instance.key,
        source=source,
        score=trajectory.reward,
        num_calls=cost(trajectory, counts, refused=refused),
        num_failed=num_failed,
        num_redundant=num_redundant,
        num_reasoning_tokens=reasoning_tokens(trajectory),
    )


def redundant_calls(calls: Sequence[ToolCall]) -> int:
    """Return how many calls repeat an earlier one, compared by tool, provider and normalised
    query.
    """
    return len(calls) - len({(call.tool, call.provider, call.key) for call in calls})


def behaviour(attempts: Collection[Attempt]) -> Behaviour:
    """Return the metrics over attempts."""
    with_length = [attempt for attempt in attempts if attempt.num_reasoning_tokens is not None]
    return Behaviour(
        performance=_clustered_share(attempts, lambda attempt: attempt.score),
        efficiency=_clustered_share(attempts, _efficiency),
        tool_productivity=_tool_productivity(attempts),
        conciseness=_share_of_flags([(attempt, attempt.concise) for attempt in attempts]),
        successful_execution=_clustered_share(attempts, lambda attempt: attempt.score / (1 + attempt.num_failed)),
        successful_execution_as_published=_clustered_share(
            attempts, lambda attempt: attempt.score / max(attempt.num_failed, 1)
        ),
        reasoning_length=_mean(
            with_length, lambda attempt: 1000 * attempt.score / max(attempt.num_reasoning_tokens or 0, 1), 1000
        ),
        redundant_calls=_redundant_share(attempts),
        nudged_right=_share_of_flags([(attempt, attempt.nudged_right) for attempt in attempts]),
    )


def gains(attempts: Collection[Attempt], base_attempts: Collection[Attempt]) -> dict[str, Estimate]:
    """Return the gains in performance and efficiency over `base_attempts`, by name of the measure:
    the mean difference over the questions of both, paired by question.
    """
    return {
        "performance_gain_over_base": _gain(attempts, base_attempts, lambda attempt: attempt.score),
        "efficiency_gain_over_base": _gain(attempts, base_attempts, _efficiency),
    }


def _efficiency(attempt: Attempt) -> float:
    return attempt.score / max(attempt.num_calls, 1)


def _gain(
    attempts: Collection[Attempt], base_attempts: Collection[Attempt], value: Callable[[Attempt], float]
) -> Estimate:
    # By question.
    values_by_question: defaultdict[str, list[float]] = defaultdict(list)
    base_by_question: defaultdict[str, list[float]] = defaultdict(list)
    for target, group in ((values_by_question, attempts), (base_by_question, base_attempts)):
        for attempt in group:
            target[attempt.question].append(value(attempt))
    questions = sorted(values_by_question.keys() & base_by_question.keys())
    cluster_by_question = {attempt.question: attempt.cluster for attempt in attempts}
    return mean_gain(
        [
            (fmean(values_by_question[question]) - fmean(base_by_question[question]), cluster_by_question[question])
            for question in questions
        ]
    )


def _mean(attempts: Collection[Attempt], value: Callable[[Attempt], float], maximum: float) -> Estimate:
    """Return the mean of values in [0, `maximum`], whose interval also stays there."""
    return clip_interval(
        clustered_mean([value(attempt) for attempt in attempts], [attempt.cluster for attempt in attempts]),
        0.0,
        maximum,
    )


def _clustered_share(attempts: Collection[Attempt], value: Callable[[Attempt], float]) -> Estimate:
    """Return the mean of values in [0, 1], whose interval also stays within [0, 1]."""
    return clustered_share([value(attempt) for attempt in attempts], [attempt.cluster for attempt in attempts])


def _share_of_flags(outcomes: Sequence[tuple[Attempt, bool | None]]) -> Estimate:
    values = [(attempt.cluster, float(flag)) for attempt, flag in outcomes if flag is not None]
    return clustered_share([flag for _, flag in values], [cluster for cluster, _ in values])


def _tool_productivity(attempts: Collection[Attempt]) -> Estimate:
    if not attempts:
        return NO_ESTIMATE
    mean_score, mean_calls = (
        fmean(attempt.score for attempt in attempts),
        fmean(attempt.num_calls for attempt in attempts),
    )
    weight, slope = mean_calls / (mean_calls + _SOFTENING), _SOFTENING / (mean_calls + _SOFTENING) ** 2

    def linearized(attempt: Attempt) -> float:
        # Delta method: the metric at the means plus its first-order change for this attempt.
        return 100 * (
            mean_score * weight
            + weight * (attempt.score - mean_score)
            + mean_score * slope * (attempt.num_calls - mean_calls)
        )

    return _mean(attempts, linearized, 100)


def _redundant_share(attempts: Collection[Attempt]) -> Estimate:
    with_calls = [attempt for attempt in attempts if attempt.num_calls]
    if not with_calls:
        return _share_of_flags([])
    share = sum(attempt.num_redundant for attempt in with_calls) / sum(attempt.num_calls for attempt in with_calls)
    mean_calls = fmean(attempt.num_calls for attempt in with_calls)
    # A ratio of two means, by the delta method.
    linearized = [share + (attempt.num_redundant - share * attempt.num_calls) / mean_calls for attempt in with_calls]
    return clustered_share(linearized, [attempt.cluster for attempt in with_calls])


# Votes of a model on whether an episode avoided redundant and idle calls.
#
# Source of the vote: ET-Agent (arXiv 2601.06860), evaluation; the wording is ours.

VOTE_TOKENS = 128
"""The token limit of the reply with a vote."""
_VOTE_SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_new_tokens=VOTE_TOKENS)
_VOTE = re.compile(r"<answer>\W*(yes|no)\b", re.IGNORECASE)
_VOTE_PROMPT = """\
Somebody answered a question with the help of a search tool and Python. Were all calls of tools of use?

Question: {question}
Right answer: {golds}

What was written:
{text}

A call is redundant if it repeats an earlier one, if its result is not used later, or if it brings the answer no \
nearer. A call is idle if its result has nothing to do with what was asked. Whether the final answer is right does \
not matter. Is there a redundant or an idle call? Say <answer>yes</answer> or <answer>no</answer>."""


def vote_question(trajectory: Trajectory, golds: Sequence[str]) -> Question:
    """Return the question to the judge about an episode; each vote asks it with its own seed."""
    text = _VOTE_PROMPT.format(
        question=trajectory.first_observation, golds=" or ".join(golds), text=text_of(trajectory).strip()
    )
    return Question(role="judge", messages=(Message(role="user", text=text),), sampling=_VOTE_SAMPLING)


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
    readable_votes = [vote for vote in votes if vote is not None]
    return 2 * sum(readable_votes) <= len(readable_votes) if readable_votes else None


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
SOURCE_PREFIX = "source-"
"""The prefix of the names of metrics for one source of questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionEpisode:
    """An episode, and the question that it answers; None in a world that has no questions."""

    attempt: Attempt
    trajectory: Trajectory
    problem: Problem | None
    answers: Answers = "plain"


def measures(ctx: RunContext, iteration: int, name: str, episodes: Sequence[Episode]) -> dict[str, Estimate]:
    """Return the measures of the episodes of an evaluation, over all of them and for each source of
    questions, by name.
    """
    side_answers = (
        SideAnswers.load(ctx, iteration, [episode.trajectory_id for episode in episodes])
        if name == TEST
        else SideAnswers()
    )
    question_episodes = [
        replace(
            question_episode,
            attempt=replace(
                question_episode.attempt,
                concise=side_answers.is_concise_episode(episode.trajectory_id),
                # None if the policy was not told to think on.
                nudged_right=side_answers.nudged.get((episode.instance.key, episode.repeat)),
                origin=episode.origin,
            ),
        )
        for question_episode, episode in zip(
            question_episodes_of(ctx, [e.trajectory for e in episodes]), episodes, strict=True
        )
    ]
    estimates = estimates_of(question_episodes)
    if iteration and (base_episodes := ended_episodes(ctx, evaluation_id(ctx, 0, name))):
        base_question_episodes = question_episodes_of(ctx, [episode.trajectory for episode in base_episodes])
        gain_estimates = gains(
            [question_episode.attempt for question_episode in question_episodes],
            [question_episode.attempt for question_episode in base_question_episodes],
        )
        estimates |= {name: estimate for name, estimate in gain_estimates.items() if estimate.n}
    for source in sorted({question_episode.attempt.source for question_episode in question_episodes}):
        source_estimates = estimates_of(
            [question_episode for question_episode in question_episodes if question_episode.attempt.source == source]
        )
        estimates |= {f"{SOURCE_PREFIX}{source}/{name}": estimate for name, estimate in source_estimates.items()}
    return estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class SideAnswers:
    """Answers to the side questions of an evaluation: votes by id of the trajectory and number of
    the vote, and whether a nudge made an answer right, by key of the instance and repeat.
    """

    votes: Mapping[str, Mapping[int, Answer]] = field(default_factory=dict)
    nudged: Mapping[tuple[str, int], bool] = field(default_factory=dict)

    @classmethod
    def load(cls, ctx: RunContext, iteration: int, trajectory_ids: Sequence[str]) -> SideAnswers:
        """Return the stored answers on the given trajectories of an evaluation."""
        episodes = load_episodes(ctx.store, evaluation_id(ctx, iteration, NUDGED))
        return cls(
            votes=load_answers(ctx.store, CONCISENESS, trajectory_ids),
            nudged={(episode.instance.key, episode.repeat): episode.trajectory.success for episode in episodes},
        )

    def is_concise_episode(self, trajectory_id: str) -> bool | None:
        """Return whether the votes find an episode concise; None if none of them can be read."""
        votes = self.votes.get(trajectory_id)
        return is_concise([read_vote(answer_text(vote) or "") for vote in votes.values()]) if votes else None


def question_episodes_of(ctx: RunContext, trajectories: Sequence[Trajectory]) -> list[QuestionEpisode]:
    """Return each trajectory with the question that it answers, in the order given. The source of
    one without a question is its world.
    """
    curriculum = ctx.recipe.et_agent.curriculum
    question_episodes = []
    with ctx.worlds() as worlds:
        for trajectory in trajectories:
            env = worlds.env_of(trajectory.instance)
            problem = env.problem(trajectory.instance) if isinstance(env, ReasoningWorld) else None
            source = trajectory.instance.environment if problem is None else problem.source
            attempt = attempt_of(trajectory, source=source, counts=curriculum.counts, refused=curriculum.refused_calls)
            answers = env.answers if isinstance(env, ReasoningWorld) else "plain"
            question_episodes.append(
                QuestionEpisode(attempt=attempt, trajectory=trajectory, problem=problem, answers=answers)
            )
    return question_episodes


def estimates_of(question_episodes: Sequence[QuestionEpisode]) -> dict[str, Estimate]:
    """Return the metrics of `Behaviour` over episodes, and the scores of their answers alone,
    whatever these cost, by name; those that no episode has are left out.
    """
    metrics = behaviour([question_episode.attempt for question_episode in question_episodes])
    estimates = {metric.name: getattr(metrics, metric.name) for metric in fields(metrics)}
    scores: dict[str, list[tuple[float, str]]] = {"f1": [], "judged": [], "exact_match": []}
    for question_episode in question_episodes:
        problem, answers = question_episode.problem, question_episode.answers
        if problem is None:
            continue
        trajectory, cluster = question_episode.trajectory, question_episode.attempt.cluster
        prediction = prediction_of(trajectory, answers)
        if problem.domain == "math":
            scores["judged"].append((trajectory.reward, cluster))
        else:
            scores["f1"].append((problem.correctness(prediction, answers), cluster))
        is_match = (
            problem.correctness(prediction, answers) == 1
            if problem.domain == "math" or problem.options
            else exact_match(prediction, problem.golds, answers)
        )
        scores["exact_match"].append((float(is_match), cluster))
    estimates |= {
        name: clustered_share([value for value, _ in values], [cluster for _, cluster in values])
        for name, values in scores.items()
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


async def evaluate(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Evaluate as every method does, then ask the recipe's side questions about the test set, and
    store the measures; return the success of each evaluation. Nothing stored is asked again.

    Raises as `stages.evaluate.evaluate`.
    """
    scores = await evaluate_policy(ctx, iteration)
    config = ctx.recipe.et_agent.behaviour
    if config.nudge:
        await _nudge(ctx, iteration)
    if config.votes:
        await _vote(ctx, iteration)
    if config.nudge or config.votes:
        estimates = measure_evaluation(ctx, iteration, TEST)
        ctx.store.write(measure_rows(evaluation_id(ctx, iteration, TEST), estimates))
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


async def _nudge(ctx: RunContext, iteration: int) -> None:
    """Have the policy go on after each wrong answer of the test set with one hint, and store the
    episodes as evaluation `NUDGED` with its success and reward.
    """
    evaluation = ctx.recipe.evaluation
    plans: list[EpisodePlan] = []
    with ctx.worlds() as worlds:
        for episode in load_episodes(ctx.store, evaluation_id(ctx, iteration, TEST)):
            if episode.trajectory.success:
                continue
            instance = episode.instance
            step_form = step_form_of(worlds.env_of(instance), instance)
            seed = derive_seed(ctx.recipe.seed, NUDGED, instance.key, episode.repeat)
            hint = random.Random(seed).choice(HINTS[step_form.domain])
            prefix = step_form.draft_with_hint(episode.trajectory.steps, hint).prefix
            plans.append(EpisodePlan(instance=instance, number=episode.repeat, seed=seed, prefix=prefix))
    series = Series(
        evaluation_id=evaluation_id(ctx, iteration, NUDGED),
        name=NUDGED,
        split=ctx.recipe.instances.test,
        plans=tuple(plans),
        sampling=sampling_of(evaluation),
        max_steps=evaluation.max_steps,
        repeats=evaluation.repeats,
        limits=evaluation.limits,
        config=evaluation,
    )
    await play_evaluations(ctx, iteration, [series])
    estimates = measure(
        counted_episodes(ctx, series.evaluation_id), disaster_counts=ctx.recipe.evaluation.disaster_counts
    )
    scores = {name: estimate for name, estimate in estimates.items() if name in ("success", "reward")}
    store_measures(ctx, iteration, [(series, scores)])


async def _vote(ctx: RunContext, iteration: int) -> None:
    """Have the judge give the missing votes on the episodes of the test set, and store them."""
    episodes = load_episodes(ctx.store, evaluation_id(ctx, iteration, TEST))
    answered_episodes = zip(
        episodes, question_episodes_of(ctx, [episode.trajectory for episode in episodes]), strict=True
    )
    votes = [
        Vote(episode.trajectory_id, episode.trajectory, episode.repeat, question_episode.problem, number)
        for episode, question_episode in answered_episodes
        if question_episode.problem is not None
        for number in range(ctx.recipe.et_agent.behaviour.votes)
    ]
    stored_votes = load_answers(ctx.store, CONCISENESS, [vote.trajectory_id for vote in votes])
    missing_votes = [vote for vote in votes if vote.number not in stored_votes.get(vote.trajectory_id, {})]
    if not missing_votes:
        return
    recipe = ctx.recipe
    path, stage = ctx.trained_checkpoint(iteration).path, f"{STAGE} {CONCISENESS}"
    async with ctx.role_sampler("judge", path, stage, iteration) as (sampler, writer, reply_counts):

        async def ask_judge(vote: Vote) -> Answer | None:
            seed = derive_seed(recipe.seed, CONCISENESS, vote.trajectory.instance.key, vote.repeat, vote.number)
            question = vote_question(vote.trajectory, vote.problem.golds)
            try:
                return await answer(sampler, question, seed=seed, session=vote.trajectory_id)
            except PromptTooLong as error:
                # A further try would not help: the episode stays without this vote.
                on_error(unit_error(vote.key, error, is_final=True))
                return None

        def store_vote(key: str, answer: Answer | None) -> None:
            vote = votes_by_key[key]
            if answer is not None:
                writer.add(answer_rows(vote.trajectory_id, CONCISENESS, vote.number, answer))
                reply_counts.count(answer)
            count_done()

        votes_by_key = {vote.key: vote for vote in missing_votes}
        on_error = ctx.on_error(writer, STAGE, iteration)
        async with count_units(ctx.progress, sampler, "votes", total=len(missing_votes)) as count_done:
            await run_all(
                missing_votes,
                ask_judge,
                key=lambda vote: vote.key,
                errors=recipe.errors,
                num_units=len(votes),
                on_error=on_error,
                concurrency=concurrency_for(sampler, 1, configured=recipe.scale.concurrency),
                on_result=store_vote,
            )
