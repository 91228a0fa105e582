"""Which part of a splice each turn of an example belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from toy import Line
from toy_paths import ToyTree, critique

from agentr_core.methods.agent_r.report_examples import _turns
from agentr_core.methods.agent_r.splicing import splice
from agentr_core.recipes import SpliceConfig
from agentr_core.types import Sample


def parts(error: int) -> Sequence[str]:
    pair = ToyTree(0).pair(["look", "look", "right", "right"], ["look", "look", "left", "stop"])
    config = SpliceConfig(mode="blind", shared_cut="keep")
    made = splice(pair, critique(error), Line(), config, alpha=1.0, seed=0)
    assert isinstance(made, Sample)
    return [turn.part for turn in _turns(made, critique(error)) if turn.role == "assistant"][1:]


def test_a_turn_of_revision_is_one_also_where_the_cut_lies_in_the_shared_steps() -> None:
    assert parts(2) == ["shared", "shared", "bad", "revision", "good", "good"]
    assert parts(0) == ["shared", "revision", "good", "good", "good"]
