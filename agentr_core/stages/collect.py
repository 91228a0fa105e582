"""Collection: a tree for each training instance, kept expansion by expansion."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

from agentr_core.errors import ReplayDiverged
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.batching import Batcher
from agentr_core.pool import EnvironmentPool, phase, run_all
from agentr_core.rollout import EpisodeTimer, call
from agentr_core.search.grow import grow
from agentr_core.search.tree import Arena, Expansion
from agentr_core.stages.instances import check_separate, test_instances, training_instances
from agentr_core.stages.place import Checkpoint, Workplace
from agentr_core.store import Writer
from agentr_core.store.codec import (
    TreeHead,
    finished_rows,
    growth_rows,
    instance_row,
    load_tree,
    load_trees,
    tree_rows,
    unfinished_trees,
)
from agentr_core.types import Instance, Tree

STAGE = "collect"
VERSION = 1
"""Raise it when the same configuration would give other trees."""
CONCURRENCY = 512
"""Trees in flight at once: enough to fill any model's batch, few enough to bound memory."""


def tree_id(place: Workplace, iteration: int, checkpoint_id: str, instance: Instance) -> str:
    """Return the id of the tree that an iteration grows for an instance."""
    return fingerprint("tree", VERSION, place.iteration_id(iteration), checkpoint_id, instance.key, place.recipe.search)


def tree_ids(place: Workplace, iteration: int) -> dict[str, Instance]:
    """Return the instance of each tree of an iteration, by tree id. Raises `DataFault` without a policy."""
    env = place.make_environment()
    try:
        instances = training_instances(place.recipe, env, iteration)
    finally:
        env.close()
    policy = place.policy(iteration)
    return {tree_id(place, iteration, policy.id, instance): instance for instance in instances}


def finished_trees(place: Workplace, iteration: int) -> dict[str, Tree]:
    """Return the trees of an iteration whose search is done, by id; one that was lost to an error is left out."""
    wanted = list(tree_ids(place, iteration))
    unfinished = set(unfinished_trees(place.store, wanted))
    return load_trees(place.store, [key for key in wanted if key not in unfinished])


async def collect(place: Workplace, iteration: int, *, shard: int = 0, shards: int = 1) -> dict[str, Any]:
    """Grow what is missing of the trees of an iteration; return how many there are and how many are new.

    With `data.use: expert` nothing is searched, and only the instances are checked and stored.

    Args:
        shard, shards: only every `shards`-th tree, from number `shard` on: for several workers.

    Raises:
        ErrorBudgetSpent: more trees failed than the recipe allows; what was grown is kept.
        DataFault: training and test instances meet, or the policy is not there.
    """
    recipe = place.recipe
    env = place.make_environment()
    try:
        chosen, held_out = training_instances(recipe, env, iteration), test_instances(recipe, env)
        await asyncio.to_thread(check_separate, env, chosen, held_out)
        place.store.write({"instance": [instance_row(i, env.depth(i)) for i in (*chosen, *held_out)]})
    finally:
        env.close()
    if recipe.data.use == "expert":
        return {"trees": 0, "new": 0}
    wanted = dict(list(tree_ids(place, iteration).items())[shard::shards])
    policy = place.policy(iteration)
    missing = unfinished_trees(place.store, list(wanted))
    if missing:
        begun = load_trees(place.store, missing)
        await _grow_all(place, iteration, {key: wanted[key] for key in missing}, begun, policy, len(wanted))
    return {"trees": len(wanted), "new": len(missing)}


async def _grow_all(
    place: Workplace,
    iteration: int,
    missing: dict[str, Instance],
    begun: dict[str, Tree],
    policy: Checkpoint,
    total: int,
) -> None:
    recipe = place.recipe
    timers: list[EpisodeTimer] = []
    tried: set[str] = set()
    with place.timed(STAGE, iteration) as clock, closing(EnvironmentPool(place.make_environment)) as environments:
        async with place.sampling(policy.path) as batcher, Writer(place.store) as writer:
            done = total - len(missing)

            def show(finished: int = 0) -> None:
                nonlocal done
                done += finished
                place.progress(done, total, f"trees, {speed(batcher)}")

            async def work(item: tuple[str, Instance]) -> None:
                key, instance = item
                seed = derive_seed(recipe.seed, "tree", iteration, instance.key)
                timers.append(timer := EpisodeTimer())
                stored = begun.get(key)
                if key in tried:
                    # A further try goes on from what the last one kept: growing anew would take stored nodes back.
                    await writer.flush()
                    stored = await asyncio.to_thread(load_tree, place.store, key)
                tried.add(key)
                async with environments.lend() as env:
                    if stored is None or len(stored.nodes) == 1:
                        # A tree that is only a root is grown from where the environment stands.
                        with phase("reset"):
                            first = await call(env, timer, lambda: env.reset(instance))
                    else:
                        first = stored.first_observation
                    if stored is not None and first != stored.first_observation:
                        raise ReplayDiverged(
                            f"{instance.key} began with {stored.first_observation!r} when its tree was stored, and now "
                            f"with {first!r}; use the same version of the environment, or begin a new run"
                        )
                    head = TreeHead(
                        tree_id=key,
                        iteration_id=place.iteration_id(iteration),
                        checkpoint_id=policy.id,
                        config=recipe.search,
                        instance=instance,
                        first_observation=first,
                        seed=seed,
                    )
                    if stored is None:
                        stored = Arena(instance=instance, first_observation=first, seed=seed).tree()
                        writer.add(tree_rows(head, stored))

                    def keep(expansion: Expansion) -> None:
                        writer.add(growth_rows(head, expansion))
                        show()

                    tree = await grow(
                        instance,
                        env,
                        batcher.sample,
                        recipe.search,
                        seed=seed,
                        tree=stored,
                        on_expansion=keep,
                        timer=timer,
                    )
                    writer.add(finished_rows(head, tree))

            await run_all(
                list(missing.items()),
                work,
                key=lambda item: item[1].key,
                errors=recipe.errors,
                on_error=place.on_error(writer, STAGE, iteration),
                concurrency=CONCURRENCY,
                on_result=lambda *_: show(1),
                total=total,
            )
            clock.add_batcher(batcher)
        clock.add({"environment": sum(timer.environment_seconds for timer in timers), "store": writer.seconds})


def speed(batcher: Batcher) -> str:
    """Return what a batcher has done so far as a phrase for a line of progress."""
    stats = batcher.stats()
    rate = stats.completion_tokens / stats.generate_seconds if stats.generate_seconds else 0.0
    return f"{stats.sequences} replies, {rate:.0f} tokens/s, batches {stats.fill:.0%} full"
