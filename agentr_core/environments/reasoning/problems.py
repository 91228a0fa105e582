"""A question with its answer, as a row of a question set.

A row is a JSON object, or a row of a table with the same columns:

    id        a text, unique in its set
    question  what the model is asked
    answer    a text, or a list of texts that are all correct
    source    where the question comes from, such as `aime`
    domain    `math` or `knowledge`; may be left out for the sources in `MATH_SOURCES`, which are
              `math`, and for all others, which are `knowledge`
    split     the split of the row, if a file holds several
    depth     how hard it is, a whole number, such as its number of hops
    solution  how an expert solves it: a list of {"thought", "tool", "query"}, then a last
              {"thought"} before the answer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from agentr_core.environments.reasoning.grammar import CALLS
from agentr_core.environments.reasoning.scoring import Domain
from agentr_core.errors import DataFileError
from agentr_core.texts import lone_surrogate

MATH_SOURCES = frozenset({"openr1", "numina-tir", "numina-cot", "aime", "dapo", "still", "amc", "math500"})
"""Sources whose questions are mathematics if the row has no domain; compared in lower case. This is
the only place that says so.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An expert's thought, and the call that follows it; the last thought has no call."""

    thought: str
    tool: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and all its right answers; `depth` is how hard it is, if known."""

    id: str
    question: str
    golds: tuple[str, ...]
    source: str
    domain: Domain
    depth: int | None = None
    solution: tuple[Move, ...] = ()


def problem_of(row: Mapping[str, Any], where: str) -> Problem:
    """Return the problem of a row; errors begin with `where`. Raises `DataFileError` for a row that
    does not fit the module's description.
    """
    source = _text(row, "source", where)
    depth = row.get("depth")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int)):
        raise DataFileError(f"{where}: depth is {depth!r}; it must be a whole number, or left out")
    return Problem(
        id=_text(row, "id", where),
        question=_text(row, "question", where),
        golds=_golds(row.get("answer"), where),
        source=source,
        domain=_domain(row.get("domain"), source, where),
        depth=depth,
        solution=_solution(row.get("solution"), where),
    )


def _domain(told: Any, source: str, where: str) -> Domain:
    if told is None:
        return "math" if source.lower() in MATH_SOURCES else "knowledge"
    for domain in get_args(Domain):
        if told == domain:
            found: Domain = domain
            return found
    raise DataFileError(f"{where}: domain is {told!r}; it is {' or '.join(get_args(Domain))}")


def _golds(answer: Any, where: str) -> tuple[str, ...]:
    golds = [answer] if isinstance(answer, str) else answer
    if not isinstance(golds, list) or not golds or not all(isinstance(gold, str) and gold.strip() for gold in golds):
        raise DataFileError(
            f"{where}: answer is {answer!r}; it must be a text, or a list of texts that are all correct"
        )
    return tuple(_checked(gold, "answer", where) for gold in golds)


def _solution(moves: Any, where: str) -> tuple[Move, ...]:
    if moves is None or moves == []:
        return ()
    if not isinstance(moves, list) or not all(isinstance(move, Mapping) for move in moves):
        raise DataFileError(f'{where}: solution must be a list of objects with "thought", "tool" and "query"')
    found = tuple(
        Move(
            thought=_text(move, "thought", where),
            tool=_text(move, "tool", where) if move.get("tool") else "",
            query=_text(move, "query", where) if move.get("tool") else "",
        )
        for move in moves
    )
    if not all(move.tool in CALLS for move in found[:-1]) or found[-1].tool:
        raise DataFileError(f"{where}: each move of a solution calls {' or '.join(CALLS)}, and the last one nothing")
    return found


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataFileError(f"{where}: {key} is {value!r}; it must be a text that is not empty")
    return _checked(value, key, where)


def _checked(text: str, key: str, where: str) -> str:
    if (place := lone_surrogate(text)) is not None:
        raise DataFileError(f"{where}: {key} has half a surrogate pair at {place}; correct the text")
    return text
