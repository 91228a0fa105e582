"""Grow a tree for one instance: dives of a Monte Carlo tree search, or the same number of
independent episodes.

Source: Agent-R (arXiv 2501.11425), section 3.1. There is no simulation beyond the tree: a dive
alternates between expansion and selection, from the root until its branch ends, so every node of
every path is in the tree.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentr_core.environment import Environment, Repeatability, is_repetition
from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import (
    EpisodeTimer,
    Helper,
    Outcome,
    Reply,
    SampleReplies,
    act,
    act_with_helper,
    call_env,
    divergence_error,
    no_helper,
    restore_state,
    roll_out_episode,
    sample_within_context,
    text_and_action,
    with_num_dropped,
)
from agentr_core.episodes.transcript import FitsContext, next_request
from agentr_core.episodes.units import phase
from agentr_core.errors import DataFault, PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.models.batching import gather_or_cancel
from agentr_core.recipes.agent_r import SearchConfig
from agentr_core.recipes.fields import sampling_of
from agentr_core.search.tree import ROOT, Arena, Draw, Expansion, Growth, descend, path_to, steps_to
from agentr_core.types import Generation, Grading, Instance, Request, Step, StopReason, Trajectory, Tree

# Put one environment into the states of the nodes of a growing tree.


@dataclass(slots=True)
class NodeStates:
    """One environment, and snapshots of the nodes that are still to be expanded.

    A node's state is reached without any work if the environment is already in it, else by
    restoring a snapshot, else by replaying the node's steps after a reset. `current_node` is the
    node whose state the environment is in, None if unknown.
    """

    env: Environment
    current_node: int | None = None
    snapshots: dict[int, Any] = field(default_factory=dict)

    async def step(
        self,
        arena: Arena,
        node: int,
        reply: Generation | str,
        *,
        child: int,
        at_step_limit: bool = False,
        timer: EpisodeTimer,
        helper: Helper,
        seed: int,
        session: str,
    ) -> Outcome:
        """Step the environment with one reply, sampled or not, at a node, and return the outcome.
        The step may ask models of other roles through `helper`.

        The caller must add the outcome to the arena as node `child`. With `at_step_limit`, an
        outcome that does not end the episode stops at the step limit. Raises as `step_with_all`.
        """
        await call_env(self.env, timer, partial(self._go_to_node, arena, node))
        self.current_node = None
        outcome = await act_with_helper(self.env, timer, reply, helper, seed=seed, session=session)
        return await call_env(self.env, timer, partial(self._record_child, child, outcome, at_step_limit=at_step_limit))

    def step_with_all(
        self, arena: Arena, node: int, generations: Sequence[Generation], *, at_step_limit: bool
    ) -> list[Outcome]:
        """Step the environment with each reply at a node; return the outcomes in the same order.
        With `at_step_limit`, an outcome that does not end the episode stops at the step limit.

        The caller must add the outcomes to the arena next, in this order, since the snapshots are
        kept under the indices that the nodes will have. Raises `ReplayDiverged` if the node is
        reached by a replay that does not give the recorded observations.
        """
        outcomes = []
        for child, generation in enumerate(generations, len(arena.nodes)):
            self._go_to_node(arena, node)
            self.current_node = None
            outcome = act(self.env, generation)
            outcomes.append(self._record_child(child, outcome, at_step_limit=at_step_limit))
        self.snapshots.pop(node, None)
        return outcomes

    def _record_child(self, child: int, outcome: Outcome, *, at_step_limit: bool) -> Outcome:
        """Record that the environment is in the state of a new child; keep a snapshot of it, if
        possible, unless the path ends there. Return the outcome, with the stop reason of
        `at_step_limit`.
        """
        if outcome.stop is None and at_step_limit:
            outcome = replace(outcome, stop=StopReason.STEP_LIMIT)
        if outcome.stop is None and self.env.can_snapshot:
            self.snapshots[child] = self.env.snapshot()
        self.current_node = child
        return outcome

    def _go_to_node(self, arena: Arena, node: int) -> None:
        if node in self.snapshots and self.current_node != node:
            self.env.restore(self.snapshots[node])
            return
        if self.current_node != node:
            with phase("restore"):
                restore_state(
                    self.env,
                    arena.instance,
                    steps_to(arena.nodes, node),
                    first_observation=arena.first_observation,
                )
        if self.env.can_snapshot and node not in self.snapshots:
            self.snapshots[node] = self.env.snapshot()


# One expansion: sample replies at a node, step the environment with each, and back up ended paths.
#
# Source: Agent-R (arXiv 2501.11425), section 3.1. Unlike in the reference code, all replies come
# from one request, equal replies are stepped once, and the environment returns to a node by a
# snapshot if it supports snapshots.


async def expand(
    arena: Arena,
    node: int,
    states: NodeStates,
    sample: SampleReplies,
    config: SearchConfig,
    timer: EpisodeTimer,
    fits: FitsContext | None = None,
    helper: Helper = no_helper,
) -> Growth:
    """Expand a node: sample `config.width` replies, add the children, and return what changed.

    The replies are sampled with seed `derive_seed(arena.seed, "expand", node)`. Children deeper
    than `config.depth` end at the step limit with the reward they have. If the conversation leaves
    no room for a reply, the path ends at the node instead; with `fits`, only if that is so after
    the window has dropped all it may. `helper` answers the questions that steps and the grader ask
    models of other roles.
    """
    env = states.env
    steps = steps_to(arena.nodes, node)
    seed = derive_seed(arena.seed, "expand", node)
    request = next_request(
        env, arena.first_observation, steps, sampling_of(config), seed=seed, n=config.width, session=arena.session
    )
    try:
        generations, num_dropped = await sample_within_context(
            sample, request, timer, fits, min_dropped=steps[-1].dropped if steps else 0
        )
    except PromptTooLong:
        return end_at_context_limit(arena, node)
    # For each reply, the position of the first reply that is equal to it.
    position_by_key: dict[str, int] = {}
    first_positions = [
        position_by_key.setdefault(reply_key(env, config, generation), position)
        for position, generation in enumerate(generations)
    ]
    distinct_replies = [generations[i] for i in sorted(set(first_positions))]
    at_step_limit = arena.nodes[node].depth + 1 > config.depth
    if env.has(Environment.answer):
        # A step of such a world asks models of other roles.
        outcomes = [
            await states.step(
                arena,
                node,
                generation,
                child=len(arena.nodes) + number,
                at_step_limit=at_step_limit,
                timer=timer,
                helper=helper,
                seed=derive_seed(seed, "ask", number),
                session=request.session,
            )
            for number, generation in enumerate(distinct_replies)
        ]
        states.snapshots.pop(node, None)
    else:
        with phase("step"):
            outcomes = await call_env(
                env, timer, lambda: states.step_with_all(arena, node, distinct_replies, at_step_limit=at_step_limit)
            )
    outcomes = [with_num_dropped(outcome, num_dropped) for outcome in outcomes]
    outcomes, gradings = await grade_ended_paths(env, arena, steps, outcomes, helper, request)
    growth = _add_children(arena, node, seed, generations, first_positions, outcomes)
    graded_nodes = ((growth.first_created + number, grading) for number, grading in gradings.items())
    return replace(growth, gradings=tuple(graded_nodes))


def _add_children(
    arena: Arena,
    node: int,
    seed: int,
    generations: Sequence[Generation],
    first_positions: Sequence[int],
    outcomes: Sequence[Outcome],
) -> Growth:
    """Add the outcomes of the distinct replies at a node to the arena, back up those that ended,
    and return what changed, without grades.

    Args:
        generations: all replies, as sampled with `seed`.
        first_positions: for each reply, the position of the first reply equal to it.
        outcomes: the outcomes of the replies that equal no earlier reply, in order.
    """
    first_created = len(arena.nodes)
    child_by_position = {
        position: arena.add(node, outcome.step, outcome.stop, duplicates=first_positions.count(position))
        for position, outcome in zip(sorted(set(first_positions)), outcomes, strict=True)
    }
    changed_nodes: set[int] = set()
    for child in child_by_position.values():
        if arena.nodes[child].terminal:
            changed_nodes |= arena.back_up(child)
    changed_nodes |= arena.close(node)
    return Growth(
        first_created=first_created,
        changed=frozenset(changed_nodes),
        draws=tuple(
            Draw(parent=node, node=child_by_position[first], seed=seed, number=number, generation=generation)
            for number, (first, generation) in enumerate(zip(first_positions, generations, strict=True))
        ),
    )


async def grade_ended_paths(
    env: Environment,
    arena: Arena,
    steps: Sequence[Step],
    outcomes: Sequence[Outcome],
    helper: Helper,
    request: Request,
) -> tuple[list[Outcome], dict[int, Grading]]:
    """Grade the paths that ended with one of the outcomes. Return all outcomes in the same order,
    the graded ones with the grader's reward, and the grades by position in `outcomes`.

    Args:
        steps: the steps before the outcomes, from the root.
        request: the request that the replies answer; seed and session of the grading come from it.
    """
    trajectories = {
        number: Trajectory.ended(arena.instance, arena.first_observation, (*steps, outcome.step), outcome.stop)
        for number, outcome in enumerate(outcomes)
        if outcome.stop is not None
    }
    pending = [
        grade_episode(env, trajectory, helper, seed=derive_seed(request.seed, "grade", number), session=request.session)
        for number, trajectory in trajectories.items()
    ]
    graded_by_number = dict(zip(trajectories, await gather_or_cancel(pending), strict=True))
    return (
        [
            Outcome(step=graded_by_number[number][0].steps[-1], stop=graded_by_number[number][0].stop)
            if number in graded_by_number
            else outcome
            for number, outcome in enumerate(outcomes)
        ],
        {number: grading for number, (_, grading) in graded_by_number.items() if grading is not None},
    )


def end_at_context_limit(arena: Arena, node: int) -> Growth:
    """End the path at an unexpanded node with `StopReason.CONTEXT_LIMIT`, back up the reward it
    has, and return what changed.
    """
    arena.replace_node(replace(arena.nodes[node], terminal=True, stop=StopReason.CONTEXT_LIMIT))
    changed_nodes = arena.back_up(node) | arena.close(arena.nodes[node].parent)
    return Growth(first_created=len(arena.nodes), changed=frozenset(changed_nodes))


def reply_key(env: Environment, config: SearchConfig, reply: str | Step | Generation) -> str:
    """Return the key of a reply: two replies of a node with the same key share one child."""
    if config.merge == "action":
        return text_and_action(env, reply)[1]
    return reply if isinstance(reply, str) else reply.reply if isinstance(reply, Step) else reply.text


# Let later dives begin after the expert's first steps if a tree has earned no reward so far.
#
# So the end of a long task is searched before its beginning (reverse curriculum, arXiv 2402.05808).
# This is not in the Agent-R paper, where such trees have no good path and give no training data.


def num_expert_steps(num_steps: int, *, dives_done: int, dives_per_halving: int) -> int:
    """Return after how many of the expert's `num_steps` the next dive begins.

    The number of steps left to the policy is halved with each `dives_per_halving` dives done, down
    to 1. For 8 steps: after 4 at first, then 6, then 7.
    """
    return num_steps - max(1, num_steps >> max(1, dives_done // dives_per_halving))


@dataclass(slots=True, kw_only=True)
class ExpertStart:
    """Follows the expert's first steps down a tree, and adds those that it lacks. Steps that are in
    the tree already are not played again, so a resumed search finds the same nodes.
    """

    arena: Arena
    states: NodeStates
    config: SearchConfig
    timer: EpisodeTimer
    helper: Helper
    _replies: tuple[str, ...] | None = None

    async def start(self) -> tuple[int, frozenset[int]]:
        """Return the node at which the next dive begins (the root if no step of the expert can be
        followed), and the nodes that are no longer terminal.

        Missing steps are added as nodes of the last dive. If one cannot be added, because the path
        has ended at the context limit or the step ends the episode, the dive begins before it.
        """
        arena, node, reopened_nodes = self.arena, ROOT, frozenset[int]()
        env, instance = self.states.env, self.arena.instance
        if self._replies is None:
            self._replies = await call_env(env, self.timer, lambda: tuple(env.expert(instance) or ()))
            # The expert may have stepped the environment to find its replies.
            self.states.current_node = None
        replies = self._replies
        num_steps = num_expert_steps(len(replies), dives_done=arena.dives_done, dives_per_halving=self.config.give_up)
        for reply in replies[: min(num_steps, self.config.depth)] if replies else ():
            # The child of the node that stands for the reply, if there is one.
            key = reply_key(env, self.config, reply)
            steps = [(index, arena.nodes[index].step) for index in arena.children[node]]
            child = next((i for i, step in steps if step and reply_key(env, self.config, step) == key), None)
            if child is None:
                child = await self._add_step(node, reply)
                if child is None:
                    break
                # The nodes on the way now have a child that can be expanded: they are not terminal.
                to_reopen = [
                    index for index in (ROOT, *path_to(self.arena.nodes, node)) if self.arena.nodes[index].terminal
                ]
                for index in to_reopen:
                    self.arena.replace_node(replace(self.arena.nodes[index], terminal=False))
                reopened_nodes |= frozenset(to_reopen)
            node = child
        return node, reopened_nodes

    async def _add_step(self, node: int, reply: str) -> int | None:
        arena = self.arena
        if arena.nodes[node].stop is not None:
            return None
        outcome = await self.states.step(
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
            self.states.current_node = None
            return None
        return arena.add(node, outcome.step, None, duplicates=0, dive=arena.dives_done - 1)


# Independent episodes, each stored as a chain of nodes below the root: the control condition for
# the tree search.


async def grow_chains(
    arena: Arena,
    env: Environment,
    sample: SampleReplies,
    config: SearchConfig,
    timer: EpisodeTimer,
    fits: FitsContext | None,
    helper: Helper,
) -> AsyncGenerator[Expansion, None]:
    """Play episodes until there are `config.dives * config.width`, and yield an expansion for each;
    `width` episodes count as one dive.

    Episode number i has seed `derive_seed(arena.seed, "episode", i)` and may take as many steps as
    the longest path of a search, `config.depth + 1`. Every node of a chain is terminal; the root
    becomes terminal with the last episode, or if not even its prompt fits.

    Raises `ReplayDiverged` if an episode begins with another observation than the tree.
    """
    total = config.dives * config.width
    while (number := len(arena.children[ROOT])) < total and not arena.nodes[ROOT].terminal:
        replies: list[Reply] = []
        seed = derive_seed(arena.seed, "episode", number)
        trajectory = await roll_out_episode(
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
        if not is_repetition(trajectory.first_observation, arena.first_observation, Repeatability(env.repeatability)):
            raise divergence_error(
                env, f"{arena.instance.key}: episode {number} began with another observation than the first one"
            )
        trajectory, grading = await grade_episode(env, trajectory, helper, seed=seed)
        if not replies:
            growth = end_at_context_limit(arena, ROOT)
        else:
            first_created = node = len(arena.nodes)
            draws = []
            parent = ROOT
            for position, (reply, step) in enumerate(zip(replies, trajectory.steps, strict=True), 1):
                stop = trajectory.stop if position == len(replies) else None
                node = arena.add(parent, step, stop, terminal=True, dive=number // config.width)
                draws.append(Draw(parent=parent, node=node, seed=reply.seed, number=0, generation=reply.generation))
                parent = node
            growth = Growth(
                first_created=first_created,
                changed=frozenset(arena.back_up(node)),
                draws=tuple(draws),
                gradings=() if grading is None else ((node, grading),),
            )
        arena.dives_done = len(arena.children[ROOT]) // config.width
        if number + 1 == total:
            arena.replace_node(replace(arena.nodes[ROOT], terminal=True))
        yield arena.make_expansion(growth)


OnExpansion = Callable[[Expansion], None]


async def grow(
    instance: Instance,
    env: Environment,
    sample: SampleReplies,
    config: SearchConfig,
    *,
    seed: int,
    tree: Tree | None = None,
    fits: FitsContext | None = None,
    on_expansion: OnExpansion | None = None,
    timer: EpisodeTimer | None = None,
    helper: Helper = no_helper,
) -> Tree:
    """Grow the tree of an instance to its end and return it.

    A tree depends only on the instance, the environment, the replies, the configuration and `seed`,
    not on interruptions: a search that resumes after any expansion gives the same tree.

    Args:
        tree: the unfinished tree to continue, as it was after an expansion; None starts a new one.
            If it is only a root, `env` must have just been reset to the instance.
        fits: tells whether a prompt fits. Prompts that do not are read through a context window;
            with None, they end their path.
        on_expansion: called with each expansion as soon as it is made.
        helper: answers the questions that steps and the grader ask models of other roles.

    Raises:
        DataFault: `tree` belongs to another instance or seed, or its nodes are incomplete.
        ReplayDiverged: the environment did not repeat what is recorded.
        EnvironmentFault, ModelFault: as the environment and `sample` raise them; `PromptTooLong`
            ends a path instead.
    """
    timer = timer or EpisodeTimer()
    if tree is None:
        with phase("reset"):
            first_observation = await call_env(env, timer, lambda: env.reset(instance))
        arena = Arena(instance=instance, first_observation=first_observation, seed=seed)
    elif tree.instance != instance or tree.seed != seed:
        raise DataFault(
            f"the tree of {tree.instance.key} with seed {tree.seed} cannot grow on as {instance.key} with seed {seed}"
        )
    else:
        arena = Arena.from_tree(tree)
    expansions_of = grow_chains if config.method == "rollouts" else _search
    async with aclosing(expansions_of(arena, env, sample, config, timer, fits, helper)) as expansions:
        async for expansion in expansions:
            if on_expansion is not None:
                on_expansion(expansion)
    return arena.tree()


async def _search(
    arena: Arena,
    env: Environment,
    sample: SampleReplies,
    config: SearchConfig,
    timer: EpisodeTimer,
    fits: FitsContext | None,
    helper: Helper,
) -> AsyncGenerator[Expansion, None]:
    """Yield the expansions of the remaining dives."""
    # For a fresh arena, the environment has just been reset. For a resumed one, its state is not
    # known.
    states = NodeStates(env, current_node=ROOT if len(arena.nodes) == 1 else None)
    schedule = _DiveSchedule(
        arena, config, ExpertStart(arena=arena, states=states, config=config, timer=timer, helper=helper)
    )
    num_reported = len(arena.nodes)
    node = await schedule.resume()
    while node is not None:
        growth = await expand(arena, node, states, sample, config, timer, fits, helper)
        node = await schedule.advance(node)
        # `advance` may have added the expert's steps for the next dive. They belong to this
        # expansion, whose dive has just ended.
        yield arena.make_expansion(
            replace(growth, first_created=num_reported, changed=growth.changed | schedule.reopened_nodes)
        )
        num_reported, schedule.reopened_nodes = len(arena.nodes), frozenset()


@dataclass(slots=True)
class _DiveSchedule:
    """Decides which node a search expands next, dive by dive. `reopened_nodes` are nodes that are
    no longer terminal because the expert's steps were added below them, and that are not reported
    yet.
    """

    arena: Arena
    config: SearchConfig
    expert_start: ExpertStart
    reopened_nodes: frozenset[int] = frozenset()

    async def resume(self) -> int | None:
        """Return the node to expand next, possibly in the middle of a dive; None if the search is
        over.

        A dive that has created nodes and is not counted as done continues below the parent of its
        latest node.
        """
        last = self.arena.nodes[-1]
        if last.index == ROOT or last.dive < self.arena.dives_done:
            return await self._begin_dive()
        return await self.advance(last.parent)

    async def advance(self, node: int) -> int | None:
        """Return the node to expand after `node`, None if the search is over. If the branch ends at
        `node` or at all its children, count the dive as done and begin the next one.
        """
        node_to_expand = self._descend(node)
        if node_to_expand is not None:
            return node_to_expand
        self.arena.dives_done += 1
        return await self._begin_dive()

    async def _begin_dive(self) -> int | None:
        """Return the node that the next dive expands first, None if the search is over. A dive that
        finds no node to expand counts as done.
        """
        while self.arena.dives_done < self.config.dives:
            start = await self._dive_start()
            if start is None:
                return None
            node_to_expand = self._descend(start)
            if node_to_expand is not None:
                return node_to_expand
            self.arena.dives_done += 1
        return None

    async def _dive_start(self) -> int | None:
        """Return the node at which the next dive begins, None if the search is over. It is the root
        or, if the tree is given up and `search.expert_start` is set, one after the expert's steps.
        """
        arena, config = self.arena, self.config
        is_root_closed = arena.nodes[ROOT].terminal
        has_no_reward = not arena.nodes[ROOT].value_sum and (is_root_closed or 0 < config.give_up <= arena.dives_done)
        if not (is_root_closed or has_no_reward):
            return ROOT
        if not (has_no_reward and config.expert_start):
            return None
        start, reopened_nodes = await self.expert_start.start()
        self.reopened_nodes |= reopened_nodes
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
