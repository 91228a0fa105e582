"""Grow a tree for one instance: dives of a Monte Carlo tree search, or the same number of
independent episodes.

Source: Agent-R (arXiv 2501.11425), section 3.1. There is no simulation beyond the tree: a dive
alternates between expansion and selection, from the root until its branch ends, so every node of
every path is in the tree.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from agentr_core import answers
from agentr_core.episodes.asking import Helper, no_helper
from agentr_core.episodes.conversation import Fits
from agentr_core.episodes.drawing import Ask
from agentr_core.episodes.steps import EpisodeTimer, call
from agentr_core.episodes.units import phase
from agentr_core.errors import DataFault
from agentr_core.protocols import Environment
from agentr_core.recipes import SearchConfig
from agentr_core.search.chains import grow_chains
from agentr_core.search.expansion import expand
from agentr_core.search.selection import descend
from agentr_core.search.states import NodeStates
from agentr_core.search.tree import ROOT, Arena, Expansion
from agentr_core.types import Instance, Tree

OnExpansion = Callable[[Expansion], None]


async def grow(
    instance: Instance,
    env: Environment,
    sample: Ask,
    config: SearchConfig,
    *,
    seed: int,
    tree: Tree | None = None,
    fits: Fits | None = None,
    on_expansion: OnExpansion | None = None,
    timer: EpisodeTimer | None = None,
    helper: Helper = no_helper,
) -> Tree:
    """Return the finished tree of an instance.

    A tree depends only on the instance, the environment, the replies, the configuration and `seed`,
    not on where it was interrupted: `tree`, as of the last `on_expansion`, grows into the same tree
    as without the interruption. If `tree` is only a root, `env` must have just been reset to the
    instance. With `fits`, conversations that do not fit are read through a window instead of ending
    their path. `helper` answers the questions that steps and the environment's grader, which
    decides the reward of each path, put to models of other roles.

    Raises:
        DataFault: `tree` belongs to another instance or seed, or its nodes are incomplete.
        ReplayDiverged: the environment did not repeat what is recorded.
        EnvironmentFault, ModelFault: as the environment and `sample` raise them; `PromptTooLong`
            ends a path instead.
    """
    timer = timer or EpisodeTimer()
    if tree is None:
        with phase("reset"):
            first_observation = await call(env, timer, lambda: answers.reset(env, instance))
        arena = Arena(instance=instance, first_observation=first_observation, seed=seed)
    elif tree.instance != instance or tree.seed != seed:
        raise DataFault(
            f"the tree of {tree.instance.key} with seed {tree.seed} cannot grow on as {instance.key} with seed {seed}"
        )
    else:
        arena = Arena.of(tree)
    steps = grow_chains if config.method == "rollouts" else _search
    async with aclosing(steps(arena, env, sample, config, timer, fits, helper)) as expansions:
        async for expansion in expansions:
            if on_expansion is not None:
                on_expansion(expansion)
    return arena.tree()


async def _search(
    arena: Arena,
    env: Environment,
    sample: Ask,
    config: SearchConfig,
    timer: EpisodeTimer,
    fits: Fits | None,
    helper: Helper,
) -> AsyncGenerator[Expansion, None]:
    """Yield the expansions of the remaining dives."""
    # The environment of a fresh arena has just been reset; at which node that of a resumed one
    # stands is not known.
    states = NodeStates(env, standing=ROOT if len(arena.nodes) == 1 else None)
    position = _resume(arena, config)
    while position is not None:
        growth = await expand(arena, position, states, sample, config, timer, fits, helper)
        position = _advance(arena, config, position)
        yield arena.report(growth)


def _resume(arena: Arena, config: SearchConfig) -> int | None:
    """Return the node to expand next, possibly in the middle of a dive; None when the search is
    over.

    A dive that has created nodes and is not counted as done continues below the parent of the last
    of them.
    """
    last = arena.nodes[-1]
    if _over(arena, config) or last.index == ROOT or last.dive < arena.dives_done:
        return _dive(arena, config)
    return _advance(arena, config, last.parent)


def _advance(arena: Arena, config: SearchConfig, expanded: int) -> int | None:
    """Return the node to expand after `expanded`, counting the dive as done if its branch ended
    there.
    """
    position = _descend(arena, config, expanded)
    if position is not None:
        return position
    arena.dives_done += 1
    return _dive(arena, config)


def _dive(arena: Arena, config: SearchConfig) -> int | None:
    """Return the node that the next dive expands first; a dive that finds none counts as done."""
    while not _over(arena, config):
        position = _descend(arena, config, ROOT)
        if position is not None:
            return position
        arena.dives_done += 1
    return None


def _over(arena: Arena, config: SearchConfig) -> bool:
    return arena.dives_done >= config.dives or arena.nodes[ROOT].terminal or _hopeless(arena, config)


def _hopeless(arena: Arena, config: SearchConfig) -> bool:
    return 0 < config.give_up <= arena.dives_done and not arena.nodes[ROOT].value_sum


def _descend(arena: Arena, config: SearchConfig, start: int) -> int | None:
    return descend(
        arena.nodes,
        arena.children,
        start,
        exploration=config.exploration,
        seed=arena.seed,
        dive=arena.dives_done,
    )
