"""Rendering of conversations as token ids, the same for sampling and for training.

A conversation is cut into segments. Each assistant turn is one segment, and so is each stretch of
template text between two of them. Segments are tokenised one by one and joined, so the prompt of
turn k is a prefix of the training sample by construction, and a sampled turn is trained on exactly
the ids that were sampled. Only the template writes control tokens: where their texts occur in a
turn, they are tokenised as plain characters.

    | system and user text, header | reply ids, end of turn | template, user text, header | ... |
      label -100                     trained if train=True    label -100

An assistant turn that was grown by continuation has a segment for each of its spans, with no
template text between them:

    | system and user text, header | reply ids | observation | reply ids | ... | end of turn |
      label -100                     trained     label -100    trained           if sampled

The template ends each turn, but an end of turn carries loss only if the model produced it, or if
the turn was not sampled. After a reply that was cut by its token limit, or that ended with another
end token, the end of turn carries no loss; nor after a grown turn whose last reply ended with a
stop string. A reply that ended the turn but is followed by a further span is rendered without its
end of turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import chain, count
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.decoders import DecodeStream

from agentr_core.errors import DataFault, ModelDirectoryError
from agentr_core.fingerprint import fingerprint
from agentr_core.samples.chat_template import ChatTemplate
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.texts import THOUGHT_END, THOUGHT_START
from agentr_core.types import Message, Span

# Texts as token ids: those of the chat template, and those that come from outside.
#
# A chat template writes control tokens, which separate the turns of a conversation. In a text from
# outside (an observation, a tool's result, a line of a file) the same characters must stay plain
# characters: as control tokens they would make turns that do not exist.
#
# A text is tokenised as it would be in the middle of the conversation. SentencePiece tokenizers put
# a space before the first word of their input, and some do so after each control token too. In the
# middle of a conversation there is no such space, unless the text begins with one.

T = TypeVar("T")

_CACHED_SEGMENTS = 8192
_LETTER = "\U00010a00"
"""A rare letter that is put before a text in place of the conversation before it. A word may go on
after it, and pre-tokenizers that separate words from numbers or signs do so here.
"""
_THOUGHT_TAG = re.compile(rf"{THOUGHT_START}|{THOUGHT_END}", re.IGNORECASE)
_OPEN_THOUGHT = re.compile(rf"(?:{THOUGHT_START})\s*\Z", re.IGNORECASE)
_PROBE_TEXTS = ("a", "Thought: I", "1", "(a)", "'s", " a", "\n\n", "\na")
"""Texts that show whether a tokenizer adds something, such as a space, before its input."""


class Placeholders:
    """Placeholders for what a template must not see: the texts of assistant turns, and control
    tokens in texts from outside.

    Args:
        texts: all texts of a conversation; the placeholders are chosen so that they occur in none
            of them.
        control: the texts of the control tokens.
    """

    def __init__(self, texts: Sequence[str], control: Sequence[str]) -> None:
        salt = 0
        while any(f"@@{salt}-" in text for text in texts):
            salt += 1
        self._prefix = f"@@{salt}-"
        self._placeholder_by_text = {text: f"{self._prefix}control-{number}@@" for number, text in enumerate(control)}
        self._text_by_placeholder = {placeholder: text for text, placeholder in self._placeholder_by_text.items()}
        self._control_pattern = _pattern(control)
        self._placeholder_pattern = _pattern(self._text_by_placeholder)

    def for_turn(self, number: int) -> str:
        """Return the placeholder for assistant turn `number`, counted from 0."""
        return f"{self._prefix}assistant-turn-{number}@@"

    def hide_control(self, text: str) -> str:
        """Return a text from outside with the control tokens in it replaced by placeholders."""
        return self._control_pattern.sub(lambda match: self._placeholder_by_text[match[0]], text)

    def restore_control(self, text: str) -> str:
        """Return a text with the placeholders of control tokens replaced by these tokens."""
        return self._placeholder_pattern.sub(lambda match: self._text_by_placeholder[match[0]], text)

    def hides_control(self, text: str) -> bool:
        """Return whether a text contains placeholders of control tokens."""
        return self._prefix in text and self._placeholder_pattern.search(text) is not None


class Encoder:
    """Encodes texts as token ids with one tokenizer. Thread-safe.

    `control_texts` are the texts of all control tokens: the special tokens, and the added tokens
    that separate turns in `template_text`. Tags of thoughts are none, even if they are special
    tokens, as in Magistral's tokenizer: the model writes them in its replies. The methods encode a
    text that follows the token `previous_id`, or that begins the conversation if that is None.

    Args:
        template_text: a conversation as rendered by the chat template.
    """

    def __init__(self, tokenizer: Any, template_text: str = "") -> None:
        self._added_tokens = {number: token for number, token in tokenizer.added_tokens_decoder.items() if str(token)}
        self.special_text_by_id = {number: str(token) for number, token in self._added_tokens.items() if token.special}
        # The special tokens that are text in a reply.
        self._thought_ids = {number for number, text in self.special_text_by_id.items() if _THOUGHT_TAG.fullmatch(text)}
        # Of the added tokens that are not special, those that the template writes and that can
        # separate turns. White space, words and single signs cannot: tokenizers add tokens for
        # these to encode texts in fewer tokens.
        control = {
            number: token
            for number, token in self._added_tokens.items()
            if (token.special and number not in self._thought_ids)
            or (len(text := str(token)) > 1 and not re.fullmatch(r"[\w\s▁]*", text) and text in template_text)
        }
        self.control_texts = tuple(map(str, control.values()))
        # The token of unknown characters does not separate turns, whatever its text is.
        self._control_ids = frozenset(control) - {tokenizer.unk_token_id}
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._control_pattern = _pattern(self.control_texts)
        # Some tokens include the space beside them in a text.
        patterns = [
            (r"\s*" if token.lstrip else "") + re.escape(str(token)) + (r"\s*" if token.rstrip else "")
            for token in _longest_first(control.values())
        ]
        self._written_token = re.compile("|".join(patterns) or r"(?!)")
        self._middle_encoder = _MiddleEncoder(tokenizer)
        self._cached_encode_template = lru_cache(_CACHED_SEGMENTS)(self._encode_template)
        self._cached_encode_plain = lru_cache(_CACHED_SEGMENTS)(self._encode_plain)

    def piece_ids(self, text: str, placeholders: Placeholders, previous_id: int | None = None) -> tuple[int, ...]:
        """Return the ids of a piece of a rendered conversation in which control tokens from outside
        are replaced by `placeholders`: control tokens become tokens, and what the placeholders
        stand for plain characters.

        Raises `DataFault` as `plain_ids` does.
        """
        if not placeholders.hides_control(text):
            return self.template_ids(text, previous_id)
        ids: list[int] = []
        start = 0

        for match in self._written_token.finditer(text):
            ids += self.plain_ids(placeholders.restore_control(text[start : match.start()]), last_id(ids, previous_id))
            ids += self.template_ids(match[0], last_id(ids, previous_id))
            start = match.end()
        return (*ids, *self.plain_ids(placeholders.restore_control(text[start:]), last_id(ids, previous_id)))

    def template_ids(self, text: str, previous_id: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text of the template, in which control tokens become tokens."""
        return self._cached_encode_template(text, self._position_of(previous_id)) if text else ()

    def plain_ids(self, text: str, previous_id: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text from outside, in which control tokens become plain characters.

        Raises `DataFault` when the tokenizer cannot encode them as characters.
        """
        return self._cached_encode_plain(text, self._position_of(previous_id)) if text else ()

    def decode(self, ids: Sequence[int], previous_id: int | None) -> str:
        """Decode sampled ids that follow the token `previous_id`, without special tokens other than
        tags of thoughts. Unlike when the ids are decoded alone, a space that they begin with is
        kept.
        """
        head = self._middle_encoder.head_ids if self._is_in_middle(self._position_of(previous_id)) else ()
        start, full_text = (self._visible_text(part) if part else "" for part in (head, (*head, *ids)))
        return full_text.removeprefix(start)

    def _visible_text(self, ids: Sequence[int]) -> str:
        hides_all = self._thought_ids.isdisjoint(ids)
        if not hides_all:
            hidden = self.special_text_by_id.keys() - self._thought_ids
            ids = [token for token in ids if token not in hidden]
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=hides_all, clean_up_tokenization_spaces=False))

    def _position_of(self, before: int | None) -> int | None:
        """Return the position of a text, as far as its ids depend on it: None if it is encoded as
        at the beginning, the id of the added token that it follows, or -1 within other text.
        """
        if before in self._added_tokens:
            return before if self._middle_encoder.position_matters or self._added_tokens[before].rstrip else None
        return -1 if self._middle_encoder.position_matters and before is not None else None

    def _encode_template(self, text: str, before: int | None) -> tuple[int, ...]:
        if before is None:
            return self._encode(text)
        if before < 0:
            return self._middle_encoder.encode(text)
        # Some added tokens include the spaces after them; after others a tokenizer adds a space.
        token = str(self._added_tokens[before])
        ids = self._encode(token + text)
        # The token and the beginning of the text together may be another token.
        return ids[1:] if ids[:1] == (before,) else self._encode(text)

    def _encode_plain(self, text: str, before: int | None) -> tuple[int, ...]:
        if not self._control_pattern.search(text):
            return self._encode_template(text, before)
        ids = self._split(text, before)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The tokenizer still finds control tokens that are not marked as special. It does not if
        # their texts are encoded in parts.
        first, *rest = self._split_control(text)
        ids = (*self._split(first, before), *chain.from_iterable(self._split(part, -1) for part in rest))
        if not self._control_ids.isdisjoint(ids):
            control_id = next(token for token in ids if token in self._control_ids)
            raise DataFault(
                f"the tokenizer {self._tokenizer.name_or_path!r} reads a control token (id {control_id}) in the text "
                f"{text[:80]!r} and has no other way to write it; use a tokenizer with a plain form of every text"
            )
        return ids

    def _split(self, text: str, before: int | None) -> tuple[int, ...]:
        """Return the ids of a text in which special tokens become plain characters; `before` is as
        from `_position_of`.
        """
        if self._is_in_middle(before):
            return self._middle_encoder.encode(text, split=True)
        return self._encode(text, split_special_tokens=True)

    def _is_in_middle(self, before: int | None) -> bool:
        """Return whether a text at the position `before`, as from `_position_of`, is
        tokenised differently than at the beginning.
        """
        if before is None or not self._middle_encoder.position_matters:
            return False
        return before < 0 or self.template_ids(_PROBE_TEXTS[0], before) != self._encode(_PROBE_TEXTS[0])

    def _split_control(self, text: str) -> list[str]:
        """Split a text into parts without control tokens, by cutting each control token after its
        first character.
        """
        match = self._control_pattern.search(text)
        if match is None or len(match[0]) < 2:
            return [text] if text else []
        end = match.start() + 1
        return [text[:end], *self._split_control(text[end:])]

    def _encode(self, text: str, **options: bool) -> tuple[int, ...]:
        # A fast tokenizer refuses to be used by two threads at once while its padding settings
        # change.
        with self._lock:
            return tuple(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])


class _MiddleEncoder:
    """Encodes texts as they are encoded in the middle of other text. Thread-safe.

    `position_matters` says whether the ids may differ from those at the beginning; `head_ids` are
    the ids of the text that is put before, `_LETTER`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._lock = Lock()
        self._tokenizer = tokenizer
        self._splitter: Any = None
        self.position_matters = False
        self.head_ids: tuple[int, ...] = ()
        # Whether the tokenizer may put a space before its input, judged by its parts. Most do not,
        # and need no copy. Nor is one made for a tokenizer without tokens for line breaks, which
        # puts a space before each line.
        if not getattr(tokenizer, "is_fast", False):
            adds_space = hasattr(tokenizer, "sp_model")
        else:
            backend = tokenizer.backend_tokenizer
            parts = f"{backend.normalizer} {backend.pre_tokenizer}"
            adds_space = any(name in parts for name in ("Prepend", "Metaspace", "add_prefix_space=True"))
        if not adds_space or not self._plain("\n"):
            return
        if tokenizer.is_fast:
            # The copy makes `_LETTER` a token of its own, so that the tokens of the text after it
            # do not depend on it.
            copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            copy.no_padding()
            copy.no_truncation()
            as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(_LETTER)[0][0]
            letter_splitter = pre_tokenizers.Split(Regex(f"{_LETTER}|{re.escape(as_bytes)}"), "isolated")
            before = [copy.pre_tokenizer] if copy.pre_tokenizer else []
            copy.pre_tokenizer = pre_tokenizers.Sequence([*before, letter_splitter])
            self._splitter = copy
        self.head_ids = self._encode_whole(_LETTER, split=False)
        self.position_matters = any(self.encode(text) != self._plain(text) for text in _PROBE_TEXTS)

    def encode(self, text: str, *, split: bool = False) -> tuple[int, ...]:
        """Return the ids of a text. With `split`, special tokens in it become plain characters."""
        return self._encode_whole(_LETTER + text, split=split)[len(self.head_ids) :]

    def _encode_whole(self, text: str, *, split: bool) -> tuple[int, ...]:
        with self._lock:
            if self._splitter is None:
                options = {"split_special_tokens": True} if split else {}
                return tuple(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])
            self._splitter.encode_special_tokens = split
            return tuple(self._splitter.encode(text, add_special_tokens=False).ids)

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def last_id(ids: Sequence[int], previous_id: int | None = None) -> int | None:
    """Return the last token id, or `previous_id` if `ids` is empty."""
    return ids[-1] if ids else previous_id


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _longest_first(texts))) or r"(?!)")


def _longest_first(texts: Iterable[T]) -> list[T]:
    return sorted(texts, key=lambda text: (-len(str(text)), str(text)))


TEMPLATE, TEMPLATE_TURN = "template", "template's own turn"
NO_TEXT = "\ufffd"
"""The text shown for a token that ends within a multi-byte character."""
_TAG_TOKENS = 16
"""Enough tokens for `<think>` and line breaks, even if each character is one token."""


class RenderedSample(NamedTuple):
    """Token ids and labels of one conversation, of equal length; an untrained token has the label
    -100.
    """

    input_ids: list[int]
    labels: list[int]


class RenderedToken(NamedTuple):
    """A token of a rendered conversation, what it adds to the text, and whether it carries loss.

    `writer` says where it comes from: the role of a turn ("user", or "user, example" for a turn of
    an example), `TEMPLATE`, `TEMPLATE_TURN` (a turn that the template adds), "BOS" or "end of
    turn". It is "read" where the turn is not known, since the tokenizer changes texts.
    """

    token: int
    text: str
    writer: str
    train: bool


class _Segment(NamedTuple):
    """The tokens of one segment: a span of an assistant turn, an end of turn that was added, or a
    `piece` of template text, with the texts of `turns` in it. `piece` is None for the first two.
    """

    ids: Sequence[int]
    train: bool
    turns: Sequence[Message]
    piece: str | None


def load_renderer(path: Path, *, at: datetime | None = None) -> Renderer:
    """Return the renderer of a model directory. Raises `ModelDirectoryError` when its tokenizer
    cannot be loaded.

    `at` is when the run started, the date of templates that print one; see `Renderer`.
    """
    return Renderer(load_tokenizer(path), at=at)


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a model directory. Raises `ModelDirectoryError` when it cannot be
    loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    # A tokenizer's code may raise any exception for files from elsewhere.
    except Exception as error:
        if not (path / "config.json").is_file():
            raise ModelDirectoryError(f"{path} has no config.json; give a Hugging Face model directory") from error
        raise ModelDirectoryError(
            f"the tokenizer in {path} cannot be loaded: {' '.join(str(error).split())}"
        ) from error


class Renderer:
    """Turns conversations into token ids with a tokenizer's own chat template.

    Thread-safe. `end_of_turn` is the id of the token with which the template ends an assistant
    turn.

    Args:
        at: When the run started. A template that prints a date prints that one, and is refused
            without it.

    Raises:
        ModelDirectoryError: there is no chat template, it does not end assistant turns with a
            special token, it draws random values, or it prints a date and `at` is None.
    """

    end_of_turn: int

    def __init__(self, tokenizer: Any, *, at: datetime | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = ChatTemplate(tokenizer, at)
        # What the template writes around a user turn and, if it takes one, a tool turn, but no
        # assistant turn: what stands inside one, such as <think>, a model writes itself, too, so it
        # must not count as a control text.
        user, tool = Message(role="user", text="?"), Message(role="tool", text="?")
        template_text = self._template([user], Placeholders((), ()), prompt=False)
        with suppress(DataFault):
            template_text += self._template([user, tool], Placeholders((), ()), prompt=False)
        self._encoder = Encoder(tokenizer, template_text)
        self.end_of_turn, self._end_of_turn_text = self._find_end_of_turn()

    @property
    def vocabulary_size(self) -> int:
        """The size of the tokenizer's vocabulary: its highest token id plus 1."""
        return int(max(self._tokenizer.get_vocab().values())) + 1

    def render_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt. The reply begins a new assistant turn or, if the last
        turn is an assistant turn with spans, continues that turn.

        Raises `DataFault` when there are no messages, the last one is an assistant turn without
        spans, or the rendered text cannot be cut into segments.
        """
        spans = messages[-1].spans if messages else ()
        before = messages[:-1] if spans else messages
        if not before or before[-1].role == "assistant":
            raise DataFault(
                "a prompt must end with a system or user turn, or with spans of an assistant turn after one; drop the "
                "trailing assistant turn"
            )
        placeholders = self._marks(before)
        ids, _ = self._join(before, self._pieces(before, placeholders, prompt=True), placeholders)
        for span in spans:
            ids += self.inner_ids(span, last_id(ids))
        return ids

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt that `render_prompt` returned ends with a tag that opens a
        thought, such as `<think>`, so that the reply begins within one.
        """
        end = self._tokenizer.decode(list(prompt[-_TAG_TOKENS:]), skip_special_tokens=False)
        return _OPEN_THOUGHT.search(str(end)) is not None

    def render_sample(self, messages: Sequence[Message]) -> RenderedSample:
        """Return the ids and labels of a conversation. Turns and spans with `train=True` carry
        loss, and so do their ends of turn, except where the sampler gave none.

        Raises `DataFault` when the prompt of an assistant turn is not a prefix of the whole, a turn
        of another role is marked for training, or the conversation cannot be rendered.
        """
        if not messages:
            raise DataFault("a sample needs at least one turn")
        for position, message in enumerate(messages):
            if message.train and message.role != "assistant":
                raise DataFault(
                    f"turn {position} is a {message.role} turn with train=True; only assistant turns are trained"
                )
        placeholders = self._marks(messages)
        pieces = self._pieces(messages, placeholders, prompt=False)
        reply_positions = [position for position, m in enumerate(messages) if m.role == "assistant"]
        for number, position in enumerate(reply_positions):
            if position == 0:
                raise DataFault("a conversation cannot begin with an assistant turn: there is no prompt for it")
            if self._pieces(messages[:position], placeholders, prompt=True) != list(pieces[: number + 1]):
                raise DataFault(
                    f"with this chat template the prompt of turn {position} is not a prefix of the whole conversation, "
                    "so training would not see what was sampled; put a template that renders earlier turns unchanged "
                    "into its chat_template.jinja, such as one of data/chat_templates"
                )
        return RenderedSample(*self._join(messages, pieces, placeholders))

    def is_cut(self, reply: Message | Span) -> bool:
        """Return whether a reply was cut by its token limit.

        If its finish reason is not known, a sampled reply without a special token at its end counts
        as cut.
        """
        if reply.finish_reason is not None:
            return reply.finish_reason == "length"
        ids = self.sampled_ids(reply)
        return bool(ids) and not self._ends_with_special(ids)

    def sampled_ids(self, reply: Message | Span) -> tuple[int, ...]:
        """Return the sampled token ids of a reply if they are of this tokenizer; otherwise empty,
        and the text of the reply is tokenised again.
        """
        is_same_tokenizer = reply.tokenizer is None or reply.tokenizer == self.fingerprint
        return (reply.token_ids or ()) if is_same_tokenizer else ()

    def inner_ids(self, span: Span, previous_id: int | None) -> tuple[int, ...]:
        """Return the ids of a span that follows the token `previous_id` and is not the last of its
        turn. An end token that it was sampled with is left out.
        """
        ids = self.sampled_ids(span)
        if not ids:
            return self._encoder.plain_ids(span.text, previous_id)
        return ids[:-1] if self._ends_with_special(ids) and not self.is_cut(span) else ids

    def text(self, ids: Sequence[int], prompt: Sequence[int]) -> str:
        """Decode sampled ids that follow a prompt, which may be empty, without special tokens other
        than tags of thoughts.
        """
        return self._encoder.decode(ids, last_id(prompt))

    def rendered_tokens(self, messages: Sequence[Message]) -> list[RenderedToken]:
        """Return each token of a rendered conversation, in order, with where it comes from. Raises
        `DataFault` as `render_sample` does.
        """
        ids, labels = self.render_sample(messages)
        placeholders = self._marks(messages)
        segments = self._segments(messages, self._pieces(messages, placeholders, prompt=False), placeholders)
        # What each token adds to the text of those before it. If a character has several tokens,
        # all but the last add nothing.
        if getattr(self._tokenizer, "is_fast", False):
            stream = DecodeStream(skip_special_tokens=False)
            token_texts = [stream.step(self._tokenizer.backend_tokenizer, token) or "" for token in ids]
        else:
            token_texts = [str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in ids]
        writers: list[str] = []
        for segment in segments:
            writers += self._writers_of_tokens(
                segment, token_texts[len(writers) : len(writers) + len(segment.ids)], placeholders
            )
        bos = self._tokenizer.bos_token_id
        if ids[:1] == [bos] and ids.count(bos) == 1:  # Else it is the token with which each turn begins.
            writers[0] = "BOS"
        return [
            RenderedToken(
                token, text or NO_TEXT, "end of turn" if token == self.end_of_turn else writer, label != IGNORE_INDEX
            )
            for token, text, writer, label in zip(ids, token_texts, writers, labels, strict=True)
        ]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokenizer's vocabulary, special tokens and chat template. Tokenizers whose
        ids mean different things have different ones.
        """
        special = sorted(self._encoder.special_text_by_id.items())
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return fingerprint("tokenizer", vocabulary, special, self._tokenizer.chat_template)

    def _marks(self, messages: Sequence[Message]) -> Placeholders:
        return Placeholders([message.text for message in messages], self._encoder.control_texts)

    def _pieces(self, messages: Sequence[Message], placeholders: Placeholders, *, prompt: bool) -> list[str]:
        """Render a conversation, and return the pieces of text before, between and after its
        assistant turns: one more than there are such turns. Each but the first begins with the end
        of turn. Raises `DataFault` if the template drops, repeats or changes assistant turns.
        """
        text = self._template(messages, placeholders, prompt=prompt)
        pieces = []
        for marker in (placeholders.for_turn(i) for i in range(sum(m.role == "assistant" for m in messages))):
            if text.count(marker) != 1:
                raise DataFault(
                    f"the chat template does not render each assistant turn once and unchanged ({marker!r} occurs "
                    f"{text.count(marker)} times); use a template that keeps every turn"
                )
            before, text = text.split(marker)
            pieces.append(before)
        pieces.append(text)
        for piece in pieces[1:]:
            if not piece.startswith(self._end_of_turn_text):
                raise DataFault(f"the chat template does not end every assistant turn with {self._end_of_turn_text!r}")
        return pieces

    def _join(
        self, messages: Sequence[Message], pieces: Sequence[str], placeholders: Placeholders
    ) -> tuple[list[int], list[int]]:
        segments = self._segments(messages, pieces, placeholders)
        ids = [token for segment in segments for token in segment.ids]
        labels = [token if segment.train else IGNORE_INDEX for segment in segments for token in segment.ids]
        return ids, labels

    def _segments(
        self, messages: Sequence[Message], pieces: Sequence[str], placeholders: Placeholders
    ) -> list[_Segment]:
        segments: list[_Segment] = []
        before: int | None = None

        def add(ids: Sequence[int], turns: Sequence[Message], *, train: bool = False, piece: str | None = None) -> None:
            nonlocal before
            before = last_id(ids, before)
            segments.append(_Segment(ids, train, turns, piece))

        replies = [position for position, message in enumerate(messages) if message.role == "assistant"]
        ends = (*replies, len(messages))
        add(self._encoder.piece_ids(pieces[0], placeholders), messages[: ends[0]], piece=pieces[0])
        for position, end, piece in zip(replies, ends[1:], pieces[1:], strict=True):
            turn = messages[position]
            *inner, last = turn.parts
            for span in inner:
                add(self.inner_ids(span, before), [turn], train=span.train)
            ids = self.sampled_ids(last) or self._encoder.plain_ids(last.text, before)
            add(ids, [turn], train=last.train)
            if ids[-1:] != (self.end_of_turn,):
                add(
                    (self.end_of_turn,), [], train=last.train and self._trains_end_of_turn(last, grown=bool(turn.spans))
                )
            template_piece = piece[len(self._end_of_turn_text) :]
            add(
                self._encoder.piece_ids(template_piece, placeholders, before),
                messages[position + 1 : end],
                piece=template_piece,
            )
        return segments

    def _writers_of_tokens(
        self, segment: _Segment, token_texts: Sequence[str], placeholders: Placeholders
    ) -> list[str]:
        """Return the `ReadToken.writer` of each token of a segment; `token_texts` is what each
        token adds to the text.
        """
        if segment.piece is None:
            return [_turn_name(turn) for turn in segment.turns for _ in segment.ids] or [TEMPLATE] * len(segment.ids)
        if "".join(token_texts) != placeholders.restore_control(segment.piece):
            # The tokenizer changes texts, so the position of a token in them is not known.
            return [TEMPLATE if token in self._encoder.special_text_by_id else "read" for token in segment.ids]
        # The positions of the turns' texts in the piece, with control tokens in place of marks.
        # Texts that the template changed are left out.
        spans, end = [], 0
        for turn in segment.turns:
            covered_text = placeholders.hide_control(turn.text).strip()
            start = segment.piece.find(covered_text, end)
            if start >= 0:
                end = start + len(covered_text)
                first, last = (len(placeholders.restore_control(segment.piece[:position])) for position in (start, end))
                spans.append((_turn_name(turn), first, last))
        writers = []
        at = 0
        for text in token_texts:
            end = at + max(1, len(text))
            writers.append(next((name for name, first, last in spans if at < last and end > first), TEMPLATE))
            at += len(text)
        if len(spans) == len(segment.turns):
            # A turn that the template adds, such as a system turn, has an end of turn but no text
            # of a turn of the conversation.
            start = 0
            for position, (token, writer) in enumerate(zip(segment.ids, writers, strict=True)):
                if writer not in (TEMPLATE, TEMPLATE_TURN):
                    start = -1
                elif token == self.end_of_turn:
                    if start >= 0:
                        writers[start : position + 1] = [TEMPLATE_TURN] * (position + 1 - start)
                    start = position + 1
        return writers

    def _trains_end_of_turn(self, reply: Span, *, grown: bool) -> bool:
        """Return whether the end of turn after a reply carries loss though it is not among the
        reply's own tokens.
        """
        if grown:
            # A sampled reply without an end token ended with a stop string. One without text
            # consisted of its end token alone, of another tokenizer.
            return reply.is_external or not (reply.text or self.sampled_ids(reply) or self.is_cut(reply))
        # A reply that ended with another end token has an end already, and one that ended with a
        # stop string has none. Some servers do not report the end token.
        ids = self.sampled_ids(reply)
        if self.is_cut(reply) or self._ends_with_special(ids) or (ids and reply.tokenizer is not None):
            # A sampler that names its tokenizer reports every end token, so a stop string ended
            # this reply. The text cannot show it: a stop string may be white space.
            return False
        # With other samplers, a stop string shows in ids that decode to more than the text.
        sampled_text, text = self._tokenizer.decode(ids).strip() if ids else "", reply.text.strip()
        return not (len(sampled_text) > len(text) and sampled_text.startswith(text))

    def _ends_with_special(self, ids: Sequence[int]) -> bool:
        return bool(ids and ids[-1] in self._encoder.special_text_by_id)

    def _template(self, messages: Sequence[Message], placeholders: Placeholders, *, prompt: bool) -> str:
        numbers = count()
        turns = [
            {
                "role": m.role,
                "content": placeholders.for_turn(next(numbers))
                if m.role == "assistant"
                else placeholders.hide_control(m.text),
            }
            for m in messages
        ]
        if not turns or turns[0]["role"] != "tools":
            return self._chat_template.render(turns, prompt=prompt)
        tools = json.loads(turns[0]["content"])
        text = self._chat_template.render(turns[1:], prompt=prompt, tools=tools)
        if missing := [tool["function"]["name"] for tool in tools if f'"{tool["function"]["name"]}"' not in text]:
            raise DataFault(
                f"the chat template does not tell the model of its tools ({missing[0]}); put one that takes tools into "
                "its chat_template.jinja, as data/chat_templates/qwen3.jinja and qwen2.5.jinja do, or offer none "
                "(leave transcript: native out)"
            )
        return text

    def _find_end_of_turn(self) -> tuple[int, str]:
        turns = [Message(role="user", text="?"), Message(role="assistant", text="")]
        placeholders = self._marks(turns)
        _, _, tail = self._template(turns, placeholders, prompt=False).partition(placeholders.for_turn(0))
        for number, text in sorted(
            self._encoder.special_text_by_id.items(), key=lambda item: len(item[1]), reverse=True
        ):
            if tail.startswith(text):
                return number, text
        raise ModelDirectoryError(
            f"the chat template of {self._tokenizer.name_or_path!r} does not end an assistant turn with a special "
            f"token (it goes on with {tail[:20]!r}), so a reply's end cannot be learnt; correct the template"
        )


def _turn_name(turn: Message) -> str:
    return f"{turn.role}, example" if turn.example else turn.role


def count_trained(labels: Sequence[int]) -> int:
    """Return how many tokens carry loss."""
    return sum(label != IGNORE_INDEX for label in labels)


def check_labels(sample: RenderedSample) -> None:
    """Raise `DataFault` when a sample cannot be trained on: no trained token, or labels that are
    not its ids.
    """
    ids, labels = sample
    if len(ids) != len(labels):
        raise DataFault(f"a sample has {len(ids)} token ids and {len(labels)} labels; they must be equally many")
    if not count_trained(labels):
        raise DataFault("the loss mask of a sample is empty; mark at least one assistant turn with train=True")
    wrong_positions = [
        i for i, (token, label) in enumerate(zip(ids, labels, strict=True)) if label not in (IGNORE_INDEX, token)
    ]
    if wrong_positions:
        raise DataFault(
            f"the label at token {wrong_positions[0]} is neither -100 nor the token's own id; render the sample again"
        )
