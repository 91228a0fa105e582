"""TextCraft in process: crafting goals from listed commands, at microseconds a step.

Source: ADaPT (arXiv 2311.05772) as served by AgentGym (arXiv 2406.04151); rules and observation
strings are theirs, so that transcripts can be compared. Unlike in the served version, the text of
an instance is a function of its index.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from agentr_core.environment import Environment, Instances
from agentr_core.environments.crafting import game
from agentr_core.environments.crafting.game import (
    INSTRUCTION,
    CraftingGame,
    CraftingProblem,
    apply_last_hop,
    chain,
    command,
    first_observation,
    lazy_reply,
    optimal_replies,
    plan,
)
from agentr_core.environments.crafting.recipes import (
    RECIPES,
    SPLIT,
    Recipe,
    RecipeBook,
    build_book,
    load_folder,
    load_shipped,
    load_split,
)
from agentr_core.environments.crafting.shaped import ProceduralWorlds, ShapedWorlds, free_names, rename
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.fingerprint import canonical, derive_seed
from agentr_core.replies import Labels, words_after_label
from agentr_core.system import data_path
from agentr_core.types import Instance, Transition, Verdict

# The commands that an instance of a crafting world lists: all that its goal may need, and up to 10
# useless ones.
#
# Source: TextCraft, ADaPT (arXiv 2311.05772) as served by AgentGym (arXiv 2406.04151).

Distractors = Literal["distinct", "published"]
"""How distractors are drawn. See `listed_commands`."""

MAX_DISTRACTORS = 10
_PUBLISHED_SEED = 42


def listed_commands(
    world: RecipeBook, goal: str, instance: Instance, *, distractors: Distractors = "distinct"
) -> tuple[Recipe, ...]:
    """Return the recipes that an instance lists: all that the goal may need and up to 10
    distractors, shuffled by its index.

    A distractor shares an ingredient with a needed recipe. For each ingredient of a needed recipe,
    up to 10 recipes are drawn. With `distinct`, each recipe can be drawn once. With `published`, a
    recipe that has a group is among the candidates twice, and every occurrence of a recipe in the
    tree of the goal draws again, with the fixed seed of the public code, so that as many
    distractors are left as in the published world.
    """
    required = _recipes_for(world, goal, frozenset())
    rng = random.Random(derive_seed("textcraft-commands", instance.split == "procedural", instance.index))
    if distractors == "published":
        occurrences = list(_occurrences(world, goal, frozenset()))
        # The public code seeds its generator anew at each reset.
        fixed = random.Random(_PUBLISHED_SEED)
        drawable: dict[str, Recipe] = {}
        for recipe in occurrences:
            for ingredient in recipe.inputs:
                users = world.users_twice(ingredient.name)
                for distractor in fixed.sample(users, min(MAX_DISTRACTORS, len(users))):
                    drawable.setdefault(command(distractor), distractor)
        candidates = [drawable[line] for line in sorted(drawable.keys() - {command(recipe) for recipe in occurrences})]
    else:
        once_each: dict[Recipe, None] = {}
        for recipe in required:
            for ingredient in recipe.inputs:
                users = world.users(ingredient.name)
                once_each.update(dict.fromkeys(rng.sample(users, min(MAX_DISTRACTORS, len(users)))))
        candidates = [recipe for recipe in once_each if recipe not in required]
    listing = [*required, *rng.sample(candidates, min(MAX_DISTRACTORS, len(candidates)))]
    rng.shuffle(listing)
    return tuple(listing)


def _recipes_for(world: RecipeBook, name: str, path: frozenset[str]) -> dict[Recipe, None]:
    recipes: dict[Recipe, None] = {}
    if name in path:
        return recipes
    for recipe in _recipes_of(world, name):
        recipes[recipe] = None
        for ingredient in recipe.inputs:
            recipes.update(_recipes_for(world, ingredient.name, path | {name}))
    return recipes


def _occurrences(world: RecipeBook, name: str, path: frozenset[str]) -> Iterator[Recipe]:
    """Yield the recipes of a name and of everything below it, each as often as it occurs; at most
    163 for an official goal.
    """
    if name in path:
        return
    yield from _recipes_of(world, name)
    for recipe in _recipes_of(world, name):
        for ingredient in recipe.inputs:
            yield from _occurrences(world, ingredient.name, path | {name})


def _recipes_of(world: RecipeBook, name: str) -> tuple[Recipe, ...]:
    return world.by_item.get(name) or world.by_tag.get(name, ())


RENAMINGS = 1_000_000
"""The number of renamed versions of each official instance."""
RENAMED = {"renamed": "train", "renamed-test": "test", "renamed-rest": "rest"}
"""The splits of official instances under other names, and the splits that these come from."""

_INVENTED: Mapping[str, Callable[[RecipeBook], ProceduralWorlds | ShapedWorlds]] = {
    "procedural": lambda book: ProceduralWorlds(),
    "shaped": ShapedWorlds,
}
"""The splits of invented worlds, and the functions that make their worlds, given the official
book.
"""


class TextCraft(Environment):
    """Crafting goals over the recipes of Minecraft 1.16, or over procedural worlds.

    Splits: `train` (374 instances) and `test` (100) are the published ones, and `rest` (70) has the
    goals in neither. `procedural` has any number of invented worlds that share no item with the
    official ones, and `shaped` has invented worlds in the shape of the official goals. `renamed`,
    `renamed-test` and `renamed-rest` repeat the instances of the first three with other names for
    their items, so that knowing the recipes by heart is neither learned nor measured on them.

    Args:
        recipes_dir: a folder of original recipe JSON files to read instead of the shipped table.
        expert: `optimal` fetches everything first and takes the fewest steps; `lazy` fetches only
            what the next craft needs, so that it need not compute totals in advance.
        distractors: `published` draws the useless commands as the public code does, where a recipe
            with a group is a candidate twice, so that instances have as many of them as published;
            with `distinct`, each recipe is a candidate once. The option concerns the official goals
            and the renamed ones.
    """

    name = "textcraft"
    instruction = INSTRUCTION
    labels: Labels = "lenient"

    def __init__(
        self,
        *,
        recipes_dir: str = "",
        expert: Literal["optimal", "lazy"] = "optimal",
        distractors: Distractors = "distinct",
    ) -> None:
        if expert not in ("optimal", "lazy"):
            raise ConfigError(f"environment.options.expert must be optimal or lazy, not {expert!r}")
        if distractors not in get_args(Distractors):
            raise ConfigError(
                f"environment.options.distractors must be {' or '.join(get_args(Distractors))}, not {distractors!r}"
            )
        self.book = load_folder(Path(recipes_dir)) if recipes_dir else _shipped_book()
        self._split = _shipped_split()
        self._families: dict[str, ProceduralWorlds | ShapedWorlds] = {}
        self._expert = expert
        self._distractors = distractors
        self._world: RecipeBook = self.book
        self._goal = ""
        self._game = CraftingGame(self._world)

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the recipes and the list of splits."""
        recipes = options.get("recipes_dir") or str(data_path(*RECIPES))
        return recipes, str(data_path(*SPLIT))

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return ("train", "test", "rest", *_INVENTED, *RENAMED)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split; in train, test and rest, an index is the published
        `data_idx`.
        """
        if split in _INVENTED:
            indices: Sequence[int] = range(self._invented(split).count)
        elif split in RENAMED:
            indices = range(RENAMINGS * len(self._published(RENAMED[split])))
        elif split in self._split:
            indices = self._published(split)
        else:
            raise ConfigError(f"textcraft has no split {split!r}; it has {', '.join(self.splits())}")
        return Instances(self.name, split, indices)

    def problem(self, instance: Instance) -> CraftingProblem:
        """Return the goal and the listed commands of an instance. Raises `EnvironmentFault` for an
        unknown one.
        """
        return self._open(instance)[0]

    def reset(self, instance: Instance) -> str:
        """Return the listed commands and the goal; the inventory is empty."""
        problem, self._world = self._open(instance)
        self._goal = problem.goal
        self._game = CraftingGame(self._world)
        return first_observation(problem)

    def parse(self, reply: str) -> str:
        """Return the line after the last "Action:" of a reply, in lower case, with letters, digits,
        commas and spaces only.
        """
        return parse_action(reply, self.labels)

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition; making or getting the goal item gives
        reward 1 and ends the episode.
        """
        observation, item = self._game.act(action)
        won = item == self._goal
        return Transition(
            observation, float(won), won, False, {"success": won, "valid": bool(item) or action.startswith("inventory")}
        )

    def snapshot(self) -> Any:
        """Return a copy of the inventory with the goal and world it belongs to."""
        return self._world, self._goal, self._game.entries

    def state(self) -> str:
        """Return the carried items as text: nothing else changes during an episode."""
        return canonical(self._game.entries)

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a snapshot."""
        self._world, self._goal, entries = snapshot
        self._game = CraftingGame(self._world, entries)

    @property
    def inventory(self) -> Mapping[str, int]:
        """A copy of the present inventory: item id to count, no zero entries."""
        return self._game.inventory

    def depth(self, instance: Instance) -> int | None:
        """Return the length of the longest chain of crafts to the goal: 1 to 4 for official
        goals.
        """
        if instance.split in _INVENTED:
            world, goal = self._invented(instance.split).world(instance.index)
            return world.depth(goal)
        return self.book.goals[self.origin(instance).index][1]

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of the expert, thoughts and actions; None for a goal out of reach."""
        problem = self.problem(instance)
        inventory: dict[str, int] = {}
        replies: list[str] = []
        first = plan(problem, inventory)
        if first is None:
            return None
        if self._expert == "optimal":
            return optimal_replies(problem, first)
        while not inventory.get(problem.goal):
            present = plan(problem, inventory)
            if present is None:
                return None
            hops = chain(problem, inventory, present)
            replies.append(lazy_reply(hops, present.items))
            apply_last_hop(inventory, hops, present.items)
        return replies

    def oracle(self, instance: Instance, actions: Sequence[str]) -> tuple[Verdict, ...]:
        """Return the true verdict on each action of an episode, played from its start."""
        return game.verdicts(*self._open(instance), actions)

    def _invented(self, split: str) -> ProceduralWorlds | ShapedWorlds:
        """Return the worlds of an invented split; they are set up when one is first needed, which
        takes a moment.
        """
        if split not in self._families:
            self._families[split] = _INVENTED[split](self.book)
        return self._families[split]

    def _published(self, split: str) -> list[int]:
        return [index for index in self._split[split] if index < len(self.book.goals)]

    def origin(self, instance: Instance) -> Instance:
        """Return the official instance that a renamed one was made from; any other instance is
        returned as it is.
        """
        if instance.split not in RENAMED:
            return instance
        split = RENAMED[instance.split]
        official = self._published(split)
        return Instance(environment=self.name, split=split, index=official[instance.index % len(official)])

    def _open(self, instance: Instance) -> tuple[CraftingProblem, RecipeBook]:
        """Return the problem of an instance and the recipes of its world."""
        if instance.environment != self.name or instance.split not in self.splits():
            raise EnvironmentFault(f"textcraft has no instance {instance.key}")
        origin = self.origin(instance)
        distractors: Distractors = "distinct"
        if instance.split in _INVENTED:
            world, goal = self._invented(instance.split).world(instance.index)
        elif origin.index < len(self.book.goals):
            world, goal, distractors = self.book, self.book.goals[origin.index][0], self._distractors
        else:
            raise EnvironmentFault(f"textcraft has no instance {instance.key}")
        commands = listed_commands(world, goal, origin, distractors=distractors)
        problem = CraftingProblem(goal=goal, commands=commands, item_to_tag=world.item_to_tag)
        if instance.split in RENAMED:
            # The split `renamed` existed before the other two: its texts stay as they were.
            split_key = () if instance.split == "renamed" else (instance.split,)
            rng = random.Random(derive_seed("textcraft-renamed", *split_key, instance.index))
            problem = rename(problem, free_names(self.book), rng)
            world = build_book(problem.commands, item_to_tag=problem.item_to_tag)
        return problem, world


# Every tree in flight has an environment of its own; making one must cost nothing.
_shipped_book = cache(load_shipped)
_shipped_split = cache(load_split)


def parse_action(reply: str, labels: Labels = "lenient") -> str:
    """Return the line after the last "Action:" of a reply, in lower case, with letters, digits,
    commas and spaces only.

    The label may stand on a line of its own. A lone "look" means the inventory, as in AgentGym's
    client.
    """
    action = words_after_label(reply, labels).lower()
    return "inventory" if action == "look" else action
