"""A store that is kept open between bursts: others get in at once, and what is written is there."""

from __future__ import annotations

import fcntl
import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import gallery
import pytest

from agentr_core.errors import ConfigError
from agentr_core.store import connection, keep_alive, lock
from agentr_core.store.database import Store

COUNT = "select count(*) from trajectory"
READER = """
import sys, time
from pathlib import Path
from agentr_core.store.database import Store
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
((number,),) = store.rows("select count(*) from trajectory")
print(number, time.monotonic() - began, flush=True)
"""


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that opened a file."""
    statements: list[str] = []
    attach = connection._attach

    def record_attach(con: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)
        attach(con, statement, *rest)

    monkeypatch.setattr(connection, "_attach", record_attach)
    return statements


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store.duckdb")
    store.write(gallery.begun("first", "A door."))
    return store


def is_open(store: Store) -> bool:
    """Whether a process has the file open: DuckDB refuses a second instance in a process, too."""
    try:
        duckdb.connect(str(store.path), read_only=True).close()
    except duckdb.Error:
        return True
    return False


def wait_until_closed(store: Store) -> None:
    deadline = time.monotonic() + 20
    while is_open(store):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_bursts_share_one_opening(store: Store, openings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "_KEEP_OPEN_S", 60.0)
    with store.keep_open():
        for number in range(5):
            store.write(gallery.begun(f"more{number}", "A door."))
            assert store.count(COUNT) == number + 2
        with store.keep_open():
            assert store.count(COUNT) == 6
        assert is_open(store)
    assert len(openings) == 1
    assert not is_open(store)
    store.count(COUNT)
    assert len(openings) == 2


def test_a_reader_s_file_is_opened_anew_for_a_writer(
    store: Store, openings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "_KEEP_OPEN_S", 60.0)
    with store.keep_open():
        assert [store.count(COUNT) for _ in range(3)] == [1, 1, 1]
        store.write(gallery.begun("second", "A door."))
        assert store.count(COUNT) == 2
    assert ["read_only" in statement for statement in openings] == [True, False]


def test_a_user_s_query_never_gets_a_file_that_can_be_written(store: Store, openings: list[str]) -> None:
    with store.keep_open():
        store.write(gallery.begun("second", "A door."))
        assert store.answer(COUNT)[0][0].as_py() == 2
        assert "read_only" in openings[-1]
        with pytest.raises(ConfigError):
            store.answer("delete from trajectory")
        assert store.count(COUNT) == 2


def test_it_closes_after_a_while_and_when_a_burst_fails(store: Store) -> None:
    with store.keep_open():
        store.count(COUNT)
        wait_until_closed(store)
        with pytest.raises(duckdb.CatalogException), store.transaction() as con:
            con.execute("delete from trajectory; from nowhere")
        assert not is_open(store)
        assert store.count(COUNT) == 1


@pytest.mark.slow
def test_another_process_gets_in_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "_KEEP_OPEN_S", 3600.0)
    command = [sys.executable, "-c", READER, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with store.keep_open():
            store.write(gallery.begun("second", "A door."))
            assert is_open(store)
            child.stdin.write("\n")
            child.stdin.flush()
            number, seconds = child.stdout.readline().split()
    assert number == "2"
    assert float(seconds) < 20, "not the hour that the file would have stayed open"


@pytest.mark.slow
def test_threads_of_one_store_take_turns(store: Store) -> None:
    def write(name: str) -> None:
        for number in range(10):
            store.write(gallery.begun(f"{name}{number}", "A door."))
            store.count(COUNT)

    with store.keep_open():
        threads = [threading.Thread(target=write, args=[name]) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.count(COUNT) == 31
    assert not is_open(store)


def _wait_for(event: Any) -> None:
    event.wait(60)


@pytest.mark.slow
def test_a_forked_child_does_not_keep_the_lock(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    over = context.Event()
    with store.keep_open():
        store.write(gallery.begun("second", "A door."))
        child = context.Process(target=_wait_for, args=(over,))
        child.start()
    try:
        with lock.hold(store.path, exclusive=True, deadline=time.monotonic() + 10):
            pass
    finally:
        over.set()
        child.join()


def test_a_child_forked_while_somebody_looks_does_not_keep_the_queue(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    over = context.Event()
    children: list[Any] = []
    flock = fcntl.flock

    def forking(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if operation & fcntl.LOCK_EX and not children:
            children.append(context.Process(target=_wait_for, args=(over,)))
            children[0].start()

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", forking)
        assert not lock.has_waiters(store.path)
    try:
        assert not lock.has_waiters(store.path)
    finally:
        over.set()
        children[0].join()


def test_a_folder_that_goes_away_meanwhile_ends_nothing(store: Store) -> None:
    with store.keep_open():
        store.count(COUNT)
        for suffix in (".queue", ".lock"):
            store.path.with_name(store.path.name + suffix).unlink()
        assert store.count(COUNT) == 1
    assert not is_open(store)
