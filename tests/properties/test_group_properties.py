"""Advantages, weights and draws of groups, whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.methods.et_agent.reward import EfficiencyReward
from agentr_core.methods.grpo.rollouts import GroupInProgress, RewardTally, choose_instances, contrast_probability
from agentr_core.recipes.grpo import BranchingConfig, GrpoConfig
from agentr_core.training.group.advantages import group_advantages, sibling_advantages
from agentr_core.training.group.policy import token_weights
from agentr_core.types import Instance, Step, StopReason, Trajectory

REWARDS = st.lists(st.floats(0, 1), min_size=2, max_size=16)
SCALES = st.sampled_from(["group", "none"])
EPISODES = st.lists(st.tuples(st.text("abc", min_size=1, max_size=5), st.floats(0, 1)), min_size=2, max_size=16)
INSTANCES = [Instance(environment="door", split="train", index=index) for index in range(12)]


@given(REWARDS, SCALES)
def test_advantages_sum_to_nothing_and_keep_the_order_of_rewards(rewards: list[float], scale: str) -> None:
    advantages = group_advantages(rewards, scale=scale)  # type: ignore[arg-type]
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    by_reward = [worth for _, worth in sorted(zip(rewards, advantages, strict=True))]
    assert by_reward == sorted(by_reward)


def episode(actions: str, reward: float) -> Trajectory:
    steps = tuple(Step(reply=action, action=action, observation="", reward=0.0) for action in actions)
    return Trajectory(
        instance=INSTANCES[0],
        first_observation="",
        steps=steps,
        reward=reward,
        success=False,
        stop=StopReason.STEP_LIMIT,
    )


def advantages_of(played: list[tuple[str, float]], scale: str = "none") -> list[list[float]]:
    episodes = [episode(actions, reward) for actions, reward in played]
    return sibling_advantages(episodes, [e.reward for e in episodes], scale=scale)  # type: ignore[arg-type]


@given(EPISODES)
def test_siblings_share_an_advantage_by_action_and_balance_each_other(played: list[tuple[str, float]]) -> None:
    # An end is an action, too, so that all leave each state.
    played = [(f"{actions}.", reward) for actions, reward in played]
    advantages = advantages_of(played)
    states: dict[str, dict[str, list[float]]] = {}
    for (actions, _), worth in zip(played, advantages, strict=True):
        for place, value in enumerate(worth):
            states.setdefault(actions[:place], {}).setdefault(actions[place], []).append(value)
    for by_action in states.values():
        assert all(value == pytest.approx(values[0]) for values in by_action.values() for value in values)
        if len(by_action) > 1:
            assert sum(sum(values) for values in by_action.values()) == pytest.approx(0, abs=1e-9)


@given(EPISODES)
def test_the_choices_of_an_episode_sum_up_to_what_its_end_is_worth(played: list[tuple[str, float]]) -> None:
    ends = {f"{actions}.": reward for actions, reward in played}
    played = [(f"{actions}.", ends[f"{actions}."]) for actions, _ in played]
    mean = sum(reward for _, reward in played) / len(played)
    for (actions, reward), worth in zip(played, advantages_of(played), strict=True):
        chosen = [
            place
            for place in range(len(actions))
            if len({path[place] for path, _ in played if path.startswith(actions[:place])}) > 1
        ]
        assert sum(worth[place] for place in chosen) == pytest.approx(reward - mean, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), SCALES)
def test_where_all_part_at_once_a_step_has_the_advantage_of_its_episode(rewards: list[float], scale: str) -> None:
    episodes = [(f"{chr(97 + number)}xy", reward) for number, reward in enumerate(rewards)]
    expected = group_advantages(rewards, scale=scale)  # type: ignore[arg-type]
    assert advantages_of(episodes, scale) == [pytest.approx([value] * 3) for value in expected]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.sampled_from(["dapo", "grpo"]))
def test_weights_of_all_tokens_sum_to_one(lengths: list[int], loss_type: str) -> None:
    weights = token_weights(lengths, loss_type=loss_type, max_tokens=1)  # type: ignore[arg-type]
    assert sum(n * weight for n, weight in zip(lengths, weights, strict=True)) == pytest.approx(1)


@given(st.floats(0, 1), st.integers(2, 32))
def test_the_chance_of_contrast_is_one_and_the_same_for_wins_and_losses(rate: float, size: int) -> None:
    chance = contrast_probability(rate, size)
    assert 0 <= chance <= contrast_probability(0.5, size) < 1
    assert chance == pytest.approx(contrast_probability(1 - rate, size))


TALLIES = st.builds(RewardTally, won=st.floats(0, 1e4), missed=st.floats(0, 1e4))


@given(
    st.integers(1, 30),
    st.integers(0, 2**60),
    st.sets(st.sampled_from([i.key for i in INSTANCES])),
    st.none() | st.dictionaries(st.sampled_from([i.key for i in INSTANCES]), TALLIES),
)
def test_a_draw_has_as_many_as_were_asked_for_and_none_twice_before_all_came(
    count: int, seed: int, avoid: set[str], known: dict[str, RewardTally] | None
) -> None:
    instances = choose_instances(INSTANCES, known, count=count, group_size=8, seed=seed, avoided_keys=avoid)
    assert len(instances) == count
    assert len(set(instances)) == min(count, len(INSTANCES))


@given(
    st.integers(2, 12), st.integers(1, 11), st.floats(0, 1), st.floats(0, 1), st.lists(st.integers(0, 5), min_size=12)
)
def test_a_group_becomes_full_wave_by_wave_whatever_branches(
    size: int, initial: int, probability: float, weight: float, lengths: list[int]
) -> None:
    branching = BranchingConfig(
        initial_rollouts=min(initial, size - 1), branch_probability=probability, entropy_weight=weight
    )
    config = GrpoConfig(num_generations=size, branching=branching, max_steps=6)
    family, plans = GroupInProgress(instance=INSTANCES[0], first_number=0, seed_of=lambda number: number), []
    while wave := family.next_plans(config, 100):
        plans += wave
        derivations = family.add_episodes(
            {f"t{plan.number}": (plan, gone_on(plan, lengths[plan.number])) for plan in wave}
        )
        assert {derivation.child for derivation in derivations} == {f"t{plan.number}" for plan in wave if plan.prefix}
        for derivation in derivations:
            prefix = family.episodes[derivation.child].steps[: derivation.position]
            assert prefix == family.episodes[derivation.parent].steps[: derivation.position]
    assert [plan.number for plan in plans] == list(range(size))
    assert all(plan.max_steps is None or plan.max_steps > 0 for plan in plans)


def gone_on(plan: EpisodePlan, length: int) -> Trajectory:
    """Return an episode that goes on from its plan's prefix, within six steps."""
    more = range(min(length, 6 - len(plan.prefix)))
    steps = [
        Step(reply="r", action=f"{plan.number}.{n}", observation="seen", reward=0.0, token_ids=(1,), logprobs=(-1.0,))
        for n in more
    ]
    return replace(episode("", 0.0), steps=(*plan.prefix, *steps))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), min_size=1, max_size=8), st.randoms())
def test_the_efficiency_reward_goes_by_what_episodes_are_and_not_by_their_order(
    played: list[tuple[float, int]], rng: Random
) -> None:
    reward = EfficiencyReward(sigma_calls=0.3, sigma_length=0.2, counts="steps")
    group = [make_episode(*args) for args in played]
    rewards = reward.rewards(group, step=1, steps=1)
    order = rng.sample(range(len(group)), len(group))
    assert reward.rewards([group[place] for place in order], step=1, steps=1) == pytest.approx(
        [rewards[p] for p in order]
    )
    for args, worth in zip(played, rewards, strict=True):
        assert 0 <= worth <= 4 * args[0], "a wrong answer gets nothing, and no cost more than the amplitude squared"


def make_episode(reward: float, steps: int) -> Trajectory:
    return replace(gone_on(EpisodePlan(instance=INSTANCES[0], seed=0), steps), reward=reward)
