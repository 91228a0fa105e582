"""Collection: a tree for each training instance, stored expansion by expansion."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from agentr_core.errors import DataFault
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.stages.tree_shard import MAX_RESTARTS, STAGE, TreeShard, TreeWork, restarted
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Workplace
from agentr_core.stages.demonstrate import need_expert
from agentr_core.store import Store
from agentr_core.store.codec import trees as stored
from agentr_core.store.codec.copies import copy_trees, runs_alike
from agentr_core.store.codec.trees import claim_trees, load_trees, stored_trees, unfinished_trees
from agentr_core.types import Instance, Tree

VERSION = 1
"""Increase it when the same configuration would give different trees."""


def check_world(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` when trees should go on after the steps of an expert that is missing."""
    search = recipe.in_world(instances[0].environment).search
    if search.expert_start:
        need_expert(env, instances, "search.expert_start")


def tree_id(place: Workplace, iteration: int, checkpoint_id: str, instance: Instance) -> str:
    """Return the id of the tree that an iteration grows for an instance."""
    search = place.recipe.in_world(instance.environment).search
    return fingerprint("tree", VERSION, place.iteration_id(iteration), checkpoint_id, instance.key, search)


def tree_ids(place: Workplace, iteration: int, instances: Sequence[Instance]) -> dict[str, Instance]:
    """Return the instance of each tree that an iteration needs, by tree id. Raises `DataFault` if
    there is no policy.
    """
    collector = place.collector(iteration)
    wanted = {tree_id(place, iteration, collector.id, instance): instance for instance in instances}
    return dict(zip(latest_restarts(place.store, list(wanted)), wanted.values(), strict=True))


def latest_restarts(store: Store, tree_ids: Sequence[str]) -> list[str]:
    """Return, for each tree, the id of its last restart, or its own id if there was none."""
    later = {key: [restarted(key, number) for number in range(MAX_RESTARTS, 0, -1)] for key in tree_ids}
    begun = stored_trees(store, [key for keys in later.values() for key in keys])
    return [next((key for key in later[own] if key in begun), own) for own in tree_ids]


def finished_trees(place: Workplace, iteration: int) -> dict[str, Tree]:
    """Return the trees of an iteration whose search is finished, by id; trees lost to errors are
    left out.
    """
    collector = place.collector(iteration)
    return load_trees(place.store, stored.finished_trees(place.store, place.iteration_id(iteration), collector.id))


async def collect(place: Workplace, iteration: int) -> dict[str, Any]:
    """Grow the missing trees of an iteration; return how many there are and how many are new.

    Finished trees of another run with the same inputs are copied; `copied` is their number, if any.
    A run that makes samples of a comparison's trees has no others: what is lost there is lost here.

    Raises:
        ErrorBudgetSpent: more trees failed than the recipe allows; what was grown is kept.
        DataFault: training and test instances overlap, the policy is missing, or the comparison has
            no tree that was grown with the same inputs.
        RunBusy: another process is growing one of the trees.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    wanted = tree_ids(place, iteration, await separate_instances(place, iteration))
    copied = _take_over(place, iteration, wanted)
    unfinished = unfinished_trees(place.store, list(wanted))
    if place.recipe.compare.trees:
        return _lent(place, len(wanted) - len(unfinished), copied)
    missing, left = unfinished[: place.limit], len(unfinished)
    if missing:
        # The lock of the run keeps other processes out where locks work; the mark also does where
        # they do not.
        mark = f"{platform.node()}/{os.getpid()}/{uuid4().hex[:8]}"
        claim_trees(place.store, missing, mark)
        begun = load_trees(place.store, missing)
        collector = place.collector(iteration)
        shard = TreeShard(
            iteration=iteration,
            checkpoint=collector,
            trees=tuple(
                TreeWork(
                    tree_id=key,
                    first_id=tree_id(place, iteration, collector.id, wanted[key]),
                    instance=wanted[key],
                    begun=begun.get(key),
                )
                for key in missing
            ),
            done=len(wanted) - left,
            total=len(wanted) - left + len(missing),
            writer=mark,
        )
        await place.work_through(shard, STAGE, iteration, "trees")
    return {"trees": len(wanted), "new": len(missing)} | ({"copied": copied} if copied else {})


def _lent(place: Workplace, trees: int, copied: int) -> dict[str, Any]:
    """Return how many trees of a comparison a run has that makes samples of them."""
    if not trees:
        raise DataFault(
            f"comparison {place.recipe.compare.trees} has no tree that was grown with the inputs of run "
            f"{place.run_id}, which makes samples of its trees; begin a new comparison, with another seed"
        )
    return {"trees": trees, "new": 0, "copied": copied}


def _take_over(place: Workplace, iteration: int, wanted: Mapping[str, Instance]) -> int:
    """Copy finished trees that an iteration lacks from runs with the same search inputs; return
    their number.
    """
    others = runs_alike(place.store, place.run_id, STAGE)
    collector, copied = place.collector(iteration), 0
    for run in others:
        begun = stored_trees(place.store, list(wanted))
        missing = {key: instance for key, instance in wanted.items() if key not in begun}
        if not missing:
            break
        other = replace(place, run_id=run)
        theirs = [tree_id(other, iteration, collector.id, instance) for instance in missing.values()]
        originals = dict(zip(missing, latest_restarts(place.store, theirs), strict=True))
        copied += len(copy_trees(place.store, originals, iteration_id=place.iteration_id(iteration)))
    return copied
