"""Decides which replies are decoded together, and in which shapes.

A *row* is one prompt in the key/value cache with up to `width` replies growing side by side; a
*batch* is a set of rows decoded in step. The number of slots (rows * width) is taken from a short
ladder of sizes, because on a CPU every new shape compiles new kernels, and because matrix products
give a row the same bits for every multiple of 16.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from agentr_core.texts import blank_thoughts
from agentr_core.types import Generation, Sampling

if TYPE_CHECKING:
    from agentr_core.samples.rendering import Renderer

_STREAM_SECONDS = 0.01
"""The least seconds between two texts of a streamed reply: each time the whole reply is decoded."""

# Where a reply is cut, and a cheap test of whether its last token may have completed a stop string.


_THOUGHT_TAG = "<think>"


def cut_at_stop(text: str, sampling: Sampling, *, in_thought: bool = False) -> str:
    """Return the text up to the first stop string, including it if `sampling.include_stop`, or up
    to the end of the first match of `sampling.until`, if that comes first; the whole text if there
    is neither. `in_thought` says that the text begins within a thought, which its prompt opened.
    """
    spans = [(at, at + len(stop)) for stop in sampling.stop if (at := text.find(stop)) >= 0]
    if spans:
        start, end = min(spans)
        text = text[: end if sampling.include_stop else start]
    if not sampling.until:
        return text
    tag = _THOUGHT_TAG if in_thought else ""
    match = re.search(sampling.until, blank_thoughts(tag + text)[len(tag) :])
    return text if match is None else text[: match.end()]


def is_thought(text: str) -> bool:
    """Return whether a text that begins within a thought, which its prompt opened, is nothing but
    thoughts.
    """
    return not blank_thoughts(_THOUGHT_TAG + text).strip()


def stable_text(text: str, sampling: Sampling, *, in_thought: bool = False) -> str:
    """Return the text of an unfinished reply without the end that further tokens may change: an
    incomplete character, and a beginning of a stop string. `in_thought` is that of `cut_at_stop`.
    """
    text = cut_at_stop(text, sampling, in_thought=in_thought).rstrip("\N{REPLACEMENT CHARACTER}")
    pending = (size for stop in sampling.stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return text[: len(text) - max(pending, default=0)]


def visible_text(renderer: Renderer, end_ids: Collection[int], prompt: Sequence[int], reply: Sequence[int]) -> str:
    """Return the text of a reply after its prompt, without the token that ends the turn."""
    return renderer.text(reply[:-1] if reply and reply[-1] in end_ids else reply, prompt)


def text_streamer(
    on_text: Callable[[str], None],
    sampling: Sampling,
    text_of: Callable[[Sequence[int]], str],
    *,
    in_thought: bool = False,
) -> Callable[[Sequence[int]], None]:
    """Return a function that is called with the tokens of a reply so far and passes their text to
    `on_text`, at most every 10 ms. `in_thought` is that of `cut_at_stop`.
    """
    next_time = 0.0

    def stream(tokens: Sequence[int]) -> None:
        nonlocal next_time
        if (now := time.monotonic()) >= next_time:
            next_time = now + _STREAM_SECONDS
            on_text(stable_text(text_of(tokens), sampling, in_thought=in_thought))

    return stream


def ids_covering(ids: Sequence[int], text: str, text_of: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """Return the shortest beginning of `ids` whose text covers `text`, which is a beginning of the
    text of all of them. `text_of` decodes ids.
    """
    count = len(ids)
    while count > 0 and len(text_of(ids[: count - 1])) >= len(text):
        count -= 1
    return tuple(ids[:count])


def make_generation(
    renderer: Renderer,
    end_ids: Collection[int],
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    ended_by_model: bool,
    logprobs: Sequence[float] | None,
) -> Generation:
    """Return the reply that was sampled as `tokens`, cut where `sampling` ends it.

    Args:
        end_ids: the token ids that end a turn.
        ended_by_model: whether the model ended the reply, and not the limit of its tokens.
        logprobs: one for each token; None if they were not asked for.
    """
    text_of = partial(visible_text, renderer, end_ids, prompt)
    full_text, ids, in_thought = text_of(tokens), tuple(tokens), renderer.opens_thought(prompt)
    text = cut_at_stop(full_text, sampling, in_thought=in_thought)
    is_cut = bool(sampling.until) and text != full_text
    if is_cut:
        ids = ids_covering(tokens, text, text_of)
    has_ended = ended_by_model or is_cut
    return Generation(
        text=text,
        token_ids=ids,
        finish_reason="stop" if has_ended else "length",
        prompt_tokens=len(prompt),
        completion_tokens=len(tokens),
        logprobs=None if logprobs is None else tuple(logprobs[: len(ids)]),
        tokenizer=renderer.fingerprint,
        thinks=in_thought,
        unfinished_thought=in_thought and not has_ended and is_thought(text),
    )


class StopDetector:
    """A detector of the first token with which a reply contains a stop string, or a match of
    `until`.

    Decoding a whole reply at every token is slow, so it is done only after a token whose own text
    could hold the last character of a stop string. `decode` turns token ids into text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._text_by_token: dict[int, str] = {}

    def is_completed(self, ids: Sequence[int], stops: Sequence[str], until: str = "") -> bool:
        """Return whether the text of `ids` contains a stop string or a match of `until`, given that
        the text of `ids[:-1]` does not.
        """
        matched = bool(until) and (self._may_end(ids[-1], ":") or "\n" in self._text_by_token[ids[-1]])
        if not matched and not any(self._may_end(ids[-1], stop) for stop in stops):
            return False
        text = self._decode(ids)
        return any(stop in text for stop in stops) or (matched and bool(re.search(until, blank_thoughts(text))))

    def _may_end(self, token: int, stop: str) -> bool:
        piece = self._text_by_token.get(token)
        if piece is None:
            piece = self._text_by_token[token] = self._decode((token,))
        # Decoded alone, a token may lose its leading space or be part of a character: then only the
        # whole text can tell.
        return stop[-1] in piece or stop[-1].isspace() or not piece or "\N{REPLACEMENT CHARACTER}" in piece


MAX_WIDTH = 8
"""The most replies that share one row: each adds one column per step that is masked for the others.
"""
MIN_SLOTS = 16
_COLUMN_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: the number of its prompt, and those of the replies that grow in it."""

    prompt_index: int
    reply_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows decoded in step, each with `width` slots; a row with fewer replies leaves slots idle."""

    width: int
    rows: tuple[Row, ...]


def plan_batches(
    prompt_lengths: Sequence[int], replies_by_prompt: Sequence[Sequence[int]], *, max_batch: int, max_width: int
) -> list[DecodeBatch]:
    """Return batches of at most `max_batch` slots (one row at least) that cover every reply once.

    `prompt_lengths[p]` is the number of tokens of prompt p, `replies_by_prompt[p]` the numbers of
    the replies to it. Rows of equal width go together, shorter prompts first, so that little of a
    batch's attention falls on padding. A row has at most `max_width` replies.
    """
    by_width: dict[int, list[Row]] = {}
    for prompt, indices in enumerate(replies_by_prompt):
        width = min(1 << (len(indices) - 1).bit_length(), max_width)
        for start in range(0, len(indices), width):
            by_width.setdefault(width, []).append(Row(prompt, tuple(indices[start : start + width])))
    batches = []
    for width, rows in sorted(by_width.items()):
        rows.sort(key=lambda row: (prompt_lengths[row.prompt_index], row.prompt_index))
        num_rows = max(1, max_batch // width)
        batches += [
            DecodeBatch(width, tuple(rows[start : start + num_rows])) for start in range(0, len(rows), num_rows)
        ]
    return batches


def padded_rows(num_rows: int, width: int, min_slots: int = MIN_SLOTS) -> int:
    """Return the number of rows, idle ones included, with which `num_rows` rows are computed.

    rows * width is rounded up to the next of 16, 32, 48, 64, 96, 128, 192, ...; with another
    `min_slots` number of slots, a power of two, that and its multiples take the place of 16.
    `width` is a power of two up to 16.
    """
    num_slots, min_slots = num_rows * width, max(min_slots, width)
    size = min_slots
    while size < num_slots:
        if size > min_slots and size + size // 2 >= num_slots:
            size += size // 2
            break
        size *= 2
    return size // width


def padded_columns(num_columns: int) -> int:
    """Return how many columns a pass reads to see the first `num_columns`: the next multiple of 64,
    so that few shapes occur. Columns beyond `num_columns` are masked.
    """
    return -(-num_columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
