"""Branches of a group's episodes: their chances, where they begin, and how a group becomes full."""

from __future__ import annotations

import math

import pytest

from agentr_core.errors import DataFault
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.grpo.rollouts import GroupInProgress, Member, branch_chance, forks, reply_entropy
from agentr_core.recipes.grpo import BranchingConfig, GrpoConfig
from agentr_core.types import Instance, Step, StopReason, Trajectory

ROOM = Instance(environment="room", split="train", index=0)
ALWAYS = BranchingConfig(initial_rollouts=2, branch_probability=1.0)
VOCABULARY = 100


def step(name: str, surprise: float = 1.0, observation: str = "seen") -> Step:
    """Return a step of four tokens, each with a log-probability of `-surprise`."""
    ids, logprobs = (1, 2, 3, 4), (-surprise,) * 4
    return Step(reply=name, action=name, observation=observation, reward=0.0, token_ids=ids, logprobs=logprobs)


def trajectory(*steps: Step) -> Trajectory:
    return Trajectory(
        instance=ROOM, first_observation="", steps=steps, reward=0.0, success=False, stop=StopReason.STEP_LIMIT
    )


def member(number: int, *steps: Step, prefix: int = 0) -> Member:
    plan = EpisodePlan(instance=ROOM, number=number, seed=number, prefix=steps[:prefix])
    return Member(trajectory_id=f"t{number}", plan=plan, trajectory=trajectory(*steps))


@pytest.mark.parametrize(("rise", "expected"), [(0, 0.5), (1, 0.7), (3, 1.0), (-3, 0.0), (2.5, 1.0), (-2.5, 0.0)])
def test_the_chances_of_the_method(rise: float, expected: float) -> None:
    assert branch_chance(rise, BranchingConfig()) == pytest.approx(expected, abs=1e-12)


def test_entropy_is_summed_over_the_first_tokens_in_units_of_a_uniform_draw() -> None:
    uniform_step = step("a", math.log(VOCABULARY))
    assert reply_entropy(uniform_step, BranchingConfig(), VOCABULARY) == pytest.approx(4)
    assert reply_entropy(uniform_step, BranchingConfig(entropy_tokens=3), VOCABULARY) == pytest.approx(3)
    with pytest.raises(DataFault, match="no log-probabilities"):
        reply_entropy(Step(reply="a", action="a", observation="", reward=0.0), BranchingConfig(), VOCABULARY)


def test_branches_begin_after_observations_that_an_episode_went_on_from() -> None:
    root = member(0, step("a"), step("b", observation=""), step("c"), step("d"))
    assert [fork.position for fork in forks([root], ALWAYS, VOCABULARY, max_forks=9)] == [1, 3]
    branch = member(1, step("a"), step("x"), step("y"), prefix=1)
    assert [fork.position for fork in forks([branch], ALWAYS, VOCABULARY, max_forks=9)] == [2], (
        "not in what it was given"
    )
    all_forks = forks([root, branch], ALWAYS, VOCABULARY, max_forks=2)
    assert [(fork.parent.trajectory_id, fork.position) for fork in all_forks] == [("t0", 1), ("t1", 2)], (
        "the earliest first"
    )
    assert all_forks[1].prefix == branch.trajectory.steps[:2]
    assert forks([root], ALWAYS, VOCABULARY, max_forks=0) == []


def test_a_branch_is_held_against_the_first_reply_of_its_parent() -> None:
    unsure, sure = math.log(VOCABULARY), 0.01
    config = BranchingConfig(branch_probability=0.5, entropy_weight=1.0)
    rises = [member(n, step("a", sure), step("b", unsure), step("c"), prefix=1) for n in range(20)]
    assert len(forks(rises, config, VOCABULARY, max_forks=99)) == 20, "a rise of 4: always"
    drops = [member(n, step("a", unsure), step("b", sure), step("c"), prefix=1) for n in range(20)]
    assert forks(drops, config, VOCABULARY, max_forks=99) == [], "it fell as much: never"
    level = [member(n, step("a"), step("b"), step("c"), prefix=1) for n in range(400)]
    assert 160 < len(forks(level, config, VOCABULARY, max_forks=999)) < 240


def test_after_given_steps_a_branch_is_held_against_the_first_reply_of_its_own() -> None:
    unsure, sure = math.log(VOCABULARY), 0.01
    config = BranchingConfig(branch_probability=0.5, entropy_weight=1.0)
    experts = Step(reply="e", action="e", observation="seen", reward=0.0)
    rises = [member(n, experts, step("a", sure), step("b", unsure), step("c"), prefix=2) for n in range(20)]
    assert len(forks(rises, config, VOCABULARY, max_forks=99, num_given=1)) == 20
    drops = [member(n, experts, step("a", unsure), step("b", sure), step("c"), prefix=2) for n in range(20)]
    assert forks(drops, config, VOCABULARY, max_forks=99, num_given=1) == []


def family() -> GroupInProgress:
    return GroupInProgress(instance=ROOM, first_number=8, seed_of=lambda number: derive_seed("s", number))


def play_plans(plans: list[EpisodePlan], steps: int = 3) -> dict[str, tuple[EpisodePlan, Trajectory]]:
    """Play each plan for some steps more."""
    return {
        f"t{plan.number}": (plan, trajectory(*plan.prefix, *(step(f"{plan.number}.{n}") for n in range(steps))))
        for plan in plans
    }


def test_without_branching_a_group_is_one_wave() -> None:
    group, config = family(), GrpoConfig(num_generations=4)
    plans = group.next_plans(config, VOCABULARY)
    assert [plan.number for plan in plans] == [8, 9, 10, 11]
    assert group.add_episodes(play_plans(plans)) == []
    assert group.next_plans(config, VOCABULARY) == []
    assert list(group.episodes) == ["t8", "t9", "t10", "t11"]


def test_branches_fill_a_group_and_tell_what_they_were_made_of() -> None:
    group, config = family(), GrpoConfig(num_generations=5, branching=ALWAYS, max_steps=9)
    first_plans = group.next_plans(config, VOCABULARY)
    assert [plan.number for plan in first_plans] == [8, 9]
    group.add_episodes(play_plans(first_plans))
    second_plans = group.next_plans(config, VOCABULARY)
    assert [(plan.number, len(plan.prefix), plan.max_steps) for plan in second_plans] == [
        (10, 1, 8),
        (11, 1, 8),
        (12, 2, 7),
    ]
    derivations = group.add_episodes(play_plans(second_plans))
    assert [
        (derivation.child, derivation.parent, derivation.operator, derivation.position) for derivation in derivations
    ] == [
        ("t10", "t8", "branch", 1),
        ("t11", "t9", "branch", 1),
        ("t12", "t8", "branch", 2),
    ]
    assert group.next_plans(config, VOCABULARY) == []
    assert len(group.episodes) == 5


def test_where_nothing_branches_fresh_episodes_come_at_once() -> None:
    never = BranchingConfig(initial_rollouts=2, branch_probability=0.0, entropy_weight=0.0)
    group, config = family(), GrpoConfig(num_generations=6, branching=never)
    group.add_episodes(play_plans(group.next_plans(config, VOCABULARY)))
    fresh = group.next_plans(config, VOCABULARY)
    assert [(plan.number, plan.prefix) for plan in fresh] == [(10, ()), (11, ()), (12, ()), (13, ())]
    group.add_episodes({})
    assert group.next_plans(config, VOCABULARY) == [], "episodes that failed for good are not asked for again"
