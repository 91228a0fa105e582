"""What cannot be seen is shown as a mark: in reports, in `preview`, on the terminal."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest

from agentr_core.reports import markdown, wording
from agentr_core.store.codec.ledger import iteration_rows, run_rows
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.database import Store
from agentr_core.texts import blank_thoughts, escape_invisible, lone_surrogate
from agentr_core.types import Message, Sample, SampleKind
from flows.commands.samples import preview_sample
from tasks.workspaces import STORE_FILE

DRAWN = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""Format characters of scripts that have a shape."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\u001b[31mred\\u001b[0m"),
        ("\x9b2J", "\\u009b2J"),
        ("buy\u202egnp.exe", "buy\\u202egnp.exe"),
        ("\u2067a\u2069\u061c\u200f", "\\u2067a\\u2069\\u061c\\u200f"),
        ("zero\u200bwidth\u200d\u2060\ufeff", "zero\\u200bwidth\\u200d\\u2060\\ufeff"),
        ("soft\xadhyphen", "soft\\u00adhyphen"),
        ("line\u2028\u2029", "line\\u2028\\u2029"),
        ("tag\U000e0041\U000e007f", "tag\\U000e0041\\U000e007f"),
        ("hidden\ufe01\U000e0100", "hidden\\ufe01\\U000e0100"),
        ("\ud800\r", "\\ud800\\u000d"),
    ],
)
def test_marks(text: str, shown: str) -> None:
    assert escape_invisible(text) == shown == wording.escape_invisible(text)
    assert shown in markdown.fence(text)


def test_what_is_drawn_stays() -> None:
    text = "Tab\tline\nÄ ß 木 نص עברית 🙂 e\u0301 \xa0" + DRAWN
    assert escape_invisible(text) == text


def test_every_control_and_format_character_has_a_mark() -> None:
    codes = [
        f"{code:x}"
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        and chr(code) not in "\t\n" + DRAWN
        and not 0x13430 <= code <= 0x1345F
        and escape_invisible(chr(code)) == chr(code)
    ]
    assert codes == []


def test_a_preview_commands_no_terminal(tmp_path: Path) -> None:
    store = Store(tmp_path / STORE_FILE)
    store.write(run_rows("r", recipe="n", method="agent-r", config={}, versions={}, workspace=str(tmp_path)))
    store.write(iteration_rows("i", run_id="r", iteration=1))
    messages = (
        Message(role="user", text="Look.\x1b]0;owned\x07\u202eback"),
        Message(role="assistant", text="a\u200bb\n\tc", train=True),
    )
    sample = Sample(kind=SampleKind.GENERAL, messages=messages, instance=None)
    store.write(sample_rows("s1", sample, iteration_id="i"))
    assert preview_sample(tmp_path, "s") == [
        ("[user]\nLook.\\u001b]0;owned\\u0007\\u202eback\n", False),
        ("[assistant, trained]\na\\u200bb\n\tc\n", True),
    ]


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("a<think>b</think>c<think>d</think>e", "ace"),
        ("a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("a<think>b", "a"),
        ("<think>a<think>b</think>c", "c"),
        ("<think>it is </think> that ends</think>c", "c"),
        ('<think>a <tool_call> b</think><tool_call>{"c": "</think>"}', '<tool_call>{"c": "</think>"}'),
        ('<tool_call>\n{"c": "<think>\n"} d', '<tool_call>\n{"c": "<think>\n"} d'),
        ("<tool_call>{'c'</think>d", "d"),
        (f"<tool_call>{'[' * 100_000}</think>d", "d"),
    ],
)
def test_thoughts_are_blank(reply: str, rest: str) -> None:
    blank = blank_thoughts(reply)
    assert blank.replace(" ", "") == rest.replace(" ", "")
    assert len(blank) == len(reply)
    assert all(now in (before, " ") for before, now in zip(reply, blank, strict=True))


def test_halves_of_surrogate_pairs_are_found() -> None:
    assert (lone_surrogate("ab"), lone_surrogate("🙂"), lone_surrogate("ab\udc00")) == (None, None, 2)
