"""The search tool: a query in, a call with status, milliseconds and documents out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from agentr_core.errors import EnvironmentRefusal
from agentr_core.texts import lone_surrogate
from agentr_core.tools.search.once import Once
from agentr_core.tools.search.providers import Provider
from agentr_core.tools.search.text import normalised, shown
from agentr_core.tools.search.wire import MOST_QUERY_CHARS
from agentr_core.types import ToolCall

NAME: Final = "search"
DOCUMENT_CHARS: Final = 1200
NOTHING: Final = "No document was found."


class SearchTool:
    """The search tool. Threads share it.

    Args:
        once: answers equal queries only once; with a store, also across runs.
        document_chars: the most characters of a document that are shown.
    """

    name = NAME

    def __init__(self, provider: Provider, *, once: Once | None = None, document_chars: int = DOCUMENT_CHARS) -> None:
        self._provider = provider
        self._once = once or Once()
        self._document_chars = document_chars

    def call(self, query: str) -> ToolCall:
        """Return the call with the documents as its output, the best match first.

        The provider gets the query in normal form, so that all queries with the same form have one
        answer. The status is

        - ok;
        - empty: nothing was found;
        - invalid: the query is blank, too long or not text, and the output says so;
        - error: the provider refuses this query, and the output says how.

        Raises:
            EnvironmentUnavailable: the provider failed after several tries. What is no fault of the
                query must not reach the model, let alone its reward.
            MalformedAnswer: as above, since the answers cannot be read.
            UserError: the provider cannot be used at all, for example because of a wrong key.
        """
        began = time.perf_counter()
        call = ToolCall(tool=self.name, provider=self._provider.name, key=normalised(query))
        cached = False
        if wrong := _wrong(query):
            call = replace(call, status="invalid", output=f"This query cannot be searched for: {wrong}.")
        else:
            try:
                parameters = {**self._provider.parameters, "document_chars": self._document_chars}
                call = replace(call, parameters=parameters)
                call, cached = self._once.answer(call, self._ask)
            except EnvironmentRefusal as error:
                call = replace(call, status="error", output=f"The search failed: {error}")
        return replace(call, cached=cached, milliseconds=(time.perf_counter() - began) * 1000)

    def reach(self) -> None:
        """Return once the provider has answered. Raises as `call`."""
        self._provider.parameters  # noqa: B018

    def _ask(self, call: ToolCall) -> ToolCall:
        began = time.perf_counter()
        found = self._provider.ask(call.key)
        text = shown(found, document_chars=self._document_chars)
        return replace(
            call,
            status="ok" if text else "empty",
            output=text or NOTHING,
            milliseconds=(time.perf_counter() - began) * 1000,
        )


def _wrong(query: str) -> str:
    if not query.strip():
        return "it is blank"
    if len(query) > MOST_QUERY_CHARS:
        return f"it has more than {MOST_QUERY_CHARS} characters"
    return "it is not valid text" if lone_surrogate(query) is not None else ""
