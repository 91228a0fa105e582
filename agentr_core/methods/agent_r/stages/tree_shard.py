"""Trees to grow as a shard: each one from its root, or from where an earlier try was stopped."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

from agentr_core import answers
from agentr_core.episodes.rollout import EpisodeTimer, call, diverged
from agentr_core.episodes.shared import SharedEnvironments
from agentr_core.episodes.units import UnitError, phase, phase_of, run_all
from agentr_core.errors import ReplayDiverged, ReplayDrifted
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.repeating import repeatability_of, repeats
from agentr_core.runtime.equipment import Checkpoint, Equipment, Sink, held_back, in_flight, speed, window
from agentr_core.runtime.shards import Effort
from agentr_core.search.expansion import sampling_of
from agentr_core.search.grow import grow
from agentr_core.search.tree import Arena, Expansion, grown
from agentr_core.store.codec import TreeHead, finished_rows, growth_rows, tree_rows
from agentr_core.types import Instance, Tree

STAGE = "collect"


MAX_RESTARTS = 20
"""How often a tree is begun anew in a world that does not repeat itself, before that counts as its
failure.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWork:
    """A tree to grow; `begun` is what the store has of it.

    `replaces` is the id that the tree had before it was first begun anew; empty if it never was.
    """

    tree_id: str
    instance: Instance
    begun: Tree | None = None
    replaces: str = ""

    @property
    def first_id(self) -> str:
        """The id of the tree before it was first begun anew."""
        return self.replaces or self.tree_id


def restarted(first_id: str, number: int) -> str:
    """Return the id of a tree that was begun anew for the `number`-th time; 0 is the first one."""
    return fingerprint("restarted tree", first_id, number) if number else first_id


def restarts_of(work: TreeWork) -> int:
    """Return how often a tree was begun anew so far."""
    return next(number for number in range(MAX_RESTARTS + 1) if restarted(work.first_id, number) == work.tree_id)


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
        """Grow the trees; `sink` is given the rows of each expansion. Raises as
        `shards.Shard.work`.
        """
        recipe = equipment.recipe
        timers: list[EpisodeTimer] = []
        latest = {work.first_id: work.begun for work in self.trees}
        current = {work.first_id: work.tree_id for work in self.trees}
        begun_anew = {work.first_id: restarts_of(work) for work in self.trees}
        done = self.done

        with closing(SharedEnvironments(equipment.make_environment)) as environments:
            async with equipment.sampling(self.checkpoint.path) as batcher:
                sample = held_back(batcher, sink)

                def show(finished: int = 0) -> None:
                    nonlocal done
                    done += finished
                    equipment.progress(done, self.total, f"trees, {speed(batcher)}")

                async def grow_in_turn(work: TreeWork) -> None:
                    for attempt in count(1):
                        try:
                            return await grow_one(work)
                        except ReplayDiverged as error:
                            begin_anew(work, error, attempt)

                def begin_anew(work: TreeWork, error: ReplayDiverged, attempt: int) -> None:
                    """Take back nothing: what there is of a tree stays as it is, and another takes
                    its place.
                    """
                    again = restarted(work.first_id, begun_anew[work.first_id] + 1)
                    # A tree of another process may have been begun in another version of its world;
                    # one of this process in a world that promises to repeat itself to the letter
                    # shows that the world is broken.
                    foreign = attempt == 1 and work.begun is not None
                    if begun_anew[work.first_id] >= MAX_RESTARTS or not (foreign or isinstance(error, ReplayDrifted)):
                        raise error
                    begun_anew[work.first_id] += 1
                    current[work.first_id] = again
                    latest[work.first_id] = None
                    equipment.on_error(sink, STAGE, self.iteration)(
                        UnitError(
                            key=work.instance.key,
                            kind="TreeBegunAnew",
                            phase=phase_of(error),
                            message=f"the tree is grown anew from its root, as {again}: {error}",
                            traceback="",
                            attempt=attempt,
                            transient=True,
                            final=False,
                        )
                    )

                async def grow_one(work: TreeWork) -> None:
                    instance = work.instance
                    timers.append(timer := EpisodeTimer())
                    # A further try goes on from what the last one kept: growing anew would take
                    # kept nodes back.
                    stored = latest[work.first_id]
                    async with environments.lend() as env:
                        if stored is None or len(stored.nodes) == 1:
                            # A tree that is only a root is grown from where the environment stands.
                            with phase("reset"):
                                first = await call(env, timer, lambda: answers.reset(env, instance))
                        else:
                            first = stored.first_observation
                        if stored is not None and not repeats(first, stored.first_observation, repeatability_of(env)):
                            raise diverged(
                                env,
                                f"{instance.key} began with {stored.first_observation!r} when its tree was stored, and "
                                f"now with {first!r}",
                            )
                        head = TreeHead(
                            tree_id=current[work.first_id],
                            iteration_id=equipment.iteration_id(self.iteration),
                            checkpoint_id=self.checkpoint.id,
                            config=recipe.search,
                            instance=instance,
                            first_observation=first if stored is None else stored.first_observation,
                            seed=derive_seed(recipe.seed, "tree", self.iteration, instance.key),
                            writer=self.writer,
                        )
                        if stored is None:
                            stored = Arena(instance=instance, first_observation=first, seed=head.seed).tree()
                            sink.add(tree_rows(head, stored))
                        latest[work.first_id] = start = stored

                        def take(expansion: Expansion) -> None:
                            sink.add(growth_rows(head, expansion))
                            latest[work.first_id] = grown(latest[work.first_id] or start, expansion)
                            show()

                        tree = await grow(
                            instance,
                            env,
                            sample,
                            recipe.search,
                            seed=head.seed,
                            tree=start,
                            fits=window(recipe, batcher, sampling_of(recipe.search)),
                            on_expansion=take,
                            timer=timer,
                        )
                        sink.add(finished_rows(head, tree))
                        del latest[work.first_id]

                finished = await run_all(
                    self.trees,
                    grow_in_turn,
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
