"""Samples as token rows: what the trainer reads, with a check that the loss falls only where it
may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from agentr_core.errors import DataFault
from agentr_core.samples.identity import IGNORED, TurnClass, check_flags, sample_id, turn_classes
from agentr_core.samples.rendering import RenderedSample, Renderer, check_sample, last_of
from agentr_core.types import Sample, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """The token ids and labels of one sample, of equal length; the label of a token without loss is
    -100.

    `trained_tokens` counts the tokens that carry loss by what their turn is for.
    """

    sample_id: str
    kind: str
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
    lengths = _trained_lengths(sample, rendered, renderer)
    counts: Counter[TurnClass] = Counter()
    for turn_class, length in zip(turn_classes(sample), lengths, strict=True):
        counts[turn_class] += length
    return TokenRow(
        sample_id=name,
        kind=sample.kind,
        input_ids=tuple(rendered.input_ids),
        labels=tuple(rendered.labels),
        trained_tokens=dict(counts),
    )


def trained_stretches(labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the labels of each unbroken stretch of tokens that carry loss."""
    for trained, stretch in groupby(labels, key=lambda label: label != IGNORED):
        if trained:
            yield tuple(stretch)


class _Trained(NamedTuple):
    """A span with loss. `ends` says whether it is the last of its turn, which may have an end of
    turn.
    """

    span: Span
    ends: bool


def _trained_lengths(sample: Sample, rendered: RenderedSample, renderer: Renderer) -> list[int]:
    """Return how many tokens of each trained span carry loss.

    Labels are checked against the flags independently of the renderer: template text separates any
    two turns; tokens without loss, or nothing, separate the spans of a turn.
    """
    # The trained spans of the sample, grouped where no token lies between them.
    groups: list[list[_Trained]] = []
    for message in sample.messages:
        group: list[_Trained] = []
        for position, span in enumerate(message.parts):
            if span.train:
                group.append(_Trained(span, ends=position == len(message.parts) - 1))
            elif group and renderer.inner_ids(span, None):
                groups.append(group)
                group = []
        if group:
            groups.append(group)
    stretches = list(trained_stretches(rendered.labels))
    starts = [
        before for before, (previous, current) in enumerate(pairwise(rendered.labels)) if previous == IGNORED != current
    ]
    if len(groups) != len(stretches):
        raise DataFault(
            f"{sample.kind} sample {sample_id(sample)} marks {len(groups)} turns for training and its labels cover "
            f"{len(stretches)} stretches of tokens; the chat template must have text between two assistant turns"
        )
    lengths: list[int] = []
    for group, stretch, begin in zip(groups, stretches, starts, strict=True):
        before: int | None = rendered.input_ids[begin]
        for position, trained in enumerate(group):
            ids = renderer.own_ids(trained.span) if trained.ends else renderer.inner_ids(trained.span, before)
            length = len(stretch) if position == len(group) - 1 else len(ids)
            labels = stretch[:length]
            span, sampled = trained.span, ids or labels
            closing = 1 if trained.ends and span.finish_reason != "length" else 0
            if labels[: len(sampled)] != sampled or len(labels) > len(sampled) + closing:
                raise DataFault(
                    f"{sample.kind} sample {sample_id(sample)}: the labels of turn {span.text[:60]!r} are not the "
                    "tokens that were sampled; render the sample again"
                )
            lengths.append(length)
            before, stretch = last_of(ids, before), stretch[length:]
    return lengths
