"""Where the dives of a tree begin that has earned nothing: after the expert's first steps.

The end of a long task is searched before its beginning (reverse curriculum, arXiv 2402.05808). Not
in the Agent-R paper, whose trees of such instances have no good path and so teach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from agentr_core import answers
from agentr_core.episodes.asking import Helper
from agentr_core.episodes.steps import EpisodeTimer, call
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.search.expansion import same_reply
from agentr_core.search.states import NodeStates
from agentr_core.search.tree import ROOT, Arena, way_to


def steps_shown(steps: int, *, dives_done: int, give_up: int) -> int:
    """Return how many of the expert's steps the next dive begins after: half of them, then half of
    the rest after each `give_up` further dives, but never the last one.
    """
    return steps - max(1, steps >> max(1, dives_done // give_up))


@dataclass(slots=True, kw_only=True)
class Lead:
    """The way of the expert's first steps in a tree. Steps that the tree has are not taken again,
    so the way is found again when a search is resumed.
    """

    arena: Arena
    states: NodeStates
    config: SearchConfig
    timer: EpisodeTimer
    helper: Helper
    _replies: tuple[str, ...] | None = None

    async def start(self) -> tuple[int, frozenset[int]]:
        """Return the node at which the next dive begins, and the nodes that are open again; the
        root if the expert leads nowhere.

        The steps that the tree lacks are added as if the last dive had made them. Where one cannot
        be added, because the path has no room or the episode ends, the way ends before it.
        """
        arena, node, opened = self.arena, ROOT, frozenset[int]()
        replies = await self._expert()
        shown = steps_shown(len(replies), dives_done=arena.dives_done, give_up=self.config.give_up)
        for reply in replies[: min(shown, self.config.depth)] if replies else ():
            child = self._child(node, reply)
            if child is None:
                child = await self._add(node, reply)
                if child is None:
                    break
                opened |= self._open(node)
            node = child
        return node, opened

    async def _expert(self) -> tuple[str, ...]:
        if self._replies is None:
            env, instance = self.states.env, self.arena.instance
            self._replies = await call(env, self.timer, partial(answers.expert, env, instance)) or ()
            # An expert may have played in the environment to know its replies.
            self.states.standing = None
        return self._replies

    def _child(self, node: int, reply: str) -> int | None:
        """Return the child of a node that stands for a reply."""
        key = same_reply(self.states.env, self.config)
        for child in self.arena.children[node]:
            step = self.arena.nodes[child].step
            if step is not None and key(step.reply) == key(reply):
                return child
        return None

    async def _add(self, node: int, reply: str) -> int | None:
        arena = self.arena
        if arena.nodes[node].stop is not None:
            return None
        outcome = await self.states.follow(
            arena,
            node,
            reply,
            child=len(arena.nodes),
            timer=self.timer,
            helper=self.helper,
            seed=derive_seed(arena.seed, "lead", node),
            session=arena.session,
        )
        if outcome.stop is not None:
            self.states.standing = None
            return None
        return arena.add(node, outcome.step, None, duplicates=0, dive=arena.dives_done - 1)

    def _open(self, node: int) -> frozenset[int]:
        """Make the nodes from the root to `node` open, since there is a new one below; return those
        that were not.
        """
        closed = [index for index in (ROOT, *way_to(self.arena.nodes, node)) if self.arena.nodes[index].terminal]
        for index in closed:
            self.arena.put(replace(self.arena.nodes[index], terminal=False))
        return frozenset(closed)
