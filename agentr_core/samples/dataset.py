"""The training set of an iteration: samples filtered, mixed, checked, tokenised and put in order.
Source: Agent-R section 3.3.

A filter returns what it kept, in order, and a rejection for everything else; applied to what it
kept, it rejects nothing.

Everything here is a function of its arguments. The order in which samples were collected does not
matter, so a run that was interrupted ends with the same dataset hash.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from typing import Generic, Literal, NamedTuple, TypeVar

from agentr_core.episodes.transcript import Fits, fewest_dropped, is_grown, reply_positions, windowed
from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.data import DataConfig, Use
from agentr_core.recipes.fields import CutReplies
from agentr_core.samples.identity import (
    IGNORED,
    content_order,
    conversation_key,
    sample_id,
    trained_spans,
)
from agentr_core.samples.rendering import RenderedSample, Renderer, check_sample, last_of
from agentr_core.types import Instance, Message, Preference, Rejection, Sample, SampleKind, Span, grown_turn

# Samples as token rows: what the trainer reads, with a check that the loss falls only where it
# may.


TurnClass = str
"""The purpose of a trained turn, by which trained tokens are counted: revision_turn and good_suffix
in a revision, good_path in a good path, else the kind of the sample.
"""


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
        rendered_sample = renderer.render_sample(sample.messages)
        check_sample(rendered_sample)
    except DataFault as error:
        raise DataFault(f"{sample.kind} sample {name}: {error}") from error
    lengths = _trained_lengths(sample, rendered_sample, renderer)
    counts: Counter[TurnClass] = Counter()
    for turn_class, length in zip(turn_classes(sample), lengths, strict=True):
        counts[turn_class] += length
    return TokenRow(
        sample_id=name,
        kind=sample.kind,
        input_ids=tuple(rendered_sample.input_ids),
        labels=tuple(rendered_sample.labels),
        trained_tokens=dict(counts),
    )


def check_flags(sample: Sample) -> None:
    """Raise `DataFault` if a turn is trained that must not be: only replies may, and in a revision
    sample none before the revision turn.

    The acknowledgement of the instruction and the `cut` kept replies come before the revision turn.
    """
    fault = _flag_fault(sample)
    if fault:
        raise DataFault(f"{sample.kind} sample {sample_id(sample)} {fault}")


def _flag_fault(sample: Sample) -> str:
    if not trained_spans(sample):
        return "has no trained turn; reject it before it reaches a dataset"
    wrong = [position for position, m in enumerate(sample.messages) if m.train and m.role != "assistant"]
    if any(m.train and m.example for m in sample.messages):
        return "trains a turn of an example; only replies of its own episode carry loss"
    if wrong:
        return f"trains turn {wrong[0]}, which is not the assistant's; only replies carry loss"
    cut = sample.provenance.cut
    if sample.kind == SampleKind.REVISION:
        if cut is None:
            return "does not say how many bad steps it keeps; set provenance.cut"
        flags = _reply_flags(sample)
        later = bool(sample.provenance.extra.get("stretch", 0))
        # The acknowledgement comes first; a later stretch begins after the revision turn, which it
        # may still show.
        # Of these replies a window shows the first one, and those that it has not dropped.
        replies = cut + later
        num_untrained = 1 + min(replies, 1) + max(0, replies - 1 - sample.provenance.extra.get("dropped", 0))
        if flags[:num_untrained] != [False] * num_untrained or not (later or flags[num_untrained]):
            return f"keeps {cut} bad steps and trains one of them, or not the revision turn after them; build it again"
    return ""


def _reply_flags(sample: Sample) -> list[bool]:
    """Return whether each reply carries loss, after one flag that is always False: that of the
    acknowledgement or, in its place, of the turn that the replies are spans of, or that defines
    tools.
    """
    turns = [message for message in sample.messages if message.role == "assistant" and not message.example]
    spans = [span for turn in turns for span in turn.spans]
    # An observation follows each reply.
    if spans:
        return [False, *(span.train for span in spans[::2])]
    acknowledged = sample.messages[0].role != "tools"
    return [*([] if acknowledged else [False]), *(turn.train for turn in turns)]


def turn_classes(sample: Sample) -> tuple[TurnClass, ...]:
    """Return the class of each trained span of a sample; in a revision sample the first one is the
    revision turn.

    If the sample was read through a window, that holds for its first stretch alone.
    """
    count = len(trained_spans(sample))
    if sample.kind != SampleKind.REVISION:
        return ("good_path" if sample.kind == SampleKind.GOOD else str(sample.kind),) * count
    suffix = "good_suffix"
    if sample.provenance.extra.get("stretch", 0):
        return (suffix,) * count
    return ("revision_turn", *(suffix,) * (count - 1))[:count]


def trained_stretches(labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the labels of each unbroken stretch of tokens that carry loss."""
    for trained, stretch in groupby(labels, key=lambda label: label != IGNORED):
        if trained:
            yield tuple(stretch)


class _TrainedSpan(NamedTuple):
    """A span with loss. `ends` says whether it is the last of its turn, which may have an end of
    turn.
    """

    span: Span
    ends: bool


def _trained_lengths(sample: Sample, rendered_sample: RenderedSample, renderer: Renderer) -> list[int]:
    """Return how many tokens of each trained span carry loss.

    Labels are checked against the flags independently of the renderer: template text separates any
    two turns; tokens without loss, or nothing, separate the spans of a turn.
    """
    # The trained spans of the sample, grouped where no token lies between them.
    groups: list[list[_TrainedSpan]] = []
    for message in sample.messages:
        group: list[_TrainedSpan] = []
        for position, span in enumerate(message.parts):
            if span.train:
                group.append(_TrainedSpan(span, ends=position == len(message.parts) - 1))
            elif group and renderer.inner_ids(span, None):
                groups.append(group)
                group = []
        if group:
            groups.append(group)
    stretches = list(trained_stretches(rendered_sample.labels))
    starts = [
        before
        for before, (previous, current) in enumerate(pairwise(rendered_sample.labels))
        if previous == IGNORED != current
    ]
    if len(groups) != len(stretches):
        raise DataFault(
            f"{sample.kind} sample {sample_id(sample)} marks {len(groups)} turns for training and its labels cover "
            f"{len(stretches)} stretches of tokens; the chat template must have text between two assistant turns"
        )
    lengths: list[int] = []
    for group, stretch, begin in zip(groups, stretches, starts, strict=True):
        before: int | None = rendered_sample.input_ids[begin]
        for position, trained_span in enumerate(group):
            ids = (
                renderer.own_ids(trained_span.span)
                if trained_span.ends
                else renderer.inner_ids(trained_span.span, before)
            )
            length = len(stretch) if position == len(group) - 1 else len(ids)
            labels = stretch[:length]
            span, sampled_ids = trained_span.span, ids or labels
            closing = 1 if trained_span.ends and span.finish_reason != "length" else 0
            if labels[: len(sampled_ids)] != sampled_ids or len(labels) > len(sampled_ids) + closing:
                raise DataFault(
                    f"{sample.kind} sample {sample_id(sample)}: the labels of turn {span.text[:60]!r} are not the "
                    "tokens that were sampled; render the sample again"
                )
            lengths.append(length)
            before, stretch = last_of(ids, before), stretch[length:]
    return lengths


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
    drop_counts: list[int] = []
    for reply in reply_positions(messages):
        drop_counts.append(fewest_dropped(messages[:reply], fits, least=drop_counts[-1] if drop_counts else 0))
    return tuple(drop_counts)


def split(
    sample: Sample, drop_counts: Sequence[int], way: Way, *, stage: str, subject: str
) -> tuple[Sample, ...] | Rejection:
    """Return the sample of a whole path as samples of its stretches, or why it gives none.

    A path that was read whole is returned as it is. Stretches without a trained reply are left out.

    Args:
        drop_counts: for each reply, how many exchanges were left out of its prompt; never fewer
            than for the one before.
        stage, subject: those of the rejection.
    """
    if not any(drop_counts):
        return (sample,)
    if way == "reject":
        first = next(position for position, number in enumerate(drop_counts) if number)
        detail = f"from step {first} on it was read without its oldest turns; data.windowed is reject"
        return Rejection(stage=stage, subject=subject, reason="windowed", detail=detail)
    borders = [
        position for position, number in enumerate(drop_counts) if position == 0 or drop_counts[position - 1] != number
    ]
    replies = reply_positions(sample.messages)
    stretches: list[Sample] = []
    for start, end in zip(borders, [*borders[1:], len(drop_counts)], strict=True):
        # What was read and said from reply `start` up to, not including, reply `end`; it ends with
        # a reply.
        first = replies[start]
        before = tuple(replace(message, train=False) for message in sample.messages[:first])
        messages = windowed(before + sample.messages[first : replies[end - 1] + 1], drop_counts[start])
        if any(message.train for message in messages):
            extra = {**sample.provenance.extra, "stretch": len(stretches), "dropped": drop_counts[start]}
            provenance = replace(sample.provenance, extra=extra)
            stretches.append(replace(sample, messages=messages, provenance=provenance))
    return tuple(stretches)


T = TypeVar("T")

STAGE = "filter"
CUT_REPLY = "cut-reply"


class FilterResult(NamedTuple, Generic[T]):
    """What a filter kept, in the given order, and one rejection for each of the others."""

    kept: tuple[T, ...]
    rejected: tuple[Rejection, ...]


def unused_kinds(samples: Iterable[Sample], use: Use) -> FilterResult[Sample]:
    """Return the samples of the kinds that the recipe trains on: revision, good, or both."""
    revision, good = SampleKind.REVISION, SampleKind.GOOD
    excluded_kinds = {"revision": {good}, "good": {revision}, "expert": {revision, good}}.get(use, set())
    kept_samples, rejections = [], []
    for sample in samples:
        if sample.kind in excluded_kinds:
            rejections.append(_reject(sample_id(sample), "kind-not-used", f"data.use is {use}"))
        else:
            kept_samples.append(sample)
    return FilterResult(tuple(kept_samples), tuple(rejections))


def duplicates(samples: Iterable[Sample]) -> FilterResult[Sample]:
    """Return the first sample of each conversation; conversations are equal if texts, roles and
    train flags are.
    """
    first: dict[str, Sample] = {}
    rejections = []
    for sample in samples:
        original = first.setdefault(conversation_key(sample), sample)
        if original is not sample:
            rejections.append(
                _reject(sample_id(sample), "duplicate", f"same conversation as sample {sample_id(original)}")
            )
    return FilterResult(tuple(first.values()), tuple(rejections))


def cut_replies(samples: Iterable[Sample], rule: CutReplies, renderer: Renderer) -> FilterResult[Sample]:
    """Return the samples in which no trained reply was cut by its token limit; with rule `keep`,
    all of them.
    """
    kept_samples, rejections = [], []
    for sample in samples:
        num_cut = count_cut(sample, renderer) if rule == "reject" else 0
        if num_cut:
            rejections.append(_reject(sample_id(sample), CUT_REPLY, cut_detail(num_cut)))
        else:
            kept_samples.append(sample)
    return FilterResult(tuple(kept_samples), tuple(rejections))


def count_cut(sample: Sample, renderer: Renderer) -> int:
    """Return how many trained replies of a sample were cut by their token limit."""
    return sum(renderer.is_cut(span) for span in trained_spans(sample))


def cut_detail(num_cut: int) -> str:
    """Return the reason for rejecting a sample, or a side of a pair, with `num_cut` trained turns
    that were cut.
    """
    return f"{num_cut} trained replies were cut by their token limit; data.cut_replies is reject"


def good_per_tree(samples: Iterable[Sample], cap: int) -> FilterResult[Sample]:
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
        ranking = sorted(paths.values(), key=lambda path: _preference([samples[position] for position in path]))
        over.update(position for path in ranking[cap or len(ranking) :] for position in path)
    return FilterResult(
        tuple(sample for position, sample in enumerate(samples) if position not in over),
        tuple(
            _reject(sample_id(samples[p]), "good-per-tree-cap", f"{_origin(samples[p])} keeps {cap}")
            for p in sorted(over)
        ),
    )


def too_long(rows: Iterable[TokenRow], max_length: int) -> FilterResult[TokenRow]:
    """Return the rows of at most `max_length` tokens; 0 means no limit. Nothing is ever shortened
    to fit.
    """
    kept_rows, rejections = [], []
    for row in rows:
        if max_length and len(row.input_ids) > max_length:
            detail = f"{len(row.input_ids)} tokens; a row may have {max_length}"
            rejections.append(_reject(row.sample_id, "too-long", detail))
        else:
            kept_rows.append(row)
    return FilterResult(tuple(kept_rows), tuple(rejections))


def in_shares(
    units: Sequence[T],
    shares: Mapping[str, float],
    *,
    world: Callable[[T], str],
    subject: Callable[[T], str],
    seed: int,
) -> FilterResult[T]:
    """Return as many units as possible, in order, such that each world has its share; without
    shares, all of them.

    Units of a world are drawn by `seed`. The share of a world without units goes to the others.

    Args:
        shares: the share of each world; they sum to 1.
        world: returns the world of a unit.
        subject: names a unit in its rejection.
    """
    if not shares:
        return FilterResult(tuple(units), ())
    positions: dict[str, list[int]] = {}
    for position, unit in enumerate(units):
        positions.setdefault(world(unit), []).append(position)
    unit_count = min((len(members) / shares[name] for name, members in positions.items()), default=0.0)
    chosen_positions: set[int] = set()
    for name, members in positions.items():
        limit = min(len(members), round(unit_count * shares[name]))
        chosen_positions.update(random.Random(derive_seed(seed, "share", name)).sample(members, limit))
    return FilterResult(
        tuple(unit for position, unit in enumerate(units) if position in chosen_positions),
        tuple(
            _reject(subject(unit), "world-share", f"{world(unit)} has {shares[world(unit)]:g} of the samples")
            for position, unit in enumerate(units)
            if position not in chosen_positions
        ),
    )


def check_no_leakage(samples: Sequence[Sample], test: Collection[Instance]) -> None:
    """Raise `DataFault` if a sample was made from a held-out instance; the message names all such
    instances.
    """
    forbidden = {instance.key for instance in test}
    leaked_keys = sorted({s.instance.key for s in samples if s.instance is not None and s.instance.key in forbidden})
    if leaked_keys:
        raise DataFault(
            f"samples were made from {len(leaked_keys)} held-out instances, or variants of these: "
            f"{', '.join(leaked_keys)}; collect from another split and build the samples again"
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


def exchanged(samples: Iterable[Sample]) -> FilterResult[Sample]:
    """Return each revision sample with the suffix of one of another instance, none twice, and the
    other samples as they are. Prefix, revision turn and instance stay.

    Revisions that cannot be cut after their revision turn are rejected: those whose reply grows by
    continuation, and the later stretches of paths that were read through a window.

    Raises `DataFault` when one instance has more than half of the revisions.
    """
    result, swappable, rejections = [], [], []
    for sample in samples:
        if sample.kind != SampleKind.REVISION:
            result.append(sample)
        elif any(turn.spans for turn in sample.messages) or sample.provenance.extra.get("stretch", 0):
            detail = "it cannot be cut after its turn of revision"
            rejections.append(
                Rejection(stage="dataset", subject=sample_id(sample), reason="no-suffix-of-its-own", detail=detail)
            )
        else:
            swappable.append(sample)
    # In the order of their instances, each takes the suffix of the one N places on, N being the
    # most samples of one instance: that one is always of another instance.
    revisions = sorted(swappable, key=lambda sample: (_instance(sample), content_order(sample)))
    largest_group = max(Counter(map(_instance, revisions)).values(), default=0)
    if largest_group > len(revisions) / 2:
        raise DataFault(
            f"{largest_group} of {len(revisions)} revision samples are of one instance, so some cannot get another's "
            "suffix; set data.suffixes=own, or collect from more instances"
        )
    for sample, other in zip(revisions, [*revisions[largest_group:], *revisions[:largest_group]], strict=True):
        messages = (*sample.messages[: _suffix_of(sample.messages)], *other.messages[_suffix_of(other.messages) :])
        made_of = {"prefix_of": sample_id(sample), "suffix_of": sample_id(other)}
        extra = {name: value for name, value in sample.provenance.extra.items() if not name.startswith("live_")}
        provenance = replace(sample.provenance, split=None, good_leaf=None, good_reward=None, extra=extra | made_of)
        result.append(replace(sample, messages=messages, provenance=provenance))
    return FilterResult(tuple(result), tuple(rejections))


def _suffix_of(messages: Sequence[Message]) -> int:
    """Return the position of the first reply after the revision turn, which is the first trained
    turn.
    """
    return next(position for position, message in enumerate(messages) if message.train) + 2


def _instance(sample: Sample) -> str:
    return "" if sample.instance is None else sample.instance.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A summary of a dataset.

    `dataset_hash` is over the token ids and labels of all rows in order. `samples` counts rows by
    kind, `tokens` all tokens, `trained_tokens` those with loss by what their turn is for.
    `replayed` rows are from earlier iterations. `general_passes` is the number of passes begun over
    the general data; above 1, some of it occurs repeatedly.
    """

    dataset_hash: str
    seed: int
    rows: int
    tokens: int
    samples: Mapping[str, int]
    trained_tokens: Mapping[TurnClass, int]
    replayed: int
    general_passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Rows in training order. `rejections` has every offered sample that is in no row."""

    rows: tuple[TokenRow, ...]
    manifest: Manifest
    rejections: tuple[Rejection, ...]


def build_dataset(
    samples: Iterable[Sample],
    config: DataConfig,
    renderer: Renderer,
    *,
    test: Collection[Instance],
    seed: int,
    earlier: Iterable[Sample] = (),
    general: Sequence[Sample] = (),
    shares: Mapping[str, float] | None = None,
) -> Dataset:
    """Return the dataset of the given samples; it is empty when none of them may be trained on.

    Args:
        samples: of this iteration. General conversations among these and the earlier ones are
            skipped: each dataset draws its own from `general`.
        test: the instances that must not occur.
        earlier: samples of earlier iterations, used only if `config.replay`.
        general: chat conversations; they make up `config.general.share` of the rows, drawn without
            replacement until all have been drawn, and then again.
        shares: the share of each world in the rows, general ones aside; none: all rows.

    Raises:
        DataFault: a sample is of a test instance, or would train a turn that must not be trained;
            or general data is wanted and none of it can be used.
    """
    current = _in_order(sample for sample in samples if sample.kind != SampleKind.GENERAL)
    replayed_samples = _in_order(sample for sample in earlier if config.replay and sample.kind != SampleKind.GENERAL)
    check_no_leakage((*current, *replayed_samples), test)
    usable, kind_rejections = unused_kinds((*current, *replayed_samples), config.use)
    complete, cut_rejections = cut_replies(usable, config.cut_replies, renderer)
    different, duplicate_rejections = (complete, ()) if config.duplicates == "keep" else duplicates(complete)
    capped_samples, over_cap = good_per_tree(different, config.good_per_tree)
    fitting_rows, long = too_long((token_row(sample, renderer) for sample in capped_samples), config.max_length)
    world = {sample_id(sample): sample.instance.environment for sample in capped_samples if sample.instance}
    rows, over_share = in_shares(
        fitting_rows, shares or {}, world=lambda row: world[row.sample_id], subject=lambda row: row.sample_id, seed=seed
    )
    num_general = round(len(rows) * config.general.share / (1 - config.general.share))
    (chat, long_chat), passes = draw_general(general, num_general, renderer, max_length=config.max_length, seed=seed)
    ordered_rows = [*rows, *chat]
    random.Random(derive_seed(seed, "dataset-order")).shuffle(ordered_rows)
    earlier_ids = {sample_id(sample) for sample in replayed_samples} - {sample_id(sample) for sample in current}
    return Dataset(
        rows=tuple(ordered_rows),
        manifest=manifest_of(
            ordered_rows,
            seed=seed,
            num_replayed=sum(row.sample_id in earlier_ids for row in rows),
            general_passes=passes,
        ),
        rejections=(
            *kind_rejections,
            *cut_rejections,
            *duplicate_rejections,
            *over_cap,
            *long,
            *over_share,
            *long_chat,
        ),
    )


def manifest_of(rows: Sequence[TokenRow], *, seed: int, num_replayed: int = 0, general_passes: int = 0) -> Manifest:
    """Return the manifest of rows in training order."""
    trained_tokens: Counter[TurnClass] = Counter()
    for row in rows:
        trained_tokens.update(row.trained_tokens)
    return Manifest(
        dataset_hash=dataset_hash(rows),
        seed=seed,
        rows=len(rows),
        tokens=sum(len(row.input_ids) for row in rows),
        samples=Counter(row.kind for row in rows),
        trained_tokens=dict(trained_tokens),
        replayed=num_replayed,
        general_passes=general_passes,
    )


def draw_general(
    general: Sequence[Sample], count: int, renderer: Renderer, *, max_length: int, seed: int
) -> tuple[FilterResult[TokenRow], int]:
    """Return `count` rows of general data, rejections of drawn conversations that cannot be used,
    and the number of passes.

    Each pass takes every conversation once, in its own order. Raises `DataFault` if a whole pass
    finds none that can be used.
    """
    usable = _in_order(general)
    rows: list[TokenRow] = []
    rejections: list[Rejection] = []
    passes = 0
    while len(rows) < count:
        order = random.Random(derive_seed(seed, "general", passes)).sample(usable, len(usable))
        passes += 1
        refused_ids: set[str] = set()
        for sample in order:
            fitting_rows: tuple[TokenRow, ...] = ()
            try:
                fitting_rows, new_rejections = too_long([token_row(sample, renderer)], max_length)
            except DataFault as fault:
                # It may have a system turn that the chat template refuses, or a text that the
                # tokenizer cannot write.
                detail, name = str(fault), sample_id(sample)
                new_rejections = (Rejection(stage=STAGE, subject=name, reason="not-rendered", detail=detail),)
            rows += fitting_rows
            rejections += new_rejections
            refused_ids.update(rejection.subject for rejection in new_rejections)
            if len(rows) == count:
                break
        if not rows:
            details = [rejection.detail for rejection in rejections if rejection.reason == "not-rendered"]
            raise DataFault(
                f"{count} conversations of general data are wanted and none of {len(general)} "
                + (
                    f"can be used, since {details[0]}; give data.general.file another file"
                    if details
                    else f"has at most {max_length} tokens; give data.general.file another file, raise data.max_length"
                )
                + ", or set data.general.share to 0"
            )
        usable = tuple(sample for sample in usable if sample_id(sample) not in refused_ids)
    return FilterResult(tuple(rows), tuple(rejections)), passes


def dataset_hash(rows: Iterable[TokenRow]) -> str:
    """Return the hash of a dataset: over the token ids and labels of its rows, in their order."""
    return hash_of((row.input_ids, row.labels) for row in rows)


def hash_of(rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Return the hash of a dataset whose rows are given as token ids and labels."""
    return fingerprint([fingerprint(input_ids, labels) for input_ids, labels in rows])


def _in_order(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Return each of the samples once, ordered by what is in them: ids contain the run."""
    return tuple(sorted({sample_id(sample): sample for sample in samples}.values(), key=content_order))


# The training set of a preference iteration: pairs checked, tokenised and put in order. Source:
# ETO section 3.3.
#
# A dataset of pairs has two rows for each: the chosen side at an even position, the rejected one
# right after it.

_Pair = tuple[str, TokenRow, TokenRow]
"""The id of a preference and the rows of its chosen and its rejected side."""


def build_pairs(
    preferences: Mapping[str, Preference],
    config: DataConfig,
    renderer: Renderer,
    *,
    test: Collection[Instance],
    seed: int,
    shares: Mapping[str, float] | None = None,
) -> Dataset:
    """Return the dataset of preferences, by id; it is empty when none of them may be trained on.

    Args:
        config: only `max_length` and `cut_replies` are read; they hold for each side.
        test: the instances that must not occur.
        shares: the share of each world in the pairs; none: all pairs.

    Raises:
        DataFault: a pair is of a test instance, its sides have different prompts, or a side would
            train a turn that must not be trained.
    """
    check_no_leakage([side for p in preferences.values() for side in (p.chosen, p.rejected)], test)
    fitting_pairs: list[_Pair] = []
    rejections: list[Rejection] = []
    # By what is in them: their ids contain the run.
    for key, preference in sorted(
        preferences.items(), key=lambda item: (content_order(item[1].chosen), content_order(item[1].rejected))
    ):
        result = _pair(key, preference, config, renderer)
        if isinstance(result, Rejection):
            rejections.append(result)
        else:
            fitting_pairs.append(result)
    world = {key: p.chosen.instance.environment for key, p in preferences.items() if p.chosen.instance}
    selected_pairs, over_share = in_shares(
        fitting_pairs, shares or {}, world=lambda pair: world[pair[0]], subject=lambda pair: pair[0], seed=seed
    )
    pairs = list(selected_pairs)
    random.Random(derive_seed(seed, "dataset-order")).shuffle(pairs)
    rows = tuple(row for _, *pair in pairs for row in pair)
    return Dataset(rows=rows, manifest=manifest_of(rows, seed=seed), rejections=(*rejections, *over_share))


def _pair(key: str, preference: Preference, config: DataConfig, renderer: Renderer) -> _Pair | Rejection:
    """Return the rows of both sides of a preference, or why it is not trained on."""
    if prompt_of(preference.chosen) != prompt_of(preference.rejected):
        raise DataFault(f"the sides of preference {key} have different prompts; build the pairs again")
    num_cut = sum(count_cut(side, renderer) for side in (preference.chosen, preference.rejected))
    if num_cut and config.cut_replies == "reject":
        return Rejection(stage=STAGE, subject=key, reason=CUT_REPLY, detail=cut_detail(num_cut))
    chosen, rejected = token_row(preference.chosen, renderer), token_row(preference.rejected, renderer)
    longest = max(len(chosen.input_ids), len(rejected.input_ids))
    if config.max_length and longest > config.max_length:
        detail = f"a side has {longest} tokens; it may have {config.max_length}"
        return Rejection(stage=STAGE, subject=key, reason="too-long", detail=detail)
    if (chosen.input_ids, chosen.labels) == (rejected.input_ids, rejected.labels):
        return Rejection(stage=STAGE, subject=key, reason="same-tokens")
    return key, chosen, rejected


def prompt_of(sample: Sample) -> tuple[Message, ...]:
    """Return what comes before the first trained turn or span of a side."""
    for position, message in enumerate(sample.messages):
        if message.train:
            untrained_spans = tuple(takewhile(lambda span: not span.train, message.spans))
            return (*sample.messages[:position], *([grown_turn(untrained_spans)] if untrained_spans else []))
    return sample.messages
