"""Many independent units of work at once, under an error budget.

A unit is a search tree or an episode. An exception in a unit is reported with its phase and
traceback and retried if it is transient. If it is not, or the retries are used up, the unit has no
result and counts against the budget.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from agentr_core.errors import ErrorBudgetSpent, Transient, UserError
from agentr_core.recipes.recipe import ErrorsConfig

U = TypeVar("U")
R = TypeVar("R")

_PHASE = "agentr phase: "
_MAX_BACKOFF_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitError:
    """One failed attempt at a unit. `kind` is the name of the exception's class; `phase` is empty
    if it is not known.

    `is_final` says that no further attempt follows, so that the unit has no result. `spent` is then
    the fraction of the error budget used up so far, this unit included; 0 if this unit exceeds the
    budget, or the error is not final.
    """

    key: str
    kind: str
    phase: str
    message: str
    traceback: str
    is_final: bool
    spent: float = 0.0


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Attach the name of a phase to exceptions that leave the block. With nested phases, `phase_of`
    returns the innermost.
    """
    try:
        yield
    except Exception as error:
        error.add_note(_PHASE + name)
        raise


def phase_of(error: BaseException) -> str:
    """Return the innermost phase an exception was raised in, or the empty string."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_PHASE)]
    return notes[0].removeprefix(_PHASE) if notes else ""


async def run_all(
    units: Sequence[U],
    run_unit: Callable[[U], Awaitable[R]],
    *,
    key: Callable[[U], str],
    errors: ErrorsConfig,
    on_error: Callable[[UnitError], None],
    concurrency: int,
    on_result: Callable[[str, R], None] | None = None,
    num_units: int | None = None,
    backoff_seconds: float = 0.5,
) -> dict[str, R]:
    """Return the results of the units that succeeded, by key, in the order of `units`.

    Args:
        run_unit: makes the result of one unit; it is called again for each retry.
        key: returns the key of a unit; keys must be unique.
        on_error: is called for each failed attempt, before the next one.
        concurrency: the maximum number of units in progress at a time.
        on_result: is called with key and result as soon as a unit has its result.
        num_units: the number of units of the whole stage, finished ones included, of which
            `errors.budget` is a fraction; by default the number of `units`.
        backoff_seconds: the wait before the second attempt; it doubles with each further one, up to
            30 seconds.

    Raises:
        ErrorBudgetSpent: more units failed for good than `errors.budget * total`; the others are
            cancelled.
        UserError: a worker raised it; it is not retried, because every other unit would meet it
            too, and the others are cancelled.
        ValueError: two units have the same key, or `concurrency` is below 1.
    """
    keys = [key(unit) for unit in units]
    if len(set(keys)) != len(keys):
        raise ValueError(f"two units have the same key {next(k for k in keys if keys.count(k) > 1)!r}")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    max_failures = num_allowed_failures(errors, num_units or len(units))
    results: dict[str, R] = {}
    failed_keys: list[str] = []

    def report(error: UnitError) -> None:
        num_failures = len(failed_keys) + error.is_final
        on_error(
            replace(error, spent=num_failures / max_failures)
            if error.is_final and num_failures <= max_failures
            else error
        )

    async def finish(name: str, unit: U) -> None:
        try:
            result = await _run_with_retries(name, unit, run_unit, errors, report, backoff_seconds)
        except UserError:
            raise
        except Exception as error:
            failed_keys.append(name)
            if len(failed_keys) > max_failures:
                raise ErrorBudgetSpent(
                    f"{len(failed_keys)} failed, and of {num_units or len(units)} only {max_failures} may; the last "
                    f"one is {name}: {type(error).__name__}: {error}; fix the cause, or raise errors.budget "
                    f"({errors.budget})"
                ) from error
            return
        results[name] = result
        if on_result is not None:
            on_result(name, result)

    await _finish_all(zip(keys, units, strict=True), finish, min(concurrency, len(units)))
    return {name: results[name] for name in keys if name in results}


async def _run_with_retries(
    name: str,
    unit: U,
    run_unit: Callable[[U], Awaitable[R]],
    errors: ErrorsConfig,
    on_error: Callable[[UnitError], None],
    backoff_seconds: float,
) -> R:
    """Return the result of a unit, retried after transient errors. Raises the error of the last
    attempt, or at once a `UserError`.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await run_unit(unit)
        except UserError:
            raise
        except Exception as error:
            is_final = not isinstance(error, Transient) or attempt > errors.retries
            on_error(unit_error(name, error, is_final=is_final))
            if is_final:
                raise
            await asyncio.sleep(min(backoff_seconds * 2 ** (attempt - 1), _MAX_BACKOFF_SECONDS))


async def _finish_all(
    queue: Iterator[tuple[str, U]], finish: Callable[[str, U], Awaitable[None]], concurrency: int
) -> None:
    """Finish all units of a queue, at most `concurrency` at a time. The first exception is raised,
    and the other units are cancelled.
    """

    async def run_queue() -> None:
        for name, unit in queue:
            await finish(name, unit)

    tasks = [asyncio.create_task(run_queue()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # The first exception is already propagating; what the cancelled tasks still raise only
        # repeats it.
        await asyncio.gather(*tasks, return_exceptions=True)


def num_allowed_failures(errors: ErrorsConfig, num_units: int) -> int:
    """Return how many of the `num_units` units of a stage may fail for good, rounded down."""
    return int(round(errors.budget * num_units, 9))


def unit_error(name: str, error: Exception, *, is_final: bool) -> UnitError:
    return UnitError(
        key=name,
        kind=type(error).__name__,
        phase=phase_of(error),
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        is_final=is_final,
    )
