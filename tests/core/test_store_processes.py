"""The store among processes: nobody loses a row, everybody gets in, and a killed writer leaves no
half of anything.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import duckdb
import pytest

import agentr_core
from agentr_core.errors import StoreBusy
from agentr_core.store import lock
from agentr_core.store.database import Store

ROOT = Path(agentr_core.__file__).parents[1]
HEAD = """
import sys, time
from pathlib import Path
from agentr_core.store import Store
path, name = Path(sys.argv[1]), sys.argv[2]
store = Store(path)
"""
HOLD = (
    HEAD
    + """
with store.transaction() as con:
    con.execute("insert into rl_validation (trajectory_id, step, iteration_id) values ('held', 1, 'x')")
    print("holding", flush=True)
    sys.stdin.readline()
"""
)
WRITE = (
    HEAD
    + """
for number in range(int(sys.argv[3])):
    rows = [{"trajectory_id": f"{name}-{number}-{part}", "step": 1, "iteration_id": "x" * 200} for part in range(20)]
    store.write({"rl_validation": rows})
    print(number, flush=True)
"""
)
READ = (
    HEAD
    + """
while not Path(name).exists():
    unit = "regexp_extract(trajectory_id, '^[^-]+-[^-]+')"
    counts = store.query(f"select count(*) as n from rl_validation group by {unit}")["n"]
    assert set(counts) <= {20}, counts
    print(counts.sum(), flush=True)
"""
)


def start(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agentr.duckdb"


@pytest.mark.slow
def test_a_second_writer_waits_and_then_says_who_holds_the_store(path: Path) -> None:
    store = Store(path, wait_s=0.3)
    store.write({})
    holder = start(HOLD, path, "a")
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        for attempt in (lambda: store.write({}), lambda: store.query("select 1")):
            began = time.monotonic()
            with pytest.raises(StoreBusy, match=rf"agentr.duckdb is held by .*PID {holder.pid}\)"):
                attempt()
            assert time.monotonic() - began >= 0.3
        release = threading.Timer(0.3, lambda: holder.communicate("go on\n"))
        release.start()
        # A patient store gets in as soon as the holder is done, and sees what it stored.
        assert Store(path, wait_s=30).missing("rl_validation", ["held"]) == []
        release.join()
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.slow
def test_a_program_that_does_not_know_the_lock_is_waited_for_too(path: Path) -> None:
    Store(path).write({})
    code = "import duckdb, sys; con = duckdb.connect(sys.argv[1]); print('holding', flush=True); sys.stdin.readline()"
    shell = start(code, path)
    try:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "holding\n"
        with pytest.raises(StoreBusy, match=f"PID {shell.pid}"):
            Store(path, wait_s=0.2).query("select 1")
    finally:
        shell.communicate("go on\n")
    assert len(Store(path).query("select 1")) == 1


@pytest.mark.slow
def test_killed_while_writing_no_acknowledged_row_is_lost_and_no_unit_is_halved(path: Path) -> None:
    store = Store(path)
    units: set[str] = set()
    for attempt in range(4):
        writer = start(WRITE, path, f"w{attempt}", 10_000)
        assert writer.stdout is not None
        for _ in range(3 + 4 * attempt):
            units.add(f"w{attempt}-{int(writer.stdout.readline())}")
        time.sleep(0.013 * attempt)
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        units.update(f"w{attempt}-{int(line)}" for line in rest.split())
        frame = store.query(
            "select regexp_extract(trajectory_id, '^[^-]+-[^-]+') as unit, count(*) as n from rl_validation group by 1"
        )
        assert set(frame["n"]) == {20}
        assert units <= set(frame["unit"])
    assert duckdb.connect(str(path)).execute("select count(*) from rl_validation").fetchall()[0][0] >= 20 * len(units)


@pytest.mark.slow
def test_many_processes_lose_nothing_and_readers_get_in(path: Path, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    Store(path).write({})
    readers = [start(READ, path, stop) for _ in range(2)]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "0\n"
    writers = [start(WRITE, path, f"w{number}", 25) for number in range(4)]
    outputs = [writer.communicate() for writer in writers]
    stop.touch()
    reads = [reader.communicate() for reader in readers]
    assert [p.returncode for p in (*writers, *readers)] == [0] * 6, [*outputs, *reads]
    units = [f"w{number}-{line}" for number, (out, _) in enumerate(outputs) for line in out.split()]
    ids = [f"{unit}-{part}" for unit in units for part in range(20)]
    assert len(ids) == 4 * 25 * 20
    assert Store(path).missing("rl_validation", ids) == []
    for out, _ in reads:
        counts = [int(line) for line in out.split()]
        assert counts == sorted(counts)
        assert len(set(counts)) > 3, "a reader was kept out while the writers ran"


@pytest.mark.slow
def test_threads_of_one_process_share_the_store(path: Path) -> None:
    store = Store(path, wait_s=60)
    store.write({})
    faults: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for number in range(5):
                store.write({"rl_validation": [{"trajectory_id": f"{name}{number}", "step": 1, "iteration_id": "x"}]})
                store.query("select count(*) from rl_validation")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert store.query("select count(*) as n from rl_validation")["n"].tolist() == [15]


@pytest.mark.slow
def test_a_run_waits_for_a_reader_without_end_and_says_who_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "_FIRST_WARNING_S", 0.3)
    monkeypatch.setattr(lock, "_WARNING_INTERVAL_S", 0.5)
    monkeypatch.setattr(lock, "_LOOKUP_INTERVAL_S", 0.1)
    Store(path).write({})
    reader = start(HEAD + "with store.reading(): print('reading', flush=True); sys.stdin.readline()", path, "a")
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        release = threading.Timer(2, lambda: reader.communicate("go on\n"))
        release.start()
        Store(path, wait_s=math.inf).write(
            {"rl_validation": [{"trajectory_id": "sampled", "step": 1, "iteration_id": "x"}]}
        )
        release.join()
    finally:
        reader.kill()
        reader.communicate()
    assert Store(path).missing("rl_validation", ["sampled"]) == []
    messages = [record.getMessage() for record in caplog.records]
    # Every half a second, not at each of a hundred attempts.
    assert 1 <= len(messages) <= 5
    # The last look may come when the reader has just gone.
    assert all(
        re.search(rf"the store .*, which another process \(PID {reader.pid}\) has held since", message)
        for message in messages[: max(1, len(messages) - 1)]
    )


def test_a_thread_that_would_wait_for_itself_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_LONGEST_NESTED_WAIT_S", 0.1)
    store = Store(path, wait_s=math.inf)
    store.write({})
    with store.reading(), pytest.raises(StoreBusy, match="another part of this process"):
        store.write({})
    store.write({})
