"""What requests of each dialect say, and how replies and refusals are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentr_core.environments.gateway.dialects.base import (
    AgentRequest,
    EventStream,
    Refused,
    read_answer,
    sendable_text,
)
from agentr_core.environments.gateway.dialects.chat import ChatRequest
from agentr_core.environments.gateway.dialects.messages import MessagesRequest
from agentr_core.environments.gateway.dialects.responses import ResponsesRequest
from agentr_core.episodes.transcript import call_text

SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
CALLS = call_text("go", '{"to": 1}', before=call_text("look", "{}", before="I look."))

CHAT = ChatRequest.model_validate({
    "model": "small",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "short."}]},
        {"role": "user", "content": "Hello.", "name": None},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "a", "function": {"name": "look", "arguments": "{}"}},
            {"id": "b", "function": {"name": "go", "arguments": '{"to": 1}'}},
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "A door."},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "Gone."}]},
        {"role": "system", "content": "Go on."},
    ],
    "tools": [TOOL],
})  # fmt: skip
RESPONSES = ResponsesRequest.model_validate({
    "model": "small",
    "instructions": "Be\nshort.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}", "namespace": None},
        {"type": "function_call", "call_id": "b", "name": "go", "arguments": '{"to": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "A door."},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "Gone."}]},
        {"role": "developer", "content": "Go on."},
    ],
    "tools": [
        {"type": "function", **TOOL["function"]},  # type: ignore[dict-item]
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "hidden"}]},
    ],
})  # fmt: skip
MESSAGES = MessagesRequest.model_validate({
    "model": "small",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be\nshort.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "look", "input": {}},
            {"type": "tool_use", "id": "b", "name": "go", "input": {"to": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "A door."},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "Gone."}]},
        ]},
        {"role": "system", "content": "Go on."},
    ],
    "tools": [
        {"name": "look", "description": "Look.", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
})  # fmt: skip
DIALECTS = [CHAT, RESPONSES, MESSAGES]


def make_reply(text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, "finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": 2, **more}


@pytest.mark.parametrize("request_", DIALECTS)
def test_the_same_conversation_is_the_same_turns(request_: AgentRequest) -> None:
    tools, *turns = request_.turns()
    assert (tools["role"], json.loads(tools["text"])) == ("tools", [TOOL])
    assert turns == [
        {"role": "system", "text": "Be\nshort."},
        {"role": "user", "text": "Hello."},
        {"role": "assistant", "text": CALLS, "ids": ["a", "b"]},
        {"role": "tool", "text": "A door.", "ids": ["a"]},
        {"role": "tool", "text": "Gone.", "ids": ["b"]},
        {"role": "system", "text": "Go on."},
    ]


def test_a_text_and_a_list_of_one_block_are_one() -> None:
    contents: list[Any] = ["Hello.", [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}}]]
    bodies = [{"model": "m", "messages": [{"role": "user", "content": content}]} for content in contents]
    first, second = (MessagesRequest.model_validate(body).turns() for body in bodies)
    assert first == second


def test_calls_have_the_ids_that_the_run_names() -> None:
    answer = read_answer(make_reply(CALLS, ids=["call_0_0_ab", "call_0_1_ab"]), "name", offers_tools=True)
    assert [call.id for call in answer.tool_calls] == ["call_0_0_ab", "call_0_1_ab"]
    plain_answer = read_answer(make_reply(CALLS), "0123456789", offers_tools=True)
    assert [call.id for call in plain_answer.tool_calls] == ["call012345670", "call012345671"]
    assert [(call.name, call.arguments) for call in plain_answer.tool_calls] == [("look", "{}"), ("go", '{"to": 1}')]
    assert (plain_answer.text, plain_answer.finish_reason) == ("I look.", "tool_calls")


@pytest.mark.parametrize("arguments", ["{", '{"at": NaN}', '{"at": "\\ud800"}', '["at"]'])
def test_a_call_that_cannot_be_told_is_text(arguments: str) -> None:
    text = call_text("look", arguments)
    answer = read_answer(make_reply(text), "name", offers_tools=True)
    assert (answer.text, answer.tool_calls, answer.finish_reason) == (text, (), "stop")


def test_a_limit_is_told_where_agents_can_bear_it() -> None:
    answer = read_answer(make_reply("On and", finish_reason="length"), "name", offers_tools=False)
    chat, responses, messages = (dialect.answer_body(answer, "name", 0) for dialect in DIALECTS)
    assert chat["choices"][0]["finish_reason"] == "length"
    assert messages["stop_reason"] == "max_tokens"
    assert (responses["status"], responses["incomplete_details"]) == ("completed", None)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        ("I look. \n", "I look."),
        ("I look.\n<tool", "I look."),
        ("Less < more", "Less < more"),
        ("So <", "So"),
        ("So <tool_call>\n{", "So"),
    ],
)
def test_what_may_become_a_call_is_held_back(text: str, part: str) -> None:
    assert sendable_text(text, offers_tools=True) == part
    assert sendable_text(text, offers_tools=False) == text


def pieces(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def texts(stream: str) -> str:
    """Return the text in the events of any dialect."""
    deltas = []
    for data in pieces(stream):
        if "choices" in data:
            deltas.append(data["choices"][0]["delta"].get("content") or "" if data["choices"] else "")
        elif data["type"] == "response.output_text.delta":
            deltas.append(data["delta"])
        elif data["type"] == "content_block_delta":
            deltas.append(data["delta"].get("text", ""))
    return "".join(deltas)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("reply", [CALLS, f"\n {CALLS}", "Just text. ", f"{CALLS}\nAnd more.", "a <b", ""])
def test_a_stream_in_pieces_has_the_text_of_the_answer(dialect: AgentRequest, reply: str) -> None:
    for size in (1, 3, 1000):
        events: EventStream = dialect.event_stream("name", 0)
        stream = events.head_events()
        for end in range(0, len(reply), size):
            stream += events.text_events(reply[:end]) + events.ping_event()
        answer = read_answer(make_reply(reply), "name", offers_tools=True)
        stream += events.end_events(answer)
        assert texts(stream).lstrip() == answer.text.lstrip()
        numbers = [data["sequence_number"] for data in pieces(stream) if "sequence_number" in data]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reply_that_begins_otherwise_than_its_stream_is_no_answer(dialect: AgentRequest) -> None:
    events = dialect.event_stream("name", 0)
    events.head_events()
    assert texts(events.text_events("I look.")) == "I look."
    assert not events.text_events("You"), "it was sampled anew"
    with pytest.raises(Refused, match="another one"):
        events.end_events(read_answer(make_reply("You look."), "name", offers_tools=True))


def test_a_prompt_that_does_not_fit_is_told_in_words_that_harnesses_know() -> None:
    refusal = Refused(400, "no room", "context_length_exceeded", prompt_tokens=90, context=80)
    chat, responses, messages = (dialect.error_body(refusal)["error"] for dialect in DIALECTS)
    assert chat == responses
    assert "maximum context length is 80 tokens" in chat["message"]
    assert chat["code"] == "context_length_exceeded"
    assert messages["message"].startswith("prompt is too long: 90 tokens > 80 maximum")
    assert messages["type"] == "invalid_request_error"
    (failure,) = pieces(RESPONSES.event_stream("name", 0).failure_events(refusal))
    assert failure["response"]["error"]["code"] == "context_length_exceeded"


def test_an_episode_that_is_over_has_the_status_at_which_agents_of_a_dialect_stop() -> None:
    refusal = Refused(410, "it is over", "episode_over")
    assert [dialect.error_status(refusal) for dialect in DIALECTS] == [404, 400, 410]
    (failure,) = pieces(RESPONSES.event_stream("name", 0).failure_events(refusal))
    assert failure["response"]["error"]["code"] == "invalid_prompt"


def test_a_thread_is_refused_with_the_code_that_makes_its_client_send_whole_histories() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "thread": {"type": "create"}}
    with pytest.raises(Refused) as error:
        MessagesRequest.model_validate(body).turns()
    details = MessagesRequest.error_body(error.value)["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
