"""Answers that are the same, and answers that are not; see `support/answers.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import process_time

import pytest
from answers import MATHEMATICS, WORDS, pairs

from agentr_core.environments.reasoning.grammar import final_answer
from agentr_core.environments.reasoning.scoring import correctness, exact_match, same_answer, word_f1
from agentr_core.environments.reasoning.world import Rules
from agentr_core.errors import ConfigError
from agentr_core.methods.faults import load

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"


@pytest.mark.parametrize("kind", MATHEMATICS)
def test_answers_of_mathematics(kind: str) -> None:
    matches, mismatches = pairs(MATHEMATICS[kind])
    cases = [
        (left, right, expected)
        for answers, expected in ((matches, True), (mismatches, False))
        for left, right in answers
    ]
    all_cases = [*cases, *((right, left, expected) for left, right, expected in cases)]
    assert [case for case in all_cases if same_answer(case[0], case[1]) is not case[2]] == []


@pytest.mark.parametrize("kind", WORDS)
def test_words(kind: str) -> None:
    matches, mismatches = pairs(WORDS[kind])
    cases = [
        (left, right, expected)
        for answers, expected in ((matches, True), (mismatches, False))
        for left, right in answers
    ]
    cases += [(right, left, expected) for left, right, expected in cases]
    assert [case for case in cases if (word_f1(case[0], case[1]) == 1) is not case[2]] == []
    assert [case for case in cases if case[2] and word_f1(*case[:2]) != 1] == []


def test_words_in_common_count_as_words() -> None:
    assert word_f1("1.5 million", "15 million") == 0.5
    assert word_f1("Jean-Paul Sartre", "Jean Paul") == pytest.approx(0.8)
    assert exact_match("Spider-Man", ["Spider Man"])
    assert exact_match("5 dollars", ["5 dollars"])
    assert not exact_match("dollars 5", ["5 dollars"])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>**73**</answer>", "73"),
        (r"<answer>**73.**</answer>", "73."),
        (r"<answer>__Paris__</answer>", "Paris"),
        (r"<answer>`7`</answer>", "7"),
        (r"<answer>\boxed{**7**}</answer>", "7"),
        (r"<answer>\boxed{\textbf{Paris}}</answer>", "Paris"),
        (r"<answer>\boxed 5</answer>", "5"),
        (r"<answer>\boxed -5.</answer>", "-5"),
        (r"<answer>\boxed1</answer>", "1"),
        (r"<answer>\boxed\pi</answer>", r"\pi"),
        (r"<answer>\boxed{1}, \boxed{2}</answer>", "1, 2"),
        (r"<answer>$\boxed{1}$ and $\boxed{2}$</answer>", "1, 2"),
        (r"<answer>\boxed{1}, \boxed{2}, and \boxed{3}</answer>", "1, 2, 3"),
        (r"<answer>x = \boxed{1}, y = \boxed{2}</answer>", "1, 2"),
        (r"<answer>\boxed{1}\text{ and }\boxed{2}.</answer>", "1, 2"),
        (r"<answer>First \boxed{9}, so \boxed{1}, \boxed{2}</answer>", "1, 2"),
        (r"<answer>\boxed{1}, no, \boxed{2}</answer>", "2"),
        (r"<answer>\boxed{5} \boxed{5}</answer>", "5"),
        (r"<think>\boxed{1}, \boxed{2}</think>", "1, 2"),
    ],
)
def test_the_answer_of_a_reply(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_a_published_recipe_reads_answers_as_the_authors_do() -> None:
    for name in ("reasoning-et-agent", "reasoning-et-agent-rl"):
        assert load(RECIPES / f"{name}.yaml").environment.options["answers"] == "published"
    with pytest.raises(ConfigError, match=r"environment.options.answers is 'odd'; it is plain or published"):
        Rules(answers="odd")  # type: ignore[arg-type]
    assert word_f1("3.5", "35", "published") == word_f1("-5", "5", "published") == 1
    assert word_f1("Zoe", "Zoë", "published") == word_f1("Jean Paul", "Jean-Paul", "published") == 0
    assert exact_match("C#", ["C"], "published")
    assert final_answer(r"<answer>\boxed{1}, \boxed{2}</answer>", "published") == "2"
    assert final_answer(r"<answer>**73**</answer>", "published") == "**73**"
    assert correctness(r"5\text{ cm}", [r"5\text{ m}"], "math", "published") == 1
    assert correctness("1/2", ["0.5"], "math", "published") == correctness("50", [r"50\%"], "math", "published") == 1


@pytest.mark.parametrize(
    "answer",
    [
        "1000!^{1000}",
        "999!*" * 70 + "1",
        "e^{e^{e^{e^e}}}",
        r"\sin(10^{5000})",
        "1e400000",
        r"\sqrt[10^9]{2}",
        r"\binom{10^9}{5}",
        r"\lfloor e^{50000}\rfloor",
        "1,000" * 80,
        "{" * 390,
        "x^" * 100 + "2",
        r"1\pm " * 50,
        r"\begin{pmatrix}" * 30,
        ",".join(rf"\sin({number}x)" for number in range(35)),
        "5" + " apples" * 60,
        "\u00bd" * 300,
        "**" * 200,
    ],
)
def test_no_answer_takes_long(answer: str) -> None:
    start = process_time()
    assert same_answer(answer, answer)
    assert not same_answer(answer, "7")
    assert not same_answer("7", answer)
    assert not same_answer(answer, f"{answer}+1")
    assert process_time() - start < 1


def test_powers_are_compared_at_once_however_large() -> None:
    start = process_time()
    assert same_answer("2^{100000000}", "2 ^ {100000000}")
    assert not same_answer("2^{100000000}", "2^{100000001}")
    assert process_time() - start < 0.1


def test_threads_compare_answers_at_the_same_time() -> None:
    answers = [(r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"), (r"\sin^2 x + \cos^2 x", "1"), (r"\ln 9", r"2\ln 3")] * 20
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda pair: same_answer(*pair), answers))
