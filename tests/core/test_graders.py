"""The graders for one's own world and for `agentr regrade`."""

import asyncio
import time
from typing import Any

import pytest

from agentr_core.environments.graders import (
    Command,
    ExactAnswer,
    NumericAnswer,
    Pattern,
    Rubric,
    answer_within,
    episode_json,
    last_answer,
)
from agentr_core.episodes.grading import grade
from agentr_core.errors import ConfigError, EnvironmentFault, ModelFault
from agentr_core.types import Answer, Instance, Question, Step, StopReason, Trajectory

INSTANCE = Instance(environment="w", split="train", index=1)


def episode(reply: str, action: str = "", observation: str = "Done.") -> Trajectory:
    step = Step(reply=reply, action=action, observation=observation, reward=0.5)
    return Trajectory.ended(INSTANCE, "What is it?", [step], StopReason.FAILURE)


EMPTY = Trajectory.ended(INSTANCE, "What is it?", [], StopReason.STEP_LIMIT)


@pytest.mark.parametrize(
    ("reply", "action", "answer"),
    [
        (r"So it is \boxed{3}, or \boxed{4}.", "", "4"),
        ("<answer>2</answer> no, <answer> Paris </answer>", "", "Paris"),
        ("**Answer:** the Seine", "x", "the Seine"),
        ("Final answer: 12\nAnswer: 13", "x", "13"),
        (r"<think>\boxed{1}</think> I do not know.", "say it", "say it"),
        ("<think>Answer: 1", "", ""),
        ("Answer the call.\nThe answer is 4", "x", "4"),
    ],
)
def test_the_answer_is_looked_for_after_the_thoughts(reply: str, action: str, answer: str) -> None:
    assert last_answer(episode(reply, action)) == answer


def test_an_answer_within_a_pattern() -> None:
    last = answer_within(r"city=(\w+)")
    assert [last(episode("city=Rome, city=Oslo")), last(episode("Rome")), last(EMPTY)] == ["Oslo", "", ""]
    with pytest.raises(ConfigError, match="'\\(' is no regular expression: "):
        answer_within("(")


def rewards(grader: Any, *replies: str) -> list[float]:
    return [grader.rule(episode(reply)).reward for reply in replies]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("\N{MINUS SIGN}3", "-3"),
        (r"\boxed{-\frac{3}{4}}", "-0.75"),
        (r"\boxed{2\frac{1}{2}}", "2.5"),
        ("-3 1/2", "-3.5"),
        ("5 - 1/2", "0.5"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1.2 \times 10^{5}}", "120000"),
        ("10^6", "1000000"),
        ("-$5.50", "-5.5"),
        ("5kg", "5"),
        ("20 - 5 = 15", "15"),
        ("pages 3-5", "5"),
        ("1 000", "1000"),
        ("-12 345 678.5 km", "-12345678.5"),
        ("1\N{NARROW NO-BREAK SPACE}000", "1000"),
        (r"\boxed{12\ 000}", "12000"),
        ("June 4 1999", "1999"),
    ],
)
def test_a_number_is_read_as_it_is_written(answer: str, gold: str) -> None:
    reply = answer if answer.startswith("\\") else f"Answer: {answer}"
    numbers = [gold, answer]
    for number in numbers:
        grader = NumericAnswer(lambda instance, number=number: [number])  # type: ignore[misc]
        assert rewards(grader, reply, f"Answer: {gold}", f"Answer: {-float(gold)}") == [1, 1, 0]


def test_exact_and_numeric_answers() -> None:
    exact = ExactAnswer(lambda instance: ["the Seine", "Seine river"])
    assert rewards(exact, "Answer: Seine.", "Answer: SEINE RIVER", "Answer: the Loire", "Answer: Seine or Loire") == [
        *(1.0, 1.0, 0.0, 0.0)
    ]
    number = NumericAnswer(lambda instance: ["about 1,234.5"])
    assert rewards(number, "Answer: $1234.50", "Answer: 1,234.5 km", "Answer: 1235", "Answer: none") == [1, 1, 0, 0]
    near = NumericAnswer(lambda instance: ["0.75", "-2e3"], tolerance=0.01)
    assert rewards(near, "Answer: 3/4", "Answer: 0.751", "Answer: -2000", "Answer: 2000", "Answer: .7") == [
        1,
        1,
        1,
        0,
        0,
    ]
    assert number.rule(EMPTY) == exact.rule(EMPTY)
    with pytest.raises(EnvironmentFault, match="w/train/1: the right answer 'many' has no number"):
        NumericAnswer(lambda instance: ["many"]).rule(episode("Answer: 3"))
    with pytest.raises(ConfigError, match="tolerance is -1; it must be a number from 0"):
        NumericAnswer(lambda instance: [], tolerance=-1)


def test_a_regular_expression_in_the_last_step() -> None:
    assert rewards(Pattern("yes$"), "yes\nno", "<think>yes</think>no", "no yes or") == [1, 0, 0]
    assert Pattern("Done", where="observation").rule(episode("")).success  # type: ignore[union-attr]
    assert Pattern("x", where="action").rule(EMPTY) == Pattern("x").rule(episode(""))
    with pytest.raises(ConfigError, match="where is 'goal'; it is reply, action or observation"):
        Pattern("x", where="goal")  # type: ignore[arg-type]


def test_a_command_reads_the_episode_and_prints_its_reward() -> None:
    command = Command("grep -q '\"reply\": \"hello\"' && printf 'well\\n0.75\\n' || echo 0", success_from=0.7)
    assert command.rule(episode("hello")) == command.rule(episode("hello"))
    grades = [command.rule(episode(text)) for text in ("hello", "bye")]
    assert [(g.reward, g.success) for g in grades if g] == [(0.75, True), (0.0, False)]
    assert episode_json(episode("hello"))["steps"][0]["observation"] == "Done."


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("echo 1; echo no such file >&2; exit 3", "w/train/1: the command ended with status 3: 'no such file'"),
        ("echo 1.5", "w/train/1: the last line of the command's output is '1.5', no number from 0 to 1"),
        ("echo 1; echo good", "output is 'good', no number from 0 to 1"),
        ("echo nan", "output is 'nan', no number"),
        ("true", "output is '', no number from 0 to 1"),
    ],
)
def test_a_command_that_fails_gives_no_reward(line: str, told: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        Command(line).rule(episode("hello"))
    assert told in str(caught.value)


@pytest.mark.slow
def test_a_command_has_its_time() -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"the command took more than 0\.2 seconds"):
        Command("sleep 60 & sleep 60", seconds=0.2).rule(episode("hello"))
    assert time.monotonic() - began < 30
    with pytest.raises(ConfigError, match="a command needs words"):
        Command(" ")


async def asked_of(reply: str, grader: Rubric, finish: Any = "stop") -> Any:
    async def ask(question: Question, *, seed: int, session: str) -> Answer:
        assert "Be brief." in question.messages[0].text
        return Answer(
            role=question.role,
            model="m",
            prompt_hash="",
            seed=seed,
            text=reply,
            finish_reason=finish,
            prompt_tokens=1,
            completion_tokens=1,
        )

    return (await grade(grader, episode("I said it."), ask, seed=0)).grade


def test_a_rubric_is_read_after_the_thoughts() -> None:
    rubric = Rubric("Be brief.", success_from=0.6)
    assert rubric.asks == "judge"
    for reply, reward in {
        "Score: 2\nOr rather:\n**Score: 7**": 0.7,
        "<think>Score: 1</think>It is.\nScore: 10/10.": 1.0,
        "- score : 0": 0.0,
    }.items():
        assert asyncio.run(asked_of(reply, rubric)).reward == reward
    for unreadable in ("<think>Score: 7", "Seven of ten.", "Score: 11", "Score: -3", "A score: 7 or so"):
        with pytest.raises(ModelFault, match="no grade can be read"):
            asyncio.run(asked_of(unreadable, rubric))


@pytest.mark.slow
def test_a_rule_that_blocks_leaves_the_loop_free() -> None:
    async def ask(question: Question, *, seed: int, session: str) -> Answer:
        raise AssertionError(question)

    async def grade_all() -> list[float]:
        began = time.monotonic()
        slow = Command("sleep 0.3; echo 1")
        gradings = await asyncio.gather(*(grade(slow, episode("x"), ask, seed=0) for _ in range(4)))
        assert time.monotonic() - began < 1.1, "four commands of 0.3 seconds ran one after another"
        return [grading.grade.reward for grading in gradings]

    assert asyncio.run(grade_all()) == [1.0] * 4
