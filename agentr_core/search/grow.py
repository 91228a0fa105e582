"""Grow a tree for one instance: dives of a Monte Carlo tree search, or the same number of
independent episodes.

Source: Agent-R (arXiv 2501.11425), section 3.1. There is no simulation beyond the tree: a dive
alternates between expansion and selection, from the root until its branch ends, so every node of
every path is in the tree.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from agentr_core import answers
from agentr_core.episodes.asking import Helper, no_helper
from agentr_core.episodes.conversation import Fits
from agentr_core.episodes.drawing import Ask
from agentr_core.episodes.steps import EpisodeTimer, call
from agentr_core.episodes.units import phase
from agentr_core.errors import DataFault
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.chains import grow_chains
from agentr_core.search.expansion import expand
from agentr_core.search.leading import Lead
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
    diving = _Diving(arena, config, Lead(arena=arena, states=states, config=config, timer=timer, helper=helper))
    known = len(arena.nodes)
    position = await diving.resume()
    while position is not None:
        growth = await expand(arena, position, states, sample, config, timer, fits, helper)
        position = await diving.advance(position)
        # Nodes on the way of a dive that begins now are stored with the dive that ended.
        yield arena.report(replace(growth, first_created=known, touched=growth.touched | diving.opened))
        known, diving.opened = len(arena.nodes), frozenset()


@dataclass(slots=True)
class _Diving:
    """The dives of a search: which node is expanded next. `opened` are nodes that were closed and
    are open again, since the expert's steps go on below them.
    """

    arena: Arena
    config: SearchConfig
    lead: Lead
    opened: frozenset[int] = frozenset()

    async def resume(self) -> int | None:
        """Return the node to expand next, possibly in the middle of a dive; None when the search is
        over.

        A dive that has created nodes and is not counted as done continues below the parent of the
        last of them.
        """
        last = self.arena.nodes[-1]
        if last.index == ROOT or last.dive < self.arena.dives_done:
            return await self._dive()
        return await self.advance(last.parent)

    async def advance(self, expanded: int) -> int | None:
        """Return the node to expand after `expanded`, counting the dive as done if its branch ended
        there.
        """
        position = self._descend(expanded)
        if position is not None:
            return position
        self.arena.dives_done += 1
        return await self._dive()

    async def _dive(self) -> int | None:
        """Return the node that the next dive expands first; a dive that finds none counts as
        done.
        """
        while self.arena.dives_done < self.config.dives:
            start = await self._start()
            if start is None:
                return None
            position = self._descend(start)
            if position is not None:
                return position
            self.arena.dives_done += 1
        return None

    async def _start(self) -> int | None:
        """Return the node at which the next dive begins; None if there is none."""
        arena, config = self.arena, self.config
        closed = arena.nodes[ROOT].terminal
        lost = not arena.nodes[ROOT].value_sum and (closed or 0 < config.give_up <= arena.dives_done)
        if not (closed or lost):
            return ROOT
        if not (lost and config.expert_start):
            return None
        start, opened = await self.lead.start()
        self.opened |= opened
        return start or None

    def _descend(self, start: int) -> int | None:
        return descend(
            self.arena.nodes,
            self.arena.children,
            start,
            exploration=self.config.exploration,
            seed=self.arena.seed,
            dive=self.arena.dives_done,
        )
