"""Texts of reasoning episodes, however they are put together."""

from __future__ import annotations

from time import process_time

import pytest
from answers import MATHEMATICS, pairs
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.environments.reasoning.grammar import (
    call_in,
    final_answer,
    format_fault,
    shown_result,
    steps,
    strict_fault,
)
from agentr_core.environments.reasoning.scoring import correctness, same_answer, word_f1

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "python", "result", "answer") for slash in ("", "/")]
PIECES = st.sampled_from([*TAGS, "\\boxed{", "}", "{", "\\", "text ", "\n", "x=1"])
SCRAPS = st.lists(PIECES, max_size=25).map("".join)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>{}\\"), min_size=1, max_size=12)
CALLS = st.lists(st.tuples(st.sampled_from(["search", "python"]), WORDS, SCRAPS), max_size=5)


@given(SCRAPS)
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    assert "".join(steps(text)).rstrip() == text.rstrip()
    assert strict_fault(text) or not format_fault(text), "the strict format asks for no less"
    assert 0 <= correctness(final_answer(text), ["1", "x"], "math") <= 1


@given(CALLS, WORDS)
def test_an_episode_of_the_grammar_is_strictly_valid_whatever_tools_say(
    calls: list[tuple[str, str, str]], answer: str
) -> None:
    replies = [f"<think>t</think>\n<{tool}>{query}</{tool}>" for tool, query, _ in calls]
    results = [shown_result(output, 40) for _, _, output in calls]
    last = f"<think>t</think>\n<answer>\\boxed{{{answer}}}</answer>"
    text = "".join(part for pair in zip(replies, results, strict=True) for part in pair) + last
    assert strict_fault(text) == ""
    assert len(steps(text)) == len(calls) + 1
    assert final_answer(text) == answer.strip()
    for reply, (tool, query, _) in zip(replies, calls, strict=True):
        call = call_in(reply)
        assert call is not None
        assert (call.name, call.content) == (tool, query.strip())
        assert call_in(f"<{call.name}>{call.content}</{call.name}>") == call


ANSWERS = [answer for block in MATHEMATICS.values() for some in pairs(block) for pair in some for answer in pair]
MARKS = st.sampled_from(
    [*ANSWERS, *"0123456789.,+-*/^_(){}[]|!%:<>= xyi", "\\frac", "\\sqrt", "\\pm", "\\text{", "\\\\"]
)
FORMS = st.one_of(st.sampled_from(ANSWERS), st.lists(MARKS, max_size=8).map("".join), st.text(max_size=20))


@given(FORMS, FORMS)
def test_the_same_answer_is_symmetric_and_reflexive(one: str, other: str) -> None:
    assert same_answer(one, other) is same_answer(other, one)
    for answer in (one, other):
        assert same_answer(answer, answer) is bool(answer.strip())
        assert same_answer(f" {answer}\n", answer) is bool(answer.strip())


@given(WORDS, WORDS)
def test_word_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    assert word_f1(one, other) == pytest.approx(word_f1(other, one))
    assert 0 <= word_f1(one, other) <= 1


@pytest.mark.parametrize("piece", ["\\boxed{", "<search>", "<answer>", "{", "\\frac{", "\\text{", "<think></think>"])
def test_long_texts_are_read_in_good_time(piece: str) -> None:
    start = process_time()
    for function in (format_fault, final_answer, steps, call_in):
        function(piece * 3000)
    correctness(piece * 3000, ["1"], "math")
    assert process_time() - start < 2
