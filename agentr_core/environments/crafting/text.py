"""What a crafting world says and how its expert speaks: every string in one place."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from agentr_core.environments.crafting.planner import CraftingProblem, Hop, Inventory, Plan, ingredients
from agentr_core.environments.crafting.recipes import Recipe

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
    """Return the name of an item or tag as commands show it."""
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
    """Return what a recipe takes, as the expert words it in thoughts."""
    return f"{display(recipe.output)} using {', '.join(f'{i.count} {display(i.name)}' for i in recipe.inputs)}"


def inventory(items: Inventory) -> str:
    """Return the answer to the action `inventory`."""
    if not items:
        return "Inventory: You are not carrying anything."
    return "Inventory: " + "".join(f"[{display(item)}] ({count}) " for item, count in items.items())


def action_of(hop: Hop, items: Mapping[str, str]) -> str:
    """Return the action that the last hop of a chain calls for."""
    if hop.lacking:
        item, missing = hop.lacking
        return f"get {missing} {display(item)}"
    return _craft(hop.recipe, items)


def answer(hop: Hop) -> str:
    """Return what the world answers to the action that the last hop of a chain calls for."""
    if hop.lacking:
        item, missing = hop.lacking
        return f"Got {missing} {display(item)}"
    return f"Crafted {hop.recipe.count} {hop.item}"


def chain_text(hops: Sequence[Hop]) -> str:
    """Return the chain in words: what each item takes and what of it is lacking."""
    return " ".join(_hop(hop) for hop in hops)


def lazy_reply(hops: Sequence[Hop], items: Mapping[str, str]) -> str:
    """Return the reply of the expert that fetches only what the next craft needs."""
    return f"Thought: {chain_text(hops)}\nAction: {action_of(hops[-1], items)}"


def apply_last_hop(have: MutableMapping[str, int], hops: Sequence[Hop], items: Mapping[str, str]) -> None:
    """Change an inventory as the action of the last hop does."""
    hop = hops[-1]
    if hop.lacking:
        item, missing = hop.lacking
        have[item] = have.get(item, 0) + missing
        return
    for ingredient in ingredients(hop.recipe, items):
        have[ingredient.name] -= ingredient.count
        if not have[ingredient.name]:
            del have[ingredient.name]
    have[hop.item] = have.get(hop.item, 0) + hop.recipe.count


def optimal_replies(problem: CraftingProblem, chosen: Plan) -> list[str]:
    """Return the replies of the expert that first fetches everything it needs, then crafts from the
    bottom up.
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


def _hop(hop: Hop) -> str:
    lacking = f"{hop.lacking[1]} {display(hop.lacking[0])}" if hop.lacking else "nothing"
    return f"{takes(hop.recipe)}; lacking {lacking}."
