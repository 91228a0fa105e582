"""Crafting worlds drawn from a seed: any number, any depth, no item in common with the official
ones.
"""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

from agentr_core.environments.crafting.recipes import Ingredient, Recipe, RecipeBook, build_book
from agentr_core.fingerprint import derive_seed

_QUALITIES = (
    "pale", "hollow", "woven", "gilded", "ashen", "brittle", "tarnished", "glazed", "knotted", "tempered", "mottled",
    "ridged", "sunken", "twisted", "humming", "veiled", "braided", "carved", "dusky", "frosted",
)  # fmt: skip
_MATERIALS = (
    "tin", "amber", "slate", "cork", "resin", "pewter", "velvet", "marble", "cedar", "onyx", "jute", "zinc", "opal",
    "willow", "basil", "nickel", "linen", "agate", "maple", "pumice",
)  # fmt: skip
_FORMS = (
    "rod", "plate", "ring", "frame", "spool", "lens", "crate", "gear", "mask", "vial", "bead", "hinge", "panel",
    "wheel", "bell", "tile", "hook", "sheet", "cone", "charm",
)  # fmt: skip
# Counts, each as often as the official recipes use it: most crafts take one of a thing and give
# one.
_INPUT_COUNTS = (1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9)
_OUTPUT_COUNTS = (1, 1, 1, 1, 1, 2, 3, 4, 4, 6, 8, 16)
_NUM_INPUTS = (1, 1, 1, 2, 2, 2, 2, 3)


class ProceduralWorlds:
    """A family of crafting worlds, one for each index.

    Args:
        count: the number of instances of the family.
        max_depth: the goals' depths cycle from 1 to this number.
        seed: a different seed gives a different family.
    """

    def __init__(self, *, count: int = 10**9, max_depth: int = 4, seed: int = 0) -> None:
        self.count = count
        self._max_depth = max_depth
        self._seed = seed
        # An episode asks for its one world again and again. Hundreds of environments in flight each
        # keep one.
        self.world = lru_cache(maxsize=1)(self._world)

    def _world(self, index: int) -> tuple[RecipeBook, str]:
        """Return the recipes of a world and its goal item, whose depth is `index % max_depth +
        1`.
        """
        rng = random.Random(derive_seed("procedural-world", self._seed, index))
        depth = index % self._max_depth + 1
        names = _names(rng)
        levels = [[next(names) for _ in range(rng.randint(3, 6))]]
        recipes: list[Recipe] = []
        for level in range(1, depth + 1):
            made = []
            for _ in range(1 if level == depth else rng.randint(1, 3)):
                output = next(names)
                # One ingredient from the level below fixes the depth; the others come from anywhere
                # below.
                inputs = [rng.choice(levels[-1])]
                lower = [item for below in levels for item in below if item not in inputs]
                inputs += rng.sample(lower, min(len(lower), rng.choice(_NUM_INPUTS) - 1))
                rng.shuffle(inputs)
                recipes.append(_recipe(output, inputs, rng))
                made.append(output)
            levels.append(made)
        goal = levels[-1][0]
        everything = list(itertools.chain(*levels[:-1]))
        recipes += [
            _recipe(next(names), rng.sample(everything, min(len(everything), rng.choice(_NUM_INPUTS))), rng)
            for _ in range(rng.randint(2, 10))
        ]
        rng.shuffle(recipes)
        return build_book(recipes), goal


def _names(rng: random.Random) -> itertools.chain[str]:
    def draw() -> str:
        return f"minecraft:{rng.choice(_QUALITIES)}_{rng.choice(_MATERIALS)}_{rng.choice(_FORMS)}"

    seen: set[str] = set()
    fresh = (name for name in iter(draw, None) if not (name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return itertools.chain(fresh)


def _recipe(output: str, inputs: list[str], rng: random.Random) -> Recipe:
    return Recipe(
        output=output,
        count=rng.choice(_OUTPUT_COUNTS),
        output_tag=None,
        inputs=tuple(Ingredient(name=item, count=rng.choice(_INPUT_COUNTS), is_tag=False) for item in inputs),
    )
