"""Tools for tests of worlds, in this process: code that tests wrote themselves is run as it is."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping

from agentr_core.types import ToolCall


class Bench:
    """Runs code, and searches a few passages by whether their title stands in the query.

    `calls` is the log.
    """

    blocking = False

    def __init__(self, passages: Mapping[str, str], tools: tuple[str, ...] = ("search", "python")) -> None:
        self.tools = tools
        self.calls: list[tuple[str, str]] = []
        self._passages = passages

    def call(self, tool: str, query: str) -> ToolCall:
        self.calls.append((tool, query))
        status, output = self._search(query) if tool == "search" else ran(query)
        return ToolCall(tool=tool, provider="bench", key=query, status=status, output=output, milliseconds=1.0)

    def _search(self, query: str) -> tuple[str, str]:
        passages = [f"{title}\n{text}" for title, text in self._passages.items() if title.lower() in query.lower()]
        return ("ok", "\n\n".join(passages)) if passages else ("empty", "")


def ran(code: str) -> tuple[str, str]:
    """Return status and output of code that a test wrote."""
    stdout = io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout):
            exec(code, {})
    except Exception as error:
        return "exception", f"{type(error).__name__}: {error}"
    return ("ok", stdout.getvalue()) if stdout.getvalue() else ("empty", "")
