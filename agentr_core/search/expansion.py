"""One expansion: draw replies at a node, step the environment with each, and back up ended paths.

Source: Agent-R (arXiv 2501.11425), section 3.1. Unlike in the reference code, all replies come from
one request, equal replies are stepped once, and the environment returns to a node by a snapshot if
it supports them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentr_core.episodes.asking import Helper, graded, no_helper
from agentr_core.episodes.conversation import Fits
from agentr_core.episodes.drawing import Ask, draw_within, read_through
from agentr_core.episodes.steps import EpisodeTimer, Outcome, call
from agentr_core.episodes.transcript import ask_next
from agentr_core.episodes.units import phase
from agentr_core.errors import PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.models.together import all_or_none
from agentr_core.protocols.abilities import Asking
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.recipes.sampling import sampling_of
from agentr_core.search.states import NodeStates
from agentr_core.search.tree import Arena, Draw, Growth, steps_to
from agentr_core.types import Generation, Grading, Request, Step, StopReason, Trajectory


async def expand(
    arena: Arena,
    node: int,
    states: NodeStates,
    sample: Ask,
    config: SearchConfig,
    timer: EpisodeTimer,
    fits: Fits | None = None,
    helper: Helper = no_helper,
) -> Growth:
    """Grow the arena below an unexpanded node and return what changed.

    The replies are drawn with seed `derive_seed(arena.seed, "expand", node)`. Children deeper than
    `config.depth` end at the step limit with the reward they have. A node whose conversation leaves
    no room for a reply is ended; with `fits`, only if there is no room even after the window has
    left out all it may. `helper` answers the questions that steps and the grader put to models of
    other roles.
    """
    env = states.env
    steps = steps_to(arena.nodes, node)
    request = ask_next(
        env,
        arena.first_observation,
        steps,
        sampling_of(config),
        seed=derive_seed(arena.seed, "expand", node),
        n=config.width,
        session=arena.session,
    )
    try:
        generations, dropped = await draw_within(sample, request, timer, fits, least=steps[-1].dropped if steps else 0)
    except PromptTooLong:
        return end_at_context_limit(arena, node)
    firsts = first_of_equals(generations, same_reply(env, config))
    chosen = [generations[i] for i in sorted(set(firsts))]
    outcomes = await _branch(arena, node, states, chosen, config, timer, helper, request)
    outcomes = [read_through(outcome, dropped) for outcome in outcomes]
    outcomes, gradings = await grade_ends(env, arena, steps, outcomes, helper, request)
    grown = _add_children(arena, node, request.seed, generations, firsts, outcomes)
    graded_nodes = ((grown.first_created + number, grading) for number, grading in gradings.items())
    return replace(grown, gradings=tuple(graded_nodes))


def _add_children(
    arena: Arena,
    node: int,
    seed: int,
    generations: Sequence[Generation],
    firsts: Sequence[int],
    outcomes: Sequence[Outcome],
) -> Growth:
    """Add the outcomes of the distinct replies at a node to the arena, back up those that ended,
    and return what changed, without grades.

    Args:
        generations: all replies that were drawn, with `seed`.
        firsts: for each reply, the position of the first reply equal to it; see `first_of_equals`.
        outcomes: the outcomes of the replies that equal no earlier reply, in order.
    """
    first_created = len(arena.nodes)
    child_of = {
        position: arena.add(node, outcome.step, outcome.stop, duplicates=firsts.count(position))
        for position, outcome in zip(sorted(set(firsts)), outcomes, strict=True)
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
            Draw(parent=node, node=child_of[first], seed=seed, number=number, generation=generation)
            for number, (first, generation) in enumerate(zip(firsts, generations, strict=True))
        ),
    )


async def _branch(
    arena: Arena,
    node: int,
    states: NodeStates,
    generations: Sequence[Generation],
    config: SearchConfig,
    timer: EpisodeTimer,
    helper: Helper,
    request: Request,
) -> list[Outcome]:
    """Return the outcomes of replies to `request` at a node, before anything is graded."""
    horizon = arena.nodes[node].depth + 1 > config.depth
    if isinstance(states.env, Asking):
        return await states.ask_branch(
            arena,
            node,
            generations,
            horizon=horizon,
            timer=timer,
            helper=helper,
            seed=request.seed,
            session=request.session,
        )
    with phase("step"):
        return await call(states.env, timer, lambda: states.branch(arena, node, generations, horizon=horizon))


async def grade_ends(
    env: Environment,
    arena: Arena,
    steps: Sequence[Step],
    outcomes: Sequence[Outcome],
    helper: Helper,
    request: Request,
) -> tuple[list[Outcome], dict[int, Grading]]:
    """Return the outcomes of replies to `request`, with the grader's reward where the path ended,
    and the grades by the number of the reply.
    """
    ended = {
        number: Trajectory.ended(arena.instance, arena.first_observation, (*steps, outcome.step), outcome.stop)
        for number, outcome in enumerate(outcomes)
        if outcome.stop is not None
    }
    asked = [
        graded(env, path, helper, seed=derive_seed(request.seed, "grade", number), session=request.session)
        for number, path in ended.items()
    ]
    found = dict(zip(ended, await all_or_none(asked), strict=True))
    return (
        [
            Outcome(step=found[number][0].steps[-1], stop=found[number][0].stop) if number in found else outcome
            for number, outcome in enumerate(outcomes)
        ],
        {number: grading for number, (_, grading) in found.items() if grading is not None},
    )


def end_at_context_limit(arena: Arena, node: int) -> Growth:
    """End the path at an unexpanded node, with the reward it has, and return what changed."""
    arena.put(replace(arena.nodes[node], terminal=True, stop=StopReason.CONTEXT_LIMIT))
    touched = arena.back_up(node) | arena.close(arena.nodes[node].parent)
    return Growth(first_created=len(arena.nodes), touched=frozenset(touched))


def same_reply(env: Environment, config: SearchConfig) -> Callable[[str], str]:
    """Return the function whose value two replies share if one child stands for both."""
    return env.parse if config.merge == "action" else str


def first_of_equals(generations: Sequence[Generation], key: Callable[[str], str]) -> list[int]:
    """Return for each reply the position of the first one with the same key."""
    seen: dict[str, int] = {}
    return [seen.setdefault(key(generation.text), position) for position, generation in enumerate(generations)]
