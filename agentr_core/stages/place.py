"""Where a stage works: the recipe, the store, and how environments and models are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentr_core.config import Recipe
from agentr_core.errors import DataFault
from agentr_core.fingerprint import fingerprint
from agentr_core.models.batching import Batcher
from agentr_core.pool import UnitError
from agentr_core.protocols import ChatModel, Environment
from agentr_core.store import Store, Writer
from agentr_core.store.codec import timing_rows
from agentr_core.store.tables import Rows

Progress = Callable[[int, int, str], None]
"""Is told (done, total, note) as a stage goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model directory that the store knows. The model a run starts from is a checkpoint too."""

    id: str
    path: Path
    weights_sha256: str


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """All that a stage needs; made by the caller, who knows which adapters the recipe names."""

    recipe: Recipe
    run_id: str
    root: Path
    """Folder of the store, checkpoints and reports."""
    store: Store
    make_environment: Callable[[], Environment]
    load_model: Callable[[Path], ChatModel]
    progress: Progress

    def iteration_id(self, iteration: int) -> str:
        """Return the id of an iteration; 0 is the evaluation of the model the run starts from."""
        return fingerprint("iteration", self.run_id, iteration)

    def policy(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that acts in an iteration: the one that the iteration before it made.

        Raises `DataFault` when there is none yet.
        """
        return self.trained(iteration - 1)

    def trained(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that an iteration made; for 0, the model the run starts from.

        Raises `DataFault` when there is none yet.
        """
        row = self.one(
            "select c.checkpoint_id, c.path, c.weights_sha256 from iteration i "
            "join checkpoint c on c.checkpoint_id = i.checkpoint_out where i.iteration_id = ?",
            self.iteration_id(iteration),
        )
        if row is None:
            raise DataFault(f"run {self.run_id} has no checkpoint of iteration {iteration} yet; run its training first")
        return Checkpoint(id=row[0], path=Path(row[1]), weights_sha256=row[2])

    def one(self, sql: str, *params: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None."""
        rows = self.all(sql, *params)
        return rows[0] if rows else None

    def all(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self.store.reading() as con:
            found: list[tuple[Any, ...]] = con.execute(sql, list(params)).fetchall()
        return found

    @asynccontextmanager
    async def sampling(self, path: Path) -> AsyncIterator[Batcher]:
        """Lend a batcher on the model in a directory for the length of the block."""
        model = await asyncio.to_thread(self.load_model, path)
        batcher = Batcher(model, max_batch=self.recipe.model.max_batch)
        try:
            yield batcher
        finally:
            await batcher.close()
            await model.close()

    @contextmanager
    def timed(self, stage: str, iteration: int) -> Iterator[Clock]:
        """Measure a stage: what its clock was told, and the rest of the wall time as "other", go to the store."""
        clock = Clock()
        started = time.perf_counter()
        try:
            yield clock
        finally:
            spent = time.perf_counter() - started
            parts = {**clock.seconds, "other": max(0.0, spent - sum(clock.seconds.values()))}
            self.store.write(timing_rows(self.iteration_id(iteration), stage, parts, tokens=clock.tokens))

    def on_error(self, writer: Writer, stage: str, iteration: int) -> Callable[[UnitError], None]:
        """Return what stores a failed try of a unit as an event."""
        return lambda error: writer.add(_event(error, self.run_id, self.iteration_id(iteration), stage))


@dataclass(slots=True)
class Clock:
    """Seconds of a stage by part: generate, environment, train, store; and the tokens generated or trained in it."""

    seconds: dict[Any, float] = field(default_factory=dict)
    tokens: int | None = None

    def add(self, parts: Mapping[str, float]) -> None:
        """Add seconds to parts."""
        for part, value in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + value

    def add_batcher(self, batcher: Batcher) -> None:
        """Add what a batcher has spent so far; call it once, at the end."""
        stats = batcher.stats()
        self.add({"generate": stats.generate_seconds})
        self.tokens = (self.tokens or 0) + stats.completion_tokens


def _event(error: UnitError, run_id: str, iteration_id: str, stage: str) -> Rows:
    """Return the row of a failed try: an error if it was the last one, else a warning."""
    return {
        "event": [
            {
                "event_id": fingerprint(run_id, iteration_id, stage, error, time.time_ns()),
                "run_id": run_id,
                "iteration_id": iteration_id,
                "stage": stage,
                "level": "error" if error.final else "warning",
                "class": error.kind,
                "phase": error.phase,
                "subject": error.key,
                "message": error.message,
                "traceback": error.traceback,
            }
        ]
    }
