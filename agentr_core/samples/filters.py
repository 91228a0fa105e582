"""Filters that keep samples out of a dataset. Each returns what it kept, in order, and a rejection
for everything else.

Filters are idempotent: applied to what they kept, they reject nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Literal, NamedTuple, TypeVar

from agentr_core.episodes.transcript import Fits, fewest_dropped, is_grown, opening_length, windowed
from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.data import Use
from agentr_core.recipes.fields import CutReplies
from agentr_core.samples.identity import content_order, conversation_key, sample_id, trained_spans
from agentr_core.samples.rendering import Renderer
from agentr_core.samples.rows import TokenRow
from agentr_core.types import Instance, Message, Rejection, Sample, SampleKind

# Samples of paths that were read through a window: one for each stretch between two drops.
#
#     reply drawn with   0 0 0 0 | 1 1 | 2 2 2     exchanges left out
#     stretch            first     second third
#
# A stretch is a conversation as it was read at that point. Only its own replies carry loss; earlier
# ones that are still in the window are read, but not trained again.

Way = Literal["stretches", "reject"]


def drops(messages: tuple[Message, ...], fits: Fits) -> tuple[int, ...]:
    """Return for each reply of a conversation how many exchanges a window leaves out of its prompt;
    empty for a turn that was grown by continuation, which is read whole.
    """
    if is_grown(messages):
        return ()
    found: list[int] = []
    for reply in range(opening_length(messages), len(messages), 2):
        found.append(fewest_dropped(messages[:reply], fits, least=found[-1] if found else 0))
    return tuple(found)


def split(
    sample: Sample, dropped: Sequence[int], way: Way, *, stage: str, subject: str
) -> tuple[Sample, ...] | Rejection:
    """Return the sample of a whole path as samples of its stretches, or why it gives none.

    A path that was read whole is returned as it is. Stretches without a trained reply are left out.

    Args:
        dropped: for each reply, how many exchanges were left out of its prompt; never fewer than
        for the one before.
        stage, subject: those of the rejection.
    """
    if not any(dropped):
        return (sample,)
    if way == "reject":
        first = next(position for position, number in enumerate(dropped) if number)
        detail = f"from step {first} on it was read without its oldest turns; data.windowed is reject"
        return Rejection(stage=stage, subject=subject, reason="windowed", detail=detail)
    borders = [position for position, number in enumerate(dropped) if position == 0 or dropped[position - 1] != number]
    opening = opening_length(sample.messages)
    stretches: list[Sample] = []
    for start, end in zip(borders, [*borders[1:], len(dropped)], strict=True):
        # What was read and said from reply `start` up to, not including, reply `end`; it ends with
        # a reply.
        first = opening + 2 * start
        before = tuple(replace(message, train=False) for message in sample.messages[:first])
        messages = windowed(before + sample.messages[first : opening + 2 * end - 1], dropped[start])
        if any(message.train for message in messages):
            extra = {**sample.provenance.extra, "stretch": len(stretches), "dropped": dropped[start]}
            provenance = replace(sample.provenance, extra=extra)
            stretches.append(replace(sample, messages=messages, provenance=provenance))
    return tuple(stretches)


T = TypeVar("T")

STAGE = "filter"
CUT_REPLY = "cut-reply"


class Filtered(NamedTuple, Generic[T]):
    """What a filter kept, in the given order, and one rejection for each of the others."""

    kept: tuple[T, ...]
    rejected: tuple[Rejection, ...]


def unused_kinds(samples: Iterable[Sample], use: Use) -> Filtered[Sample]:
    """Return the samples of the kinds that the recipe trains on: revision, good, or both."""
    revision, good = SampleKind.REVISION, SampleKind.GOOD
    unused = {"revision": {good}, "good": {revision}, "expert": {revision, good}}.get(use, set())
    kept, rejected = [], []
    for sample in samples:
        if sample.kind in unused:
            rejected.append(_reject(sample_id(sample), "kind-not-used", f"data.use is {use}"))
        else:
            kept.append(sample)
    return Filtered(tuple(kept), tuple(rejected))


def duplicates(samples: Iterable[Sample]) -> Filtered[Sample]:
    """Return the first sample of each conversation; conversations are equal if texts, roles and
    train flags are.
    """
    first: dict[str, Sample] = {}
    rejected = []
    for sample in samples:
        earlier = first.setdefault(conversation_key(sample), sample)
        if earlier is not sample:
            rejected.append(
                _reject(sample_id(sample), "duplicate", f"same conversation as sample {sample_id(earlier)}")
            )
    return Filtered(tuple(first.values()), tuple(rejected))


def cut_replies(samples: Iterable[Sample], rule: CutReplies, renderer: Renderer) -> Filtered[Sample]:
    """Return the samples in which no trained reply was cut by its token limit; with rule `keep`,
    all of them.
    """
    kept, rejected = [], []
    for sample in samples:
        cut = count_cut(sample, renderer) if rule == "reject" else 0
        if cut:
            rejected.append(_reject(sample_id(sample), CUT_REPLY, cut_detail(cut)))
        else:
            kept.append(sample)
    return Filtered(tuple(kept), tuple(rejected))


def count_cut(sample: Sample, renderer: Renderer) -> int:
    """Return how many trained replies of a sample were cut by their token limit."""
    return sum(renderer.is_cut(span) for span in trained_spans(sample))


def cut_detail(cut: int) -> str:
    """Return the reason for rejecting a sample, or a side of a pair, with `cut` trained turns that
    were cut.
    """
    return f"{cut} trained replies were cut by their token limit; data.cut_replies is reject"


def good_per_tree(samples: Iterable[Sample], cap: int) -> Filtered[Sample]:
    """Return the samples with at most `cap` good paths of each tree, the shortest first; a cap of 0
    keeps all.

    Paths explored without a tree are counted by instance, and the stretches of one path count once.
    Samples of other kinds are kept. Equally short paths are ordered by the index of their leaf,
    then by what is in them.
    """
    samples = tuple(samples)
    by_tree: dict[str, dict[str, list[int]]] = {}
    for position, sample in enumerate(samples):
        if sample.kind == SampleKind.GOOD:
            # All stretches of one path share a key, which no two paths share.
            origin = sample.provenance
            if "stretch" in origin.extra:
                path = f"{origin.good_leaf} {origin.extra.get('trajectory')}"
            else:
                path = sample_id(sample)
            by_tree.setdefault(_origin(sample), {}).setdefault(path, []).append(position)
    over: set[int] = set()
    for paths in by_tree.values():
        ranked = sorted(paths.values(), key=lambda path: _preference([samples[position] for position in path]))
        over.update(position for path in ranked[cap or len(ranked) :] for position in path)
    return Filtered(
        tuple(sample for position, sample in enumerate(samples) if position not in over),
        tuple(
            _reject(sample_id(samples[p]), "good-per-tree-cap", f"{_origin(samples[p])} keeps {cap}")
            for p in sorted(over)
        ),
    )


def too_long(rows: Iterable[TokenRow], max_length: int) -> Filtered[TokenRow]:
    """Return the rows of at most `max_length` tokens; 0 means no limit. Nothing is ever shortened
    to fit.
    """
    kept, rejected = [], []
    for row in rows:
        if max_length and len(row.input_ids) > max_length:
            detail = f"{len(row.input_ids)} tokens; a row may have {max_length}"
            rejected.append(_reject(row.sample_id, "too-long", detail))
        else:
            kept.append(row)
    return Filtered(tuple(kept), tuple(rejected))


def in_shares(
    units: Sequence[T],
    shares: Mapping[str, float],
    *,
    world: Callable[[T], str],
    subject: Callable[[T], str],
    seed: int,
) -> Filtered[T]:
    """Return as many units as possible, in order, such that each world has its share; without
    shares, all of them.

    Units of a world are drawn by `seed`. The share of a world without units goes to the others.

    Args:
        shares: the share of each world; they sum to 1.
        world: returns the world of a unit.
        subject: names a unit in its rejection.
    """
    if not shares:
        return Filtered(tuple(units), ())
    places: dict[str, list[int]] = {}
    for position, unit in enumerate(units):
        places.setdefault(world(unit), []).append(position)
    whole = min((len(found) / shares[name] for name, found in places.items()), default=0.0)
    kept: set[int] = set()
    for name, found in places.items():
        most = min(len(found), round(whole * shares[name]))
        kept.update(random.Random(derive_seed(seed, "share", name)).sample(found, most))
    return Filtered(
        tuple(unit for position, unit in enumerate(units) if position in kept),
        tuple(
            _reject(subject(unit), "world-share", f"{world(unit)} has {shares[world(unit)]:g} of the samples")
            for position, unit in enumerate(units)
            if position not in kept
        ),
    )


def check_no_leakage(samples: Sequence[Sample], test: Collection[Instance]) -> None:
    """Raise `DataFault` if a sample was made from a held-out instance; the message names all such
    instances.
    """
    forbidden = {instance.key for instance in test}
    leaked = sorted({s.instance.key for s in samples if s.instance is not None and s.instance.key in forbidden})
    if leaked:
        raise DataFault(
            f"samples were made from {len(leaked)} held-out instances, or variants of these: {', '.join(leaked)}; "
            "collect from another split and build the samples again"
        )


def _origin(sample: Sample) -> str:
    if sample.provenance.tree_id or sample.instance is None:
        return f"tree {sample.provenance.tree_id}"
    return f"instance {sample.instance.key}"


def _preference(path: Sequence[Sample]) -> tuple[int, int, tuple[str, int, int]]:
    leaf = path[0].provenance.good_leaf
    replies = sum(len(message.parts) for sample in path for message in sample.messages)
    return replies, -1 if leaf is None else leaf, min(map(content_order, path))


def _reject(subject: str, reason: str, detail: str) -> Rejection:
    return Rejection(stage=STAGE, subject=subject, reason=reason, detail=detail)


# Revision samples whose suffixes are those of other instances: the control of a comparison.
#
# They have the texts, lengths and revision turns of the real samples, but nothing to learn from. If
# training on them gains as much as training on the real ones, the gain comes from elsewhere, such
# as a leak or the budget.


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
