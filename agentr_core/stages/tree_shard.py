"""Trees to grow as a shard: each one from its root, or from where an earlier try was stopped."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from agentr_core import answers
from agentr_core.errors import ReplayDiverged
from agentr_core.fingerprint import derive_seed
from agentr_core.pool import EnvironmentPool, phase, run_all
from agentr_core.rollout import EpisodeTimer, call
from agentr_core.search.grow import grow
from agentr_core.search.tree import Arena, Expansion, grown
from agentr_core.stages.equipment import Checkpoint, Equipment, Sink, held_back, in_flight, speed
from agentr_core.stages.shards import Effort
from agentr_core.store.codec import TreeHead, finished_rows, growth_rows, tree_rows
from agentr_core.types import Instance, Tree

STAGE = "collect"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWork:
    """A tree to grow; `begun` is what the store has of it."""

    tree_id: str
    instance: Instance
    begun: Tree | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShard:
    """Trees of one iteration that are not finished, claimed by `writer`. See `shards.Shard`."""

    iteration: int
    checkpoint: Checkpoint
    trees: tuple[TreeWork, ...]
    done: int
    total: int
    writer: str | None = None

    def __len__(self) -> int:
        return len(self.trees)

    def split(self, size: int) -> tuple[TreeShard, ...]:
        """Return the same trees as shards of at most `size`."""
        anywhere = replace(self, checkpoint=self.checkpoint.absolute())
        return tuple(
            replace(anywhere, trees=self.trees[start : start + size]) for start in range(0, len(self.trees), size)
        )

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Grow the trees; `sink` is given the rows of each expansion. Raises as `shards.Shard.work`."""
        recipe = equipment.recipe
        timers: list[EpisodeTimer] = []
        latest = {work.tree_id: work.begun for work in self.trees}
        done = self.done

        with closing(EnvironmentPool(equipment.make_environment)) as environments:
            async with equipment.sampling(self.checkpoint.path) as batcher:
                sample = held_back(batcher, sink)

                def show(finished: int = 0) -> None:
                    nonlocal done
                    done += finished
                    equipment.progress(done, self.total, f"trees, {speed(batcher)}")

                async def tend(work: TreeWork) -> None:
                    instance = work.instance
                    timers.append(timer := EpisodeTimer())
                    # A further try goes on from what the last one kept: growing anew would take kept nodes back.
                    stored = latest[work.tree_id]
                    async with environments.lend() as env:
                        if stored is None or len(stored.nodes) == 1:
                            # A tree that is only a root is grown from where the environment stands.
                            with phase("reset"):
                                first = await call(env, timer, lambda: answers.reset(env, instance))
                        else:
                            first = stored.first_observation
                        if stored is not None and first != stored.first_observation:
                            raise ReplayDiverged(
                                f"{instance.key} began with {stored.first_observation!r} when its tree was stored, and "
                                f"now with {first!r}; use the same version of the environment, or begin a new run"
                            )
                        head = TreeHead(
                            tree_id=work.tree_id,
                            iteration_id=equipment.iteration_id(self.iteration),
                            checkpoint_id=self.checkpoint.id,
                            config=recipe.search,
                            instance=instance,
                            first_observation=first,
                            seed=derive_seed(recipe.seed, "tree", self.iteration, instance.key),
                            writer=self.writer,
                        )
                        if stored is None:
                            stored = Arena(instance=instance, first_observation=first, seed=head.seed).tree()
                            sink.add(tree_rows(head, stored))
                        latest[work.tree_id] = start = stored

                        def take(expansion: Expansion) -> None:
                            sink.add(growth_rows(head, expansion))
                            latest[work.tree_id] = grown(latest[work.tree_id] or start, expansion)
                            show()

                        tree = await grow(
                            instance,
                            env,
                            sample,
                            recipe.search,
                            seed=head.seed,
                            tree=start,
                            on_expansion=take,
                            timer=timer,
                        )
                        sink.add(finished_rows(head, tree))
                        del latest[work.tree_id]

                finished = await run_all(
                    self.trees,
                    tend,
                    key=lambda work: work.instance.key,
                    errors=recipe.errors,
                    on_error=equipment.on_error(sink, STAGE, self.iteration),
                    concurrency=in_flight(batcher, recipe.search.width, wanted=recipe.scale.concurrency),
                    on_result=lambda *_: show(1),
                    total=self.total,
                )
                stats = batcher.stats()
        return Effort(
            generate_seconds=stats.generate_seconds,
            environment_seconds=sum(timer.environment_seconds for timer in timers),
            tokens=stats.completion_tokens,
            lost=len(self.trees) - len(finished),
        )
