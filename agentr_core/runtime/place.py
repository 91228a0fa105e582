"""Everything a stage needs: recipe, store, factories of models and environments, and a cluster, if
there is one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from agentr_core.errors import DataFault
from agentr_core.methods.table import method_of, plan_of
from agentr_core.models.samplers import Sampler
from agentr_core.recipes import ModelRole
from agentr_core.runtime.description import Method, Plan
from agentr_core.runtime.equipment import Checkpoint, Equipment, Progress
from agentr_core.runtime.identity import teacher_of
from agentr_core.runtime.readings import Readings, readings_of
from agentr_core.runtime.shards import Effort, Shard, Spread, carry_out
from agentr_core.store import Store, Writer
from agentr_core.store.codec import started_at, timing_rows
from agentr_core.store.queries.iterations import StoredCheckpoint, checkpoint_made, checkpoint_promoted

__all__ = ["Checkpoint", "Clock", "Progress", "Workplace"]


@dataclass(frozen=True, kw_only=True)
class Workplace(Equipment):
    """Everything a stage needs; made by the caller."""

    root: Path
    """Folder of the store, checkpoints and reports."""
    store: Store
    spread: Spread | None = None
    """Hands shards to the workers of a cluster; None: everything is done in this process."""
    limit: int | None = None
    """The most trees, episodes or questions that a gathering stage begins; None: all."""

    def started_at(self) -> datetime | None:
        """Return the moment whose date chat templates print: the start of the run, or for what
        belongs to a comparison the start of its pool.

        None before the run is stored.
        """
        compare = self.recipe.compare
        return started_at(self.store, compare.pool or compare.trees or self.run_id)

    @property
    def method(self) -> Method:
        """The method of the recipe."""
        return method_of(self.recipe)

    def plan(self, iteration: int) -> Plan:
        """Return what an iteration does; iteration 0 comes before the first one."""
        return plan_of(self.recipe, iteration)

    def policy(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that acts in an iteration: the one that the previous iteration
        promoted. That is the one it made or, with `promote: best`, the best so far.

        Raises `DataFault` if there is none yet.
        """
        before = iteration - 1
        if self.recipe.promote == "last":
            return self.trained(before)
        promoted = checkpoint_promoted(self.store, self.iteration_id(before))
        if promoted is None:
            raise DataFault(
                f"run {self.run_id} has promoted no checkpoint in iteration {before} yet; evaluate it first"
            )
        return self._known(promoted)

    def collector(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that plays the training instances of an iteration: the teacher
        while it collects, else the policy. Raises as `policy`.
        """
        asked = any("teacher" in stage.roles for stage in self.plan(iteration).stages)
        teacher = teacher_of(self.recipe) if asked and self.recipe.taught(iteration) else None
        return teacher or self.policy(iteration)

    def trained(self, iteration: int) -> Checkpoint:
        """Return the checkpoint that an iteration made; for 0, the model that the run starts from.

        Raises `DataFault` if there is none yet.
        """
        made = checkpoint_made(self.store, self.iteration_id(iteration))
        if made is None:
            raise DataFault(f"run {self.run_id} has no checkpoint of iteration {iteration} yet; run its training first")
        return self._known(made)

    def _known(self, stored: StoredCheckpoint) -> Checkpoint:
        # Another run may begin with the same weights in another directory, with another chat
        # template: what this run reads is what its own recipe names.
        path = stored.path if stored.trained else Path(self.recipe.model.label)
        return Checkpoint(id=stored.checkpoint_id, path=path, weights_sha256=stored.weights_sha256)

    @contextmanager
    def timed(self, stage: str, iteration: int) -> Iterator[Clock]:
        """Measure the block as a stage. The parts that the clock was given, and the rest of the
        wall time as `other`, are stored.
        """
        clock = Clock()
        started = time.perf_counter()
        try:
            yield clock
        finally:
            spent = time.perf_counter() - started
            parts = {**clock.seconds, "other": max(0.0, spent - sum(clock.seconds.values()))}
            self.store.write(timing_rows(self.iteration_id(iteration), stage, parts, tokens=clock.tokens))

    @asynccontextmanager
    async def asking(
        self, role: ModelRole, policy: Path, stage: str, iteration: int
    ) -> AsyncIterator[tuple[Sampler, Writer, Readings]]:
        """Yield a sampler for the model of a role, as `sampling` does, a writer, and the count of
        its replies; what they take becomes a timing of the stage.
        """
        with self.timed(stage, iteration) as clock:
            async with self.sampling(policy, role) as sampler, Writer(self.store) as writer:
                with readings_of(role, sampler.model.name) as readings:
                    yield sampler, writer, readings
                clock.add_batcher(sampler)
            clock.add({"store": writer.seconds})

    async def work_through(self, shard: Shard, stage: str, iteration: int, what: str) -> None:
        """Have the work of a shard done and its rows stored; its effort becomes a timing of the
        stage.

        `what` names the units of the shard in progress lines. Raises as `shards.carry_out`.
        """
        with self.timed(stage, iteration) as clock:
            async with Writer(self.store) as writer:
                clock.add_effort(await carry_out(shard, self, self.spread, writer, what))
            clock.add({"store": writer.seconds})


@dataclass(slots=True)
class Clock:
    """Seconds of a stage by part (generate, environment, train, store), and the tokens generated or
    trained in it.

    The seconds of shards are summed over their workers.
    """

    seconds: dict[Any, float] = field(default_factory=dict)
    tokens: int | None = None

    def add(self, parts: Mapping[str, float]) -> None:
        """Add seconds to parts."""
        for part, value in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + value

    def add_batcher(self, batcher: Sampler) -> None:
        """Add what a batcher has spent so far; call it once, at the end."""
        stats = batcher.stats()
        self.add({"generate": stats.generate_seconds})
        self.tokens = (self.tokens or 0) + stats.completion_tokens

    def add_effort(self, effort: Effort) -> None:
        """Add what the work of a shard took."""
        self.add({"generate": effort.generate_seconds, "environment": effort.environment_seconds})
        self.tokens = (self.tokens or 0) + effort.tokens
