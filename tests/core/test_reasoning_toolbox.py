"""Tools as functions, and a tool that is a coroutine among them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentr_core.environments.reasoning.toolbox import Tools, python_function
from agentr_core.errors import EnvironmentFault
from agentr_core.system import LoopThread
from agentr_core.tools.python.confinement import Outcome, Status
from agentr_core.types import ToolCall


def outcome(status: str, stdout: str = "", stderr: str = "", cause: str = "") -> Outcome:
    return Outcome(status=Status(status), stdout=stdout, stderr=stderr, truncated=False, cause=cause, ms=2.5)


class Runner:
    """Gives each code what it is told to, in the thread of the loop alone."""

    def __init__(self, **outcomes: Outcome) -> None:
        self.outcomes = outcomes
        self.threads: set[int] = set()
        self.codes: list[str] = []

    async def run(self, code: str) -> Outcome:
        self.codes.append(code)
        self.threads.add(threading.get_ident())
        if code not in self.outcomes:
            raise EnvironmentFault("the sandbox is broken")
        return self.outcomes[code]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()
    thread.close()


FRAME = 'Traceback (most recent call last):\n  File "<python>", line 1, in f\n    f()\n  [Previous line repeated]\n'


@pytest.mark.parametrize(
    ("ran", "output"),
    [
        (outcome("ok", "42\n"), "42"),
        (outcome("empty"), "The code printed nothing."),
        (outcome("exception", "1\n", f"{FRAME}ValueError: no\n"), "ValueError: no\nBefore that, it printed:\n1"),
        (outcome("exception", "", f"<python>:1: UserWarning: old\n{FRAME}E: two\n  lines\n"), "E: two\n  lines"),
        (
            outcome("exception", "", '  File "<python>", line 1\n    x = (\n        ^\nSyntaxError: no'),
            "SyntaxError: no",
        ),
        (outcome("exception", "", "no solution\n", "exit status 2"), "no solution\nexit status 2"),
        (outcome("exception", "", "", "exit status 2"), "The code failed.\nexit status 2"),
        (
            outcome("timeout", "a", "progress 5%\n", "more than 2 s"),
            "The code took too long and was ended.\nmore than 2 s\nBefore that, it printed:\na",
        ),
        (outcome("timeout"), "The code took too long and was ended."),
        (outcome("killed", cause="it had 40 tasks"), "The code was ended.\nit had 40 tasks"),
    ],
)
def test_what_a_model_is_told_of_its_code(loop: LoopThread, ran: Outcome, output: str) -> None:
    runner = Runner(x=ran)
    call = python_function(runner.run, loop, provider="landlock", parameters={"timeout_s": 5})
    assert call("x") == ToolCall(
        tool="python",
        provider="landlock",
        parameters={"timeout_s": 5},
        key="x",
        status=ran.status,
        milliseconds=2.5,
        output=output,
    )
    assert runner.codes == ["x"], "whatever came of it, it is run once"


def test_threads_share_one_loop_and_faults_come_through(loop: LoopThread) -> None:
    runner = Runner(x=outcome("ok", "1"))
    tools = Tools({"python": python_function(runner.run, loop, provider="", parameters={})}, blocking=True)
    with ThreadPoolExecutor(4) as pool:
        assert {call.output for call in pool.map(lambda _: tools.call("python", "x"), range(20))} == {"1"}
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads
    with pytest.raises(EnvironmentFault, match="sandbox is broken"):
        tools.call("python", "y")
    with pytest.raises(EnvironmentFault, match="no tool 'search'; there are python"):
        tools.call("search", "x")
