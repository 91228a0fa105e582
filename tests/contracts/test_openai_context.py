"""How long a conversation is, by the word of a server whose template is its own; and what its
refusals mean.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from served import Served, altered, answer, refuse, serving

from agentr_core.errors import ModelFault, PromptTooLong, RequestTooLong
from agentr_core.models.openai.chat import Endpoint, OpenAIModel
from agentr_core.models.samplers import DirectSampler
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ServerConfig
from agentr_core.types import Generation, Message, Request, Sampling

CONTEXT = 256
TEMPLATE = 40
REPLY = "word " * 100


class StrictModel(ScriptedModel):
    """Has a template of 40 tokens, and refuses a request whose prompt and `max_tokens` do not fit,
    as vLLM does.
    """

    def __init__(self) -> None:
        super().__init__(lambda messages, seed, number: REPLY, name="strict", context_length=CONTEXT)

    def count_tokens(self, request: Request) -> int:
        return TEMPLATE + super().count_tokens(request)

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        for request in requests:
            num_tokens = self.count_tokens(request) + request.sampling.max_new_tokens
            if num_tokens > self.context_length:
                raise PromptTooLong(f"this model's maximum context length is {CONTEXT}; you asked for {num_tokens}")
        return await super().generate(requests)


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with serving(StrictModel) as server:
        yield server


@pytest.fixture(autouse=True)
def _forget(strict: Served) -> None:
    strict.forget()


@asynccontextmanager
async def connect_model(server: Served, *, context: int = 0, **options: Any) -> Any:
    config = ServerConfig(**{"model": "strict", "max_retries": 1, "connect_seconds": 600.0, **options})
    endpoint = Endpoint(url=server.url, key="")
    model = await asyncio.to_thread(OpenAIModel.connect, endpoint, config, context_length=context)
    try:
        yield model
    finally:
        await model.close()


def ask(text: str, *, n: int = 1, most: int = 100, **sampling: Any) -> Request:
    return Request(
        messages=(Message(role="user", text=text),),
        sampling=Sampling(max_new_tokens=most, **sampling),
        seed=5,
        n=n,
    )


def limits(server: Served) -> list[int]:
    return [body["max_tokens"] for body in server.bodies]


async def test_a_reply_that_fits_by_far_is_asked_for_once(strict: Served) -> None:
    async with connect_model(strict) as model:
        await model.generate([ask("hi")])
        assert limits(strict) == [100]


@pytest.mark.parametrize("words", [140, 160, 200, 214])
async def test_what_is_left_beside_the_servers_own_template_is_asked_for(strict: Served, words: int) -> None:
    """At 269e248 each of these was `PromptTooLong`: the estimate knew nothing of the template."""
    async with connect_model(strict, n_per_request=1) as model:
        ((first, second),) = await model.generate([ask("a " * words, n=2)])
    room = min(100, CONTEXT - TEMPLATE - words - 1)
    assert (first.completion_tokens, second.completion_tokens) == (room, room)
    assert first.prompt_tokens == TEMPLATE + words + 1
    assert limits(strict)[-2:] == [room, room]
    assert len(strict.bodies) <= 5, "refused, measured, answered"


async def test_a_conversation_that_the_server_measured_to_be_too_long_ends_its_path(strict: Served) -> None:
    async with connect_model(strict) as model:
        with pytest.raises(PromptTooLong, match="leaves no room for a reply at http"):
            await DirectSampler(model, concurrency=2).sample(ask("a " * 260))
        with pytest.raises(PromptTooLong, match="leaves no room"):
            await model.generate([ask("a " * 215)])


async def test_no_path_ends_by_an_estimate(strict: Served) -> None:
    """Words of twelve bytes count as four tokens by the estimate, and are one."""
    async with connect_model(strict) as model:
        request = ask("abcdefghijk " * 100)
        assert model.count_tokens(request) > CONTEXT
        ((reply,),) = [await DirectSampler(model, concurrency=2).sample(request)]
        assert reply.completion_tokens == 100
    assert limits(strict) == [1, 100]


async def test_a_refusal_that_cannot_be_true_is_a_fault(strict: Served) -> None:
    refusal = refuse(400, "This model's maximum context length is 256 tokens", "context_length_exceeded")
    async with connect_model(strict) as model:
        strict.faults += [refusal] * 20
        with pytest.raises(ModelFault, match=r"refuses a conversation of at most .* tokens") as caught:
            await model.generate([ask("hi")])
        assert not isinstance(caught.value, PromptTooLong)
        assert len(strict.bodies) == 2


async def test_a_context_that_is_shorter_than_the_server_says_is_found(
    strict: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that says 256 and refuses more than 60: the reply is had, and the warning says what
    to set.
    """
    async with connect_model(strict) as model:
        refusal = refuse(400, "context length exceeded")
        strict.faults += [refusal, altered(lambda data: None), refusal]
        ((reply,),) = await model.generate([ask("hi")])
        assert limits(strict) == [100, 1, 50, 25]
        assert reply.finish_reason == "length"
    assert "set model.context_length" in caplog.text


async def test_a_probe_that_is_refused_for_another_reason_is_done_without(strict: Served) -> None:
    async with connect_model(strict) as model:
        strict.faults += [refuse(400, "maximum context length"), refuse(400, "max_tokens must be at least 16")]
        ((reply,),) = await model.generate([ask("hi")])
        assert limits(strict) == [100, 1, 50]
        assert reply.completion_tokens == 50


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, "the request exceeds the available context size, try increasing it"),
        (400, "Requested token count exceeds the model's maximum context length of 256 tokens."),
        (400, "The input (300 tokens) is longer than the model's context length (256 tokens)."),
        (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 256."),
        (413, "prompt is too long: 300 tokens > 256 maximum"),
    ],
)
async def test_the_words_of_known_servers_are_understood(strict: Served, status: int, said: str) -> None:
    async with connect_model(strict) as model:
        strict.faults.append(refuse(status, said))
        await model.generate([ask("hi")])
        assert limits(strict) == [100, 1, 50]


@pytest.mark.parametrize(
    "body",
    [
        {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 256.", "error_type": "x"},
        {"detail": "the model's maximum context length is 256"},
        {"object": "error", "message": "maximum context length is 256", "code": 400},
        {"error": {"code": ["odd"], "type": {"odd": 1}, "reason": "prompt is too long"}},
        "maximum context length is 256",
    ],
)
async def test_a_refusal_is_understood_in_whatever_form_a_server_words_it(strict: Served, body: Any) -> None:
    async with connect_model(strict) as model:
        strict.faults.append(answer(400, (body if isinstance(body, str) else json.dumps(body)).encode()))
        await model.generate([ask("hi")])
        assert limits(strict) == [100, 1, 50]
        strict.faults.append(answer(400, b'{"detail": [{"msg": "no such field"}]}'))
        with pytest.raises(ModelFault, match=r"refused the request \(400\): .*no such field"):
            await model.generate([ask("ho")])


async def test_the_shorter_of_two_contexts_is_taken(strict: Served) -> None:
    for context, expected in ((0, 256), (200, 200), (4096, 256)):
        async with connect_model(strict, context=context) as model:
            assert model.context_length == expected


def test_the_refusal_of_a_request_is_no_prompt_that_is_too_long() -> None:
    assert not issubclass(RequestTooLong, PromptTooLong)
