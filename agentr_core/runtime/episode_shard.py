"""Episodes to play as a shard: of an evaluation, or rollouts on training instances."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass, replace

from agentr_core.episodes.shared import SharedEnvironments
from agentr_core.evaluation.episodes import EpisodePlan, EpisodeResult
from agentr_core.evaluation.episodes import evaluate as play_all
from agentr_core.fingerprint import fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.runtime.equipment import Checkpoint, Equipment, Progress, Sink, held_back, in_flight, speed, window
from agentr_core.runtime.shards import Effort
from agentr_core.store.codec import Draw, episode_rows, trajectory_rows
from agentr_core.store.tables import Rows
from agentr_core.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShard:
    """Episodes of one stage that are not played yet, as its recipe samples. See `shards.Shard`.

    Those of no evaluation (`evaluation_id` is empty) are kept as rollouts.
    """

    stage: str
    evaluation_id: str
    name: str
    iteration: int
    checkpoint: Checkpoint
    plans: tuple[EpisodePlan, ...]
    sampling: Sampling
    max_steps: int
    repeats: int = 0
    done: int
    total: int

    def __len__(self) -> int:
        return len(self.plans)

    def split(self, size: int) -> tuple[EpisodeShard, ...]:
        """Return the same episodes as shards of at most `size`."""
        anywhere = replace(self, checkpoint=self.checkpoint.absolute())
        return tuple(
            replace(anywhere, plans=self.plans[start : start + size]) for start in range(0, len(self.plans), size)
        )

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Play the episodes; `sink` is given the rows of each. Raises as `shards.Shard.work`."""
        async with equipment.sampling(self.checkpoint.path) as batcher:
            effort = await self.play(equipment, sink, batcher)
            return effort + sampled(batcher)

    async def play(self, equipment: Equipment, sink: Sink, batcher: Sampler) -> Effort:
        """Play the episodes with a sampler that others may use, too; what sampling took is not in
        the effort.
        """
        recipe = equipment.recipe
        iteration_id = equipment.iteration_id(self.iteration)
        done = self.done

        def take(result: EpisodeResult) -> None:
            nonlocal done
            done += 1
            sink.add(self._rows(result, iteration_id))
            equipment.progress(done, self.total, f"episodes of {self.name}, {speed(batcher)}")

        with closing(SharedEnvironments(equipment.make_environment)) as environments:
            results = await play_all(
                self.plans,
                environments,
                held_back(batcher, sink),
                max_steps=self.max_steps,
                repeats=self.repeats,
                sampling=self.sampling,
                errors=recipe.errors,
                concurrency=in_flight(batcher, 1, wanted=recipe.scale.concurrency),
                fits=window(recipe, batcher, self.sampling),
                on_error=equipment.on_error(sink, self.stage, self.iteration),
                on_result=take,
                total=self.total,
            )
        return Effort(
            environment_seconds=sum(result.environment_seconds for result in results.values()),
            lost=len(self.plans) - len(results),
        )

    def _rows(self, result: EpisodeResult, iteration_id: str) -> Rows:
        plan = result.plan
        start = len(plan.prefix)
        draws = {
            start + position: Draw(seed=reply.seed, number=0, generation=reply.generation)
            for position, reply in enumerate(result.replies)
        }
        if not self.evaluation_id:
            return trajectory_rows(
                rollout_id(iteration_id, self.checkpoint.id, plan),
                result.trajectory,
                source="rollout",
                iteration_id=iteration_id,
                draws=draws,
            )
        return episode_rows(
            fingerprint("episode", self.evaluation_id, plan.key),
            result.trajectory,
            evaluation_id=self.evaluation_id,
            iteration_id=iteration_id,
            repeat=plan.number,
            cut=start,
            invalid_actions=result.invalid_actions,
            environment_seconds=result.environment_seconds,
            sampling_seconds=result.sampling_seconds,
            draws=draws,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShards:
    """Episodes of several evaluations of one checkpoint, played at the same time so that batches
    stay full.
    """

    parts: tuple[EpisodeShard, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that plays."""
        return self.parts[0].checkpoint

    @property
    def done(self) -> int:
        """Episodes that were played before."""
        return sum(part.done for part in self.parts)

    @property
    def total(self) -> int:
        """Episodes of all evaluations."""
        return sum(part.total for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def split(self, size: int) -> tuple[EpisodeShards, ...]:
        """Return the same episodes as shards of at most `size`, each of one evaluation."""
        return tuple(EpisodeShards(parts=(piece,)) for part in self.parts for piece in part.split(size))

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Play the episodes; `sink` is given the rows of each. Raises as `shards.Shard.work`."""
        async with equipment.sampling(self.checkpoint.path) as batcher:
            done = {part.name: part.done for part in self.parts}

            def counted(name: str) -> Progress:
                def progress(number: int, total: int, note: str) -> None:
                    done[name] = number
                    equipment.progress(sum(done.values()), self.total, f"held-out episodes, {speed(batcher)}")

                return progress

            try:
                async with asyncio.TaskGroup() as group:
                    playing = [
                        group.create_task(part.play(replace(equipment, progress=counted(part.name)), sink, batcher))
                        for part in self.parts
                    ]
            except ExceptionGroup as faults:
                # The first one ended the others.
                raise faults.exceptions[0] from None
            return sum((task.result() for task in playing), sampled(batcher))


def sampled(batcher: Sampler) -> Effort:
    """Return what a sampler has spent so far."""
    stats = batcher.stats()
    return Effort(generate_seconds=stats.generate_seconds, tokens=stats.completion_tokens)


def rollout_id(iteration_id: str, checkpoint_id: str, plan: EpisodePlan) -> str:
    """Return the id of the trajectory of a rollout: who played which episode of which iteration."""
    return fingerprint("rollout", iteration_id, checkpoint_id, plan.key)
