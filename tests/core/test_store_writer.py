"""The buffering writer: what it stores when, and what it does when the store or the program
fails.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from agentr_core.errors import StoreBusy, StoreError
from agentr_core.store.database import Store, Writer
from agentr_core.store.tables import Rows

PATIENCE = 60.0
"""Seconds to wait for what must come, however busy the machine is."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "agentr.duckdb", wait_s=PATIENCE)
    store.write({})
    return store


def unit(name: str) -> Rows:
    return {
        "rl_validation": [{"trajectory_id": name, "step": 1, "iteration_id": name}],
        "metric": [{"scope": "run", "scope_id": name, "name": "n", "value": 1.0, "low": None, "high": None, "n": None}],
    }


def bursts(store: Store) -> int:
    """Return how many transactions stored texts: rows of one transaction share their time."""
    return int(store.query("select count(distinct created_at) as n from rl_validation")["n"][0])


async def test_flush_stores_what_was_added_in_one_burst(store: Store) -> None:
    async with Writer(store, interval_s=60) as writer:
        for number in range(30):
            writer.add(unit(str(number)))
        assert await asyncio.to_thread(store.missing, "rl_validation", ["0"]) == ["0"]
        await writer.flush()
        assert await asyncio.to_thread(store.missing, "rl_validation", [str(n) for n in range(30)]) == []
        assert writer.seconds > 0
    assert bursts(store) == 1


async def test_units_are_stored_in_the_background(store: Store) -> None:
    async with Writer(store, interval_s=0.01) as writer:
        writer.add(unit("a"))
        async with asyncio.timeout(PATIENCE):
            while await asyncio.to_thread(store.missing, "rl_validation", ["a"]):
                await asyncio.sleep(0.01)


async def test_many_rows_do_not_wait_for_the_interval(store: Store) -> None:
    async with Writer(store, interval_s=60, max_rows=4) as writer:
        writer.add(unit("a"))
        writer.add(unit("b"))
        async with asyncio.timeout(PATIENCE):
            while await asyncio.to_thread(store.missing, "rl_validation", ["a", "b"]):
                await asyncio.sleep(0.01)


async def test_leaving_stores_the_rest(store: Store) -> None:
    async with Writer(store, interval_s=60) as writer:
        writer.add(unit("a"))
    assert store.missing("rl_validation", ["a"]) == []
    with pytest.raises(RuntimeError, match="within its context"):
        writer.add(unit("b"))


async def test_an_error_of_the_program_loses_nothing(store: Store) -> None:
    async def work() -> None:
        async with Writer(store, interval_s=60) as writer:
            writer.add(unit("a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert store.missing("rl_validation", ["a"]) == []


async def test_cancelling_the_program_loses_nothing(store: Store) -> None:
    is_added = asyncio.Event()

    async def work() -> None:
        async with Writer(store, interval_s=60) as writer:
            writer.add(unit("a"))
            is_added.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await is_added.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.missing("rl_validation", ["a"]) == []


async def test_cancelling_a_flush_loses_nothing(store: Store) -> None:
    async with Writer(store, interval_s=60) as writer:
        writer.add(unit("a"))
        flush = asyncio.create_task(writer.flush())
        await asyncio.sleep(0)
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
        writer.add(unit("b"))
    assert store.missing("rl_validation", ["a", "b"]) == []


async def test_the_event_loop_goes_on_while_the_store_is_held(store: Store) -> None:
    release = threading.Event()
    is_held = threading.Event()

    def hold() -> None:
        with store.transaction():
            is_held.set()
            release.wait(PATIENCE)

    holder = asyncio.create_task(asyncio.to_thread(hold))
    await asyncio.to_thread(is_held.wait)
    async with Writer(store, interval_s=60) as writer:
        writer.add(unit("a"))
        flush = asyncio.create_task(writer.flush())
        for _ in range(20):
            await asyncio.sleep(0.005)
        # Were the loop held up, it would be until the holder has lost its patience, and the flush
        # be done.
        assert not flush.done()
        assert not holder.done()
        release.set()
        await flush
        await holder
    assert store.missing("rl_validation", ["a"]) == []


async def test_a_busy_store_is_tried_again_with_nothing_lost(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    hasty = Store(store.path, wait_s=0.05)
    release = threading.Event()
    is_held = threading.Event()

    def hold() -> None:
        with store.transaction():
            is_held.set()
            release.wait(PATIENCE)

    holder = asyncio.create_task(asyncio.to_thread(hold))
    await asyncio.to_thread(is_held.wait)
    async with Writer(hasty, interval_s=0.01) as writer:
        writer.add(unit("a"))
        with pytest.raises(StoreBusy):
            await writer.flush()
        async with asyncio.timeout(PATIENCE):
            while "rows wait for the store" not in caplog.text:
                await asyncio.sleep(0.01)
        writer.add(unit("b"))
        release.set()
        await holder
    assert store.missing("rl_validation", ["a", "b"]) == []


class GateStore(Store):
    """A store whose writes wait until `gate` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()

    def write(self, rows: Rows) -> None:
        assert self.gate.wait(600)
        super().write(rows)


@pytest.mark.slow
async def test_a_slow_store_holds_back_who_makes_rows(store: Store) -> None:
    slow = GateStore(store.path)
    num_units = 0

    async def make() -> None:
        nonlocal num_units
        for number in range(100):
            await writer.room()
            writer.add(unit(str(number)))
            num_units += 1

    async with Writer(slow, max_rows=10) as writer:
        making = asyncio.create_task(make())
        # Three bursts of ten rows, at two rows a unit.
        async with asyncio.timeout(600):
            while num_units < 15:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert num_units == 15
        slow.gate.set()
        async with asyncio.timeout(600):
            await making
    assert store.missing("rl_validation", [str(number) for number in range(100)]) == []


async def test_who_waits_for_room_hears_that_the_store_failed(store: Store) -> None:
    class Broken(GateStore):
        def write(self, rows: Rows) -> None:
            assert self.gate.wait(600)
            raise StoreError("the disk is gone")

    broken = Broken(store.path)

    async def work() -> None:
        async with Writer(broken, max_rows=2) as writer:
            for number in range(3):
                writer.add(unit(str(number)))
            waiting = asyncio.create_task(writer.room())
            for _ in range(100):
                await asyncio.sleep(0)
            assert not waiting.done()
            broken.gate.set()
            async with asyncio.timeout(600):
                await waiting

    with pytest.raises(StoreError, match="the disk is gone"):
        await work()


async def test_a_store_that_fails_for_good_stops_the_program(store: Store) -> None:
    with store.transaction() as con:
        con.execute("insert into schema_version (version, name) values (9999, 'future')")

    async def work() -> None:
        async with Writer(store, interval_s=0.01) as writer:
            async with asyncio.timeout(PATIENCE):
                while True:
                    writer.add(unit("a"))
                    await asyncio.sleep(0.01)

    with pytest.raises(StoreError, match="schema version 9999") as error:
        await work()
    assert "rows could not be stored" in error.value.__notes__[0]
