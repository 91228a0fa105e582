"""Choose which good and bad paths of a tree become pairs. Source: Agent-R section 3.2, equations 3
to 5.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.agent_r import PairsConfig
from agentr_core.recipes.fields import AlphaRule, clears, exceeds
from agentr_core.types import Path, PathPair, Rejection

STAGE = "pairs"
_PUBLISHED_SEED = 123
_Pair = tuple[Path, Path]
"""A good path and a bad path, in this order."""


def pair_id(pair: PathPair) -> str:
    """Return the id of a pair: a fingerprint of its two leaves and its tree id. The tree id itself
    depends on the iteration, the policy and the search settings.
    """
    return fingerprint("pair", pair.good.tree_id, pair.good.leaf, pair.bad.leaf)


def pairs_of_tree(
    tree_id: str, paths: Sequence[Path], config: PairsConfig, *, alpha: float, seed: int
) -> tuple[tuple[PathPair, ...], tuple[Rejection, ...]]:
    """Return the pairs of one tree, and the rejections.

    Pairs are sorted by `config.order`; where a cap applies, the first ones are kept.

    A tree without a pair gives a rejection with subject `tree_id`. Rejections with subject
    `tree_id:leaf` are given for each path whose transcript repeats an earlier one, and for each bad
    path and each cap that cost it good paths; the detail lists the leaves of these.

    Args:
        paths: all leaf paths of the tree.
        alpha: the lowest reward of a good path in this iteration, in [0, 1], compared by
            `config.alpha_rule`.
        seed: for the order `turns`; the random stream is derived from it and the instance.
    """
    different, rejections = distinct(paths)
    goods = [path for path in different if _is_good(path, config, alpha)]
    reason = ""
    if not any(exceeds(path.trajectory.reward, 0) for path in different):
        reason = "no-reward"
    elif not goods:
        reason = "no-good-path"
    elif not any(_far_apart(good, bad, config) for good in goods for bad in different):
        reason = "no-bad-path"
    if reason:
        rewards = [path.trajectory.reward for path in different]
        detail = "no path of the tree has an end"
        if rewards:
            detail = f"{len(rewards)} different paths with rewards from {min(rewards):g} to {max(rewards):g}"
        return (), (*rejections, Rejection(stage=STAGE, subject=tree_id, reason=reason, detail=detail))
    if config.order == "turns":
        rng = random.Random(derive_seed(seed, STAGE, different[0].trajectory.instance.key))
        candidates = _in_turns(different, config, alpha, rng)
    else:
        candidates = _shuffled(different, config, alpha)
    by_bad: dict[int, list[Path]] = {}
    for good, bad in candidates:
        by_bad.setdefault(bad.leaf, []).append(good)
    capped_goods = {leaf: goods[: config.per_bad_leaf or None] for leaf, goods in by_bad.items()}
    capped_pairs = [(good, bad) for good, bad in candidates if any(good is path for path in capped_goods[bad.leaf])]
    first = capped_pairs[: config.per_tree or None]
    over_caps: list[Rejection] = []
    for bad in {bad.leaf: bad for _, bad in candidates}.values():
        over = by_bad[bad.leaf][len(capped_goods[bad.leaf]) :]
        dropped_goods = [good for good, partner in capped_pairs[len(first) :] if partner is bad]
        caps = (over, "per-bad-leaf-cap", config.per_bad_leaf), (dropped_goods, "per-tree-cap", config.per_tree)
        for left_out, reason, cap in caps:
            if left_out:
                leaves = ", ".join(str(good.leaf) for good in left_out)
                over_caps.append(_reject(bad, reason, f"the cap is {cap}; good leaves left out: {leaves}"))
    pairs = tuple(PathPair(good=good, bad=bad, split=shared_steps(good, bad)) for good, bad in first)
    return pairs, (*rejections, *over_caps)


def _in_turns(paths: Sequence[Path], config: PairsConfig, alpha: float, rng: random.Random) -> list[_Pair]:
    """Return all pairs, in rounds over the shuffled bad paths: each bad path is used once before
    any is used twice.

    In each round a bad path is paired with the shortest good path that it has not had yet; good
    paths of equal length are shuffled for each bad path.
    """
    choices = [
        (bad, sorted(rng.sample(goods, len(goods)), key=lambda good: len(good.nodes)))
        for bad in rng.sample(paths, len(paths))
        if (goods := [g for g in paths if _is_good(g, config, alpha) and _far_apart(g, bad, config)])
    ]
    rounds = zip_longest(*(goods for _, goods in choices))
    return [
        (good, bad) for round_ in rounds for (bad, _), good in zip(choices, round_, strict=True) if good is not None
    ]


def _shuffled(paths: Sequence[Path], config: PairsConfig, alpha: float) -> list[_Pair]:
    """Return all pairs in the order `published` or `shuffled`, as `config.order` says."""
    if config.order == "published":
        # Depth first, as in the published code: a node's number is higher than its parent's and its
        # elder siblings'.
        paths = sorted(paths, key=lambda path: path.nodes)
    falling = sorted(paths, key=lambda path: -path.trajectory.reward)
    # The published code shuffles all pairs and applies alpha afterwards. Its order is only repeated
    # if the pairs below alpha are shuffled too: the result depends on the number of pairs.
    pairs = [
        (good, bad)
        for good in falling
        for bad in falling
        if _far_apart(good, bad, config) and (config.order == "published" or _is_good(good, config, alpha))
    ]
    random.Random(_PUBLISHED_SEED).shuffle(pairs)
    return [(good, bad) for good, bad in pairs if _is_good(good, config, alpha)]


def good_paths(paths: Sequence[Path], alpha: float, rule: AlphaRule = "at_least") -> tuple[Path, ...]:
    """Return the paths with distinct transcripts whose reward clears alpha, in the given order."""
    return tuple(path for path in distinct(paths)[0] if clears(path.trajectory.reward, alpha, rule))


def distinct(paths: Iterable[Path]) -> tuple[tuple[Path, ...], tuple[Rejection, ...]]:
    """Return the first path of each transcript, in the given order, and a rejection for each
    other path.

    A transcript is the path's replies and observations. Paths of a tree search always differ;
    independent episodes may be equal.
    """
    first: dict[tuple[tuple[str, str], ...], Path] = {}
    rejections: list[Rejection] = []
    for path in paths:
        earlier = first.setdefault(_transcript(path), path)
        if earlier is not path:
            detail = f"same transcript as leaf {earlier.leaf}"
            rejections.append(_reject(path, "duplicate-transcript", detail))
    return tuple(first.values()), tuple(rejections)


def shared_steps(first: Path, second: Path) -> int:
    """Return how many steps two paths share from the start: steps with the same reply and the same
    observation.
    """
    length = 0
    for left, right in zip(_transcript(first), _transcript(second), strict=False):
        if left != right:
            break
        length += 1
    return length


def _is_good(path: Path, config: PairsConfig, alpha: float) -> bool:
    return clears(path.trajectory.reward, alpha, config.alpha_rule)


def _far_apart(good: Path, bad: Path, config: PairsConfig) -> bool:
    high, low = good.trajectory.reward, bad.trajectory.reward
    if config.beta_rule == "absolute":
        return exceeds(config.beta, low) and exceeds(high, config.beta)
    return exceeds(high - low, config.beta)


def _reject(path: Path, reason: str, detail: str) -> Rejection:
    return Rejection(stage=STAGE, subject=f"{path.tree_id}:{path.leaf}", reason=reason, detail=detail)


def _transcript(path: Path) -> tuple[tuple[str, str], ...]:
    return tuple((step.reply, step.observation) for step in path.trajectory.steps)
