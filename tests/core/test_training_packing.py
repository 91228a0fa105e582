"""Packing changes where tokens lie, never what is learned from them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_jobs import random_row
from transformers import AutoModelForCausalLM

from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.training.packing import (
    ROW_LENGTH,
    TokenRow,
    bins,
    forward_passes,
    max_rows_per_pass,
    num_trained_tokens,
    padded_length,
)
from agentr_core.training.parent import packing_faults

LENGTHS = [40, 130, 75, 300, 64, 65, 22]


@pytest.fixture(scope="module")
def rows() -> list[TokenRow]:
    return [TokenRow(*random_row(length, seed)) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=["tiny_model_dir", "windowed_model_dir"])
def model(request: pytest.FixtureRequest) -> Any:
    path = request.getfixturevalue(request.param)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def target_losses(model: Any, passes: list[dict[str, torch.Tensor]]) -> dict[tuple[int, ...], float]:
    """Return the loss of every trained token, by the token ids of its sample and its place in
    it.
    """
    losses = {}
    for batch in passes:
        with torch.no_grad():
            # As the trainer does: with a cache transformers would not look for restarting
            # positions.
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        for ids, labels, positions, scores in zip(
            batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist(), logits, strict=True
        ):
            for place in [place for place, label in enumerate(labels) if label != IGNORE_INDEX]:
                start = place - positions[place]
                loss = torch.nn.functional.cross_entropy(scores[place - 1], torch.tensor(labels[place]))
                losses[tuple(ids[start : place + 1])] = float(loss)
    return losses


@pytest.mark.parametrize("rows_per_pass", [1, 3])
def test_packed_and_unpacked_rows_have_the_same_loss_on_every_trained_token(
    model: Any, rows: list[TokenRow], rows_per_pass: int
) -> None:
    packed_passes = forward_passes(rows, packing=True, rows_per_pass=rows_per_pass)
    single_passes = [
        {
            "input_ids": torch.tensor([row.input_ids]),
            "labels": torch.tensor([row.labels]),
            "position_ids": torch.arange(len(row.labels))[None],
        }
        for row in rows
    ]

    assert sum(len(batch["labels"]) for batch in packed_passes) < len(rows)
    expected, losses = target_losses(model, single_passes), target_losses(model, packed_passes)
    assert losses.keys() == expected.keys()
    assert len(expected) == sum(map(num_trained_tokens, rows))
    assert max(abs(losses[key] - expected[key]) for key in expected) < 2e-5


def test_a_sample_does_not_feel_its_neighbours_in_a_row(model: Any, rows: list[TokenRow]) -> None:
    first, middle, last = rows[0], rows[2], rows[4]
    neighbours = [TokenRow(*random_row(len(row.labels), 90 + index)) for index, row in enumerate((first, last))]

    def middle_losses(before: TokenRow, after: TokenRow) -> list[float]:
        (batch,) = forward_passes([before, middle, after], packing=True, rows_per_pass=1)
        losses = target_losses(model, [batch])
        return [
            losses[middle.input_ids[: place + 1]] for place, label in enumerate(middle.labels) if label != IGNORE_INDEX
        ]

    assert middle_losses(first, last) == middle_losses(neighbours[0], neighbours[1])


def test_unpacked_rows_hold_one_sample_each(rows: list[TokenRow]) -> None:
    passes = forward_passes(rows, packing=False, rows_per_pass=2)

    assert [len(batch["labels"]) for batch in passes] == [2, 2, 2, 1]
    assert all((batch["position_ids"] == torch.arange(batch["labels"].shape[1])).all() for batch in passes)


def test_every_sample_is_in_exactly_one_row_and_rows_are_not_overfilled() -> None:
    lengths = [700, 30, 31, 500, 12, 260, 255, 700]
    groups = bins(lengths, packing=True)

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in group) for group in groups) <= max(ROW_LENGTH, padded_length(700))


def test_a_first_token_is_never_a_target() -> None:
    row = TokenRow((5, 6, 7), (5, 6, IGNORE_INDEX))

    (batch,) = forward_passes([row, row], packing=True, rows_per_pass=1)
    assert num_trained_tokens(row) == 1
    assert batch["labels"][0, :6].tolist() == [IGNORE_INDEX, 6, IGNORE_INDEX, IGNORE_INDEX, 6, IGNORE_INDEX]


def test_lengths_are_few_and_waste_little() -> None:
    lengths = {tokens: padded_length(tokens) for tokens in range(1, 8193)}

    assert all(length >= tokens for tokens, length in lengths.items())
    assert all(length <= tokens * 1.25 for tokens, length in lengths.items() if tokens > 256)
    assert len(set(lengths.values())) <= 24


def test_flash_attention_gets_passes_of_one_packed_row() -> None:
    plain, flash = TrainingConfig(), TrainingConfig(attn_implementation="flash_attention_2", bf16=True)
    assert [max_rows_per_pass(config, 8) for config in (plain, flash, replace(flash, packing=False))] == [8, 1, 8]


def test_layers_that_are_no_attention_take_one_sample_a_row() -> None:
    hybrid = SimpleNamespace(layer_types=["full_attention", "linear_attention"])
    (fault,) = packing_faults(hybrid, TrainingConfig())
    assert fault.startswith("training.packing: layers of kind linear_attention would mix the samples of a row")
    assert packing_faults(hybrid, TrainingConfig(packing=False)) == []
    assert packing_faults(SimpleNamespace(layer_types=["full_attention", "sliding_attention"]), TrainingConfig()) == []
    assert packing_faults(SimpleNamespace(), TrainingConfig()) == []
