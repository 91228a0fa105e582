"""Every installed environment keeps the contract, and the checker catches those that do not."""

from dataclasses import replace
from typing import Any

import pytest

from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.environments.crafting import TextCraft
from agentr_core.errors import ConfigError
from agentr_core.types import Instance, Transition

# The others need an address, games or the name of an environment, or take long; they have tests of
# their own.
ELSEWHERE = ("alfworld", "gateway", "gymnasium", "sciworld")
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
        self._game = type(self._game)(self._world)


@pytest.mark.parametrize(("broken", "rule"), [(Leaky, "leakage"), (Generous, "types"), (Forgetful, "snapshot")])
def test_checker_catches(broken: type[TextCraft], rule: str) -> None:
    assert rule in {violation.rule for violation in check(broken)}


def test_unknown_environment_and_option() -> None:
    with pytest.raises(ConfigError, match=r"no environment 'nope'.*textcraft"):
        registry.make("nope", {})
    with pytest.raises(ConfigError, match="no option recipe_dir; it has recipes_dir, expert"):
        registry.make("textcraft", {"recipe_dir": "x"})
