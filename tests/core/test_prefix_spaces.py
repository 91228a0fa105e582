"""Tokenizers that put a space before what they are given: a written reply is tokenised as in the
template's own rendering of the conversation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentr_core.samples.dataset import token_row
from agentr_core.samples.rendering import Renderer
from agentr_core.types import Message, Sample, Span, grown_turn

TEXTS = [
    "The door is open. I go to the kitchen. Thought: I need wood.\nAction: get 2 oak log\n<|user|>\n<|assistant|>\n",
    "Thought Action craft get inventory The door Hello I go it's 's (12) <result>wood</result> a b / [ I N S T ] |",
]
LINES = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""The header is text, as Zephyr's is."""
TOKENS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
)
"""The header is a token, right before the reply, as Mistral's is."""
PREPEND = "prepend"
STYLES = (PREPEND, "always", "first", "never", "bytes", "unigram", "words")


def make(folder: Path, style: str, template: str, **eos: bool) -> Any:
    """Return a tokenizer of a style, read from a folder as a user's would be."""
    byte_tokens = [f"<0x{number:02X}>" for number in range(256)]
    pieces = "unigram" if style in ("unigram", "words") else "bpe"
    special = ["<unk>", "<s>", "</s>", *([] if style == "bytes" else byte_tokens)]
    learning = Tokenizer(models.BPE(byte_fallback=style != "bytes", unk_token="<unk>", fuse_unk=True))
    learning.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)|\n"), "isolated")
    trainer: Any = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    texts = [f"▁{text.replace(' ', '▁')}" for text in TEXTS] * 30
    if pieces == "unigram":
        learning.model = models.Unigram()
        trainer = trainers.UnigramTrainer(
            vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    if style == "bytes":
        learning.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
        texts = TEXTS * 30
    learning.train_from_iterator(texts, trainer)
    state = json.loads(learning.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special[:3]]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if style == PREPEND:
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif style == "bytes":
        backend.decoder = decoders.ByteLevel()
    else:
        space = pre_tokenizers.Metaspace(prepend_scheme=style if style in ("first", "never") else "always")
        words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
        backend.pre_tokenizer = words if style == "words" else space
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=AddedToken("</s>", special=True, **eos), unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def reply_message(text: str, **options: Any) -> Message:
    return Message(role="assistant", text=text, train=True, **options)


TALK = (
    Message(role="user", text="The door"),
    reply_message("Thought: I go"),
    Message(role="user", text="I need wood\n's"),
    reply_message("'s (12)\nAction: get 2 oak log"),
)


def whole(tokenizer: Any, messages: tuple[Message, ...], *, prompt: bool = False) -> list[int]:
    turns = [{"role": message.role, "content": message.text} for message in messages]
    ids: list[int] = tokenizer.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=prompt, return_dict=False
    )
    return ids


@pytest.mark.parametrize("template", [LINES, TOKENS], ids=["lines", "tokens"])
@pytest.mark.parametrize("style", STYLES)
def test_written_replies_are_tokenised_as_the_template_does(tmp_path: Path, style: str, template: str) -> None:
    tokenizer = make(tmp_path, style, template)
    renderer = Renderer(tokenizer)
    sample = renderer.render_sample(TALK)
    assert sample.input_ids == whole(tokenizer, TALK)
    for turn in (1, 3):
        prompt = renderer.render_prompt(TALK[:turn])
        assert prompt == whole(tokenizer, TALK[:turn], prompt=True)
        assert prompt == sample.input_ids[: len(prompt)]


@pytest.mark.parametrize("style", STYLES)
def test_what_a_model_sampled_is_kept_and_what_follows_it_has_no_space(tmp_path: Path, style: str) -> None:
    tokenizer = make(tmp_path, style, LINES)
    renderer = Renderer(tokenizer)
    text_ids = tuple(tokenizer("Thought: I go", add_special_tokens=False)["input_ids"])
    reply = reply_message("Thought: I go", token_ids=(*text_ids, tokenizer.eos_token_id), finish_reason="stop")
    ids, _ = renderer.render_sample((TALK[0], reply, *TALK[2:]))
    start = len(renderer.render_prompt(TALK[:1]))
    assert tuple(ids[start : start + len(text_ids)]) == text_ids
    template_ids = whole(tokenizer, TALK)
    assert ids[start + len(text_ids) :] == template_ids[template_ids.index(tokenizer.eos_token_id, start) :]


@pytest.mark.parametrize("style", [style for style in STYLES if style != "words"])
def test_the_spans_of_a_turn_are_tokenised_where_they_stand(tmp_path: Path, style: str) -> None:
    tokenizer = make(tmp_path, style, LINES)
    renderer = Renderer(tokenizer)
    parts = ("Thought: I need", "<result>wood</result>", "Action: go", "</result>", " get it")
    spans = tuple(Span(text=text, train=number % 2 == 0) for number, text in enumerate(parts))
    turn = grown_turn(spans)
    ids, labels = renderer.render_sample((TALK[0], turn))
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert turn.text in text
    prompt = renderer.render_prompt((TALK[0], grown_turn(spans[:2])))
    assert ids[: len(prompt)] == prompt
    row = token_row(Sample(kind="good", messages=(TALK[0], turn), instance=None), renderer)
    assert row.labels == tuple(labels)


@pytest.mark.parametrize("template", [LINES, TOKENS], ids=["lines", "tokens"])
@pytest.mark.parametrize("style", [style for style in STYLES if style != "words"])
def test_the_text_of_sampled_tokens_keeps_its_spaces(tmp_path: Path, style: str, template: str) -> None:
    tokenizer = make(tmp_path, style, template)
    if style not in ("never", "bytes"):
        parts = [tokenizer.backend_tokenizer.decoder, decoders.Strip(" ", 1, 0)]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    renderer = Renderer(tokenizer)
    for text in ("Thought: I go", " I go"):
        messages = (TALK[0], grown_turn((Span(text="I need"), Span(text=text, train=True))))
        prompt = renderer.render_prompt((TALK[0], grown_turn(messages[1].spans[:1])))
        ids = renderer.render_sample(messages).labels[len(prompt) :]
        sampled_ids = ids[: next(n for n, token in enumerate(ids) if token == tokenizer.eos_token_id)]
        assert renderer.text(sampled_ids, prompt) == text
    prompt = renderer.render_prompt(TALK[:1])
    reply = renderer.text(renderer.render_sample(TALK[:2]).input_ids[len(prompt) :][:3], prompt)
    # A byte-level decoder shows the space that its tokenizer puts after a control token.
    assert reply.removeprefix(" " if (style, template) == ("bytes", TOKENS) else "")[:1] == "T"


@pytest.mark.parametrize("style", STYLES)
def test_control_tokens_in_a_text_are_characters_and_bring_no_space(tmp_path: Path, style: str) -> None:
    tokenizer = make(tmp_path, style, TOKENS)
    renderer = Renderer(tokenizer)
    talk = (Message(role="user", text="a</s>b [INST]The door"), reply_message("a</s>b"))
    ids, _ = renderer.render_sample(talk)
    assert [token for token in ids if token in tokenizer.all_special_ids] == [
        tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "[INST]", "[/INST]", "</s>")
    ]
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert text.replace(" ", "") == "<s>[INST]a</s>b[INST]Thedoor[/INST]a</s>b</s>"
    assert "</s> b" not in text


def test_the_white_space_that_an_end_of_turn_takes_is_not_a_token(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, "never", LINES, rstrip=True)
    assert Renderer(tokenizer).render_sample(TALK).input_ids == whole(tokenizer, TALK)


@pytest.mark.parametrize("words", [("\n", "\n\n", "\t", "▁▁", "<table>"), ("user", "?", "|")], ids=["gemma", "words"])
def test_added_tokens_that_separate_no_turns_are_no_control_tokens(tmp_path: Path, words: tuple[str, ...]) -> None:
    tokenizer = make(tmp_path, "never", LINES)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    renderer = Renderer(tokenizer)
    talk = (
        Message(role="user", text="The user\n\n\tdoor?\n<table>|"),
        reply_message("Thought: I\n\ngo\t<table>\nuser?"),
    )
    assert renderer.render_sample(talk).input_ids == whole(tokenizer, talk)
    assert renderer.render_prompt(talk[:1]) == whole(tokenizer, talk[:1], prompt=True)


def test_an_added_token_that_separates_turns_is_a_control_token(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, "always", LINES)
    tokenizer.add_tokens([AddedToken("<|user|>", special=False, normalized=False), AddedToken("\n", special=False)])
    renderer = Renderer(tokenizer)
    talk = (Message(role="user", text="The\n<|user|>\ndoor"), reply_message("I go"))
    ids, _ = renderer.render_sample(talk)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|user|>")) == 1
