"""The batcher: what goes into a batch, who gets which answer, who gets which fault."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence

import pytest

from agentr_core.errors import ModelFault, ModelUnavailable, PromptTooLong
from agentr_core.models.batching import Batcher
from agentr_core.models.scripted import ScriptedModel
from agentr_core.types import Generation, Message, Request, Sampling


class RecordingModel(ScriptedModel):
    """A scripted model that keeps the batches it was given, takes its time, and breaks on
    request.
    """

    def __init__(self, *, seconds: float = 0.0, context_length: int = 1000) -> None:
        super().__init__(
            lambda messages, seed, number: f"{messages[-1].text} {seed} {number}", context_length=context_length
        )
        self.batches: list[list[Request]] = []
        self.seconds = seconds
        self.running = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        self.batches.append(list(requests))
        self.running += 1
        assert self.running == 1, "one batch at a time"
        await asyncio.sleep(self.seconds)
        self.running -= 1
        texts = [request.messages[-1].text for request in requests]
        if "poison" in texts:
            raise ModelFault("poisoned")
        if "offline" in texts:
            raise ModelUnavailable("no answer")
        return await super().generate(requests)


def ask(text: str, *, seed: int = 0, n: int = 1) -> Request:
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(), seed=seed, n=n)


def sizes(model: RecordingModel) -> list[int]:
    return [len(batch) for batch in model.batches]


async def test_all_that_wait_go_in_one_batch_and_each_gets_its_own_answer() -> None:
    model = RecordingModel()
    batcher = Batcher(model, max_batch=500)
    answers = await asyncio.gather(*(batcher.sample(ask("a", seed=seed, n=2)) for seed in range(200)))
    assert [[g.text for g in answer] for answer in answers] == [[f"a {s} 0", f"a {s} 1"] for s in range(200)]
    assert sizes(model) == [200]


async def test_episodes_of_several_steps_stay_in_step() -> None:
    model = RecordingModel()
    batcher = Batcher(model, max_batch=64)

    async def episode(seed: int) -> None:
        for step in range(5):
            await batcher.sample(ask(f"step {step}", seed=seed))
            for _ in range(seed % 3):
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for seed in range(64):
            group.create_task(episode(seed))
    assert sizes(model) == [64] * 5


async def test_full_batch_takes_the_oldest_and_sorts_them_by_prompt_length() -> None:
    model = RecordingModel()
    batcher = Batcher(model, max_batch=3)
    await asyncio.gather(*(batcher.sample(ask(text)) for text in ("a a a", "b", "c c", "d", "e e")))
    assert [[r.messages[0].text for r in batch] for batch in model.batches] == [["b", "c c", "a a a"], ["d", "e e"]]


async def test_request_larger_than_a_batch_goes_alone() -> None:
    model = RecordingModel()
    batcher = Batcher(model, max_batch=4)
    answers = await asyncio.gather(batcher.sample(ask("big", n=9)), batcher.sample(ask("small")))
    assert [len(answer) for answer in answers] == [9, 1]
    assert sizes(model) == [1, 1]


async def test_requests_gather_while_a_batch_computes() -> None:
    model = RecordingModel(seconds=0.05)
    batcher = Batcher(model, max_batch=100)
    task = asyncio.create_task(batcher.sample(ask("first")))
    while not model.batches:
        await asyncio.sleep(0)
    await asyncio.gather(task, *(batcher.sample(ask("later", seed=seed)) for seed in range(10)))
    assert sizes(model) == [1, 10]


class Buffer:
    """What a model allocates for a batch."""


class CrampedModel(RecordingModel):
    """A model with memory for one request at a time, which counts the buffers it still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[Buffer]] = []

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        assert not any(earlier() for earlier in self.held), "the buffer of a failed batch takes the memory of its half"
        buffer = Buffer()
        self.held.append(weakref.ref(buffer))
        if len(requests) > 1:
            raise ModelFault("memory ran out")
        return await super().generate(requests)


async def test_a_batch_that_ran_out_of_memory_leaves_it_to_its_halves() -> None:
    model = CrampedModel()
    batcher = Batcher(model, max_batch=8)
    answers = await asyncio.gather(*(batcher.sample(ask("a", seed=seed)) for seed in range(4)))
    assert [answer.text for (answer,) in answers] == [f"a {seed} 0" for seed in range(4)]


async def test_busy_thread_does_not_hold_a_batch_back() -> None:
    batcher = Batcher(RecordingModel(), max_batch=100)
    release = threading.Event()
    busy = asyncio.create_task(asyncio.to_thread(release.wait, 60))
    await batcher.sample(ask("a"))
    assert not busy.done()
    release.set()
    await busy


async def test_busy_event_loop_holds_a_batch_back_no_longer_than_linger() -> None:
    batcher = Batcher(RecordingModel(), max_batch=10**6, linger_seconds=0.02)
    requests = []

    async def keep_asking() -> None:
        while True:
            requests.append(asyncio.create_task(batcher.sample(ask("more"))))
            await asyncio.sleep(0)

    asking = asyncio.create_task(keep_asking())
    async with asyncio.timeout(30):
        await batcher.sample(ask("first"))
    asking.cancel()
    await asyncio.gather(*requests)


async def test_fault_reaches_the_request_at_fault_only() -> None:
    batcher = Batcher(RecordingModel(), max_batch=100)
    texts = ["a", "b", "poison", "c", "d"]
    answers = await asyncio.gather(*(batcher.sample(ask(text)) for text in texts), return_exceptions=True)
    assert [type(answer) for answer in answers if isinstance(answer, BaseException)] == [ModelFault]
    assert [a[0].text if isinstance(a, list) else str(a) for a in answers] == [
        "a 0 0",
        "b 0 0",
        "poisoned",
        "c 0 0",
        "d 0 0",
    ]
    assert batcher.stats().requests == 4
    assert batcher.stats().failures > 0


async def test_unreachable_backend_fails_the_whole_batch_without_asking_again() -> None:
    model = RecordingModel()
    batcher = Batcher(model, max_batch=100)
    answers = await asyncio.gather(*(batcher.sample(ask(t)) for t in ("a", "offline")), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ModelUnavailable, ModelUnavailable]
    assert sizes(model) == [2]
    assert (await batcher.sample(ask("again")))[0].text == "again 0 0"


class ProgramEnd(BaseException):
    """Stands for what ends a program: asyncio ends its loop at once for the real ones."""


class BrokenModel(RecordingModel):
    """Returns no list for the last request of a batch, or is broken off by what is no fault of a
    model.
    """

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        if requests[-1].messages[-1].text == "end":
            raise ProgramEnd
        return (await super().generate(requests))[:-1]


async def test_a_model_that_returns_too_few_lists_leaves_nobody_waiting() -> None:
    batcher = Batcher(BrokenModel(), max_batch=2)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(batcher.sample(ask(t)) for t in "abc"), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ModelFault] * 3
    assert str(answers[0]).startswith("model scripted answered 1 requests with 0 lists")
    assert batcher.stats().batches == 0
    await batcher.close()


async def test_what_ends_the_batcher_ends_the_waiting_of_all() -> None:
    batcher = Batcher(BrokenModel(), max_batch=2)
    waiting = [asyncio.create_task(batcher.sample(ask(text))) for text in ("a", "end", "c")]
    await asyncio.sleep(0)
    (dispatcher,) = (task for task in asyncio.all_tasks() if task.get_name() == "batcher")

    await asyncio.wait([dispatcher, *waiting], timeout=30)
    assert isinstance(dispatcher.exception(), ProgramEnd)
    assert [str(task.exception()) for task in waiting] == ["what serves model scripted ended by ProgramEnd()"] * 3


async def test_prompt_too_long_is_refused_before_it_joins_a_batch() -> None:
    model = RecordingModel(context_length=5)
    batcher = Batcher(model, max_batch=100)
    answers = await asyncio.gather(batcher.sample(ask("a b c d e")), batcher.sample(ask("a")), return_exceptions=True)
    assert [type(answer) for answer in answers] == [PromptTooLong, list]
    assert sizes(model) == [1]


async def test_cancelled_waiters_leave_the_others_alone() -> None:
    model = RecordingModel(seconds=0.05)
    batcher = Batcher(model, max_batch=1)
    running, waiting, last = (asyncio.create_task(batcher.sample(ask(t))) for t in ("running", "waiting", "other"))
    while not model.batches:
        await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    assert (await last)[0].text == "other 0 0"
    assert [batch[0].messages[0].text for batch in model.batches] == ["running", "other"]
    assert running.cancelled()
    assert waiting.cancelled()


async def test_stats_count_work() -> None:
    batcher = Batcher(RecordingModel(seconds=0.01), max_batch=8)
    await asyncio.gather(batcher.sample(ask("a b", n=3)), batcher.sample(ask("c")))
    stats = batcher.stats()
    assert (stats.requests, stats.sequences, stats.batches, stats.failures) == (2, 4, 1, 0)
    assert stats.prompt_tokens == 3 + 2
    assert stats.completion_tokens == 3 * 4 + 3
    assert stats.fill == pytest.approx(0.5)
    assert stats.generate_seconds >= 0.01


async def test_close_ends_the_running_batch_and_fails_who_waits() -> None:
    model = RecordingModel(seconds=0.05)
    batcher = Batcher(model, max_batch=1)
    running, waiting = (asyncio.create_task(batcher.sample(ask(text))) for text in ("running", "waiting"))
    while not model.batches:
        await asyncio.sleep(0)
    await batcher.close()
    assert (await running)[0].text == "running 0 0"
    with pytest.raises(ModelFault, match="closed while this request waited"):
        await waiting
    with pytest.raises(ModelFault, match="is closed"):
        await batcher.sample(ask("late"))
    await batcher.close()


def test_batcher_outlives_an_event_loop() -> None:
    batcher = Batcher(RecordingModel(), max_batch=8)
    assert [asyncio.run(batcher.sample(ask("a", seed=s)))[0].text for s in range(2)] == ["a 0 0", "a 1 0"]


async def test_who_asks_most_is_not_served_more() -> None:
    batcher = Batcher(RecordingModel(), max_batch=4)
    num_replies = [0] * 10

    async def keep_asking(number: int) -> None:
        while True:
            await batcher.sample(ask("more", seed=number, n=1 + number % 4))
            num_replies[number] += 1

    asking = [asyncio.create_task(keep_asking(number)) for number in range(len(num_replies))]
    async with asyncio.timeout(600):
        while sum(num_replies) < 300:
            await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await batcher.close()
    assert max(num_replies) - min(num_replies) <= 2
