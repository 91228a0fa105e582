"""Revision samples whose suffixes are those of other instances: the control of a comparison.

They have the texts, lengths and revision turns of the real samples, but nothing to learn from. If
training on them gains as much as training on the real ones, the gain comes from elsewhere, such as
a leak or the budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agentr_core.errors import DataFault
from agentr_core.samples.filters import Filtered
from agentr_core.samples.identity import content_order, sample_id
from agentr_core.types import Message, Rejection, Sample, SampleKind


def exchanged(samples: Iterable[Sample]) -> Filtered[Sample]:
    """Return each revision sample with the suffix of one of another instance, none twice, and the
    other samples as they are. Prefix, revision turn and instance stay.

    Revisions that cannot be cut after their revision turn are rejected: those whose reply grows by
    continuation, and the later stretches of paths that were read through a window.

    Raises `DataFault` when one instance has more than half of the revisions.
    """
    others, whole, rejected = [], [], []
    for sample in samples:
        if sample.kind != SampleKind.REVISION:
            others.append(sample)
        elif any(turn.spans for turn in sample.messages) or sample.provenance.extra.get("stretch", 0):
            detail = "it cannot be cut after its turn of revision"
            rejected.append(
                Rejection(stage="dataset", subject=sample_id(sample), reason="no-suffix-of-its-own", detail=detail)
            )
        else:
            whole.append(sample)
    return Filtered((*others, *_shifted(whole)), tuple(rejected))


def _shifted(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with each other's suffixes. They are ordered by instance, and each takes the
    suffix of the one N places on, N being the most samples of one instance: that one is always of
    another instance.
    """
    ordered = sorted(samples, key=lambda sample: (_instance(sample), content_order(sample)))
    most = max(Counter(map(_instance, ordered)).values(), default=0)
    if most > len(ordered) / 2:
        raise DataFault(
            f"{most} of {len(ordered)} revision samples are of one instance, so some cannot get another's suffix; "
            "set data.suffixes=own, or collect from more instances"
        )
    return [_with_suffix(one, other) for one, other in zip(ordered, [*ordered[most:], *ordered[:most]], strict=True)]


def _with_suffix(sample: Sample, other: Sample) -> Sample:
    messages = (*sample.messages[: _suffix_of(sample.messages)], *other.messages[_suffix_of(other.messages) :])
    made_of = {"prefix_of": sample_id(sample), "suffix_of": sample_id(other)}
    extra = {name: value for name, value in sample.provenance.extra.items() if not name.startswith("live_")}
    provenance = replace(sample.provenance, split=None, good_leaf=None, good_reward=None, extra=extra | made_of)
    return replace(sample, messages=messages, provenance=provenance)


def _suffix_of(messages: Sequence[Message]) -> int:
    """Return the position of the first reply after the revision turn, which is the first trained
    turn.
    """
    return next(place for place, message in enumerate(messages) if message.train) + 2


def _instance(sample: Sample) -> str:
    return "" if sample.instance is None else sample.instance.key
