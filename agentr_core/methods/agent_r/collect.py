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

from agentr_core.environment import Environment, Repeatability, is_repetition
from agentr_core.episodes.rollout import EnvironmentPool, EpisodeTimer, Helper, call_env, divergence_error
from agentr_core.episodes.units import UnitError, phase, phase_of, run_all
from agentr_core.errors import DataFault, ReplayDiverged, ReplayDrifted
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext, helpers
from agentr_core.runtime.equipment import (
    Checkpoint,
    Effort,
    Equipment,
    Sink,
    call_while_generating,
    concurrency_for,
    effort_of,
    sampler_progress,
    window_test,
    with_backpressure,
)
from agentr_core.runtime.instances import chosen_instances
from agentr_core.search.grow import grow
from agentr_core.search.tree import Arena, Expansion, apply_expansion
from agentr_core.stages.demonstrate import require_expert
from agentr_core.stages.regrade import check_scoring
from agentr_core.store.codec import trajectories as codec
from agentr_core.store.codec.trajectories import (
    claim_trees,
    copy_trees,
    expansion_rows,
    finished_tree_rows,
    load_trees,
    runs_with_same_input,
    stored_tree_ids,
    tree_rows,
    unfinished_tree_ids,
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
    """A tree to grow. `partial_tree` is the part of it that is stored, None if nothing is.
    `first_id` is the id that it had before any restart; without a restart, it equals `tree_id`.
    """

    tree_id: str
    first_id: str
    instance: Instance
    partial_tree: Tree | None = None


def restarted_id(first_id: str, num_restarts: int) -> str:
    """Return the id of a tree after `num_restarts` restarts; with 0, return `first_id`."""
    return fingerprint("restarted tree", first_id, num_restarts) if num_restarts else first_id


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
        portable_shard = replace(self, checkpoint=self.checkpoint.absolute())
        return tuple(
            replace(portable_shard, trees=self.trees[start : start + size]) for start in range(0, len(self.trees), size)
        )

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        """Grow the trees; `sink` is given the rows of each expansion. Raises as
        `equipment.Shard.work`.
        """
        recipe = equipment.recipe
        with closing(EnvironmentPool(equipment.make_environment)) as environments:
            async with (
                equipment.sampling(self.checkpoint.path, self.checkpoint.role) as sampler,
                helpers(equipment, self.checkpoint.path, sampler, sink) as helper_models,
            ):
                growing_trees = _GrowingTrees(
                    shard=self,
                    equipment=equipment,
                    sink=sink,
                    environments=environments,
                    sampler=sampler,
                    helper=helper_models.ask,
                )
                async with call_while_generating(sampler, growing_trees.report_progress):
                    results = await run_all(
                        self.trees,
                        growing_trees.grow,
                        key=lambda work: work.instance.key,
                        errors=recipe.errors,
                        on_error=equipment.on_error(sink, STAGE, self.iteration),
                        concurrency=concurrency_for(sampler, recipe.search.width, configured=recipe.scale.concurrency),
                        on_result=lambda *_: growing_trees.report_progress(1),
                        num_units=self.total,
                    )
                effort = effort_of(sampler) + helper_models.effort()
        return effort + Effort(
            environment_seconds=sum(timer.environment_seconds for timer in growing_trees.timers),
            num_lost=len(self.trees) - len(results),
        )


class _GrowingTrees:
    """The state of a shard's trees while they grow: the latest version of each tree, its current
    id, and how often it was restarted.
    """

    def __init__(
        self,
        *,
        shard: TreeShard,
        equipment: Equipment,
        sink: Sink,
        environments: EnvironmentPool,
        sampler: Sampler,
        helper: Helper,
    ) -> None:
        self._shard = shard
        self._equipment = equipment
        self._sink = sink
        self._environments = environments
        self._sampler = sampler
        self._helper = helper
        self._sample = with_backpressure(sampler, sink)
        self._latest_trees = {work.first_id: work.partial_tree for work in shard.trees}
        self._current_ids = {work.first_id: work.tree_id for work in shard.trees}
        self._num_restarts = {
            work.first_id: next(n for n in range(MAX_RESTARTS + 1) if restarted_id(work.first_id, n) == work.tree_id)
            for work in shard.trees
        }
        self._num_done = shard.done
        self._is_resumed = shard.done > 0 or any(work.partial_tree is not None for work in shard.trees)
        self.timers: list[EpisodeTimer] = []

    def report_progress(self, num_new: int = 0) -> None:
        """Report progress, with `num_new` more trees done."""
        self._num_done += num_new
        self._equipment.progress(
            self._num_done, self._shard.total, f"trees, {sampler_progress(self._sampler, resumed=self._is_resumed)}"
        )

    async def grow(self, work: TreeWork) -> None:
        """Grow a tree to its end. Restart it, at most `MAX_RESTARTS` times, if its environment does
        not repeat what is recorded: always if exact repetition is not promised, else only on the
        first try of a tree that another process began. Raises `ReplayDiverged` otherwise.
        """
        for attempt in count(1):
            try:
                return await self._grow_from_latest(work)
            except ReplayDiverged as error:
                # A tree begun by another process may belong to another version of its environment.
                # If a tree of this process diverges although the environment promises exact
                # repetition, the environment is broken.
                is_from_elsewhere = attempt == 1 and work.partial_tree is not None
                num_restarts = self._num_restarts[work.first_id]
                if num_restarts >= MAX_RESTARTS or not (is_from_elsewhere or isinstance(error, ReplayDrifted)):
                    raise
                # The stored part of the tree stays as it is, and a new tree takes its place.
                new_id = restarted_id(work.first_id, num_restarts + 1)
                self._num_restarts[work.first_id] = num_restarts + 1
                self._current_ids[work.first_id] = new_id
                self._latest_trees[work.first_id] = None
                self._equipment.on_error(self._sink, STAGE, self._shard.iteration)(
                    UnitError(
                        key=work.instance.key,
                        kind="TreeBegunAnew",
                        phase=phase_of(error),
                        message=f"the tree is grown anew from its root, as {new_id}: {error}",
                        traceback="",
                        is_final=False,
                    )
                )

    async def _grow_from_latest(self, work: TreeWork) -> None:
        """Grow a tree to its end from its latest version, so that a further try loses no nodes."""
        recipe, iteration = self._equipment.recipe, self._shard.iteration
        search = recipe.in_world(work.instance.environment).search
        self.timers.append(timer := EpisodeTimer())
        async with self._environments.lend(work.instance) as env:
            first_observation = await self._first_observation(work, env, timer)
            head = TreeHead(
                tree_id=self._current_ids[work.first_id],
                iteration_id=self._equipment.iteration_id(iteration),
                checkpoint_id=self._shard.checkpoint.id,
                config=search,
                instance=work.instance,
                first_observation=first_observation,
                seed=derive_seed(recipe.seed, "tree", iteration, work.instance.key),
                writer=self._shard.writer,
            )
            start_tree = self._latest_trees[work.first_id]
            if start_tree is None:
                start_tree = Arena(instance=work.instance, first_observation=first_observation, seed=head.seed).tree()
                self._sink.add(tree_rows(head, start_tree))
                self._latest_trees[work.first_id] = start_tree

            def store_expansion(expansion: Expansion) -> None:
                self._sink.add(expansion_rows(head, expansion))
                self._latest_trees[work.first_id] = apply_expansion(
                    self._latest_trees[work.first_id] or start_tree, expansion
                )
                self.report_progress()

            tree = await grow(
                work.instance,
                env,
                self._sample,
                search,
                seed=head.seed,
                tree=start_tree,
                fits=window_test(recipe, self._sampler, sampling_of(search)),
                on_expansion=store_expansion,
                timer=timer,
                helper=self._helper,
            )
            self._sink.add(finished_tree_rows(head, tree))
            del self._latest_trees[work.first_id]

    async def _first_observation(self, work: TreeWork, env: Environment, timer: EpisodeTimer) -> str:
        """Return the first observation of a tree. If the tree has no node but its root, reset the
        environment; raise `ReplayDiverged` if it begins differently from what is recorded.
        """
        tree = self._latest_trees[work.first_id]
        if tree is not None and len(tree.nodes) > 1:
            return tree.first_observation
        # `grow` expects a freshly reset environment for a tree that is only a root.
        with phase("reset"):
            observation = await call_env(env, timer, lambda: env.reset(work.instance))
        if tree is None:
            return observation
        if not is_repetition(observation, tree.first_observation, Repeatability(env.repeatability)):
            raise divergence_error(
                env,
                f"{work.instance.key} began with {tree.first_observation!r} when its tree was stored, and now with "
                f"{observation!r}",
            )
        return tree.first_observation


VERSION = 1
"""Increase it when the same configuration would give different trees."""


def check_world(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if `search.expert_start` is set and the environment has no expert."""
    search = recipe.in_world(instances[0].environment).search
    if search.expert_start:
        require_expert(env, instances, "search.expert_start")


def tree_id(ctx: RunContext, iteration: int, checkpoint_id: str, instance: Instance) -> str:
    """Return the id, before any restart, of the tree that an iteration grows for an instance."""
    search = ctx.recipe.in_world(instance.environment).search
    return fingerprint("tree", VERSION, ctx.iteration_id(iteration), checkpoint_id, instance.key, search)


def instances_by_tree_id(ctx: RunContext, iteration: int, instances: Sequence[Instance]) -> dict[str, Instance]:
    """Return the instance of each tree that an iteration needs, by the id of the tree's latest
    restart. Raises `DataFault` if there is no policy.
    """
    collector = ctx.collector(iteration)
    instances_by_first_id = {tree_id(ctx, iteration, collector.id, instance): instance for instance in instances}
    return dict(
        zip(latest_restart_ids(ctx.store, list(instances_by_first_id)), instances_by_first_id.values(), strict=True)
    )


def latest_restart_ids(store: Store, tree_ids: Sequence[str]) -> list[str]:
    """Return the id of the latest stored restart of each tree, or its own id if there is none, in
    the order of `tree_ids`.
    """
    restart_ids = {
        restart_id: [restarted_id(restart_id, number) for number in range(MAX_RESTARTS, 0, -1)]
        for restart_id in tree_ids
    }
    stored_ids = stored_tree_ids(store, [restart_id for keys in restart_ids.values() for restart_id in keys])
    return [
        next((restart_id for restart_id in restart_ids[first_id] if restart_id in stored_ids), first_id)
        for first_id in tree_ids
    ]


def finished_trees(ctx: RunContext, iteration: int) -> dict[str, Tree]:
    """Return the trees of an iteration whose search is finished, by tree id; trees lost to errors
    are left out.
    """
    collector = ctx.collector(iteration)
    return load_trees(ctx.store, codec.finished_tree_ids(ctx.store, ctx.iteration_id(iteration), collector.id))


async def collect(ctx: RunContext, iteration: int) -> dict[str, Any]:
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
    check_scoring(ctx)
    instances_by_id = instances_by_tree_id(ctx, iteration, await chosen_instances(ctx, iteration))
    collector, num_copied = ctx.collector(iteration), 0
    # Copy finished trees that the iteration lacks from runs with the same search inputs.
    for other_run_id in runs_with_same_input(ctx.store, ctx.run_id, STAGE):
        stored_ids = stored_tree_ids(ctx.store, list(instances_by_id))
        missing_instances = {key: instance for key, instance in instances_by_id.items() if key not in stored_ids}
        if not missing_instances:
            break
        other_run = replace(ctx, run_id=other_run_id)
        first_ids = [tree_id(other_run, iteration, collector.id, instance) for instance in missing_instances.values()]
        originals = dict(zip(missing_instances, latest_restart_ids(ctx.store, first_ids), strict=True))
        num_copied += len(copy_trees(ctx.store, originals, iteration_id=ctx.iteration_id(iteration)))
    unfinished_ids = unfinished_tree_ids(ctx.store, list(instances_by_id))
    if ctx.recipe.compare.trees:
        num_trees = len(instances_by_id) - len(unfinished_ids)
        if not num_trees:
            raise DataFault(
                f"comparison {ctx.recipe.compare.trees} has no tree that was grown with the inputs of run "
                f"{ctx.run_id}, which makes samples of its trees; begin a new comparison, with another seed"
            )
        return {"trees": num_trees, "new": 0, "copied": num_copied}
    new_ids, num_unfinished = unfinished_ids[: ctx.limit], len(unfinished_ids)
    if new_ids:
        # The run's lock keeps other processes out, except on file systems where locks do not work;
        # the mark does so everywhere.
        writer_mark = f"{platform.node()}/{os.getpid()}/{uuid4().hex[:8]}"
        claim_trees(ctx.store, new_ids, writer_mark)
        partial_trees = load_trees(ctx.store, new_ids)
        shard = TreeShard(
            iteration=iteration,
            checkpoint=collector,
            trees=tuple(
                TreeWork(
                    tree_id=key,
                    first_id=tree_id(ctx, iteration, collector.id, instances_by_id[key]),
                    instance=instances_by_id[key],
                    partial_tree=partial_trees.get(key),
                )
                for key in new_ids
            ),
            done=len(instances_by_id) - num_unfinished,
            total=len(instances_by_id) - num_unfinished + len(new_ids),
            writer=writer_mark,
        )
        await ctx.work_through(shard, STAGE, iteration, "trees")
    return {"trees": len(instances_by_id), "new": len(new_ids)} | ({"copied": num_copied} if num_copied else {})
