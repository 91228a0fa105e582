"""What is said to an OpenAI-compatible server, and what is read out of its replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.environments.gateway.dialects.chat import ChatRequest
from agentr_core.errors import ConfigError, MalformedReply, ModelFault, Transient
from agentr_core.models.openai.chat import Endpoint, convert_error
from agentr_core.models.openai.wire import read_completion, read_models, request_bodies
from agentr_core.recipes.models import ServerConfig
from agentr_core.replies import FIRST_LINE, is_cut_within_thought
from agentr_core.types import Message, Request, Sampling, Span, grown_turn


def request(n: int = 1, **sampling: Any) -> Request:
    return Request(messages=(Message(role="user", text="hi"),), sampling=Sampling(**sampling), seed=7, n=n)


def completion(*texts: str, tokens: int = 12, reason: str = "stop", **choice: Any) -> dict[str, Any]:
    return {
        "choices": [
            {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": reason, **choice}
            for i, text in enumerate(texts)
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens},
    }


def read_body(data: dict[str, Any], n: int = 1, limit: int = 100, **sampling: Any) -> Any:
    return read_completion(json.dumps(data).encode(), request(n, **sampling), n=n, max_tokens=limit)


def test_a_body_says_all_that_was_asked() -> None:
    server = ServerConfig(model="m", token_ids=True, extra_body={"top_k": 3})
    (body,) = request_bodies(request(4, temperature=0.5, top_p=0.9, stop=("x",), logprobs=True), server, 20)
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 4, "seed": 7, "temperature": 0.5,
        "top_p": 0.9, "max_tokens": 20, "stop": ["x"], "logprobs": True, "return_token_ids": True, "top_k": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason", "opens_thought", "is_unfinished"),
    [
        ("If I\nAction: get 1 a\nor", "length", True, True),
        ("If I\nAction: get 1 a\nor", "length", False, False),
        ("If I</think>Action: get 1", "length", True, False),
        ("Action: get 1 a", "stop", True, False),
    ],
)
@pytest.mark.parametrize("until", ["", FIRST_LINE])
def test_a_reply_cut_within_the_thought_of_its_prompt_is_known(
    text: str, reason: str, opens_thought: bool, is_unfinished: bool, until: str
) -> None:
    data = completion(text, reason=reason)
    (reply,) = read_completion(
        json.dumps(data).encode(), request(until=until), n=1, max_tokens=100, opens_thought=opens_thought
    )
    assert reply.unfinished_thought == is_unfinished
    # What the server cut out of the text was its thought; this is what follows.
    data["choices"][0]["message"]["reasoning"] = "I think so."
    (reply,) = read_completion(json.dumps(data).encode(), request(), n=1, max_tokens=100, opens_thought=opens_thought)
    assert not reply.unfinished_thought


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_thought_that_the_server_returns_apart_is_known(field: str) -> None:
    data = completion("Good", reason="length")
    assert [reply.thinks for reply in read_body(data)] == [False]
    data["choices"][0]["message"][field] = "I think so."
    assert [(reply.text, reply.thinks) for reply in read_body(data)] == [("Good", True)]
    data["choices"][0]["message"][field] = None
    assert [reply.thinks for reply in read_body(data)] == [False]


def test_a_reply_cut_within_the_thought_that_its_prompt_opened_is_not_cut_again() -> None:
    draft, draft_request = "I could\nAction: get 1 a\nor rather", request(until=FIRST_LINE)

    def read_draft(reason: str, **message: Any) -> tuple[str, str]:
        data = completion(draft, reason=reason)
        data["choices"][0]["message"] |= message
        body = json.dumps(data).encode()
        (reply,) = read_completion(body, draft_request, n=1, max_tokens=100, opens_thought=True)
        return reply.text, reply.finish_reason

    assert read_draft("length") == (draft, "length")
    assert read_draft("length", reasoning="apart") == ("I could\nAction: get 1 a", "stop")
    assert read_draft("stop") == ("I could\nAction: get 1 a", "stop"), "the server may have cut out an empty thought"


def test_settings_beyond_the_protocol_go_only_to_servers_that_know_them() -> None:
    settings_request = request(top_k=20, repetition_penalty=1.1)
    (body,) = request_bodies(
        settings_request, ServerConfig(model="m", sampling_fields=("top_k", "repetition_penalty")), 20
    )
    assert (body["top_k"], body["repetition_penalty"]) == (20, 1.1)
    assert "min_p" not in body
    with pytest.raises(ConfigError, match=r"does not know repetition_penalty; .* name it in server\.sampling_fields"):
        request_bodies(settings_request, ServerConfig(model="m", sampling_fields=("top_k",)), 20)
    (body,) = request_bodies(request(), ServerConfig(model="m", sampling_fields=("top_k", "min_p")), 20)
    assert (body["top_k"], body["min_p"]) == (-1, 0.0), "no default of the server takes their place"


def test_a_body_says_no_more_than_it_must() -> None:
    server = ServerConfig(model="m", send_seed=False, max_tokens_field="max_completion_tokens")
    (body,) = request_bodies(request(), server, 20)
    assert set(body) == {"model", "messages", "n", "temperature", "top_p", "max_completion_tokens"}


def test_a_turn_is_continued_only_where_a_server_can() -> None:
    turn_start = grown_turn([Span(text="<s>a</s>"), Span(text="<r>b</r>")])
    stop_request = request(stop=("</s>",), include_stop=True)
    stop_request = replace(stop_request, messages=(*stop_request.messages, turn_start))
    (body,) = request_bodies(stop_request, ServerConfig(model="m", continues=True), 20)
    assert body["messages"][-1] == {"role": "assistant", "content": "<s>a</s><r>b</r>"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert (body["stop"], body["include_stop_str_in_output"]) == (["</s>"], True)
    for bad_request in (stop_request, request(stop=("</s>",), include_stop=True)):
        with pytest.raises(ConfigError, match=r"set server\.continues"):
            request_bodies(bad_request, ServerConfig(model="m"), 20)


@pytest.mark.parametrize(
    ("text", "ended_by", "said"),
    [
        ("<s>a</s>", "</s>", "<s>a</s>"),
        ("<s>a", "</s>", "<s>a</s>"),
        ("I am done", None, "I am done"),
        ("I am done", 7, "I am done"),
        ("<s>a</s> and more", "</s>", "<s>a</s>"),
    ],
)
def test_a_stop_string_is_kept_or_put_back(text: str, ended_by: str | int | None, said: str) -> None:
    data = completion(text, stop_reason=ended_by)
    (with_stop,) = read_body(data, stop=("</s>",), include_stop=True)
    (without_stop,) = read_body(data, stop=("</s>",))
    assert (with_stop.text, without_stop.text) == (said, said.removesuffix("</s>"))


def test_a_request_for_many_replies_is_parted_as_the_recipe_says() -> None:
    parts = request_bodies(request(5), ServerConfig(model="m", n_per_request=2), 20)
    assert [part["n"] for part in parts] == [2, 2, 1]
    assert parts[0]["seed"] == 7
    assert len({part["seed"] for part in parts}) == 3
    assert parts == request_bodies(request(5), ServerConfig(model="m", n_per_request=2), 20)


def test_replies_come_in_the_order_of_their_indices() -> None:
    data = completion("first", "second")
    data["choices"].reverse()
    assert [g.text for g in read_body(data, 2)] == ["first", "second"]


def test_a_server_that_keeps_the_stop_string_is_corrected() -> None:
    (g,) = read_body(completion("say STOP more"), stop=("STOP",))
    assert (g.text, g.finish_reason) == ("say ", "stop")


def test_token_ids_and_logprobs_are_taken_over() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    (g,) = read_body(completion("ab", token_ids=[4, 5], logprobs=logprobs), logprobs=True)
    assert (g.token_ids, g.logprobs, g.completion_tokens, g.prompt_tokens) == ((4, 5), (-0.5, -1.5), 2, 5)
    (g,) = read_body(completion("ab", logprobs=logprobs), logprobs=True)
    assert (g.token_ids, g.logprobs) == ((), (-0.5, -1.5))
    (g,) = read_body(completion("ab", logprobs=logprobs))
    assert g.logprobs is None


def test_without_token_ids_the_servers_total_is_shared_out() -> None:
    data = completion("a" * 30, "b" * 10, "c" * 99, tokens=60)
    data["choices"][2]["finish_reason"] = "length"
    assert [g.completion_tokens for g in read_body(data, 3, limit=20)] == [30, 10, 20]
    assert [g.completion_tokens for g in read_body(completion("ab", tokens=17))] == [17]


@given(st.lists(st.tuples(st.text("ab", min_size=1), st.booleans()), min_size=1, max_size=6), st.integers(0, 500))
def test_shared_out_tokens_sum_to_the_total(replies: list[tuple[str, bool]], total: int) -> None:
    data = completion(*(text for text, _ in replies), tokens=total)
    for choice, (_, cut) in zip(data["choices"], replies, strict=True):
        choice["finish_reason"] = "length" if cut else "stop"
    counts = [g.completion_tokens for g in read_body(data, len(replies), limit=50)]
    assert sum(counts) == total
    assert min(counts) >= 0


def test_nothing_is_a_reply_only_with_proof() -> None:
    (g,) = read_body(completion("", token_ids=[2]))
    assert (g.text, g.token_ids) == ("", (2,))
    with pytest.raises(MalformedReply, match=r"reply 0 is empty after 12 tokens; .*prove"):
        read_body(completion(""))
    with pytest.raises(MalformedReply, match="needs a higher max_new_tokens"):
        read_body(completion("", reason="length"))
    data = completion("")
    data["choices"][0]["message"]["reasoning"] = "let me think"
    with pytest.raises(MalformedReply, match="start it with the reasoning parser for this model"):
        read_body(data)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        *((reason, "stop") for reason in ("eos", "eos_token", "end_turn", "stop_sequence", "STOP", "COMPLETE")),
        *((reason, "length") for reason in ("max_tokens", "MAX_TOKENS", "model_length")),
    ],
)
def test_servers_have_words_of_their_own_for_an_end(reason: str, finish: str) -> None:
    (g,) = read_body(completion("ho", reason=reason))
    assert (g.text, g.finish_reason) == ("ho", finish)


def test_a_cut_by_another_name_takes_its_limit_of_the_tokens() -> None:
    data = completion("a" * 30, "b" * 10, "c" * 99, tokens=60)
    data["choices"][2]["finish_reason"] = "max_tokens"
    assert [g.completion_tokens for g in read_body(data, 3, limit=20)] == [30, 10, 20]


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "let me think"}]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "h"}, {"type": "text", "text": "o"}], "ho"),
        ([{"type": "output_text", "text": "ho", "annotations": []}], "ho"),
        ([THOUGHT, {"type": "text", "text": "ho"}], "ho"),
    ],
)
def test_content_may_come_in_parts(content: list[Any], text: str) -> None:
    data = completion("")
    data["choices"][0]["message"]["content"] = content
    (g,) = read_body(data)
    assert g.text == text


@pytest.mark.parametrize("ids", [None, [5, 6, 7]])
@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "reasoning_content": "let me think"},
        {"content": "\n\n", "reasoning": "let me think"},
        {"content": [THOUGHT]},
        {"content": None, "reasoning_details": [{"type": "reasoning.text", "text": "let me think"}]},
    ],
)
def test_a_thought_that_was_cut_is_no_empty_reply(message: dict[str, Any], ids: list[int] | None) -> None:
    data = completion("", tokens=3, reason="length", token_ids=ids)
    data["choices"][0]["message"] = message
    with pytest.raises(MalformedReply, match=r"a thought that was cut after 3 tokens; .* a higher max_new_tokens, or"):
        read_body(data)
    helper_request = replace(request(), helper=True)
    (of_a_helper,) = read_completion(json.dumps(data).encode(), helper_request, n=1, max_tokens=9)
    assert is_cut_within_thought(of_a_helper), "it is counted, and asked no second time"


def test_a_thought_before_a_reply_is_not_part_of_it() -> None:
    data = completion("ho", reason="length")
    data["choices"][0]["message"]["reasoning_content"] = "let me think"
    (g,) = read_body(data)
    assert (g.text, g.finish_reason) == ("ho", "length")
    data = completion("", token_ids=[5, 2])
    data["choices"][0]["message"]["reasoning"] = "let me think"
    (g,) = read_body(data)
    assert (g.text, g.token_ids) == ("", (5, 2)), "it thought, and ended its reply"


def offering(data: dict[str, Any], *tools: dict[str, Any]) -> Any:
    turns = (Message(role="tools", text=json.dumps(tools)), Message(role="user", text="hi"))
    return read_completion(json.dumps(data).encode(), replace(request(), messages=turns), n=1, max_tokens=9)


@pytest.mark.parametrize("reason", ["tool_calls", "TOOL_CALL", "tool_use", "function_call", "stop", "eos"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"arguments": '{"a": "é"}'}, '{"a": "é"}'),
        ({"arguments": {"a": "é"}}, '{"a": "é"}'),
        ({"arguments": {}}, "{}"),
        ({"arguments": ""}, "{}"),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
    ],
)
def test_arguments_may_be_an_object(reason: str, arguments: dict[str, Any], text: str) -> None:
    data = completion("", reason=reason)
    data["choices"][0]["message"] = {"content": None, "tool_calls": [{"function": {"name": "act", **arguments}}]}
    (g,) = offering(data, {"type": "function", "function": {"name": "act"}})
    assert g.text == f'<tool_call>\n{{"name": "act", "arguments": {text}}}\n</tool_call>'
    assert g.finish_reason == "stop"


def test_a_call_that_is_said_to_be_there_must_be() -> None:
    act, web = {"type": "function", "function": {"name": "act"}}, {"type": "web_search"}
    for message in ({"content": "ho"}, {"content": "ho", "tool_calls": []}):
        data = completion("", reason="tool_calls")
        data["choices"][0]["message"] = message
        with pytest.raises(MalformedReply, match=r"'tool_calls' and no call in it; offered were the tools act, web"):
            offering(data, act, web)


def test_an_agent_may_send_its_arguments_as_an_object() -> None:
    call = {"function": {"name": "act", "arguments": {"a": 1}}}
    chat_request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert '"arguments": {"a": 1}' in next(chat_request.history())["text"]


def unset(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def set_choice(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["choices"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unset("choices"), "malformed \\(choices: "),
        (unset("usage"), "malformed \\(usage: "),
        (unset("choices", 0, "message"), r"malformed \(choices\.0\.message"),
        (unset("choices", 0), "2 replies were asked for and 1 came; .*n_per_request"),
        (set_choice(index=1), "2 replies were asked for and 2 came, numbered 1, 1"),
        (set_choice(finish_reason=None), "reply 0 has no finish reason"),
        (set_choice(finish_reason=""), "reply 0 has no finish reason"),
        (set_choice(finish_reason="abort"), "reason 'abort', which does not say that it is whole; these do: stop, eos"),
        (set_choice(message={"content": [{"type": "image_url"}]}), "reply 0 has parts that are not text: image_url"),
        (set_choice(message={"content": None}), "is empty"),
        (lambda data: data["choices"].append(data["choices"][0]), "2 replies were asked for and 3 came"),
        (lambda data: data.clear(), "malformed"),
    ],
)
def test_a_reply_that_is_not_whole_may_heal(change: Callable[[dict[str, Any]], None], said: str) -> None:
    data = completion("one", "two")
    change(data)
    with pytest.raises(MalformedReply, match=said) as caught:
        read_body(data, 2)
    assert isinstance(caught.value, Transient)


@pytest.mark.parametrize(
    "payload", [b"", b'{"choices": [', b"<html>busy</html>", b"null", b"[]", b"\xff\xfe", b"{}" * 999]
)
def test_what_is_no_reply_at_all_is_quoted_shortly(payload: bytes) -> None:
    with pytest.raises(MalformedReply, match="malformed") as caught:
        read_completion(payload, request(), n=1, max_tokens=9)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_choice(finish_reason="content_filter"), "content filter"),
        (set_choice(message={"content": None, "refusal": "I will not"}), "withheld a reply: I will not"),
        (set_choice(finish_reason="SAFETY"), "content filter"),
        (set_choice(message={"content": [{"type": "refusal", "refusal": "No"}]}), "withheld a reply: No"),
        (set_choice(finish_reason="tool_calls"), "called a tool, and none was offered"),
        (
            set_choice(finish_reason="tool_use", message={"tool_calls": [{"function": {"name": "fly"}}]}),
            r"called a tool \(fly\), and none was offered",
        ),
        (set_choice(message={"tool_calls": [{"function": {"name": "fly"}}]}), r"tool \(fly\), and none was offered"),
    ],
)
def test_a_reply_that_is_refused_will_not_heal(change: Callable[[dict[str, Any]], None], said: str) -> None:
    data = completion("one")
    change(data)
    with pytest.raises(ModelFault, match=said) as caught:
        read_body(data)
    assert not isinstance(caught.value, Transient)


def test_logprobs_that_were_asked_for_must_come() -> None:
    with pytest.raises(ModelFault, match="gives no log-probabilities"):
        read_body(completion("a"), logprobs=True)
    with pytest.raises(MalformedReply, match="2 token ids and 1 log-probabilities"):
        read_body(completion("a", token_ids=[1, 2], logprobs={"content": [{"logprob": -1}]}), logprobs=True)


def test_models_are_listed_with_the_length_of_their_context() -> None:
    body = {"data": [{"id": "a", "max_model_len": 8}, {"id": "b", "owned_by": "x"}]}
    assert read_models(json.dumps(body).encode()) == {"a": 8, "b": None}
    with pytest.raises(MalformedReply, match="list of models is malformed: '<html>'"):
        read_models(b"<html>")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Unknown parameter: 'seed'", "'seed'; server.send_seed: false leaves it out"),
        (
            "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
            "instead.; server.max_tokens_field: max_completion_tokens is the other name",
        ),
        ("Unknown parameter: 'kind'", "Unknown parameter: 'kind'"),
    ],
)
def test_a_field_that_a_server_refuses_is_told_with_what_changes_it(said: str, remedy: str) -> None:
    response: Any = httpx.Response(400, request=httpx.Request("POST", "http://localhost/v1"))
    refusal = openai.BadRequestError("refused", response=response, body={"message": said})
    # A key of one letter stands for none, and words keep theirs.
    error = convert_error(refusal, Endpoint(url="http://localhost/v1", key="k"), ServerConfig(model="m"))
    assert str(error).endswith(remedy)


def test_a_key_is_not_repeated() -> None:
    assert Endpoint(url="http://localhost/v1", key="sk-1").redact("no sk-1 here") == "no *** here"
