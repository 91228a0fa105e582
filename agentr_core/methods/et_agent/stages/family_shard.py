"""Questions of a flywheel as a shard: each starts with its first trajectory, or where an earlier
try stopped.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from agentr_core.episodes.shared import SharedEnvironments
from agentr_core.episodes.steps import EpisodeTimer
from agentr_core.episodes.units import run_all
from agentr_core.methods.et_agent.stages.family_maker import STAGE, FamilyMaker, FamilyWork, Known
from agentr_core.runtime.equipment import Checkpoint, Equipment, Sink, following, in_flight, speed
from agentr_core.runtime.helpers import helpers
from agentr_core.runtime.shards import Effort, spent


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyShard:
    """Questions of one iteration. See `shards.Shard`."""

    iteration: int
    checkpoint: Checkpoint
    families: tuple[FamilyWork, ...]
    done: int
    total: int

    def __len__(self) -> int:
        return len(self.families)

    def split(self, size: int) -> tuple[FamilyShard, ...]:
        """Return the same questions as shards of at most `size`."""
        anywhere = replace(self, checkpoint=self.checkpoint.absolute())
        return tuple(
            replace(anywhere, families=self.families[start : start + size])
            for start in range(0, len(self.families), size)
        )

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Grow the families; `sink` is given the rows of each child and each model answer. Raises
        as `shards.Shard.work`.
        """
        recipe, path, timer = equipment.recipe, self.checkpoint.path, EpisodeTimer()
        done = self.done

        def ended(*_: object) -> None:
            nonlocal done
            done += 1
            show()

        def show() -> None:
            equipment.progress(done, self.total, f"questions, {speed(sampler)}")

        with closing(SharedEnvironments(equipment.make_environment)) as environments:
            async with (
                equipment.sampling(path, self.checkpoint.role) as sampler,
                helpers(equipment, path, sampler, sink) as aside,
                following(sampler, show),
            ):
                maker = FamilyMaker(
                    self.iteration, self.checkpoint, equipment, sink, environments, sampler, aside.ask, timer
                )
                known = {work.family_id: Known(work) for work in self.families}
                grown = await run_all(
                    self.families,
                    lambda work: maker.grow(known[work.family_id]),
                    key=lambda work: work.instance.key,
                    errors=recipe.errors,
                    on_error=equipment.on_error(sink, STAGE, self.iteration),
                    concurrency=in_flight(sampler, 1, wanted=recipe.scale.concurrency),
                    on_result=ended,
                    total=self.total,
                )
                effort = spent(sampler) + aside.effort()
        lost = len(self.families) - len(grown)
        return effort + Effort(environment_seconds=timer.environment_seconds, lost=lost)
