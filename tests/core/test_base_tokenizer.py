"""The tokenizer of the tiny base model: an item is a word, a reflection is a word, and ordinary
text survives.
"""

from __future__ import annotations

from typing import Any

import pretrain
import pytest
from base_settings import BaseConfig
from base_tokenizers import END, PAD
from crafting_samples import Curriculum

from agentr_core.environments.crafting.game import INSTRUCTION
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION
from agentr_core.methods.agent_r.splice import ACTION, REFLECTIONS
from agentr_core.samples.rendering import Renderer
from agentr_core.types import Message


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "TOKENIZER_SAMPLES", 150)
        return pretrain.make_tokenizer(BaseConfig(), 0)


def pieces(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.decode([number]) for number in tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    "text",
    [
        "Thought: stick using 2 planks; lacking nothing.\nAction: craft 4 stick using 2 oak planks",
        "Inventory: You are not carrying anything.",
        "Could not find enough items to craft unobtainium",
        "Naïve café, 東京 \N{SNOWMAN} and\ttabs\n\n\nlines   spaces ",
        "12 345, 6789 x7 7x",
        "Judgement: Uncertain",
        "",
    ],
)
def test_ordinary_text_survives(tokenizer: Any, text: str) -> None:
    assert "".join(pieces(tokenizer, text)) == text or "\N{SNOWMAN}" in text
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_ids_in_observations_are_read_as_names(tokenizer: Any) -> None:
    ids = tokenizer("Crafted 4 minecraft:oak_planks", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "Crafted 4 minecraft: oak planks"
    assert pieces(tokenizer, "Crafted 4 minecraft:oak_planks")[-1] == " oak planks"
    assert pieces(tokenizer, "Inventory: [oak planks] (4) ").count(" oak planks") == 1


def test_every_item_is_one_token_wherever_it_stands(tokenizer: Any) -> None:
    names = Curriculum(BaseConfig(), 0).name_texts()
    assert len(names) > 600
    for name in names:
        for text in (f"get 2{name}", f"craft 1{name} using 3{name}, 1{name}", f"Goal: craft{name}."):
            assert pieces(tokenizer, text).count(name) == text.count(name), text


def test_every_small_number_is_one_token(tokenizer: Any) -> None:
    for number in range(129):
        text = f"\nAction: get {number} stick"
        assert pieces(tokenizer, text) == ["\nAction:", " get", f" {number}", " stick"]


def test_a_reflection_and_an_instruction_are_one_token_each(tokenizer: Any) -> None:
    for sentence in REFLECTIONS:
        assert pieces(tokenizer, f"Thought: {sentence}\nAction: {ACTION}") == [
            "Thought:", f" {sentence}", "\nAction:", f" {ACTION}",
        ]  # fmt: skip
    for text in (INSTRUCTION, JUDGE_INSTRUCTION):
        assert pieces(tokenizer, text) == [text]


def test_a_conversation_is_framed_by_role_tokens(tokenizer: Any) -> None:
    messages = (Message(role="user", text=" get"), Message(role="assistant", text=" stick", train=True))
    row = Renderer(tokenizer).render_sample(messages)
    tokens = [tokenizer.convert_ids_to_tokens(number) for number in row.input_ids]
    assert tokens == ["<|user|>", "Ġget", END, "<|assistant|>", "Ġstick", END]
    assert row.labels == [-100] * 4 + row.input_ids[4:]
    assert tokenizer.pad_token == PAD


@pytest.mark.slow
def test_the_same_samples_make_the_same_tokenizer(tokenizer: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "TOKENIZER_SAMPLES", 150)
        second_tokenizer = pretrain.make_tokenizer(BaseConfig(), 0)
    assert second_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert sorted(second_tokenizer.get_vocab().values()) == list(range(len(second_tokenizer)))
