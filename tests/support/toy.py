"""A toy world and a toy policy for tests of the search: a number line on which every ending can be
reached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentr_core.environment import Environment
from agentr_core.errors import EnvironmentFault, PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.search.tree import Expansion
from agentr_core.types import Generation, Instance, Node, Request, Transition, Tree

ACTIONS = ("right", "left", "look", "stop", "jump")


class Line(Environment):
    """Walk right to the goal, 2 + index steps away. `stop` ends with a part of the reward, `jump`
    is a disaster.
    """

    name = "line"
    instruction = "Walk right to the goal."
    step_limit = 10

    def __init__(self, *, can_snapshot: bool = True, blocking: bool = False, drift: bool = False) -> None:
        self.can_snapshot = can_snapshot
        self.blocking = blocking
        self.resets = 0
        self.steps = 0
        self.closed = False
        self._drift = drift
        self._goal = 2
        self._place = 0

    def splits(self) -> tuple[str, ...]:
        return ("train",)

    def instances(self, split: str) -> Sequence[Instance]:
        return [instance(i) for i in range(5)]

    def reset(self, instance: Instance) -> str:
        if instance.index > 4:
            raise EnvironmentFault(f"line has no instance {instance.key}")
        self.resets += 1
        self._goal = 2 + instance.index
        self._place = 0
        return f"The goal is {self._goal} to the right."

    def step(self, action: str) -> Transition:
        self.steps += 1
        self._place += {"right": 1, "left": -1}.get(action, 0)
        at_goal = self._place == self._goal
        if action == "jump":
            return Transition("You fell.", -1.0, True, False, {"success": False, "valid": True})
        if action == "stop":
            part = max(0, self._place) / self._goal
            return Transition("You stopped.", part, True, False, {"success": False, "valid": True})
        drift = f" ({self.steps})" if self._drift else ""
        observation = f"You are at {self._place}.{drift}"
        return Transition(observation, float(at_goal), at_goal, False, {"success": at_goal, "valid": action in ACTIONS})

    def parse(self, reply: str) -> str:
        return reply.rpartition("Action: ")[2].strip()

    def snapshot(self) -> Any:
        if not self.can_snapshot:
            raise EnvironmentFault("this line cannot be copied")
        return self._goal, self._place

    def restore(self, snapshot: Any) -> None:
        self._goal, self._place = snapshot

    def depth(self, instance: Instance) -> int | None:
        return 2 + instance.index

    def expert(self, instance: Instance) -> Sequence[str] | None:
        return ["Action: right"] * (2 + instance.index)

    def close(self) -> None:
        self.closed = True


class Policy:
    """A sampler whose reply number i to a request depends on (seed, i) alone; `requests` is the log
    of its calls.
    """

    def __init__(self, actions: Sequence[str] = ACTIONS, *, thoughts: int = 2, max_messages: int = 1000) -> None:
        self.actions = actions
        self.thoughts = thoughts
        self.max_messages = max_messages
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> list[Generation]:
        self.requests.append(request)
        if len(request.messages) > self.max_messages:
            raise PromptTooLong(f"{len(request.messages)} messages; {self.max_messages} fit")
        return [generation(self.reply(request, number)) for number in range(request.n)]

    def reply(self, request: Request, number: int) -> str:
        rng = random.Random(derive_seed(request.seed, number))
        return f"Thought: {rng.randrange(self.thoughts)}\nAction: {rng.choice(self.actions)}"


class Script(Policy):
    """Replies to the conversation with k replies in it with the k-th list of actions; the last list
    is repeated.
    """

    def __init__(self, *rounds: Sequence[str]) -> None:
        super().__init__()
        self.rounds = rounds

    def reply(self, request: Request, number: int) -> str:
        done = (len(request.messages) - 3) // 2
        actions = self.rounds[min(done, len(self.rounds) - 1)]
        return f"Thought: {number}\nAction: {actions[number % len(actions)]}"


class Growing:
    """Keeps a tree as a store does: by applying each expansion to the rows it has."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.nodes: dict[int, Node] = {0: Node(index=0, parent=-1, depth=0, step=None)}
        self.dives_done = 0
        self.expansions: list[Expansion] = []
        if tree is not None:
            self.nodes = {node.index: node for node in tree.nodes}
            self.dives_done = tree.dives_done

    def __call__(self, expansion: Expansion) -> None:
        self.expansions.append(expansion)
        for node in (*expansion.created, *expansion.changed):
            self.nodes[node.index] = node
        self.dives_done = expansion.dives_done

    def tree(self, finished: Tree) -> Tree:
        nodes = tuple(self.nodes[i] for i in range(len(self.nodes)))
        return replace(finished, nodes=nodes, dives_done=self.dives_done)


class Cut(Exception):
    """Stands for a crash."""


def instance(index: int = 0) -> Instance:
    return Instance(environment="line", split="train", index=index)


def generation(text: str) -> Generation:
    return Generation(
        text=text, token_ids=tuple(map(ord, text)), finish_reason="stop", prompt_tokens=1, completion_tokens=len(text)
    )
