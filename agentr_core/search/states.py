"""Bring one environment to the nodes of a growing tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentr_core.episodes.asking import Helper
from agentr_core.episodes.replay import restore
from agentr_core.episodes.steps import EpisodeTimer, Outcome, act, call, step_with
from agentr_core.episodes.units import phase
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols.environment import Environment
from agentr_core.search.tree import Arena, steps_to
from agentr_core.types import Generation, StopReason


@dataclass(slots=True)
class NodeStates:
    """One environment and the snapshots of the nodes that are still to be expanded.

    A node is reached by staying if the environment is already there, else by snapshot in constant
    time, else by replaying the node's steps from a reset. `standing` is the node whose state the
    environment is in, None if unknown.
    """

    env: Environment
    standing: int | None = None
    snapshots: dict[int, Any] = field(default_factory=dict)

    async def ask_branch(
        self,
        arena: Arena,
        node: int,
        generations: Sequence[Generation],
        *,
        horizon: bool,
        timer: EpisodeTimer,
        helper: Helper,
        seed: int,
        session: str,
    ) -> list[Outcome]:
        """Return what `branch` returns, for a world whose steps ask models of other roles."""
        outcomes = []
        for number, generation in enumerate(generations):
            outcomes.append(
                await self.follow(
                    arena,
                    node,
                    generation,
                    child=len(arena.nodes) + number,
                    horizon=horizon,
                    timer=timer,
                    helper=helper,
                    seed=derive_seed(seed, "ask", number),
                    session=session,
                )
            )
        self.snapshots.pop(node, None)
        return outcomes

    async def follow(
        self,
        arena: Arena,
        node: int,
        reply: Generation | str,
        *,
        child: int,
        horizon: bool = False,
        timer: EpisodeTimer,
        helper: Helper,
        seed: int,
        session: str,
    ) -> Outcome:
        """Return the outcome of one reply at a node, sampled or not, which must become node
        `child`; `horizon` and the errors are those of `branch`.
        """
        await call(self.env, timer, partial(self._go, arena, node))
        self.standing = None
        outcome = await step_with(self.env, timer, reply, helper, seed=seed, session=session)
        return await call(self.env, timer, partial(self._keep, child, outcome, horizon=horizon))

    def branch(self, arena: Arena, node: int, generations: Sequence[Generation], *, horizon: bool) -> list[Outcome]:
        """Return the outcome of each reply at a node; with `horizon` an open outcome stops at the
        step limit.

        Generation i must become the i-th node that is added next, since the state it leads to is
        kept under that index. Raises `ReplayDiverged` when the node is reached by replay and the
        environment answers differently.
        """
        outcomes = []
        for child, generation in enumerate(generations, len(arena.nodes)):
            self._go(arena, node)
            self.standing = None
            outcome = act(self.env, generation.text, generation=generation)
            outcomes.append(self._keep(child, outcome, horizon=horizon))
        self.snapshots.pop(node, None)
        return outcomes

    def _keep(self, child: int, outcome: Outcome, *, horizon: bool) -> Outcome:
        """Record that the environment is at a new child, and keep its state if its path goes on."""
        if outcome.stop is None and horizon:
            outcome = replace(outcome, stop=StopReason.STEP_LIMIT)
        if outcome.stop is None and self.env.can_snapshot:
            self.snapshots[child] = self.env.snapshot()
        self.standing = child
        return outcome

    def _go(self, arena: Arena, node: int) -> None:
        if node in self.snapshots and self.standing != node:
            self.env.restore(self.snapshots[node])
            return
        if self.standing != node:
            with phase("restore"):
                restore(
                    self.env,
                    arena.instance,
                    steps_to(arena.nodes, node),
                    first_observation=arena.first_observation,
                )
        if self.env.can_snapshot and node not in self.snapshots:
            self.snapshots[node] = self.env.snapshot()
