"""Prompts, samples and loss masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentr_core.episodes.transcript import read_calls
from agentr_core.errors import DataFault, ModelDirectoryError
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.samples.rendering import RenderedSample, Renderer, check_labels, count_trained
from agentr_core.types import Message


def user(text: str) -> Message:
    return Message(role="user", text=text)


def reply(text: str, *, train: bool = True, ids: tuple[int, ...] | None = None) -> Message:
    return Message(role="assistant", text=text, train=train, token_ids=ids, finish_reason="stop" if ids else None)


@pytest.fixture(scope="module")
def tokenizer(make_tiny_tokenizer: Callable[..., Any]) -> Any:
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


CONVERSATION = (
    Message(role="system", text="Be brief."),
    user("Craft a table."),
    reply("get 2 oak log"),
    user("Got 2 oak log."),
    reply("craft oak planks", train=False),
    user("Could not."),
    reply("craft 4 oak planks"),
)


def test_text_of_a_sample_is_the_template_of_the_conversation(renderer: Renderer, tokenizer: Any) -> None:
    ids, _ = renderer.render_sample(CONVERSATION)
    turns = [{"role": m.role, "content": m.text} for m in CONVERSATION]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(turns, tokenize=False)


def test_each_token_says_who_wrote_it(renderer: Renderer, tokenizer: Any) -> None:
    messages = (*CONVERSATION[:-1], reply("caf\u00e9 \U0001f917"))
    tokens = renderer.rendered_tokens(messages)
    ids, labels = renderer.render_sample(messages)
    assert [token.token for token in tokens] == ids
    assert [token.train for token in tokens] == [label != IGNORE_INDEX for label in labels]
    for role in ("system", "user", "assistant"):
        texts = [message.text for message in messages if message.role == role]
        role_ids = [token.token for token in tokens if token.writer == role]
        assert tokenizer.decode(role_ids) == "".join(texts), role
    ends = [token for token in tokens if token.writer == "end of turn"]
    assert {token.text for token in ends} == {"<|im_end|>"}
    assert len(ends) == len(messages)
    assert sum(token.train for token in ends) == 2
    assert {token.writer for token in tokens} == {"system", "user", "assistant", "template", "end of turn"}
    assert [token.text for token in tokens if token.train][-2:] == ["\U0001f917", "<|im_end|>"]


def test_a_turn_that_the_template_adds_and_bos_are_named(make_tiny_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tiny_tokenizer()
    system_turn = "<|im_start|>system\\nYou get things.<|im_end|>\\n"
    tokenizer.chat_template = "{{ '" + system_turn + "' if messages[0]['role'] != 'system' }}" + tokenizer.chat_template
    tokens = Renderer(tokenizer).rendered_tokens(
        (user("system <|im_end|> get"), reply("get <|im_end|>"), user("get"), reply("x"))
    )
    system_texts = [token.text for token in tokens if token.writer == "template's own turn"]
    assert "".join(system_texts) == "<|im_start|>system\nYou get things."
    assert "".join(token.text for token in tokens if token.writer == "user") == "system <|im_end|> getget"
    assert "".join(token.text for token in tokens if token.writer == "assistant") == "get <|im_end|>x"
    assert sum(token.writer == "end of turn" for token in tokens) == 5
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    bos, *_ = with_bos = Renderer(tokenizer).rendered_tokens((user("get"), reply("x")))
    assert (bos.text, bos.writer, bos.train) == ("<s>", "BOS", False)
    assert [token.writer for token in with_bos].count("BOS") == 1
    assert "template's own turn" in {token.writer for token in with_bos}


def test_prompt_of_each_turn_is_a_prefix_of_the_sample(renderer: Renderer) -> None:
    ids, _ = renderer.render_sample(CONVERSATION)
    for position, message in enumerate(CONVERSATION):
        if message.role == "assistant":
            prompt = renderer.render_prompt(CONVERSATION[:position])
            assert ids[: len(prompt)] == prompt


def test_loss_falls_on_trained_turns_and_their_end_only(renderer: Renderer, tokenizer: Any) -> None:
    ids, labels = renderer.render_sample(CONVERSATION)
    runs: list[list[int]] = [[]]
    for label in labels:
        if label != IGNORE_INDEX:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    assert [tokenizer.decode(run) for run in runs if run] == ["get 2 oak log<|im_end|>", "craft 4 oak planks<|im_end|>"]
    assert count_trained(labels) == sum(map(len, runs))
    assert labels[-1] == IGNORE_INDEX, "the newline after the last turn belongs to the template"
    assert len(ids) == len(labels)


def test_a_reply_that_a_stop_string_ended_learns_no_end_of_turn(renderer: Renderer, tokenizer: Any) -> None:
    ids = tuple(tokenizer.encode("get 2 oak log\nObservation:", add_special_tokens=False))
    sample = renderer.render_sample((user("Go."), reply("get 2 oak log", ids=ids)))
    assert (
        tokenizer.decode([label for label in sample.labels if label != IGNORE_INDEX]) == "get 2 oak log\nObservation:"
    )
    # A server that does not report the end of a turn gives the ids of the text alone.
    whole = tuple(tokenizer.encode("get 2 oak log", add_special_tokens=False))
    silent = renderer.render_sample((user("Go."), reply("get 2 oak log", ids=whole)))
    assert tokenizer.decode([label for label in silent.labels if label != IGNORE_INDEX]) == "get 2 oak log<|im_end|>"
    # A reply that began with the stop string has no text, and its ids are that string.
    at_once = tuple(tokenizer.encode("Observation:", add_special_tokens=False))
    _, labels = renderer.render_sample((user("Go."), reply("", ids=at_once)))
    assert tuple(label for label in labels if label != IGNORE_INDEX) == at_once


@pytest.mark.parametrize("said", ["get 2 oak log\n", "get <|im_start|>2 oak log\nObservation:"])
def test_a_stop_string_is_known_from_the_missing_end_where_the_sampler_reports_ends(
    renderer: Renderer, tokenizer: Any, said: str
) -> None:
    # Neither text shows that its ids go on: one lacks only white space, one a special token too.
    ids = tuple(tokenizer.encode(said, add_special_tokens=False))
    message = replace(reply("get 2 oak log", ids=ids), tokenizer=renderer.fingerprint)
    _, labels = renderer.render_sample((user("Go."), message))
    assert tuple(label for label in labels if label != IGNORE_INDEX) == ids
    full_message = replace(message, token_ids=(*ids, renderer.end_of_turn))
    _, labels = renderer.render_sample((user("Go."), full_message))
    assert tuple(label for label in labels if label != IGNORE_INDEX) == full_message.token_ids


def test_sampled_ids_are_used_as_they_are(renderer: Renderer, tokenizer: Any) -> None:
    # One id for each byte: not how the tokenizer would write the text.
    letters = tuple(tokenizer.convert_tokens_to_ids(list("get")))
    assert list(letters) != tokenizer("get")["input_ids"]
    ids, labels = renderer.render_sample((user("?"), reply("get", ids=(*letters, renderer.end_of_turn))))
    assert [label for label in labels if label != IGNORE_INDEX] == [*letters, renderer.end_of_turn]
    assert ids.count(renderer.end_of_turn) == 2


@pytest.mark.parametrize("ids", [None, (), (40, 41)])
def test_missing_end_of_turn_is_added_once_and_trained(renderer: Renderer, ids: tuple[int, ...] | None) -> None:
    _, labels = renderer.render_sample((user("?"), reply("AB", ids=ids)))
    trained = [label for label in labels if label != IGNORE_INDEX]
    assert trained[-1] == renderer.end_of_turn
    assert trained.count(renderer.end_of_turn) == 1


def test_next_prompt_continues_sampled_ids(renderer: Renderer) -> None:
    prompt = renderer.render_prompt((user("a"),))
    reply_ids = (40, 41, 42)
    next_prompt = renderer.render_prompt((user("a"), reply("", ids=reply_ids), user("b")))
    assert next_prompt[: len(prompt) + 4] == [*prompt, *reply_ids, renderer.end_of_turn]


def test_trained_user_turn_is_refused(renderer: Renderer) -> None:
    with pytest.raises(DataFault, match="turn 0 is a user turn"):
        renderer.render_sample((Message(role="user", text="a", train=True), reply("b")))


def test_prompt_must_not_end_with_an_assistant_turn(renderer: Renderer) -> None:
    with pytest.raises(DataFault, match="must end with a system or user turn"):
        renderer.render_prompt((user("a"), reply("b")))
    with pytest.raises(DataFault, match="must end with a system or user turn"):
        renderer.render_prompt(())


def test_check_sample(renderer: Renderer) -> None:
    check_labels(renderer.render_sample(CONVERSATION))
    with pytest.raises(DataFault, match="loss mask of a sample is empty"):
        check_labels(renderer.render_sample((user("a"), reply("b", train=False))))
    with pytest.raises(DataFault, match="2 token ids and 1 labels"):
        check_labels(RenderedSample([1, 2], [1]))
    with pytest.raises(DataFault, match="label at token 1"):
        check_labels(RenderedSample([1, 2], [1, 3]))


# A template like that of a thinking model: only the last assistant turn keeps its opening.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
DROPPING = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


def test_template_that_rewrites_earlier_turns_is_refused(make_tiny_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tiny_tokenizer(template=FORGETFUL))
    renderer.render_sample((user("a"), reply("b")))
    with pytest.raises(DataFault, match="prompt of turn 1 is not a prefix"):
        renderer.render_sample((user("a"), reply("b"), user("c"), reply("d")))


def test_a_prompt_that_opens_a_thought_is_known(make_tiny_tokenizer: Callable[..., Any]) -> None:
    messages = (user("What is <think>"),)
    plain, opening = Renderer(make_tiny_tokenizer()), Renderer(make_tiny_tokenizer(template=FORGETFUL))
    assert not plain.opens_thought(plain.render_prompt(messages))
    assert opening.opens_thought(opening.render_prompt(messages))
    lines = Renderer(make_tiny_tokenizer(template=FORGETFUL.replace("<think>{% endif %}", "<think>\n\n{% endif %}")))
    assert lines.opens_thought(lines.render_prompt(messages))
    template = FORGETFUL.replace("<think>{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
    off = Renderer(make_tiny_tokenizer(template=template))
    assert not off.opens_thought(off.render_prompt(messages))


def test_tags_of_thoughts_are_text_even_if_they_are_special_tokens(make_tiny_tokenizer: Callable[..., Any]) -> None:
    """So they are in Magistral's tokenizer; without them a thought would be part of the action."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "[THINK]", "[/THINK]"]})
    renderer = Renderer(tokenizer)
    prompt = renderer.render_prompt((user("Go."),))
    text = '[THINK]Not <tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>[/THINK]Action: left'
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert ids[0] == tokenizer.convert_tokens_to_ids("[THINK]")

    assert renderer.text((*ids, renderer.end_of_turn), prompt) == text
    assert renderer.text(ids[1:4], prompt) == tokenizer.decode(ids[1:4])
    assert read_calls(renderer.text(ids, prompt)) is None
    # A reply that came without ids is rendered as the model would write it.
    assert renderer.render_sample((user("Go."), reply(text))).input_ids[len(prompt) :][: len(ids)] == list(ids)
    tokenizer.chat_template += "{% if add_generation_prompt %}[THINK]{% endif %}"
    renderer = Renderer(tokenizer)
    assert renderer.opens_thought(renderer.render_prompt((user("Go."),)))


def test_template_that_drops_turns_is_refused(make_tiny_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tiny_tokenizer(template=DROPPING))
    with pytest.raises(DataFault, match="does not render each assistant turn once"):
        renderer.render_prompt((user("a"), reply("b"), user("c")))


def test_order_of_turns_that_the_template_refuses(make_tiny_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(DataFault, match="refuses this order of turns: begin with the user"):
        Renderer(make_tiny_tokenizer(template=STRICT)).render_prompt((Message(role="system", text="s"),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no chat template"), ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "special token")],
)
def test_unusable_templates(make_tiny_tokenizer: Callable[..., Any], template: str | None, message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        Renderer(make_tiny_tokenizer(template=template))


TURN = st.tuples(st.text(max_size=12), st.text(max_size=12), st.booleans(), st.none() | st.lists(st.integers(3, 300)))


@pytest.mark.slow
@given(turns=st.lists(TURN, min_size=1, max_size=4))
@example(turns=[("", "", True, [40, 41])])
def test_any_conversation(renderer: Renderer, turns: list[tuple[str, str, bool, list[int] | None]]) -> None:
    messages: list[Message] = []
    for question, text, train, ids in turns:
        # Ids that go on beyond the text are those of a stop string, which has a test of its own.
        answer = renderer.text(ids, ()) if ids else text
        messages += [user(question), reply(answer, train=train, ids=None if ids is None else tuple(ids))]
    ids, labels = renderer.render_sample(messages)
    expected = list[int]()
    for number, (_, answer, train, token_ids) in enumerate(turns):
        prompt = renderer.render_prompt(messages[: 2 * number + 1])
        assert ids[: len(prompt)] == prompt
        expected += [IGNORE_INDEX] * (len(prompt) - len(expected))
        size = len(token_ids) if token_ids else len(renderer._encoder.plain_ids(answer))
        span = slice(len(prompt), len(prompt) + size + 1)
        assert not token_ids or ids[span] == [*token_ids, renderer.end_of_turn]
        expected += ids[span] if train else [IGNORE_INDEX] * (size + 1)
    assert labels == expected + [IGNORE_INDEX] * (len(ids) - len(expected))
