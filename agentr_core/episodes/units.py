"""Many independent units of work at once, under an error budget.

A unit is a tree or an episode. An exception in a unit is reported with its phase and traceback,
retried when it is transient, and otherwise counted against the budget: it never turns into a
result.
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
    """One failed try of a unit. `kind` is the class of the exception; `phase` is empty if it is not
    known.

    `final` says that no further try follows, so that the unit has no result; `spent` is then the
    share of the error budget that is spent with it, as long as it is not more than all.
    """

    key: str
    kind: str
    phase: str
    message: str
    traceback: str
    final: bool
    spent: float = 0.0


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark exceptions that leave the block with what was being done; the innermost mark is the one
    reported.
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
    worker: Callable[[U], Awaitable[R]],
    *,
    key: Callable[[U], str],
    errors: ErrorsConfig,
    on_error: Callable[[UnitError], None],
    concurrency: int,
    on_result: Callable[[str, R], None] | None = None,
    total: int | None = None,
    backoff_seconds: float = 0.5,
) -> dict[str, R]:
    """Return the results of the units that succeeded, by key, in the order of `units`.

    Args:
        worker: makes the result of one unit; a further try calls it again.
        on_error: is called for each failed try, before the next one.
        concurrency: the most units in progress at a time.
        on_result: is called as soon as a unit has its result.
        total: the number of units of the whole stage, finished ones included, which the budget is a
            share of; by default the number of `units`.
        backoff_seconds: the wait before the second try; it doubles with each further one, up to 30
            seconds.

    Raises:
        ErrorBudgetSpent: more units failed for good than `errors.budget * total`; the others are
            cancelled.
        UserError: at once and as it is, because every other unit would meet it too.
        ValueError: two units have one key, or `concurrency` is below 1.
    """
    keys = [key(unit) for unit in units]
    if len(set(keys)) != len(keys):
        raise ValueError(f"two units have the same key {next(k for k in keys if keys.count(k) > 1)!r}")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    max_lost = allowed_losses(errors, total or len(units))
    results: dict[str, R] = {}
    failures: list[str] = []

    def report(error: UnitError) -> None:
        num_lost = len(failures) + error.final
        on_error(replace(error, spent=num_lost / max_lost) if error.final and num_lost <= max_lost else error)

    async def finish(name: str, unit: U) -> None:
        try:
            result = await _tried(name, unit, worker, errors, report, backoff_seconds)
        except UserError:
            raise
        except Exception as error:
            failures.append(name)
            if len(failures) > max_lost:
                raise ErrorBudgetSpent(
                    f"{len(failures)} failed, and of {total or len(units)} only {max_lost} may; the last one is "
                    f"{name}: {type(error).__name__}: {error}; fix the cause, or raise errors.budget ({errors.budget})"
                ) from error
            return
        results[name] = result
        if on_result is not None:
            on_result(name, result)

    await _finish_all(zip(keys, units, strict=True), finish, min(concurrency, len(units)))
    return {name: results[name] for name in keys if name in results}


async def _tried(
    name: str,
    unit: U,
    worker: Callable[[U], Awaitable[R]],
    errors: ErrorsConfig,
    on_error: Callable[[UnitError], None],
    backoff_seconds: float,
) -> R:
    """Return the result of a unit, tried again after errors that may heal. Raises the last
    error.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await worker(unit)
        except UserError:
            raise
        except Exception as error:
            final = not isinstance(error, Transient) or attempt > errors.retries
            on_error(describe(name, error, final=final))
            if final:
                raise
            await asyncio.sleep(min(backoff_seconds * 2 ** (attempt - 1), _MAX_BACKOFF_SECONDS))


async def _finish_all(
    queue: Iterator[tuple[str, U]], finish: Callable[[str, U], Awaitable[None]], concurrency: int
) -> None:
    """Finish all units of a queue, at most `concurrency` at a time; the first exception cancels the
    others.
    """

    async def serve() -> None:
        for name, unit in queue:
            await finish(name, unit)

    tasks = [asyncio.create_task(serve()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # The first exception is already propagating; what the cancelled tasks still raise only
        # repeats it.
        await asyncio.gather(*tasks, return_exceptions=True)


def allowed_losses(errors: ErrorsConfig, total: int) -> int:
    """Return how many of the units of a stage may fail for good."""
    return int(round(errors.budget * total, 9))


def describe(name: str, error: Exception, *, final: bool) -> UnitError:
    return UnitError(
        key=name,
        kind=type(error).__name__,
        phase=phase_of(error),
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        final=final,
    )
