"""The sentences of the revision turn."""

from __future__ import annotations

from agentr_core.methods.agent_r.splice import REFLECTIONS, revision_text


def test_there_are_twenty_short_plain_sentences() -> None:
    assert len(set(REFLECTIONS)) == 20
    for sentence in REFLECTIONS:
        assert sentence.isascii()
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert 5 <= len(sentence.split()) <= 14


def test_a_revision_turn_is_a_thought_with_the_dummy_action() -> None:
    thought, action = revision_text(4).split("\n")
    assert thought.startswith("Thought: ")
    assert action == "Action: wait"
    assert len({revision_text(seed) for seed in range(400)}) == 20


def test_fewer_sentences_and_another_action_are_a_choice() -> None:
    assert {revision_text(seed, "inventory", 1) for seed in range(50)} == {
        f"Thought: {REFLECTIONS[0]}\nAction: inventory"
    }
    assert len({revision_text(seed, sentences=3) for seed in range(100)}) == 3
