"""The rules of a crafting world: an inventory, three actions, and what the world answers.

Source: ADaPT (arXiv 2311.05772), AgentGym (arXiv 2406.04151); the observation strings are theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentr_core.environments.crafting import text
from agentr_core.environments.crafting.recipes import Recipe, RecipeBook

_CRAFT = re.compile(r"craft (.*) using (.*)")
_GET = re.compile(r"get ([0-9]+) (.*)")
_COUNTED = re.compile(r"([0-9]+) (.*)")
_NUMBER = re.compile(r"[0-9]+")


MAX_DIGITS = 4000
"""The most digits that a number in an action may have. Python reads 4300 digits, and sums must stay
below that.
"""


class CraftingGame:
    """One inventory in one world. `act` never raises: what cannot be done is answered in words."""

    def __init__(self, world: RecipeBook, entries: Mapping[str, int] | None = None) -> None:
        self._world = world
        self._entries = dict(entries or {})

    @property
    def entries(self) -> dict[str, int]:
        """A copy of the items listed as carried: item id to count. Getting 0 of an item makes an
        entry of 0.
        """
        return dict(self._entries)

    @property
    def inventory(self) -> dict[str, int]:
        """A copy of the inventory: item id to count, no zero entries."""
        return {item: count for item, count in self._entries.items() if count}

    def act(self, action: str) -> tuple[str, str]:
        """Return the observation, and the id of the item that was made or got; empty if there was
        none.
        """
        if any(len(number) > MAX_DIGITS for number in _NUMBER.findall(action)):
            return f"Could not execute {action}", ""
        if match := _CRAFT.match(action):
            return self._craft(match[1], match[2])
        if match := _GET.match(action):
            return self._get(match[2], int(match[1]))
        if action.startswith("inventory"):
            return text.inventory(self._entries), ""
        return f"Could not execute {action}", ""

    def _get(self, name: str, count: int) -> tuple[str, str]:
        item = text.identifier(name)
        if item in self._world.by_item or item in self._world.tags or item not in self._world.items:
            return f"Could not find {name}", ""
        self._add(item, count)
        return f"Got {count} {name}", item

    def _craft(self, wanted: str, using: str) -> tuple[str, str]:
        world = self._world
        match = _COUNTED.match(wanted)
        count, name = (int(match[1]), match[2]) if match else (1, wanted)
        target = text.identifier(name)
        inputs: list[tuple[str, int]] = []
        for part in using.split(","):
            counted = _COUNTED.match(part.strip())
            if counted is None:
                return f"Wrong item format: {part.strip()}", ""
            inputs.append((text.identifier(counted[2]), int(counted[1])))
        for item, amount in inputs:
            # Even an amount of 0 needs the item to be listed as carried, if only with a count of 0.
            if item in world.tags or item not in self._entries or self._entries[item] < amount:
                return f"Could not find enough items to craft {None if target in world.tags else target}", ""
        for recipe in () if target in world.tags else world.by_item.get(target, ()):
            if _matches(recipe, inputs, world.item_to_tag):
                for item, amount in inputs:
                    self._take(item, amount)
                self._add(target, recipe.count)
                return f"Crafted {recipe.count} {target}", target
        tag, item_id = (f"'{target}'", "None") if target in world.tags else ("None", f"'{target}'")
        missing = f"ItemTagWithCount(item_tag=ItemTag(tag={tag}, item_id={item_id}), count={count})"
        return f"Could not find a valid recipe for {missing}", ""

    def _add(self, item: str, count: int) -> None:
        self._entries[item] = self._entries.get(item, 0) + count

    def _take(self, item: str, count: int) -> None:
        self._add(item, -count)
        if not self._entries[item]:
            del self._entries[item]


def _matches(recipe: Recipe, inputs: Sequence[tuple[str, int]], item_to_tag: Mapping[str, str]) -> bool:
    """Return whether the given inputs are those of the recipe, one to one and with equal counts."""
    if len(inputs) != len(recipe.inputs):
        return False
    left = list(recipe.inputs)
    for item, amount in inputs:
        for ingredient in left:
            name = item_to_tag.get(item) if ingredient.is_tag else item
            if ingredient.name == name and ingredient.count == amount:
                left.remove(ingredient)
                break
        else:
            return False
    return True
