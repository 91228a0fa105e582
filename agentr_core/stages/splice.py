"""Splicing: each judged pair becomes a revision sample or a rejection; good paths become samples as they are."""

from __future__ import annotations

import asyncio
from typing import Any

from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.pairing import good_paths
from agentr_core.protocols import Environment
from agentr_core.samples import sample_id
from agentr_core.search.paths import leaf_paths
from agentr_core.splicing import good_sample, pair_key, splice
from agentr_core.stages.collect import finished_trees
from agentr_core.stages.critique import pair_id, pairs_of
from agentr_core.stages.expert import expert_samples
from agentr_core.stages.place import Workplace
from agentr_core.store.codec import load_critiques, rejection_rows, sample_rows, trajectory_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Rejection, Sample, Trajectory, Tree

STAGE = "splice"


async def splice_pairs(place: Workplace, iteration: int) -> dict[str, Any]:
    """Make the samples of an iteration from its pairs, critiques and good paths; return how many of each there are.

    With `data.use: good` only the good paths become samples, with `expert` only the expert's episodes.
    """
    if place.recipe.data.use == "expert":
        return await expert_samples(place, iteration)
    trees = finished_trees(place, iteration)
    with place.timed(STAGE, iteration) as clock:
        units, samples, rejections = await asyncio.to_thread(_make, place, iteration, trees)
        place.store.write(merge([*units, rejection_rows(rejections, iteration_id=place.iteration_id(iteration))]))
        clock.add({})
    kinds = [str(sample.kind) for sample in samples]
    return {"revision": kinds.count("revision"), "good": kinds.count("good"), "rejected": len(rejections)}


def _make(place: Workplace, iteration: int, trees: dict[str, Tree]) -> tuple[list[Rows], list[Sample], list[Rejection]]:
    env = place.make_environment()
    try:
        return _make_with(env, place, iteration, trees)
    finally:
        env.close()


def _make_with(
    env: Environment, place: Workplace, iteration: int, trees: dict[str, Tree]
) -> tuple[list[Rows], list[Sample], list[Rejection]]:
    alpha = place.recipe.alpha(iteration)
    iteration_id = place.iteration_id(iteration)
    # Without revision samples nobody was judged, and nothing is spliced.
    pairs = [] if place.recipe.data.use == "good" else pairs_of(place, iteration, trees)[0]
    critiques = load_critiques(place.store, [pair_id(pair) for pair in pairs])
    units: list[Rows] = []
    samples: list[Sample] = []
    rejections: list[Rejection] = []
    seed = derive_seed(place.recipe.seed, "splice", iteration)
    for done, pair in enumerate(pairs, start=1):
        place.progress(done, len(pairs), "pairs spliced")
        found = critiques.get(pair_id(pair))
        if found is None and place.recipe.splice.mode != "direct":
            detail = "judging its tree failed; table event has the error"
            rejections.append(Rejection(stage=STAGE, subject=pair_key(pair), reason="not-judged", detail=detail))
            continue
        made = splice(pair, found, env, place.recipe.splice, alpha=alpha, seed=seed)
        if isinstance(made, Rejection):
            rejections.append(made)
        else:
            samples.append(made)
            units.append(sample_rows(sample_id(made), made, iteration_id=iteration_id, pair_id=pair_id(pair)))
    for key, tree in trees.items():
        for path in good_paths(leaf_paths(tree, key), alpha):
            made = good_sample(path, env, prune=place.recipe.splice.prune)
            samples.append(made)
            units.append(_good_rows(made, path.trajectory, iteration_id, key, path.leaf))
    return units, samples, rejections


def _good_rows(sample: Sample, trajectory: Trajectory, iteration_id: str, tree_id: str, leaf: int) -> Rows:
    """Return the rows of a good sample together with its path as a trajectory of its own."""
    trajectory_id = fingerprint("path", tree_id, leaf)
    path = trajectory_rows(
        trajectory_id, trajectory, source="tree", iteration_id=iteration_id, tree_id=tree_id, leaf=leaf
    )
    return merge([path, sample_rows(sample_id(sample), sample, iteration_id=iteration_id, trajectory_id=trajectory_id)])
