"""Headroom: pass rates against simulation, and the forecast of trees against trees that are really
grown.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from toy import Line, Policy, instance

from agentr_core.episodes.rollout import roll_out_episode
from agentr_core.evaluation.metrics import (
    Headroom,
    InstanceResults,
    Prospect,
    estimate_pass_rates,
    mixed_probability,
    success_rate,
)
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r import TreeSize, foresee
from agentr_core.methods.agent_r.critique import judge_of
from agentr_core.methods.agent_r.pairs import pairs_of_tree
from agentr_core.methods.agent_r.splice import REFLECTIONS, has_reflection
from agentr_core.methods.eto import foresee as foresee_exploration
from agentr_core.methods.faults import parse
from agentr_core.methods.grpo import foresee as foresee_groups
from agentr_core.recipes.recipe import Recipe, replace
from agentr_core.search.grow import grow
from agentr_core.search.tree import leaf_paths
from agentr_core.types import Sampling, Verdict


def instance_results(wins: int, episodes: int = 8, *, key: str = "a", greedy: bool = False) -> InstanceResults:
    return InstanceResults(key=key, origin=key, depth=None, episodes=episodes, wins=wins, greedy=greedy)


def sample(rates: list[float], episodes: int, rng: random.Random) -> list[InstanceResults]:
    return [
        instance_results(
            sum(rng.random() < rate for _ in range(episodes)), episodes, key=str(number), greedy=rate > 0.5
        )
        for number, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.1), (0.3, 0.5), (2.0, 1.0)])
@pytest.mark.parametrize("episodes", [4, 8])
def test_forecasts_of_groups_and_explorations_are_what_is_then_drawn(alpha: float, beta: float, episodes: int) -> None:
    rng = random.Random(7)
    rates = [rng.betavariate(alpha, beta) for _ in range(400)]
    estimate = estimate_pass_rates(sample(rates[:200], episodes, rng))
    groups = estimate.total(400, lambda _, run: mixed_probability(run, 8))
    wins = [sum(rng.random() < rate for _ in range(8)) for rate in rates]

    num_mixed = sum(0 < num_wins < 8 for num_wins in wins)

    assert groups.low < num_mixed < groups.high
    assert groups.mean == pytest.approx(num_mixed, rel=0.2)
    assert estimate.total(400, lambda _, run: 8 * run(1, 0)).mean == pytest.approx(sum(wins), rel=0.1)


def test_pass_rates_that_were_drawn_are_found_again() -> None:
    rng = random.Random(3)
    estimate = estimate_pass_rates(sample([rng.betavariate(0.4, 0.8) for _ in range(3000)], 8, rng))
    assert [estimate.alpha, estimate.beta] == pytest.approx([0.4, 0.8], rel=0.15)


def test_the_chance_of_a_run_is_that_of_an_urn() -> None:
    # With one win and one loss of two and a flat start, the next is won as often as lost, and two
    # in a row with 2/4 * 3/5.
    estimate = estimate_pass_rates([instance_results(1, 2)])
    alpha, beta = estimate.alpha + 1, estimate.beta + 1
    run = estimate.run(estimate.tried[0])
    assert run(0, 0) == pytest.approx(1)
    assert run(1, 0) == pytest.approx(alpha / (alpha + beta)) == pytest.approx(0.5)
    assert run(2, 0) == pytest.approx(0.5 * (alpha + 1) / (alpha + beta + 1))


@pytest.mark.parametrize("wins", [0, 8])
def test_what_always_or_never_wins_has_hardly_a_mixed_group(wins: int) -> None:
    estimate = estimate_pass_rates([instance_results(wins, key=str(number)) for number in range(50)])
    assert 0 < estimate.total(50, lambda _, run: mixed_probability(run, 8)).mean < 1


@pytest.mark.parametrize("all_won", [False, True])
@pytest.mark.parametrize("instances", [6, 600])
def test_outcomes_that_are_all_alike_leave_a_forecast_open(instances: int, all_won: bool) -> None:
    results = [instance_results(2 * all_won, 2, key=str(number)) for number in range(instances)]
    groups = estimate_pass_rates(results).total(1000, lambda _, run: mixed_probability(run, 8), max_per_instance=1)
    # The largest rate of the rarer outcome that so many instances without it leave open, as the
    # table of scores has it.
    rate = success_rate([False] * instances).high
    assert groups.low == 0 < groups.mean < groups.high
    assert groups.high == pytest.approx(1000 * (1 - rate**8 - (1 - rate) ** 8))
    evidence = Headroom(rates=estimate_pass_rates(results), instances=1000, has_expert=False)
    prospect = foresee_groups(parse({"name": "line", "method": "grpo", "model": {"path": "none"}}), evidence)
    assert not prospect.learns
    assert "or none: these episodes do not tell" in prospect.reason


def test_one_instance_that_always_loses_promises_nothing() -> None:
    evidence = Headroom(rates=estimate_pass_rates([instance_results(0, 2)]), instances=1000, has_expert=False)
    prospect = foresee_groups(parse({"name": "line", "method": "grpo", "model": {"path": "none"}}), evidence)
    (groups,) = prospect.forecasts
    assert groups.expected.low == 0 < groups.expected.mean <= groups.expected.high
    assert not prospect.learns


@pytest.mark.parametrize("known", [[], [instance_results(1, 1)]])
def test_one_episode_of_an_instance_tells_nothing(known: list[InstanceResults]) -> None:
    with pytest.raises(ValueError, match="two episodes of each"):
        estimate_pass_rates(known)


def test_group_rl_learns_from_mixed_groups_only() -> None:
    half, none = (
        Headroom(
            rates=estimate_pass_rates(
                [instance_results(wins, key=str(number)) for number, wins in enumerate(win_counts)]
            ),
            instances=100,
            has_expert=False,
        )
        for win_counts in ([4] * 20, [0, 8] * 10)
    )
    recipe = parse({"name": "line", "method": "grpo", "model": {"path": "none"}})
    assert foresee_groups(recipe, half).learns
    assert not foresee_groups(recipe, none).learns
    assert "all win or all lose" in foresee_groups(recipe, none).reason
    short = replace(recipe, grpo=dataclasses.replace(recipe.grpo, steps=2, groups=5))
    (forecast,) = foresee_groups(short, half).forecasts
    assert forecast.expected.mean == pytest.approx(
        10 * half.rates.total(1, lambda _, run: mixed_probability(run, 8)).mean
    )


def test_eto_lives_on_failures_against_an_expert_and_else_on_its_own() -> None:
    recipe = parse({"name": "line", "method": "eto", "model": {"path": "none"}, "eto": {"explore": {"samples": 3}}})
    rng = random.Random(5)
    rates = [rng.random() for _ in range(200)]
    results = sample(rates, 8, rng)
    with_expert = Headroom(rates=estimate_pass_rates(results), instances=200, has_expert=True)
    num_failures = sum(not result.greedy for result in results) + 3 * sum(1 - rate for rate in rates)

    prospect = foresee_exploration(recipe, with_expert)

    numbers = {forecast.name: forecast.expected.mean for forecast in prospect.forecasts}
    assert numbers["expert_pairs"] == pytest.approx(num_failures, rel=0.1)
    assert numbers["successes"] == pytest.approx(800 - num_failures, rel=0.1)
    assert "expert pairs" in prospect.reason
    alone = parse(
        {"name": "line", "method": "eto", "model": {"path": "none"}, "data": {"good_per_tree": 1}},
        ["eto.phases=[rft]", "eto.explore.greedy=false", "eto.explore.samples=3"],
    )
    capped_recipe = parse(
        {"name": "line", "method": "eto", "model": {"path": "none"}, "eto": {"preferences": {"per_instance": 1}}},
        ["eto.explore.greedy=false", "eto.explore.samples=3"],
    )
    pairs = next(
        forecast
        for forecast in foresee_exploration(capped_recipe, with_expert).forecasts
        if forecast.name == "expert_pairs"
    )
    assert pairs.expected.low < sum(1 - rate**3 for rate in rates) < pairs.expected.high
    (successes, *_) = foresee_exploration(alone, with_expert).forecasts
    assert successes.expected.mean == pytest.approx(sum(1 - (1 - rate) ** 3 for rate in rates), rel=0.1)
    without = Headroom(rates=estimate_pass_rates(results), instances=200, has_expert=False)
    assert "own pairs" in foresee_exploration(recipe, without).reason


def test_where_only_good_paths_are_trained_on_nothing_needs_to_be_lost() -> None:
    always = estimate_pass_rates([instance_results(8, key=str(number), greedy=True) for number in range(50)])
    headroom = Headroom(rates=always, instances=50, has_expert=False)

    def prospect_of(use: str) -> Prospect:
        return foresee(parse({"name": "line", "model": {"path": "none"}, "data": {"use": use}}), headroom)

    assert "pairs" in prospect_of("both").reason
    assert prospect_of("good").learns
    assert "good paths to learn from" in prospect_of("good").reason


def test_no_interval_of_a_forecast_goes_beyond_what_can_be_made() -> None:
    few = estimate_pass_rates(
        [instance_results(wins, 2, key=str(number), greedy=wins > 0) for number, wins in enumerate([2, 2, 2, 0])]
    )
    headroom = Headroom(rates=few, instances=100, has_expert=True)
    recipe = parse({"name": "line", "method": "eto", "model": {"path": "none"}, "eto": {"explore": {"samples": 3}}})
    highest = {
        forecast.name: forecast.expected.high
        for function in (foresee_exploration, foresee, foresee_groups)
        for forecast in function(recipe, headroom).forecasts
    }
    assert highest["won_trees"] == 100
    assert highest["successes"] == 400
    assert highest["good_paths"] == 100 * recipe.search.dives * recipe.search.width
    assert highest["mixed_groups"] <= recipe.grpo.steps * recipe.grpo.groups


SIZES = {
    "tiny": TreeSize(
        num_dives=4, give_up_after=2, leaves_per_dive=4, max_pairs=6, max_pairs_per_bad_leaf=1, max_good_paths=3
    ),
    "no end": TreeSize(
        num_dives=3, give_up_after=0, leaves_per_dive=4, max_pairs=6, max_pairs_per_bad_leaf=1, max_good_paths=3
    ),
    "published": TreeSize(
        num_dives=8, give_up_after=0, leaves_per_dive=4, max_pairs=0, max_pairs_per_bad_leaf=0, max_good_paths=0
    ),
    "hasty": TreeSize(
        num_dives=2, give_up_after=5, leaves_per_dive=1, max_pairs=0, max_pairs_per_bad_leaf=2, max_good_paths=1
    ),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_forecasts_of_trees_are_what_simulated_dives_make(size: TreeSize) -> None:
    rng = random.Random(11)
    rates = [rng.betavariate(0.2, 0.3) for _ in range(2000)]
    estimate = estimate_pass_rates(sample(rates, 8, rng))
    dive_results = [dives(size, rate, rng) for rate in rates]

    def forecast_total(value: Callable[[int, int], float]) -> float:
        return estimate.total(2000, lambda _, run: size.expected_value(run, value)).mean

    assert forecast_total(lambda num_wins, num_losses: 1) == pytest.approx(2000)
    assert forecast_total(lambda num_wins, num_losses: num_wins > 0 < num_losses) == pytest.approx(
        sum(num_wins > 0 < num_losses for num_wins, num_losses in dive_results), rel=0.15
    )
    assert forecast_total(size.num_pairs) == pytest.approx(
        sum(size.num_pairs(num_wins, num_losses) for num_wins, num_losses in dive_results), rel=0.15
    )
    assert forecast_total(lambda num_wins, num_losses: size.num_good_paths(num_wins)) == pytest.approx(
        sum(size.num_good_paths(num_wins) for num_wins, _ in dive_results), rel=0.15
    )


def dives(size: TreeSize, rate: float, rng: random.Random) -> tuple[int, int]:
    """Return how many dives of a tree win and lose, drawn one after the other."""
    num_wins = num_losses = 0
    while num_wins + num_losses < size.num_dives and not (0 < size.give_up_after <= num_losses and not num_wins):
        hit = rng.random() < rate
        num_wins, num_losses = num_wins + hit, num_losses + (not hit)
    return num_wins, num_losses


@pytest.mark.slow
async def test_independent_episodes_make_what_was_foreseen() -> None:
    policy = Policy(("right", "look", "left"), thoughts=20)
    options = {"pairs": {"alpha": [0.5], "per_tree": 6, "per_bad_leaf": 1}, "model": {"path": "none"}}
    recipe = parse({"name": "line", "search": {"method": "rollouts", "dives": 2, "width": 4, "depth": 7}, **options})
    results = [instance_results(await wins(policy, at, 32), 32, key=str(at)) for at in range(5)]
    headroom = Headroom(rates=estimate_pass_rates(results), instances=5, has_expert=True)

    forecast_by_name = {forecast.name: forecast.expected.mean for forecast in foresee(recipe, headroom).forecasts}

    for name, number in (await search_yields(recipe, policy, trees=12)).items():
        assert number / 1.5 <= forecast_by_name[name] <= number * 1.5, (name, forecast_by_name, number)


async def wins(policy: Policy, number: int, episodes: int) -> int:
    """Return how many episodes of an instance a policy wins."""
    seeds = [derive_seed(number, seed) for seed in range(episodes)]
    trajectories = [
        await roll_out_episode(instance(number), Line(), policy, max_steps=8, sampling=Sampling(), seed=seed)
        for seed in seeds
    ]
    return sum(trajectory.success for trajectory in trajectories)


async def search_yields(recipe: Recipe, policy: Policy, *, trees: int) -> dict[str, float]:
    """Return what trees of the five instances make, as a mean over `trees` of each."""
    mixed_trees = pairs = 0
    for seed in range(trees):
        for number in range(5):
            tree = await grow(instance(number), Line(), policy, recipe.search, seed=derive_seed(seed, number, "tree"))
            paths = leaf_paths(tree, f"{number}-{seed}")
            good = [path for path in paths if path.trajectory.reward >= 0.5]
            mixed_trees += 0 < len(good) < len(paths)
            pairs += len(pairs_of_tree(f"{number}-{seed}", paths, recipe.pairs, alpha=0.5, seed=0)[0])
    return {"mixed_trees": mixed_trees / trees, "pairs": pairs / trees}


def test_a_judge_is_measured_against_the_oracle_where_there_is_one() -> None:
    good, bad, unsure, unread = Verdict.GOOD, Verdict.BAD, Verdict.UNCERTAIN, Verdict.UNPARSABLE
    verdicts = {"a": [good, bad, bad], "b": [unread, unsure], "c": [bad]}
    judge = judge_of("m", verdicts, {"a": [good, bad, good], "b": [bad, good]}, votes=1)
    assert (judge.episodes, judge.steps) == (3, 6)
    assert judge.read.mean == pytest.approx(5 / 6)
    assert (judge.right.mean, judge.right.n) == (2 / 5, 5)
    assert (judge.bad.mean, judge.bad.n) == (2 / 5, 5)
    assert (judge.bad_is_right.mean, judge.bad_is_right.n) == (1 / 2, 2)
    assert (judge.bad_is_seen.mean, judge.bad_is_seen.n) == (1 / 2, 2)
    # In b the judge names no error and the oracle the first step; nobody knows the truth about c.
    assert (judge.first_error.mean, judge.first_error.n) == (1 / 2, 2)
    assert judge_of("m", verdicts, {}, votes=1).right.n == 0


def test_a_voiced_reflection_is_heard_in_any_case() -> None:
    assert has_reflection(f"Thought: {REFLECTIONS[3].upper()}\nAction: wait")
    assert not has_reflection("Thought: I need planks.\nAction: get 2 oak log")
