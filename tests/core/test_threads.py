"""Work in a thread lets go when its caller is cancelled, after the instance it is at."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from toy import Line, instance

from agentr_core.runtime.instances import check_no_overlap
from agentr_core.system import raise_if_cancelled, run_in_thread
from agentr_core.types import Instance


class Slow(Line):
    """Takes its time for a reset, and says when it is at one."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = threading.Event()

    def reset(self, instance: Instance) -> str:
        assert not self.closed
        self.busy.set()
        time.sleep(0.05)
        return super().reset(instance)


async def test_a_cancelled_stage_ends_at_its_next_instance_and_not_before() -> None:
    env = Slow()

    async def stage() -> None:
        try:
            await run_in_thread(check_no_overlap, env, (), (instance(0),) * 1000)
        finally:
            env.close()

    running = asyncio.create_task(stage())
    await asyncio.to_thread(env.busy.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    resets = env.resets
    assert 1 <= resets < 1000
    await asyncio.sleep(0.1)
    assert env.resets == resets


async def test_results_and_faults_come_back() -> None:
    def divide(one: int, *, by: int) -> float:
        raise_if_cancelled()
        return one / by

    assert await run_in_thread(divide, 6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(divide, 6, by=0)
    raise_if_cancelled()
