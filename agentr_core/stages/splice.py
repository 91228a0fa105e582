"""Splicing: each judged pair becomes a revision sample or a rejection; good paths become samples as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentr_core.errors import IllTypedAnswer
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.pairing import good_paths
from agentr_core.protocols import Environment
from agentr_core.samples import sample_id
from agentr_core.search.paths import leaf_paths
from agentr_core.splicing import continued, good_sample, pair_key, splice
from agentr_core.stages.collect import finished_trees
from agentr_core.stages.continuation import continuations
from agentr_core.stages.critique import pair_id, pairs_of
from agentr_core.stages.expert import expert_samples
from agentr_core.stages.place import Workplace
from agentr_core.stages.threads import check_wanted, in_thread
from agentr_core.store.codec import load_critiques, rejection_rows, sample_rows, trajectory_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Critique, Path, PathPair, Rejection, Sample, Trajectory

T = TypeVar("T")

STAGE = "splice"


async def splice_pairs(place: Workplace, iteration: int) -> dict[str, Any]:
    """Make the samples of an iteration from its pairs, critiques and good paths; return how many of each there are.

    With `data.use: good` only the good paths become samples, with `expert` only the expert's episodes. In splice mode
    `continued` the policy first plays on from the turns of revision; what it raises is told in `continuations`.
    """
    if place.recipe.data.use == "expert":
        return await expert_samples(place, iteration)
    trees = finished_trees(place, iteration)
    # Without revision samples nobody was judged, and nothing is spliced.
    pairs = [] if place.recipe.data.use == "good" else pairs_of(place, iteration, trees)[0]
    critiques = load_critiques(place.store, [pair_id(pair) for pair in pairs])
    seed = derive_seed(place.recipe.seed, "splice", iteration)
    tries: dict[str, dict[str, Trajectory]] = {}
    if place.recipe.splice.mode == "continued":
        tries = await continuations(place, iteration, pairs, critiques, seed=seed)
    iteration_id = place.iteration_id(iteration)
    revisions: list[Rows] = []
    rejections: list[Rejection] = []

    def make(env: Environment) -> list[Rows]:
        for done, pair in enumerate(pairs, start=1):
            check_wanted()
            place.progress(done, len(pairs), "pairs spliced")
            key = pair_id(pair)
            try:
                made = _revisions(place, env, pair, critiques.get(key), tries.get(key, {}), iteration, seed)
            except IllTypedAnswer as error:
                made = _ill_typed(pair_key(pair), error)
            if isinstance(made, Rejection):
                rejections.append(made)
                continue
            revisions.extend(
                sample_rows(
                    sample_id(sample), sample, iteration_id=iteration_id, pair_id=key, trajectory_id=trajectory_id
                )
                for trajectory_id, sample in made
            )
        kept = []
        for key, tree in trees.items():
            for path in good_paths(leaf_paths(tree, key), place.recipe.alpha(iteration)):
                try:
                    sample = good_sample(path, env, prune=place.recipe.splice.prune)
                except IllTypedAnswer as error:
                    rejections.append(_ill_typed(f"{path.tree_id}:{path.leaf}", error))
                    continue
                kept.append(_good_rows(sample, path, iteration_id))
        return kept

    with place.timed(STAGE, iteration) as clock:
        good = await in_thread(_within, place, make)
        rejected = rejection_rows(rejections, iteration_id=iteration_id)
        place.store.write(merge([*revisions, *good, rejected]))
        clock.add({})
    return {"revision": len(revisions), "good": len(good), "rejected": len(rejections)}


def _within(place: Workplace, make: Callable[[Environment], T]) -> T:
    env = place.make_environment()
    try:
        return make(env)
    finally:
        env.close()


def _revisions(
    place: Workplace,
    env: Environment,
    pair: PathPair,
    critique: Critique | None,
    tries: Mapping[str, Trajectory],
    iteration: int,
    seed: int,
) -> list[tuple[str | None, Sample]] | Rejection:
    """Return the revision samples of a pair, each with the id of the trajectory behind it if it has one of its own."""
    config, alpha = place.recipe.splice, place.recipe.alpha(iteration)
    if critique is None and config.mode != "direct":
        detail = "judging its tree failed; table event has the error"
        return Rejection(stage=STAGE, subject=pair_key(pair), reason="not-judged", detail=detail)
    if config.mode == "continued":
        samples = continued(pair, critique, tries, env, config, alpha=alpha, seed=seed)
        return samples if isinstance(samples, Rejection) else list(samples.items())
    made = splice(pair, critique, env, config, alpha=alpha, seed=seed)
    return made if isinstance(made, Rejection) else [(None, made)]


def _ill_typed(subject: str, error: IllTypedAnswer) -> Rejection:
    return Rejection(stage=STAGE, subject=subject, reason="ill-typed-answer", detail=str(error))


def _good_rows(sample: Sample, path: Path, iteration_id: str) -> Rows:
    """Return the rows of a good sample together with its path as a trajectory of its own."""
    trajectory_id = fingerprint("path", path.tree_id, path.leaf)
    walked = trajectory_rows(
        trajectory_id,
        path.trajectory,
        source="tree",
        iteration_id=iteration_id,
        tree_id=path.tree_id,
        leaf=path.leaf,
    )
    return merge(
        [walked, sample_rows(sample_id(sample), sample, iteration_id=iteration_id, trajectory_id=trajectory_id)]
    )
