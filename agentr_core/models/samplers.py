"""Samplers: the objects that coroutines ask for replies, one request at a time. Each passes the
requests on in the way that suits the model's backend: singly or in batches.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from agentr_core.errors import ModelFault, PromptTooLong
from agentr_core.models.batching import Batcher, BatchStats
from agentr_core.models.local.workers import Workers
from agentr_core.protocols import ChatModel, Estimating, checked_generations
from agentr_core.recipes.models import ModelConfig
from agentr_core.types import Generation, Request

# Requests one by one to a model that makes its own batches, such as a server. The alternative is
# `batching`.


# Not in batches: a batch would wait for its slowest reply, fail as a whole, and then be sent, and
# paid for, again in halves.
class DirectSampler:
    """A sampler that sends each request by itself, so that a fault affects only its own request. It
    has the methods of `Batcher`.

    The model limits how many requests are in flight at once. In the statistics each request counts
    as a batch, `fill` is the mean share of `concurrency` in use when a request was answered, and
    `generate_seconds` is the time during which any request was in flight.

    Args:
        model: The model that gets the requests. The sampler does not close it.
        concurrency: The most requests that may be in flight at once.
    """

    def __init__(self, model: ChatModel, *, concurrency: int) -> None:
        self.model = model
        self._concurrency = concurrency
        self._estimates_tokens = isinstance(model, Estimating) and model.estimates
        self._in_flight: set[asyncio.Task[list[list[Generation]]]] = set()
        self._busy_since = 0.0
        self._stats = BatchStats()
        self._closed = False

    async def sample(self, request: Request) -> list[Generation]:
        """Return the `request.n` replies to one request.

        Raises `PromptTooLong` if the prompt alone fills the context, `ModelFault` for invalid
        replies and after `close`, and what the model raises.
        """
        if self._closed:
            raise ModelFault("the sampler is closed; make a new one")
        prompt_tokens = 0 if self._estimates_tokens else self.model.count_tokens(request)
        if prompt_tokens >= self.model.context_length:
            raise PromptTooLong.counted(prompt_tokens, self.model.context_length, self.model.name)
        generate_task = asyncio.ensure_future(self.model.generate([request]))
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight.add(generate_task)
        try:
            (replies,) = await generate_task
            generations = checked_generations(replies, request, self.model.name)
        except Exception:
            self._stats = replace(self._stats, failures=self._stats.failures + 1)
            raise
        finally:
            fill = min(1.0, len(self._in_flight) / self._concurrency)
            self._in_flight.discard(generate_task)
            if not self._in_flight:
                busy_seconds = time.perf_counter() - self._busy_since
                self._stats = replace(self._stats, generate_seconds=self._stats.generate_seconds + busy_seconds)
        self._stats = self._stats.with_batch([generations], fill=fill)
        return generations

    @property
    def capacity(self) -> int:
        """The most requests that are in flight at once."""
        return self._concurrency

    def stats(self) -> BatchStats:
        """Return the counters so far."""
        current_seconds = time.perf_counter() - self._busy_since if self._in_flight else 0.0
        return replace(self._stats, generate_seconds=self._stats.generate_seconds + current_seconds)

    async def close(self) -> None:
        """Refuse further requests, and wait until those in flight have ended. Calling it twice is
        harmless.
        """
        self._closed = True
        await asyncio.gather(*self._in_flight, return_exceptions=True)


class WorkerBatchers:
    """A sampler with one batcher for each worker of a model, so that no worker waits for another.
    It has the methods of `Batcher`.

    Args:
        model: The model whose workers get the requests. It is not closed here.
        max_batch: The most replies that all workers decode at once, rounded up to a multiple of the
            number of workers.
    """

    def __init__(self, model: Workers, *, max_batch: int) -> None:
        self.model = model
        worker_batch = -(-max_batch // len(model.workers))
        self._batchers = {worker: Batcher(worker, max_batch=worker_batch) for worker in model.workers}

    async def sample(self, request: Request) -> list[Generation]:
        """Return the replies to one request, from the worker of its session. Raises what
        `Batcher.sample` raises.
        """
        return await self._batchers[self.model.worker_of(request)].sample(request)

    @property
    def capacity(self) -> int:
        """The most replies that are under way at once."""
        return sum(batcher.capacity for batcher in self._batchers.values())

    def stats(self) -> BatchStats:
        """Return the counters of all batchers together: sums, except `generate_seconds`, which is
        that of the busiest batcher, and `fill`, which is the mean over all batches.
        """
        worker_stats = [batcher.stats() for batcher in self._batchers.values()]
        batches = sum(stats.batches for stats in worker_stats)
        return BatchStats(
            requests=sum(stats.requests for stats in worker_stats),
            sequences=sum(stats.sequences for stats in worker_stats),
            batches=batches,
            failures=sum(stats.failures for stats in worker_stats),
            prompt_tokens=sum(stats.prompt_tokens for stats in worker_stats),
            completion_tokens=sum(stats.completion_tokens for stats in worker_stats),
            generate_seconds=max(stats.generate_seconds for stats in worker_stats),
            fill=sum(stats.fill * stats.batches for stats in worker_stats) / batches if batches else 0.0,
        )

    async def close(self) -> None:
        """Close all batchers. Calling it twice is harmless."""
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))


Sampler = Batcher | DirectSampler | WorkerBatchers


def sampler_of(model: ChatModel, config: ModelConfig) -> Sampler:
    """Return the sampler that suits a model's backend. It does not close the model."""
    if config.backend == "openai":
        return DirectSampler(model, concurrency=config.server.concurrency)
    if config.backend == "vllm":
        return DirectSampler(model, concurrency=config.vllm.replicas * config.max_batch)
    if isinstance(model, Workers):
        return WorkerBatchers(model, max_batch=config.max_batch)
    return Batcher(model, max_batch=config.max_batch)
