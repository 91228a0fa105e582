"""Filters lose nothing and are idempotent, whatever the samples."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from toy_paths import renderer

from agentr_core.samples.dataset import (
    FilterResult,
    TokenRow,
    cap_good_per_tree,
    drop_duplicates,
    drop_too_long,
    drop_unused_kinds,
    token_row,
)
from agentr_core.samples.identity import sample_id
from agentr_core.types import Message, Provenance, Sample, SampleKind

samples = st.lists(
    st.builds(
        lambda kind, words, tree, leaf: Sample(
            kind=kind,
            messages=(
                Message(role="user", text="?"),
                *(
                    m
                    for w in words
                    for m in (Message(role="assistant", text=w, train=True), Message(role="user", text="!"))
                ),
            ),
            instance=None,
            provenance=Provenance(tree_id=tree, good_leaf=leaf),
        ),
        st.sampled_from([SampleKind.GOOD, SampleKind.EXPERT, SampleKind.GENERAL]),
        st.lists(st.sampled_from(["a", "bb", "a long reply"]), min_size=1, max_size=3),
        st.sampled_from(["t", "u"]),
        st.none() | st.integers(0, 3),
    ),
    max_size=12,
    unique_by=sample_id,
)


@given(samples, st.integers(0, 3), st.sampled_from(["revision", "good", "both"]))
def test_sample_filters(given_samples: list[Sample], cap: int, use: str) -> None:
    filters: list[Callable[[list[Sample]], FilterResult[Sample]]] = [
        drop_duplicates,
        lambda offered: cap_good_per_tree(offered, cap),
        lambda offered: drop_unused_kinds(offered, use),  # type: ignore[arg-type]
    ]
    for apply in filters:
        survivors, rejections = apply(given_samples)
        assert sorted([*map(sample_id, survivors), *(r.subject for r in rejections)]) == sorted(
            map(sample_id, given_samples)
        )
        assert list(survivors) == [sample for sample in given_samples if sample in survivors]
        assert apply(list(survivors)) == (survivors, ())


@given(samples, st.integers(0, 60))
def test_the_length_filter(given_samples: list[Sample], limit: int) -> None:
    rows: list[TokenRow] = [token_row(sample, renderer()) for sample in given_samples]
    survivors, rejections = drop_too_long(rows, limit)
    assert len(survivors) + len(rejections) == len(rows)
    assert all(len(row.input_ids) <= limit or not limit for row in survivors)
    assert drop_too_long(survivors, limit) == (survivors, ())
