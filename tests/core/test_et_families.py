"""Whom a round of the flywheel varies and by what, and what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentr_core.methods.et_agent import max_members
from agentr_core.methods.et_agent.evolve import (
    FinishedFamily,
    Member,
    PlannedChild,
    first_children,
    grow_family,
    parents,
    planned_children,
)
from agentr_core.methods.et_agent.operators import HINTS, PROMPTS, prompt_version
from agentr_core.recipes.et_agent import EtAgentConfig, FlywheelConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.types import Instance, StopReason, Trajectory

INSTANCE = Instance(environment="reasoning", split="train", index=0)


def member(name: str, reward: float, cost: int, *, tokens: int = 0) -> Member:
    right = reward == 1
    stop = StopReason.SUCCESS if right else StopReason.FAILURE
    trajectory = Trajectory(instance=INSTANCE, first_observation="?", steps=(), reward=reward, success=right, stop=stop)
    return Member(name=name, id=name, trajectory=trajectory, cost=cost, num_tokens=tokens)


def names(found: Sequence[Member | PlannedChild]) -> list[str]:
    return [item.name for item in found]


async def grown(
    config: FlywheelConfig, rewards: dict[str, float | None], *, tokens: int = 0
) -> tuple[FinishedFamily, list[str]]:
    """Return a family whose children have these rewards by name, 0 by default; None: none is
    made.
    """
    attempts: list[str] = []

    async def make(attempt: PlannedChild) -> Member | None:
        attempts.append(attempt.name)
        reward = rewards.get(attempt.name, 0.0)
        return None if reward is None else member(attempt.name, reward, cost=len(attempt.name), tokens=tokens)

    return await grow_family(config, make, lambda before: 0), attempts


def test_the_best_that_was_not_varied_yet_is_right_then_cheap_then_first() -> None:
    family = [member("a", 0, 1), member("b", 1, 3), member("c", 1, 2), member("d", 1, 2)]
    config = FlywheelConfig()
    assert names(parents(family, set(), config)) == ["c"]
    assert names(parents(family, {"c"}, config)) == ["d"]
    assert names(parents(family, {"b", "c", "d"}, config)) == ["a"]
    assert names(parents(family, {"a", "b", "c", "d"}, config)) == ["c"], "all were: the best of all, once more"
    assert names(parents(family, {"c"}, FlywheelConfig(policy="expand-all"))) == ["c", "d", "b", "a"]
    assert parents([], set(), config) == []


def test_right_and_wrong_parents_have_operators_of_their_own() -> None:
    config = FlywheelConfig(correct=("C2",), incorrect=("I3", "I1"))
    family = [member("r", 1, 0), member("w", 0.5, 0)]
    assert names(planned_children(family, 2, config, max_children=9)) == ["r.2C2", "w.2I3", "w.2I1"]
    assert names(planned_children(family, 2, config, max_children=2)) == ["r.2C2", "w.2I3"]
    assert planned_children(family, 2, config, max_children=-1) == ()


async def test_a_member_that_no_operator_is_for_is_passed_over() -> None:
    config = FlywheelConfig(fresh=2, rounds=1, correct=(), incorrect=("I3",))
    family, _ = await grown(config, {"0": 1.0})
    assert names(family.members) == ["0", "1", "1.1I3"]
    only_right, _ = await grown(config, {"0": 1.0, "1": 1.0})
    assert (len(only_right.members), only_right.ended_by) == (2, "no-child")


async def test_a_round_varies_one_member_or_every_one() -> None:
    best_family, _ = await grown(FlywheelConfig(rounds=2, incorrect=("I3",)), {})
    assert names(best_family.members) == ["0", "0.1I3", "0.1I3.2I3"]
    full_family, _ = await grown(FlywheelConfig(rounds=2, incorrect=("I3",), policy="expand-all"), {})
    assert sorted(names(full_family.members)) == ["0", "0.1I3", "0.1I3.2I3", "0.2I3"]
    paper, _ = await grown(FlywheelConfig(), {})
    assert (len(paper.members), paper.ended_by, paper.rounds) == (10, "rounds", 3)


async def test_a_right_child_is_varied_next() -> None:
    family, _ = await grown(FlywheelConfig(rounds=2), {"0.1I2": 1.0})
    assert names(family.members)[4:] == ["0.1I2.2C0", "0.1I2.2C1", "0.1I2.2C2"]


async def test_without_a_child_it_ends() -> None:
    none: dict[str, float | None] = {"0.1I1": None, "0.1I2": None, "0.1I3": None}
    family, attempts = await grown(FlywheelConfig(), none)
    assert (names(family.members), family.rounds, family.ended_by) == (["0"], 1, "no-child")
    assert attempts == ["0", "0.1I1", "0.1I2", "0.1I3"]


@pytest.mark.parametrize("policy", ["best-one", "expand-all"])
async def test_members_and_tokens_bound_it(policy: Any) -> None:
    config = FlywheelConfig(rounds=9, most_members=5, policy=policy)
    family, attempts = await grown(config, {})
    assert (len(family.members), family.ended_by) == (5, "members")
    assert len(attempts) == 5
    family, attempts = await grown(FlywheelConfig(rounds=9, most_tokens=30, policy=policy), {}, tokens=10)
    assert (family.ended_by, family.rounds) == ("tokens", 1)
    assert len(attempts) == 4


async def test_a_fault_of_one_child_leaves_the_others() -> None:
    children: list[str] = []

    async def make(attempt: PlannedChild) -> Member | None:
        if attempt.name == "0.1I1":
            raise ValueError("no such luck")
        children.append(attempt.name)
        return member(attempt.name, 0, 0)

    with pytest.raises(ValueError, match="no such luck"):
        await grow_family(FlywheelConfig(), make, lambda before: 0)
    assert children == ["0", "0.1I2", "0.1I3"]


def test_the_most_members_are_told_beforehand() -> None:
    def most(**fields: Any) -> int:
        return max_members(Recipe(name="r", et_agent=EtAgentConfig(flywheel=FlywheelConfig(**fields))))

    assert most() == 10
    assert most(policy="expand-all") == 64
    assert most(policy="expand-all", rounds=2) == 16
    assert most(rounds=0, fresh=16) == 16
    assert names(first_children(FlywheelConfig(fresh=2))) == ["0", "1"]


def test_each_domain_has_six_hints_and_each_prompt_a_hash_of_its_words() -> None:
    assert all(len(set(hints)) == 6 for hints in HINTS.values())
    assert not set(HINTS["math"]) & set(HINTS["knowledge"])
    assert len({prompt_version(name).split("@")[1] for name in PROMPTS}) == len(set(PROMPTS.values()))
