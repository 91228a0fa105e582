"""The sentences of the revision turn."""

from __future__ import annotations

from agentr_core.reflections import REFLECTIONS, revision_text, revision_turn


def test_there_are_twenty_short_plain_sentences() -> None:
    assert len(set(REFLECTIONS)) == 20
    for sentence in REFLECTIONS:
        assert sentence.isascii()
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert 5 <= len(sentence.split()) <= 14


def test_a_revision_turn_is_a_trained_thought_with_the_dummy_action() -> None:
    turn = revision_turn(4)
    assert (turn.role, turn.train, turn.token_ids) == ("assistant", True, None)
    thought, action = turn.text.split("\n")
    assert thought.startswith("Thought: ")
    assert action == "Action: wait"
    assert revision_text(4) == turn.text
    assert len({revision_text(seed) for seed in range(400)}) == 20
