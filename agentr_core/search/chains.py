"""Independent episodes stored as a tree, each a chain below the root: the control for the tree
search.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from agentr_core.episodes.asking import Helper, graded
from agentr_core.episodes.conversation import Fits
from agentr_core.episodes.drawing import Ask
from agentr_core.episodes.replay import diverged
from agentr_core.episodes.rollout import episode
from agentr_core.episodes.steps import EpisodeTimer, Reply
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.recipes.sampling import sampling_of
from agentr_core.repeating import repeatability_of, repeats
from agentr_core.search.expansion import end_at_context_limit
from agentr_core.search.tree import ROOT, Arena, Draw, Expansion, Growth
from agentr_core.types import Grading, Trajectory


async def grow_chains(
    arena: Arena,
    env: Environment,
    sample: Ask,
    config: SearchConfig,
    timer: EpisodeTimer,
    fits: Fits | None,
    helper: Helper,
) -> AsyncGenerator[Expansion, None]:
    """Yield each finished episode until there are `config.dives * config.width`; `width` of them
    count as one dive.

    Episode number i has seed `derive_seed(arena.seed, "episode", i)` and may take as many steps as
    the longest path of a search, `config.depth + 1`. Every node of a chain is terminal; the root
    becomes terminal with the last episode.
    """
    total = config.dives * config.width
    while (number := len(arena.children[ROOT])) < total and not arena.nodes[ROOT].terminal:
        replies: list[Reply] = []
        seed = derive_seed(arena.seed, "episode", number)
        trajectory = await episode(
            arena.instance,
            env,
            sample,
            max_steps=config.depth + 1,
            sampling=sampling_of(config),
            seed=seed,
            fits=fits,
            on_reply=replies.append,
            timer=timer,
            helper=helper,
        )
        if not repeats(trajectory.first_observation, arena.first_observation, repeatability_of(env)):
            raise diverged(
                env, f"{arena.instance.key}: episode {number} began with another observation than the first one"
            )
        trajectory, grading = await graded(env, trajectory, helper, seed=seed)
        growth = _add(arena, trajectory, replies, grading, dive=number // config.width)
        arena.dives_done = len(arena.children[ROOT]) // config.width
        if number + 1 == total:
            arena.put(replace(arena.nodes[ROOT], terminal=True))
        yield arena.report(growth)


def _add(
    arena: Arena, trajectory: Trajectory, replies: Sequence[Reply], grading: Grading | None, *, dive: int
) -> Growth:
    if not replies:
        return end_at_context_limit(arena, ROOT)
    first_created = node = len(arena.nodes)
    draws = []
    parent = ROOT
    for position, (reply, step) in enumerate(zip(replies, trajectory.steps, strict=True), 1):
        stop = trajectory.stop if position == len(replies) else None
        node = arena.add(parent, step, stop, terminal=True, dive=dive)
        draws.append(Draw(parent=parent, node=node, seed=reply.seed, number=0, generation=reply.generation))
        parent = node
    return Growth(
        first_created=first_created,
        touched=frozenset(arena.back_up(node)),
        draws=tuple(draws),
        gradings=() if grading is None else ((node, grading),),
    )
