"""The rules of a crafting world: an inventory, three actions, and the world's answers; also its
planner, expert and oracle.

Source: ADaPT (arXiv 2311.05772), AgentGym (arXiv 2406.04151); the observation strings are theirs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from agentr_core.environments.crafting.recipes import Ingredient, Recipe, RecipeBook
from agentr_core.types import Verdict

# Crafting problems and their planner: what a goal needs, what is lacking, which action is next.
#
# Everything here is a pure function of a `CraftingProblem` and an inventory (item id -> count, no
# zero entries).

Inventory = Mapping[str, int]
MAX_CHOICES = 256
"""The largest number of combinations of alternative recipes that the planner compares; official
goals have at most 64.
"""


@dataclass(frozen=True, kw_only=True)
class CraftingProblem:
    """A goal, and the commands listed for it in their order.

    `item_to_tag` maps an item to the tag (generic ingredient) for which it can be used.
    """

    goal: str
    commands: tuple[Recipe, ...]
    item_to_tag: Mapping[str, str]

    @cached_property
    def recipes(self) -> dict[str, tuple[Recipe, ...]]:
        """The listed recipes of each item, in listed order."""
        recipes_by_output: dict[str, list[Recipe]] = {}
        for recipe in self.commands:
            recipes_by_output.setdefault(recipe.output, []).append(recipe)
        return {item: tuple(recipes) for item, recipes in recipes_by_output.items()}

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The craftable items that satisfy each tag, in listed order."""
        items_by_tag: dict[str, dict[str, None]] = {}
        for recipe in self.commands:
            if tag := self.item_to_tag.get(recipe.output):
                items_by_tag.setdefault(tag, {})[recipe.output] = None
        return {tag: tuple(items) for tag, items in items_by_tag.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cheapest way from an inventory to the goal: how many of each item to get (`get_counts`),
    how often to craft each item (`craft_counts`), and by which recipes.

    `recipe_by_item` maps an item to its recipe, and `item_by_tag` a tag to the item used for it.
    `num_steps` counts actions: one for each item to get, and one for each craft.
    """

    get_counts: Mapping[str, int]
    craft_counts: Mapping[str, int]
    recipe_by_item: Mapping[str, Recipe]
    item_by_tag: Mapping[str, str]

    @property
    def num_steps(self) -> int:
        """The number of actions in the plan."""
        return len(self.get_counts) + sum(self.craft_counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """One link of the chain from the goal to the next action: an item, its recipe, and the first
    ingredient that is missing with the missing number; None if nothing is missing.
    """

    item: str
    recipe: Recipe
    missing: tuple[str, int] | None


def shortest_plan(problem: CraftingProblem, inventory: Inventory) -> Plan | None:
    """Return the plan with the fewest steps; of equal ones, the first in the listed order of
    recipes. None if the goal is out of reach. At most `MAX_CHOICES` combinations of recipes are
    compared.
    """
    best: Plan | None = None
    for recipe_by_item, item_by_tag in itertools.islice(_choices(problem, inventory), MAX_CHOICES):
        candidate = _plan_by_recipes(problem, inventory, recipe_by_item, item_by_tag)
        if candidate is not None and (best is None or candidate.num_steps < best.num_steps):
            best = candidate
    return best


def chain(problem: CraftingProblem, inventory: Inventory, plan: Plan) -> tuple[ChainLink, ...]:
    """Return the links from the goal to the next action of the lazy expert, following the recipes
    of a plan.

    The lazy expert satisfies the first lacking ingredient of a recipe before the next one, and
    fetches only what the next craft needs. The last hop either lacks an item to get, or lacks
    nothing and is the craft to make.
    """
    links: list[ChainLink] = []
    item = problem.goal
    while True:
        recipe = plan.recipe_by_item[item]
        shortage = None
        for ingredient in recipe.inputs:
            name = plan.item_by_tag.get(ingredient.name, ingredient.name) if ingredient.is_tag else ingredient.name
            missing = ingredient.count - inventory.get(name, 0)
            if missing > 0:
                shortage = (name, missing)
                break
        links.append(ChainLink(item=item, recipe=recipe, missing=shortage))
        if shortage is None or shortage[0] not in plan.recipe_by_item:
            return tuple(links)
        item = shortage[0]


def with_recipe(problem: CraftingProblem, plan: Plan, recipe: Recipe) -> Plan | None:
    """Return the plan with the recipe of one item replaced by `recipe`, listed or not; None if the
    plan would then be circular.
    """
    recipe_by_item = {**plan.recipe_by_item, recipe.output: recipe}
    if _crafting_order(problem.goal, recipe_by_item, plan.item_by_tag) is None:
        return None
    return replace(plan, recipe_by_item=recipe_by_item)


def is_nearer_goal(problem: CraftingProblem, before: Inventory, after: Inventory) -> bool:
    """Return whether some way to the goal, not necessarily the shortest, takes fewer steps from the
    inventory `after` than from `before`.
    """
    for recipe_by_item, item_by_tag in itertools.islice(_choices(problem, after), MAX_CHOICES):
        plan_after = _plan_by_recipes(problem, after, recipe_by_item, item_by_tag)
        plan_before = _plan_by_recipes(problem, before, recipe_by_item, item_by_tag)
        if plan_after is not None and plan_before is not None and plan_after.num_steps < plan_before.num_steps:
            return True
    return False


def ingredients(recipe: Recipe, item_by_tag: Mapping[str, str]) -> tuple[Ingredient, ...]:
    """Return the inputs of a recipe with each tag replaced by the item that is used for it."""
    return tuple(
        Ingredient(name=item_by_tag[i.name], count=i.count, is_tag=False) if i.is_tag else i for i in recipe.inputs
    )


def _choices(problem: CraftingProblem, inventory: Inventory) -> Iterator[tuple[dict[str, Recipe], dict[str, str]]]:
    """Yield every sensible choice: the recipe of each item, and the item used for each tag.

    Members of a tag differ only in their names, so only the first one listed, those carried, and
    those with a carried ingredient are tried.
    """
    tags = {i.name for r in problem.commands for i in r.inputs if i.is_tag}
    tag_options = {}
    for tag in sorted(tags):
        carried_items = [item for item in sorted(inventory) if problem.item_to_tag.get(item) == tag]
        members = problem.members.get(tag, ())
        makeable_items = [m for m in members if any(i.name in inventory for r in problem.recipes[m] for i in r.inputs)]
        tag_options[tag] = tuple(dict.fromkeys([*carried_items, *makeable_items, *members[:1]])) or (tag,)
    reachable: set[str] = set()
    frontier = [problem.goal]
    while frontier:
        item = frontier.pop()
        if item in reachable:
            continue
        reachable.add(item)
        for recipe in problem.recipes.get(item, ()):
            for ingredient in recipe.inputs:
                frontier.extend(tag_options[ingredient.name] if ingredient.is_tag else (ingredient.name,))
    recipe_options = {item: problem.recipes[item] for item in problem.recipes if item in reachable}
    option_names = [*tag_options, *recipe_options]
    for combination in itertools.product(*tag_options.values(), *recipe_options.values()):
        choice = dict(zip(option_names, combination, strict=True))
        yield (
            {item: choice[item] for item in recipe_options},  # type: ignore[misc]
            {tag: choice[tag] for tag in tag_options},  # type: ignore[misc]
        )


def _plan_by_recipes(
    problem: CraftingProblem, inventory: Inventory, recipe_by_item: Mapping[str, Recipe], item_by_tag: Mapping[str, str]
) -> Plan | None:
    order = _crafting_order(problem.goal, recipe_by_item, item_by_tag)
    if order is None:
        return None
    num_needed = {problem.goal: inventory.get(problem.goal, 0) + 1}
    get_counts: dict[str, int] = {}
    craft_counts: dict[str, int] = {}
    for item in order:
        missing = num_needed.get(item, 0) - inventory.get(item, 0)
        if missing <= 0:
            continue
        recipe = recipe_by_item.get(item)
        if recipe is None:
            get_counts[item] = missing
            continue
        num_crafts = -(-missing // recipe.count)
        craft_counts[item] = num_crafts
        for ingredient in ingredients(recipe, item_by_tag):
            num_needed[ingredient.name] = num_needed.get(ingredient.name, 0) + num_crafts * ingredient.count
    return Plan(
        get_counts=get_counts, craft_counts=craft_counts, recipe_by_item=recipe_by_item, item_by_tag=item_by_tag
    )


def _crafting_order(
    goal: str, recipe_by_item: Mapping[str, Recipe], item_by_tag: Mapping[str, str]
) -> list[str] | None:
    """Return the items that the goal is made of, each before its own ingredients; None if the
    choice of recipes is circular.
    """
    order: list[str] = []
    is_acyclic_by_item: dict[str, bool] = {}

    def visit(item: str) -> bool:
        if item in is_acyclic_by_item:
            return is_acyclic_by_item[item]
        is_acyclic_by_item[item] = False
        if item in recipe_by_item and not all(visit(i.name) for i in ingredients(recipe_by_item[item], item_by_tag)):
            return False
        is_acyclic_by_item[item] = True
        order.append(item)
        return True

    return order[::-1] if visit(goal) else None


# All texts of a crafting world and of its expert.

INSTRUCTION = """\
You craft items in a text world. Each turn, reply with one line of thought and one action:
Thought: what is lacking now
Action: one of the three actions
The actions are:
get COUNT ITEM
craft COUNT ITEM using COUNT ITEM, COUNT ITEM
inventory
Craft with the listed commands only, in just the numbers that they state. Get what no command makes.
Where a command names a kind of item, use one item of that kind. Always state numbers."""


def display_name(item: str) -> str:
    """Return the name of an item or tag as commands write it."""
    return item.removeprefix("minecraft:").replace("_", " ")


def item_id_of(name: str) -> str:
    """Return the id of an item or tag named in an action."""
    return "minecraft:" + name.strip().replace(" ", "_")


def craft_command(recipe: Recipe) -> str:
    """Return the line that lists a recipe."""
    inputs = ", ".join(f"{i.count} {display_name(i.name)}" for i in recipe.inputs)
    return f"craft {recipe.count} {display_name(recipe.output)} using {inputs}"


def first_observation(problem: CraftingProblem) -> str:
    """Return the listed commands and the goal."""
    lines = "\n".join(craft_command(recipe) for recipe in problem.commands)
    return f"Crafting commands:\n{lines}\n\n{goal_line(problem.goal)}"


def goal_line(item: str) -> str:
    """Return the line that states the goal."""
    return f"Goal: craft {display_name(item)}."


def ingredients_text(recipe: Recipe) -> str:
    """Return the ingredients of a recipe as the expert's thoughts name them."""
    return (
        f"{display_name(recipe.output)} using {', '.join(f'{i.count} {display_name(i.name)}' for i in recipe.inputs)}"
    )


def inventory_text(inventory: Inventory) -> str:
    """Return the answer to the action `inventory`."""
    if not inventory:
        return "Inventory: You are not carrying anything."
    return "Inventory: " + "".join(f"[{display_name(item)}] ({count}) " for item, count in inventory.items())


def action_of(link: ChainLink, item_by_tag: Mapping[str, str]) -> str:
    """Return the action for the last link of a chain: get what is missing, else craft."""
    if link.missing:
        item, num_missing = link.missing
        return f"get {num_missing} {display_name(item)}"
    return _craft_action(link.recipe, item_by_tag)


def observation_of(link: ChainLink) -> str:
    """Return the world's answer to the action for the last link of a chain."""
    if link.missing:
        item, num_missing = link.missing
        return f"Got {num_missing} {display_name(item)}"
    return f"Crafted {link.recipe.count} {link.item}"


def chain_text(links: Sequence[ChainLink]) -> str:
    """Return the chain in words: the ingredients of each item, and which of them is lacking."""
    sentences = []
    for link in links:
        shortage = f"{link.missing[1]} {display_name(link.missing[0])}" if link.missing else "nothing"
        sentences.append(f"{ingredients_text(link.recipe)}; lacking {shortage}.")
    return " ".join(sentences)


def lazy_reply(links: Sequence[ChainLink], item_by_tag: Mapping[str, str]) -> str:
    """Return the reply of the expert that fetches only what the next craft needs."""
    return f"Thought: {chain_text(links)}\nAction: {action_of(links[-1], item_by_tag)}"


def apply_last_link(
    inventory: MutableMapping[str, int], links: Sequence[ChainLink], item_by_tag: Mapping[str, str]
) -> None:
    """Update an inventory in place with the effect of the action for the last link."""
    link = links[-1]
    if link.missing:
        item, num_missing = link.missing
        inventory[item] = inventory.get(item, 0) + num_missing
        return
    for ingredient in ingredients(link.recipe, item_by_tag):
        inventory[ingredient.name] -= ingredient.count
        if not inventory[ingredient.name]:
            del inventory[ingredient.name]
    inventory[link.item] = inventory.get(link.item, 0) + link.recipe.count


def optimal_replies(problem: CraftingProblem, plan: Plan) -> list[str]:
    """Return the replies of the expert that first gets everything that it needs, then crafts from
    the ingredients up to the goal.
    """
    goal = display_name(problem.goal)
    replies = [
        f"Thought: {goal} needs {count} {display_name(item)} in all.\nAction: get {count} {display_name(item)}"
        for item, count in reversed(list(plan.get_counts.items()))
    ]
    for item, num_crafts in reversed(list(plan.craft_counts.items())):
        replies.extend(
            [
                f"Thought: all is there for {display_name(item)}.\n"
                f"Action: {_craft_action(plan.recipe_by_item[item], plan.item_by_tag)}"
            ]
            * num_crafts
        )
    return replies


def _craft_action(recipe: Recipe, item_by_tag: Mapping[str, str]) -> str:
    inputs = ", ".join(f"{i.count} {display_name(i.name)}" for i in ingredients(recipe, item_by_tag))
    return f"craft {recipe.count} {display_name(recipe.output)} using {inputs}"


_CRAFT = re.compile(r"craft (.*) using (.*)")
_GET = re.compile(r"get ([0-9]+) (.*)")
_COUNT_AND_NAME = re.compile(r"([0-9]+) (.*)")
_NUMBER = re.compile(r"[0-9]+")


MAX_DIGITS = 4000
"""The most digits that a number in an action may have. Python reads up to 4300 digits, and sums
must stay below that.
"""


class CraftingGame:
    """The inventory of one episode in a world. `act` never raises: an action that cannot be done is
    answered with a sentence.
    """

    def __init__(self, book: RecipeBook, entries: Mapping[str, int] | None = None) -> None:
        self._book = book
        self._entries = dict(entries or {})

    @property
    def entries(self) -> dict[str, int]:
        """A copy of the items listed as carried: item id to count. Getting 0 of an item adds an
        entry with count 0.
        """
        return dict(self._entries)

    @property
    def inventory(self) -> dict[str, int]:
        """A copy of the inventory: item id to count, no zero entries."""
        return {item: count for item, count in self._entries.items() if count}

    def act(self, action: str) -> tuple[str, str]:
        """Carry out an action and return the observation and the id of the item that was made or
        got; the id is empty if there was none.
        """
        if any(len(number) > MAX_DIGITS for number in _NUMBER.findall(action)):
            return f"Could not execute {action}", ""
        if match := _CRAFT.match(action):
            return self._craft(match[1], match[2])
        if match := _GET.match(action):
            count, name = int(match[1]), match[2]
            item = item_id_of(name)
            if item in self._book.recipes_by_item or item in self._book.tags or item not in self._book.items:
                return f"Could not find {name}", ""
            self._add(item, count)
            return f"Got {count} {name}", item
        if action.startswith("inventory"):
            return inventory_text(self._entries), ""
        return f"Could not execute {action}", ""

    def _craft(self, output_text: str, input_text: str) -> tuple[str, str]:
        book = self._book
        match = _COUNT_AND_NAME.match(output_text)
        count, name = (int(match[1]), match[2]) if match else (1, output_text)
        target = item_id_of(name)
        inputs: list[tuple[str, int]] = []
        for ingredient_text in input_text.split(","):
            input_match = _COUNT_AND_NAME.match(ingredient_text.strip())
            if input_match is None:
                return f"Wrong item format: {ingredient_text.strip()}", ""
            inputs.append((item_id_of(input_match[2]), int(input_match[1])))
        for item, amount in inputs:
            # Even an amount of 0 needs the item to be listed as carried, if only with a count of 0.
            if item in book.tags or item not in self._entries or self._entries[item] < amount:
                return f"Could not find enough items to craft {None if target in book.tags else target}", ""
        for recipe in () if target in book.tags else book.recipes_by_item.get(target, ()):
            if _matches(recipe, inputs, book.item_to_tag):
                for item, amount in inputs:
                    self._add(item, -amount)
                    if not self._entries[item]:
                        del self._entries[item]
                self._add(target, recipe.count)
                return f"Crafted {recipe.count} {target}", target
        tag, item_id = (f"'{target}'", "None") if target in book.tags else ("None", f"'{target}'")
        described_target = f"ItemTagWithCount(item_tag=ItemTag(tag={tag}, item_id={item_id}), count={count})"
        return f"Could not find a valid recipe for {described_target}", ""

    def _add(self, item: str, count: int) -> None:
        self._entries[item] = self._entries.get(item, 0) + count


def _matches(recipe: Recipe, inputs: Sequence[tuple[str, int]], item_to_tag: Mapping[str, str]) -> bool:
    """Return whether the given inputs are those of the recipe, paired one to one with equal
    counts.
    """
    if len(inputs) != len(recipe.inputs):
        return False
    unmatched = list(recipe.inputs)
    for item, amount in inputs:
        for ingredient in unmatched:
            name = item_to_tag.get(item) if ingredient.is_tag else item
            if ingredient.name == name and ingredient.count == amount:
                unmatched.remove(ingredient)
                break
        else:
            return False
    return True


# The oracle of a crafting world: it compares the plans before and after an action to see whether
# the action brings the goal nearer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """An agent's inventory and the plan from there; the plan is None if the goal is out of
    reach.
    """

    inventory: Inventory
    plan: Plan | None


def action_verdict(
    problem: CraftingProblem, before: Progress, after: Progress, action: str, *, expert_action: str, output: str
) -> Verdict:
    """Return the oracle's verdict on an action: good if fewer steps are left after it, otherwise
    bad or uncertain.

    Uncertain are a look at the inventory, an action that gets part of what is needed, a step on a
    way that is not the shortest, and any action if there is no plan.

    Args:
        expert_action: the action of the lazy expert; always good.
        output: the item that the action made or got; empty if there was none.
    """
    if before.plan is None:
        return Verdict.UNCERTAIN
    if action == expert_action:
        return Verdict.GOOD
    num_added_steps = after.plan.num_steps - before.plan.num_steps if after.plan is not None else 1
    if num_added_steps < 0:
        return Verdict.GOOD
    if action == "inventory":
        return Verdict.UNCERTAIN
    if num_added_steps == 0 and (
        output in before.plan.get_counts or is_nearer_goal(problem, before.inventory, after.inventory)
    ):
        return Verdict.UNCERTAIN
    return Verdict.BAD


def verdicts(problem: CraftingProblem, book: RecipeBook, actions: Sequence[str]) -> tuple[Verdict, ...]:
    """Return the oracle's verdict on each action of an episode, played from its start."""
    game = CraftingGame(book)
    current = Progress(inventory={}, plan=shortest_plan(problem, {}))
    results = []
    for action in actions:
        expert_action = ""
        if current.plan is not None:
            links = chain(problem, current.inventory, current.plan)
            expert_action = action_of(links[-1], current.plan.item_by_tag)
        _, output = game.act(action)
        after = Progress(inventory=game.inventory, plan=shortest_plan(problem, game.inventory))
        results.append(action_verdict(problem, current, after, action, expert_action=expert_action, output=output))
        current = after
    return tuple(results)
