"""Collection as a recipe does it, with all of its workers: trees a second against the published
way, the engine's share, the time outside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measures import Clock, Measure
from published import OneByOne, environment_server, grow_one_by_one

from agentr_core.environments import registry
from agentr_core.methods.agent_r.collect import collect, finished_trees
from agentr_core.methods.faults import load
from agentr_core.methods.table import method_of
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.local.workers import LoadCommand, Worker, Workers, load_local
from agentr_core.protocols import ChatModel
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.machine import resolve_auto
from agentr_core.runtime.start import begin_iteration, run_id_of, start_run
from agentr_core.samples.rendering import load_renderer
from agentr_core.store.database import Store
from agentr_core.types import Generation, Request, Tree

RECIPE = Path("deployments/recipes/textcraft-tiny.yaml")


@dataclass(eq=False)
class Recorder:
    """Passes requests on to the recipe's model, or to one of its workers; remembers them and their
    replies, and how long it took.

    By the processors' clock, what other threads do meanwhile counts as the model's.
    """

    model: TransformersModel | Worker
    clock: Clock
    seconds: float = 0.0
    requests: list[Request] = field(default_factory=list)
    replies: list[list[Generation]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        start = self.clock()
        replies = await self.model.generate(requests)
        self.seconds += self.clock() - start
        self.requests += requests
        self.replies += replies
        return replies

    @property
    def tokens(self) -> int:
        """Tokens of all replies."""
        return sum(generation.completion_tokens for replies in self.replies for generation in replies)


def measure(folder: Path, *, trees: int, slow_trees: int, search: Sequence[str], clock: Clock) -> list[Measure]:
    """Return the measures of one collection of `trees` trees, of which the published way grows
    `slow_trees` again.

    `search` are changes of the recipe.
    """
    overrides = [f"instances.train_limit={trees}", f"workspace={folder}", *search]
    if clock is time.process_time:
        # Workers have processes of their own, whose time this clock does not count.
        overrides.append("model.workers=1")
    return asyncio.run(_measure(resolve_auto(load(RECIPE, overrides)), folder, slow_trees, clock))


async def _measure(recipe: Recipe, folder: Path, slow_trees: int, clock: Clock) -> list[Measure]:
    recorders: list[Recorder] = []

    def load_recorded(*_: object) -> ChatModel:
        model = _load(recipe)
        if isinstance(model, Workers):
            recorders.extend(Recorder(worker, clock) for worker in model.workers)
            model.workers = tuple(recorders)  # type: ignore[arg-type]
            return model
        recorders.append(Recorder(model, clock))
        return recorders[0]

    ctx = RunContext(
        recipe=recipe,
        method=method_of(recipe),
        run_id=run_id_of(recipe, method_of(recipe)),
        root=folder,
        store=Store(folder / "store.duckdb"),
        make_environment=lambda _: registry.make(recipe.environment.name, recipe.environment.options),
        load_model=load_recorded,
        progress=lambda done, total, note: None,
    )
    # The first model of a process pays for imports and for the compiling of kernels.
    await _load(recipe).close()
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    start = clock()
    await collect(ctx, 1)
    seconds = clock() - start
    tokens, replies = (
        sum(recorder.tokens for recorder in recorders),
        sum(len(generations) for recorder in recorders for generations in recorder.replies),
    )
    limit = tokens / await _engine_seconds(recipe, recorders, clock)
    trees = list(finished_trees(ctx, 1).values())
    chosen = trees[:: max(1, len(trees) // slow_trees)][:slow_trees]
    slow = await _published_seconds_per_reply(recipe, recorders, chosen, clock)
    threads = min(slow, key=lambda number: slow[number])
    slow_seconds = slow[threads] * replies
    ways = ", ".join(f"{1000 * seconds:.0f} ms a reply with {number} threads" for number, seconds in slow.items())
    rate = tokens / seconds
    share_outside = 1 - sum(recorder.seconds for recorder in recorders) / len(recorders) / seconds
    return [
        Measure(
            name="trees_per_second_ratio",
            value=slow_seconds / seconds,
            unit="x",
            goal=">= 20",
            note=f"{len(trees) / seconds:.3g} trees/s of {replies / len(trees):.0f} replies each with {len(recorders)} "
            "workers, against "
            f"{len(trees) / slow_seconds:.3g} with one request at a time and replay over HTTP ({len(chosen)} of them; "
            f"{ways}: the faster counts)",
        ),
        Measure(name="collection_tokens_per_second", value=rate, unit="tokens/s", note="sampled, prompts not counted"),
        Measure(
            name="collection_share_of_engine_limit",
            value=100 * rate / limit,
            unit="%",
            goal=">= 70",
            note=f"{rate:,.0f} tokens/s against {limit:,.0f} for the same requests in full batches",
        ),
        Measure(
            name="collection_time_outside_generation",
            value=100 * share_outside,
            unit="%",
            goal="<= 5",
            note=f"of {seconds:.1f} s, in which the model was loaded and {len(trees)} trees were grown and stored",
        ),
    ]


def _load(recipe: Recipe) -> TransformersModel | Workers:
    model = recipe.model
    loading = LoadCommand(
        path=Path(model.path),
        dtype=model.dtype,
        device=model.device,
        max_batch=model.max_batch,
        context_length=model.context_length,
        prefix_cache_bytes=int(model.prefix_cache_gib * 2**30),
        at=None,
    )
    return load_local(loading, num_workers=model.workers)


async def _engine_seconds(recipe: Recipe, recorders: Sequence[Recorder], clock: Clock) -> float:
    """Return how long the model takes for requests in full batches, in their order and from an
    empty cache, each worker with its own.
    """
    model = _load(recipe)
    members: Sequence[TransformersModel | Worker] = model.workers if isinstance(model, Workers) else [model]
    size = recipe.model.max_batch // len(members)

    async def answer(member: TransformersModel | Worker, requests: Sequence[Request]) -> None:
        for batch in _batches(requests, size):
            await member.generate(batch)

    start = clock()
    await asyncio.gather(
        *(answer(member, recorder.requests) for member, recorder in zip(members, recorders, strict=True))
    )
    seconds = clock() - start
    await model.close()
    return seconds


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    batch: list[Request] = []
    for request in requests:
        if batch and sum(r.n for r in batch) + request.n > size:
            yield batch
            batch = []
        batch.append(request)
    yield batch


async def _published_seconds_per_reply(
    recipe: Recipe, recorders: Sequence[Recorder], trees: Sequence[Tree], clock: Clock
) -> dict[int, float]:
    """Return the seconds of a reply by the number of threads; small products are often faster with
    one.

    A tree beforehand, uncounted, pays for what only the first replies of a model need.
    """
    replies_by_request = {
        (request.session, request.seed): replies
        for recorder in recorders
        for request, replies in zip(recorder.requests, recorder.replies, strict=True)
    }
    device = torch.device("cpu" if recipe.model.device == "auto" else recipe.model.device)
    usual = torch.get_num_threads()
    seconds = {}
    for threads in sorted({1, usual}):
        sampler = OneByOne(
            Path(recipe.model.path),
            load_renderer(Path(recipe.model.path)),
            replies_by_request,
            dtype=recipe.model.dtype,
            device=device,
            threads=threads,
        )
        with environment_server() as url:
            await grow_one_by_one(trees[:1], recipe.search, sampler, url, clock)
            sampler.replies = 0
            seconds[threads] = await grow_one_by_one(trees, recipe.search, sampler, url, clock) / sampler.replies
    torch.set_num_threads(usual)
    return seconds
