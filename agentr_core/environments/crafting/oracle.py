"""The oracle of a crafting world: whether an action brings the goal nearer, by planning before and
after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentr_core.environments.crafting import text
from agentr_core.environments.crafting.game import CraftingGame
from agentr_core.environments.crafting.planner import CraftingTask, Inventory, Plan, brings_nearer, chain, plan
from agentr_core.environments.crafting.recipes import RecipeBook
from agentr_core.types import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What an agent holds and the plan from there; no plan means the goal is out of reach."""

    inventory: Inventory
    plan: Plan | None


def judge(task: CraftingTask, before: Standing, after: Standing, action: str, *, expected: str, made: str) -> Verdict:
    """Return the oracle's word on an action: good if fewer steps are left after it, or bad;
    uncertain in between.

    Uncertain are a look, a part of a need, a step on a way that is not the shortest, and all where
    no plan is left.

    Args:
        expected: what the lazy expert would have done; always good.
        made: the item that the action made or got; empty if it came to nothing.
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
    if left == 0 and (made in before.plan.gets or brings_nearer(task, before.inventory, after.inventory)):
        return Verdict.UNCERTAIN
    return Verdict.BAD


def verdicts(task: CraftingTask, world: RecipeBook, actions: Sequence[str]) -> tuple[Verdict, ...]:
    """Return the oracle's word on each action of an episode, played from its start."""
    game = CraftingGame(world)
    present = Standing(inventory={}, plan=plan(task, {}))
    found = []
    for action in actions:
        expected = ""
        if present.plan is not None:
            hops = chain(task, present.inventory, present.plan)
            expected = text.action_of(hops[-1], present.plan.items)
        _, made = game.act(action)
        after = Standing(inventory=game.inventory, plan=plan(task, game.inventory))
        found.append(judge(task, present, after, action, expected=expected, made=made))
        present = after
    return tuple(found)
