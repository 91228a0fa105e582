"""The oracle of a crafting world: it plans before and after an action to see whether the action
brings the goal nearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.environments.crafting import text
from agentr_core.environments.crafting.game import CraftingGame
from agentr_core.environments.crafting.planner import CraftingProblem, Inventory, Plan, brings_nearer, chain, plan
from agentr_core.environments.crafting.recipes import RecipeBook
from agentr_core.types import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An agent's inventory and the plan from there; no plan means that the goal is out of reach."""

    inventory: Inventory
    plan: Plan | None


def judge(
    problem: CraftingProblem, before: Standing, after: Standing, action: str, *, expected: str, made: str
) -> Verdict:
    """Return the oracle's verdict on an action: good if fewer steps are left after it, otherwise
    bad or uncertain.

    The uncertain actions are a look at the inventory, one that gets a part of a need, a step on a
    way that is not the shortest, and any action if there is no plan.

    Args:
        expected: what the lazy expert would have done; always good.
        made: the item that the action made or got; empty if there was none.
    """
    if before.plan is None:
        return Verdict.UNCERTAIN
    if action == expected:
        return Verdict.GOOD
    left = after.plan.steps - before.plan.steps if after.plan is not None else 1
    if left < 0:
        return Verdict.GOOD
    if action == "inventory":
        return Verdict.UNCERTAIN
    if left == 0 and (made in before.plan.gets or brings_nearer(problem, before.inventory, after.inventory)):
        return Verdict.UNCERTAIN
    return Verdict.BAD


def verdicts(problem: CraftingProblem, world: RecipeBook, actions: Sequence[str]) -> tuple[Verdict, ...]:
    """Return the oracle's verdict on each action of an episode, played from its start."""
    game = CraftingGame(world)
    present = Standing(inventory={}, plan=plan(problem, {}))
    found = []
    for action in actions:
        expected = ""
        if present.plan is not None:
            hops = chain(problem, present.inventory, present.plan)
            expected = text.action_of(hops[-1], present.plan.items)
        _, made = game.act(action)
        after = Standing(inventory=game.inventory, plan=plan(problem, game.inventory))
        found.append(judge(problem, present, after, action, expected=expected, made=made))
        present = after
    return tuple(found)
