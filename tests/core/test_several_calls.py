"""Several native calls in one reply: how they are read, answered, trained and sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.episodes.transcript import CLOSES, OPENS, Misread, NativeCall, call_text, read_calls

HOSTILE = st.lists(
    st.sampled_from((OPENS, CLOSES, "<think>", "</think>", "\n", '"', "{", "}", "\\"))
    | st.text(st.characters(exclude_categories=("Cs",))),
    max_size=6,
).map("".join)
"""Texts with the marks of calls and thoughts in them."""
CALLS = st.lists(st.tuples(HOSTILE, st.dictionaries(HOSTILE, HOSTILE, max_size=3)), min_size=1, max_size=4)
LOOK, WAIT = call_text("act", '{"action": "look"}'), call_text("act", '{"action": "wait"}')


def written(calls: Sequence[tuple[str, Mapping[str, object]]], beside: str) -> str:
    """The reply that makes calls after a text."""
    for name, arguments in calls:
        beside = call_text(name, json.dumps(arguments, ensure_ascii=False), beside=beside)
    return beside


@given(CALLS, st.sampled_from(("", "I look.", f"<think>{LOOK} or {OPENS}?</think>\nYes.", f"Or {CLOSES}?</think>Yes.")))
def test_calls_are_read_as_they_were_written(calls: list[tuple[str, dict[str, str]]], beside: str) -> None:
    assert read_calls(written(calls, beside)) == tuple(NativeCall(*call, beside) for call in calls)


@given(HOSTILE)
def test_no_reply_is_too_odd_to_be_read(reply: str) -> None:
    read_calls(reply)
    read_calls(f"{LOOK}{reply}{WAIT}")


@pytest.mark.parametrize(
    ("reply", "beside"),
    [
        (f"{LOOK}{WAIT}", ""),
        (f"First this.\n{LOOK}\nThen that.\n{WAIT}\nSo.", "First this.\n\nThen that.\n\nSo."),
        (f"{LOOK}<think>Then {WAIT}?</think>{WAIT}<think>and {LOOK}", f"<think>Then {WAIT}?</think><think>and {LOOK}"),
    ],
)
def test_what_stands_around_calls_is_beside_each_of_them(reply: str, beside: str) -> None:
    calls = read_calls(reply)
    assert calls == (("act", {"action": "look"}, beside), ("act", {"action": "wait"}, beside))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (f"{LOOK}{OPENS}wait{CLOSES}", "it is not valid JSON (call 2; none was made)"),
        (f"{OPENS}look{CLOSES}{WAIT}", "it is not valid JSON (call 1; none was made)"),
        (f"{LOOK}{WAIT}{OPENS}{{", "it does not end with </tool_call> (call 3; none was made)"),
        (f"{LOOK}{OPENS}[]{CLOSES}", 'it is no JSON object with "name" and "arguments" (call 2; none was made)'),
        (f"{OPENS}look{CLOSES}", "it is not valid JSON"),
        (f"look{CLOSES}", "a call ends that was not opened"),
    ],
)
def test_the_call_that_cannot_be_read_is_named(reply: str, why: str) -> None:
    assert read_calls(reply) == Misread(why)
