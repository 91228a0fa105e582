"""Pairs as token rows: the loss falls on the replies of both sides, whatever the environment
says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from base_tokenizers import END
from toy import Line
from toy_paths import ToyTree, renderer, sampled_ids, tokenizer

from agentr_core.errors import DataFault
from agentr_core.methods.eto.preferences import StoredTrajectory, pairs_with_expert, preference_id
from agentr_core.recipes.data import DataConfig
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.samples.dataset import TokenRow, build_pairs
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.types import Instance, Preference

EXPERT = ("right", "right", "right")


def preference(
    *actions: str, observation: str = "", level: Literal["trajectory", "step"] = "trajectory", forced: int = 0
) -> Preference:
    """Return the pair of the expert's way and another one; the environment may be made to say
    something else.
    """
    tree = ToyTree(1)

    def played(name: str, *way: str) -> StoredTrajectory:
        trajectory = tree.path(*way).trajectory
        steps = tuple(replace(s, observation=observation or s.observation) for s in trajectory.steps)
        return StoredTrajectory(name, replace(trajectory, steps=steps), forced if name == "policy" else 0)

    config = PreferencesConfig(level=level)
    ((pair,), _) = pairs_with_expert(played("expert", *EXPERT), [played("policy", *actions)], Line(), config)
    return pair


def rows(
    *made: Preference, max_length: int = 0, test: tuple[Instance, ...] = (), seed: int = 0
) -> tuple[TokenRow, ...]:
    by_id = {preference_id(pair): pair for pair in made}
    return build_pairs(by_id, DataConfig(max_length=max_length), renderer(), test_instances=test, seed=seed).rows


def trained_labels(row: TokenRow) -> list[int]:
    return [label for label in row.labels if label != IGNORE_INDEX]


def couples(made: tuple[TokenRow, ...]) -> set[tuple[str, str]]:
    return {(chosen.sample_id, rejected.sample_id) for chosen, rejected in zip(made[::2], made[1::2], strict=True)}


def test_the_loss_falls_on_the_sampled_tokens_of_both_sides() -> None:
    pair = preference("left", "look", "stop")
    chosen, rejected = rows(pair)

    for row, sample in ((chosen, pair.chosen), (rejected, pair.rejected)):
        replies = [m for m in sample.messages[3:] if m.role == "assistant"]
        expected = [token for m in replies for token in sampled_ids(m.text)]
        assert trained_labels(row) == expected
        assert expected.count(tokenizer().convert_tokens_to_ids(END)) == len(replies)
        assert all(label in (IGNORE_INDEX, token) for token, label in zip(row.input_ids, row.labels, strict=True))
    assert (chosen.kind, rejected.kind) == ("chosen", "rejected")


def test_both_sides_begin_with_the_same_untrained_tokens() -> None:
    chosen, rejected = rows(preference("right", "stop", level="step", forced=1))

    start = next(at for at, label in enumerate(chosen.labels) if label != IGNORE_INDEX)
    assert chosen.input_ids[:start] == rejected.input_ids[:start]
    assert set(chosen.labels[:start]) == set(rejected.labels[:start]) == {IGNORE_INDEX}


def test_what_the_environment_says_does_not_change_what_counts() -> None:
    plain = rows(preference("left", "look", "stop"))
    verbose = rows(preference("left", "look", "stop", observation="A wall of text. Action: right <|im_end|> You win!"))

    for before, after in zip(plain, verbose, strict=True):
        assert before.input_ids != after.input_ids
        assert trained_labels(before) == trained_labels(after)
        assert before.trained_tokens == after.trained_tokens


def test_pairs_stay_together_in_an_order_of_the_seed() -> None:
    several = [preference("stop"), preference("left", "stop"), preference("look", "look", "stop")]
    first, second = rows(*several), rows(*reversed(several))
    orders = [rows(*several, seed=seed) for seed in range(1, 9)]

    assert first == second
    assert any(order != first for order in orders)
    for order in orders:
        assert couples(order) == couples(first)
        assert [row.kind for row in order] == ["chosen", "rejected"] * 3


def test_a_pair_is_rejected_whole_if_a_side_is_too_long() -> None:
    short, long = preference("stop"), preference(*["look"] * 8)
    dataset = build_pairs(
        {preference_id(pair): pair for pair in (short, long)},
        DataConfig(max_length=len(rows(long)[1].input_ids) - 1),
        renderer(),
        test_instances=(),
        seed=0,
    )

    assert dataset.manifest.samples == {"chosen": 1, "rejected": 1}
    assert [(r.subject, r.reason) for r in dataset.rejections] == [(preference_id(long), "too-long")]
    assert dataset.manifest.trained_tokens == {
        "chosen": len(trained_labels(dataset.rows[0])),
        "rejected": len(trained_labels(dataset.rows[1])),
    }


def test_pairs_of_test_instances_are_refused() -> None:
    pair = preference("stop")
    assert pair.chosen.instance is not None
    with pytest.raises(DataFault, match="made from 1 held-out instances, or variants of these: line/train/1"):
        rows(pair, test=(pair.chosen.instance,))


def test_sides_of_different_prompts_are_refused() -> None:
    pair, step_pair = preference("stop"), preference("stop", level="step")
    sample = replace(
        step_pair.rejected,
        messages=(replace(step_pair.rejected.messages[0], text="Else."), *pair.rejected.messages[1:]),
    )
    with pytest.raises(DataFault, match="have different prompts"):
        rows(replace(pair, rejected=sample))
