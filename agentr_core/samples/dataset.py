"""The training set of an iteration: samples mixed, checked, tokenised and put in order. Source:
Agent-R section 3.3.

Everything here is a function of its arguments. The order in which samples were collected does not
matter, so a run that was interrupted ends with the same dataset hash.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.recipes.data import DataConfig
from agentr_core.samples.filters import (
    CUT_REPLY,
    STAGE,
    Filtered,
    check_no_leakage,
    count_cut,
    cut_detail,
    cut_replies,
    duplicates,
    good_per_tree,
    in_shares,
    too_long,
    unused_kinds,
)
from agentr_core.samples.identity import TurnClass, content_order, sample_id
from agentr_core.samples.rendering import Renderer
from agentr_core.samples.rows import TokenRow, token_row
from agentr_core.types import Instance, Message, Preference, Rejection, Sample, SampleKind, grown_turn


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
    replayed = _in_order(sample for sample in earlier if config.replay and sample.kind != SampleKind.GENERAL)
    check_no_leakage((*current, *replayed), test)
    used, unused = unused_kinds((*current, *replayed), config.use)
    whole, cut = cut_replies(used, config.cut_replies, renderer)
    different, repeated = (whole, ()) if config.duplicates == "keep" else duplicates(whole)
    capped, over_cap = good_per_tree(different, config.good_per_tree)
    fitting, long = too_long((token_row(sample, renderer) for sample in capped), config.max_length)
    world = {sample_id(sample): sample.instance.environment for sample in capped if sample.instance}
    rows, over_share = in_shares(
        fitting, shares or {}, world=lambda row: world[row.sample_id], subject=lambda row: row.sample_id, seed=seed
    )
    wanted = round(len(rows) * config.general.share / (1 - config.general.share))
    (chat, long_chat), passes = draw_general(general, wanted, renderer, max_length=config.max_length, seed=seed)
    ordered = [*rows, *chat]
    random.Random(derive_seed(seed, "dataset-order")).shuffle(ordered)
    earlier_ids = {sample_id(sample) for sample in replayed} - {sample_id(sample) for sample in current}
    return Dataset(
        rows=tuple(ordered),
        manifest=manifest_of(
            ordered, seed=seed, replayed=sum(row.sample_id in earlier_ids for row in rows), general_passes=passes
        ),
        rejections=(*unused, *cut, *repeated, *over_cap, *long, *over_share, *long_chat),
    )


def manifest_of(rows: Sequence[TokenRow], *, seed: int, replayed: int = 0, general_passes: int = 0) -> Manifest:
    """Return the manifest of rows in training order."""
    trained: Counter[TurnClass] = Counter()
    for row in rows:
        trained.update(row.trained_tokens)
    return Manifest(
        dataset_hash=dataset_hash(rows),
        seed=seed,
        rows=len(rows),
        tokens=sum(len(row.input_ids) for row in rows),
        samples=Counter(row.kind for row in rows),
        trained_tokens=dict(trained),
        replayed=replayed,
        general_passes=general_passes,
    )


def draw_general(
    general: Sequence[Sample], count: int, renderer: Renderer, *, max_length: int, seed: int
) -> tuple[Filtered[TokenRow], int]:
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
        refused: set[str] = set()
        for sample in order:
            made = _general_row(sample, renderer, max_length)
            if isinstance(made, TokenRow):
                rows.append(made)
            else:
                rejections.append(made)
                refused.add(made.subject)
            if len(rows) == count:
                break
        if not rows:
            raise DataFault(
                f"{count} conversations of general data are wanted and none of {len(general)} "
                f"{_why_none(rejections, max_length)}, or set data.general.share to 0"
            )
        usable = tuple(sample for sample in usable if sample_id(sample) not in refused)
    return Filtered(tuple(rows), tuple(rejections)), passes


def _general_row(sample: Sample, renderer: Renderer, max_length: int) -> TokenRow | Rejection:
    """Return the row of a conversation from outside, or why it is not trained on: it may have a
    system turn that the chat template refuses, or a text that the tokenizer cannot write.
    """
    try:
        row = token_row(sample, renderer)
    except DataFault as fault:
        return Rejection(stage=STAGE, subject=sample_id(sample), reason="not-rendered", detail=str(fault))
    kept, long = too_long([row], max_length)
    return kept[0] if kept else long[0]


def _why_none(rejections: Sequence[Rejection], max_length: int) -> str:
    refused = [rejection.detail for rejection in rejections if rejection.reason == "not-rendered"]
    if refused:
        return f"can be used, since {refused[0]}; give data.general.file another file"
    return f"has at most {max_length} tokens; give data.general.file another file, raise data.max_length"


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
    fitting: list[_Pair] = []
    rejections: list[Rejection] = []
    # By what is in them: their ids contain the run.
    for key, preference in sorted(
        preferences.items(), key=lambda item: (content_order(item[1].chosen), content_order(item[1].rejected))
    ):
        made = _pair(key, preference, config, renderer)
        if isinstance(made, Rejection):
            rejections.append(made)
        else:
            fitting.append(made)
    world = {key: p.chosen.instance.environment for key, p in preferences.items() if p.chosen.instance}
    drawn, over_share = in_shares(
        fitting, shares or {}, world=lambda pair: world[pair[0]], subject=lambda pair: pair[0], seed=seed
    )
    pairs = list(drawn)
    random.Random(derive_seed(seed, "dataset-order")).shuffle(pairs)
    rows = tuple(row for _, *pair in pairs for row in pair)
    return Dataset(rows=rows, manifest=manifest_of(rows, seed=seed), rejections=(*rejections, *over_share))


def _pair(key: str, preference: Preference, config: DataConfig, renderer: Renderer) -> _Pair | Rejection:
    """Return the rows of both sides of a preference, or why it is not trained on."""
    if prompt_of(preference.chosen) != prompt_of(preference.rejected):
        raise DataFault(f"the sides of preference {key} have different prompts; build the pairs again")
    cut = sum(count_cut(side, renderer) for side in (preference.chosen, preference.rejected))
    if cut and config.cut_replies == "reject":
        return Rejection(stage=STAGE, subject=key, reason=CUT_REPLY, detail=cut_detail(cut))
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
            begun = tuple(takewhile(lambda span: not span.train, message.spans))
            return (*sample.messages[:position], *([grown_turn(begun)] if begun else []))
    return sample.messages
