"""Tool answers that later calls reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentr_core.store.codec.calls import answered_columns
from agentr_core.store.codec.texts import text_rows
from agentr_core.store.database import Store
from agentr_core.types import ToolCall


class AnsweredCalls:
    """The tool answers in a store. Threads and processes may share one; two on the same file are
    equal.

    Each method is one burst of the store, so it suits tools that take longer than a burst, such as
    a web search.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnsweredCalls) and self._store.path == other._store.path

    def __hash__(self) -> int:
        return hash(self._store.path)

    def identities(self) -> frozenset[str]:
        """Return the identities of all calls with an answer; none if there is no store yet. Raises
        as `Store.reading` does.
        """
        return frozenset(call_id for (call_id,) in self._store.rows("select call_id from answered_call"))

    def find(self, calls: Sequence[ToolCall]) -> dict[str, ToolCall]:
        """Return the calls that have a stored answer, with that answer and its duration, by
        identity. Raises as `Store.reading` does.
        """
        asked = {call.identity: call for call in calls}
        return {
            key: replace(asked[key], status=status, milliseconds=milliseconds, output=output)
            for key, status, milliseconds, output in self._store.rows(_ANSWERS, list(asked))
        }

    def keep(self, calls: Sequence[ToolCall]) -> None:
        """Store answered calls in one transaction; the first answer to each stays. Raises as
        `Store.write` does.
        """
        rows = [{"call_id": call.identity, **answered_columns(call)} for call in calls]
        self._store.write({"text": text_rows([call.output for call in calls]), "answered_call": rows})


_ANSWERS = """
select a.call_id, a.status, a.milliseconds, t.text
from answered_call a join text t on t.text_id = a.output_id
where a.call_id in (select unnest(?::varchar[]))
"""
