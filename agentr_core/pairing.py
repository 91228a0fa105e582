"""Which good and bad paths of a tree become pairs. Source: Agent-R section 3.2, equations 3 to 5."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from agentr_core.config import PairsConfig
from agentr_core.fingerprint import derive_seed
from agentr_core.thresholds import clears, exceeds
from agentr_core.types import Path, PathPair, Rejection

STAGE = "pairs"


def pairs_of_tree(
    tree_id: str, paths: Sequence[Path], config: PairsConfig, *, alpha: float, seed: int
) -> tuple[tuple[PathPair, ...], tuple[Rejection, ...]]:
    """Return the pairs of one tree and what was turned away.

    The order is a function of the paths and the seed, and it is also the order of preference under the caps: bad paths
    in a random order take turns, so that each is used once before any is used twice, and each takes the shortest good
    path that it has not had (equally short ones in a random order of its own).

    A tree without a pair gives one rejection, whose subject is `tree_id`. A path that repeats another word for word
    gives one (`tree_id:leaf`), and so does a bad path that lost good paths to a cap; the detail lists their leaves.

    Args:
        paths: all leaf paths of the tree.
        alpha: the least reward of a good path in this iteration, in [0, 1].
        seed: of the run; the tree has a stream of its own.
    """
    different, rejections = distinct(paths)
    reason = _why_no_pairs(different, config, alpha)
    if reason:
        return (), (*rejections, Rejection(stage=STAGE, subject=tree_id, reason=reason, detail=_rewards(different)))
    rng = random.Random(derive_seed(seed, STAGE, tree_id))
    choices = [
        (bad, sorted(rng.sample(goods, len(goods)), key=lambda good: len(good.nodes)))
        for bad in rng.sample(different, len(different))
        if (goods := [good for good in different if _qualifies(good, bad, config, alpha)])
    ]
    capped = [goods[: config.per_bad_leaf or None] for _, goods in choices]
    turns = [
        PathPair(good=good, bad=bad, split=shared_steps(good, bad))
        for round_ in zip_longest(*capped)
        for (bad, _), good in zip(choices, round_, strict=True)
        if good is not None
    ]
    kept = tuple(turns[: config.per_tree or None])
    for (bad, goods), allowed in zip(choices, capped, strict=True):
        rejections += _over_cap(bad, goods[len(allowed) :], "per-bad-leaf-cap", config.per_bad_leaf)
        lost = [pair.good for pair in turns[len(kept) :] if pair.bad is bad]
        rejections += _over_cap(bad, lost, "per-tree-cap", config.per_tree)
    return kept, rejections


def good_paths(paths: Sequence[Path], alpha: float) -> tuple[Path, ...]:
    """Return the different paths whose reward reaches alpha, in the given order."""
    return tuple(path for path in distinct(paths)[0] if clears(path.trajectory.reward, alpha))


def distinct(paths: Iterable[Path]) -> tuple[tuple[Path, ...], tuple[Rejection, ...]]:
    """Return the paths without those whose transcript an earlier one has, and a rejection for each that was left out.

    A transcript is its replies and observations. Paths of a search differ; independent episodes may be the same.
    """
    first: dict[tuple[tuple[str, str], ...], Path] = {}
    rejections: list[Rejection] = []
    for path in paths:
        earlier = first.setdefault(_transcript(path), path)
        if earlier is not path:
            detail = f"same transcript as leaf {earlier.leaf}"
            rejections.append(_reject(path, "duplicate-transcript", detail))
    return tuple(first.values()), tuple(rejections)


def shared_steps(one: Path, other: Path) -> int:
    """Return how many steps two paths have in common from the start, by the texts of replies and observations."""
    shared = 0
    for left, right in zip(_transcript(one), _transcript(other), strict=False):
        if left != right:
            break
        shared += 1
    return shared


def _qualifies(good: Path, bad: Path, config: PairsConfig, alpha: float) -> bool:
    high, low = good.trajectory.reward, bad.trajectory.reward
    if not clears(high, alpha):
        return False
    if config.beta_rule == "absolute":
        return exceeds(config.beta, low) and exceeds(high, config.beta)
    return exceeds(high - low, config.beta)


def _why_no_pairs(paths: Sequence[Path], config: PairsConfig, alpha: float) -> str:
    if not any(exceeds(path.trajectory.reward, 0) for path in paths):
        return "no-reward"
    if not any(clears(path.trajectory.reward, alpha) for path in paths):
        return "no-good-path"
    if not any(_qualifies(good, bad, config, alpha) for good in paths for bad in paths):
        return "no-bad-path"
    return ""


def _rewards(paths: Sequence[Path]) -> str:
    if not paths:
        return "no path of the tree has an end"
    rewards = [path.trajectory.reward for path in paths]
    return f"{len(paths)} different paths with rewards from {min(rewards):g} to {max(rewards):g}"


def _over_cap(bad: Path, goods: Sequence[Path], reason: str, cap: int) -> tuple[Rejection, ...]:
    if not goods:
        return ()
    return (_reject(bad, reason, f"the cap is {cap}; good leaves left out: {', '.join(str(g.leaf) for g in goods)}"),)


def _reject(path: Path, reason: str, detail: str) -> Rejection:
    return Rejection(stage=STAGE, subject=f"{path.tree_id}:{path.leaf}", reason=reason, detail=detail)


def _transcript(path: Path) -> tuple[tuple[str, str], ...]:
    return tuple((step.reply, step.observation) for step in path.trajectory.steps)
