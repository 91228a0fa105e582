"""One expansion: draw replies at a node, step the environment with each, and back up what ended.

Source: Agent-R (arXiv 2501.11425), section 3.1. Unlike the reference code the replies come from one
request, equal ones are stepped once, and the environment returns to a node by a snapshot where it
can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentr_core.episodes.conversation import Fits, conversation
from agentr_core.episodes.rollout import Ask, EpisodeTimer, call, draw_within, read_through
from agentr_core.episodes.units import phase
from agentr_core.errors import PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes import SearchConfig
from agentr_core.search.states import NodeStates
from agentr_core.search.tree import Arena, Draw, Growth, steps_to
from agentr_core.types import Generation, Request, Sampling, StopReason


def sampling_of(config: SearchConfig) -> Sampling:
    """Return how a search draws its replies."""
    return Sampling(temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens)


async def expand(
    arena: Arena,
    node: int,
    states: NodeStates,
    sample: Ask,
    config: SearchConfig,
    timer: EpisodeTimer,
    fits: Fits | None = None,
) -> Growth:
    """Grow the arena below an unexpanded node and return what changed.

    The replies are drawn with seed `derive_seed(arena.seed, "expand", node)`. Children deeper than
    `config.depth` end at the step limit with the reward they have. A node whose conversation leaves
    no room for a reply ends itself; where `fits` is given, only if it does so even without all that
    a window leaves out.
    """
    env = states.env
    steps = steps_to(arena.nodes, node)
    request = Request(
        messages=conversation(env, arena.first_observation, steps),
        sampling=sampling_of(config),
        seed=derive_seed(arena.seed, "expand", node),
        n=config.width,
        session=f"{arena.instance.key}#{arena.seed}",
    )
    try:
        generations, dropped = await draw_within(sample, request, timer, fits, least=steps[-1].dropped if steps else 0)
    except PromptTooLong:
        return end_at_context_limit(arena, node)
    firsts = first_of_equals(generations, env.parse if config.merge == "action" else None)
    distinct = sorted(set(firsts))
    horizon = arena.nodes[node].depth + 1 > config.depth
    with phase("step"):
        outcomes = await call(
            env, timer, lambda: states.branch(arena, node, [generations[i] for i in distinct], horizon=horizon)
        )
    outcomes = [read_through(outcome, dropped) for outcome in outcomes]
    first_created = len(arena.nodes)
    child_of = {
        position: arena.add(node, outcome.step, outcome.stop, duplicates=firsts.count(position))
        for position, outcome in zip(distinct, outcomes, strict=True)
    }
    touched: set[int] = set()
    for child in child_of.values():
        if arena.nodes[child].terminal:
            touched |= arena.back_up(child)
    touched |= arena.close(node)
    return Growth(
        first_created=first_created,
        touched=frozenset(touched),
        draws=tuple(
            Draw(parent=node, node=child_of[first], seed=request.seed, number=number, generation=generation)
            for number, (first, generation) in enumerate(zip(firsts, generations, strict=True))
        ),
    )


def end_at_context_limit(arena: Arena, node: int) -> Growth:
    """End the path at an unexpanded node, with the reward it has, and return what changed."""
    arena.put(replace(arena.nodes[node], terminal=True, stop=StopReason.CONTEXT_LIMIT))
    touched = arena.back_up(node) | arena.close(arena.nodes[node].parent)
    return Growth(first_created=len(arena.nodes), touched=frozenset(touched))


def first_of_equals(generations: Sequence[Generation], parse: Callable[[str], str] | None) -> list[int]:
    """Return for each reply the position of the first one equal to it: in text, or in the action
    that `parse` finds.
    """
    seen: dict[str, int] = {}
    return [
        seen.setdefault(parse(generation.text) if parse else generation.text, position)
        for position, generation in enumerate(generations)
    ]
