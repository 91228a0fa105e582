"""Our own server, seen by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError, OpenAI
from served import Served, serving

from agentr_core.errors import DataFault, ModelFault, ModelUnavailable
from agentr_core.models.scripted import ScriptedModel
from agentr_core.types import Message

ERRORS = {"broken": ModelFault("it broke"), "away": ModelUnavailable("away"), "order": DataFault("this order of turns")}


def script(messages: tuple[Message, ...], seed: int, number: int) -> str:
    if error := ERRORS.get(messages[-1].text):
        raise error
    return f"reply {seed % 7} {number} to {len(messages)} turns"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: ScriptedModel(script, name="s", context_length=20)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url, api_key="any", max_retries=0) as api:
        yield api


def test_the_model_is_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("s", "agentr")
    assert (model.model_extra or {})["max_model_len"] == 20


def test_a_conversation_is_answered(client: OpenAI) -> None:
    turns: list[Any] = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "on"},
    ]
    reply = client.chat.completions.create(model="s", messages=turns, n=2, seed=3, stop=" to", max_tokens=9)
    assert [c.message.content for c in reply.choices] == ["reply 3 0", "reply 3 1"]
    assert [(c.index, c.finish_reason) for c in reply.choices] == [(0, "stop"), (1, "stop")]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (8, 6, 14)
    cut = client.chat.completions.create(model="s", messages=turns, seed=3, max_completion_tokens=2)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("reply 3 ", "length")


def test_without_a_seed_one_is_drawn(client: OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    replies = {client.chat.completions.create(model="s", messages=turns).choices[0].message.content for _ in range(20)}
    assert len(replies) > 1


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": "other"}, 404, "there is no model 'other'; this server has 's'"),
        ({"stream": True}, 400, "stream: "),
        ({"n": 0}, 400, "n: "),
        ({"tools": []}, 400, "tools: Extra inputs are not permitted"),
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "user", "content": "word " * 30}]}, 400, "leaves no room"),
        ({"messages": [{"role": "user", "content": "order"}]}, 400, "this order of turns"),
        ({"messages": [{"role": "user", "content": "broken"}]}, 500, "it broke"),
        ({"messages": [{"role": "user", "content": "away"}]}, 503, "away"),
    ],
)
def test_what_cannot_be_answered_is_refused(client: OpenAI, change: dict[str, Any], status: int, said: str) -> None:
    body = {"model": "s", "messages": [{"role": "user", "content": "hi"}]} | change
    with pytest.raises(APIStatusError, match=said) as error:
        client.post("/chat/completions", cast_to=bytes, body=body)
    assert error.value.status_code == status
