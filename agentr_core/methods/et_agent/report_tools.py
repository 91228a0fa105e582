"""The report's section on calls of tools: who answered, and how the calls ended."""

from __future__ import annotations

from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row, Section, Table
from agentr_core.runtime.place import Workplace
from agentr_core.store.queries.tool_calls import CallCount, call_counts


def tool_sections(place: Workplace, iteration: int) -> tuple[Section, ...]:
    """Return the section on the calls of tools in an iteration; none if there were none."""
    counts = call_counts(place.store, place.run_id, iteration)
    if not counts:
        return ()
    columns = (Column("Tool", "text"), Column("Answered by", "text"), Column("Status", "text"))
    table = Table((*columns, *map(Column, ("Calls", "Cached", "Milliseconds a call"))), tuple(map(_row, counts)))
    note = "Code is answered by a level of the sandbox: how far it is confined. agentr doctor explains the levels."
    return (Section("tools", "Calls of tools", (table,), note),)


def _row(one: CallCount) -> Row:
    return Row(
        (
            one.tool,
            one.provider or "nobody",
            one.status,
            wording.count(one.calls),
            wording.count(one.cached),
            f"{1000 * one.seconds / one.calls:.1f}",
        )
    )
