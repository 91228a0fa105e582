"""Chat templates that come along, held against those of the models they are for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from agentr_core.errors import DataFault, ModelDirectoryError
from agentr_core.samples.rendering import Renderer
from agentr_core.system import data_path
from agentr_core.types import Message
from flows.preflight.checks import check
from tasks.wiring import load_recipe

ROOT = Path(__file__).parents[2]
OWN = data_path("chat_templates", "qwen3.jinja").read_text(encoding="utf-8")
PUBLISHED = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
"""Qwen3's, as TRL keeps it."""
TALK = (
    Message(role="system", text="Craft."),
    Message(role="user", text="Goal: stick."),
    Message(role="assistant", text="Thought: planks.\nAction: get 2 planks", train=True),
    Message(role="user", text="Got 2 planks"),
    Message(role="assistant", text="Action: craft 4 stick using 2 planks", train=True),
)


@pytest.fixture
def tokenizer(make_tiny_tokenizer: Callable[..., Any]) -> Callable[[str], Any]:
    return lambda template: make_tiny_tokenizer(template=template)


def test_the_published_template_is_refused_with_the_way_out(tokenizer: Callable[[str], Any]) -> None:
    with pytest.raises(DataFault, match=r"data/chat_templates"):
        Renderer(tokenizer(PUBLISHED)).render_sample(TALK)


def test_ours_renders_every_turn_alike(tokenizer: Callable[[str], Any]) -> None:
    tok = tokenizer(OWN)
    renderer = Renderer(tok)
    ids, labels = renderer.render_sample(TALK)
    for turn in (2, 4):
        prompt = renderer.render_prompt(TALK[:turn])
        assert ids[: len(prompt)] == prompt
    trained = tok.decode([label for label in labels if label >= 0])
    assert trained == f"{TALK[2].text}<|im_end|>{TALK[4].text}<|im_end|>"


def test_its_first_prompt_is_the_published_one_without_thinking(tokenizer: Callable[[str], Any]) -> None:
    turns = [{"role": message.role, "content": message.text} for message in TALK[:2]]
    options = {"tokenize": False, "add_generation_prompt": True}
    expected = tokenizer(PUBLISHED).apply_chat_template(turns, enable_thinking=False, **options)
    assert tokenizer(OWN).apply_chat_template(turns, **options) == expected


@pytest.mark.slow
def test_a_run_with_the_published_template_is_refused_before_anything_starts(
    tokenizer: Callable[[str], Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    recipe = load_recipe(ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml", [f"model.path={model}", "models={}"])
    check(recipe)
    (model / "chat_template.jinja").write_text(PUBLISHED, encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=r"cannot be trained: with this chat template .* data/chat_templates"):
        check(recipe)
    check(recipe, trains=False)
