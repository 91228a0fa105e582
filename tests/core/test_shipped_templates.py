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
        tokenizer = Tokenizer(kinds.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special_tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokenizer.train_from_iterator([f"▁{text.replace(' ', '▁')}" for text in CORPUS], trainers.BpeTrainer(
            vocab_size=400, special_tokens=special_tokens, show_progress=False
        ))  # fmt: skip
    else:
        tokenizer = Tokenizer(kinds.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ))  # fmt: skip
    end, *tokens = TOKENS[file]
    plain = {"<think>", "</think>", "<tool_call>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.add_special_tokens({"additional_special_tokens": [token for token in tokens if token not in plain]})
    fast.add_tokens([token for token in tokens if token in plain])
    return fast


def shipped_tokenizer(file: str) -> Any:
    tokenizer = tokenizer_of(file)
    tokenizer.chat_template = data_path("chat_templates", file).read_text(encoding="utf-8")
    return tokenizer


def test_there_is_a_tokenizer_for_each_and_each_is_shipped() -> None:
    assert (
        {template.file for template in SHIPPED_TEMPLATES}
        == TOKENS.keys()
        == {path.name for path in ROOT.glob("data/chat_templates/*.jinja")}
    )


@pytest.mark.parametrize("file", TOKENS)
@pytest.mark.parametrize("talk", [TALK, TALK[1:]], ids=["system", "no-system"])
def test_every_prompt_is_the_beginning_of_the_whole(file: str, talk: Sequence[Message]) -> None:
    tokenizer = shipped_tokenizer(file)
    renderer = Renderer(tokenizer, at=THEN)
    ids, labels = renderer.render_sample(talk)
    for turn, message in enumerate(talk):
        if message.role == "assistant":
            prompt = renderer.render_prompt(talk[:turn])
            assert ids[: len(prompt)] == prompt
            assert len(ids) > len(prompt)
            assert labels[len(prompt)] != -100
    end = TOKENS[file][0]
    # SentencePiece writes a space before each text; it is part of the reply's first token.
    parts = tokenizer.decode([label for label in labels if label >= 0]).split(end)
    assert [part.strip(" ") for part in parts] == [*(m.text for m in talk if m.train), ""]


@pytest.mark.parametrize("file", PUBLISHED)
@pytest.mark.parametrize("turns", [TALK[:2], TALK[1:2], TALK[:4]], ids=["system", "no-system", "later"])
def test_prompts_are_those_of_the_published_template(
    file: str, turns: Sequence[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    if file == "chatml.jinja" and turns[0].role != "system":
        pytest.skip("without a system turn, each family that speaks ChatML has one of its own")
    tokenizer = tokenizer_of(file)
    bos_tokens = {"llama3.1.jinja": "<|begin_of_text|>", "gemma.jinja": "<bos>"}
    if file in bos_tokens:
        tokenizer.add_special_tokens({"bos_token": bos_tokens[file]})
    plain = [{"role": message.role, "content": message.text} for message in turns]
    options = {"tokenize": False, "add_generation_prompt": True}
    theirs = files("trl").joinpath(f"chat_templates/{PUBLISHED[file]}").read_text(encoding="utf-8")
    ours = data_path("chat_templates", file).read_text(encoding="utf-8")
    prompts = [tokenizer.apply_chat_template(plain, chat_template=template, **options) for template in (ours, theirs)]
    # The published one has a date of its own where none is given; ours always has the run's.
    today = datetime.now().strftime("%d %b %Y")
    assert prompts[0].replace(today, "26 Jul 2024") == prompts[1].replace(today, "26 Jul 2024")


@pytest.mark.parametrize("file", FIRST)
def test_first_prompts_are_those_of_the_published_format(file: str) -> None:
    plain = [{"role": message.role, "content": message.text} for message in TALK[:2]]
    assert shipped_tokenizer(file).apply_chat_template(plain, tokenize=False, add_generation_prompt=True) == FIRST[file]


def test_the_date_of_llama_is_the_runs() -> None:
    tokenizer = shipped_tokenizer("llama3.1.jinja")
    assert "Today Date: 29 Feb 2024" in tokenizer.decode(Renderer(tokenizer, at=THEN).render_prompt(TALK[:2]))
    with pytest.raises(ModelDirectoryError, match="prints the date, and no run says which"):
        Renderer(tokenizer)


@pytest.mark.parametrize("file", sorted(TOKENS.keys() - {"qwen3.jinja", "qwen2.5.jinja"}))
def test_a_template_without_tools_says_so(file: str) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "craft", "parameters": {}}}])
    with pytest.raises(DataFault, match="this template has no tools"):
        Renderer(shipped_tokenizer(file), at=THEN).render_prompt([Message(role="tools", text=tools), *TALK[:2]])


@pytest.mark.parametrize("file", TOKENS)
def test_the_one_that_fits_is_found_by_kind_and_tokens(file: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(file)
    tokenizer.save_pretrained(tmp_path)
    kind = KIND.get(file, "llama")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    template = fitting_template(tmp_path, at=THEN)
    assert template is not None
    assert template.file == file
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    other_template = fitting_template(tmp_path, at=THEN)
    by_tokens = ("gemma.jinja" if file == "gemma.jinja" else "chatml.jinja") if file in ANY_KIND else None
    assert (other_template and other_template.file) == by_tokens


def test_gemma_takes_turns_in_any_order_and_joins_the_system_text_to_the_first() -> None:
    turns = [TALK[0], TALK[1], Message(role="user", text=" And now? "), *TALK[2:]]
    ids, _ = Renderer(shipped_tokenizer("gemma.jinja")).render_sample(turns)
    assert (
        shipped_tokenizer("gemma.jinja")
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
        path = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
        settings = [f"model.path={model}", "models={}", "model.context_length=0", "data.general.share=0"]
        with pytest.raises(ModelDirectoryError, match=rf"has no chat template; .* data/chat_templates/{file} fits it"):
            check(load_recipe(path, settings))


@pytest.mark.slow
def test_a_refused_directory_is_told_which_template_fits(
    save_windowed_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = save_windowed_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    tokenizer_of("qwen3.jinja").save_pretrained(model)
    path = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
    settings = [f"model.path={model}", "models={}", "model.context_length=0", "data.general.share=0"]
    with pytest.raises(
        ModelDirectoryError, match=r"has no chat template; .* data/chat_templates/qwen3\.jinja fits it: cp"
    ):
        check(load_recipe(path, settings))
    template = files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=r"not a prefix .* data/chat_templates/qwen3\.jinja fits it: cp "):
        check(load_recipe(path, settings))
    shutil.copy(data_path("chat_templates", "qwen3.jinja"), model / "chat_template.jinja")
    check(load_recipe(path, settings))
