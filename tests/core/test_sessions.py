"""Sessions of coding agents are read as one conversation, and everything else of them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentr_core.episodes.transcript import call_text
from agentr_core.errors import DataFileError
from agentr_core.exchange.imports import ImportResult, Target, import_chat, import_experts
from agentr_core.samples.chat_file import World, read_chat
from flows.cli import cli

Line = dict[str, Any]
BASH = {"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}
TWO = call_text("Bash", '{"command": "b"}', before=call_text("Bash", '{"command": "a"}', before="Two."))
SPOKEN = [("user", "Go."), ("assistant", TWO), ("tool", "A"), ("tool", "B"), ("assistant", "Done.")]


def claude(uuid: str, parent: str | None, role: str, *blocks: Any, **fields: Any) -> Line:
    """Return a line of Claude Code; the `id` of a reply is the first letter of its line's."""
    message = {"role": role, "content": list(blocks), "model": "policy"} | ({"id": uuid[0]} if role != "user" else {})
    return {"type": role, "uuid": uuid, "parentUuid": parent, "message": message, "sessionId": "s", **fields}


def text(words: str) -> Line:
    return {"type": "text", "text": words}


def use(key: str) -> Line:
    return {"type": "tool_use", "id": key, "name": "Bash", "input": {"command": key}}


def answer(key: str) -> Line:
    return {"type": "tool_result", "tool_use_id": key, "content": key.upper(), "is_error": False}


SNAPSHOT: Line = {
    "type": "attachment",
    "uuid": "p",
    "parentUuid": "u",
    "attachment": {
        "type": "prompt_snapshot",
        "systemPrompt": ["You act."],
        "tools": [{"name": "Bash", "schema": {"name": "Bash", "input_schema": {"type": "object"}}}],
    },
}
CLAUDE: list[Line] = [
    {"type": "queue-operation", "operation": "enqueue", "sessionId": "s"},
    claude("u", None, "user", text("Go.")) | {"message": {"role": "user", "content": "Go."}},
    SNAPSHOT,
    claude("r1", "p", "assistant", {"type": "thinking", "thinking": "hm", "signature": "x"}),
    claude("r2", "r1", "assistant", text("Two.")),
    claude("r3", "r2", "assistant", use("a")),
    # The second result came first, and the next reply follows that of one call alone.
    claude("r4", "r3", "assistant", use("b")),
    claude("v", "r4", "user", answer("b")),
    claude("w", "r3", "user", answer("a"), toolUseResult={"stdout": "A"}),
    claude("x1", "u", "assistant", text("A branch that was left.")),
    claude("z", "w", "assistant", text("API Error"), isApiErrorMessage=True),
    claude("y1", None, "user", text("A subagent's.")) | {"isSidechain": True},
    claude("d", "w", "assistant", text("Done.")),
]


def item(kind: str, **fields: Any) -> Line:
    return {"timestamp": "2026-11-29T20:47:30Z", "type": "response_item", "payload": {"type": kind, **fields}}


def codex_call(key: str, kind: str = "function_call") -> Line:
    fields = {"arguments": json.dumps({"command": key})} if kind == "function_call" else {"input": key}
    return item(kind, name="Bash", call_id=key, **fields)


CODEX: list[Line] = [
    {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "You act."}}},
    {"type": "event_msg", "payload": {"type": "task_started"}},
    item("message", role="user", content=[{"type": "input_text", "text": "Go."}]),
    item("reasoning", summary=[], encrypted_content="x"),
    item("message", role="assistant", content=[{"type": "output_text", "text": "Two."}], status="completed"),
    codex_call("a"),
    codex_call("b"),
    item("function_call_output", call_id="b", output="B"),
    item("function_call_output", call_id="a", output={"content": "A", "success": True}),
    item("message", role="assistant", content=[{"type": "output_text", "text": "Done."}]),
]


def pi(key: str, parent: str | None, role: str, *content: Any, **fields: Any) -> Line:
    return {
        "type": "message",
        "id": key,
        "parentId": parent,
        "message": {"role": role, "content": [*content], **fields},
    }


def pi_call(key: str) -> Line:
    return {"type": "toolCall", "id": key, "name": "Bash", "arguments": {"command": key}}


PI: list[Line] = [
    {"type": "session", "version": 3, "id": "s", "cwd": "/w"},
    {"type": "model_change", "id": "m", "parentId": None, "modelId": "policy"},
    pi("u", "m", "user", text("Go.")),
    pi("x", "u", "assistant", text("A branch that was left.")),
    pi("r", "u", "assistant", {"type": "thinking", "thinking": "hm"}, text("Two."), pi_call("a"), pi_call("b")),
    pi("v", "r", "toolResult", text("A"), toolCallId="a", isError=False),
    pi("w", "v", "toolResult", text("B"), toolCallId="b", isError=False),
    pi("d", "w", "assistant", text("Done."), stopReason="stop"),
]
SESSIONS = {"Claude Code": CLAUDE, "codex": CODEX, "pi": PI}


def write(folder: Path, lines: list[Line], name: str = "session") -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return file


def import_session(folder: Path, lines: list[Line]) -> ImportResult:
    return import_chat(write(folder, lines), [BASH])


@pytest.mark.parametrize("agent", SESSIONS)
def test_a_session_is_one_conversation(tmp_path: Path, agent: str) -> None:
    result = import_session(tmp_path, SESSIONS[agent])
    assert result.faults == ()
    (record,) = map(json.loads, result.lines)
    system = [] if agent == "pi" else [("system", "You act.")]
    assert [(turn["role"], turn["content"]) for turn in record["messages"]] == system + SPOKEN
    assert record["tools"] == [BASH]
    # A recipe reads the same from what was written, with all replies trained.
    file = tmp_path / "out.jsonl"
    file.write_text(result.lines[0])
    ((sample,), rejected) = read_chat(file)
    assert rejected == ()
    assert [message.text for message in sample.messages if message.train] == [TWO, "Done."]


@pytest.mark.parametrize(
    ("agent", "names"),
    [
        ("Claude Code", ("assistant.thinking", "user.toolUseResult", "queue-operation", "assistant.message.model")),
        ("codex", ("event_msg", "response_item.reasoning", "response_item.payload.status", "response_item.timestamp")),
        ("pi", ("model_change", "message.thinking")),
    ],
)
def test_what_is_not_read_of_a_session_is_named(tmp_path: Path, agent: str, names: tuple[str, ...]) -> None:
    counts = import_session(tmp_path, SESSIONS[agent]).num_ignored_by_field
    assert set(names) <= counts.keys()
    assert ("lines of subagents, branches and errors" in counts) == (agent != "codex")


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ([*CLAUDE, {"type": "system", "subtype": "compact_boundary", "uuid": "c"}], "was compacted or rolled back"),
        ([*CLAUDE, {"type": "system", "subtype": "microcompact_boundary", "uuid": "c"}], "was compacted or"),
        ([*CODEX, {"type": "compacted", "payload": {"message": ""}}], "line 11: the session was compacted"),
        ([*PI, {"type": "compaction", "id": "c", "parentId": "d", "summary": "s"}], "line 9: the session was"),
        ([*CLAUDE, claude("e", "d", "user", {"type": "image"})], "has content of type image, and only texts are read"),
        ([*CODEX, item("local_shell_call", call_id="c")], "line 11 is a local_shell_call, which has no arguments"),
        ([*PI, pi("e", "d", "assistant", text("Oh"), stopReason="error")], "line 9: the reply ended with error"),
        ([*PI, pi("e", "d", "bashExecution", command="ls")], "line 9 is a message of bashExecution, which is no turn"),
        ([*PI, pi("e", "d", "toolResult", text("C"), toolCallId="c")], "has the result of 'c', and no call"),
    ],
)
def test_what_is_no_one_conversation_of_texts_is_refused(tmp_path: Path, lines: list[Line], part: str) -> None:
    (sentence,) = import_session(tmp_path, lines).faults
    assert part in sentence
    with pytest.raises(DataFileError):
        read_chat(write(tmp_path, lines))


def test_a_custom_call_of_codex_has_its_text_as_an_argument(tmp_path: Path) -> None:
    lines = [*CODEX[:5], codex_call("a", "custom_tool_call"), item("custom_tool_call_output", call_id="a", output="A")]
    (record,) = map(json.loads, import_session(tmp_path, [*lines, CODEX[-1]]).lines)
    assert record["messages"][2]["content"] == call_text("Bash", '{"input": "a"}', before="Two.")


def test_items_of_codex_that_are_no_turns_are_named(tmp_path: Path) -> None:
    kinds = ("web_search_call", "tool_search_call", "tool_search_output", "image_generation_call", "ghost_snapshot")
    result = import_session(
        tmp_path, [*CODEX[:3], *(item(kind, call_id="t", arguments={}) for kind in kinds), *CODEX[4:]]
    )
    assert result.lines == import_session(tmp_path, CODEX).lines
    assert {f"response_item.{kind}" for kind in kinds} <= result.num_ignored_by_field.keys()


def test_messages_of_one_reply_of_codex_do_not_run_together(tmp_path: Path) -> None:
    more = item("message", role="assistant", content=[{"type": "output_text", "text": "Now."}], phase="commentary")
    (record,) = map(json.loads, import_session(tmp_path, [*CODEX[:5], CODEX[3], more, *CODEX[5:]]).lines)
    assert record["messages"][2]["content"] == TWO.replace("Two.", "Two.\n\nNow.")


def test_instructions_of_codex_in_several_lines_are_one_system_text(tmp_path: Path) -> None:
    instruction = item("message", role="developer", content=[{"type": "input_text", "text": "Only read."}])
    around = item("message", role="user", content=[{"type": "input_text", "text": "In /w."}])
    (record,) = map(json.loads, import_session(tmp_path, [*CODEX[:2], instruction, around, *CODEX[2:]]).lines)
    assert [turn["content"] for turn in record["messages"][:2]] == ["You act.\n\nOnly read.", "In /w.\n\nGo."]


def test_a_session_is_an_experts_where_its_file_is_named_after_an_instance(tmp_path: Path) -> None:
    target = Target(world=World("line"), split="train")
    (line,) = import_experts(write(tmp_path, PI, "line_3"), target, opening=0).lines
    assert json.loads(line)["id"] == "line/train/3"
    (sentence,) = import_experts(write(tmp_path, PI), target, opening=0).faults
    assert "is a session of pi, which names no instance; give its file the name of one, such as line_12" in sentence


def test_tools_come_from_a_file_where_a_session_has_none(tmp_path: Path) -> None:
    source, tools = write(tmp_path, PI), tmp_path / "tools.json"
    words = ["import", str(source), str(tmp_path / "out.jsonl"), "--as", "general"]
    result = CliRunner().invoke(cli, words)
    assert "calls tools that it does not define" in result.output
    for content in ("look", "[]", '[{"name": "Bash"}]'):
        tools.write_text(content)
        result = CliRunner().invoke(cli, [*words, "--tools", str(tools)])
        assert isinstance(result.exception, DataFileError)
        assert str(tools) in str(result.exception)
    tools.write_text(json.dumps([BASH]))
    assert CliRunner().invoke(cli, [*words, "--tools", str(tools)]).exit_code == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["tools"] == [BASH]


def test_an_interactive_session_of_claude_code_begins_with_a_snapshot_of_files(tmp_path: Path) -> None:
    snapshot = {
        "type": "file-history-snapshot",
        "messageId": "u",
        "snapshot": {"messageId": "u", "trackedFileBackups": {}},
        "isSnapshotUpdate": False,
    }
    result = import_session(tmp_path, [snapshot, *CLAUDE])
    assert (result.lines, result.faults) == (import_session(tmp_path, CLAUDE).lines, ())
    assert result.num_ignored_by_field["file-history-snapshot"] == 1


def test_a_session_without_turns_is_of_no_use_and_the_tools_of_a_file_are_not_given_to_it(tmp_path: Path) -> None:
    """Claude Code writes files that hold a title of another session alone."""
    (sentence,) = import_session(tmp_path, [{"type": "summary", "summary": "A title", "leafUuid": "u"}]).faults
    assert "is of no use: no assistant turn" in sentence


def test_a_cut_line_and_other_records_with_a_type_are_told_apart(tmp_path: Path) -> None:
    file = write(tmp_path, PI)
    file.write_text(file.read_text()[:-20])
    (sentence,) = import_chat(file).faults
    assert ":8 is not JSON" in sentence
    chat = {"type": "chat", "sessionId": "s", "messages": [{"role": "user", "content": "a"}]}
    assert len(import_chat(write(tmp_path, [chat, chat])).faults) == 2
