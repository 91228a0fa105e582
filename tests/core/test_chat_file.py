"""General chat data: two layouts, conversations of no use, and lines that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentr_core.errors import DataFileError
from agentr_core.samples.chat_file import read_chat
from agentr_core.types import SampleKind


def write(folder: Path, *lines: object) -> Path:
    path = folder / "chat.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in lines), "utf-8")
    return path


def chat(*roles: str, text: str = "Hello") -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for role in roles]}


def test_both_layouts_train_the_assistants_turns(tmp_path: Path) -> None:
    share = {"id": "x", "conversations": [{"from": "human", "value": "Hi\u2028"}, {"from": "gpt", "value": "Hey"}]}
    samples, rejections = read_chat(write(tmp_path, chat("system", "user", "assistant"), "", share))
    assert rejections == ()
    assert [[(m.role, m.train) for m in s.messages] for s in samples] == [
        [("system", False), ("user", False), ("assistant", True)],
        [("user", False), ("assistant", True)],
    ]
    assert samples[1].messages[0].text == "Hi\u2028"
    assert {(s.kind, s.instance) for s in samples} == {(SampleKind.GENERAL, None)}
    assert [dict(s.provenance.extra) for s in samples] == [
        {"file": "chat.jsonl", "line": 1},
        {"file": "chat.jsonl", "line": 3},
    ]


def test_conversations_of_no_use_are_rejected_by_their_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        chat("user"),
        chat(),
        chat("assistant", "user", "assistant"),
        chat("user", "user", "assistant"),
        chat("user", "assistant", text=" "),
        chat("user", "assistant"),
    )
    samples, rejections = read_chat(path)
    assert len(samples) == 1
    assert [(r.stage, r.subject, r.reason) for r in rejections] == [
        ("general", "chat.jsonl:1", "no-assistant-turn"),
        ("general", "chat.jsonl:2", "no-assistant-turn"),
        ("general", "chat.jsonl:3", "turns-do-not-alternate"),
        ("general", "chat.jsonl:4", "turns-do-not-alternate"),
        ("general", "chat.jsonl:5", "empty-turn"),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "is not JSON"),
        ("[]", "is a list; write one JSON object"),
        ({"text": "Hello"}, "has no list of turns"),
        ({"messages": "Hello"}, "has no list of turns"),
        ({"messages": ["Hello"]}, "turn 0: a turn must be an object"),
        ({"messages": [{"role": "user"}]}, "turn 0: a turn must be an object"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "turn 0: role is 'tool' and must be one of"),
        ({"conversations": [{"from": ["human"], "value": "1"}]}, "turn 0: from is "),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, fault: str) -> None:
    with pytest.raises(DataFileError, match=rf"chat\.jsonl:2.*{fault}"):
        read_chat(write(tmp_path, chat("user", "assistant"), line))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"missing\.jsonl cannot be read"):
        read_chat(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataFileError, match=r"binary\.jsonl cannot be read"):
        read_chat(tmp_path / "binary.jsonl")
