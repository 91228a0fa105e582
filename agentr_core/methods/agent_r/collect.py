"""Collection: grow a tree for each training instance, and store it expansion by expansion."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from uuid import uuid4

from agentr_core.environment import Environment, Repeatability, repeats
from agentr_core.episodes.rollout import EpisodeTimer, Helper, SharedEnvironments, call, diverged
from agentr_core.episodes.units import UnitError, phase, phase_of, run_all
from agentr_core.errors import DataFault, ReplayDiverged, ReplayDrifted
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.equipment import (
    Checkpoint,
    Effort,
    Equipment,
    Sink,
    following,
    held_back,
    in_flight,
    speed,
    spent,
    window,
)
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Workplace, helpers
from agentr_core.search.grow import grow
from agentr_core.search.tree import Arena, Expansion, apply_expansion
from agentr_core.stages.demonstrate import need_expert
from agentr_core.stages.regrade import check_scoring
from agentr_core.store.codec import trajectories as codec
from agentr_core.store.codec.trajectories import (
    claim_trees,
    copy_trees,
    finished_rows,
    growth_rows,
    load_trees,
    runs_alike,
    stored_trees,
    tree_rows,
    unfinished_trees,
)
from agentr_core.store.database import Store
from agentr_core.store.tables import TreeHead
from agentr_core.types import Instance, Tree

# The trees of a shard, each grown from its root or from where an earlier try stopped.

STAGE = "collect"
MAX_RESTARTS = 20
"""How often a tree may be restarted, in an environment that does not repeat itself, before it
counts as failed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWork:
    """A tree to grow. `begun` is the part of it that is stored, None if nothing is. `first_id` is
    the id that it had before any restart; without a restart, it equals `tree_id`.
    """

    tree_id: str
    first_id: str
    instance: Instance
    begun: Tree | None = None


def restarted(first_id: str, number: int) -> str:
    """Return the id of a tree after `number` restarts; with 0, return `first_id`."""
    return fingerprint("restarted tree", first_id, number) if number else first_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShard:
    """Unfinished trees of one iteration, claimed by the process `writer`. See `equipment.Shard`."""

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
        `equipment.Shard.work`.
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
                    results = await run_all(
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
            lost=len(self.trees) - len(results),
        )


class _Trees:
    """The state of a shard's trees while they grow: the latest version of each tree, its current
    id, and how often it was restarted.
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
        self._restarts = {
            work.first_id: next(n for n in range(MAX_RESTARTS + 1) if restarted(work.first_id, n) == work.tree_id)
            for work in shard.trees
        }
        self._done = shard.done
        self._resumed = shard.done > 0 or any(work.begun is not None for work in shard.trees)
        self.timers: list[EpisodeTimer] = []

    def show(self, increment: int = 0) -> None:
        """Report progress, with `increment` more trees done."""
        self._done += increment
        self._equipment.progress(self._done, self._shard.total, f"trees, {speed(self._sampler, resumed=self._resumed)}")

    async def grow(self, work: TreeWork) -> None:
        """Grow a tree to its end. Restart it, at most `MAX_RESTARTS` times, if its environment does
        not repeat what is recorded: always if exact repetition is not promised, else only on the
        first try of a tree that another process began. Raises `ReplayDiverged` otherwise.
        """
        for attempt in count(1):
            try:
                return await self._grow_on(work)
            except ReplayDiverged as error:
                # A tree begun by another process may belong to another version of its environment.
                # If a tree of this process diverges although the environment promises exact
                # repetition, the environment is broken.
                foreign = attempt == 1 and work.begun is not None
                restarts = self._restarts[work.first_id]
                if restarts >= MAX_RESTARTS or not (foreign or isinstance(error, ReplayDrifted)):
                    raise
                # The stored part of the tree stays as it is, and a new tree takes its place.
                new_id = restarted(work.first_id, restarts + 1)
                self._restarts[work.first_id] = restarts + 1
                self._ids[work.first_id] = new_id
                self._latest[work.first_id] = None
                self._equipment.on_error(self._sink, STAGE, self._shard.iteration)(
                    UnitError(
                        key=work.instance.key,
                        kind="TreeBegunAnew",
                        phase=phase_of(error),
                        message=f"the tree is grown anew from its root, as {new_id}: {error}",
                        traceback="",
                        final=False,
                    )
                )

    async def _grow_on(self, work: TreeWork) -> None:
        """Grow a tree to its end from its latest version, so that a further try loses no nodes."""
        recipe, iteration = self._equipment.recipe, self._shard.iteration
        search = recipe.in_world(work.instance.environment).search
        self.timers.append(timer := EpisodeTimer())
        async with self._environments.lend(work.instance) as env:
            first = await self._first_observation(work, env, timer)
            head = TreeHead(
                tree_id=self._ids[work.first_id],
                iteration_id=self._equipment.iteration_id(iteration),
                checkpoint_id=self._shard.checkpoint.id,
                config=search,
                instance=work.instance,
                first_observation=first,
                seed=derive_seed(recipe.seed, "tree", iteration, work.instance.key),
                writer=self._shard.writer,
            )
            start = self._latest[work.first_id]
            if start is None:
                start = Arena(instance=work.instance, first_observation=first, seed=head.seed).tree()
                self._sink.add(tree_rows(head, start))
                self._latest[work.first_id] = start

            def take(expansion: Expansion) -> None:
                self._sink.add(growth_rows(head, expansion))
                self._latest[work.first_id] = apply_expansion(self._latest[work.first_id] or start, expansion)
                self.show()

            tree = await grow(
                work.instance,
                env,
                self._sample,
                search,
                seed=head.seed,
                tree=start,
                fits=window(recipe, self._sampler, sampling_of(search)),
                on_expansion=take,
                timer=timer,
                helper=self._helper,
            )
            self._sink.add(finished_rows(head, tree))
            del self._latest[work.first_id]

    async def _first_observation(self, work: TreeWork, env: Environment, timer: EpisodeTimer) -> str:
        """Return the first observation of a tree. If the tree has no node but its root, reset the
        environment; raise `ReplayDiverged` if it begins differently from what is recorded.
        """
        tree = self._latest[work.first_id]
        if tree is not None and len(tree.nodes) > 1:
            return tree.first_observation
        # `grow` expects a freshly reset environment for a tree that is only a root.
        with phase("reset"):
            first = await call(env, timer, lambda: env.reset(work.instance))
        if tree is None:
            return first
        if not repeats(first, tree.first_observation, Repeatability(env.repeatability)):
            raise diverged(
                env,
                f"{work.instance.key} began with {tree.first_observation!r} when its tree was stored, and now with "
                f"{first!r}",
            )
        return tree.first_observation


VERSION = 1
"""Increase it when the same configuration would give different trees."""


def check_world(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if `search.expert_start` is set and the environment has no expert."""
    search = recipe.in_world(instances[0].environment).search
    if search.expert_start:
        need_expert(env, instances, "search.expert_start")


def tree_id(place: Workplace, iteration: int, checkpoint_id: str, instance: Instance) -> str:
    """Return the id, before any restart, of the tree that an iteration grows for an instance."""
    search = place.recipe.in_world(instance.environment).search
    return fingerprint("tree", VERSION, place.iteration_id(iteration), checkpoint_id, instance.key, search)


def tree_ids(place: Workplace, iteration: int, instances: Sequence[Instance]) -> dict[str, Instance]:
    """Return the instance of each tree that an iteration needs, by the id of the tree's latest
    restart. Raises `DataFault` if there is no policy.
    """
    collector = place.collector(iteration)
    by_first_id = {tree_id(place, iteration, collector.id, instance): instance for instance in instances}
    return dict(zip(latest_restarts(place.store, list(by_first_id)), by_first_id.values(), strict=True))


def latest_restarts(store: Store, tree_ids: Sequence[str]) -> list[str]:
    """Return the id of the latest stored restart of each tree, or its own id if there is none, in
    the order of `tree_ids`.
    """
    later = {key: [restarted(key, number) for number in range(MAX_RESTARTS, 0, -1)] for key in tree_ids}
    existing = stored_trees(store, [key for keys in later.values() for key in keys])
    return [next((key for key in later[first_id] if key in existing), first_id) for first_id in tree_ids]


def finished_trees(place: Workplace, iteration: int) -> dict[str, Tree]:
    """Return the trees of an iteration whose search is finished, by tree id; trees lost to errors
    are left out.
    """
    collector = place.collector(iteration)
    return load_trees(place.store, codec.finished_trees(place.store, place.iteration_id(iteration), collector.id))


async def collect(place: Workplace, iteration: int) -> dict[str, Any]:
    """Grow the missing and the unfinished trees of an iteration. Return the numbers of `trees` that
    the iteration needs, of `new` ones (worked on by this call, lost ones included), and of `copied`
    ones, if any.

    Finished trees of another run with the same inputs are copied first. A run that makes samples
    from a comparison's trees only copies: trees that the comparison lost are not in `trees`.

    Raises:
        ConfigError: the recipe's `data.scoring` names a scoring that does not exist.
        ErrorBudgetSpent: more trees failed than the recipe allows; what was grown is kept.
        DataFault: training and test instances overlap, the policy is missing, or the comparison has
            no tree that was grown with the same inputs.
        RunBusy: another process is growing one of the trees.
        WorkerLost: the cluster lost one worker after another; what was stored is kept.
    """
    check_scoring(place)
    instances = tree_ids(place, iteration, await separate_instances(place, iteration))
    collector, copies = place.collector(iteration), 0
    # Copy finished trees that the iteration lacks from runs with the same search inputs.
    for run in runs_alike(place.store, place.run_id, STAGE):
        stored_now = stored_trees(place.store, list(instances))
        absent = {key: instance for key, instance in instances.items() if key not in stored_now}
        if not absent:
            break
        other_run = replace(place, run_id=run)
        first_ids = [tree_id(other_run, iteration, collector.id, instance) for instance in absent.values()]
        originals = dict(zip(absent, latest_restarts(place.store, first_ids), strict=True))
        copies += len(copy_trees(place.store, originals, iteration_id=place.iteration_id(iteration)))
    unfinished_ids = unfinished_trees(place.store, list(instances))
    if place.recipe.compare.trees:
        trees = len(instances) - len(unfinished_ids)
        if not trees:
            raise DataFault(
                f"comparison {place.recipe.compare.trees} has no tree that was grown with the inputs of run "
                f"{place.run_id}, which makes samples of its trees; begin a new comparison, with another seed"
            )
        return {"trees": trees, "new": 0, "copied": copies}
    missing_ids, unfinished_count = unfinished_ids[: place.limit], len(unfinished_ids)
    if missing_ids:
        # The run's lock keeps other processes out, except on file systems where locks do not work;
        # the mark does so everywhere.
        mark = f"{platform.node()}/{os.getpid()}/{uuid4().hex[:8]}"
        claim_trees(place.store, missing_ids, mark)
        partial_trees = load_trees(place.store, missing_ids)
        shard = TreeShard(
            iteration=iteration,
            checkpoint=collector,
            trees=tuple(
                TreeWork(
                    tree_id=key,
                    first_id=tree_id(place, iteration, collector.id, instances[key]),
                    instance=instances[key],
                    begun=partial_trees.get(key),
                )
                for key in missing_ids
            ),
            done=len(instances) - unfinished_count,
            total=len(instances) - unfinished_count + len(missing_ids),
            writer=mark,
        )
        await place.work_through(shard, STAGE, iteration, "trees")
    return {"trees": len(instances), "new": len(missing_ids)} | ({"copied": copies} if copies else {})
