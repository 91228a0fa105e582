"""Episodes of the lazy expert as samples: faultless, with a mistake for a while, or careless."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from agentr_core.base_model.mistakes import misread
from agentr_core.environments.crafting import TextCraft, text
from agentr_core.environments.crafting.game import CraftingGame
from agentr_core.environments.crafting.planner import CraftingProblem, Hop, Inventory, chain, plan
from agentr_core.environments.crafting.recipes import RecipeBook
from agentr_core.types import Instance, Message, Sample, SampleKind

MAX_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Careless:
    """How likely a careless expert errs, in [0, 1].

    `forget`: where it holds part of what a command takes, it overlooks the rest and crafts.
    `repeat`: it does what was just refused once more.
    """

    forget: float = 0.0
    repeat: float = 0.0


def expert_sample(problem: CraftingProblem, instance: Instance) -> Sample | None:
    """Return an episode of the lazy expert, all its replies trained."""
    chosen = plan(problem, {})
    if chosen is None:
        return None
    messages = opening(text.first_observation(problem))
    inventory: dict[str, int] = {}
    for _ in range(MAX_STEPS):
        hops = chain(problem, inventory, chosen)
        text.apply_last_hop(inventory, hops, chosen.items)
        messages.append(Message(role="assistant", text=text.lazy_reply(hops, chosen.items), train=True))
        if inventory.get(problem.goal):
            return Sample(kind=SampleKind.EXPERT, messages=tuple(messages), instance=instance)
        messages.append(Message(role="user", text=text.answer(hops[-1])))
    return None


def mistake_sample(
    problem: CraftingProblem, world: RecipeBook, instance: Instance, rng: random.Random
) -> Sample | None:
    """Return an episode of the lazy expert that misreads a command for 1 to 4 replies, which are
    not trained.
    """
    game = CraftingGame(world)
    chosen = plan(problem, {})
    if chosen is None:
        return None
    start = rng.randrange(chosen.steps)
    stop = start + rng.randint(1, 4)
    messages = opening(text.first_observation(problem))
    for number in range(MAX_STEPS):
        if number == start:
            chosen = misread(problem, chosen, game.inventory, rng)
        elif number == stop:
            chosen = plan(problem, game.inventory)
        if chosen is None:
            return None
        hops = chain(problem, game.inventory, chosen)
        right = not start <= number < stop
        messages.append(Message(role="assistant", text=text.lazy_reply(hops, chosen.items), train=right))
        observation, made = game.act(text.action_of(hops[-1], chosen.items))
        if made == problem.goal:
            return Sample(kind=SampleKind.EXPERT, messages=tuple(messages), instance=instance) if right else None
        messages.append(Message(role="user", text=observation))
    return None


def careless_sample(
    problem: CraftingProblem, world: RecipeBook, instance: Instance, careless: Careless, rng: random.Random
) -> Sample | None:
    """Return an episode of a careless expert, all its replies trained, those that are refused, too.

    It may end without reaching the goal. None where the goal is out of reach.
    """
    game = CraftingGame(world)
    chosen = plan(problem, {})
    if chosen is None:
        return None
    messages = opening(text.first_observation(problem))
    hops: tuple[Hop, ...] = ()
    refused = False
    for _ in range(MAX_STEPS):
        if not (refused and rng.random() < careless.repeat):
            hops = chain(problem, game.inventory, chosen)
            if not refused and (short := _overlooking(hops, game.inventory)) and rng.random() < careless.forget:
                hops = short
        messages.append(Message(role="assistant", text=text.lazy_reply(hops, chosen.items), train=True))
        observation, made = game.act(text.action_of(hops[-1], chosen.items))
        if made == problem.goal:
            break
        messages.append(Message(role="user", text=observation))
        refused = not made
    return Sample(kind=SampleKind.EXPERT, messages=tuple(messages), instance=instance)


def _overlooking(hops: tuple[Hop, ...], inventory: Inventory) -> tuple[Hop, ...]:
    """Return the chain up to the first command of which part is held, as if nothing of it were
    lacking; empty if there is no such command.
    """
    for number, hop in enumerate(hops):
        if hop.lacking and any(i.name in inventory for i in hop.recipe.inputs):
            return (*hops[:number], replace(hop, lacking=None))
    return ()


def opening(first_observation: str) -> list[Message]:
    """Return the turns before the first reply."""
    return [
        Message(role="user", text=text.INSTRUCTION),
        Message(role="assistant", text=TextCraft.acknowledgement),
        Message(role="user", text=first_observation),
    ]
