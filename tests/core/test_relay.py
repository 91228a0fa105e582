"""The relay: every request by itself, and the same words as the batcher's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from agentr_core.errors import ModelFault, ModelUnavailable, PromptTooLong
from agentr_core.models.batching import Batcher
from agentr_core.models.samplers import DirectSampler, sampler_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ModelConfig, ServerConfig
from agentr_core.types import Generation, Message, Request, Sampling


class SlowModel(ScriptedModel):
    """Takes its time over each call, and breaks on request."""

    def __init__(self) -> None:
        super().__init__(lambda messages, seed, number: f"{messages[-1].text} {seed} {number}", context_length=9)
        self.calls = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        self.calls += 1
        await asyncio.sleep(0.05)
        if requests[0].messages[-1].text == "offline":
            raise ModelUnavailable("no answer")
        return await super().generate(requests)


def ask(text: str, *, seed: int = 0, n: int = 1) -> Request:
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(), seed=seed, n=n)


async def test_a_fault_is_one_requests_alone() -> None:
    relay = DirectSampler(SlowModel(), concurrency=10)
    answers = await asyncio.gather(*(relay.sample(ask(t, n=2)) for t in ("a", "offline", "b")), return_exceptions=True)
    assert [a if isinstance(a, BaseException) else [g.text for g in a] for a in answers] == [
        ["a 0 0", "a 0 1"],
        answers[1],
        ["b 0 0", "b 0 1"],
    ]
    assert isinstance(answers[1], ModelUnavailable)
    stats = relay.stats()
    assert (stats.requests, stats.sequences, stats.failures) == (2, 4, 1)
    assert (stats.prompt_tokens, stats.completion_tokens) == (4, 12)
    assert 0.2 <= stats.fill <= 0.3


async def test_time_together_counts_once() -> None:
    relay = DirectSampler(SlowModel(), concurrency=10)
    start = time.perf_counter()
    await asyncio.gather(*(relay.sample(ask("a", seed=seed)) for seed in range(100)))
    assert 0.05 <= relay.stats().generate_seconds <= time.perf_counter() - start


async def test_a_cancelled_request_is_given_up() -> None:
    model = SlowModel()
    relay = DirectSampler(model, concurrency=2)
    asking = asyncio.create_task(relay.sample(ask("a")))
    while not model.calls:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await relay.sample(ask("b")))[0].text == "b 0 0"
    assert relay.stats().requests == 1


async def test_a_prompt_without_room_is_not_sent() -> None:
    model = SlowModel()
    with pytest.raises(PromptTooLong, match="leaves no room"):
        await DirectSampler(model, concurrency=2).sample(ask("a b c d e f g h i"))
    assert model.calls == 0


async def test_close_waits_for_what_is_under_way() -> None:
    model = SlowModel()
    relay = DirectSampler(model, concurrency=2)
    asking = asyncio.create_task(relay.sample(ask("a")))
    while not model.calls:
        await asyncio.sleep(0)
    await relay.close()
    assert (await asking)[0].text == "a 0 0"
    with pytest.raises(ModelFault, match="is closed"):
        await relay.sample(ask("late"))
    await relay.close()


def test_a_served_model_is_relayed_to_and_one_here_is_batched_for() -> None:
    config = ModelConfig(backend="openai", server=ServerConfig(model="m"))
    assert isinstance(sampler_of(SlowModel(), config), DirectSampler)
    assert isinstance(sampler_of(SlowModel(), ModelConfig(path="m")), Batcher)
