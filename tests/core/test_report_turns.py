"""Which part of a splice each turn of an example belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from toy import Line
from toy_paths import ToyTree, critique

from agentr_core.methods.agent_r.report import _example_turns
from agentr_core.methods.agent_r.splice import splice
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.texts import count_text
from agentr_core.types import Sample


def parts(error: int) -> Sequence[str]:
    pair = ToyTree(0).pair(["look", "look", "right", "right"], ["look", "look", "left", "stop"])
    config = SpliceConfig(mode="blind", shared_cut="keep")
    sample = splice(pair, critique(error), Line(), config, alpha=1.0, seed=0)
    assert isinstance(sample, Sample)
    return [turn.part for turn in _example_turns(sample, critique(error), 4000) if turn.role == "assistant"][1:]


def test_a_turn_of_revision_is_one_also_where_the_cut_lies_in_the_shared_steps() -> None:
    assert parts(2) == ["shared", "shared", "bad", "revision", "good", "good"]
    assert parts(0) == ["shared", "revision", "good", "good", "good"]


def test_a_report_quotes_no_more_of_a_turn_than_the_recipe_says() -> None:
    pair = ToyTree(0).pair(["look", "look", "right", "right"], ["look", "look", "left", "stop"])
    sample = splice(pair, critique(2), Line(), SpliceConfig(mode="blind"), alpha=1.0, seed=0)
    assert isinstance(sample, Sample)
    whole, cut = _example_turns(sample, critique(2), 4000), _example_turns(sample, critique(2), 10)
    long = [(full.text, short.text) for full, short in zip(whole, cut, strict=True) if len(full.text) > 10]
    assert long
    assert all(
        excerpt == f"{text[:10]}\n[... {count_text(len(text) - 10, 'character')} more]" for text, excerpt in long
    )
    assert max(len(turn.judge_reply) for turn in cut) < 40
