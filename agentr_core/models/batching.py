"""Gathers the single requests of many coroutines into a few large batches for the model.

A batch is sent when it is full, or when the event loop has nothing more to add: every coroutine
that can run has run, and the rest wait for a reply. While the model computes one batch, requests
for the next one gather. Coroutines whose environment works in a thread are not waited for: their
requests join a later batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentr_core.errors import ModelFault, PromptTooLong, Transient
from agentr_core.protocols import ChatModel, checked_generations
from agentr_core.types import Generation, Request

_IDLE_PASSES = 3
"""The number of passes of the event loop without a new request after which the loop counts as idle:
a future's result takes two passes to reach the coroutine that awaits it through a task.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """The counters of a sampler. `sequences` counts replies, `failures` batches that failed, and
    `prompt_tokens` each request's prompt once.

    `fill` is the mean of sequences / max_batch over all batches; it may exceed 1 where a single
    request asks for more replies than `max_batch`.
    """

    requests: int = 0
    sequences: int = 0
    batches: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    generate_seconds: float = 0.0
    fill: float = 0.0

    def with_batch(self, replies: list[list[Generation]], *, fill: float, seconds: float = 0.0) -> BatchStats:
        """Return the counters after one more batch. `replies` are its replies to each request,
        `fill` is its share of `max_batch`, and `seconds` the time that it took.
        """
        batches = self.batches + 1
        return replace(
            self,
            requests=self.requests + len(replies),
            sequences=self.sequences + sum(map(len, replies)),
            batches=batches,
            prompt_tokens=self.prompt_tokens + sum(generations[0].prompt_tokens for generations in replies),
            completion_tokens=self.completion_tokens + sum(g.completion_tokens for reply in replies for g in reply),
            generate_seconds=self.generate_seconds + seconds,
            fill=self.fill + (fill - self.fill) / batches,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _PendingRequest:
    request: Request
    prompt_tokens: int
    future: asyncio.Future[list[Generation]]


class Batcher:
    """A collector of single requests into batches for a model. It belongs to one event loop.

    Args:
        model: The model that gets the batches, one at a time. The batcher does not close it.
        max_batch: The most replies in a batch; a request for more is sent alone.
        linger_seconds: The most seconds that a batch is held back while other coroutines keep the
            event loop busy.
    """

    def __init__(self, model: ChatModel, *, max_batch: int, linger_seconds: float = 0.05) -> None:
        self.model = model
        self._max_batch = max_batch
        self._linger_seconds = linger_seconds
        self._pending: list[_PendingRequest] = []
        self._dispatcher: asyncio.Task[None] | None = None
        self._stats = BatchStats()
        self._busy_since = 0.0
        self._closed = False

    async def sample(self, request: Request) -> list[Generation]:
        """Return the `request.n` replies to one request.

        Raises `PromptTooLong` at once if the prompt alone fills the context; later what the model
        raises for this request, or a `Transient` fault of its whole batch; and `ModelFault` after
        `close`.
        """
        if self._closed:
            raise ModelFault("the batcher is closed; make a new one")
        prompt_tokens = self.model.count_tokens(request)
        if prompt_tokens >= self.model.context_length:
            raise PromptTooLong.counted(prompt_tokens, self.model.context_length, self.model.name)
        pending = _PendingRequest(request, prompt_tokens, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch(), name="batcher")
        return await pending.future

    @property
    def capacity(self) -> int:
        """The most replies of a batch, except for a single request that asks for more."""
        return self._max_batch

    def stats(self) -> BatchStats:
        """Return the counters so far; `generate_seconds` includes those of the batch under way."""
        current_seconds = time.perf_counter() - self._busy_since if self._busy_since else 0.0
        return replace(self._stats, generate_seconds=self._stats.generate_seconds + current_seconds)

    async def close(self) -> None:
        """Fail the requests that still wait (`ModelFault`), and return when the batch in progress
        has ended. Calling it twice is harmless.
        """
        self._closed = True
        for pending in self._pending:
            _fail(pending, ModelFault("the batcher was closed while this request waited"))
        self._pending.clear()
        if self._dispatcher is not None:
            await asyncio.shield(self._dispatcher)

    async def _dispatch(self) -> None:
        """Send batches until no request waits. If this task fails or is cancelled, every waiting
        request fails or is cancelled, too.
        """
        batch: list[_PendingRequest] = []
        try:
            while self._pending:
                # Until the batch is full, the event loop is idle, or time is up.
                deadline = time.monotonic() + self._linger_seconds
                num_idle_passes = 0
                while (
                    num_idle_passes < _IDLE_PASSES
                    and sum(pending.request.n for pending in self._pending) < self._max_batch
                    and time.monotonic() < deadline
                ):
                    num_before = len(self._pending)
                    await asyncio.sleep(0)
                    num_idle_passes = num_idle_passes + 1 if len(self._pending) == num_before else 0
                # The oldest requests that fit in a batch, sorted by the length of their prompts.
                open_requests = [pending for pending in self._pending if not pending.future.done()]
                end = 0
                num_sequences = 0
                while end < len(open_requests) and (
                    not end or num_sequences + open_requests[end].request.n <= self._max_batch
                ):
                    num_sequences += open_requests[end].request.n
                    end += 1
                self._pending = open_requests[end:]
                batch = sorted(open_requests[:end], key=lambda pending: pending.prompt_tokens)
                if batch:
                    await self._serve(batch)
        except BaseException as error:
            for pending in (*batch, *self._pending):
                if isinstance(error, asyncio.CancelledError):
                    pending.future.cancel()
                else:
                    _fail(pending, ModelFault(f"what serves model {self.model.name} ended by {error!r}"))
            self._pending.clear()
            raise
        finally:
            self._dispatcher = None

    async def _serve(self, batch: list[_PendingRequest]) -> None:
        """Answer a batch. A batch that fails is halved, again and again, until the requests at
        fault are isolated.
        """
        if await self._try_serve(batch):
            return
        middle = len(batch) // 2
        await self._serve(batch[:middle])
        await self._serve(batch[middle:])

    async def _try_serve(self, batch: list[_PendingRequest]) -> bool:
        """Send a batch; return False if it failed and its halves should be tried, else True: each
        of its requests then has its replies or its error.

        The exception of a batch must not leave this method: its frames keep the model's allocations
        alive, and the halves need that memory if it ran out.
        """
        start = self._busy_since = time.perf_counter()
        try:
            replies = await self.model.generate([pending.request for pending in batch])
            if len(replies) != len(batch) or not all(replies):
                raise ModelFault(
                    f"model {self.model.name} answered {len(batch)} requests with {sum(map(bool, replies))} lists of "
                    f"replies and {len(replies) - sum(map(bool, replies))} empty ones; `generate` must return a list "
                    "for each"
                )
            answers = [
                self._replies_or_fault(pending, generations)
                for pending, generations in zip(batch, replies, strict=True)
            ]
            successes = [answer for answer in answers if isinstance(answer, list)]
            fill = sum(map(len, successes)) / self._max_batch
            self._stats = self._stats.with_batch(successes, fill=fill, seconds=time.perf_counter() - start)
        except Exception as error:
            self._stats = replace(self._stats, failures=self._stats.failures + 1)
            # A transient error is the backend's fault, not one request's.
            if len(batch) > 1 and not isinstance(error, Transient):
                return False
            for pending in batch:
                _fail(pending, error)
            return True
        finally:
            self._busy_since = 0.0
        for pending, answer in zip(batch, answers, strict=True):
            if isinstance(answer, ModelFault):
                _fail(pending, answer)
            elif not pending.future.done():
                pending.future.set_result(answer)
        return True

    def _replies_or_fault(
        self, pending: _PendingRequest, generations: list[Generation]
    ) -> list[Generation] | ModelFault:
        """Return the replies to one request or, if they are invalid, the `ModelFault` for that
        request alone.
        """
        try:
            return checked_generations(generations, pending.request, self.model.name)
        except ModelFault as fault:
            return fault


def _fail(pending: _PendingRequest, error: Exception) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)


# Concurrent requests: all of their results, or the first fault.

T = TypeVar("T")


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. The first exception cancels
    the others, and is raised once they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Which replica serves which session: rendezvous hashing (Thaler and Ravishankar, 1998).


def replica_of(session: str, num_replicas: int) -> int:
    """Return the number of the replica, in [0, `num_replicas`), that all requests of a session go
    to.

    When the last replica is removed or one is added, only the sessions of that replica move.
    """
    return max(range(num_replicas), key=lambda number: hashlib.sha256(f"{number}:{session}".encode()).digest())
