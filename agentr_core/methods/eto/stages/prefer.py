"""Preferences: the trajectories of an iteration, compared with each other and stored as pairs of
samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentr_core.episodes.conversation import of_another_run
from agentr_core.errors import ConfigError
from agentr_core.methods.eto.preferences import (
    STAGE,
    Made,
    Played,
    against_expert,
    among_own,
    capped,
    distinct,
    in_tree,
    preference_id,
)
from agentr_core.methods.eto.stages.explore import STAGE as EXPLORE
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.worlds import Worlds
from agentr_core.samples.identity import sample_id
from agentr_core.samples.json_lines import World
from agentr_core.samples.pairs_file import read_pairs
from agentr_core.search.paths import leaf_paths
from agentr_core.stages.demonstrate import best_experts
from agentr_core.store.codec.anew import store_anew
from agentr_core.store.codec.choices import PlannedRollout, load_planned
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.preferences import preference_rows
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.codec.trees import finished_trees_of_run, load_trees
from agentr_core.store.queries.outcomes import failed_subjects
from agentr_core.store.queries.runs import runs_beginning
from agentr_core.store.tables import merge
from agentr_core.threads import check_wanted, in_thread
from agentr_core.types import Instance, Preference, Rejection, Sample, SampleKind, Tree


async def prefer(place: Workplace, iteration: int) -> dict[str, Any]:
    """Make the preferences of an iteration; return how many there are of each kind, and how many
    were rejected.

    Raises:
        ConfigError: the run whose trees are wanted is missing, or has none.
        DataFileError: the file of pairs is malformed.
        DataFault: training and test instances overlap.
    """
    await separate_instances(place, iteration)
    with place.timed(STAGE, iteration):
        preferences, rejections = await in_thread(_make, place, iteration)
        iteration_id = place.iteration_id(iteration)
        units = [
            preference_rows(
                preference_id(preference),
                preference,
                chosen_id=sample_id(preference.chosen),
                rejected_id=sample_id(preference.rejected),
                iteration_id=iteration_id,
            )
            for preference in preferences
        ]
        rows = merge([*units, rejection_rows(rejections, iteration_id=iteration_id)])
        sides = SampleKind.CHOSEN, SampleKind.REJECTED
        store_anew(place.store, rows, iteration_id=iteration_id, stage=STAGE, kinds=sides)
    kinds = [str(preference.case) for preference in preferences]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))} | {"rejected": len(rejections)}


def check_pairs(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `DataFileError` when the file of pairs that a recipe names is malformed."""
    if recipe.eto.preferences.source == "file":
        _of_file(recipe, env)


def _of_file(recipe: Recipe, env: Environment) -> Made:
    world = World(env.name, recipe.environment.name)
    return read_pairs(Path(recipe.eto.preferences.file), world=world, split=recipe.instances.train)


def _make(place: Workplace, iteration: int) -> Made:
    config = place.recipe.eto.preferences
    with place.worlds() as worlds:
        if config.source == "file":
            made = _joined(_of_file(recipe, env) for recipe, env in worlds)
        else:
            made = _of_trees(place, worlds) if config.source == "trees" else _of_episodes(place, iteration, worlds)
    different, repeated = distinct(_stamped(made[0], place.iteration_id(iteration)))
    kept, over_cap = capped(different, config.per_instance)
    return kept, (*made[1], *repeated, *over_cap)


def _of_episodes(place: Workplace, iteration: int, worlds: Worlds) -> Made:
    config = place.recipe.eto.preferences
    planned = load_planned(place.store, place.iteration_id(iteration))
    played = load_trajectories(place.store, [plan.trajectory_id for plan in planned])
    failed = set(failed_subjects(place.store, place.iteration_id(iteration), EXPLORE))
    by_instance: dict[str, list[Played]] = {}
    lost: list[Rejection] = []
    for plan in planned:
        key = plan.trajectory_id
        episodes = by_instance.setdefault(plan.instance.key, [])
        if key in played:
            episodes.append(Played(key, played[key], forced=plan.forced))
        else:
            lost.append(_unplayed(plan, failed))
    owners = {plan.instance.key: plan.instance for plan in planned}
    made: list[Made] = [((), tuple(lost))]
    if config.against == "own":
        made += [among_own(some, worlds.of(owners[key]), config) for key, some in by_instance.items()]
        return _joined(made)
    experts = {found.instance.key: Played(key, found) for key, found in best_experts(place, iteration).values()}
    for instance, episodes in by_instance.items():
        check_wanted()
        made.append(against_expert(experts.get(instance), episodes, worlds.of(owners[instance]), config))
    return _joined(made)


def _unplayed(plan: PlannedRollout, failed: Collection[str]) -> Rejection:
    if plan.key in failed:
        reason, detail = "no-reward", f"episode {plan.key} has no reward; table event has the error that ended it"
    else:
        reason, detail = "not-played", f"episode {plan.key} was not begun: the collection was limited, or interrupted"
    return Rejection(stage=STAGE, subject=plan.trajectory_id, reason=reason, detail=detail)


def _of_trees(place: Workplace, worlds: Worlds) -> Made:
    config = place.recipe.eto.preferences
    runs = runs_beginning(place.store, config.trees or place.run_id)
    if len(runs) != 1:
        which = f"{len(runs)} runs of {place.root} begin" if runs else f"no run of {place.root} begins"
        raise ConfigError(f"eto.preferences.trees: {which} with {config.trees!r}; `agentr runs` lists them all")
    ids = finished_trees_of_run(place.store, runs[0])
    if not ids:
        raise ConfigError(f"eto.preferences.trees: run {runs[0]} has no finished tree; name a run of method agent-r")
    trees = load_trees(place.store, ids)
    known = [env.name for _, env in worlds]
    strange = sorted({tree.instance.environment for tree in trees.values()} - {*known})
    if strange:
        raise ConfigError(
            f"eto.preferences.trees: run {runs[0]} has trees of {', '.join(strange)}, and the recipe's environment "
            f"is {', '.join(known)}"
        )
    if runs[0] != place.run_id:
        trees = {key: _of_another_run(tree) for key, tree in trees.items()}
    return _joined(in_tree(leaf_paths(tree, key), worlds.of(tree.instance), config, key) for key, tree in trees.items())


def _of_another_run(tree: Tree) -> Tree:
    nodes = [node if node.step is None else replace(node, step=of_another_run([node.step])[0]) for node in tree.nodes]
    return replace(tree, nodes=tuple(nodes))


def _joined(parts: Iterable[Made]) -> Made:
    parts = list(parts)
    return tuple(p for kept, _ in parts for p in kept), tuple(r for _, rejected in parts for r in rejected)


def _stamped(preferences: Iterable[Preference], iteration_id: str) -> list[Preference]:
    """Return the preferences marked with their iteration: a file or tree may serve several."""

    def stamp(sample: Sample) -> Sample:
        origin = replace(sample.provenance, extra={**sample.provenance.extra, "iteration": iteration_id})
        return replace(sample, provenance=origin)

    return [replace(p, chosen=stamp(p.chosen), rejected=stamp(p.rejected)) for p in preferences]
