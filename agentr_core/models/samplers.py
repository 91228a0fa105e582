"""Samplers: coroutines ask them for replies, one request at a time, in the way that suits the
model's backend.
"""

from __future__ import annotations

import asyncio

from agentr_core.models.batching import Batcher, BatchStats
from agentr_core.models.local.workers import Workers
from agentr_core.models.relay import Relay
from agentr_core.protocols.model import ChatModel
from agentr_core.recipes.models import ModelConfig
from agentr_core.types import Generation, Request


class WorkerBatchers:
    """One batcher for each worker of a model, so that no worker waits for another. It has
    `Batcher`'s methods.

    Args:
        model: The model whose workers get the requests. It is not closed here.
        max_batch: The most replies that all workers decode at once.
    """

    def __init__(self, model: Workers, *, max_batch: int) -> None:
        self.model = model
        share = -(-max_batch // len(model.members))
        self._batchers = {worker: Batcher(worker, max_batch=share) for worker in model.members}

    async def sample(self, request: Request) -> list[Generation]:
        """Return the replies to one request. Raises as `Batcher.sample`."""
        return await self._batchers[self.model.member(request)].sample(request)

    @property
    def capacity(self) -> int:
        """The most replies that are under way at once."""
        return sum(batcher.capacity for batcher in self._batchers.values())

    def stats(self) -> BatchStats:
        """Return the counters of all batchers together; `generate_seconds` is that of the busiest
        one.
        """
        parts = [batcher.stats() for batcher in self._batchers.values()]
        batches = sum(part.batches for part in parts)
        return BatchStats(
            requests=sum(part.requests for part in parts),
            sequences=sum(part.sequences for part in parts),
            batches=batches,
            failures=sum(part.failures for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            completion_tokens=sum(part.completion_tokens for part in parts),
            generate_seconds=max(part.generate_seconds for part in parts),
            fill=sum(part.fill * part.batches for part in parts) / batches if batches else 0.0,
        )

    async def close(self) -> None:
        """Close all batchers. Calling it twice is harmless."""
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))


Sampler = Batcher | Relay | WorkerBatchers


def sampler_of(model: ChatModel, config: ModelConfig) -> Sampler:
    """Return the sampler that suits a model's backend."""
    if config.backend == "openai":
        return Relay(model, concurrency=config.server.concurrency)
    if config.backend == "vllm":
        return Relay(model, concurrency=config.vllm.replicas * config.max_batch)
    if isinstance(model, Workers):
        return WorkerBatchers(model, max_batch=config.max_batch)
    return Batcher(model, max_batch=config.max_batch)
