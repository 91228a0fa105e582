"""The open worlds of a recipe: the environment of each, and of any instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agentr_core.protocols.environment import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.types import Instance

MakeEnvironment = Callable[[str], Environment]
"""Makes a new environment of a world, given the name that its instances use."""


class Worlds:
    """An environment for each world of a recipe, made when it is first needed."""

    def __init__(self, recipe: Recipe, make: MakeEnvironment) -> None:
        self._recipe = recipe
        self._make = make
        self._open: dict[str, Environment] = {}

    def __iter__(self) -> Iterator[tuple[Recipe, Environment]]:
        """Yield for each world, in order, the recipe as that world sees it and the world's
        environment.
        """
        for name, recipe in self._recipe.worlds().items():
            yield recipe, self.named(name)

    def of(self, instance: Instance) -> Environment:
        """Return the environment of an instance. Raises `DataFault` if the recipe has none."""
        return self.named(instance.environment)

    def named(self, environment: str) -> Environment:
        """Return the environment by the name that its instances use. Raises as `of`."""
        name = self._recipe.world_name(environment)
        if name not in self._open:
            self._open[name] = self._make(name)
        return self._open[name]

    def close(self) -> None:
        """Close the environments. Calling it twice is harmless."""
        while self._open:
            self._open.popitem()[1].close()
