"""Trees to grow as a shard: each starts at its root, or where an earlier try stopped."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

from agentr_core import answers
from agentr_core.episodes.asking import Helper
from agentr_core.episodes.replay import diverged
from agentr_core.episodes.shared import SharedEnvironments
from agentr_core.episodes.steps import EpisodeTimer, call
from agentr_core.episodes.units import UnitError, phase, phase_of, run_all
from agentr_core.errors import ReplayDiverged, ReplayDrifted
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.sampling import sampling_of
from agentr_core.repeating import repeatability_of, repeats
from agentr_core.runtime.equipment import Checkpoint, Equipment, Sink, following, held_back, in_flight, speed, window
from agentr_core.runtime.helpers import helpers
from agentr_core.runtime.shards import Effort, spent
from agentr_core.search.grow import grow
from agentr_core.search.tree import Arena, Expansion, grown
from agentr_core.store.codec.trees import TreeHead, finished_rows, growth_rows, tree_rows
from agentr_core.types import Instance, Tree

STAGE = "collect"
MAX_RESTARTS = 20
"""How often a tree is restarted in a world that is not reproducible before the tree counts as
failed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWork:
    """A tree to grow; `begun` is the part of it that is stored. `first_id` is the id that it had
    before it was first restarted.
    """

    tree_id: str
    first_id: str
    instance: Instance
    begun: Tree | None = None


def restarted(first_id: str, number: int) -> str:
    """Return the id of a tree after `number` restarts; with 0, its id as first begun."""
    return fingerprint("restarted tree", first_id, number) if number else first_id


def restarts_of(work: TreeWork) -> int:
    """Return how often a tree has been restarted."""
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
        with closing(SharedEnvironments(equipment.make_environment)) as environments:
            async with (
                equipment.sampling(self.checkpoint.path, self.checkpoint.role) as sampler,
                helpers(equipment, self.checkpoint.path, sampler, sink) as aside,
            ):
                trees = _Trees(
                    shard=self,
                    equipment=equipment,
                    sink=sink,
                    environments=environments,
                    sampler=sampler,
                    helper=aside.ask,
                )
                async with following(sampler, trees.show):
                    finished = await run_all(
                        self.trees,
                        trees.grow,
                        key=lambda work: work.instance.key,
                        errors=recipe.errors,
                        on_error=equipment.on_error(sink, STAGE, self.iteration),
                        concurrency=in_flight(sampler, recipe.search.width, wanted=recipe.scale.concurrency),
                        on_result=lambda *_: trees.show(1),
                        total=self.total,
                    )
                effort = spent(sampler) + aside.effort()
        return effort + Effort(
            environment_seconds=sum(timer.environment_seconds for timer in trees.timers),
            lost=len(self.trees) - len(finished),
        )


class _Trees:
    """The trees of a shard while they grow: what is kept of each, and how often it was
    restarted.
    """

    def __init__(
        self,
        *,
        shard: TreeShard,
        equipment: Equipment,
        sink: Sink,
        environments: SharedEnvironments,
        sampler: Sampler,
        helper: Helper,
    ) -> None:
        self._shard = shard
        self._equipment = equipment
        self._sink = sink
        self._environments = environments
        self._sampler = sampler
        self._helper = helper
        self._sample = held_back(sampler, sink)
        self._latest = {work.first_id: work.begun for work in shard.trees}
        self._ids = {work.first_id: work.tree_id for work in shard.trees}
        self._restarts = {work.first_id: restarts_of(work) for work in shard.trees}
        self._done = shard.done
        self.timers: list[EpisodeTimer] = []

    def show(self, finished: int = 0) -> None:
        """Report progress, with `finished` more trees done."""
        self._done += finished
        self._equipment.progress(self._done, self._shard.total, f"trees, {speed(self._sampler)}")

    async def grow(self, work: TreeWork) -> None:
        """Grow a tree to its end; restart it if its world does not repeat itself."""
        for attempt in count(1):
            try:
                return await self._grow_on(work)
            except ReplayDiverged as error:
                self._begin_anew(work, error, attempt)

    def _begin_anew(self, work: TreeWork, error: ReplayDiverged, attempt: int) -> None:
        """Leave the stored part of a tree as it is, and let a new tree take its place."""
        # A tree begun by another process may belong to another version of its world. If a tree of
        # this process diverges in a world that promises exact repetition, that world is broken.
        foreign = attempt == 1 and work.begun is not None
        restarts = self._restarts[work.first_id]
        if restarts >= MAX_RESTARTS or not (foreign or isinstance(error, ReplayDrifted)):
            raise error
        again = restarted(work.first_id, restarts + 1)
        self._restarts[work.first_id] = restarts + 1
        self._ids[work.first_id] = again
        self._latest[work.first_id] = None
        self._equipment.on_error(self._sink, STAGE, self._shard.iteration)(
            UnitError(
                key=work.instance.key,
                kind="TreeBegunAnew",
                phase=phase_of(error),
                message=f"the tree is grown anew from its root, as {again}: {error}",
                traceback="",
                final=False,
            )
        )

    async def _grow_on(self, work: TreeWork) -> None:
        """Grow a tree from what the last try kept of it: a restart would lose kept nodes."""
        search = self._equipment.recipe.in_world(work.instance.environment).search
        self.timers.append(timer := EpisodeTimer())
        async with self._environments.lend(work.instance) as env:
            first = await self._first_observation(work, env, timer)
            head = self._head(work, first)
            start = self._latest[work.first_id]
            if start is None:
                start = Arena(instance=work.instance, first_observation=first, seed=head.seed).tree()
                self._sink.add(tree_rows(head, start))
                self._latest[work.first_id] = start

            def take(expansion: Expansion) -> None:
                self._sink.add(growth_rows(head, expansion))
                self._latest[work.first_id] = grown(self._latest[work.first_id] or start, expansion)
                self.show()

            tree = await grow(
                work.instance,
                env,
                self._sample,
                search,
                seed=head.seed,
                tree=start,
                fits=window(self._equipment.recipe, self._sampler, sampling_of(search)),
                on_expansion=take,
                timer=timer,
                helper=self._helper,
            )
            self._sink.add(finished_rows(head, tree))
            del self._latest[work.first_id]

    async def _first_observation(self, work: TreeWork, env: Environment, timer: EpisodeTimer) -> str:
        """Return the text at the root. Raises `ReplayDiverged` if it has changed."""
        stored = self._latest[work.first_id]
        if stored is not None and len(stored.nodes) > 1:
            return stored.first_observation
        # A tree that is only a root is grown from the environment's current state.
        with phase("reset"):
            first = await call(env, timer, lambda: answers.reset(env, work.instance))
        if stored is None:
            return first
        if not repeats(first, stored.first_observation, repeatability_of(env)):
            raise diverged(
                env,
                f"{work.instance.key} began with {stored.first_observation!r} when its tree was stored, and now with "
                f"{first!r}",
            )
        return stored.first_observation

    def _head(self, work: TreeWork, first_observation: str) -> TreeHead:
        iteration = self._shard.iteration
        recipe = self._equipment.recipe
        return TreeHead(
            tree_id=self._ids[work.first_id],
            iteration_id=self._equipment.iteration_id(iteration),
            checkpoint_id=self._shard.checkpoint.id,
            config=recipe.in_world(work.instance.environment).search,
            instance=work.instance,
            first_observation=first_observation,
            seed=derive_seed(recipe.seed, "tree", iteration, work.instance.key),
            writer=self._shard.writer,
        )
