"""The calls of tools that an iteration made."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True)
class CallCount:
    """The calls of one tool in an iteration by how they ended; `provider` says who answered: for
    Python, the level of the sandbox. `cached` of them had an answer already. `seconds` is how long
    they took, one after the other.
    """

    tool: str
    provider: str
    status: str
    calls: int
    cached: int
    seconds: float


def call_counts(store: Store, run_id: str, iteration: int) -> list[CallCount]:
    """Return the counts of an iteration's calls, by tool and provider, the commonest status
    first.
    """
    return [CallCount(*row) for row in store.rows(_CALLS, run_id, iteration)]


def providers(store: Store, run_id: str) -> dict[str, str]:
    """Return who answered the calls of each tool in a run, by the tool's name: for Python, the
    levels of the sandbox.
    """
    return {tool: ", ".join(names) for tool, names in store.rows(_PROVIDERS, run_id)}


_PROVIDERS = """
select tool, list(distinct provider order by provider)
from v_tool_calls
where run_id = ? and provider is not null and provider <> ''
group by tool
order by tool
"""
_CALLS = """
select tool, provider, status, sum(calls)::bigint as made, sum(cached)::bigint, sum(seconds)
from v_tool_calls
where run_id = ? and iteration = ?
group by all
order by tool, provider, made desc, status
"""
