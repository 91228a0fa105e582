"""The training set of a preference iteration: pairs checked, tokenised and put in order. Source:
ETO section 3.3.

A dataset of pairs has two rows for each: the chosen side at an even position, the rejected one
right after it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from itertools import takewhile

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.data import DataConfig
from agentr_core.samples.datasets import Dataset, manifest_of
from agentr_core.samples.filters import CUT_REPLY, STAGE, check_no_leakage, count_cut, cut_detail, in_shares
from agentr_core.samples.identity import content_order
from agentr_core.samples.rendering import Renderer
from agentr_core.samples.rows import TokenRow, token_row
from agentr_core.types import Instance, Message, Preference, Rejection, Sample, grown_turn

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
