"""How right an answer is: words, LaTeX, values."""

from __future__ import annotations

import re
import string
from collections import Counter
from itertools import product
from time import process_time
from typing import Literal

import pytest

from agentr_core.environments.reasoning.formulas import normal_form
from agentr_core.environments.reasoning.grammar import final_answer
from agentr_core.environments.reasoning.scoring import correctness, exact_match, same_answer, word_f1


@pytest.mark.parametrize(
    ("prediction", "gold", "f1"),
    [
        ("the Red River", "red river", 1.0),
        ("Red River!", "The red, river", 1.0),
        ("river", "Red River", 2 / 3),
        ("red red", "red", 2 / 3),
        ("blue", "red", 0.0),
        ("", "red", 0.0),
        ("the", "a", 0.0),
        ("redriver", "red river", 0.0),
        ("A", "A", 1.0),
        ("The The", "the the", 1.0),
        ("!!!", "!!!", 1.0),
        ("ﬁve  sheep", "five sheep", 1.0),
    ],
)
def test_word_f1(prediction: str, gold: str, f1: float) -> None:
    assert word_f1(prediction, gold) == pytest.approx(f1)


YES_AND_NO = (
    *("yes", "Yes", "YES", "Yes.", "yes!", '"yes"', "(yes)", "*yes*", "`yes`", "$yes$", " yes ", "a yes", "The yes."),
    *("no", "No", "NO.", "no?", "'no'", "the no", "No, a", "noanswer", "NoAnswer", "no-answer", "no answer"),
    *("yes no", "yes, yes", "yes and no", "yes/no", "yes or no", "Yes, he did.", "no, he did not", "not", "nope"),
    *("yesterday", "Norway", "answer", "true", "1", "", "the"),
)


def by_their_rule(prediction: str, golds: list[str]) -> float:
    """Return the published word F1, written from its description alone."""

    def words(text: str) -> list[str]:
        bare = "".join(sign for sign in text.lower() if sign not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", bare).split()

    def f1(said: list[str], wanted: list[str]) -> float:
        whole = {"".join(said), "".join(wanted)}
        if whole & {"yes", "no", "noanswer"}:
            return float(len(whole) == 1)
        num_shared = sum((Counter(said) & Counter(wanted)).values())
        return 2 * num_shared / (len(said) + len(wanted)) if num_shared else 0.0

    return max(f1(words(prediction), words(gold)) for gold in golds)


@pytest.mark.parametrize("answers", ["plain", "published"])
def test_yes_and_no_are_right_or_wrong_as_a_whole(answers: Literal["plain", "published"]) -> None:
    whole = ("yes", "no", "Yes.", "NO", "the yes", "noanswer", "No answer")
    pairs = [(answer, [gold]) for answer, gold in product(YES_AND_NO, whole)]
    pairs += [(gold, [answer]) for answer, gold in product(YES_AND_NO, whole) if answer]
    pairs += [(answer, ["no", "Not at all", "never"]) for answer in YES_AND_NO]
    pairs += [(answer, ["Yes", "indeed"]) for answer in YES_AND_NO]
    assert len(pairs) > 600
    ours = [correctness(answer, golds, "knowledge", answers) for answer, golds in pairs]
    assert ours == pytest.approx([by_their_rule(answer, golds) for answer, golds in pairs])
    assert {word_f1("yes no", "yes", answers), word_f1("yes", "yes and no", answers)} == {0.0}
    assert word_f1("no answer was found", "no answer is known", answers) == 0.5, "other answers have degrees"


def test_exact_match() -> None:
    assert exact_match("The Red River.", ["Blue", "red river"])
    assert not exact_match("river red", ["red river"])
    assert not exact_match("", [""])
    assert exact_match("(A)", ["A"])
    assert not exact_match("A", ["B"])


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        ("-3/4", r"-\frac{3}{4}"),
        ("0.5", r"\frac{1}{2}"),
        (".25", "0.25"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"90^\circ", "90"),
        (r"\$1{,}234", "1234"),
        ("12,345.5", "12345.5"),
        (r"\left( 1,\! 2 \right)", "(1,2)"),
        (r"50\%", "50"),
        (r"7 \text{ cm}", "7"),
        (r"\text{even}", "even"),
        (r"\textbf{(A)}", "(A)"),
        (r"12\text{ cm}^2", "12"),
        (r"\text{ cm}^{2}", "cm"),
        ("3 1/2", r"3\frac{1}{2}"),
        ("\N{MINUS SIGN}2", "-2"),
        ("x = 5", "5"),
        ("xyz=5", "xyz=5"),
        ("3 .", "3"),
    ],
)
def test_the_normal_form_of_latex(answer: str, form: str) -> None:
    assert normal_form(answer) == form


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt 2}{2}"),
        ("0.125", "1/8"),
        ("2**10", "1024"),
        (r"\sqrt[3]{8}", "2"),
        (r"\frac{\pi}{2}", "pi/2"),
        (r"(x+1)^2", "x^2+2x+1"),
        ("ab", "ba"),
        ("2xyz", "2zyx"),
        (r"\{1,2\}", r"\{2,1\}"),
        (r"\{x+1,y\}", r"\{y,1+x\}"),
        (r"(2^{n+1}, \sqrt{x^2})", r"(2\cdot 2^n, |x|)"),
        ("x-x", "0"),
        (r"\sqrt{1-x^2}", r"\sqrt{(1-x)(1+x)}"),
        (r"\sqrt{-4}", r"2\sqrt{-1}"),
        ("[0,1)", "[0, 1)"),
        ("(1/2, 3)", "(0.5,3.0)"),
        (r"3 \cdot 10^{2}", "300"),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
        (r"3\frac{1}{2}", "7/2"),
        ("-3 1/2", "-3.5"),
        (r"2^3\frac{1}{2}", "4"),
        (r"2\frac{3}{2}", "3"),
        (r"\text{(E)}", "E"),
    ],
)
def test_equal_values(one: str, other: str) -> None:
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1/3", "0.3333333333"),
        ("[0,1)", "[0,1]"),
        ("(1,2)", "(2,1)"),
        (r"\{1,1,2\}", r"\{1,2,2\}"),
        ("x", "y"),
        ("x^2", "x^3"),
        ("(x,y)", "(y,x)"),
        ("1", "-1"),
        (r"\text{yes}", r"\text{no}"),
        ("", "0"),
        (r"3\frac{1}{2}", "3/2"),
        ("3 1/2", "31/2"),
        ("1/0", "2/0"),
        ("BADC", "ABCD"),
        ("1AB", "1BA"),
        ("12A", "A12"),
        ("cat", "act"),
    ],
)
def test_other_values(one: str, other: str) -> None:
    assert not same_answer(one, other)


@pytest.mark.parametrize(
    "answer",
    [
        "9^9^9^9",
        "2^{100000}",
        "((((10^{64})^{64})^{64})^{64})^{64}",
        "(" * 199,
        "(a+b+c+d+e)^{64}",
        "((x+y)^{64})^{64}",
        "((((x+1)^{64})^{64})^{64})^{64}",
        r"2^{n^{64}}",
        r"3^{10^{9}n}",
        r"(x^{64}y^{64}z^{64})^{-64}",
        r"\{n, 3^{10^{9}n}\}",
        "(" + "9" * 180 + ")^{x}",
        "12^{0.72345678912}",
        r"\sqrt{" * 30 + "2" + "}" * 30,
        "1" * 5000,
        "__import__('os').system('true')",
        "\\frac{",
        "🙂",
    ],
)
def test_no_answer_takes_long_or_runs(answer: str) -> None:
    start = process_time()
    assert not same_answer(answer, "7")
    assert process_time() - start < 1


def test_mathematics_is_right_or_wrong_and_knowledge_has_degrees() -> None:
    assert correctness(r"\boxed", ["1"], "math") == 0
    assert correctness("1/2", ["3", "0.5"], "math") == 1
    assert correctness(final_answer(r"<answer>\boxed{\text{even}}</answer>"), [r"\text{even}"], "math") == 1
    assert correctness("river", ["sea", "Red River"], "knowledge") == pytest.approx(2 / 3)
    assert correctness("  ", ["1"], "math") == correctness("", [""], "knowledge") == 0
