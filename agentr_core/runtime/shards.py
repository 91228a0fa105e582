"""Shards: work that can be done anywhere, because it contains all it needs and returns all it makes
as rows.

A stage looks up in the store what is missing and makes one shard of it. In this process, the shard
is worked through at once and its rows are stored as they are made. If there are workers, the shard
is split; each worker returns the rows of its part together, and they are stored here as they
arrive. So there is only one writer, and a worker that is lost loses only the part it was working
on.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, Self

from agentr_core.episodes.units import allowed_losses
from agentr_core.errors import AgentrError, ErrorBudgetSpent, ModelDirectoryError, Transient
from agentr_core.models.files import weights_sha256
from agentr_core.models.samplers import Sampler
from agentr_core.runtime.equipment import Checkpoint, Equipment, Sink
from agentr_core.store.database import Writer
from agentr_core.store.tables import TABLES, Rows, merge, settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The time and tokens that the work of a shard took, and how many of its units were lost to
    errors.

    `environment_seconds` of a part of the work are summed over its episodes; those of a whole shard
    are what its process waited for an environment while no reply was generated.
    """

    generate_seconds: float = 0.0
    environment_seconds: float = 0.0
    tokens: int = 0
    lost: int = 0

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            generate_seconds=self.generate_seconds + other.generate_seconds,
            environment_seconds=self.environment_seconds + other.environment_seconds,
            tokens=self.tokens + other.tokens,
            lost=self.lost + other.lost,
        )


def spent(*samplers: Sampler) -> Effort:
    """Return what samplers have spent so far."""
    stats = [sampler.stats() for sampler in samplers]
    return Effort(
        generate_seconds=sum(one.generate_seconds for one in stats), tokens=sum(one.completion_tokens for one in stats)
    )


class Shard(Protocol):
    """Trees to grow or episodes to play by one checkpoint: plain data, which can be pickled."""

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def done(self) -> int:
        """Units of the whole stage that were done before."""
        ...

    @property
    def total(self) -> int:
        """Units of the whole stage."""
        ...

    def __len__(self) -> int:
        """Return the number of units to work on."""
        ...

    def split(self, size: int) -> Sequence[Self]:
        """Return the same work as shards of at most `size` units."""
        ...

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Do the work; `sink` is given each unit of rows as soon as it is made.

        Raises `ErrorBudgetSpent` when more units are lost than the whole stage may lose, and
        `UserError` at once.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows, as one unit, that a worker returns for a shard of `units` units. `fault` is the
    error that ended its work early.
    """

    rows: Rows
    units: int
    effort: Effort
    worker: str
    fault: AgentrError | None = None


Spread = Callable[[Sequence[Shard]], AsyncGenerator[Batch, None]]
"""Hands shards to workers and yields what each returns, in the order in which they are done. Raises
`WorkerLost`.
"""


class _Pile:
    """The rows of a shard until they are sent back; `scale.shard_size` bounds them."""

    def __init__(self) -> None:
        self.units: list[Rows] = []

    def add(self, unit: Rows) -> None:
        self.units.append(unit)

    async def room(self) -> None:
        pass


async def work_through(shard: Shard, equipment: Equipment) -> Batch:
    """Return the rows of a shard as a batch; this is the work of a worker.

    Transient errors are raised, others are returned in the batch.

    A model directory with other weights than those of the checkpoint is an error: paths mean
    something else on another machine.
    """
    pile = _Pile()
    effort = Effort()
    fault: AgentrError | None = None
    try:
        checkpoint = shard.checkpoint
        if checkpoint.path.is_dir() and weights_sha256(checkpoint.path) != checkpoint.weights_sha256:
            raise ModelDirectoryError(
                f"{checkpoint.path} does not hold the weights of checkpoint {checkpoint.id} "
                f"({checkpoint.weights_sha256[:12]}); copy the model there again, or share the folder between the "
                "machines"
            )
        effort = await _work(shard, equipment, pile)
    except AgentrError as error:
        if isinstance(error, Transient):
            raise
        fault = error
    rows = {table: settled(table, rows, TABLES[table].mutable) for table, rows in merge(pile.units).items()}
    return Batch(rows=rows, units=len(shard), effort=effort, worker=f"{platform.node()}/{os.getpid()}", fault=fault)


async def carry_out(shard: Shard, equipment: Equipment, spread: Spread | None, writer: Writer, what: str) -> Effort:
    """Have a shard worked through, here or by workers, and its rows stored; return what it took.

    Args:
        spread: hands parts of the shard to workers; without it the work is done here.
        what: the units of the shard, as a word for progress lines.

    Raises:
        ErrorBudgetSpent: more units were lost than the recipe allows; what was made is stored.
        WorkerLost: workers were lost again and again at the same part.
        UserError: as the work raises it; what was made is stored.
    """
    if spread is None:
        return await _work(shard, equipment, writer)
    recipe = equipment.recipe
    parts = shard.split(recipe.scale.shard_size)
    allowed = allowed_losses(recipe.errors, shard.total)
    effort, returned, done = Effort(), 0, shard.done
    equipment.progress(done, shard.total, f"{what}, {len(parts)} shards")
    async with aclosing(spread(parts)) as batches:
        async for batch in batches:
            writer.add(batch.rows)
            await writer.flush()
            if batch.fault is not None:
                raise type(batch.fault)(f"worker {batch.worker}: {batch.fault}")
            effort += batch.effort
            if effort.lost > allowed:
                raise ErrorBudgetSpent(
                    f"{effort.lost} of {shard.total} {what} failed on the workers and {allowed} may; table event has "
                    f"the errors; fix the cause, or raise errors.budget ({recipe.errors.budget})"
                )
            returned += 1
            done += batch.units - batch.effort.lost
            equipment.progress(
                done, shard.total, f"{what}, {returned} of {len(parts)} shards, {effort.tokens} tokens generated"
            )
    return effort


async def _work(shard: Shard, equipment: Equipment, sink: Sink) -> Effort:
    """Do the work of a shard in this process; return what it took of the process's time."""
    started = time.perf_counter()
    effort = await shard.work(equipment, sink)
    idle = max(0.0, time.perf_counter() - started - effort.generate_seconds)
    return replace(effort, environment_seconds=min(effort.environment_seconds, idle))
