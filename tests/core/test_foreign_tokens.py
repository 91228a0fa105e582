"""Token ids mean something to the tokenizer that made them, and to no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from base_tokenizers import build_tokenizer
from toy import Line, generation, instance
from toy_paths import ToyTree, good_sample, renderer, sampled_ids, tokenizer

from agentr_core.episodes.rollout import act
from agentr_core.episodes.transcript import AlternatingTurns, without_foreign_tokens
from agentr_core.recipes.data import DataConfig
from agentr_core.samples.dataset import build_dataset
from agentr_core.samples.identity import sample_id
from agentr_core.samples.rendering import Renderer
from agentr_core.store.codec.trajectories import load_draws, load_trajectories, trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import Draw
from agentr_core.types import Message, Step

TEXT = "Thought: I go on.\nAction: right"


@pytest.fixture(scope="module")
def other() -> Renderer:
    """A renderer of a tokenizer with other words, so that its ids mean something else."""
    return Renderer(build_tokenizer(["Search the shop.", "click[buy]"]))


def conversation(reply: Message) -> tuple[Message, ...]:
    return Message(role="user", text="?"), reply, Message(role="user", text="?")


def sampled_reply(of: str | None) -> Message:
    return Message(
        role="assistant", text=TEXT, train=True, token_ids=sampled_ids(TEXT), finish_reason="stop", tokenizer=of
    )


def test_ids_of_the_own_tokenizer_are_used_as_they_are() -> None:
    rendering = renderer().render_sample(conversation(sampled_reply(renderer().fingerprint)))
    assert rendering == renderer().render_sample(conversation(sampled_reply(None)))
    assert sampled_ids(TEXT) == tuple(label for label in rendering.labels if label >= 0)


def test_ids_of_another_tokenizer_are_not_trained_but_their_text(other: Renderer) -> None:
    foreign = sampled_reply(other.fingerprint)
    text_reply = replace(foreign, token_ids=None)
    assert renderer().render_sample(conversation(foreign)) == renderer().render_sample(conversation(text_reply))
    assert renderer().render_prompt(conversation(foreign)) == renderer().render_prompt(conversation(text_reply))
    ids, labels = renderer().render_sample(conversation(foreign))
    assert tokenizer().decode([label for label in labels if label >= 0]) == TEXT + "<|end|>"
    assert tokenizer().decode(ids).count(TEXT) == 1


def test_a_foreign_reply_that_was_cut_is_still_not_trained_to_end(other: Renderer) -> None:
    cut = replace(sampled_reply(other.fingerprint), finish_reason="length")
    _, labels = renderer().render_sample(conversation(cut))
    assert renderer().end_of_turn not in labels
    unknown = replace(cut, finish_reason=None)
    assert not renderer().is_cut(unknown), "ids of another tokenizer tell nothing"


def test_the_fingerprint_is_of_vocabulary_special_tokens_and_template(make_tiny_tokenizer: Callable[..., Any]) -> None:
    plain = make_tiny_tokenizer()
    assert Renderer(plain).fingerprint == Renderer(make_tiny_tokenizer()).fingerprint
    smaller, with_template, with_tokens = make_tiny_tokenizer(300), make_tiny_tokenizer(), make_tiny_tokenizer()
    with_template.chat_template = with_template.chat_template.replace("assistant\n", "assistant: ")
    with_tokens.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "get"]})
    fingerprints = {Renderer(variant).fingerprint for variant in (plain, smaller, with_template, with_tokens)}
    assert len(fingerprints) == 4


def test_a_dataset_of_another_tokenizers_replies_is_that_of_their_texts(other: Renderer) -> None:
    path = ToyTree(1).path("right", "right", "right")
    steps = [replace(step, finish_reason="stop", tokenizer=other.fingerprint) for step in path.trajectory.steps]
    foreign = good_sample(replace(path, trajectory=replace(path.trajectory, steps=tuple(steps))), Line())
    texts = replace(foreign, messages=tuple(replace(m, token_ids=None) for m in foreign.messages))
    dataset, expected = (
        build_dataset([s], DataConfig(), renderer(), test_instances=[], seed=0) for s in (foreign, texts)
    )
    assert dataset.manifest.dataset_hash == expected.manifest.dataset_hash
    assert [row.sample_id for row in dataset.rows] == [sample_id(foreign)]


def test_the_tokenizer_of_a_reply_reaches_step_message_and_store(tmp_path: Path) -> None:
    world = Line()
    observation = world.reset(instance(1))
    reply = replace(generation(TEXT), tokenizer="abc")
    step = act(world, reply).step
    assert (step.tokenizer, AlternatingTurns().prompt(world, observation, [step])[3].tokenizer) == ("abc", "abc")
    path = ToyTree(1).path("right")
    trajectory = replace(path.trajectory, first_observation=observation, steps=(step, replace(step, tokenizer=None)))
    store = Store(tmp_path / "store.duckdb")
    store.write(trajectory_rows("t", trajectory, source="rollout", draws={0: Draw(seed=1, number=0, generation=reply)}))
    assert load_trajectories(store, ["t"])["t"] == trajectory
    assert load_draws(store, "step", ["t"])["t"][0][0].generation == reply


def test_ids_that_another_run_stored_without_saying_whose_are_left_out() -> None:
    marked_step = Step(
        reply="a", action="a", observation="b", reward=0.0, token_ids=(5,), logprobs=(-1.0,), tokenizer="abc"
    )
    unmarked_step = replace(marked_step, tokenizer=None)
    assert without_foreign_tokens([marked_step, unmarked_step]) == (
        marked_step,
        replace(unmarked_step, token_ids=(), logprobs=None),
    )
