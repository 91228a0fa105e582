"""The tools of a world as one toolbox, whether they are functions or coroutines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import dropwhile
from typing import Any, Protocol

from agentr_core.environments.reasoning.grammar import PYTHON
from agentr_core.errors import EnvironmentFault
from agentr_core.threads import LoopThread
from agentr_core.types import ToolCall

_NOTHING = "The code printed nothing."
_FAILED = {
    "timeout": "The code took too long and was ended.",
    "memory": "The code used too much memory and was ended.",
    "killed": "The code was ended.",
}


class RanCode(Protocol):
    """The result of running code: a status, which is `ok` if all went well and something was
    printed, what was printed, and how long it took.
    """

    @property
    def status(self) -> str: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def ms(self) -> float: ...


class RunsCode(Protocol):
    """A runner of code, such as `PythonTool`."""

    async def run(self, code: str) -> RanCode:
        """Run code and return its result."""
        ...


class Tools:
    """A toolbox of functions, each of which returns a call for a query.

    Args:
        functions: the functions, by the name of the tool.
        blocking: whether any of them waits for something outside the process.
    """

    def __init__(self, functions: Mapping[str, Callable[[str], ToolCall]], *, blocking: bool) -> None:
        self.tools = tuple(functions)
        self.blocking = blocking
        self._functions = dict(functions)

    def call(self, tool: str, query: str) -> ToolCall:
        """Call a tool and return the call with its result; see `protocols.Toolbox`."""
        if tool not in self._functions:
            raise EnvironmentFault(f"there is no tool {tool!r}; there are {', '.join(self.tools) or 'none'}")
        return self._functions[tool](query)


def python_function(
    runner: RunsCode, loop: LoopThread, *, provider: str, parameters: Mapping[str, Any]
) -> Callable[[str], ToolCall]:
    """Return the Python tool as a function for `Tools`.

    Args:
        loop: the loop in which the runner was started.
        provider: how code is confined; each call has it, with `parameters`.
    """

    def called(code: str) -> ToolCall:
        ran = loop.run(runner.run(code))
        return ToolCall(
            tool=PYTHON,
            provider=provider,
            parameters=parameters,
            key=code.strip(),
            status=str(ran.status),
            milliseconds=ran.ms,
            output=_told(ran),
        )

    return called


def _told(ran: RanCode) -> str:
    """Return what a model is shown after code ran: what went wrong, then what was printed, which
    may be cut.
    """
    printed = ran.stdout.strip()
    if ran.status == "ok":
        return printed
    if ran.status == "empty":
        return _NOTHING
    # What code that was ended wrote there before does not say why.
    raised = _raised(ran.stderr) if ran.status == "exception" else ""
    wrong = raised or _FAILED.get(str(ran.status), "The code failed.")
    return "\n".join(filter(None, (wrong, ran.cause, printed and f"Before that, it printed:\n{printed}")))


def _raised(stderr: str) -> str:
    """Return the end of a traceback, which says what happened: the frames before it are of no use
    to a model. Without a traceback, it is the last line.
    """
    _, frame, rest = f"\n{stderr.rstrip()}".rpartition('\n  File "')
    lines = rest.splitlines()[1:] if frame else stderr.strip().splitlines()[-1:]
    return "\n".join(dropwhile(lambda line: line.startswith("  "), lines))
