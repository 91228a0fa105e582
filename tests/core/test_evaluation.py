"""An evaluation played on the toy world, and the cuts of the revision test."""

from __future__ import annotations

from typing import Any

import pytest
from toy import Line, Policy, Script, instance

from agentr_core.episodes.rollout import EnvironmentPool, SampleReplies
from agentr_core.episodes.units import UnitError
from agentr_core.errors import ErrorBudgetSpent
from agentr_core.evaluation.episodes import EpisodePlan, EpisodeResult, Player, episode_plans, play_all, revision_plans
from agentr_core.recipes.recipe import ErrorsConfig
from agentr_core.types import Instance, Sampling, StopReason

INSTANCES = [instance(i) for i in range(5)]


async def play(
    plans: tuple[EpisodePlan, ...], sample: SampleReplies, *, max_steps: int = 10, **options: Any
) -> tuple[dict[str, EpisodeResult], list[UnitError]]:
    errors: list[UnitError] = []
    environments = EnvironmentPool(lambda _: Line())
    settings: dict[str, Any] = {
        "errors": ErrorsConfig(budget=0.5),
        "concurrency": 3,
        "on_error": errors.append,
    } | options
    try:
        player = Player(environments=environments, sample=sample, max_steps=max_steps, sampling=Sampling())
        results = await play_all(plans, player, **settings)
    finally:
        environments.close()
    return results, errors


async def test_results_do_not_depend_on_concurrency() -> None:
    plans = episode_plans(INSTANCES, episodes=3, seed=7)
    assert len({plan.key for plan in plans}) == len({plan.seed for plan in plans}) == 15
    first, _ = await play(plans, Policy(), concurrency=1)
    second, _ = await play(plans, Policy(), concurrency=8)
    assert list(first) == [plan.key for plan in plans]
    assert {k: r.trajectory for k, r in first.items()} == {k: r.trajectory for k, r in second.items()}


async def test_what_is_left_of_an_evaluation_is_played_as_in_the_whole() -> None:
    plans = episode_plans(INSTANCES, episodes=1, seed=7)
    results: list[EpisodeResult] = []
    whole, _ = await play(plans, Policy(), on_result=results.append)
    assert len(results) == 5
    model = Policy()
    rest, _ = await play(plans[4:], model, total=5)
    assert {k: r.trajectory for k, r in rest.items()} == {plans[4].key: whole[plans[4].key].trajectory}
    assert len({request.session for request in model.requests}) == 1


async def test_a_result_tells_counts_and_times() -> None:
    plans = episode_plans([instance(0)], episodes=1, seed=7)
    results, _ = await play(plans, Script(["dance"], ["right"]))
    result = results["line/train/0#0"]
    assert (result.depth, result.invalid_actions, len(result.replies)) == (2, 1, 3)
    assert result.trajectory.success
    assert result.environment_seconds is not None
    assert result.environment_seconds > 0


async def test_a_broken_episode_is_an_event_and_no_result() -> None:
    unknown = Instance(environment="line", split="train", index=99)
    plans = episode_plans([*INSTANCES, unknown], episodes=1, seed=7)
    results, errors = await play(plans, Policy())
    assert len(results) == 5
    assert [(e.key, e.kind, e.phase) for e in errors] == [("line/train/99#0", "EnvironmentFault", "reset")]
    with pytest.raises(ErrorBudgetSpent):
        await play(plans, Policy(), errors=ErrorsConfig(budget=0.02))
    # The budget is a part of the whole evaluation, also when only its broken episode is left to
    # play.
    rest, _ = await play(plans[5:], Policy(), total=len(plans), errors=ErrorsConfig(budget=0.2))
    assert rest == {}


async def test_revision_cuts_are_fixed_and_leave_the_episode_open() -> None:
    plans = episode_plans(INSTANCES, episodes=6, seed=7)
    results, _ = await play(plans, Policy())
    base = [(plan.number, results[plan.key].trajectory) for plan in plans]
    cases, rejections = revision_plans(base, cuts=2, seed=3)
    assert (cases, rejections) == revision_plans(base, cuts=2, seed=3)
    assert cases != revision_plans(base, cuts=2, seed=4)[0]
    failures = [t for _, t in base if t.reward == 0]
    short = [t for t in failures if len(t.steps) < 2]
    assert len(rejections) == len(short) > 0
    assert {r.reason for r in rejections} == {"too-short"}
    assert len({r.subject for r in rejections}) == len(rejections), "the store keeps one row a subject and reason"
    assert len(cases) == sum(min(2, len(t.steps) - 1) for t in failures)
    assert len({c.key for c in cases}) == len(cases)
    assert not any(s.terminated or s.disaster for c in cases for s in c.prefix)

    revisions, errors = await play(cases, Script(["right"]), max_steps=50)
    assert errors == []
    for case in cases:
        trajectory = revisions[case.key].trajectory
        assert trajectory.steps[: len(case.prefix)] == case.prefix
        assert trajectory.stop is StopReason.SUCCESS
        assert len(revisions[case.key].replies) == len(trajectory.steps) - len(case.prefix)


async def test_the_cuts_of_one_episode_do_not_depend_on_the_others() -> None:
    plans = episode_plans(INSTANCES, episodes=3, seed=8)
    results, _ = await play(plans, Script(["look"]))
    base = [(plan.number, results[plan.key].trajectory) for plan in plans]
    whole, _ = revision_plans(base, cuts=1, seed=3)
    for index in range(len(base)):
        part, _ = revision_plans([*base[:index], *base[index + 1 :]], cuts=1, seed=3)
        assert part == (*whole[:index], *whole[index + 1 :])
