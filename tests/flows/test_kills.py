"""Kills and other signals at random times, clocks that jump, two processes that ask for the same
stage at once, and a reader who keeps the store for minutes: all end as if nothing had been.

`make test-kills` and `make test-all` do 20 of each and say what came out; `make test` has one kill.
AGENTR_TEST_READER_MINUTES is how long the reader stays.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from wheel import PATIENCE, SUPPORT, kill_group, launched, remove_locks, started, wait_for, write_recipe

from agentr_core.runtime.start import start_run
from agentr_core.store.database import Store
from agentr_core.store.tables import TABLES
from flows.commands import stores
from flows.flywheel import flywheel
from tasks.wiring import load_recipe, quiet_context, run_reference

pytestmark = [
    pytest.mark.slow,
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
ROUNDS = int(os.environ.get("AGENTR_TEST_KILLS", "1"))
KILLS = 4
"""So often each run is killed."""
SEED = 15
READER_MINUTES = float(os.environ.get("AGENTR_TEST_READER_MINUTES", "3"))
PAUSE = ("-o", "environment.options.pause=0.03")
STAGES = (
    ("evaluate", 0),
    *((name, 1) for name in ("collect", "critique", "splice", "dataset", "train", "evaluate", "report")),
)
REPORTED = "select 1 from iteration where iteration = 1 and status = 'finished'"
NODES = "select * exclude (created_at) from node order by tree_id, node_index"
OUTCOME = (
    "select hash from dataset",
    "select checkpoint_id, weights_sha256 from checkpoint order by 1",
    "select iteration, success, reward, episodes, revision_success from v_iterations order by 1",
    NODES,
    "select * exclude (created_at) from judgement order by tree_id, node_index",
    "select * from message order by sample_id, position",
)
# Two processes come to each stage together, and one that is refused asks again.
STAGE_BY_STAGE = """
import asyncio, json, random, sys, time
from pathlib import Path
from agentr_core.errors import RunBusy
from flows import server, stages

meeting, me, seed, run_id, workspace, everyone, *wanted = sys.argv[1:]
rng = random.Random(f"{seed} {me}")
server.ensure_server()
for number, words in enumerate(wanted):
    name, iteration = words.split(":")
    (Path(meeting) / f"{number}-{me}").touch()
    while len(list(Path(meeting).glob(f"{number}-*"))) < int(everyone):
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.2))
    while True:
        try:
            asyncio.run(getattr(stages, name)(run_id, int(iteration), workspace))
        except RunBusy as error:
            print(json.dumps([words, str(error)]), flush=True)
            time.sleep(rng.uniform(0.2, 1))
        else:
            break
"""
# Three times a reader keeps all writers waiting, longer than any of them used to wait.
READ = """
import sys, time
from pathlib import Path
from agentr_core.store import Store

store, seconds = Store(Path(sys.argv[1])), float(sys.argv[2])
for _ in range(3):
    with store.reading() as con:
        print(con.execute("select count(*) from run").fetchall(), flush=True)
        time.sleep(seconds / 3)
"""
# A stage that was tried twice has two rows, with the tokens of both.
TIMES = "select iteration_id, stage, part, count(*), sum(tokens) from timing group by all order by all"
REPLIES = "select count(*) from generation"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP)
DAY = 24 * 3600
JUMPS = (-400 * DAY, -3 * 3600, -1, 1, 25 * 3600, 400 * DAY)
"""Seconds by which a clock is wrong."""


@dataclass(frozen=True)
class Site:
    """A recipe whose runs take place in one folder, so that nothing of a report depends on where it
    was written.
    """

    recipe: Path
    root: Path
    env: Mapping[str, str]

    @property
    def command(self) -> tuple[str | Path, ...]:
        return ("run", self.recipe, *PAUSE)

    @property
    def store(self) -> Store:
        return Store(self.root / "store.duckdb")


@dataclass(frozen=True)
class RunResult:
    """What a run left: its answers, its reports without their times, and the number of its rows."""

    answers: tuple[str, ...]
    reports: Mapping[str, str]
    rows: int


@pytest.fixture(scope="module")
def site(
    door_model: Path, served_env: dict[str, str], door_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    """Where all runs take place."""
    folder = tmp_path_factory.mktemp("kills")
    return Site(recipe=write_recipe(folder, door_model), root=folder / "runs", env=served_env)


@pytest.fixture(scope="module")
def calm(site: Site) -> RunResult:
    """What an undisturbed run leaves."""
    finish(site)
    return read_result(site)


@pytest.fixture(autouse=True)
def _emptied(site: Site, calm: RunResult) -> Iterator[None]:
    shutil.rmtree(site.root)
    yield
    shutil.rmtree(site.root, ignore_errors=True)
    site.root.mkdir()


def finish(site: Site) -> None:
    """Take the run to its end, in this process: what is killed is a process, and this one need not
    be.
    """
    result = asyncio.run(flywheel(str(site.recipe), [PAUSE[1]]))
    assert Path(result["report"]).is_file()


def read_result(site: Site) -> RunResult:
    """Look at a run that is over; its store must be sound."""
    # What `agentr store check` says.
    assert stores.faults(site.root) == []
    answers = tuple(site.store.query(question).to_json(orient="split") for question in OUTCOME)
    files = sorted(path for path in (site.root / "reports").rglob("*") if path.is_file())
    return RunResult(answers, {path.name: timeless(path.read_text(encoding="utf-8")) for path in files}, progress(site))


TIMED = "Where time went|Time, tokens and cost"


def timeless(report: str) -> str:
    """Return a report without dates and without the sections on time."""
    report = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "TIME", report)
    report = re.sub(rf"## ({TIMED}).*?(?=^## |\Z)", "", report, flags=re.DOTALL | re.MULTILINE)
    return re.sub(rf"<h2[^>]*>({TIMED}).*?(?=<h2|</main>)", "", report, flags=re.DOTALL)


def alike(found: RunResult, calm: RunResult) -> None:
    for question, now, then in zip(OUTCOME, found.answers, calm.answers, strict=True):
        assert now == then, question
    assert found.reports.keys() == calm.reports.keys()
    for name, report in found.reports.items():
        assert report == calm.reports[name], name


@pytest.mark.parametrize("number", range(-(-ROUNDS // KILLS)))
def test_killed_again_and_again_it_ends_as_if_nothing_had_been(number: int, site: Site, calm: RunResult) -> None:
    rng = random.Random(f"{SEED} {number}")
    # How far the run is at each kill, by the rows that it has written, wherever the time goes; the
    # last one is the report, which writes none.
    shares = sorted(rng.random() for _ in range(max(min(ROUNDS, KILLS) - 1, 1)))
    for share in (*shares, None)[:ROUNDS]:
        with started(*site.command, env=site.env) as process:
            wait_for(process, moment(site, calm, share), site.store)
            time.sleep(rng.uniform(0, 2))
            over = process.poll() is not None
            kill_group(process)
        where = "the report" if share is None else f"{share:.0%} of the rows"
        log_line(f"run {number} killed at {where}, in {last_stage(site)}{', already over' if over else ''}")
    finish(site)
    alike(read_result(site), calm)
    log_line(f"run {number}: {equal(site)}")


@pytest.mark.long
@pytest.mark.parametrize("number", range(-(-ROUNDS // KILLS)))
def test_ended_by_any_signal_it_goes_on(number: int, site: Site, calm: RunResult) -> None:
    """As a terminal, its closing, a manager of jobs and a lid send them, to the run alone or to all
    of its processes, and with its locks gone afterwards.
    """
    rng = random.Random(f"{SEED} signals {number}")
    for share in sorted(rng.random() for _ in range(KILLS)):
        signum, everywhere, removes_locks = rng.choice(SIGNALS), rng.random() < 0.5, rng.random() < 0.3
        send = os.killpg if everywhere else os.kill
        with started(*site.command, env=site.env) as process:
            wait_for(process, moment(site, calm, share), site.store)
            time.sleep(rng.uniform(0, 2))
            with suppress(ProcessLookupError):
                send(process.pid, signum)
                if signum == signal.SIGSTOP:
                    time.sleep(rng.uniform(1, 12))
                    send(process.pid, signal.SIGCONT)
                    time.sleep(rng.uniform(0, 2))
                    os.kill(process.pid, signal.SIGTERM)
            _, err = process.communicate(timeout=PATIENCE)
        assert "Traceback" not in err, (signum, everywhere, err)
        if removes_locks:
            remove_locks(site.store)
        words = (
            f"{signum.name} at {share:.0%} of the rows{', to all' if everywhere else ''}, status {process.returncode}"
        )
        log_line(f"run {number}: {words}{', locks gone' if removes_locks else ''}")
    finish(site)
    alike(read_result(site), calm)
    log_line(f"run {number}: {equal(site)}")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the clock is made by gcc")
@pytest.mark.parametrize("number", range(-(-ROUNDS // (2 * KILLS))))
def test_a_clock_that_jumps_changes_nothing(number: int, site: Site, calm: RunResult, tmp_path: Path) -> None:
    """While a run is at work, and while it lies killed."""
    rng, clock, library = random.Random(f"{SEED} clock {number}"), tmp_path / "clock", tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, SUPPORT / "clock.c", "-ldl"], check=True)
    env = {**site.env, "LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}
    # A fork of the warm process would have the clock of that process.
    env.pop("WARM_PROCESS", None)
    shares = sorted(rng.random() for _ in range(KILLS))
    for jump, kill in zip(shares[::2], shares[1::2], strict=True):
        before, after = rng.sample(JUMPS, 2)
        clock.write_bytes(struct.pack("=q", before))
        with started(*site.command, env=env) as process, clock.open("r+b") as offset:
            wait_for(process, moment(site, calm, jump), site.store)
            offset.write(struct.pack("=q", after))
            offset.flush()
            wait_for(process, moment(site, calm, kill), site.store)
            kill_group(process)
        log_line(
            f"run {number}: wrong by {before} s, from {jump:.0%} of the rows on by {after} s, killed at {kill:.0%}"
        )
    finish(site)
    alike(read_result(site), calm)
    log_line(f"run {number}: {equal(site)}")


def moment(site: Site, calm: RunResult, share: float | None) -> Callable[[], bool]:
    """Return whether a run has come as far as a share of all rows; None is its report."""
    return (lambda: reporting(site)) if share is None else (lambda: progress(site) >= share * calm.rows)


def progress(site: Site) -> int:
    """Return the number of all rows; it is asked for after each write."""
    return site.store.count(f"select {' + '.join(f'(select count(*) from {name})' for name in TABLES)}")


def reporting(site: Site) -> bool:
    return site.store.path.exists() and len(site.store.query(REPORTED)) > 0


def last_stage(site: Site) -> str:
    """Return the last stage that left something before a kill."""
    if not site.store.path.exists():
        return "start"
    tables = {
        "report": REPORTED,
        "evaluate 1": "select 1 from evaluation join iteration using (iteration_id) where iteration = 1",
        "train": "select 1 from training_step",
        "dataset": "select 1 from dataset",
        "splice": "select 1 from sample",
        "critique": "select 1 from judgement",
        "collect": "select 1 from tree",
        "evaluate 0": "select 1 from evaluation",
    }
    return next((name for name, sql in tables.items() if len(site.store.query(sql))), "start")


@pytest.mark.long
def test_two_processes_at_one_stage_end_as_one_does(site: Site, calm: RunResult) -> None:
    whole = ROUNDS >= 20
    stages = [f"{name}:{iteration}" for name, iteration in (STAGES if whole else STAGES[:2])]
    recipe = load_recipe(site.recipe, [PAUSE[1]])
    run = run_reference(recipe)
    num_refusals: Counter[str] = Counter()
    passes = -(-ROUNDS // len(stages)) if whole else 1
    for number in range(passes):
        shutil.rmtree(site.root, ignore_errors=True)
        site.root.mkdir()
        asyncio.run(start_run(quiet_context(run, recipe)))
        meeting = site.root.parent / f"meeting-{number}"
        meeting.mkdir()
        with ExitStack() as stack:
            processes = [
                stack.enter_context(
                    launched(
                        [
                            *(sys.executable, "-c", STAGE_BY_STAGE, str(meeting), me, f"{SEED} {number}"),
                            *(run.run_id, run.workspace, "2", *stages),
                        ],
                        env=site.env,
                    )
                )
                for me in ("one", "other")
            ]
            # Both are read at once: a process whose output nobody reads stops at a full pipe, with
            # the lock in its hands that the other one waits for.
            with ThreadPoolExecutor(len(processes)) as readers:
                outputs = list(readers.map(lambda process: process.communicate(timeout=PATIENCE), processes))
        assert [process.returncode for process in processes] == [0, 0], outputs
        for out, _ in outputs:
            for line in out.splitlines():
                words, sentence = line.split(", ", 1)
                assert re.search(rf"run {run.run_id} is already under way in .*; wait for it or stop it", sentence)
                num_refusals[words.strip('["')] += 1
        assert num_refusals
        if whole:
            # What the wheel itself does at its end: it finds every stage done.
            finish(site)
            alike(read_result(site), calm)
        else:
            assert site.store.query(NODES).to_json(orient="split") == calm.answers[OUTCOME.index(NODES)]
    if whole:
        log_line(f"{passes * len(stages)} stages asked for twice at once; refused: {dict(num_refusals)}; {equal(site)}")


@pytest.mark.long
def test_no_reply_is_sampled_twice_because_somebody_reads(site: Site, calm: RunResult) -> None:
    finish(site)
    times, replies = site.store.rows(TIMES), site.store.count(REPLIES)
    shutil.rmtree(site.root)
    seconds = 60 * READER_MINUTES
    with started(*site.command, env=site.env) as process, ThreadPoolExecutor(1) as listener:
        wait_for(process, moment(site, calm, 0.3), site.store)
        words = [sys.executable, "-c", READ, str(site.store.path), str(seconds)]
        with launched(words, env=site.env) as reader:
            saying = listener.submit(process.communicate, timeout=PATIENCE + seconds)
            assert reader.wait(PATIENCE + seconds) == 0
            out, err = saying.result()
    assert process.returncode == 0, err
    assert site.store.rows(TIMES) == times
    assert site.store.count(REPLIES) == replies > 0
    alike(read_result(site), calm)
    waits = re.findall(rf"waiting for the store .*PID {reader.pid}\) has held since \d\d:\d\d:\d\d", out + err)
    # The first word comes after ten seconds, the next ones after a minute each.
    assert 3 <= len(waits) <= 6 + READER_MINUTES, out + err
    log_line(f"{READER_MINUTES:g} minutes of a reader, told {len(waits)} times: {replies} replies; {equal(site)}")


def equal(site: Site) -> str:
    """Return what was found equal, with the hash of the dataset."""
    return f"equal, dataset {site.store.query('select hash from dataset')['hash'][0]}"


def log_line(line: str) -> None:
    """Say a line of the long series, for its log."""
    if ROUNDS >= 20:
        sys.stderr.write(f"{line}\n")
