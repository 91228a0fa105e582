"""Requests of all dialects with random faults: each gets a valid answer or one error of its
dialect, and the episode goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import anthropic.types
import httpx
import openai.types.chat
import openai.types.responses

from agentr_core.environments.gateway.server import app
from agentr_core.episodes.transcript import call_text

REQUESTS = int(os.environ.get("AGENTR_TEST_FUZZ", "300"))
REPLIES = (
    "Hello.",
    call_text("look", '{"at": "the door"}', before="I look."),
    call_text("look", "{}", before=call_text("go", '{"to": [1, 2.5, null]}')),
    call_text("look", '{"at": NaN}'),
    call_text("look", '{"at": "\\ud800"}'),
    call_text("look", "{"),
    "",
    "<think>Perhaps <tool_call>?</think>\n\nNo.",
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "policy",
        "stream": False,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "So."},
            {"role": "tool", "tool_call_id": "call_1", "content": "A door."},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    },
    "responses": {
        "model": "policy",
        "stream": False,
        "instructions": "Be short.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}", "namespace": None},
            {"type": "function_call_output", "call_id": "call_1", "output": "A door."},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}, {"type": "web_search"}],
        "previous_response_id": None,
    },
    "messages": {
        "model": "policy",
        "stream": False,
        "max_tokens": 99,
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hello."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "So.", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_1", "name": "look", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "A door."}]},
        ],
        "tools": [{"name": "look", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
    },
}
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 0.5, float("nan"), "", "text", "\x00\u2028\U0001f600", "<tool_call>", "x" * 5000,
    [], {}, [[]], [None], [{"type": "text"}], {"type": "text", "text": "?"}, {"role": "user", "content": "?"},
)  # fmt: skip


def distort(value: Any, chance: random.Random) -> Any:
    """Return a value of JSON with something in it left out, repeated or replaced."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        if chance.random() < 0.15:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: distort(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        position = chance.randrange(len(value))
        middle = [distort(value[position], chance)] * chance.choice((0, 1, 1, 1, 2))
        return [*value[:position], *middle, *value[position + 1 :]]
    return chance.choice(VALUES)


def request(chance: random.Random) -> tuple[str, bytes]:
    """Return the path and the body of a request."""
    path = chance.choice(sorted(BODIES))
    body = {**BODIES[path], "stream": chance.random() < 0.5}
    for _ in range(chance.randrange(4)):
        body = distort(body, chance)
    content = json.dumps(body).encode()
    if chance.random() < 0.1:
        content = content[: chance.randrange(len(content) + 1)] + chance.choice((b"", b"\xff", b"]", b'"\\ud800"'))
    return path, content


def check(path: str, answer: httpx.Response) -> None:
    """Check that an answer is one that the clients of its dialect can read."""
    if answer.headers["content-type"] == "text/event-stream":
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        kinds = ["error" if "error" in event else event.get("type", "chunk") for event in events]
        last = {"chat/completions": "chunk", "messages": "message_stop"}.get(path, "response.completed")
        assert kinds[-1] == last, kinds
    elif answer.status_code != httpx.codes.OK:
        assert 400 <= answer.status_code < 500, answer.text
        body = answer.json()
        kind, keys = ("message", {"type", "error"}) if path == "messages" else ("code", {"error"})
        assert set(body) == keys, body
        assert isinstance(body["error"][kind], str)
        assert body["error"]["message"]
    elif path == "chat/completions":
        openai.types.chat.ChatCompletion.model_validate(answer.json())
    elif path == "responses":
        openai.types.responses.Response.model_validate(answer.json())
    else:
        anthropic.types.Message.model_validate(answer.json())


async def replying(http: httpx.AsyncClient, episode: str) -> None:
    """Give the replies of an episode, as a run does."""
    reply, number = None, 0
    while True:
        answer = await http.post("/run/next", json={"episode": episode, "reply": reply})
        reply = None
        if answer.json()["event"] == "call":
            number += 1
            text = REPLIES[number % len(REPLIES)]
            await http.post("/run/progress", json={"texts": {episode: text[: number % 20]}})
            counts = {"prompt_tokens": 5, "completion_tokens": 2}
            reply = {"text": text, "finish_reason": ("stop", "length")[number % 2], **counts}


async def test_each_request_gets_an_answer_or_an_error_of_its_dialect() -> None:
    statuses = set()
    # What the gateway raises is raised here.
    transport = httpx.ASGITransport(app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http, asyncio.TaskGroup() as group:
        offer = {"environment": "gateway", "split": "train", "index": 0}
        episode = (await http.post("/run/open", json=offer)).json()["episode"]
        base = (await http.post("/episodes")).json()["base_url"]
        run = group.create_task(replying(http, episode))
        for number in range(REQUESTS):
            path, content = request(random.Random(number))
            answer = await http.post(f"{base}/{path}", content=content)
            try:
                check(path, answer)
            except Exception as error:
                error.add_note(f"{number}: {path} {content!r} {answer.text}")
                raise
            statuses.add((path, answer.status_code))
        for path, body in BODIES.items():
            check(path, answer := await http.post(f"{base}/{path}", json=body))
            assert answer.status_code == httpx.codes.OK
        run.cancel()
    assert statuses >= {(path, status) for path in BODIES for status in (200, 400)}
