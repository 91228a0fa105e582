"""Revisions with the suffixes of other instances: what stays, what changes, and what cannot be
exchanged.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy import Line
from toy_paths import ToyTree, critique, good_sample

from agentr_core.errors import DataFault
from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.samples.dataset import check_flags, exchange_suffixes, turn_classes
from agentr_core.samples.identity import sample_id
from agentr_core.types import Message, Sample, grown_turn

ENV = Line()


def revision(index: int, *bad: str) -> Sample:
    tree = ToyTree(index, tree_id=f"t{index}", thought=f"I am in tree {index}.")
    sample = splice(
        tree.pair(["right", "right"], ["look", *bad]), critique(None, 3), ENV, SpliceConfig(), alpha=1.0, seed=0
    )
    assert isinstance(sample, Sample)
    return sample


def parts(sample: Sample) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return what a revision has up to the answer to its turn of revision, and what comes then."""
    cut = next(place for place, message in enumerate(sample.messages) if message.train) + 2
    return sample.messages[:cut], sample.messages[cut:]


REVISIONS = [revision(0, "look"), revision(0, "left"), revision(1, "look"), revision(2, "look"), revision(2, "left")]


def test_each_prefix_goes_on_with_a_suffix_of_another_instance_and_no_suffix_comes_twice() -> None:
    controls, rejected = exchange_suffixes(reversed(REVISIONS))
    assert rejected == ()
    by_id = {sample_id(sample): sample for sample in REVISIONS}
    prefixes, suffixes = ([sample.provenance.extra[name] for sample in controls] for name in ("prefix_of", "suffix_of"))
    assert sorted(prefixes) == sorted(suffixes) == sorted(by_id)
    for control, prefix, suffix in zip(controls, prefixes, suffixes, strict=True):
        assert parts(control) == (parts(by_id[prefix])[0], parts(by_id[suffix])[1])
        assert control.instance == by_id[prefix].instance != by_id[suffix].instance
        assert control.provenance.cut == by_id[prefix].provenance.cut
        check_flags(control)
        assert turn_classes(control)[0] == "revision_turn"
    assert exchange_suffixes(REVISIONS) == (controls, ()), "in whatever order they come"


def test_other_samples_stay_as_they_are() -> None:
    good = good_sample(ToyTree(1).path("right", "right"), ENV)
    assert exchange_suffixes([good, *REVISIONS]).kept_items[0] == good
    assert exchange_suffixes([good]) == ((good,), ())


def test_what_cannot_be_cut_is_turned_away() -> None:
    grown = replace(
        REVISIONS[0], messages=(*REVISIONS[0].messages[:-1], grown_turn([*REVISIONS[0].messages[-1].parts]))
    )
    later = replace(REVISIONS[0], provenance=replace(REVISIONS[0].provenance, extra={"stretch": 1}))
    controls, rejected = exchange_suffixes([grown, later, *REVISIONS])
    assert len(controls) == len(REVISIONS)
    assert [(rejection.subject, rejection.reason) for rejection in rejected] == [
        (sample_id(sample), "no-suffix-of-its-own") for sample in (grown, later)
    ]


def test_too_much_of_one_instance_is_told() -> None:
    with pytest.raises(DataFault, match="2 of 3 revision samples are of one instance"):
        exchange_suffixes(REVISIONS[:3])
