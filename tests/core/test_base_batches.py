"""Batches of the base model's training: few shapes, nothing lost but what is too long, no loss on
padding.
"""

from __future__ import annotations

import random

import pytest
from pretrain import LENGTHS, batches

from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.samples.rendering import RenderedSample

PAD = 0


def row(length: int, mark: int) -> RenderedSample:
    ids = [mark] * length
    return RenderedSample(ids, [IGNORE_INDEX] * (length // 2) + ids[length // 2 :])


def rows(lengths: list[int]) -> list[RenderedSample]:
    return [row(length, mark) for mark, length in enumerate(lengths, start=1)]


def test_shapes_come_from_a_short_list_and_hold_the_tokens_asked_for() -> None:
    rng = random.Random(0)
    all_batches = list(batches(rows([rng.randint(10, 2048) for _ in range(300)]), batch_tokens=4096, pad=PAD))
    assert all_batches
    for batch in all_batches:
        assert batch["input_ids"].shape == batch["labels"].shape
        count, length = batch["input_ids"].shape
        assert length in LENGTHS
        assert count == 4096 // length


def test_a_row_is_whole_and_the_rest_of_it_is_padding_without_loss() -> None:
    lengths = [5, 192, 193, 250, 7, 100, 256, 191]
    samples = rows(lengths)
    length_by_mark = {}
    for batch in batches(samples, batch_tokens=384, pad=PAD):
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            mark, size = ids[0], lengths[ids[0] - 1]
            assert ids[:size] == samples[mark - 1].input_ids
            assert labels[:size] == samples[mark - 1].labels
            assert set(ids[size:]) <= {PAD}
            assert set(labels[size:]) <= {IGNORE_INDEX}
            length_by_mark[mark] = len(ids)
    # Two rows of 192 fill a batch of 384 tokens, one of 256 does; the last short row waits for
    # another.
    assert length_by_mark == {1: 192, 2: 192, 3: 256, 4: 256, 5: 192, 6: 192, 7: 256}


def test_a_row_that_fits_no_shape_is_left_out() -> None:
    all_batches = list(batches(rows([2049, 2048]), batch_tokens=1024, pad=PAD))
    assert [batch["input_ids"].shape for batch in all_batches] == [(1, 2048)]
    assert all_batches[0]["input_ids"][0, 0] == 2


@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_of_just_the_length_is_not_padded(length: int) -> None:
    (batch,) = batches([row(length, 1)], batch_tokens=length, pad=PAD)
    assert batch["input_ids"].shape == (1, length)
    assert (batch["input_ids"] == 1).all()


def test_the_stream_is_read_no_further_than_needed() -> None:
    stream = iter(rows([100] * 10))
    next(batches(stream, batch_tokens=384, pad=PAD))
    assert len(list(stream)) == 8
