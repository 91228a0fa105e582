"""How a policy behaves when it reasons with tools: not only whether it is right, but at what cost.

Every metric has a 95% interval, clustered by question where one was answered several times, or in
several variants. Source: ET-Agent (arXiv 2601.06860), evaluation. Where our metric differs from the
published one, its description says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentr_core.answers import after_thoughts
from agentr_core.environments.native import is_misread
from agentr_core.environments.reasoning.grammar import CALLS, call_in, format_fault, reasoning_tokens, text_of
from agentr_core.evaluation.metrics import NOTHING, Estimate, clustered_mean, clustered_share, within
from agentr_core.recipes.et_agent import Counts
from agentr_core.types import Message, Question, Sampling, ToolCall, Trajectory

# What an episode cost, and whether it keeps the format: in worlds with tools and in others.


def tool_calls(trajectory: Trajectory) -> list[ToolCall]:
    """Return the tool calls of an episode, in order."""
    return [call for step in trajectory.steps for call in step.tool_calls]


def cost(trajectory: Trajectory, counts: Counts, *, refused: bool = False) -> int:
    """Return the number of tool calls that an episode made, with `refused` also of those that it
    was refused, or of steps that it took.
    """
    return len(_called(trajectory, refused)) if counts == "calls" else len(trajectory.steps)


def weighed_cost(
    trajectory: Trajectory, counts: Counts, weights: Mapping[str, float], *, refused: bool = False
) -> float:
    """Return the cost as `cost` does, but with each call weighed by its tool; a tool without a
    weight counts 1.
    """
    if counts == "steps" or not weights:
        return cost(trajectory, counts, refused=refused)
    return sum(weights.get(tool, 1.0) for tool in _called(trajectory, refused))


def _called(trajectory: Trajectory, refused: bool) -> list[str]:
    """Return the tool of each call."""
    tools = [call.tool for call in tool_calls(trajectory)]
    written = (call_in(step.action) for step in trajectory.steps if refused and step.valid is False)
    return tools + [call.name for call in written if call is not None and call.name in CALLS]


def well_formed(trajectory: Trajectory, counts: Counts) -> bool:
    """Return whether an episode keeps the format: the tags of a reasoning episode, or, where steps
    are counted, an action in every reply.
    """
    if counts == "calls":
        return not format_fault(text_of(trajectory))
    return all(step.action and not is_misread(step.action) for step in trajectory.steps)


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


# Whether an episode avoided redundant and idle calls, by the votes of a model.
#
# Source of the vote: ET-Agent (arXiv 2601.06860), evaluation; the wording is ours.

VOTE_TOKENS = 128
"""The most tokens of a vote."""
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
    """Return the question to the judge, which each vote asks with a seed of its own."""
    text = _QUESTION.format(
        question=trajectory.first_observation, golds=" or ".join(golds), text=text_of(trajectory).strip()
    )
    return Question(role="judge", messages=(Message(role="user", text=text),), sampling=_SAMPLING)


def read_vote(reply: str) -> bool | None:
    """Return whether a reply finds a redundant or idle call; None if it says neither yes nor no
    after its thoughts. The last answer counts.
    """
    said = _VOTE.findall(after_thoughts(reply) or "")
    return said[-1].lower() == "yes" if said else None


def is_concise(votes: Sequence[bool | None]) -> bool | None:
    """Return whether at least as many votes found no redundant or idle call as found one; votes
    that cannot be read do not count, and None if none can: published, such an episode is concise.
    """
    read = [vote for vote in votes if vote is not None]
    return 2 * sum(read) <= len(read) if read else None
