"""Samples as token rows: what the trainer reads, with proof that the loss falls where it may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from agentr_core.errors import DataFault
from agentr_core.samples.identity import TurnClass, check_flags, sample_id, trained_turns, turn_classes
from agentr_core.samples.labels import IGNORED
from agentr_core.samples.rendering import Renderer, check_sample
from agentr_core.types import Sample, SampleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """The token ids and labels of one sample, equally many; the label of a token without loss is
    -100.

    `trained_tokens` counts the tokens that carry loss by what their turn is for.
    """

    sample_id: str
    kind: SampleKind
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    trained_tokens: Mapping[TurnClass, int]


def token_row(sample: Sample, renderer: Renderer) -> TokenRow:
    """Return the checked row of a sample.

    Raises:
        DataFault: the loss mask is empty or covers a turn that may not be trained; the message
            names the sample.
    """
    check_flags(sample)
    name = sample_id(sample)
    try:
        rendered = renderer.render_sample(sample.messages)
        check_sample(rendered)
    except DataFault as error:
        raise DataFault(f"{sample.kind} sample {name}: {error}") from error
    stretches = list(trained_stretches(rendered.labels))
    _check_stretches(sample, stretches, renderer)
    counts: dict[TurnClass, int] = {}
    for turn_class, stretch in zip(turn_classes(sample), stretches, strict=True):
        counts[turn_class] = counts.get(turn_class, 0) + len(stretch)
    return TokenRow(
        sample_id=name,
        kind=sample.kind,
        input_ids=tuple(rendered.input_ids),
        labels=tuple(rendered.labels),
        trained_tokens=counts,
    )


def trained_stretches(labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the labels of each unbroken stretch of tokens that carry loss."""
    for trained, stretch in groupby(labels, key=lambda label: label != IGNORED):
        if trained:
            yield tuple(stretch)


def _check_stretches(sample: Sample, stretches: Sequence[tuple[int, ...]], renderer: Renderer) -> None:
    """Check the labels against the flags by another way than the renderer's: template text parts
    any two turns.
    """
    turns = trained_turns(sample)
    if len(turns) != len(stretches):
        raise DataFault(
            f"{sample.kind} sample {sample_id(sample)} marks {len(turns)} turns for training and its labels cover "
            f"{len(stretches)} stretches of tokens; the chat template must have text between two assistant turns"
        )
    for turn, stretch in zip(turns, stretches, strict=True):
        sampled = renderer.own_ids(turn) or stretch
        closing = 0 if turn.finish_reason == "length" else 1
        if stretch[: len(sampled)] != sampled or len(stretch) > len(sampled) + closing:
            raise DataFault(
                f"{sample.kind} sample {sample_id(sample)}: the labels of turn {turn.text[:60]!r} are not the tokens "
                "that were sampled; render the sample again"
            )
