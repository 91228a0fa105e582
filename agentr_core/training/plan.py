"""The samples of each optimizer step, fixed before training starts, so that the schedule and the
token count are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

import numpy as np

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The samples of each optimizer step, as row numbers, and the trained tokens seen up to the end
    of each step.
    """

    steps: tuple[tuple[int, ...], ...]
    trained_tokens: tuple[int, ...]
    epochs: float
    """The samples seen, repeats included, divided by the samples of the dataset."""

    def tokens_after(self, step: int) -> int:
        """Return the trained tokens seen up to the end of a step, counted from 1; after the last
        step the plan starts again.
        """
        rounds, rest = divmod(step, len(self.steps))
        return rounds * self.trained_tokens[-1] + (self.trained_tokens[rest - 1] if rest else 0)


def plan(
    tokens: Sequence[int],
    *,
    per_step: int,
    epochs: float,
    max_tokens: int,
    seed: int,
    lengths: Sequence[int] = (),
    step_tokens: int = 0,
) -> Plan:
    """Return the steps of a training on rows with `tokens[i]` trained tokens each.

    Rows come in a new random order every epoch; all steps but the last have `per_step` samples,
    also across the boundary of two epochs. With `step_tokens` above 0, a step instead takes samples
    as long as the sum of their `lengths`, in tokens, does not exceed that number, but at least one.
    With `max_tokens` above 0, the sample that reaches that number of trained tokens is the last
    one, whatever `epochs` says.

    Raises `DataFault` when there are no rows, or a row without trained tokens.
    """
    if not tokens:
        raise DataFault("the dataset has no rows; loosen the filters or collect more")
    if min(tokens) < 1:
        raise DataFault(f"row {tokens.index(min(tokens))} of the dataset has no trained token; leave it out")
    order = tuple(_samples(tokens, epochs=epochs, max_tokens=max_tokens, seed=seed))
    if step_tokens:
        steps = tuple(_filled(order, lengths, step_tokens))
    else:
        steps = tuple(order[start : start + per_step] for start in range(0, len(order), per_step))
    seen = accumulate(sum(tokens[row] for row in step) for step in steps)
    return Plan(steps=steps, trained_tokens=tuple(seen), epochs=len(order) / len(tokens))


def _filled(order: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    step: list[int] = []
    held = 0
    for row in order:
        if step and held + lengths[row] > most:
            yield tuple(step)
            step, held = [], 0
        step.append(row)
        held += lengths[row]
    yield tuple(step)


def _samples(tokens: Sequence[int], *, epochs: float, max_tokens: int, seed: int) -> Iterator[int]:
    stream = _endless(len(tokens), seed)
    if not max_tokens:
        yield from islice(stream, max(1, round(epochs * len(tokens))))
        return
    seen = 0
    while seen < max_tokens:
        row = next(stream)
        seen += tokens[row]
        yield row


def _endless(rows: int, seed: int) -> Iterator[int]:
    for epoch in count():
        generator = np.random.default_rng(derive_seed("epoch order", seed, epoch))
        yield from (int(row) for row in generator.permutation(rows))
