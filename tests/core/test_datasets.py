"""Datasets: what is mixed in, in which order, and what the manifest says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from toy import Line, instance
from toy_paths import ToyTree, critique, good_sample, renderer

from agentr_core.errors import DataFault
from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.recipes.data import DataConfig, GeneralDataConfig
from agentr_core.samples.dataset import build_dataset, draw_general, token_row
from agentr_core.samples.identity import sample_id
from agentr_core.samples.rendering import Renderer
from agentr_core.types import Instance, Message, Provenance, Sample, SampleKind

ENV = Line()
TEST = [replace(instance(i), split="test") for i in range(5)]


def collect_samples() -> list[Sample]:
    """Eight good and eight revision samples of two trees."""
    samples = []
    for tree_id in "ab":
        tree = ToyTree(0, tree_id=tree_id, thought=f"I am in tree {tree_id}.")
        for first, second in product(("look", "left"), repeat=2):
            samples.append(good_sample(tree.path(first, second, *["right"] * 4), ENV))
            pair = tree.pair(["right", "right"], ["look", first, second])
            sample = splice(pair, critique(None, 3), ENV, SpliceConfig(), alpha=1.0, seed=0)
            assert isinstance(sample, Sample)
            samples.append(sample)
    return samples


def chat(count: int, words: int = 3) -> list[Sample]:
    return [
        Sample(
            kind=SampleKind.GENERAL,
            messages=(Message(role="user", text=f"{i}?"), Message(role="assistant", text="yes " * words, train=True)),
            instance=None,
            provenance=Provenance(extra={"line": i}),
        )
        for i in range(count)
    ]


def build(samples: list[Sample], config: DataConfig | None = None, *, test: list[Instance] = TEST, **options):  # type: ignore[no-untyped-def]
    return build_dataset(samples, config or DataConfig(), renderer(), test_instances=test, **{"seed": 0, **options})


def test_equal_conversations_of_two_pairs_count_once_or_as_often_as_they_were_made() -> None:
    """Two bad paths that part after their first error give one good path the same revision."""
    tree = ToyTree(0)
    pairs = [tree.pair(["right", "right"], ["left", last]) for last in ("look", "left")]
    first, second = (splice(pair, critique(0), ENV, SpliceConfig(reflections=1), alpha=1.0, seed=0) for pair in pairs)
    assert isinstance(first, Sample)
    assert isinstance(second, Sample)
    assert first.messages == second.messages
    dataset = build([first, second])
    assert len(dataset.rows) == 1
    assert [rejection.reason for rejection in dataset.rejections] == ["duplicate"]
    full_dataset = build([first, second], DataConfig(duplicates="keep"))
    assert {row.sample_id for row in full_dataset.rows} == {sample_id(first), sample_id(second)}
    assert full_dataset.rejections == ()


def test_every_sample_ends_in_a_row_or_in_a_rejection() -> None:
    samples = collect_samples()
    longest = max(len(token_row(sample, renderer()).input_ids) for sample in samples)
    dataset = build(samples, DataConfig(good_per_tree=3, max_length=longest - 1))
    rows = [row.sample_id for row in dataset.rows]
    rejected = [rejection.subject for rejection in dataset.rejections]
    assert sorted(rows + rejected) == sorted(sample_id(sample) for sample in samples)
    assert {r.reason for r in dataset.rejections} == {"good-per-tree-cap", "too-long"}
    assert {row.sample_id: row for row in dataset.rows} == {
        sample_id(s): token_row(s, renderer()) for s in samples if sample_id(s) in rows
    }


def test_the_manifest_counts_rows_and_trained_tokens() -> None:
    dataset = build(collect_samples())
    manifest = dataset.manifest
    assert manifest.rows == len(dataset.rows) == 16
    assert manifest.samples == {SampleKind.GOOD: 8, SampleKind.REVISION: 8}
    assert manifest.tokens == sum(len(row.input_ids) for row in dataset.rows)
    assert set(manifest.trained_tokens) == {"revision_turn", "good_suffix", "good_path"}
    trained = sum(label != -100 for row in dataset.rows for label in row.labels)
    assert sum(manifest.trained_tokens.values()) == trained
    assert (manifest.replayed, manifest.general_passes) == (0, 0)


def test_the_hash_depends_on_content_and_seed_but_not_on_the_order_of_collection() -> None:
    samples = collect_samples()
    permutation = random.Random(3).sample(samples, len(samples))
    first = build(samples)
    assert build(permutation) == first
    second = build(samples, seed=1)
    assert second.manifest.dataset_hash != first.manifest.dataset_hash
    assert sorted(r.sample_id for r in second.rows) == sorted(r.sample_id for r in first.rows)
    assert build(samples[1:]).manifest.dataset_hash != first.manifest.dataset_hash


def test_use_selects_the_kind() -> None:
    for use, kind in (("revision", SampleKind.REVISION), ("good", SampleKind.GOOD)):
        dataset = build(collect_samples(), DataConfig(use=use))  # type: ignore[arg-type]
        assert dataset.manifest.samples == {kind: 8}
        assert [r.reason for r in dataset.rejections] == ["kind-not-used"] * 8


def test_earlier_samples_are_used_once_and_only_if_the_recipe_replays() -> None:
    samples = collect_samples()
    assert build(samples[:6], earlier_samples=samples[4:]) == build(samples[:6])
    dataset = build(samples[:6], DataConfig(replay=True), earlier_samples=samples[4:])
    assert (dataset.manifest.rows, dataset.manifest.replayed) == (16, 10)


def test_general_data_has_its_share_and_no_repeats_while_there_is_enough() -> None:
    config = DataConfig(general=GeneralDataConfig(file="chat.jsonl", share=0.8))
    dataset = build(collect_samples(), config, general_samples=chat(100))
    assert dataset.manifest.samples[SampleKind.GENERAL] == 64
    assert dataset.manifest.trained_tokens["general"] > 0
    ids = [row.sample_id for row in dataset.rows if row.kind is SampleKind.GENERAL]
    assert len(set(ids)) == 64
    assert dataset.manifest.general_passes == 1
    assert dataset.rows != tuple(sorted(dataset.rows, key=lambda row: row.kind))


def test_scarce_general_data_is_repeated_evenly_and_the_manifest_says_so() -> None:
    config = DataConfig(max_length=600, general=GeneralDataConfig(file="chat.jsonl", share=0.5))
    dataset = build(collect_samples(), config, general_samples=[*chat(5), *chat(2, words=300)])
    ids = [row.sample_id for row in dataset.rows if row.kind is SampleKind.GENERAL]
    assert sorted(ids.count(key) for key in set(ids)) == [3, 3, 3, 3, 4]
    assert dataset.manifest.general_passes == 4
    assert [r.reason for r in dataset.rejections] == ["too-long"] * 2


def test_general_samples_of_a_former_build_change_nothing() -> None:
    config = DataConfig(replay=True, general=GeneralDataConfig(file="chat.jsonl", share=0.5))
    samples, general = collect_samples(), chat(40)
    once = build(samples, config, general_samples=general)
    assert build([*samples, *general[:20]], config, general_samples=general, earlier_samples=general) == once


def test_general_data_that_cannot_be_used_is_a_fault() -> None:
    config = DataConfig(max_length=600, general=GeneralDataConfig(file="chat.jsonl", share=0.5))
    for general in ([], chat(2, words=300)):
        with pytest.raises(DataFault, match=f"16 conversations .* none of {len(general)} has at most 600 tokens"):
            build(collect_samples(), config, general_samples=general)


def test_a_conversation_that_cannot_be_rendered_is_rejected_and_the_others_are_used(
    make_tiny_tokenizer: Callable[..., Any],
) -> None:
    # As Gemma's: there is no system turn.
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    strict = Renderer(make_tiny_tokenizer(template=template))
    plain = chat(1)[0]
    with_system = replace(plain, messages=(Message(role="system", text="Be brief."), *plain.messages))
    (rows, rejections), passes = draw_general([with_system, *chat(3)], 4, strict, max_length=0, seed=0)
    assert (len(rows), passes) == (4, 2)
    assert [(rejection.subject, rejection.reason) for rejection in rejections] == [
        (sample_id(with_system), "not-rendered")
    ]
    assert "no system role" in rejections[0].detail
    with pytest.raises(DataFault, match=r"none of 1 can be used, since .* no system role"):
        draw_general([with_system], 2, strict, max_length=0, seed=0)


def test_a_test_instance_fails_the_build() -> None:
    with pytest.raises(DataFault, match="line/train/0"):
        build(collect_samples(), test=[instance(0)])


def test_nothing_to_train_on_gives_an_empty_dataset() -> None:
    dataset = build([], DataConfig(general=GeneralDataConfig(file="chat.jsonl", share=0.8)), general_samples=chat(3))
    assert dataset.rows == ()
    assert dataset.manifest.rows == 0
