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
        by_output: dict[str, list[Recipe]] = {}
        for recipe in self.commands:
            by_output.setdefault(recipe.output, []).append(recipe)
        return {item: tuple(recipes) for item, recipes in by_output.items()}

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The craftable items that satisfy each tag, in listed order."""
        by_tag: dict[str, dict[str, None]] = {}
        for recipe in self.commands:
            if tag := self.item_to_tag.get(recipe.output):
                by_tag.setdefault(tag, {})[recipe.output] = None
        return {tag: tuple(items) for tag, items in by_tag.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cheapest way from an inventory to the goal: how many of each item to get (`gets`), how
    often to craft each item (`crafts`), and by which recipes.

    `recipes` maps an item to its recipe, and `items` a tag to the item used for it. `steps` counts
    actions: one for each item to get, and one for each craft.
    """

    gets: Mapping[str, int]
    crafts: Mapping[str, int]
    recipes: Mapping[str, Recipe]
    items: Mapping[str, str]

    @property
    def steps(self) -> int:
        """The number of actions in the plan."""
        return len(self.gets) + sum(self.crafts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One link of the chain from the goal to the next action: an item, its recipe, and the first
    ingredient that is missing with the missing number; None if nothing is missing.
    """

    item: str
    recipe: Recipe
    missing: tuple[str, int] | None


def plan(problem: CraftingProblem, inventory: Inventory) -> Plan | None:
    """Return the plan with the fewest steps; of equal ones, the first in the listed order of
    recipes. None if the goal is out of reach. At most `MAX_CHOICES` combinations of recipes are
    compared.
    """
    best: Plan | None = None
    for recipes, items in itertools.islice(_choices(problem, inventory), MAX_CHOICES):
        candidate = _expand(problem, inventory, recipes, items)
        if candidate is not None and (best is None or candidate.steps < best.steps):
            best = candidate
    return best


def chain(problem: CraftingProblem, inventory: Inventory, chosen: Plan) -> tuple[Hop, ...]:
    """Return the links from the goal to the next action of the lazy expert, following the recipes
    of a plan.

    The lazy expert satisfies the first lacking ingredient of a recipe before the next one, and
    fetches only what the next craft needs. The last hop either lacks an item to get, or lacks
    nothing and is the craft to make.
    """
    hops: list[Hop] = []
    item = problem.goal
    while True:
        recipe = chosen.recipes[item]
        shortage = None
        for ingredient in recipe.inputs:
            name = chosen.items.get(ingredient.name, ingredient.name) if ingredient.is_tag else ingredient.name
            missing = ingredient.count - inventory.get(name, 0)
            if missing > 0:
                shortage = (name, missing)
                break
        hops.append(Hop(item=item, recipe=recipe, missing=shortage))
        if shortage is None or shortage[0] not in chosen.recipes:
            return tuple(hops)
        item = shortage[0]


def with_recipe(problem: CraftingProblem, chosen: Plan, recipe: Recipe) -> Plan | None:
    """Return the plan with the recipe of one item replaced by `recipe`, listed or not; None if the
    plan would then be circular.
    """
    recipes = {**chosen.recipes, recipe.output: recipe}
    if _topological(problem.goal, recipes, chosen.items) is None:
        return None
    return replace(chosen, recipes=recipes)


def brings_nearer(problem: CraftingProblem, before: Inventory, after: Inventory) -> bool:
    """Return whether some way to the goal, not necessarily the shortest, takes fewer steps from the
    inventory `after` than from `before`.
    """
    for recipes, items in itertools.islice(_choices(problem, after), MAX_CHOICES):
        plan_after = _expand(problem, after, recipes, items)
        plan_before = _expand(problem, before, recipes, items)
        if plan_after is not None and plan_before is not None and plan_after.steps < plan_before.steps:
            return True
    return False


def ingredients(recipe: Recipe, items: Mapping[str, str]) -> tuple[Ingredient, ...]:
    """Return the inputs of a recipe with each tag replaced by the item that is used for it."""
    return tuple(Ingredient(name=items[i.name], count=i.count, is_tag=False) if i.is_tag else i for i in recipe.inputs)


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
        makeable = [m for m in members if any(i.name in inventory for r in problem.recipes[m] for i in r.inputs)]
        tag_options[tag] = tuple(dict.fromkeys([*carried_items, *makeable, *members[:1]])) or (tag,)
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
    names = [*tag_options, *recipe_options]
    for combination in itertools.product(*tag_options.values(), *recipe_options.values()):
        chosen = dict(zip(names, combination, strict=True))
        yield (
            {item: chosen[item] for item in recipe_options},  # type: ignore[misc]
            {tag: chosen[tag] for tag in tag_options},  # type: ignore[misc]
        )


def _expand(
    problem: CraftingProblem, inventory: Inventory, recipes: Mapping[str, Recipe], items: Mapping[str, str]
) -> Plan | None:
    order = _topological(problem.goal, recipes, items)
    if order is None:
        return None
    need = {problem.goal: inventory.get(problem.goal, 0) + 1}
    gets: dict[str, int] = {}
    crafts: dict[str, int] = {}
    for item in order:
        missing = need.get(item, 0) - inventory.get(item, 0)
        if missing <= 0:
            continue
        recipe = recipes.get(item)
        if recipe is None:
            gets[item] = missing
            continue
        times = -(-missing // recipe.count)
        crafts[item] = times
        for ingredient in ingredients(recipe, items):
            need[ingredient.name] = need.get(ingredient.name, 0) + times * ingredient.count
    return Plan(gets=gets, crafts=crafts, recipes=recipes, items=items)


def _topological(goal: str, recipes: Mapping[str, Recipe], items: Mapping[str, str]) -> list[str] | None:
    """Return the items that the goal is made of, each before its own ingredients; None if the
    choice of recipes is circular.
    """
    order: list[str] = []
    state: dict[str, bool] = {}

    def visit(item: str) -> bool:
        if item in state:
            return state[item]
        state[item] = False
        if item in recipes and not all(visit(i.name) for i in ingredients(recipes[item], items)):
            return False
        state[item] = True
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


def display(item: str) -> str:
    """Return the name of an item or tag as commands write it."""
    return item.removeprefix("minecraft:").replace("_", " ")


def identifier(name: str) -> str:
    """Return the id of an item or tag named in an action."""
    return "minecraft:" + name.strip().replace(" ", "_")


def command(recipe: Recipe) -> str:
    """Return the line that lists a recipe."""
    inputs = ", ".join(f"{i.count} {display(i.name)}" for i in recipe.inputs)
    return f"craft {recipe.count} {display(recipe.output)} using {inputs}"


def first_observation(problem: CraftingProblem) -> str:
    """Return the listed commands and the goal."""
    lines = "\n".join(command(recipe) for recipe in problem.commands)
    return f"Crafting commands:\n{lines}\n\n{goal_line(problem.goal)}"


def goal_line(item: str) -> str:
    """Return the line that states the goal."""
    return f"Goal: craft {display(item)}."


def takes(recipe: Recipe) -> str:
    """Return the ingredients of a recipe as the expert's thoughts name them."""
    return f"{display(recipe.output)} using {', '.join(f'{i.count} {display(i.name)}' for i in recipe.inputs)}"


def inventory_text(items: Inventory) -> str:
    """Return the answer to the action `inventory`."""
    if not items:
        return "Inventory: You are not carrying anything."
    return "Inventory: " + "".join(f"[{display(item)}] ({count}) " for item, count in items.items())


def action_of(hop: Hop, items: Mapping[str, str]) -> str:
    """Return the action for the last hop of a chain: get what is missing, else craft."""
    if hop.missing:
        item, missing = hop.missing
        return f"get {missing} {display(item)}"
    return _craft(hop.recipe, items)


def answer(hop: Hop) -> str:
    """Return the world's answer to the action for the last hop of a chain."""
    if hop.missing:
        item, missing = hop.missing
        return f"Got {missing} {display(item)}"
    return f"Crafted {hop.recipe.count} {hop.item}"


def chain_text(hops: Sequence[Hop]) -> str:
    """Return the chain in words: the ingredients of each item, and which of them is lacking."""
    sentences = []
    for hop in hops:
        shortage = f"{hop.missing[1]} {display(hop.missing[0])}" if hop.missing else "nothing"
        sentences.append(f"{takes(hop.recipe)}; lacking {shortage}.")
    return " ".join(sentences)


def lazy_reply(hops: Sequence[Hop], items: Mapping[str, str]) -> str:
    """Return the reply of the expert that fetches only what the next craft needs."""
    return f"Thought: {chain_text(hops)}\nAction: {action_of(hops[-1], items)}"


def apply_last_hop(have: MutableMapping[str, int], hops: Sequence[Hop], items: Mapping[str, str]) -> None:
    """Update an inventory in place with the effect of the action for the last hop."""
    hop = hops[-1]
    if hop.missing:
        item, missing = hop.missing
        have[item] = have.get(item, 0) + missing
        return
    for ingredient in ingredients(hop.recipe, items):
        have[ingredient.name] -= ingredient.count
        if not have[ingredient.name]:
            del have[ingredient.name]
    have[hop.item] = have.get(hop.item, 0) + hop.recipe.count


def optimal_replies(problem: CraftingProblem, chosen: Plan) -> list[str]:
    """Return the replies of the expert that first gets everything that it needs, then crafts from
    the ingredients up to the goal.
    """
    goal = display(problem.goal)
    replies = [
        f"Thought: {goal} needs {count} {display(item)} in all.\nAction: get {count} {display(item)}"
        for item, count in reversed(list(chosen.gets.items()))
    ]
    for item, times in reversed(list(chosen.crafts.items())):
        replies.extend(
            [f"Thought: all is there for {display(item)}.\nAction: {_craft(chosen.recipes[item], chosen.items)}"]
            * times
        )
    return replies


def _craft(recipe: Recipe, items: Mapping[str, str]) -> str:
    inputs = ", ".join(f"{i.count} {display(i.name)}" for i in ingredients(recipe, items))
    return f"craft {recipe.count} {display(recipe.output)} using {inputs}"


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

    def __init__(self, world: RecipeBook, entries: Mapping[str, int] | None = None) -> None:
        self._world = world
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
            item = identifier(name)
            if item in self._world.by_item or item in self._world.tags or item not in self._world.items:
                return f"Could not find {name}", ""
            self._add(item, count)
            return f"Got {count} {name}", item
        if action.startswith("inventory"):
            return inventory_text(self._entries), ""
        return f"Could not execute {action}", ""

    def _craft(self, output_text: str, input_text: str) -> tuple[str, str]:
        world = self._world
        match = _COUNT_AND_NAME.match(output_text)
        count, name = (int(match[1]), match[2]) if match else (1, output_text)
        target = identifier(name)
        inputs: list[tuple[str, int]] = []
        for part in input_text.split(","):
            input_match = _COUNT_AND_NAME.match(part.strip())
            if input_match is None:
                return f"Wrong item format: {part.strip()}", ""
            inputs.append((identifier(input_match[2]), int(input_match[1])))
        for item, amount in inputs:
            # Even an amount of 0 needs the item to be listed as carried, if only with a count of 0.
            if item in world.tags or item not in self._entries or self._entries[item] < amount:
                return f"Could not find enough items to craft {None if target in world.tags else target}", ""
        for recipe in () if target in world.tags else world.by_item.get(target, ()):
            if _matches(recipe, inputs, world.item_to_tag):
                for item, amount in inputs:
                    self._add(item, -amount)
                    if not self._entries[item]:
                        del self._entries[item]
                self._add(target, recipe.count)
                return f"Crafted {recipe.count} {target}", target
        tag, item_id = (f"'{target}'", "None") if target in world.tags else ("None", f"'{target}'")
        missing = f"ItemTagWithCount(item_tag=ItemTag(tag={tag}, item_id={item_id}), count={count})"
        return f"Could not find a valid recipe for {missing}", ""

    def _add(self, item: str, count: int) -> None:
        self._entries[item] = self._entries.get(item, 0) + count


def _matches(recipe: Recipe, inputs: Sequence[tuple[str, int]], item_to_tag: Mapping[str, str]) -> bool:
    """Return whether the given inputs are those of the recipe, paired one to one with equal
    counts.
    """
    if len(inputs) != len(recipe.inputs):
        return False
    rest = list(recipe.inputs)
    for item, amount in inputs:
        for ingredient in rest:
            name = item_to_tag.get(item) if ingredient.is_tag else item
            if ingredient.name == name and ingredient.count == amount:
                rest.remove(ingredient)
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


def judge(
    problem: CraftingProblem, before: Progress, after: Progress, action: str, *, expected: str, output: str
) -> Verdict:
    """Return the oracle's verdict on an action: good if fewer steps are left after it, otherwise
    bad or uncertain.

    Uncertain are a look at the inventory, an action that gets part of what is needed, a step on a
    way that is not the shortest, and any action if there is no plan.

    Args:
        expected: the action of the lazy expert; always good.
        output: the item that the action made or got; empty if there was none.
    """
    if before.plan is None:
        return Verdict.UNCERTAIN
    if action == expected:
        return Verdict.GOOD
    delta = after.plan.steps - before.plan.steps if after.plan is not None else 1
    if delta < 0:
        return Verdict.GOOD
    if action == "inventory":
        return Verdict.UNCERTAIN
    if delta == 0 and (output in before.plan.gets or brings_nearer(problem, before.inventory, after.inventory)):
        return Verdict.UNCERTAIN
    return Verdict.BAD


def verdicts(problem: CraftingProblem, world: RecipeBook, actions: Sequence[str]) -> tuple[Verdict, ...]:
    """Return the oracle's verdict on each action of an episode, played from its start."""
    game = CraftingGame(world)
    present = Progress(inventory={}, plan=plan(problem, {}))
    results = []
    for action in actions:
        expert_action = ""
        if present.plan is not None:
            hops = chain(problem, present.inventory, present.plan)
            expert_action = action_of(hops[-1], present.plan.items)
        _, output = game.act(action)
        after = Progress(inventory=game.inventory, plan=plan(problem, game.inventory))
        results.append(judge(problem, present, after, action, expected=expert_action, output=output))
        present = after
    return tuple(results)
