"""The training set of an iteration: samples are filtered, mixed, checked, tokenised and shuffled.
Source: Agent-R section 3.3.

A filter returns the items that it kept, in order, and a rejection for each of the others. Filters
are idempotent: applied to what it kept, a filter rejects nothing.

All functions here are pure, and the result does not depend on the order in which samples were
collected, so a run that was interrupted and resumed ends with the same dataset hash.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from typing import Generic, Literal, NamedTuple, TypeVar

from agentr_core.episodes.transcript import (
    FitsContext,
    is_grown,
    min_dropped_to_fit,
    reply_positions,
    without_exchanges,
)
from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.data import DataConfig, Use
from agentr_core.recipes.fields import CutReplies
from agentr_core.samples.identity import (
    IGNORE_INDEX,
    content_sort_key,
    conversation_key,
    sample_id,
    trained_spans,
)
from agentr_core.samples.rendering import RenderedSample, Renderer, check_labels, last_id
from agentr_core.types import Instance, Message, Preference, Rejection, Sample, SampleKind, Span, grown_turn

# Samples as rows of token ids and labels for the trainer, with a check of the loss mask.


TurnClass = str
"""The class of a trained turn, by which trained tokens are counted: `revision_turn` or
`good_suffix` in a revision sample, `good_path` in a good path, else the kind of the sample.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """The token ids and labels of one sample, of equal length. The label of a token without loss is
    -100, that of any other token its id.

    `trained_tokens` counts the tokens that carry loss, by the class of their turn.
    """

    sample_id: str
    kind: str
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    trained_tokens: Mapping[TurnClass, int]


def token_row(sample: Sample, renderer: Renderer) -> TokenRow:
    """Render a sample, check its loss mask, and return its row.

    Raises:
        DataFault: the loss mask is empty, covers a turn that must not be trained, or is not that of
            the train flags; or the sample cannot be rendered. The message names the sample.
    """
    check_flags(sample)
    name = sample_id(sample)
    try:
        rendered_sample = renderer.render_sample(sample.messages)
        check_labels(rendered_sample)
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
    """Raise `DataFault` if no turn of a sample is trained, or one that must not be: only replies
    may, no turn of an example, and in a revision sample none before the revision turn.

    In a revision sample the revision turn must be trained; before it come the acknowledgement of
    the instruction and the `provenance.cut` bad replies that are kept.
    """
    fault = _flag_fault(sample)
    if fault:
        raise DataFault(f"{sample.kind} sample {sample_id(sample)} {fault}")


def _flag_fault(sample: Sample) -> str:
    if not trained_spans(sample):
        return "has no trained turn; reject it before it reaches a dataset"
    untrainable = [position for position, m in enumerate(sample.messages) if m.train and m.role != "assistant"]
    if any(m.train and m.example for m in sample.messages):
        return "trains a turn of an example; only replies of its own episode carry loss"
    if untrainable:
        return f"trains turn {untrainable[0]}, which is not the assistant's; only replies carry loss"
    cut = sample.provenance.cut
    if sample.kind == SampleKind.REVISION:
        if cut is None:
            return "does not say how many bad steps it keeps; set provenance.cut"
        flags = _reply_flags(sample)
        is_later_stretch = bool(sample.provenance.extra.get("stretch", 0))
        # The untrained replies are the acknowledgement and the kept ones; in a later stretch, which
        # begins after the revision turn, also that turn. The first reply is always in the window,
        # and so are the others that were not dropped.
        replies = cut + is_later_stretch
        num_untrained = 1 + min(replies, 1) + max(0, replies - 1 - sample.provenance.extra.get("dropped", 0))
        if flags[:num_untrained] != [False] * num_untrained or not (is_later_stretch or flags[num_untrained]):
            return f"keeps {cut} bad steps and trains one of them, or not the revision turn after them; build it again"
    return ""


def _reply_flags(sample: Sample) -> list[bool]:
    """Return for each reply whether it carries loss, after the flag of the acknowledgement. In
    transcripts without an acknowledgement (continuation, native tools) that flag is False.
    """
    turns = [message for message in sample.messages if message.role == "assistant" and not message.example]
    spans = [span for turn in turns for span in turn.spans]
    # The spans of a grown turn alternate: a reply, then its observation.
    if spans:
        return [False, *(span.train for span in spans[::2])]
    acknowledged = sample.messages[0].role != "tools"
    return [*([] if acknowledged else [False]), *(turn.train for turn in turns)]


def turn_classes(sample: Sample) -> tuple[TurnClass, ...]:
    """Return the class of each trained span of a sample, in order. The first one of a revision
    sample is the revision turn, except in a later stretch of a windowed path and in a rollback,
    which have none.
    """
    num_spans = len(trained_spans(sample))
    if sample.kind != SampleKind.REVISION:
        return ("good_path" if sample.kind == SampleKind.GOOD else str(sample.kind),) * num_spans
    suffix = "good_suffix"
    if sample.provenance.extra.get("stretch", 0) or is_rollback(sample):
        return (suffix,) * num_spans
    return ("revision_turn", *(suffix,) * (num_spans - 1))[:num_spans]


def is_rollback(sample: Sample) -> bool:
    """Return whether a revision sample goes on without a revision turn (splice mode `rollback`)."""
    return sample.provenance.extra.get("mode") == "rollback"


def trained_stretches(labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the labels of each contiguous stretch of tokens that carry loss, in order."""
    for trained, stretch in groupby(labels, key=lambda label: label != IGNORE_INDEX):
        if trained:
            yield tuple(stretch)


class _TrainedSpan(NamedTuple):
    """A span that carries loss. `is_last` says whether it is the last span of its turn, so that an
    end-of-turn token may follow it.
    """

    span: Span
    is_last: bool


def _trained_lengths(sample: Sample, rendered_sample: RenderedSample, renderer: Renderer) -> list[int]:
    """Return how many tokens of each trained span carry loss, in order.

    Raises `DataFault` if the labels are not those that the train flags ask for. This check does not
    rely on the renderer's labels: template text without loss separates any two turns, and between
    two spans of a turn there may be tokens without loss or none.
    """
    # The trained spans of the sample; those with no token between them are in one group.
    groups: list[list[_TrainedSpan]] = []
    for message in sample.messages:
        group: list[_TrainedSpan] = []
        for position, span in enumerate(message.parts):
            if span.train:
                group.append(_TrainedSpan(span, is_last=position == len(message.parts) - 1))
            elif group and renderer.inner_ids(span, None):
                groups.append(group)
                group = []
        if group:
            groups.append(group)
    stretches = list(trained_stretches(rendered_sample.labels))
    starts = [
        before
        for before, (previous, current) in enumerate(pairwise(rendered_sample.labels))
        if previous == IGNORE_INDEX != current
    ]
    if len(groups) != len(stretches):
        raise DataFault(
            f"{sample.kind} sample {sample_id(sample)} marks {len(groups)} turns for training and its labels cover "
            f"{len(stretches)} stretches of tokens; the chat template must have text between two assistant turns"
        )
    lengths: list[int] = []
    for group, stretch, start in zip(groups, stretches, starts, strict=True):
        before: int | None = rendered_sample.input_ids[start]
        for position, trained_span in enumerate(group):
            ids = (
                renderer.sampled_ids(trained_span.span)
                if trained_span.is_last
                else renderer.inner_ids(trained_span.span, before)
            )
            length = len(stretch) if position == len(group) - 1 else len(ids)
            labels = stretch[:length]
            span, sampled_ids = trained_span.span, ids or labels
            closing = 1 if trained_span.is_last and span.finish_reason != "length" else 0
            if labels[: len(sampled_ids)] != sampled_ids or len(labels) > len(sampled_ids) + closing:
                raise DataFault(
                    f"{sample.kind} sample {sample_id(sample)}: the labels of turn {span.text[:60]!r} are not the "
                    "tokens that were sampled; render the sample again"
                )
            lengths.append(length)
            before, stretch = last_id(ids, before), stretch[length:]
    return lengths


# Samples of windowed paths, whose prompts lacked the oldest exchanges: one sample for each stretch
# of replies with the same number of exchanges left out.
#
#     exchanges left out of the prompt of each reply   0 0 0 0 | 1 1    | 2 2 2
#     stretch                                          first   | second | third
#
# The sample of a stretch is the conversation as the model read it there. Only the replies of the
# stretch carry loss; earlier ones that are still in the window do not.

WindowedRule = Literal["stretches", "reject"]


def count_dropped(messages: tuple[Message, ...], fits: FitsContext) -> tuple[int, ...]:
    """Return for each reply of a conversation how many exchanges must be left out of its prompt to
    make it fit. Empty for a turn that was grown by continuation, of which nothing is left out.
    """
    if is_grown(messages):
        return ()
    drop_counts: list[int] = []
    for reply in reply_positions(messages):
        drop_counts.append(min_dropped_to_fit(messages[:reply], fits, minimum=drop_counts[-1] if drop_counts else 0))
    return tuple(drop_counts)


def split_windowed(
    sample: Sample, drop_counts: Sequence[int], rule: WindowedRule, *, stage: str, subject: str
) -> tuple[Sample, ...] | Rejection:
    """Split the sample of a whole path into one sample for each stretch; return these, or the
    rejection of a windowed path if `rule` is "reject".

    A path without dropped exchanges is returned as it is. Stretches without a trained reply are
    left out.

    Args:
        drop_counts: for each reply, how many exchanges were left out of its prompt; the numbers
            never decrease.
        stage, subject: the fields of the rejection.
    """
    if not any(drop_counts):
        return (sample,)
    if rule == "reject":
        first = next(position for position, number in enumerate(drop_counts) if number)
        detail = f"from step {first} on it was read without its oldest turns; data.windowed is reject"
        return Rejection(stage=stage, subject=subject, reason="windowed", detail=detail)
    borders = [
        position for position, number in enumerate(drop_counts) if position == 0 or drop_counts[position - 1] != number
    ]
    replies = reply_positions(sample.messages)
    stretches: list[Sample] = []
    for start, end in zip(borders, [*borders[1:], len(drop_counts)], strict=True):
        # The conversation of replies `start` to `end - 1`, which ends with the last of them.
        first = replies[start]
        context = tuple(replace(message, train=False) for message in sample.messages[:first])
        messages = without_exchanges(context + sample.messages[first : replies[end - 1] + 1], drop_counts[start])
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

    kept_items: tuple[T, ...]
    rejections: tuple[Rejection, ...]


def drop_unused_kinds(samples: Iterable[Sample], use: Use) -> FilterResult[Sample]:
    """Reject samples of the kinds that `data.use` excludes: good paths, revisions, or both."""
    revision, good = SampleKind.REVISION, SampleKind.GOOD
    excluded_kinds = {"revision": {good}, "good": {revision}, "expert": {revision, good}}.get(use, set())
    kept_samples, rejections = [], []
    for sample in samples:
        if sample.kind in excluded_kinds:
            rejections.append(_reject(sample_id(sample), "kind-not-used", f"data.use is {use}"))
        else:
            kept_samples.append(sample)
    return FilterResult(tuple(kept_samples), tuple(rejections))


def drop_duplicates(samples: Iterable[Sample]) -> FilterResult[Sample]:
    """Keep the first sample of each conversation; conversations are equal if their roles, texts and
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


def reject_cut_replies(samples: Iterable[Sample], rule: CutReplies, renderer: Renderer) -> FilterResult[Sample]:
    """Reject the samples with a trained reply that was cut by its token limit; with rule `keep`,
    reject none.
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
    """Return the detail of the rejection of a sample, or of a pair, of which `num_cut` trained
    replies were cut.
    """
    return f"{num_cut} trained replies were cut by their token limit; data.cut_replies is reject"


def cap_good_per_tree(samples: Iterable[Sample], cap: int) -> FilterResult[Sample]:
    """Keep at most `cap` good paths of each search tree, the shortest ones; a cap of 0 keeps all.
    Samples of other kinds are kept.

    Paths sampled without a tree are grouped by instance. All stretches of a path, or conversations
    of an episode, count as one path, whose length is the number of its trained replies. Equally
    short paths are ranked by the index of their leaf, then by `content_sort_key`.
    """
    samples = tuple(samples)
    by_tree: dict[str, dict[str, list[int]]] = {}
    for position, sample in enumerate(samples):
        if sample.kind == SampleKind.GOOD:
            # One key for all samples of a path.
            origin = sample.provenance
            if origin.extra.keys() & {"stretch", "conversation"}:
                path = f"{origin.good_leaf} {origin.extra.get('trajectory')}"
            else:
                path = sample_id(sample)
            by_tree.setdefault(_origin(sample), {}).setdefault(path, []).append(position)
    excess_positions: set[int] = set()
    for paths in by_tree.values():
        ranking = sorted(paths.values(), key=lambda path: _path_rank([samples[position] for position in path]))
        excess_positions.update(position for path in ranking[cap or len(ranking) :] for position in path)
    return FilterResult(
        tuple(sample for position, sample in enumerate(samples) if position not in excess_positions),
        tuple(
            _reject(sample_id(samples[p]), "good-per-tree-cap", f"{_origin(samples[p])} keeps {cap}")
            for p in sorted(excess_positions)
        ),
    )


def drop_too_long(rows: Iterable[TokenRow], max_length: int) -> FilterResult[TokenRow]:
    """Keep the rows of at most `max_length` tokens; 0 means no limit. No row is truncated."""
    kept_rows, rejections = [], []
    for row in rows:
        if max_length and len(row.input_ids) > max_length:
            detail = f"{len(row.input_ids)} tokens; a row may have {max_length}"
            rejections.append(_reject(row.sample_id, "too-long", detail))
        else:
            kept_rows.append(row)
    return FilterResult(tuple(kept_rows), tuple(rejections))


def balance_shares(
    units: Sequence[T],
    shares: Mapping[str, float],
    *,
    world_of: Callable[[T], str],
    subject_of: Callable[[T], str],
    seed: int,
) -> FilterResult[T]:
    """Keep as many units as possible, in order, such that each environment has its share of them;
    without shares, keep all.

    The units of an environment that are kept are drawn at random, by `seed`. The share of an
    environment without units goes to the others.

    Args:
        shares: the share of each environment by name; they sum to 1.
        world_of: returns the name of a unit's environment.
        subject_of: returns the name of a unit for its rejection.
    """
    if not shares:
        return FilterResult(tuple(units), ())
    positions: dict[str, list[int]] = {}
    for position, unit in enumerate(units):
        positions.setdefault(world_of(unit), []).append(position)
    unit_count = min((len(members) / shares[name] for name, members in positions.items()), default=0.0)
    chosen_positions: set[int] = set()
    for name, members in positions.items():
        limit = min(len(members), round(unit_count * shares[name]))
        chosen_positions.update(random.Random(derive_seed(seed, "share", name)).sample(members, limit))
    return FilterResult(
        tuple(unit for position, unit in enumerate(units) if position in chosen_positions),
        tuple(
            _reject(subject_of(unit), "world-share", f"{world_of(unit)} has {shares[world_of(unit)]:g} of the samples")
            for position, unit in enumerate(units)
            if position not in chosen_positions
        ),
    )


def check_no_leakage(samples: Sequence[Sample], test_instances: Collection[Instance]) -> None:
    """Raise `DataFault` if a sample was made from a held-out instance; the message names all such
    instances.
    """
    forbidden = {instance.key for instance in test_instances}
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


def _path_rank(path: Sequence[Sample]) -> tuple[int, int, tuple[str, int, int]]:
    leaf = path[0].provenance.good_leaf
    num_replies = sum(len(trained_spans(sample)) for sample in path)
    return num_replies, -1 if leaf is None else leaf, min(map(content_sort_key, path))


def _reject(subject: str, reason: str, detail: str) -> Rejection:
    return Rejection(stage=STAGE, subject=subject, reason=reason, detail=detail)


# Revision samples with the suffixes of other instances: the control condition of a comparison.
#
# They have the same texts and revision turns as the real samples, but the suffix does not solve the
# problem. If training on them gains as much as training on the real ones, the gain comes from
# elsewhere, such as a leak or the budget.


def exchange_suffixes(samples: Iterable[Sample]) -> FilterResult[Sample]:
    """Permute the suffixes of the revision samples, so that each gets that of another instance.
    Prefix, revision turn and instance stay. Samples of other kinds are kept as they are.

    Revision samples that cannot be cut after their revision turn are rejected: turns grown by
    continuation, and the later stretches of windowed paths.

    Raises `DataFault` when one instance has more than half of the revision samples.
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
    # With the samples sorted by instance, each takes the suffix of the sample N places further on.
    # N is the largest number of samples of one instance, so that one is of another instance.
    revisions = sorted(swappable, key=lambda sample: (_instance_key(sample), content_sort_key(sample)))
    largest_group = max(Counter(map(_instance_key, revisions)).values(), default=0)
    if largest_group > len(revisions) / 2:
        raise DataFault(
            f"{largest_group} of {len(revisions)} revision samples are of one instance, so some cannot get another's "
            "suffix; set data.suffixes=own, or collect from more instances"
        )
    for sample, other in zip(revisions, [*revisions[largest_group:], *revisions[:largest_group]], strict=True):
        messages = (
            *sample.messages[: _suffix_start(sample)],
            *other.messages[_suffix_start(other) :],
        )
        made_of = {"prefix_of": sample_id(sample), "suffix_of": sample_id(other)}
        extra = {name: value for name, value in sample.provenance.extra.items() if not name.startswith("live_")}
        provenance = replace(sample.provenance, split=None, good_leaf=None, good_reward=None, extra=extra | made_of)
        result.append(replace(sample, messages=messages, provenance=provenance))
    return FilterResult(tuple(result), tuple(rejections))


def _suffix_start(sample: Sample) -> int:
    """Return the position of the first reply after the revision turn, which is the first trained
    turn; in a rollback, which has none, of the first trained turn.
    """
    start = next(position for position, message in enumerate(sample.messages) if message.train)
    return start if is_rollback(sample) else start + 2


def _instance_key(sample: Sample) -> str:
    return "" if sample.instance is None else sample.instance.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A summary of a dataset.

    `dataset_hash` is that of `dataset_hash()`. `samples` counts rows by kind of sample, `tokens`
    all tokens, and `trained_tokens` those that carry loss by the class of their turn. `replayed` is
    the number of rows from earlier iterations. `general_passes` is the number of passes begun over
    the general data; if it is above 1, some conversations occur repeatedly.
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
    """Rows in training order. `rejections` has one entry for each sample that a filter rejected."""

    rows: tuple[TokenRow, ...]
    manifest: Manifest
    rejections: tuple[Rejection, ...]


def build_dataset(
    samples: Iterable[Sample],
    config: DataConfig,
    renderer: Renderer,
    *,
    test_instances: Collection[Instance],
    seed: int,
    earlier_samples: Iterable[Sample] = (),
    general_samples: Sequence[Sample] = (),
    shares: Mapping[str, float] | None = None,
) -> Dataset:
    """Filter, tokenise, mix and shuffle samples, and return the dataset; it is empty when no sample
    passes the filters.

    Args:
        samples: the samples of this iteration. Those of kind general, here and in
            `earlier_samples`, are skipped: each dataset draws its own from `general_samples`.
        test_instances: the held-out instances, which must not occur.
        earlier_samples: samples of earlier iterations, used only if `config.replay`.
        general_samples: general chat conversations; they make up `config.general.share` of the
            rows, drawn without replacement until all have been drawn, and then again.
        shares: the share of each environment in the rows other than general ones; with None or an
            empty mapping, all rows are kept.

    Raises:
        DataFault: a sample is of a held-out instance, or `token_row` raises it; or general data is
            wanted and none of it can be used.
    """
    current = _sorted_distinct(sample for sample in samples if sample.kind != SampleKind.GENERAL)
    replayed_samples = _sorted_distinct(
        sample for sample in earlier_samples if config.replay and sample.kind != SampleKind.GENERAL
    )
    check_no_leakage((*current, *replayed_samples), test_instances)
    used_samples, kind_rejections = drop_unused_kinds((*current, *replayed_samples), config.use)
    uncut_samples, cut_rejections = reject_cut_replies(used_samples, config.cut_replies, renderer)
    distinct_samples, duplicate_rejections = (
        (uncut_samples, ()) if config.duplicates == "keep" else drop_duplicates(uncut_samples)
    )
    capped_samples, cap_rejections = cap_good_per_tree(distinct_samples, config.good_per_tree)
    fitting_rows, length_rejections = drop_too_long(
        (token_row(sample, renderer) for sample in capped_samples), config.max_length
    )
    world_by_sample = {sample_id(sample): sample.instance.environment for sample in capped_samples if sample.instance}
    rows, share_rejections = balance_shares(
        fitting_rows,
        shares or {},
        world_of=lambda row: world_by_sample[row.sample_id],
        subject_of=lambda row: row.sample_id,
        seed=seed,
    )
    num_general = round(len(rows) * config.general.share / (1 - config.general.share))
    (general_rows, general_rejections), passes = draw_general(
        general_samples, num_general, renderer, max_length=config.max_length, seed=seed
    )
    ordered_rows = [*rows, *general_rows]
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
            *cap_rejections,
            *length_rejections,
            *share_rejections,
            *general_rejections,
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
    general_samples: Sequence[Sample], num_rows: int, renderer: Renderer, *, max_length: int, seed: int
) -> tuple[FilterResult[TokenRow], int]:
    """Draw `num_rows` rows of general data. Return them with the rejections of drawn conversations
    that cannot be used, and the number of passes begun over `general_samples`.

    Each pass takes every usable conversation once, in a random order of its own. Raises `DataFault`
    if none of them can be used.
    """
    usable = _sorted_distinct(general_samples)
    rows: list[TokenRow] = []
    rejections: list[Rejection] = []
    passes = 0
    while len(rows) < num_rows:
        shuffled_samples = random.Random(derive_seed(seed, "general", passes)).sample(usable, len(usable))
        passes += 1
        refused_ids: set[str] = set()
        for sample in shuffled_samples:
            fitting_rows: tuple[TokenRow, ...] = ()
            try:
                fitting_rows, new_rejections = drop_too_long([token_row(sample, renderer)], max_length)
            except DataFault as fault:
                # The chat template may refuse a system turn, or the tokenizer may have no ids for
                # a text.
                detail, name = str(fault), sample_id(sample)
                new_rejections = (Rejection(stage=STAGE, subject=name, reason="not-rendered", detail=detail),)
            rows += fitting_rows
            rejections += new_rejections
            refused_ids.update(rejection.subject for rejection in new_rejections)
            if len(rows) == num_rows:
                break
        if not rows:
            details = [rejection.detail for rejection in rejections if rejection.reason == "not-rendered"]
            raise DataFault(
                f"{num_rows} conversations of general data are wanted and none of {len(general_samples)} "
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


def _sorted_distinct(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Return each distinct sample once, sorted by `content_sort_key`: ids depend on the run."""
    return tuple(sorted({sample_id(sample): sample for sample in samples}.values(), key=content_sort_key))


# The training set of a preference iteration: pairs are checked, tokenised and shuffled. Source: ETO
# section 3.3.
#
# A dataset of pairs has two rows for each pair: the chosen side at an even position, the rejected
# side right after it.

_Pair = tuple[str, TokenRow, TokenRow]
"""The id of a preference and the rows of its chosen and its rejected side."""


def build_pairs(
    preferences: Mapping[str, Preference],
    config: DataConfig,
    renderer: Renderer,
    *,
    test_instances: Collection[Instance],
    seed: int,
    shares: Mapping[str, float] | None = None,
) -> Dataset:
    """Filter, tokenise and shuffle preferences, and return the dataset; it is empty when no pair
    passes the filters.

    Args:
        preferences: the pairs by id.
        config: only `max_length` and `cut_replies` are read; they apply to each side.
        test_instances: the held-out instances, which must not occur.
        shares: the share of each environment in the pairs; with None or an empty mapping, all pairs
            are kept.

    Raises:
        DataFault: a pair is of a held-out instance, its sides have different prompts, or
            `token_row` raises it for a side.
    """
    check_no_leakage([side for p in preferences.values() for side in (p.chosen, p.rejected)], test_instances)
    fitting_pairs: list[_Pair] = []
    rejections: list[Rejection] = []
    # Sorted by content, since the ids depend on the run.
    for key, preference in sorted(
        preferences.items(), key=lambda item: (content_sort_key(item[1].chosen), content_sort_key(item[1].rejected))
    ):
        result = _pair(key, preference, config, renderer)
        if isinstance(result, Rejection):
            rejections.append(result)
        else:
            fitting_pairs.append(result)
    world_by_pair = {key: p.chosen.instance.environment for key, p in preferences.items() if p.chosen.instance}
    selected_pairs, share_rejections = balance_shares(
        fitting_pairs,
        shares or {},
        world_of=lambda pair: world_by_pair[pair[0]],
        subject_of=lambda pair: pair[0],
        seed=seed,
    )
    pairs = list(selected_pairs)
    random.Random(derive_seed(seed, "dataset-order")).shuffle(pairs)
    rows = tuple(row for _, *pair in pairs for row in pair)
    return Dataset(rows=rows, manifest=manifest_of(rows, seed=seed), rejections=(*rejections, *share_rejections))


def _pair(key: str, preference: Preference, config: DataConfig, renderer: Renderer) -> _Pair | Rejection:
    """Return the rows of both sides of a preference, or its rejection. Raises `DataFault` if the
    sides have different prompts, and as `token_row` does.
    """
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
    """Return the turns of a side before its first trained turn. If that turn has spans, its
    untrained spans before the first trained one are the last turn returned. Without a trained turn,
    return all turns.
    """
    for position, message in enumerate(sample.messages):
        if message.train:
            untrained_spans = tuple(takewhile(lambda span: not span.train, message.spans))
            return (*sample.messages[:position], *([grown_turn(untrained_spans)] if untrained_spans else []))
    return sample.messages
