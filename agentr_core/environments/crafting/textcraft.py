"""TextCraft in this process, at microseconds a step: crafting goals by listed commands.

Source: ADaPT (arXiv 2311.05772) as served by AgentGym (arXiv 2406.04151); rules and observation
strings are theirs, so that transcripts can be compared. Unlike in the served version, the text of
an instance depends only on its index and split.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from agentr_core.environment import Environment, Instances
from agentr_core.environments.crafting import game
from agentr_core.environments.crafting.game import (
    INSTRUCTION,
    CraftingGame,
    CraftingProblem,
    apply_last_link,
    chain,
    craft_command,
    first_observation,
    lazy_reply,
    optimal_replies,
    shortest_plan,
)
from agentr_core.environments.crafting.recipes import (
    NAMESPACE,
    RECIPES_FILE,
    SPLIT_FILE,
    Ingredient,
    Recipe,
    RecipeBook,
    build_book,
    load_folder,
    load_shipped,
    load_splits,
)
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.fingerprint import canonical, derive_seed
from agentr_core.replies import LabelStyle, words_after_label
from agentr_core.system import data_path
from agentr_core.types import Instance, Transition, Verdict

# The commands that an instance of a crafting world lists: all that its goal may need, and up to 10
# useless ones (distractors).
#
# Source: TextCraft, ADaPT (arXiv 2311.05772) as served by AgentGym (arXiv 2406.04151).

Distractors = Literal["distinct", "published"]
"""How the useless commands of an instance are drawn; see `listed_commands`."""

MAX_DISTRACTORS = 10
_PUBLISHED_SEED = 42


def listed_commands(
    book: RecipeBook, goal: str, instance: Instance, *, distractors: Distractors = "distinct"
) -> tuple[Recipe, ...]:
    """Return the recipes that an instance lists: all that the goal may need and up to 10
    distractors, in an order drawn from the instance's index.

    A distractor shares an ingredient with a needed recipe. For each ingredient of each needed
    recipe, up to 10 recipes that use it are drawn, and up to 10 distractors are drawn from all of
    these. With `distinct`, each recipe is one candidate. With `published`, a recipe with a group is
    a candidate twice, and the draw is repeated for every occurrence of a recipe in the goal's tree,
    with the fixed seed of the public code, so that there are as many distractors as in the
    published world.
    """
    needed_recipes = _needed_recipes(book, goal, frozenset())
    rng = random.Random(derive_seed("textcraft-commands", instance.split == "procedural", instance.index))
    if distractors == "published":
        occurrences = list(_occurrences(book, goal, frozenset()))
        # The public code seeds its generator anew at each reset.
        published_rng = random.Random(_PUBLISHED_SEED)
        candidate_by_command: dict[str, Recipe] = {}
        for recipe in occurrences:
            for ingredient in recipe.inputs:
                using_recipes = book.recipes_by_ingredient_twice[ingredient.name]
                for distractor in published_rng.sample(using_recipes, min(MAX_DISTRACTORS, len(using_recipes))):
                    candidate_by_command.setdefault(craft_command(distractor), distractor)
        candidates = [
            candidate_by_command[line]
            for line in sorted(candidate_by_command.keys() - {craft_command(recipe) for recipe in occurrences})
        ]
    else:
        drawn_recipes: dict[Recipe, None] = {}
        for recipe in needed_recipes:
            for ingredient in recipe.inputs:
                using_recipes = book.recipes_by_ingredient[ingredient.name]
                drawn_recipes.update(dict.fromkeys(rng.sample(using_recipes, min(MAX_DISTRACTORS, len(using_recipes)))))
        candidates = [recipe for recipe in drawn_recipes if recipe not in needed_recipes]
    listing = [*needed_recipes, *rng.sample(candidates, min(MAX_DISTRACTORS, len(candidates)))]
    rng.shuffle(listing)
    return tuple(listing)


def _needed_recipes(book: RecipeBook, name: str, path: frozenset[str]) -> dict[Recipe, None]:
    recipes: dict[Recipe, None] = {}
    if name in path:
        return recipes
    for recipe in _recipes_of(book, name):
        recipes[recipe] = None
        for ingredient in recipe.inputs:
            recipes.update(_needed_recipes(book, ingredient.name, path | {name}))
    return recipes


def _occurrences(book: RecipeBook, name: str, path: frozenset[str]) -> Iterator[Recipe]:
    """Yield the recipes of a name and of everything below it, each as often as it occurs in the
    tree; for an official goal at most 163.
    """
    if name in path:
        return
    yield from _recipes_of(book, name)
    for recipe in _recipes_of(book, name):
        for ingredient in recipe.inputs:
            yield from _occurrences(book, ingredient.name, path | {name})


def _recipes_of(book: RecipeBook, name: str) -> tuple[Recipe, ...]:
    return book.recipes_by_item.get(name) or book.recipes_by_tag.get(name, ())


NUM_RENAMINGS = 1_000_000
"""The number of renamed versions of each official instance."""
OFFICIAL_SPLIT_BY_RENAMED = {"renamed": "train", "renamed-test": "test", "renamed-rest": "rest"}
"""The splits with renamed items, and the official split that each is made from."""

_MAKE_WORLDS_BY_SPLIT: Mapping[str, Callable[[RecipeBook], ProceduralWorlds | ShapedWorlds]] = {
    "procedural": lambda book: ProceduralWorlds(),
    "shaped": lambda book: ShapedWorlds(book),
}
"""The splits of invented worlds, each with a function that makes the worlds from the official
recipe book.
"""


class TextCraft(Environment):
    """Crafting goals over the recipes of Minecraft 1.16, or over procedural worlds.

    Splits: `train` (374 instances) and `test` (100) are the published ones, and `rest` (70) has the
    goals that are in neither. `procedural` has invented worlds that share no item with the official
    ones, and `shaped` has invented worlds in the shape of the official goals. `renamed`,
    `renamed-test` and `renamed-rest` repeat the instances of the first three with their items
    renamed, so that memorised recipes do not help there.

    Args:
        recipes_dir: a folder of original recipe JSON files to read instead of the shipped table.
        expert: `optimal` gets everything first and takes the fewest steps; `lazy` gets only what
            the next craft needs, so that it need not compute totals in advance.
        distractors: `published` draws the useless commands as the public code does, which gives as
            many of them as published; `distinct` draws each recipe at most once; see
            `listed_commands`. Applies to the official goals and the renamed ones.
    """

    name = "textcraft"
    licence = "Apache-2.0; its recipes are derived from minecraft-data, which is MIT"
    instruction = INSTRUCTION
    labels: LabelStyle = "lenient"

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
        self._indices_by_split = _shipped_split()
        self._worlds_by_split: dict[str, ProceduralWorlds | ShapedWorlds] = {}
        self._expert_kind = expert
        self._distractors = distractors
        self._episode_book: RecipeBook = self.book
        self._goal = ""
        self._game = CraftingGame(self._episode_book)

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the recipe file or folder, and the file of splits."""
        recipes = options.get("recipes_dir") or str(data_path(*RECIPES_FILE))
        return recipes, str(data_path(*SPLIT_FILE))

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return ("train", "test", "rest", *_MAKE_WORLDS_BY_SPLIT, *OFFICIAL_SPLIT_BY_RENAMED)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split; in train, test and rest, an index is the published
        `data_idx`.
        """
        if split in _MAKE_WORLDS_BY_SPLIT:
            indices: Sequence[int] = range(self._invented_worlds(split).count)
        elif split in OFFICIAL_SPLIT_BY_RENAMED:
            indices = range(NUM_RENAMINGS * len(self._published_indices(OFFICIAL_SPLIT_BY_RENAMED[split])))
        elif split in self._indices_by_split:
            indices = self._published_indices(split)
        else:
            raise ConfigError(f"textcraft has no split {split!r}; it has {', '.join(self.splits())}")
        return Instances(self.name, split, indices)

    def problem(self, instance: Instance) -> CraftingProblem:
        """Return the goal and the listed commands of an instance. Raises `EnvironmentFault` for an
        unknown one.
        """
        return self._problem_and_book(instance)[0]

    def reset(self, instance: Instance) -> str:
        """Begin an episode with an empty inventory, and return the listed commands and the goal."""
        problem, self._episode_book = self._problem_and_book(instance)
        self._goal = problem.goal
        self._game = CraftingGame(self._episode_book)
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
        is_won = item == self._goal
        return Transition(
            observation,
            float(is_won),
            is_won,
            False,
            {"success": is_won, "valid": bool(item) or action.startswith("inventory")},
        )

    def snapshot(self) -> Any:
        """Return a copy of the inventory with its world and goal."""
        return self._episode_book, self._goal, self._game.entries

    def state(self) -> str:
        """Return the carried items as text: nothing else changes during an episode."""
        return canonical(self._game.entries)

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a snapshot."""
        self._episode_book, self._goal, entries = snapshot
        self._game = CraftingGame(self._episode_book, entries)

    @property
    def inventory(self) -> Mapping[str, int]:
        """A copy of the present inventory: item id to count, no zero entries."""
        return self._game.inventory

    def depth(self, instance: Instance) -> int | None:
        """Return the number of crafts in the longest chain to the goal: 1 to 4 for official
        goals.
        """
        if instance.split in _MAKE_WORLDS_BY_SPLIT:
            book, goal = self._invented_worlds(instance.split).world(instance.index)
            return book.depth(goal)
        return self.book.goals[self.origin(instance).index][1]

    def facts(self, instance: Instance) -> Mapping[str, Any]:
        """Return the number of crafts on the shortest way, which may be above `depth`; an empty
        mapping if the goal is out of reach.
        """
        shortest = shortest_plan(self.problem(instance), {})
        return {} if shortest is None else {"crafts": sum(shortest.craft_counts.values())}

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of the expert, with thoughts and actions; None if the goal is out of
        reach.
        """
        problem = self.problem(instance)
        inventory: dict[str, int] = {}
        replies: list[str] = []
        first_plan = shortest_plan(problem, inventory)
        if first_plan is None:
            return None
        if self._expert_kind == "optimal":
            return optimal_replies(problem, first_plan)
        while not inventory.get(problem.goal):
            current_plan = shortest_plan(problem, inventory)
            if current_plan is None:
                return None
            links = chain(problem, inventory, current_plan)
            replies.append(lazy_reply(links, current_plan.item_by_tag))
            apply_last_link(inventory, links, current_plan.item_by_tag)
        return replies

    def oracle(self, instance: Instance, actions: Sequence[str]) -> tuple[Verdict, ...]:
        """Return the true verdict on each action of an episode, played from its start."""
        return game.verdicts(*self._problem_and_book(instance), actions)

    def _invented_worlds(self, split: str) -> ProceduralWorlds | ShapedWorlds:
        """Return the worlds of an invented split; they are made on first use, which takes a
        moment.
        """
        if split not in self._worlds_by_split:
            self._worlds_by_split[split] = _MAKE_WORLDS_BY_SPLIT[split](self.book)
        return self._worlds_by_split[split]

    def _published_indices(self, split: str) -> list[int]:
        return [index for index in self._indices_by_split[split] if index < len(self.book.goals)]

    def origin(self, instance: Instance) -> Instance:
        """Return the official instance that a renamed one was made from; any other instance
        itself.
        """
        if instance.split not in OFFICIAL_SPLIT_BY_RENAMED:
            return instance
        split = OFFICIAL_SPLIT_BY_RENAMED[instance.split]
        official_indices = self._published_indices(split)
        return Instance(
            environment=self.name, split=split, index=official_indices[instance.index % len(official_indices)]
        )

    def _problem_and_book(self, instance: Instance) -> tuple[CraftingProblem, RecipeBook]:
        """Return the problem of an instance and the recipes of its world. Raises `EnvironmentFault`
        for an unknown instance.
        """
        if instance.environment != self.name or instance.split not in self.splits():
            raise EnvironmentFault(f"textcraft has no instance {instance.key}")
        origin = self.origin(instance)
        distractors: Distractors = "distinct"
        if instance.split in _MAKE_WORLDS_BY_SPLIT:
            book, goal = self._invented_worlds(instance.split).world(instance.index)
        elif origin.index < len(self.book.goals):
            book, goal, distractors = self.book, self.book.goals[origin.index][0], self._distractors
        else:
            raise EnvironmentFault(f"textcraft has no instance {instance.key}")
        commands = listed_commands(book, goal, origin, distractors=distractors)
        problem = CraftingProblem(goal=goal, commands=commands, item_to_tag=book.item_to_tag)
        if instance.split in OFFICIAL_SPLIT_BY_RENAMED:
            # The split `renamed` existed before the other two: its texts stay as they were.
            split_key = () if instance.split == "renamed" else (instance.split,)
            rng = random.Random(derive_seed("textcraft-renamed", *split_key, instance.index))
            problem = rename(problem, free_names(self.book), rng)
            book = build_book(problem.commands, item_to_tag=problem.item_to_tag)
        return problem, book


# Every search tree in flight has an environment of its own, so making one must be cheap.
_shipped_book = cache(load_shipped)
_shipped_split = cache(load_splits)


def parse_action(reply: str, labels: LabelStyle = "lenient") -> str:
    """Return the line after the last "Action:" of a reply, in lower case, with letters, digits,
    commas and spaces only; empty if there is none.

    The label may stand on a line of its own. A lone "look" means the inventory, as in AgentGym's
    client.
    """
    action = words_after_label(reply, labels).lower()
    return "inventory" if action == "look" else action


# Crafting worlds drawn from a seed: any number of any depth, without official items.

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
# Counts, repeated in proportion to their use in the official recipes: most crafts take one of an
# item and give one.
_INPUT_COUNTS = (1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9)
_OUTPUT_COUNTS = (1, 1, 1, 1, 1, 2, 3, 4, 4, 6, 8, 16)
_NUM_INPUTS = (1, 1, 1, 2, 2, 2, 2, 3)


class ProceduralWorlds:
    """A family of crafting worlds, one for each index.

    Args:
        count: the number of worlds in the family.
        max_depth: the depths of the goals cycle from 1 to this number.
        seed: a different seed gives a different family.
    """

    def __init__(self, *, count: int = 10**9, max_depth: int = 4, seed: int = 0) -> None:
        self.count = count
        self._max_depth = max_depth
        self._seed = seed
        # An episode asks for its one world again and again. Hundreds of environments in flight each
        # keep one.
        self.world = lru_cache(maxsize=1)(self._make_world)

    def _make_world(self, index: int) -> tuple[RecipeBook, str]:
        """Return the recipe book of a world and its goal item, whose depth is `index % max_depth +
        1`.
        """
        rng = random.Random(derive_seed("procedural-world", self._seed, index))
        depth = index % self._max_depth + 1
        names = _invented_names(rng)
        items_by_level = [[next(names) for _ in range(rng.randint(3, 6))]]
        recipes: list[Recipe] = []
        for level in range(1, depth + 1):
            outputs = []
            for _ in range(1 if level == depth else rng.randint(1, 3)):
                output = next(names)
                # One ingredient from the level below fixes the depth; the others come from anywhere
                # below.
                inputs = [rng.choice(items_by_level[-1])]
                lower_items = [item for level_items in items_by_level for item in level_items if item not in inputs]
                inputs += rng.sample(lower_items, min(len(lower_items), rng.choice(_NUM_INPUTS) - 1))
                rng.shuffle(inputs)
                recipes.append(_recipe(output, inputs, rng))
                outputs.append(output)
            items_by_level.append(outputs)
        goal = items_by_level[-1][0]
        all_items = list(itertools.chain(*items_by_level[:-1]))
        recipes += [
            _recipe(next(names), rng.sample(all_items, min(len(all_items), rng.choice(_NUM_INPUTS))), rng)
            for _ in range(rng.randint(2, 10))
        ]
        rng.shuffle(recipes)
        return build_book(recipes), goal


def _invented_names(rng: random.Random) -> itertools.chain[str]:
    def draw() -> str:
        return f"minecraft:{rng.choice(_QUALITIES)}_{rng.choice(_MATERIALS)}_{rng.choice(_FORMS)}"

    used_names: set[str] = set()
    unique = (name for name in iter(draw, None) if not (name in used_names or used_names.add(name)))  # type: ignore[func-returns-value]
    return itertools.chain(unique)


def _recipe(output: str, inputs: list[str], rng: random.Random) -> Recipe:
    return Recipe(
        output=output,
        count=rng.choice(_OUTPUT_COUNTS),
        output_tag=None,
        inputs=tuple(Ingredient(name=item, count=rng.choice(_INPUT_COUNTS), is_tag=False) for item in inputs),
    )


# Problems with their items renamed at random, so that they must be solved by reading the listed
# commands, not from memory.
#
# Members of a tag (planks, wool) are renamed only among themselves, since commands do not say which
# item has which tag.


def free_names(book: RecipeBook) -> list[str]:
    """Return the names that any item may get: the items of a book without a tag that a recipe asks
    for.
    """
    used_tags = {i.name for recipe in book.recipes for i in recipe.inputs if i.is_tag}
    return sorted(item for item in book.items if book.item_to_tag.get(item) not in used_tags)


def rename(problem: CraftingProblem, names: Sequence[str], rng: random.Random) -> CraftingProblem:
    """Return the problem with its items renamed at random (those without a used tag get some of
    `names`) and its commands shuffled.
    """
    items = dict.fromkeys(
        i
        for r in problem.commands
        for i in (r.output, *(ingredient.name for ingredient in r.inputs if not ingredient.is_tag))
    )
    item_to_tag = problem.item_to_tag
    used_tags = {i.name for r in problem.commands for i in r.inputs if i.is_tag}
    new_name_by_item: dict[str, str] = {}
    for tag in sorted(used_tags):
        members = sorted(item for item, item_tag in item_to_tag.items() if item_tag == tag)
        new_name_by_item.update(zip(members, rng.sample(members, len(members)), strict=True))
    untagged_items = [item for item in items if item not in new_name_by_item]
    new_name_by_item.update(zip(untagged_items, rng.sample(names, len(untagged_items)), strict=True))
    commands = [
        replace(
            recipe,
            output=new_name_by_item[recipe.output],
            output_tag=recipe.output_tag if recipe.output_tag in used_tags else None,
            inputs=tuple(i if i.is_tag else replace(i, name=new_name_by_item[i.name]) for i in recipe.inputs),
        )
        for recipe in problem.commands
    ]
    rng.shuffle(commands)
    return CraftingProblem(
        goal=new_name_by_item[problem.goal],
        commands=tuple(commands),
        item_to_tag={item: tag for item, tag in item_to_tag.items() if tag in used_tags},
    )


T = TypeVar("T")
Weights = Mapping[T, float]

MAX_DEPTH = 4
PLANKS = f"{NAMESPACE}:planks"

# Approximate counts of each value among the official goals of `train` and `test`.
_NUM_RAW_INPUTS: Weights[int] = {1: 20, 2: 3, 3: 1}
"""The number of ingredients, all raw, of a goal of depth 1; parts of depth 1 nearly always have
one.
"""
_NUM_CRAFTED_AND_RAW_INPUTS: dict[int, Weights[tuple[int, int]]] = {
    2: {(1, 0): 125, (1, 1): 63, (1, 2): 18, (2, 0): 60, (2, 1): 3},
    3: {(1, 0): 30, (1, 1): 20, (1, 2): 5, (2, 0): 42, (3, 0): 2},
    4: {(1, 0): 3, (1, 1): 2, (2, 0): 4},
}
"""How many crafted and how many raw ingredients a recipe has, by its depth."""
_RAW_COUNT: Weights[int] = {1: 52, 2: 12, 3: 3, 4: 18, 6: 2, 8: 3, 9: 10}
_ONLY_RAW_COUNT: Weights[int] = {1: 42, 2: 12, 3: 16, 4: 40, 5: 5, 6: 11, 7: 3, 8: 7, 9: 14}
_CRAFTED_COUNT: dict[int, Weights[int]] = {
    2: {1: 119, 2: 57, 3: 34, 4: 31, 5: 11, 6: 65, 7: 6, 8: 14, 9: 4},
    3: {1: 127, 2: 23, 3: 37, 4: 7, 6: 14, 8: 3},
    4: {1: 11, 2: 2, 3: 3, 6: 1},
}
_GOAL_YIELD: dict[int, Weights[int]] = {
    1: {1: 66, 2: 5, 3: 19, 4: 22, 6: 10, 8: 4},
    2: {1: 132, 2: 12, 3: 27, 4: 26, 6: 31, 8: 38, 16: 7},
    3: {1: 44, 3: 11, 4: 3, 6: 8, 8: 7},
    4: {1: 8, 3: 1, 6: 1, 8: 1},
}
_PART_YIELD: Weights[int] = {1: 64, 2: 12, 3: 2, 4: 40, 6: 2, 8: 1}
_NUM_DISTRACTOR_INPUTS: Weights[int] = {1: 31, 2: 57, 3: 10, 4: 2}
_DISTRACTOR_YIELD: Weights[int] = {1: 56, 2: 6, 3: 10, 4: 6, 6: 8, 8: 14}
_NUM_DISTRACTORS: dict[int, Weights[int]] = {
    1: {0: 39, 1: 22, 2: 7, 3: 16, 4: 2, 5: 2, 7: 6, 9: 9, 10: 35},
    2: {3: 12, 5: 14, 6: 6, 8: 23, 9: 43, 10: 194},
    3: {3: 2, 7: 4, 10: 66},
    4: {10: 1},
}
_NUM_OTHER_RECIPES: Weights[int] = {1: 90, 2: 7, 3: 6, 4: 10}
"""The number of further recipes of a part that can be made in several ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """The shares of worlds or items of a depth that have a special feature, in [0, 1]."""

    planks_needed: float
    """Worlds in which a part may be made of planks; these list all planks."""
    planks_in_distractors: float
    """Of the other worlds, those in which only useless commands take planks."""
    several_recipes: float
    """Items of depth 1 that can be made in several ways."""


_RATES = {
    1: _Rates(planks_needed=0.0, planks_in_distractors=0.2, several_recipes=0.1),
    2: _Rates(planks_needed=0.3, planks_in_distractors=0.11, several_recipes=0.36),
    3: _Rates(planks_needed=0.48, planks_in_distractors=0.08, several_recipes=0.48),
    4: _Rates(planks_needed=0.65, planks_in_distractors=0.08, several_recipes=0.15),
}
_PLANKS_NEEDED_SHARE = 0.58
"""The share of worlds listing planks in which the goal needs them; in the others, only an
alternative recipe of a part does.
"""
_ANY_PLANKS_SHARE = 0.7
"""The share of recipes that need planks and take any sort; the others take one sort."""
_REDRAW_PROBABILITY = 0.35
"""The probability that the yield is drawn again for a part that takes three or more crafts."""


# Worlds in the shape of the official goals: they have similar numbers of commands, tags,
# alternatives and steps. `data/textcraft/shapes.py` prints both side by side, and a test checks
# that they agree. Only the shape is shared: the items have official names, but the recipes are
# invented, so knowing the official ones does not help. Only the planks are tagged as officially.


class ShapedWorlds:
    """A family of crafting worlds, one for each index; the depths of their goals cycle from 1 to
    `MAX_DEPTH`.

    Args:
        official: the book that the names of items come from; none of its recipes occurs.
        count: the number of worlds in the family.
        seed: a different seed gives a different family.
    """

    def __init__(self, official: RecipeBook, *, count: int = 10**9, seed: int = 0) -> None:
        self.count = count
        self._seed = seed
        self._planks = tuple(sorted(official.members(PLANKS)))
        self._names = sorted(official.items.difference(self._planks))
        self._official = {_signature(recipe) for recipe in official.recipes}
        # An episode asks for its one world again and again. Hundreds of environments in flight each
        # keep one.
        self.world = lru_cache(maxsize=1)(self._make_world)

    def _make_world(self, index: int) -> tuple[RecipeBook, str]:
        """Return the recipe book of a world and its goal item, whose depth is `index % MAX_DEPTH +
        1`.
        """
        rng = random.Random(derive_seed("shaped-world", self._seed, index))
        while True:
            draft = _WorldDraft(rng=rng, names=iter(rng.sample(self._names, len(self._names))), planks=self._planks)
            goal = draft.draw(index % MAX_DEPTH + 1)
            if not any(_signature(recipe) in self._official for recipe in draft.recipes):
                rng.shuffle(draft.recipes)
                return build_book(draft.recipes, item_to_tag=dict.fromkeys(self._planks, PLANKS)), goal


@dataclass(slots=True, kw_only=True)
class _WorldDraft:
    """A world while it is being drawn."""

    rng: random.Random
    names: Iterator[str]
    planks: Sequence[str]
    recipes: list[Recipe] = field(default_factory=list)

    def draw(self, depth: int) -> str:
        """Draw all recipes of a world and return its goal."""
        rates = _RATES[depth]
        planks_needed = self.rng.random() < rates.planks_needed
        is_needed = planks_needed and self.rng.random() < _PLANKS_NEEDED_SHARE
        goal = self._draw_item(depth, num_needed=1, is_goal=True, rates=rates)
        if planks_needed:
            self._add_planks(is_needed=is_needed)
        planks_in_distractors = not planks_needed and self.rng.random() < rates.planks_in_distractors
        self._add_distractors(
            goal, self._sample(_NUM_DISTRACTORS[depth]), planks=planks_needed or planks_in_distractors
        )
        return goal

    def _draw_item(self, depth: int, *, num_needed: int, is_goal: bool, rates: _Rates) -> str:
        """Draw an item of a depth with everything that it is made of, and return its name.
        `num_needed` is how many pieces of it are needed.
        """
        name = next(self.names)
        output_count = self._sample(_GOAL_YIELD[depth]) if is_goal else self._sample(_PART_YIELD)
        if not is_goal and -(-num_needed // output_count) > 2 and self.rng.random() < _REDRAW_PROBABILITY:
            output_count = self._sample(_PART_YIELD)
        num_crafts = -(-num_needed // output_count)
        inputs = []
        if depth == 1:
            counts = _ONLY_RAW_COUNT if is_goal else _RAW_COUNT
            for _ in range(self._sample(_NUM_RAW_INPUTS) if is_goal else 1):
                inputs.append(_ingredient(next(self.names), self._sample(counts)))
        else:
            num_crafted, num_raw = self._sample(_NUM_CRAFTED_AND_RAW_INPUTS[depth])
            for number in range(num_crafted):
                count = self._sample(_CRAFTED_COUNT[depth])
                part_depth = depth - 1 if number == 0 else self.rng.randint(1, depth - 1)
                inputs.append(
                    _ingredient(
                        self._draw_item(part_depth, num_needed=num_crafts * count, is_goal=False, rates=rates), count
                    )
                )
            inputs += [_ingredient(next(self.names), self._sample(_RAW_COUNT)) for _ in range(num_raw)]
            self.rng.shuffle(inputs)
        self.recipes.append(Recipe(output=name, count=output_count, output_tag=None, inputs=tuple(inputs)))
        if depth == 1 and self.rng.random() < rates.several_recipes:
            for _ in range(self._sample(_NUM_OTHER_RECIPES)):
                alternative = (_ingredient(next(self.names), self._sample(_RAW_COUNT)),)
                self.recipes.append(
                    Recipe(output=name, count=self._sample(_PART_YIELD), output_tag=None, inputs=alternative)
                )
        return name

    def _add_planks(self, *, is_needed: bool) -> None:
        """Add recipes for all planks. A part of depth 1 is replaced by planks if `is_needed`;
        otherwise it gets an alternative recipe of planks.
        """
        output_count, input_count = self._sample({4: 6, 2: 2, 3: 1, 6: 1}), self._sample({1: 8, 2: 1})
        ingredient_names = {i.name for r in self.recipes for i in r.inputs}
        outputs = {r.output for r in self.recipes}
        parts = sorted(
            {r.output for r in self.recipes if not any(i.name in outputs for i in r.inputs)} & ingredient_names
        )
        part = self.rng.choice(parts)
        if is_needed:
            any_planks = self.rng.random() < _ANY_PLANKS_SHARE
            substitute = PLANKS if any_planks else self.rng.choice(self.planks)
            self.recipes = [
                Recipe(
                    output=r.output,
                    count=r.count,
                    output_tag=r.output_tag,
                    inputs=tuple(
                        Ingredient(name=substitute, count=i.count, is_tag=any_planks) if i.name == part else i
                        for i in r.inputs
                    ),
                )
                for r in self.recipes
                if r.output != part
            ]
        else:
            inputs = (Ingredient(name=PLANKS, count=self._sample({1: 2, 2: 5, 3: 1, 4: 1}), is_tag=True),)
            self.recipes.append(Recipe(output=part, count=self._sample(_PART_YIELD), output_tag=None, inputs=inputs))
        for planks in self.planks:
            source = (_ingredient(next(self.names), input_count),)
            self.recipes.append(Recipe(output=planks, count=output_count, output_tag=PLANKS, inputs=source))

    def _add_distractors(self, goal: str, num_distractors: int, *, planks: bool) -> None:
        """Draw `num_distractors` useless commands that share an ingredient with needed ones."""
        outputs = {r.output for r in self.recipes} - set(self.planks)
        ingredients = {i.name for r in self.recipes if r.output not in self.planks for i in r.inputs}
        crafted_items = sorted((ingredients & outputs) - {goal}) or [goal]
        raw_items = sorted(ingredients - outputs - {PLANKS})
        extra_names = [next(self.names) for _ in range(4)]
        for position in range(num_distractors):
            takes_planks = planks and (position == 0 or self.rng.random() < 0.2)
            takes_crafted = self.rng.random() < (0.65 if len(outputs) > 1 else 0.12)
            ingredient = self.rng.choice(crafted_items if takes_crafted or not raw_items else raw_items)
            inputs = [_ingredient(ingredient, self._sample(_ONLY_RAW_COUNT))]
            if takes_planks:
                inputs.append(Ingredient(name=PLANKS, count=self._sample(_ONLY_RAW_COUNT), is_tag=True))
            num_more = max(0, self._sample(_NUM_DISTRACTOR_INPUTS) - len(inputs))
            shared_names = self.rng.sample(extra_names, min(num_more, len(extra_names))) if num_more else []
            names = [name if self.rng.random() < 0.5 else next(self.names) for name in shared_names]
            inputs += [_ingredient(name, self._sample(_RAW_COUNT)) for name in names]
            self.rng.shuffle(inputs)
            output_count = self._sample(_DISTRACTOR_YIELD)
            self.recipes.append(
                Recipe(output=next(self.names), count=output_count, output_tag=None, inputs=tuple(inputs))
            )

    def _sample(self, weights: Weights[T]) -> T:
        return self.rng.choices(list(weights), list(weights.values()))[0]


def _ingredient(name: str, count: int) -> Ingredient:
    return Ingredient(name=name, count=count, is_tag=False)


def _signature(recipe: Recipe) -> tuple[str, frozenset[str]]:
    return recipe.output, frozenset(ingredient.name for ingredient in recipe.inputs)
