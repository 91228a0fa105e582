"""The shipped chat templates on tokenizers made as their models': the prompt of each turn is the
beginning of the whole, texts are those of the published formats, dates are the run's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds

from agentr_core.errors import DataFault, ModelDirectoryError
from agentr_core.models.checkpoint_dir import SHIPPED_TEMPLATES, fitting_template
from agentr_core.samples.rendering import Renderer
from agentr_core.system import data_path
from agentr_core.types import Message
from flows.preflight.checks import check
from tasks.wiring import load_recipe

ROOT = Path(__file__).parents[2]
THEN = datetime(2024, 2, 29, tzinfo=UTC)
CORPUS = ["Goal: stick.", "Thought: planks.\nAction: get 2 planks", "Got 2 planks", "Craft."]
TALK = (
    Message(role="system", text="Craft."),
    Message(role="user", text="Goal: stick."),
    Message(role="assistant", text="Thought: planks.\nAction: get 2 planks", train=True),
    Message(role="user", text="Got 2 planks"),
    Message(role="assistant", text="Action: craft 4 stick", train=True),
)
TOKENS = {
    "qwen3.jinja": ("<|im_end|>", "<|im_start|>", "<tool_call>", "<think>", "</think>"),
    "qwen2.5.jinja": ("<|im_end|>", "<|im_start|>", "<tool_call>"),
    "llama3.1.jinja": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral.jinja": ("</s>", "<s>", "<unk>", "[INST]", "[/INST]"),
    "llama2.jinja": ("</s>", "<s>", "<unk>"),
    "gemma.jinja": ("<end_of_turn>", "<bos>", "<start_of_turn>"),
    "chatml.jinja": ("<|im_end|>", "<|im_start|>"),
}
KIND = {"qwen3.jinja": "qwen3", "qwen2.5.jinja": "qwen2", "mistral.jinja": "mistral"}
FIRST = {
    "mistral.jinja": "<s>[INST] Craft.\n\nGoal: stick.[/INST]",
    "llama2.jinja": "<s>[INST] <<SYS>>\nCraft.\n<</SYS>>\n\nGoal: stick. [/INST]",
}
"""The first prompts of formats that no library at hand has a copy of."""
PUBLISHED = {
    "llama3.1.jinja": "llama3_1.jinja",
    "qwen2.5.jinja": "qwen2_5.jinja",
    "gemma.jinja": "gemma3.jinja",
    "chatml.jinja": "qwen2_5.jinja",
}
"""Those of which TRL keeps one. ChatML's is that of Qwen2.5 where the system turn is given."""
ANY_KIND = ("gemma.jinja", "chatml.jinja", "qwen2.5.jinja", "qwen3.jinja")
"""Those whose tokens are those of ChatML or Gemma: whatever its kind, a model has a template."""


def tokenizer_of(file: str) -> Any:
    """Return a tokenizer of the kind of a template's models: SentencePiece's, which writes a space
    before each text, or of bytes.
    """
    from transformers import PreTrainedTokenizerFast

    if file in ("mistral.jinja", "llama2.jinja"):
        made = Tokenizer(kinds.BPE(unk_token="<unk>", byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        made.train_from_iterator([f"▁{text.replace(' ', '▁')}" for text in CORPUS], trainers.BpeTrainer(
            vocab_size=400, special_tokens=first, show_progress=False
        ))  # fmt: skip
    else:
        made = Tokenizer(kinds.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(CORPUS, trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ))  # fmt: skip
    end, *others = TOKENS[file]
    plain = {"<think>", "</think>", "<tool_call>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)
    fast.add_special_tokens({"additional_special_tokens": [one for one in others if one not in plain]})
    fast.add_tokens([one for one in others if one in plain])
    return fast


def shipped(file: str) -> Any:
    made = tokenizer_of(file)
    made.chat_template = data_path("chat_templates", file).read_text(encoding="utf-8")
    return made


def test_there_is_a_tokenizer_for_each_and_each_is_shipped() -> None:
    assert (
        {one.file for one in SHIPPED_TEMPLATES}
        == TOKENS.keys()
        == {path.name for path in ROOT.glob("data/chat_templates/*.jinja")}
    )


@pytest.mark.parametrize("file", TOKENS)
@pytest.mark.parametrize("talk", [TALK, TALK[1:]], ids=["system", "no-system"])
def test_every_prompt_is_the_beginning_of_the_whole(file: str, talk: Sequence[Message]) -> None:
    made = shipped(file)
    renderer = Renderer(made, at=THEN)
    ids, labels = renderer.render_sample(talk)
    for turn, message in enumerate(talk):
        if message.role == "assistant":
            prompt = renderer.render_prompt(talk[:turn])
            assert ids[: len(prompt)] == prompt
            assert len(ids) > len(prompt)
            assert labels[len(prompt)] != -100
    end = TOKENS[file][0]
    # SentencePiece writes a space before each text; it is part of the reply's first token.
    parts = made.decode([one for one in labels if one >= 0]).split(end)
    assert [part.strip(" ") for part in parts] == [*(one.text for one in talk if one.train), ""]


@pytest.mark.parametrize("file", PUBLISHED)
@pytest.mark.parametrize("turns", [TALK[:2], TALK[1:2], TALK[:4]], ids=["system", "no-system", "later"])
def test_prompts_are_those_of_the_published_template(
    file: str, turns: Sequence[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    if file == "chatml.jinja" and turns[0].role != "system":
        pytest.skip("without a system turn, each family that speaks ChatML has one of its own")
    made = tokenizer_of(file)
    first = {"llama3.1.jinja": "<|begin_of_text|>", "gemma.jinja": "<bos>"}
    if file in first:
        made.add_special_tokens({"bos_token": first[file]})
    plain = [{"role": one.role, "content": one.text} for one in turns]
    options = {"tokenize": False, "add_generation_prompt": True}
    published = files("trl").joinpath(f"chat_templates/{PUBLISHED[file]}").read_text(encoding="utf-8")
    ours = data_path("chat_templates", file).read_text(encoding="utf-8")
    said = [made.apply_chat_template(plain, chat_template=one, **options) for one in (ours, published)]
    # The published one has a date of its own where none is given; ours always has the run's.
    today = datetime.now().strftime("%d %b %Y")
    assert said[0].replace(today, "26 Jul 2024") == said[1].replace(today, "26 Jul 2024")


@pytest.mark.parametrize("file", FIRST)
def test_first_prompts_are_those_of_the_published_format(file: str) -> None:
    plain = [{"role": one.role, "content": one.text} for one in TALK[:2]]
    assert shipped(file).apply_chat_template(plain, tokenize=False, add_generation_prompt=True) == FIRST[file]


def test_the_date_of_llama_is_the_runs() -> None:
    made = shipped("llama3.1.jinja")
    assert "Today Date: 29 Feb 2024" in made.decode(Renderer(made, at=THEN).render_prompt(TALK[:2]))
    with pytest.raises(ModelDirectoryError, match="prints the date, and no run says which"):
        Renderer(made)


@pytest.mark.parametrize("file", sorted(TOKENS.keys() - {"qwen3.jinja", "qwen2.5.jinja"}))
def test_a_template_without_tools_says_so(file: str) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "craft", "parameters": {}}}])
    with pytest.raises(DataFault, match="this template has no tools"):
        Renderer(shipped(file), at=THEN).render_prompt([Message(role="tools", text=tools), *TALK[:2]])


@pytest.mark.parametrize("file", TOKENS)
def test_the_one_that_fits_is_found_by_kind_and_tokens(file: str, tmp_path: Path) -> None:
    made = tokenizer_of(file)
    made.save_pretrained(tmp_path)
    kind = KIND.get(file, "llama")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    found = fitting_template(tmp_path, at=THEN)
    assert found is not None
    assert found.file == file
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    other = fitting_template(tmp_path, at=THEN)
    by_tokens = ("gemma.jinja" if file == "gemma.jinja" else "chatml.jinja") if file in ANY_KIND else None
    assert (other and other.file) == by_tokens


def test_gemma_takes_turns_in_any_order_and_joins_the_system_text_to_the_first() -> None:
    turns = [TALK[0], TALK[1], Message(role="user", text=" And now? "), *TALK[2:]]
    ids, _ = Renderer(shipped("gemma.jinja")).render_sample(turns)
    assert (
        shipped("gemma.jinja")
        .decode(ids)
        .startswith(
            "<bos><start_of_turn>user\nCraft.\n\nGoal: stick.<end_of_turn>\n"
            "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\nThought: planks.\nAction"
        )
    )


@pytest.mark.slow
def test_a_base_model_is_told_which_template_its_tokens_fit(
    save_windowed_model: Callable[..., Path], tmp_path: Path
) -> None:
    for file in ("gemma.jinja", "chatml.jinja"):
        model = save_windowed_model(tmp_path / file)
        (model / "chat_template.jinja").unlink()
        tokenizer_of(file).save_pretrained(model)
        made = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
        settings = [f"model.path={model}", "models={}", "model.context_length=0", "data.general.share=0"]
        with pytest.raises(ModelDirectoryError, match=rf"has no chat template; .* data/chat_templates/{file} fits it"):
            check(load_recipe(made, settings))


@pytest.mark.slow
def test_a_refused_directory_is_told_which_template_fits(
    save_windowed_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = save_windowed_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    tokenizer_of("qwen3.jinja").save_pretrained(model)
    made = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
    settings = [f"model.path={model}", "models={}", "model.context_length=0", "data.general.share=0"]
    with pytest.raises(
        ModelDirectoryError, match=r"has no chat template; .* data/chat_templates/qwen3\.jinja fits it: cp"
    ):
        check(load_recipe(made, settings))
    published = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    (model / "chat_template.jinja").write_text(published, encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=r"not a prefix .* data/chat_templates/qwen3\.jinja fits it: cp "):
        check(load_recipe(made, settings))
    shutil.copy(data_path("chat_templates", "qwen3.jinja"), model / "chat_template.jinja")
    check(load_recipe(made, settings))
