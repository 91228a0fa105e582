"""The training set of a preference iteration: pairs checked, tokenised and put in order. Source:
ETO section 3.3.

A dataset of pairs has two rows for each: the chosen side at an even place, the rejected one right
after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping

from agentr_core.errors import DataFault
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes import DataConfig
from agentr_core.samples.datasets import Dataset, Manifest, dataset_hash
from agentr_core.samples.filters import CUT_REPLY, STAGE, check_no_leakage, count_cut, cut_detail
from agentr_core.samples.identity import TurnClass
from agentr_core.samples.rendering import Renderer
from agentr_core.samples.rows import TokenRow, token_row
from agentr_core.types import Instance, Message, Preference, Rejection, Sample


def build_pairs(
    preferences: Mapping[str, Preference],
    config: DataConfig,
    renderer: Renderer,
    *,
    test: Collection[Instance],
    seed: int,
) -> Dataset:
    """Return the dataset of preferences, by id; it is empty when none of them may be trained on.

    Args:
        config: only `max_length` and `cut_replies` are read; they hold for each side.
        test: the instances that must not occur.

    Raises:
        DataFault: a pair is of a test instance, its sides have different prompts, or a side would
            train a turn that must not be trained.
    """
    check_no_leakage([side for p in preferences.values() for side in (p.chosen, p.rejected)], test)
    pairs: list[tuple[TokenRow, TokenRow]] = []
    rejections: list[Rejection] = []
    for key, preference in sorted(preferences.items()):
        if prompt_of(preference.chosen) != prompt_of(preference.rejected):
            raise DataFault(f"the sides of preference {key} have different prompts; build the pairs again")
        cut = sum(count_cut(side, renderer) for side in (preference.chosen, preference.rejected))
        if cut and config.cut_replies == "reject":
            rejections.append(Rejection(stage=STAGE, subject=key, reason=CUT_REPLY, detail=cut_detail(cut)))
            continue
        chosen, rejected = token_row(preference.chosen, renderer), token_row(preference.rejected, renderer)
        longest = max(len(chosen.input_ids), len(rejected.input_ids))
        if config.max_length and longest > config.max_length:
            detail = f"a side has {longest} tokens; data.max_length is {config.max_length}"
            rejections.append(Rejection(stage=STAGE, subject=key, reason="too-long", detail=detail))
        elif (chosen.input_ids, chosen.labels) == (rejected.input_ids, rejected.labels):
            rejections.append(Rejection(stage=STAGE, subject=key, reason="same-tokens"))
        else:
            pairs.append((chosen, rejected))
    random.Random(derive_seed(seed, "dataset-order")).shuffle(pairs)
    rows = tuple(row for pair in pairs for row in pair)
    trained: Counter[TurnClass] = Counter()
    for row in rows:
        trained.update(row.trained_tokens)
    return Dataset(
        rows=rows,
        manifest=Manifest(
            dataset_hash=dataset_hash(rows),
            seed=seed,
            rows=len(rows),
            tokens=sum(len(row.input_ids) for row in rows),
            samples=Counter(row.kind for row in rows),
            trained_tokens=dict(trained),
            replayed=0,
            general_passes=0,
        ),
        rejections=tuple(rejections),
    )


def prompt_of(sample: Sample) -> tuple[Message, ...]:
    """Return the turns of a side before its first trained one."""
    start = next((position for position, m in enumerate(sample.messages) if m.train), len(sample.messages))
    return sample.messages[:start]
