"""Native tool calls with a server of OpenAI's protocol: what goes out and what comes back, over
real HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from asgi import running
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route
from toy import Line, instance

from agentr_core.environments.native import ACT_TOOL, NOT_MADE_RESULT, native_class
from agentr_core.episodes.rollout import roll_out_episode
from agentr_core.episodes.transcript import call_reply, read_results
from agentr_core.errors import ModelFault
from agentr_core.models.openai.chat import Endpoint, OpenAIModel
from agentr_core.models.openai.wire import wire_messages
from agentr_core.recipes.models import ServerConfig
from agentr_core.types import Generation, Message, Request, Sampling

NativeLine = native_class(Line)


def calls(*arguments: str, content: str | None = None) -> dict[str, Any]:
    tool_calls = [
        {"id": f"theirs{n}", "type": "function", "function": {"name": "act", "arguments": text}}
        for n, text in enumerate(arguments)
    ]
    return {
        "message": {"role": "assistant", "content": content, "tool_calls": tool_calls},
        "finish_reason": "tool_calls",
    }


def says(content: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}


@contextmanager
def answering(*choices: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve a model that gives these answers in turn, and checks what it is sent as servers do."""
    answers, bodies = list(choices), []

    async def models(_: HttpRequest) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m", "max_model_len": 4096}]})

    async def complete(http: HttpRequest) -> JSONResponse:
        body = await http.json()
        bodies.append(body)
        open_ids: list[str] = []
        ids = [call["id"] for message in body["messages"] for call in message.get("tool_calls", ())]
        assert len(set(ids)) == len(ids)
        for message in body["messages"]:
            if message["role"] == "tool":
                assert message["tool_call_id"] == open_ids.pop(0)
            else:
                assert not open_ids, "a call without its result"
                open_ids = [call["id"] for call in message.get("tool_calls", ())]
        usage = {"prompt_tokens": 7, "completion_tokens": 5}
        return JSONResponse({"choices": [{"index": 0, **answers.pop(0)}], "usage": usage})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", complete, methods=["POST"])]
    with running(Starlette(routes=routes)) as url:
        yield f"{url}/v1", bodies


@asynccontextmanager
async def connect_model(url: str) -> AsyncIterator[OpenAIModel]:
    endpoint, config = Endpoint(url=url, key=""), ServerConfig(model="m", max_retries=0)
    model = await asyncio.to_thread(OpenAIModel.connect, endpoint, config)
    try:
        yield model
    finally:
        await model.close()


async def test_an_episode_is_played_by_calls() -> None:
    choices = (
        calls('{"action": "right"}', content="I go."),
        says("I rest."),
        calls("right"),
        calls('{"action": "left"}', '{"action": "right"}', content="Back and forth."),
        calls('{"action": "right"}', "right"),
        calls('{"action": "right"}'),
        calls('{"action": "right"}', '{"action": "right"}'),
    )
    with answering(*choices) as (url, bodies):
        async with connect_model(url) as model:

            async def ask(request: Request) -> list[Generation]:
                return (await model.generate([request]))[0]

            trajectory = await roll_out_episode(
                instance(1), NativeLine(), ask, max_steps=9, sampling=Sampling(), seed=0
            )
    assert trajectory.success
    assert [step.valid for step in trajectory.steps] == [True, False, False, True, False, True, True]
    assert "not valid JSON" in trajectory.steps[2].observation
    assert read_results(trajectory.steps[3].observation, 2) == ("You are at 0.", "You are at 1.")
    assert "(call 2; none was made)" in trajectory.steps[4].observation
    assert read_results(trajectory.steps[6].observation, 2) == ("You are at 3.", NOT_MADE_RESULT)
    assert (
        trajectory.steps[0].reply
        == 'I go.\n<tool_call>\n{"name": "act", "arguments": {"action": "right"}}\n</tool_call>'
    )
    for body in bodies:
        assert body["tools"] == [ACT_TOOL.definition]
        assert body["parallel_tool_calls"] is True
    roles = [message["role"] for message in bodies[-1]["messages"]]
    turns = ["assistant", "tool", *("assistant", "user") * 2, "assistant", "tool", "tool", "assistant", "user"]
    assert roles == ["system", "user", *turns, "assistant", "tool"]
    double_call = bodies[-1]["messages"][8]
    assert double_call["content"] == "Back and forth."
    assert [json.loads(call["function"]["arguments"])["action"] for call in double_call["tool_calls"]] == [
        "left",
        "right",
    ]
    single_call = bodies[-1]["messages"][2]
    assert (single_call["content"], len(single_call["tool_calls"])) == ("I go.", 1)
    assert json.loads(single_call["tool_calls"][0]["function"]["arguments"]) == {"action": "right"}


async def test_a_call_of_a_model_that_was_offered_nothing_is_a_fault() -> None:
    with answering(calls('{"action": "right"}')) as (url, bodies):
        async with connect_model(url) as model:
            request = Request(messages=(Message(role="user", text="?"),), sampling=Sampling(), seed=0)
            with pytest.raises(ModelFault, match="none was offered"):
                await model.generate([request])
    assert "tools" not in bodies[0]


def test_what_a_window_parted_is_told_as_text() -> None:
    call = native_class(Line)().expert(instance(0))[0]
    turns = [
        Message(role="tools", text="[]"),
        Message(role="user", text="Go."),
        Message(role="assistant", text="I rest."),
        Message(role="tool", text="You are at 3."),
        Message(role="assistant", text=call),
        Message(role="user", text="What?"),
    ]
    messages = wire_messages(turns)
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "Go."),
        ("assistant", "I rest."),
        ("user", "You are at 3."),
        ("assistant", call),
        ("user", "What?"),
    ]
    assert not any("tool_calls" in message for message in messages)


@pytest.mark.parametrize(
    ("results", "told"),
    [
        (["a"], [("assistant", False), ("user", False)]),
        (["a", "b"], [("assistant", True), ("tool", False), ("tool", False)]),
        (["a", "b", "c"], [("assistant", True), ("tool", False), ("tool", False), ("user", False)]),
    ],
)
def test_calls_with_fewer_results_are_told_as_text(results: list[str], told: list[tuple[str, bool]]) -> None:
    """An agent outside may answer one of two calls, and nobody knows which."""
    reply = call_reply(ACT_TOOL, "left") + call_reply(ACT_TOOL, "right")
    turns = [Message(role="assistant", text=reply), *(Message(role="tool", text=text) for text in results)]
    messages = wire_messages([Message(role="user", text="Go."), *turns])[1:]
    assert [(message["role"], "tool_calls" in message) for message in messages] == told
    assert [message["content"] for message in messages[1:]] == results
