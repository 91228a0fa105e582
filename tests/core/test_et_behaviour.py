"""Metrics of behaviour, votes on conciseness, and which episodes are fine-tuned on."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Literal

import pytest

from agentr_core.environments.reasoning.problems import Problem
from agentr_core.errors import DataFault
from agentr_core.evaluation.metrics import Estimate, success_rate
from agentr_core.methods.et_agent.evaluate import (
    Attempt,
    QuestionEpisode,
    attempt_of,
    behaviour,
    estimates_of,
    gains,
    is_concise,
    read_vote,
    redundant_calls,
    vote_question,
)
from agentr_core.methods.et_agent.reward import EfficiencyReward
from agentr_core.methods.et_agent.selection import filter_for_tuning
from agentr_core.types import Instance, Step, StopReason, ToolCall, Trajectory

CALL = "<think>a</think>\n<search>q</search>"
RESULT = "\n<result>\nfound\n</result>\n"
ANSWER = "<think>b</think>\n<answer>\\boxed{1}</answer>"


def call(key: str, status: str = "ok", tool: str = "search") -> ToolCall:
    return ToolCall(tool=tool, key=key, status=status)


def step(reply: str, observation: str = "", *calls: ToolCall, reward: float = 0.0, valid: bool = True) -> Step:
    return Step(
        reply=reply,
        action=reply.partition("\n")[2],
        observation=observation,
        reward=reward,
        success=reward == 1,
        terminated=reply.endswith("</answer>"),
        token_ids=(1,) * len(reply),
        tool_calls=calls,
        valid=valid,
    )


def make_episode(*steps: Step, index: int = 0) -> Trajectory:
    reward = steps[-1].reward
    return Trajectory(
        instance=Instance(environment="reasoning", split="train", index=index),
        first_observation="What is one?",
        steps=steps,
        reward=reward,
        success=reward == 1,
        stop=StopReason.SUCCESS if reward == 1 else StopReason.FAILURE,
    )


GOOD = make_episode(step(CALL, RESULT, call("q")), step(ANSWER, reward=1.0))


def attempt(**given: object) -> Attempt:
    usual = {"question": "q", "source": "s", "score": 1.0, "num_calls": 0, "num_failed": 0, "num_redundant": 0}
    return Attempt(**{**usual, **given})  # type: ignore[arg-type]


def test_the_metrics_by_hand() -> None:
    metrics = behaviour(
        [
            attempt(question="a", num_calls=2, num_failed=1, num_redundant=1, num_reasoning_tokens=100, concise=False),
            attempt(question="b", score=0.5, num_calls=0, num_reasoning_tokens=200, concise=True, nudged_right=False),
            attempt(question="c", num_calls=1, num_reasoning_tokens=None, concise=None),
            attempt(
                question="d",
                score=0.0,
                num_calls=3,
                num_failed=3,
                num_redundant=1,
                num_reasoning_tokens=50,
                nudged_right=True,
            ),
        ]
    )
    assert metrics.performance.mean == pytest.approx(2.5 / 4)
    assert metrics.efficiency.mean == pytest.approx((0.5 + 0.5 + 1 + 0) / 4)
    assert metrics.tool_productivity.mean == pytest.approx(100 * 0.625 * 1.5 / 1.6)
    assert metrics.conciseness.mean == 0.5
    assert metrics.successful_execution.mean == pytest.approx((0.5 + 0.5 + 1 + 0) / 4)
    assert metrics.successful_execution_as_published.mean == pytest.approx((1 + 0.5 + 1 + 0) / 4)
    assert metrics.reasoning_length.mean == pytest.approx((10 + 2.5 + 0) / 3)
    assert metrics.redundant_calls.mean == pytest.approx(2 / 6)
    assert metrics.nudged_right.mean == 0.5
    assert (metrics.conciseness.n, metrics.reasoning_length.n, metrics.redundant_calls.n) == (2, 3, 3)


def test_intervals_are_over_questions_not_attempts() -> None:
    alone = [attempt(question=str(i), score=float(i % 2), num_calls=i % 3) for i in range(12)]
    twice = behaviour([item for item in alone for _ in range(2)])
    once = behaviour(alone)
    for name in ("performance", "efficiency", "tool_productivity", "redundant_calls"):
        first, second = getattr(once, name), getattr(twice, name)
        assert second.mean == pytest.approx(first.mean)
        assert second.high - second.low == pytest.approx(first.high - first.low)
        assert first.low <= first.mean <= first.high


def test_no_interval_leaves_the_range_of_its_metric() -> None:
    win = attempt(question="won", num_calls=3, num_reasoning_tokens=9)
    few = behaviour([win, replace(win, question="lost", score=0.0)])
    assert (few.tool_productivity.low, few.tool_productivity.high) == (0, 100)
    assert few.reasoning_length.low == 0
    assert few.reasoning_length.high <= 1000


def test_variants_of_a_question_are_no_independent_evidence() -> None:
    def make_attempts(variants: int, score: float = 0.0) -> list[Attempt]:
        return [
            attempt(question=f"{number}#{variant}", origin=str(number), score=score + number % 2 / 2)
            for number in range(12)
            for variant in range(variants)
        ]

    once, thrice = behaviour(make_attempts(1)).performance, behaviour(make_attempts(3)).performance
    assert thrice.high - thrice.low == pytest.approx(once.high - once.low)
    before = [replace(item, score=0.0) for item in make_attempts(3)]
    single, triple = (gains(make_attempts(count), before)["performance_gain_over_base"] for count in (1, 3))
    assert triple.high - triple.low == pytest.approx(single.high - single.low)


@pytest.mark.parametrize(("domain", "name"), [("math", "judged"), ("knowledge", "f1")])
def test_scores_of_answers_are_over_origins_too(domain: Literal["math", "knowledge"], name: str) -> None:
    def make_estimates(variants: int) -> dict[str, Estimate]:
        return estimates_of(
            [
                QuestionEpisode(
                    attempt=attempt(question=f"{number}#{variant}", origin=str(number)),
                    trajectory=replace(
                        GOOD, instance=replace(GOOD.instance, index=3 * number + variant), reward=float(number % 2)
                    ),
                    problem=Problem(id="", question="", golds=(str(number % 2),), source="s", domain=domain),
                )
                for number in range(12)
                for variant in range(variants)
            ]
        )

    once, thrice = make_estimates(1), make_estimates(3)
    for measure in (name, "exact_match"):
        assert (once[measure].mean, thrice[measure].n) == (0.5, 36)
        assert thrice[measure].high - thrice[measure].low == pytest.approx(once[measure].high - once[measure].low)


def test_what_nobody_tells_is_not_a_number() -> None:
    nothing = behaviour([])
    assert math.isnan(nothing.performance.mean)
    assert math.isnan(nothing.tool_productivity.mean)
    silent = behaviour([attempt()])
    assert math.isnan(silent.conciseness.mean)
    assert math.isnan(silent.redundant_calls.mean)
    assert math.isnan(silent.reasoning_length.mean)
    assert silent.tool_productivity.mean == 0, "nobody called a tool"


def test_an_attempt_is_read_from_an_episode() -> None:
    episode = make_episode(
        step(CALL, RESULT, call("q")), step(CALL, RESULT, call("q"), call("p", "timeout")), step(ANSWER, reward=0.5)
    )
    assert attempt_of(episode, source="s") == attempt(
        question="reasoning/train/0",
        score=0.5,
        num_calls=3,
        num_failed=1,
        num_redundant=1,
        num_reasoning_tokens=2 * len(CALL) + len(ANSWER),
    )
    unknown = replace(episode, steps=(replace(episode.steps[0], token_ids=()), *episode.steps[1:]))
    assert attempt_of(unknown, source="s").num_reasoning_tokens is None
    assert redundant_calls([call("q"), call("q", tool="python"), call("q"), call("r")]) == 1


def test_a_group_is_rewarded_by_what_its_episodes_say_and_cost() -> None:
    direct = make_episode(step(ANSWER, reward=1.0))
    no_box = make_episode(step(ANSWER.replace("\\boxed{1}", "1"), reward=1.0))
    wrong = make_episode(step(ANSWER, reward=0.0))
    box_in_thoughts = make_episode(step(CALL, RESULT, call("q")), step("<think>It is \\boxed{1}.</think>", reward=1.0))
    group = [GOOD, direct, no_box, wrong, box_in_thoughts]
    rewards = EfficiencyReward(sigma_calls=0.1, sigma_length=0.0).rewards(group, step=1, steps=1)
    assert rewards[0] < 1 < rewards[1], "one call more than the others"
    assert rewards[2] == pytest.approx(rewards[1] - 1)
    assert rewards[3] == 0
    assert rewards[4] == -1, "a box among the thoughts is no answer"
    results_are_free = make_episode(
        step(CALL, RESULT.replace("found", "found " * 500), call("q")), step(ANSWER, reward=1.0)
    )
    reward = EfficiencyReward(sigma_calls=0.1, sigma_length=0.1)
    assert reward.rewards([GOOD, results_are_free], step=1, steps=1) == [1, 1]
    unknown = replace(direct, steps=(replace(direct.steps[0], token_ids=()),))
    with pytest.raises(DataFault, match="reasoning/train/0: a reply has no token ids"):
        reward.rewards([GOOD, unknown], step=1, steps=1)


def test_votes_on_conciseness() -> None:
    question = vote_question(GOOD, ["1", "one"])
    assert question.sampling.temperature == 0.6
    assert all(text in question.messages[0].text for text in ("What is one?", "1 or one", "found", "<search>q"))
    assert read_vote("Well, <answer> Yes </answer>") is True
    assert read_vote("<answer>yes</answer> no: <answer>no</answer>") is False
    assert read_vote("yes") is None
    assert is_concise([True, False])
    assert read_vote("<answer>**No**</answer>") is False
    assert is_concise([None] * 10) is None
    assert is_concise([False, None])
    assert not is_concise([True, True, False, None])


def test_only_right_sound_episodes_are_tuned_on() -> None:
    wrong = make_episode(step(CALL, RESULT, call("q")), step(ANSWER, reward=0.5))
    no_box = make_episode(step(ANSWER.replace("\\boxed{1}", "1"), reward=1.0))
    failed_call = make_episode(step(CALL, RESULT, call("q", "empty")), step(ANSWER, reward=1.0))
    refused_call = make_episode(step(CALL, RESULT, valid=False), step(ANSWER, reward=1.0))
    # The word "error" in a document is no failure: what a call came to is its status.
    error_word = make_episode(step(CALL, "\n<result>\nan error\n</result>\n", call("q")), step(ANSWER, reward=1.0))
    episodes = list(
        enumerate(
            [GOOD, wrong, no_box, failed_call, refused_call, GOOD, error_word, replace(GOOD, instance=other_instance())]
        )
    )
    kept_items, rejections = filter_for_tuning(
        [(str(name), episode) for name, episode in episodes], per_question=0, seed=1
    )
    assert [name for name, _ in kept_items] == ["0", "6", "7"]
    assert [(rejection.subject, rejection.reason) for rejection in rejections] == [
        ("1", "wrong-answer"),
        ("2", "format"),
        ("3", "failed-call"),
        ("4", "refused-call"),
        ("5", "duplicate"),
    ]
    assert rejections[2].detail == "search: empty"


def other_instance() -> Instance:
    return Instance(environment="reasoning", split="train", index=9)


def test_a_question_keeps_as_many_episodes_as_its_cap() -> None:
    many = [
        (str(n), make_episode(step(f"<think>{n}</think>\n<answer>\\boxed{{1}}</answer>", reward=1.0))) for n in range(9)
    ]
    kept_items, rejections = filter_for_tuning(many, per_question=4, seed=1)
    assert len(kept_items) == 4
    assert {rejection.reason for rejection in rejections} == {"question-cap"}
    assert len(rejections) == 5
    backwards = filter_for_tuning(many[::-1], per_question=4, seed=1).kept_items
    assert {name for name, _ in backwards} == {name for name, _ in kept_items}
    assert filter_for_tuning(kept_items, per_question=4, seed=1).rejections == ()


def test_where_steps_are_counted_refused_ones_have_failed_and_repeated_ones_are_redundant() -> None:
    steps = [step("\nget log", "Got log."), step("\nget log", "Got log."), step("\nfly", "No.", valid=False)]
    result = attempt_of(make_episode(*steps), source="textcraft", counts="steps")
    assert (result.num_calls, result.num_failed, result.num_redundant) == (3, 1, 1)
    assert attempt_of(make_episode(*steps), source="textcraft").num_calls == 0


def test_gains_are_paired_by_question() -> None:
    before = [attempt(question=f"q{number}", score=number / 10, num_calls=2) for number in range(5)]
    after = [attempt(question=f"q{number}", score=number / 10 + 0.5, num_calls=1) for number in range(1, 6)]
    estimates = gains([*after, attempt(question="q1", score=0.0, num_calls=1)], before)
    # Question 1 counts once though it was answered twice; 0 and 5 have nothing to compare with.
    assert estimates["performance_gain_over_base"].n == 4
    assert estimates["performance_gain_over_base"].mean == pytest.approx((0.3 - 0.1 + 3 * 0.5) / 4)
    efficiency = [0.3 - 0.05, *(number / 10 + 0.5 - number / 20 for number in (2, 3, 4))]
    assert estimates["efficiency_gain_over_base"].mean == pytest.approx(fmean(efficiency))
    apart = gains(after[:3], [attempt(question=f"q{number}", score=number / 10, num_calls=2) for number in (1, 2, 3)])
    alike = apart["performance_gain_over_base"]
    # Three questions that gain alike do not say that all others do, as for success.
    assert alike.mean == pytest.approx(0.5)
    assert (alike.low, alike.high) == pytest.approx((0.5 - success_rate([False] * 3).high, 1.0))
    assert not gains(after, []).popitem()[1].n
