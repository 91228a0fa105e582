"""An environment of Gymnasium that speaks text: its observations and actions are strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentr_core import answers
from agentr_core.environments.instances import Instances
from agentr_core.environments.opaque import Opaque
from agentr_core.environments.replies import line_after_label
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.protocols.abilities import Labels
from agentr_core.types import Instance, Transition

if TYPE_CHECKING:
    import gymnasium

_INSTRUCTION = """\
You act in a text world. Reply with one line of thought and one action, nothing else:
Thought: why this action
Action: the action"""


class GymnasiumText(Opaque):
    """A registered Gymnasium environment whose observation and action spaces are `Text`.

    An instance is a seed of its reset. The reward of an episode is its return so far, scaled from
    `reward_low`..`reward_high` to [0, 1]. Success is `info["success"]` if the environment gives it,
    otherwise whether the episode ended with the highest reward.

    Args:
        id: the id that `gymnasium.make` takes, such as `my_package:Rooms-v0`.
        instruction: the first turn of the conversation; it must name the actions.
        step_limit: the usual number of steps.
        train: the first and last seed of the split.
        test: the same for the test split.
        make_options: keyword arguments for `gymnasium.make`.
        seeds_differ: whether each seed is another problem, also where their first observations are
            the same.
        files: the files and folders that the environment reads; their contents are part of a run's
            id.
    """

    acknowledgement = "Ok."
    blocking = False
    labels: Labels = "lenient"

    def __init__(
        self,
        *,
        id: str = "",
        instruction: str = _INSTRUCTION,
        step_limit: int = 30,
        train: Sequence[int] = (0, 999),
        test: Sequence[int] = (1000, 1099),
        reward_low: float = 0.0,
        reward_high: float = 1.0,
        make_options: Mapping[str, Any] | None = None,
        seeds_differ: bool = False,
        files: Sequence[str] = (),
    ) -> None:
        if not id:
            raise ConfigError("gymnasium needs the option id: a registered environment, such as my_package:Rooms-v0")
        if not reward_low < reward_high:
            raise ConfigError(f"gymnasium {id}: reward_low {reward_low:g} is not below reward_high {reward_high:g}")
        self.name = f"gymnasium-{id}"
        self.instruction = instruction
        self.step_limit = step_limit
        self._seeds = {"train": _seeds(train, f"{id}: train"), "test": _seeds(test, f"{id}: test")}
        if max(train[0], test[0]) <= min(train[1], test[1]):
            raise ConfigError(f"gymnasium {id}: the seeds of train and test overlap")
        self._low = reward_low
        self._high = reward_high
        self._seeds_differ = seeds_differ
        self._return = 0.0
        self._env = _make(id, make_options or {})

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the files that the recipe names."""
        return tuple(options.get("files", ()))

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._seeds)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split, one for each seed."""
        if split not in self._seeds:
            raise ConfigError(f"{self.name} has no split {split!r}; it has {', '.join(self._seeds)}")
        return Instances(self.name, split, self._seeds[split])

    def identity(self, instance: Instance) -> str:
        """Return the first observation of an instance, or its seed with `seeds_differ`."""
        return f"seed {instance.index}" if self._seeds_differ else self.reset(instance)

    def reset(self, instance: Instance) -> str:
        """Return the first observation of the episode with the seed of the instance."""
        if instance.environment != self.name or instance.index not in self._seeds.get(instance.split, ()):
            raise EnvironmentFault(f"{self.name} has no instance {instance.key}")
        self._return = 0.0
        return answers.text(self._env.reset(seed=instance.index)[0], f"{self.name}: the first observation")

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition; its `info` includes that of the
        environment.
        """
        observation, reward, terminated, truncated, info = self._env.step(action)
        # Checked before it is added: the bounds of the scale would hide that the reward is
        # infinite.
        self._return += answers.number(reward, f"{self.name}: the reward of {action!r}")
        standing = min(max((self._return - self._low) / (self._high - self._low), 0.0), 1.0)
        success = info.get("success", bool(terminated) and standing == 1.0)
        return Transition(observation, standing, terminated, truncated, {**info, "success": success})

    def parse(self, reply: str) -> str:
        """Return the line after the last "Action:" of a reply."""
        return line_after_label(reply, self.labels)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _make(id: str, options: Mapping[str, Any]) -> gymnasium.Env[str, str]:
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the environment gymnasium needs a package: "
            "in the checkout, pip install -c constraints.txt -e '.[gymnasium]'"
        ) from error
    try:
        # Nonsense is answered by the environment, not refused by the checker that `make` would wrap
        # it in.
        env = gymnasium.make(id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        raise ConfigError(f"Gymnasium cannot make {id!r}: {' '.join(str(error).split())}") from error
    for space in (env.observation_space, env.action_space):
        if not isinstance(space, gymnasium.spaces.Text):
            env.close()
            raise ConfigError(f"gymnasium {id}: a text environment is needed, but one of its spaces is {space}")
    return env


def _seeds(given: Sequence[int], what: str) -> range:
    if len(given) != 2 or not 0 <= given[0] <= given[1]:
        raise ConfigError(f"gymnasium {what} must be the first and the last seed, such as [0, 999], not {given}")
    return range(given[0], given[1] + 1)
