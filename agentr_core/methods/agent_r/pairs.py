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
from agentr_core.types import PathPair, Rejection, TreePath

STAGE = "pairs"
_PUBLISHED_SEED = 123
_Pair = tuple[TreePath, TreePath]
"""A good path and a bad path, in this order."""


def pair_id(pair: PathPair) -> str:
    """Return the id of a pair: a fingerprint of its two leaves and its tree id. The tree id itself
    depends on the iteration, the policy and the search settings.
    """
    return fingerprint("pair", pair.good.tree_id, pair.good.leaf, pair.bad.leaf)


def pairs_of_tree(
    tree_id: str, paths: Sequence[TreePath], config: PairsConfig, *, alpha: float, seed: int
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
    unique_paths, rejections = distinct_paths(paths)
    good_candidates = [path for path in unique_paths if _is_good(path, config, alpha)]
    reason = ""
    if not any(exceeds(path.trajectory.reward, 0) for path in unique_paths):
        reason = "no-reward"
    elif not good_candidates:
        reason = "no-good-path"
    elif not any(_has_reward_gap(good, bad, config) for good in good_candidates for bad in unique_paths):
        reason = "no-bad-path"
    if reason:
        rewards = [path.trajectory.reward for path in unique_paths]
        detail = "no path of the tree has an end"
        if rewards:
            detail = f"{len(rewards)} different paths with rewards from {min(rewards):g} to {max(rewards):g}"
        return (), (*rejections, Rejection(stage=STAGE, subject=tree_id, reason=reason, detail=detail))
    if config.order == "turns":
        rng = random.Random(derive_seed(seed, STAGE, unique_paths[0].trajectory.instance.key))
        candidates = _round_robin_pairs(unique_paths, config, alpha, rng)
    else:
        candidates = _shuffled_pairs(unique_paths, config, alpha)
    partners_by_bad_leaf: dict[int, list[TreePath]] = {}
    for good, bad in candidates:
        partners_by_bad_leaf.setdefault(bad.leaf, []).append(good)
    capped_partners = {leaf: partners[: config.per_bad_leaf or None] for leaf, partners in partners_by_bad_leaf.items()}
    capped_pairs = [(good, bad) for good, bad in candidates if any(good is path for path in capped_partners[bad.leaf])]
    kept_pairs = capped_pairs[: config.per_tree or None]
    cap_rejections: list[Rejection] = []
    for bad in {bad.leaf: bad for _, bad in candidates}.values():
        over_leaf_cap = partners_by_bad_leaf[bad.leaf][len(capped_partners[bad.leaf]) :]
        over_tree_cap = [good for good, partner in capped_pairs[len(kept_pairs) :] if partner is bad]
        caps = (
            (over_leaf_cap, "per-bad-leaf-cap", config.per_bad_leaf),
            (over_tree_cap, "per-tree-cap", config.per_tree),
        )
        for left_out, reason, cap in caps:
            if left_out:
                leaves = ", ".join(str(good.leaf) for good in left_out)
                cap_rejections.append(_rejection(bad, reason, f"the cap is {cap}; good leaves left out: {leaves}"))
    pairs = tuple(PathPair(good=good, bad=bad, split=num_shared_steps(good, bad)) for good, bad in kept_pairs)
    return pairs, (*rejections, *cap_rejections)


def _round_robin_pairs(paths: Sequence[TreePath], config: PairsConfig, alpha: float, rng: random.Random) -> list[_Pair]:
    """Return all pairs, in rounds over the shuffled bad paths: each bad path is used once before
    any is used twice.

    In each round a bad path is paired with the shortest good path that it has not had yet; good
    paths of equal length are shuffled for each bad path.
    """
    ordered_partners = [
        (bad, sorted(rng.sample(partners, len(partners)), key=lambda good: len(good.nodes)))
        for bad in rng.sample(paths, len(paths))
        if (partners := [g for g in paths if _is_good(g, config, alpha) and _has_reward_gap(g, bad, config)])
    ]
    rounds = zip_longest(*(partners for _, partners in ordered_partners))
    return [
        (good, bad)
        for round_ in rounds
        for (bad, _), good in zip(ordered_partners, round_, strict=True)
        if good is not None
    ]


def _shuffled_pairs(paths: Sequence[TreePath], config: PairsConfig, alpha: float) -> list[_Pair]:
    """Return all pairs in the order `published` or `shuffled`, as `config.order` says."""
    if config.order == "published":
        # Depth first, as in the published code: a node's number is higher than its parent's and its
        # elder siblings'.
        paths = sorted(paths, key=lambda path: path.nodes)
    by_falling_reward = sorted(paths, key=lambda path: -path.trajectory.reward)
    # The published code shuffles all pairs and applies alpha afterwards. Its order is only repeated
    # if the pairs below alpha are shuffled too: the result depends on the number of pairs.
    pairs = [
        (good, bad)
        for good in by_falling_reward
        for bad in by_falling_reward
        if _has_reward_gap(good, bad, config) and (config.order == "published" or _is_good(good, config, alpha))
    ]
    random.Random(_PUBLISHED_SEED).shuffle(pairs)
    return [(good, bad) for good, bad in pairs if _is_good(good, config, alpha)]


def good_paths(paths: Sequence[TreePath], alpha: float, rule: AlphaRule = "at_least") -> tuple[TreePath, ...]:
    """Return the paths with distinct transcripts whose reward clears alpha, in the given order."""
    return tuple(path for path in distinct_paths(paths)[0] if clears(path.trajectory.reward, alpha, rule))


def distinct_paths(paths: Iterable[TreePath]) -> tuple[tuple[TreePath, ...], tuple[Rejection, ...]]:
    """Return the first path of each transcript, in the given order, and a rejection for each
    other path.

    A transcript is the path's replies and observations. Paths of a tree search always differ;
    independent episodes may be equal.
    """
    first_by_transcript: dict[tuple[tuple[str, str], ...], TreePath] = {}
    rejections: list[Rejection] = []
    for path in paths:
        earlier = first_by_transcript.setdefault(_transcript(path), path)
        if earlier is not path:
            detail = f"same transcript as leaf {earlier.leaf}"
            rejections.append(_rejection(path, "duplicate-transcript", detail))
    return tuple(first_by_transcript.values()), tuple(rejections)


def num_shared_steps(first: TreePath, second: TreePath) -> int:
    """Return how many steps two paths share from the start: steps with the same reply and the same
    observation.
    """
    length = 0
    for left, right in zip(_transcript(first), _transcript(second), strict=False):
        if left != right:
            break
        length += 1
    return length


def _is_good(path: TreePath, config: PairsConfig, alpha: float) -> bool:
    return clears(path.trajectory.reward, alpha, config.alpha_rule)


def _has_reward_gap(good: TreePath, bad: TreePath, config: PairsConfig) -> bool:
    high, low = good.trajectory.reward, bad.trajectory.reward
    if config.beta_rule == "absolute":
        return exceeds(config.beta, low) and exceeds(high, config.beta)
    return exceeds(high - low, config.beta)


def _rejection(path: TreePath, reason: str, detail: str) -> Rejection:
    return Rejection(stage=STAGE, subject=f"{path.tree_id}:{path.leaf}", reason=reason, detail=detail)


def _transcript(path: TreePath) -> tuple[tuple[str, str], ...]:
    return tuple((step.reply, step.observation) for step in path.trajectory.steps)
