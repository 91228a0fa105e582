"""A forecast of what a tree search of a recipe's size would yield with a given policy.

A dive is treated as an episode whose outcome is independent of the other dives of its tree; its
last node draws `search.width` replies, so it ends in that many paths. Paths that begin after the
expert's steps are not foreseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import comb

from agentr_core.evaluation.headroom import Forecast, Headroom, Prospect, prospect
from agentr_core.evaluation.pass_rates import Run
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.sampling import sampling_of
from agentr_core.runtime.place import Acting


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSize:
    """The settings of a recipe that decide how much a tree yields.

    A tree is given up after `give_up` dives if none of them won. A dive ends in `leaves` paths.
    `per_tree` and `per_bad_leaf` are the caps of pairs, `good_per_tree` that of good paths. 0 means
    no limit.
    """

    dives: int
    give_up: int
    leaves: int
    per_tree: int
    per_bad_leaf: int
    good_per_tree: int

    def pairs(self, won: int, lost: int) -> int:
        """Return the number of pairs of a tree with `won` won and `lost` lost dives."""
        good = won * self.leaves
        return _capped(lost * self.leaves * _capped(good, self.per_bad_leaf), self.per_tree)

    def good_paths(self, won: int) -> int:
        """Return the number of good paths that are kept of a tree with `won` won dives."""
        return _capped(won * self.leaves, self.good_per_tree)

    def outcomes(self, run: Run) -> Iterator[tuple[int, int, float]]:
        """Yield the possible outcomes of a tree: dives won, dives lost, and their probability."""
        first = min(self.give_up or self.dives, self.dives)
        rest = self.dives - first
        yield 0, first, run(0, first)
        for won in range(1, self.dives + 1):
            # A tree that was given up has no later dive that might have won.
            ways = comb(self.dives, won) - comb(rest, won)
            yield won, self.dives - won, ways * run(won, self.dives - won)

    def expected(self, run: Run, value: Callable[[int, int], float]) -> float:
        """Return the mean of `value`, a function of won and lost dives, over the outcomes of a
        tree.
        """
        return sum(chance * value(won, lost) for won, lost, chance in self.outcomes(run))


def acting(recipe: Recipe) -> Acting:
    """Return how the policy acts in a search; a path has one step more than `search.depth`."""
    return Acting(sampling=sampling_of(recipe.search), max_steps=recipe.search.depth + 1)


def tree_size(recipe: Recipe) -> TreeSize:
    """Return the settings of a recipe that decide how much its trees yield."""
    search, pairs = recipe.search, recipe.pairs
    alone = search.method == "rollouts"
    return TreeSize(
        dives=search.dives * search.width if alone else search.dives,
        give_up=search.give_up,
        leaves=1 if alone else search.width,
        per_tree=pairs.per_tree,
        per_bad_leaf=pairs.per_bad_leaf,
        good_per_tree=recipe.data.good_per_tree,
    )


def foresee(recipe: Recipe, headroom: Headroom) -> Prospect:
    """Return what the trees of a first iteration would yield, and whether Agent-R can learn from
    it: from good paths where it trains on nothing else, from pairs otherwise.

    Rewards are assumed to be 0 or 1.
    """
    size, of_good = tree_size(recipe), recipe.data.use == "good"

    def over_all(name: str, value: Callable[[int, int], float]) -> Forecast:
        most = max(value(won, size.dives - won) for won in range(size.dives + 1))
        expected = headroom.rates.total(headroom.instances, lambda _, run: size.expected(run, value), most=most)
        return Forecast(name=name, expected=expected)

    return prospect(
        "agent-r",
        [
            over_all("won_trees", lambda won, lost: won > 0),
            over_all("mixed_trees", lambda won, lost: won > 0 < lost),
            over_all("pairs", size.pairs),
            over_all("good_paths", lambda won, lost: size.good_paths(won)),
        ],
        needs="good_paths" if of_good else "pairs",
        short="hardly a tree is won" if of_good else "nearly every tree is won or lost as a whole",
    )


def _capped(number: int, cap: int) -> int:
    return min(number, cap) if cap else number
