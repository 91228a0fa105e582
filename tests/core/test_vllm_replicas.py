"""Replicas as real child processes: started, watched, started anew, replaced, and ended, whatever
ends their parent.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_servers import BROKEN, SLOW, WELL, command, launch

from agentr_core.errors import ConfigError, ModelFault, ModelServerError, ModelUnavailable
from agentr_core.models.vllm import door as vllm_door
from agentr_core.models.vllm.door import RemoteFleet, ReplicaMonitor, ServeRequest, open_control_server
from agentr_core.models.vllm.replicas import Fleet, Launch, Replicas
from agentr_core.recipes.models import ModelConfig

PATIENCE = 600.0


def until(check: Callable[[], Any], what: str) -> Any:
    """Return the first true answer."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"{what} within {PATIENCE} s")


def addresses(fleet: Fleet) -> tuple[str, ...]:
    return tuple(until(fleet.poll_addresses, "replicas answer"))


def server_pids(folder: Path, number: int = 0) -> list[int]:
    """Return the process ids of a replica's servers, one for each start."""
    log = folder / f"replica-{number}.log"
    return [int(pid) for pid in re.findall(r"as (\d+)", log.read_text())] if log.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Replicas]]:
    fleets: list[Replicas] = []

    def make(program: str = WELL, *, told: list[str] | None = None, **settings: Any) -> Replicas:
        lines = [] if told is None else told
        fleets.append(
            Replicas(
                launch(tmp_path / "model", **settings),
                python=Path(sys.executable),
                logs=tmp_path,
                report_line=lines.append,
                make_command=command(program),
            )
        )
        return fleets[-1]

    yield make
    for replicas in fleets:
        replicas.close()


@pytest.mark.slow
def test_replicas_answer_and_end(start: Callable[..., Replicas], tmp_path: Path) -> None:
    replicas = start(replicas=2)
    assert replicas.poll_addresses() is None
    assert len(set(addresses(replicas))) == 2
    pids = server_pids(tmp_path, 0) + server_pids(tmp_path, 1)
    assert all(map(alive, pids))
    replicas.close()
    replicas.close()
    assert not any(map(alive, pids))
    with pytest.raises(ModelFault, match="were stopped"):
        replicas.poll_addresses()


def test_one_that_dies_at_its_start_is_told_with_its_log(start: Callable[..., Replicas], tmp_path: Path) -> None:
    replicas = start(BROKEN)
    with pytest.raises(
        ModelServerError, match=r"replica 0 of .*model ended with status 1; its log says: ValueError: no"
    ):
        addresses(replicas)
    with pytest.raises(ModelServerError, match=rf"all of it: {tmp_path / 'replica-0.log'}"):
        replicas.poll_addresses()


@pytest.mark.slow
def test_one_that_does_not_answer_in_time(start: Callable[..., Replicas]) -> None:
    replicas = start(SLOW, start_timeout=0.5)
    with pytest.raises(ModelServerError, match=r"did not answer within 0\.5 s \(model\.vllm\.start_timeout\)"):
        addresses(replicas)


@pytest.mark.slow
def test_one_that_dies_is_started_anew_within_its_budget(start: Callable[..., Replicas], tmp_path: Path) -> None:
    lines: list[str] = []
    replicas = start(told=lines, restarts=1)
    before = addresses(replicas)
    os.kill(server_pids(tmp_path)[0], signal.SIGKILL)
    until(lambda: lines or (replicas.poll_addresses() is None and lines), "the death is noticed")
    assert "ended with status 137" in lines[0]
    assert addresses(replicas) == before
    os.kill(server_pids(tmp_path)[1], signal.SIGKILL)
    with pytest.raises(ModelFault, match=r"it has died 2 times, model\.vllm\.restarts allows 1"):
        until(lambda: replicas.poll_addresses() is None, "the death is noticed")


@pytest.mark.slow
def test_one_under_suspicion_is_looked_at(start: Callable[..., Replicas], tmp_path: Path) -> None:
    lines: list[str] = []
    replicas = start(told=lines)
    (address,) = addresses(replicas)
    replicas.report_failure(address)
    assert replicas.poll_addresses() == (address,), "it was well"
    ill = tmp_path / "model.ill"
    ill.touch()
    assert replicas.poll_addresses() == (address,), "nobody complained"
    replicas.report_failure(address)
    assert replicas.poll_addresses() is None
    assert "no longer answers" in lines[0]
    ill.unlink()
    assert addresses(replicas) == (address,)


@pytest.mark.slow
def test_other_weights_on_the_same_ports(start: Callable[..., Replicas], tmp_path: Path) -> None:
    replicas = start()
    before = addresses(replicas)
    replicas.serve(launch(tmp_path / "better"))
    assert addresses(replicas) == before
    assert f"serving {tmp_path / 'better'}" in (tmp_path / "replica-0.log").read_text()


def test_a_port_in_use(start: Callable[..., Replicas], tmp_path: Path) -> None:
    (address,) = addresses(start())
    with pytest.raises(ConfigError, match="cannot be used"):
        Replicas(
            launch(tmp_path / "other"),
            python=Path(sys.executable),
            logs=tmp_path,
            ports=[int(address.rpartition(":")[2])],
            make_command=command(WELL),
        )


@pytest.mark.slow
def test_none_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from model_servers import WELL, command, launch
from agentr_core.models.vllm.replicas import Replicas
folder = Path({str(tmp_path)!r})
replicas = Replicas(launch(folder / "model"), python=Path(sys.executable), logs=folder, make_command=command(WELL))
while replicas.poll_addresses() is None:
    time.sleep(0.02)
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=_paths()) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            (pid,) = server_pids(tmp_path)
            assert alive(pid)
        finally:
            with suppress(ProcessLookupError):
                parent.kill()
    until(lambda: not alive(pid), "the replica ends")


def _paths() -> dict[str, str]:
    folders = [Path(__file__).parents[2], Path(__file__).parents[1] / "support"]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


# ---- the door


@pytest.fixture
def door(start: Callable[..., Replicas], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ReplicaMonitor, str]]:
    monkeypatch.setattr(vllm_door, "make_launch", lambda path, model: launch(path))
    monitor = ReplicaMonitor(start(), ModelConfig(backend="vllm"), report_line=lambda line: None)
    with open_control_server(monitor, 0) as address:
        yield monitor, address


@pytest.mark.slow
def test_a_run_finds_the_replicas_and_has_them_serve_its_weights(
    door: tuple[ReplicaMonitor, str], tmp_path: Path
) -> None:
    monitor, address = door
    fleet = RemoteFleet(address, launch(tmp_path / "model"))
    assert fleet.poll_addresses() is None
    before = until(lambda: monitor.check().addresses, "replicas answer")
    assert fleet.poll_addresses() == before
    better = RemoteFleet(address, launch(tmp_path / "better"))
    assert better.poll_addresses() is None
    assert until(lambda: monitor.check().addresses, "replicas answer anew") == before
    assert better.poll_addresses() == before
    assert monitor.state.model == tmp_path / "better"
    better.close()
    assert monitor.check().addresses == before, "they outlive the run"


@pytest.mark.slow
def test_the_door_hears_of_failed_requests(door: tuple[ReplicaMonitor, str], tmp_path: Path) -> None:
    monitor, address = door
    fleet = RemoteFleet(address, launch(tmp_path / "model"))
    (replica,) = until(lambda: monitor.check().addresses, "replicas answer")
    (tmp_path / "model.ill").touch()
    fleet.report_failure(replica)
    assert fleet.poll_addresses() is None
    (tmp_path / "model.ill").unlink()
    assert until(lambda: monitor.check().addresses, "it is started anew") == (replica,)


def test_the_door_tells_of_replicas_that_cannot_start(start: Callable[..., Replicas], tmp_path: Path) -> None:
    monitor = ReplicaMonitor(start(BROKEN), ModelConfig(backend="vllm"), report_line=lambda line: None)
    assert "no room for the cache" in until(lambda: monitor.check().fault, "the fault is told")
    with open_control_server(monitor, 0) as address, pytest.raises(ModelFault, match="no room for the cache"):
        RemoteFleet(address, launch(tmp_path / "model")).poll_addresses()


def test_what_cannot_be_served_is_refused(start: Callable[..., Replicas], tmp_path: Path) -> None:
    monitor = ReplicaMonitor(start(), ModelConfig(backend="vllm"), report_line=lambda line: None)
    with open_control_server(monitor, 0) as address, pytest.raises(ModelServerError, match=r"missing does not exist"):
        RemoteFleet(address, launch(tmp_path / "missing")).poll_addresses()
    assert ServeRequest(model=tmp_path, dtype="float32", context_length=1).suspected == ()


def test_two_runs_do_not_end_each_others_replicas_for_ever(door: tuple[ReplicaMonitor, str], tmp_path: Path) -> None:
    monitor, address = door
    first = RemoteFleet(address, launch(tmp_path / "model"))
    second = RemoteFleet(address, launch(tmp_path / "better"))

    def take_turns() -> None:
        for _ in range(20):
            first.poll_addresses()
            second.poll_addresses()

    with pytest.raises(ModelServerError, match=r"made to serve .*better instead of .*model 3 times: another run, or"):
        take_turns()
    with pytest.raises(ModelServerError, match=r"4 times.*start one for each, and give each its own AGENTR_VLLM"):
        first.poll_addresses()
    assert until(lambda: second.poll_addresses() or (monitor.check() and None), "one of the two is served")
    assert monitor.state.model == tmp_path / "better"


def test_who_follows_another_run_is_served(door: tuple[ReplicaMonitor, str], tmp_path: Path) -> None:
    """Iterations come and go, each with weights of its own."""
    for number in range(10):
        fleet = RemoteFleet(door[1], launch(tmp_path / str(number)))
        assert fleet.poll_addresses() is None
        fleet.close()


def test_a_door_with_other_settings_says_which(
    start: Callable[..., Replicas], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_door(path: Path, model: ModelConfig) -> Launch:
        return replace(launch(path, seeds=False, options={"max-num-seqs": 8}), served_name="another")

    monkeypatch.setattr(vllm_door, "make_launch", of_the_door)
    monitor = ReplicaMonitor(
        start(seeds=False, options={"max-num-seqs": 8}), ModelConfig(backend="vllm"), report_line=lambda line: None
    )
    with open_control_server(monitor, 0) as address:
        with pytest.raises(ModelServerError) as error:
            RemoteFleet(address, launch(tmp_path / "better")).poll_addresses()
        for part in (
            "model.vllm.seeds is true in the recipe and false there",
            'model.vllm.options is {} in the recipe and {"max-num-seqs": 8} there',
            "give `agentr models serve` the same",
        ):
            assert part in str(error.value)
        same = launch(tmp_path / "better", seeds=False, options={"max-num-seqs": 8})
        with pytest.raises(ModelServerError, match="another version of agentr"):
            RemoteFleet(address, same).poll_addresses()


def test_nobody_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"`agentr models serve` does not answer at http://127\.0\.0\.1:9"):
        RemoteFleet("http://127.0.0.1:9", launch(tmp_path / "model")).poll_addresses()
    with pytest.raises(ConfigError, match="is not the address"):
        RemoteFleet("localhost", launch(tmp_path / "model"))
