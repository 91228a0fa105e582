"""Units under an error budget: retries, phases, limits, and lending environments."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from toy import Line, instance

from agentr_core.episodes.rollout import EnvironmentPool
from agentr_core.episodes.units import UnitError, phase, run_all
from agentr_core.errors import ConfigError, EnvironmentFault, EnvironmentUnavailable, ErrorBudgetSpent
from agentr_core.recipes.recipe import ErrorsConfig

LAX = ErrorsConfig(budget=0.5, retries=2)


async def test_results_keep_the_order_of_the_units() -> None:
    async def worker(unit: int) -> int:
        await asyncio.sleep((5 - unit) / 1000)
        return unit * unit

    keys: list[str] = []
    results = await run_all(
        range(5),
        worker,
        key=str,
        errors=LAX,
        on_error=lambda e: None,
        concurrency=5,
        on_result=lambda k, r: keys.append(k),
    )
    assert list(results.items()) == [(str(i), i * i) for i in range(5)]
    assert sorted(keys) == list("01234")
    assert keys != list("01234")


async def test_concurrency_is_bounded() -> None:
    running = 0
    most = 0

    async def worker(unit: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    await run_all(range(20), worker, key=str, errors=LAX, on_error=lambda e: None, concurrency=3)
    assert most == 3


async def test_only_transient_errors_are_tried_again() -> None:
    tries: Counter[str] = Counter()
    errors: list[UnitError] = []

    async def worker(unit: str) -> str:
        tries[unit] += 1
        with phase("step"), phase("inner step"):
            if unit == "heals" and tries[unit] < 3:
                raise EnvironmentUnavailable("the server is starting")
            if unit == "dead":
                raise EnvironmentUnavailable("no server")
            if unit == "broken":
                raise ZeroDivisionError("a bug")
        return unit

    results = await run_all(
        ["fine", "heals", "dead", "broken"],
        worker,
        key=str,
        errors=LAX,
        on_error=errors.append,
        concurrency=2,
        backoff_seconds=0.001,
    )
    assert results == {"fine": "fine", "heals": "heals"}
    assert tries == {"fine": 1, "heals": 3, "dead": 3, "broken": 1}
    assert Counter((e.key, e.kind, e.is_final) for e in errors) == {
        ("heals", "EnvironmentUnavailable", False): 2,
        ("dead", "EnvironmentUnavailable", False): 2,
        ("dead", "EnvironmentUnavailable", True): 1,
        ("broken", "ZeroDivisionError", True): 1,
    }
    assert {e.phase for e in errors} == {"inner step"}
    assert all("raise " in e.traceback for e in errors)


@pytest.mark.parametrize(
    ("failing", "total", "budget", "spent"),
    [(1, None, 0.0, True), (2, None, 0.2, False), (3, None, 0.2, True), (3, 20, 0.2, False), (29, 100, 0.29, False)],
)
async def test_the_budget_is_a_share_of_the_stage(failing: int, total: int | None, budget: float, spent: bool) -> None:
    async def worker(unit: int) -> int:
        if unit < failing:
            raise EnvironmentFault(f"unit {unit} broke")
        return unit

    units = range(max(10, failing))
    job = run_all(
        units,
        worker,
        key=str,
        errors=ErrorsConfig(budget=budget),
        on_error=lambda e: None,
        concurrency=2,
        num_units=total,
    )
    if spent:
        with pytest.raises(ErrorBudgetSpent, match=r"EnvironmentFault: unit \d broke; .*errors.budget"):
            await job
    else:
        assert len(await job) == len(units) - failing


async def test_a_users_mistake_stops_everything_at_once() -> None:
    units = []

    async def worker(unit: int) -> None:
        if unit == 1:
            raise ConfigError("no such option")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            units.append(unit)
            raise

    with pytest.raises(ConfigError, match="no such option"):
        await run_all([0, 1, 2], worker, key=str, errors=LAX, on_error=lambda e: None, concurrency=3)
    assert sorted(units) in ([0], [0, 2])  # unit 2 may not have begun


async def test_keys_must_differ() -> None:
    async def worker(unit: int) -> None: ...

    with pytest.raises(ValueError, match="key '1'"):
        await run_all([1, 1], worker, key=str, errors=LAX, on_error=lambda e: None, concurrency=1)


async def test_environments_are_lent_again_unless_something_broke() -> None:
    envs: list[Line] = []
    worlds: list[str] = []

    def make(world: str) -> Line:
        worlds.append(world)
        envs.append(Line())
        return envs[-1]

    environments = EnvironmentPool(make)
    task = instance(0)
    async with environments.lend(task) as first, environments.lend(task) as second:
        assert first is not second
    async with environments.lend(task) as third:
        assert third in envs
    assert worlds == [task.environment] * 2
    async with environments.lend(replace(task, environment="elsewhere")) as fourth:
        assert fourth not in (first, second), "an environment plays the instances of its own world"
    assert worlds[2:] == ["elsewhere"]
    with pytest.raises(EnvironmentFault):
        async with environments.lend(task) as env:
            env.reset(instance(99))
    assert [env.closed for env in envs].count(True) == 1
    environments.close()
    environments.close()
    assert all(env.closed for env in envs)
