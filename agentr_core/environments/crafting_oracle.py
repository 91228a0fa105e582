"""The oracle of a crafting world: whether an action brings the goal nearer, by planning before and after it."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.environments import crafting_text
from agentr_core.environments.crafting import CraftingTask, Plan, chain, plan
from agentr_core.environments.crafting_game import CraftingGame
from agentr_core.environments.crafting_recipes import RecipeBook
from agentr_core.types import Verdict


def judge(before: Plan, after: Plan | None, action: str, expected: str, made: str) -> Verdict:
    """Return the oracle's word: good if fewer steps are left, uncertain for a look or a part of a need, else bad.

    Args:
        before, after: the plans before and after the action; no plan means the goal is out of reach.
        expected: what the lazy expert would have done; always good.
        made: the item that the action made or got; empty if it came to nothing.
    """
    if action == expected or (after is not None and after.steps < before.steps):
        return Verdict.GOOD
    if action == "inventory" or (after is not None and after.steps == before.steps and made in before.gets):
        return Verdict.UNCERTAIN
    return Verdict.BAD


def verdicts(task: CraftingTask, world: RecipeBook, actions: Sequence[str]) -> tuple[Verdict, ...]:
    """Return the oracle's word on each action of an episode, played from its start."""
    game = CraftingGame(world)
    present = plan(task, {})
    found = []
    for action in actions:
        if present is None:
            found.append(Verdict.UNCERTAIN)
            game.act(action)
            continue
        hops = chain(task, game.inventory, present)
        expected = crafting_text.action_of(hops[-1], present.items)
        _, made = game.act(action)
        after = plan(task, game.inventory)
        found.append(judge(present, after, action, expected, made))
        present = after
    return tuple(found)
