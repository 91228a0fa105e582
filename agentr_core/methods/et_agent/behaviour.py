"""How a policy behaves when it reasons with tools: not only whether it is right, but at what cost.

Every metric has a 95% interval, clustered by question where one was answered several times, or in
several variants. Source: ET-Agent (arXiv 2601.06860), evaluation. Where our metric differs from the
published one, its description says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentr_core.environments.reasoning.reading import reasoning_tokens
from agentr_core.evaluation.metrics import NOTHING, Estimate, clustered_mean, clustered_share, within
from agentr_core.methods.et_agent.costs import cost, tool_calls
from agentr_core.recipes.curriculum import Counts
from agentr_core.types import ToolCall, Trajectory

_SOFT = 0.1
"""The number of calls that halves the weight of a score in tool productivity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt at a question, with what the metrics of behaviour need.

    `question` identifies the question, and `origin` the one that it is a variant of, if there is
    one. `score` is the attempt's correctness in [0, 1]. `failed` counts calls whose status is not
    ok, `redundant` those that repeat an earlier one.
    `reasoning_tokens` excludes results; None where the number is unknown. `concise` is the outcome
    of the votes, None without any. `nudged_right` is whether a wrong answer became right when the
    policy was told to think on; None for right answers, and where the policy was not told to.
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
        """What tells independent attempts apart."""
        return self.origin or self.question


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The metrics of a policy on some questions; an estimate is NaN where no attempt has a value.

    `performance` is the mean score, called P. `efficiency` is score per call. `tool_productivity`
    is P * t / (t + 0.1) * 100 for a mean of t calls. `conciseness` is the share of concise
    attempts. `successful_execution` is score / (1 + failed calls); as published it is score /
    max(failed calls, 1), so that the first failure costs nothing. `reasoning_length` is score per
    1,000 tokens of reasoning. `redundant_calls` is the redundant share of all calls. `nudged_right`
    is the share of wrong answers that one nudge made right.
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
    """Return an episode as an attempt, without the results of votes and nudges. With `refused`, its
    calls are also those that it was refused.

    Where steps are counted in place of calls, a step that the environment refused counts as failed,
    and one that recurs with the same observation as redundant.
    """
    calls, steps = tool_calls(trajectory), trajectory.steps
    by_calls = sum(call.status != "ok" for call in calls), redundant_calls(calls)
    by_steps = sum(one.valid is False for one in steps), len(steps) - len({(s.action, s.observation) for s in steps})
    failed, redundant = by_calls if counts == "calls" else by_steps
    return Attempt(
        question=trajectory.instance.key,
        source=source,
        score=trajectory.reward,
        calls=cost(trajectory, counts, refused=refused),
        failed=failed,
        redundant=redundant,
        reasoning_tokens=reasoning_tokens(trajectory),
    )


def redundant_calls(calls: Sequence[ToolCall]) -> int:
    """Return how many calls repeat an earlier one of the episode, compared by tool, provider and
    normalised query.
    """
    return len(calls) - len({(call.tool, call.provider, call.key) for call in calls})


def behaviour(attempts: Collection[Attempt]) -> Behaviour:
    """Return the metrics over attempts."""
    lengths = [attempt for attempt in attempts if attempt.reasoning_tokens is not None]
    return Behaviour(
        performance=_bounded(attempts, lambda one: one.score),
        efficiency=_bounded(attempts, _efficiency),
        tool_productivity=_tool_productivity(attempts),
        conciseness=_share([(one, one.concise) for one in attempts]),
        successful_execution=_bounded(attempts, lambda one: one.score / (1 + one.failed)),
        successful_execution_as_published=_bounded(attempts, lambda one: one.score / max(one.failed, 1)),
        reasoning_length=_mean(lengths, lambda one: 1000 * one.score / max(one.reasoning_tokens or 0, 1), 1000),
        redundant_calls=_redundant_share(attempts),
        nudged_right=_share([(one, one.nudged_right) for one in attempts]),
    )


def gains(attempts: Collection[Attempt], before: Collection[Attempt]) -> dict[str, Estimate]:
    """Return the gains in performance and efficiency over `before`, by name: the mean difference
    over the questions that both answered, paired by question.
    """
    return {
        "performance_gain_over_base": _gain(attempts, before, lambda one: one.score),
        "efficiency_gain_over_base": _gain(attempts, before, _efficiency),
    }


def _efficiency(one: Attempt) -> float:
    return one.score / max(one.calls, 1)


def _gain(attempts: Collection[Attempt], before: Collection[Attempt], value: Callable[[Attempt], float]) -> Estimate:
    ours, theirs = (_by_question(group, value) for group in (attempts, before))
    shared = sorted(ours.keys() & theirs.keys())
    clusters = {one.question: one.cluster for one in attempts}
    return clustered_mean([ours[one] - theirs[one] for one in shared], [clusters[one] for one in shared])


def _by_question(attempts: Collection[Attempt], value: Callable[[Attempt], float]) -> dict[str, float]:
    """Return the mean of a value over the attempts at each question."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for one in attempts:
        values[one.question].append(value(one))
    return {question: fmean(found) for question, found in values.items()}


def _mean(attempts: Collection[Attempt], value: Callable[[Attempt], float], most: float) -> Estimate:
    """Return the mean of values in [0, `most`], whose interval also stays there."""
    return within(clustered_mean([value(one) for one in attempts], [one.cluster for one in attempts]), 0.0, most)


def _bounded(attempts: Collection[Attempt], value: Callable[[Attempt], float]) -> Estimate:
    """Return the mean of values in [0, 1], whose interval also stays within [0, 1]."""
    return clustered_share([value(one) for one in attempts], [one.cluster for one in attempts])


def _share(told: Sequence[tuple[Attempt, bool | None]]) -> Estimate:
    known = [(one.cluster, float(flag)) for one, flag in told if flag is not None]
    return clustered_share([flag for _, flag in known], [cluster for cluster, _ in known])


def _tool_productivity(attempts: Collection[Attempt]) -> Estimate:
    if not attempts:
        return NOTHING
    score, calls = fmean(one.score for one in attempts), fmean(one.calls for one in attempts)
    weight, slope = calls / (calls + _SOFT), _SOFT / (calls + _SOFT) ** 2

    def part(one: Attempt) -> float:
        # The delta method: the metric plus its first-order change due to this attempt.
        return 100 * (score * weight + weight * (one.score - score) + score * slope * (one.calls - calls))

    return _mean(attempts, part, 100)


def _redundant_share(attempts: Collection[Attempt]) -> Estimate:
    calls = [one for one in attempts if one.calls]
    if not calls:
        return _share([])
    share = sum(one.redundant for one in calls) / sum(one.calls for one in calls)
    usual = fmean(one.calls for one in calls)
    # A ratio of two means, by the delta method.
    parts = [share + (one.redundant - share * one.calls) / usual for one in calls]
    return clustered_share(parts, [one.cluster for one in calls])
