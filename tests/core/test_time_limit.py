"""Worlds that block: a call that never ends, one that ends in an error of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from toy import Line, Script, instance

from agentr_core.environments.contract import check
from agentr_core.episodes.rollout import EnvironmentPool, roll_out_episode
from agentr_core.episodes.units import UnitError, run_all
from agentr_core.recipes.recipe import ErrorsConfig
from agentr_core.types import Instance, Sampling, Trajectory, Transition


class Stuck(Line):
    """The line, whose first object never gets beyond its first step until `over`."""

    time_limit = 0.5
    made = 0

    def __init__(self, over: threading.Event) -> None:
        super().__init__(blocking=True)
        type(self).made += 1
        self._over = over if self.made == 1 else None

    def step(self, action: str) -> Transition:
        if self._over is not None:
            self._over.wait()
        return super().step(action)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    Stuck.made = 0
    event = threading.Event()
    yield event
    event.set()


async def test_a_call_beyond_its_limit_is_given_up_and_the_episode_tried_with_another_object(
    over: threading.Event,
) -> None:
    pool = EnvironmentPool(lambda name: Stuck(over))
    errors: list[UnitError] = []

    async def play(unit: Instance) -> Trajectory:
        async with pool.lend(unit) as env:
            return await roll_out_episode(unit, env, Script(["right"]), max_steps=9, sampling=Sampling(), seed=1)

    results = await run_all(
        [instance(0)],
        play,
        key=lambda unit: unit.key,
        errors=ErrorsConfig(),
        on_error=errors.append,
        concurrency=1,
        backoff_seconds=0,
    )
    assert [trajectory.success for trajectory in results.values()] == [True]
    assert [(error.kind, error.phase, error.is_final) for error in errors] == [("EnvironmentTimeout", "step", False)]
    assert errors[0].message == "line gave no answer within 0.5 seconds, its time_limit"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "line"), "the process may end"


async def test_an_error_of_the_world_stays_what_it_is() -> None:
    class Late(Line):
        time_limit = 60

        def step(self, action: str) -> Transition:
            raise TimeoutError("the page did not load")

    with pytest.raises(TimeoutError, match="the page did not load"):
        await roll_out_episode(
            instance(), Late(blocking=True), Script(["right"]), max_steps=1, sampling=Sampling(), seed=1
        )


def test_the_doctor_reads_the_limit() -> None:
    class Never(Line):
        time_limit = 0

    assert "time_limit is 0, not a number of seconds above 0" in [violation.detail for violation in check(Never)]
