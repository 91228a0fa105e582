"""Any environment for TRL's GRPO trainer: the `environment_factory`, and the rows of its
dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentr_core import answers
from agentr_core.errors import EnvironmentFault
from agentr_core.protocols.environment import Environment
from agentr_core.types import Instance

_BY_TOOL = "Instead of writing the line of the action, send each action with the tool `act`."


class TrlEpisode:
    """One rollout: TRL makes it without arguments, resets it with a row, and offers its public
    method as a tool.

    Source: `environment_factory` of `trl.GRPOTrainer`, version 1.16, which TRL calls experimental.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._steps = 0
        self._reward = 0.0
        self._over = False
        self._fault: EnvironmentFault | None = None

    def reset(self, *, environment_name: str, split: str, index: int, **columns: Any) -> str:
        """Return the first observation of a row's instance; TRL appends it to the prompt."""
        self._steps, self._reward, self._over, self._fault = 0, 0.0, False, None
        return answers.reset(self._env, Instance(environment=environment_name, split=split, index=index))

    def act(self, action: str) -> str:
        """Act in the world and see what it leads to.

        Args:
            action: One action, worded as the instruction says, without a label.

        Returns:
            What is observed after the action.
        """
        if self._over:
            return "The episode is over."
        try:
            found = answers.action_in(self._env, f"Action: {action}")
            observation, reward, terminated, truncated, _ = answers.step(self._env, found)
        except EnvironmentFault as fault:
            # TRL would report the fault to the model as the model's own mistake; `get_reward`
            # raises it instead.
            self._fault, self._over = fault, True
            return "The environment broke."
        self._steps += 1
        self._reward = max(reward, 0.0)
        self._over = terminated or truncated or reward < 0 or self._steps >= self._env.step_limit
        return observation

    def get_reward(self) -> float:
        """Return the reward of the episode, in [0, 1]. Raises the `EnvironmentFault` that ended it,
        if one did.
        """
        if self._fault is not None:
            raise self._fault
        return self._reward


def environment_factory(make: Callable[[], Environment]) -> Callable[[], TrlEpisode]:
    """Return the factory for `trl.GRPOTrainer(environment_factory=...)`; `make` returns a new
    environment.
    """
    return lambda: TrlEpisode(make())


def rows(env: Environment, instances: Sequence[Instance]) -> list[dict[str, Any]]:
    """Return the rows of a dataset: a prompt with the instruction, and the instance that
    `TrlEpisode.reset` begins.
    """
    prompt = [{"role": "user", "content": f"{env.instruction}\n{_BY_TOOL}\n\n"}]
    return [
        {"prompt": prompt, "environment_name": each.environment, "split": each.split, "index": each.index}
        for each in instances
    ]
