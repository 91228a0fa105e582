"""Critique: pair the paths of each tree and let the judge find the first error of each bad one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.episodes.units import run_all
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.critique.locate import critique_of, judge_paths, scans_of
from agentr_core.methods.agent_r.pairing import pair_id, pairs_of_tree
from agentr_core.methods.agent_r.stages.collect import finished_trees
from agentr_core.models.samplers import Sampler
from agentr_core.runtime.equipment import following, held_back, in_flight, speed
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.readings import Readings
from agentr_core.search.paths import leaf_paths
from agentr_core.store import Writer
from agentr_core.store.codec.copies import copy_judgements, runs_alike
from agentr_core.store.codec.critiques import critique_rows, judgement_rows, load_judgements, load_pairs, pair_rows
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Judgement, Path, PathPair, Rejection, Tree

STAGE = "critique"


def pairs_of(place: Workplace, iteration: int, trees: Mapping[str, Tree]) -> list[PathPair]:
    """Return the stored pairs of trees of an iteration, tree by tree in the order in which they
    were made.
    """
    stored = load_pairs(place.store, place.iteration_id(iteration))
    pairs = []
    for key, paths in _paths(place, trees).items():
        by_leaf = {path.leaf: path for path in paths}
        pairs += [
            PathPair(good=by_leaf[made.good_leaf], bad=by_leaf[made.bad_leaf], split=made.shared_steps)
            for made in stored.get(key, ())
        ]
    return pairs


def _paths(place: Workplace, trees: Mapping[str, Tree]) -> dict[str, tuple[Path, ...]]:
    return {key: leaf_paths(tree, key) for key, tree in trees.items()}


def _make_pairs(
    place: Workplace, iteration: int, trees: Mapping[str, Tree]
) -> tuple[list[PathPair], list[Rows], list[Rejection]]:
    """Return the pairs of all trees of an iteration, their rows, and the rejections."""
    pairs: list[PathPair] = []
    rows: list[Rows] = []
    rejections: list[Rejection] = []
    iteration_id = place.iteration_id(iteration)
    for key, paths in _paths(place, trees).items():
        kept, rejected = pairs_of_tree(
            key,
            paths,
            place.recipe.pairs,
            alpha=place.recipe.alpha(iteration),
            seed=derive_seed(place.recipe.seed, "pairs", iteration),
        )
        pairs += kept
        rows += [
            pair_rows(pair_id(pair), pair, iteration_id=iteration_id, position=position)
            for position, pair in enumerate(kept)
        ]
        rejections += rejected
    return pairs, rows, rejections


async def critique(place: Workplace, iteration: int) -> dict[str, Any]:
    """Pair the paths of an iteration's finished trees and judge the bad ones that are not judged
    yet; return the counts.

    Judgements of the same judge on the same trees in another run are taken over. In splice mode
    `direct` nothing is judged: pairs are stored, critiques are not.

    Raises `ConfigError` if most replies of the judge are unreadable, and else as `run_all`.
    """
    trees = finished_trees(place, iteration)
    pairs, rows, rejections = await asyncio.to_thread(_make_pairs, place, iteration, trees)
    place.store.write(merge([*rows, rejection_rows(rejections, iteration_id=place.iteration_id(iteration))]))
    open_ids = set(place.store.missing("critique", [pair_id(pair) for pair in pairs]))
    by_tree: dict[str, list[PathPair]] = {}
    for pair in pairs:
        if pair_id(pair) in open_ids:
            by_tree.setdefault(pair.bad.tree_id, []).append(pair)
    if by_tree and place.recipe.splice.mode != "direct":
        await _judge_all(place, iteration, by_tree, total=len({pair.bad.tree_id for pair in pairs}))
    left = place.store.missing("critique", list(open_ids))
    return {"pairs": len(pairs), "judged": len(open_ids) - len(left)}


async def _judge_all(place: Workplace, iteration: int, by_tree: dict[str, list[PathPair]], *, total: int) -> None:
    # Two policies may have trees of the same teacher, and each judges for itself.
    judged_alike = place.recipe.models.judge is not None or place.collector(iteration).role == "actor"
    for run in runs_alike(place.store, place.run_id, STAGE) if judged_alike else []:
        copy_judgements(place.store, list(by_tree), run, iteration_id=place.iteration_id(iteration))
    stored = await asyncio.to_thread(load_judgements, place.store, list(by_tree))
    async with place.asking("judge", place.policy(iteration).path, STAGE, iteration) as (batcher, writer, readings):
        done = 0

        async def work(item: tuple[str, list[PathPair]]) -> None:
            tree_id, pairs = item
            await _judge_tree(place, iteration, tree_id, pairs, stored.get(tree_id, {}), batcher, writer, readings)

        def ended(*_: Any) -> None:
            nonlocal done
            done += 1
            show()

        def show() -> None:
            place.progress(done, len(by_tree), f"trees judged, {speed(batcher)}")

        async with following(batcher, show):
            await run_all(
                list(by_tree.items()),
                work,
                key=lambda item: item[0],
                errors=place.recipe.errors,
                on_error=place.on_error(writer, STAGE, iteration),
                concurrency=in_flight(batcher, place.recipe.critique.votes),
                on_result=ended,
                total=total,
            )


async def _judge_tree(
    place: Workplace,
    iteration: int,
    tree_id: str,
    pairs: Sequence[PathPair],
    stored: Mapping[int, Judgement],
    batcher: Sampler,
    writer: Writer,
    readings: Readings,
) -> None:
    """Have the bad paths of a tree judged, and store each judgement and the critique of each path.

    `stored` holds judgements by node, which are not requested again.
    """
    config, iteration_id = place.recipe.critique, place.iteration_id(iteration)

    def keep(judgement: Judgement) -> None:
        writer.add(judgement_rows(tree_id, judgement, iteration_id=iteration_id))
        for reply in judgement.generations:
            readings.count(reply)

    judgements = await judge_paths(
        scans_of(pairs, config),
        held_back(batcher, writer),
        config,
        seed=derive_seed(place.recipe.seed, "critique", iteration),
        count_tokens=batcher.model.count_tokens,
        context_length=batcher.model.context_length,
        known=stored,
        on_judgement=keep,
    )
    for pair in pairs:
        found = critique_of(pair, judgements, config)
        writer.add(critique_rows(pair_id(pair), found, iteration_id=iteration_id, nodes=pair.bad.nodes))
