"""A world that works, for you to change: a lock with three dials. Each try is answered with a hint
for each dial.

The class `Environment` in agentr_core/environment.py says what each method must do, and which
others there are, with their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentr_core.environment import Environment, Instances
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.types import Instance, Transition

_MAX_TRIES = 8
_SPLITS = {"train": range(800), "test": range(800, 1000)}
_INSTRUCTION = """\
You open a lock with three dials, each from 0 to 9. Each turn, reply with one line of thought and one action:
Thought: what the hints say
Action: try DIGIT DIGIT DIGIT
For each dial you are told whether it is right, too low or too high. After eight tries the lock jams."""


class CombinationLock(Environment):
    """A thousand locks, one for each way to set the dials, and none in both `train` and `test`."""

    name = "combination-lock"
    instruction = _INSTRUCTION
    step_limit = _MAX_TRIES

    def __init__(self) -> None:
        self._secret: tuple[int, ...] = (0, 0, 0)
        self._tries = 0

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits; `train` and `test` must be among them."""
        return tuple(_SPLITS)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split, in a fixed order."""
        if split not in _SPLITS:
            raise ConfigError(f"{self.name} has no split {split!r}; it has {', '.join(_SPLITS)}")
        return Instances(self.name, split, _SPLITS[split])

    def reset(self, instance: Instance) -> str:
        """Return the first observation. No two instances of different splits may begin alike."""
        self._secret = _secret(instance)
        self._tries = 0
        return f"Lock number {instance.index} is closed."

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition: observation, reward in [0, 1], terminated,
        truncated, and the success flag.

        An action that makes no sense is answered in words, never with an exception.
        """
        guess = _guess(action)
        if guess is None:
            return Transition("Say: try DIGIT DIGIT DIGIT.", 0.0, False, False, {"success": False, "valid": False})
        self._tries += 1
        success = guess == self._secret
        observation = "The lock opens." if success else ", ".join(map(_hint, guess, self._secret)) + "."
        over = success or self._tries == _MAX_TRIES
        return Transition(observation, float(success), over, False, {"success": success, "valid": True})

    def snapshot(self) -> Any:
        """Return a copy of the state. A world without this method restores states by replay."""
        return self._secret, self._tries

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a state that `snapshot` returned."""
        self._secret, self._tries = snapshot

    def depth(self, instance: Instance) -> int | None:
        """Return how hard an instance is, for the breakdown in reports: here, the number of tries
        that the expert needs.
        """
        return len(self.expert(instance))

    def expert(self, instance: Instance) -> Sequence[str]:
        """Return replies that solve an instance from its start; a world without an expert returns
        None.
        """
        secret = _secret(instance)
        bounds = [(0, 9)] * len(secret)
        guess: tuple[int, ...] = ()
        replies: list[str] = []
        while guess != secret:
            guess = tuple((low + high) // 2 for low, high in bounds)
            thought = ", ".join(f"{low} to {high}" for low, high in bounds)
            replies.append(f"Thought: the dials are within {thought}.\nAction: try {' '.join(map(str, guess))}")
            bounds = [
                _narrow(low, high, dial, right) for (low, high), dial, right in zip(bounds, guess, secret, strict=True)
            ]
        return replies


def _secret(instance: Instance) -> tuple[int, ...]:
    if instance.environment != CombinationLock.name or instance.index not in _SPLITS.get(instance.split, ()):
        raise EnvironmentFault(f"{CombinationLock.name} has no instance {instance.key}")
    # 617 and 1000 have no common factor, so each combination occurs once.
    return tuple(map(int, f"{instance.index * 617 % 1000:03}"))


def _guess(action: str) -> tuple[int, ...] | None:
    word, *digits = action.split() or [""]
    is_valid = word == "try" and len(digits) == 3 and all(len(digit) == 1 and digit in "0123456789" for digit in digits)
    return tuple(map(int, digits)) if is_valid else None


def _hint(dial: int, right: int) -> str:
    return "right" if dial == right else "too low" if dial < right else "too high"


def _narrow(low: int, high: int, dial: int, right: int) -> tuple[int, int]:
    return (dial, dial) if dial == right else (dial + 1, high) if dial < right else (low, dial - 1)
