"""Filters: what they keep, what they turn away, and with which reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from toy import Line, instance
from toy_paths import ToyTree, critique, good_sample, renderer

from agentr_core.errors import DataFault
from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.samples.dataset import (
    cap_good_per_tree,
    check_flags,
    check_no_leakage,
    drop_duplicates,
    drop_too_long,
    drop_unused_kinds,
    token_row,
    turn_classes,
)
from agentr_core.samples.identity import sample_id
from agentr_core.types import Message, Provenance, Sample, SampleKind

ENV = Line()


def good(*actions: str, tree_id: str = "t") -> Sample:
    return good_sample(ToyTree(0, tree_id=tree_id).path(*actions), ENV)


def revision() -> Sample:
    pair = ToyTree(0).pair(["right", "right"], ["left", "stop"])
    sample = splice(pair, critique(0), ENV, SpliceConfig(), alpha=1.0, seed=0)
    assert isinstance(sample, Sample)
    return sample


def test_the_first_of_equal_conversations_is_kept() -> None:
    sample = good("right", "right")
    other_leaf = replace(sample, provenance=replace(sample.provenance, good_leaf=99))
    prompt_only = replace(sample, messages=(*sample.messages[:-1], replace(sample.messages[-1], train=False)))
    survivors, rejected = drop_duplicates([sample, other_leaf, prompt_only])
    assert survivors == (sample, prompt_only)
    assert [(r.stage, r.subject, r.reason) for r in rejected] == [("filter", sample_id(other_leaf), "duplicate")]
    assert sample_id(sample) in rejected[0].detail


def test_the_shortest_good_paths_of_each_tree_are_kept() -> None:
    long, short, middle = good(*["look"] * 5), good("right", "right"), good("look", "right", "right")
    elsewhere, revision_sample = good(*["left"] * 5, tree_id="u"), revision()
    survivors, rejected = cap_good_per_tree([long, short, elsewhere, revision_sample, middle], 2)
    assert survivors == (short, elsewhere, revision_sample, middle)
    assert [(r.subject, r.reason) for r in rejected] == [(sample_id(long), "good-per-tree-cap")]
    assert cap_good_per_tree([long, short, middle], 0) == ((long, short, middle), ())


def test_explored_successes_are_counted_by_instance() -> None:
    paths = [good(*["look"] * looks, "right", "right") for looks in (1, 0, 2)]
    samples = [replace(sample, provenance=Provenance()) for sample in paths]
    elsewhere = replace(samples[0], instance=instance(7))
    survivors, rejected = cap_good_per_tree([*samples, elsewhere], 1)
    assert survivors == (samples[1], elsewhere)
    assert {r.detail for r in rejected} == {f"instance {instance(0).key} keeps 1"}


def test_rows_of_too_many_tokens_are_rejected_and_never_cut() -> None:
    rows = [token_row(good(*["look"] * n), renderer()) for n in (1, 3)]
    limit = len(rows[0].input_ids)
    survivors, rejected = drop_too_long(rows, limit)
    assert survivors == (rows[0],)
    assert (rejected[0].subject, rejected[0].reason) == (rows[1].sample_id, "too-long")
    assert rejected[0].detail == f"{len(rows[1].input_ids)} tokens; a row may have {limit}"
    assert drop_too_long(rows, limit - 1).kept_items == ()
    assert drop_too_long(rows, 0).kept_items == tuple(rows)


def test_kinds_that_are_not_used_are_rejected_not_lost() -> None:
    samples = [good("right", "right"), revision()]
    for use, kinds in (("revision", ["revision"]), ("good", ["good"]), ("both", ["good", "revision"])):
        survivors, rejected = drop_unused_kinds(samples, use)  # type: ignore[arg-type]
        assert [s.kind for s in survivors] == kinds
        assert len(rejected) == 2 - len(survivors)


def test_a_sample_of_a_test_instance_fails_the_run() -> None:
    samples = [good("right", "right"), Sample(kind=SampleKind.GENERAL, messages=(), instance=None)]
    check_no_leakage(samples, [instance(1), replace(instance(0), split="test")])
    with pytest.raises(DataFault, match="1 held-out instances, or variants of these: line/train/0"):
        check_no_leakage(samples, [instance(0)])


def broken(position: int, train: bool, **changes: Any) -> Sample:
    sample = revision()
    messages = list(sample.messages)
    messages[position] = replace(messages[position], train=train)
    return replace(sample, messages=tuple(messages), **changes)


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        (broken(1, True), "keeps 1 bad steps and trains one of them"),
        (broken(3, True), "keeps 1 bad steps and trains one of them"),
        (broken(5, False), "or not the revision turn after them"),
        (broken(2, True), "trains turn 2, which is not the assistant's"),
        (broken(3, False, provenance=Provenance()), "does not say how many bad steps"),
        (replace(revision(), messages=(Message(role="user", text="?"),)), "has no trained turn"),
    ],
)
def test_a_wrong_train_flag_is_a_fault(sample: Sample, fault: str) -> None:
    check_flags(revision())
    with pytest.raises(DataFault, match=fault):
        check_flags(sample)
    with pytest.raises(DataFault, match=sample_id(sample)):
        token_row(sample, renderer())


def test_turn_classes_name_each_trained_turn() -> None:
    assert turn_classes(revision()) == ("revision_turn", "good_suffix", "good_suffix")
    assert turn_classes(good("right", "right")) == ("good_path", "good_path")
    assert turn_classes(replace(revision(), messages=())) == ()
