"""Gymnasium environments whose observations and actions are texts, and worlds for TRL's GRPO
trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentr_core.environment import Environment, Instances, checked_number, checked_text, missing_part
from agentr_core.episodes.grading import grade_by_rule
from agentr_core.episodes.rollout import act as act_in
from agentr_core.errors import ConfigError, EnvironmentFault, MissingPart
from agentr_core.types import Instance, StopReason, Trajectory, Transition

if TYPE_CHECKING:
    import gymnasium


_INSTRUCTION = """\
You act in a text world. Reply with one line of thought and one action, nothing else:
Thought: why this action
Action: the action"""


class GymnasiumText(Environment):
    """A registered Gymnasium environment whose observation and action spaces are `Text`.

    An instance is a seed of its reset. The reward of an episode is its return so far, scaled from
    `reward_low`..`reward_high` to [0, 1]. Success is `info["success"]` if the environment gives it,
    otherwise whether the episode ended with the highest reward.

    Args:
        id: the id that `gymnasium.make` takes, such as `my_package:Rooms-v0`.
        instruction: the first message of the conversation; it must name the actions.
        step_limit: the number of steps after which an episode is usually cut.
        train: the first and last seed of the split `train`.
        test: the same for the split `test`.
        reward_low, reward_high: the range of an episode's return.
        make_options: keyword arguments for `gymnasium.make`.
        seeds_differ: whether each seed is a different problem, even if first observations are
            equal.
        files: the files and folders that the environment reads; their contents are part of a run's
            id.
    """

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
        self._seeds_by_split = {"train": _seed_range(train, f"{id}: train"), "test": _seed_range(test, f"{id}: test")}
        if max(train[0], test[0]) <= min(train[1], test[1]):
            raise ConfigError(f"gymnasium {id}: the seeds of train and test overlap")
        self._reward_low = reward_low
        self._reward_high = reward_high
        self._seeds_differ = seeds_differ
        self._return = 0.0
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise ConfigError(
                "the environment gymnasium needs a package: "
                "in the checkout, pip install -c constraints.txt -e '.[gymnasium]'"
            ) from error
        try:
            # Nonsense is answered by the environment, not refused by the checker that `make` would
            # wrap it in.
            env = gymnasium.make(id, disable_env_checker=True, **(make_options or {}))
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            if missing := missing_part(error):
                raise MissingPart(f"environment gymnasium needs {missing}") from error
            raise ConfigError(f"Gymnasium cannot make {id!r}: {' '.join(str(error).split())}") from error
        for space in (env.observation_space, env.action_space):
            if not isinstance(space, gymnasium.spaces.Text):
                env.close()
                raise ConfigError(f"gymnasium {id}: a text environment is needed, but one of its spaces is {space}")
        self._env: gymnasium.Env[str, str] = env

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the files and folders of the option `files`."""
        return tuple(options.get("files", ()))

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._seeds_by_split)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split, one for each seed."""
        if split not in self._seeds_by_split:
            raise ConfigError(f"{self.name} has no split {split!r}; it has {', '.join(self._seeds_by_split)}")
        return Instances(self.name, split, self._seeds_by_split[split])

    def identity(self, instance: Instance) -> str:
        """Return the first observation of an instance, or its seed with `seeds_differ`."""
        return f"seed {instance.index}" if self._seeds_differ else self.reset(instance)

    def reset(self, instance: Instance) -> str:
        """Return the first observation of the episode with the seed of the instance."""
        if instance.environment != self.name or instance.index not in self._seeds_by_split.get(instance.split, ()):
            raise EnvironmentFault(f"{self.name} has no instance {instance.key}")
        self._return = 0.0
        return checked_text(self._env.reset(seed=instance.index)[0], f"{self.name}: the first observation")

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition: its reward is the scaled return so far,
        and its `info` includes that of the environment.
        """
        observation, reward, terminated, truncated, info = self._env.step(action)
        # Checked before it is added: clipping to [0, 1] would hide an infinite reward.
        self._return += checked_number(reward, f"{self.name}: the reward of {action!r}")
        progress = min(max((self._return - self._reward_low) / (self._reward_high - self._reward_low), 0.0), 1.0)
        success = info.get("success", bool(terminated) and progress == 1.0)
        return Transition(observation, progress, terminated, truncated, {**info, "success": success})

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _seed_range(bounds: Sequence[int], setting: str) -> range:
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"gymnasium {setting} must be the first and the last seed, such as [0, 999], not {bounds}")
    return range(bounds[0], bounds[1] + 1)


# Any environment for TRL's GRPO trainer: the `environment_factory`, and the rows of its
# dataset.

_TOOL_NOTE = "Instead of writing the line of the action, send each action with the tool `act`."


class TrlEpisode:
    """One rollout for TRL, which makes it without arguments (see `environment_factory`), resets it
    with a row of the dataset, and offers its public method `act` to the model as a tool.

    Source: `environment_factory` of `trl.GRPOTrainer`, version 1.16, which TRL calls experimental.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._episode: Trajectory | None = None
        self._is_over = False
        self._fault: EnvironmentFault | None = None

    def reset(self, *, environment_name: str, split: str, index: int, **columns: Any) -> str:
        """Begin the instance that a row of the dataset names, and return its first observation,
        which TRL appends to the prompt.
        """
        self._episode, self._is_over, self._fault = None, False, None
        instance = Instance(environment=environment_name, split=split, index=index)
        self._episode = Trajectory.ended(instance, self._env.reset(instance), (), StopReason.STEP_LIMIT)
        return self._episode.first_observation

    def act(self, action: str) -> str:
        """Act in the world and see what it leads to.

        Args:
            action: One action, worded as the instruction says, without a label.

        Returns:
            What is observed after the action.
        """
        episode = self._episode
        if self._is_over or episode is None:
            return "The episode is over."
        try:
            outcome = act_in(self._env, f"Action: {action}")
        except EnvironmentFault as fault:
            # TRL would report the fault to the model as the model's own mistake; `get_reward`
            # raises it instead.
            self._fault, self._is_over = fault, True
            return "The environment broke."
        steps = (*episode.steps, outcome.step)
        self._is_over = outcome.stop is not None or len(steps) >= self._env.step_limit
        self._episode = Trajectory.ended(
            episode.instance, episode.first_observation, steps, outcome.stop or StopReason.STEP_LIMIT
        )
        return outcome.step.observation

    def get_reward(self) -> float:
        """Return the reward of the episode, in [0, 1], by the world's grader if it has one. Raises
        the `EnvironmentFault` that ended it, if one did, and `ConfigError` if the grader has to ask
        a model.
        """
        if self._fault is not None:
            raise self._fault
        return 0.0 if self._episode is None else grade_by_rule(self._env, self._episode).reward


def environment_factory(make: Callable[[], Environment]) -> Callable[[], TrlEpisode]:
    """Return the factory for `trl.GRPOTrainer(environment_factory=...)`; `make` must return a new
    environment at each call.
    """
    return lambda: TrlEpisode(make())


def rows(env: Environment, instances: Sequence[Instance]) -> list[dict[str, Any]]:
    """Return the rows of a dataset for TRL, one for each instance: a prompt with the instruction,
    and the arguments of `TrlEpisode.reset`.
    """
    prompt = [{"role": "user", "content": f"{env.instruction}\n{_TOOL_NOTE}\n\n"}]
    return [
        {"prompt": prompt, "environment_name": instance.environment, "split": instance.split, "index": instance.index}
        for instance in instances
    ]
