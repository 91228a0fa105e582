"""Every installed environment keeps the contract, and the checker catches those that do not."""

import random
from dataclasses import replace
from typing import Any

import pytest

from agentr_core.environment import Repeatability
from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.errors import ConfigError
from agentr_core.types import Instance, Transition

# The others need an address, games or the name of an environment, or take long; they have tests of
# their own.
ELSEWHERE = ("alfworld", "gateway", "gymnasium", "openenv", "sciworld")
COMPLETE = [name for name in registry.names() if name not in ELSEWHERE and not name.startswith("agentgym-")]


@pytest.mark.parametrize("name", COMPLETE)
def test_installed_environment_keeps_the_contract(name: str) -> None:
    assert check(lambda: registry.make(name, {}), instances_per_split=8) == ()


def test_lazy_expert_keeps_the_contract() -> None:
    assert check(lambda: TextCraft(expert="lazy"), instances_per_split=8) == ()


class Leaky(TextCraft):
    def reset(self, instance: Instance) -> str:
        return super().reset(replace(instance, split="train", index=7))


class Generous(TextCraft):
    def step(self, action: str) -> Transition:
        return Transition(*super().step(action)[:1], 2.0, False, False, {})


class Forgetful(TextCraft):
    def restore(self, snapshot: Any) -> None:
        self._game = type(self._game)(self._episode_book)


@pytest.mark.parametrize(("broken", "rule"), [(Leaky, "leakage"), (Generous, "types"), (Forgetful, "snapshot")])
def test_checker_catches(broken: type[TextCraft], rule: str) -> None:
    assert rule in {violation.rule for violation in check(broken)}


class Restless(TextCraft):
    """Lists its commands in another order at each reset, and numbers its answers anew."""

    def __init__(self, numbers: bool = False, repeatability: Repeatability = Repeatability.EXACT) -> None:
        super().__init__()
        self.repeatability = repeatability
        self._numbers = numbers

    def reset(self, instance: Instance) -> str:
        lines = super().reset(instance).split("\n")
        return "\n".join(random.sample(lines, len(lines)))

    def step(self, action: str) -> Transition:
        transition = super().step(action)
        return (
            transition._replace(observation=f"{transition.observation} {random.random()}")
            if self._numbers
            else transition
        )


@pytest.mark.parametrize(
    ("numbers", "promise", "rules"),
    [
        (False, Repeatability.EXACT, {"determinism"}),
        (False, Repeatability.UNORDERED, set()),
        (True, Repeatability.UNORDERED, {"determinism", "snapshot"}),
        (True, Repeatability.NEVER, set()),
    ],
)
def test_a_world_is_compared_as_far_as_it_says_that_it_repeats_itself(
    numbers: bool, promise: Repeatability, rules: set[str]
) -> None:
    assert {violation.rule for violation in check(lambda: Restless(numbers, promise))} == rules


def test_unknown_environment_and_option() -> None:
    with pytest.raises(ConfigError, match=r"no environment 'nope'.*textcraft"):
        registry.make("nope", {})
    with pytest.raises(ConfigError, match=r"no environment 'textcarft' \(did you mean textcraft\?\); installed are"):
        registry.make("textcarft", {})
    with pytest.raises(ConfigError, match=r"no option recipe_dir \(did you mean recipes_dir\?\); it has recipes_dir"):
        registry.make("textcraft", {"recipe_dir": "x"})
