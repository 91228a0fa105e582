"""The decode loop: prompts in, sampled token ids out, on a Transformers causal language model.

Transformers' `generate` has one random generator for a whole batch, so it cannot give each reply
its own stream. This loop can, and it is built for many short replies to long, similar prompts:

- Prompt prefixes that were computed before, earlier replies included, come from a prefix cache.
- The replies to one prompt share its keys and values: they are several queries on one row of the
  cache, and each is masked to the columns of the prompt and its own.
- Keys and values are written in place; rows whose replies have ended are dropped as soon as a
  smaller shape suffices.
- Layers with a sliding window get little more than the columns in that window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentr_core.errors import ModelFault
from agentr_core.models.local.cache import (
    BLOCK,
    CACHE,
    ON_CPU,
    ON_GPU,
    Attention,
    KVShape,
    LayeredKV,
    Prefill,
    PrefixCache,
    View,
    block_names,
)
from agentr_core.models.local.sampling import Logits, choose, log_probabilities, penalised, rows_at_once, uniforms
from agentr_core.models.local.waves import MAX_WIDTH, Row, Wave, padded_columns, padded_rows

# The replies of a wave while they are decoded, and the grid of slots in which they grow.


@dataclass(slots=True)
class Reply:
    """One reply while it is decoded. `limit` is the most tokens it may have; `ended` says that the
    model ended it.
    """

    prompt: int
    seed: int
    number: int
    temperature: float
    top_p: float
    limit: int
    logprobs: bool
    stops: tuple[str, ...]
    until: str = ""
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    tokens: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def finished(self) -> bool:
        return self.ended or len(self.tokens) >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The place of a finished reply's keys and values in row `row` of the wave's buffer.

    `tokens` are those of the prompt, then those of the reply without its last one, which was never
    fed. The first `filled` of them, all of the prompt but its last token, were filled in from
    column 0 on; in near layers they end just before column `base`. The others were fed one by one:
    the first into column `fed`, each of the next `width` columns further.
    """

    row: int
    tokens: Sequence[int]
    filled: int
    base: int
    fed: int
    width: int

    def columns(self, start: int, stop: int) -> list[int]:
        """Return the columns in far layers of the tokens with numbers from `start` up to `stop`."""
        return [number if number < self.filled else self._fed(number) for number in range(start, stop)]

    def near_columns(self, start: int, stop: int) -> list[int]:
        """Return the columns of the same tokens in near layers, before the buffer's shift."""
        before = self.base - self.filled
        return [before + number if number < self.filled else self._fed(number) for number in range(start, stop)]

    def _fed(self, number: int) -> int:
        return self.fed + (number - self.filled) * self.width


class Grid:
    """The slots of a wave while it is decoded: which reply grows where, what is fed next, what each
    slot may see.

    Step t of a wave writes the columns `base + t * width ...`, one for each slot of a row; so
    columns mean the same in all rows, and a step's keys and values are stored with one slice.
    """

    def __init__(
        self,
        wave: Wave,
        prompts: Sequence[Sequence[int]],
        replies: Sequence[Reply],
        buffer: LayeredKV,
        base: int,
        window: int | None,
        vocabulary: int,
    ) -> None:
        self.width = wave.width
        self.column = self._base = base
        self._device = buffer.shape.device
        self._rows: list[Row | None] = [*wave.rows, *[None] * (buffer.rows - len(wave.rows))]
        self._prompts = prompts
        self._replies = replies
        tokens = np.zeros((buffer.rows, wave.width), dtype=np.int64)
        positions = np.zeros_like(tokens)
        self.far = self._view(buffer, shift=0)
        # The positions of prompt tokens; those of reply tokens are added step by step.
        self.far.positions += torch.arange(buffer.columns, device=self._device)
        for place, row in enumerate(wave.rows):
            prompt = prompts[row.prompt]
            tokens[place] = prompt[-1]
            positions[place] = len(prompt) - 1
            self.far.mask[place, :, :, : len(prompt) - 1] = 0
        self.near: View | None = None
        if window is not None:
            # Near layers keep only the last tokens of each prompt.
            near = buffer.settle(positions[:, 0].tolist(), base, window)
            self.near = self._view(buffer, shift=buffer.shift)
            self.near.positions[:, : near.shape[1]] = near
            self.near.mask[..., : near.shape[1]].masked_fill_((near >= 0)[:, None, None, :], 0)
        self.tokens = torch.from_numpy(tokens).to(self._device)
        self.positions = torch.from_numpy(positions).to(self._device)
        self._draws = {
            number: uniforms(replies[number].seed, replies[number].number, replies[number].limit)
            for row in wave.rows
            for number in row.replies
            if replies[number].temperature > 0
        }
        # Which tokens occur in the prompts of replies with a penalty, one line per reply, and the
        # line of each; all other replies share the last line.
        numbers = [n for row in wave.rows for n in row.replies if replies[n].repetition_penalty != 1]
        self._seen: Tensor | None = None
        self._seen_places = {number: line for line, number in enumerate(numbers)}
        if numbers:
            self._seen = torch.zeros((len(numbers) + 1, vocabulary), dtype=torch.bool, device=self._device)
            for line, number in enumerate(numbers):
                ids = torch.tensor(prompts[replies[number].prompt], device=self._device)
                self._seen[line, ids[ids < vocabulary]] = True
        self._refresh()

    def live_rows(self) -> list[int]:
        """Return the rows in which a reply still grows."""
        return sorted({place for place, _ in self._slots})

    def slots(self) -> Tensor:
        """Return the flat indices [live] of the slots of the `live` replies."""
        return self._flat

    def open(self) -> None:
        """Let each slot see the column that it writes in this step."""
        for view in self._views:
            view.open(self.column, self.positions)

    def draws(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the arguments of `sampling.choose` after the logits: temperature, top-p, this
        step's uniform number, and top-k and min-p if any live reply has one; each [live].
        """
        step = len(self.live[0].tokens)
        numbers = [self._draws[i][step] if i in self._draws else 0.0 for i in self._numbers]
        uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return self._temperature, self._top_p, uniform, self._top_k, self._min_p

    def penalties(self) -> tuple[Tensor, Tensor] | None:
        """Return the arguments of `sampling.penalised` after the logits: the penalties [live] and
        which tokens each reply has seen [live, vocabulary]; None if no reply has a penalty.
        """
        return None if self._seen is None else (self._penalty, self._seen[self._places])

    def accept(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        ended: Callable[[Sequence[int], tuple[str, ...], str], bool],
    ) -> list[Grown]:
        """Append one token to each live reply, to be fed in the next step; return the replies that
        have ended.
        """
        fed = torch.tensor(tokens, device=self._device)
        self.tokens.view(-1)[self._flat] = fed
        if self._seen is not None:
            self._seen[self._places, fed] = True
        self.positions += 1
        self.column += self.width
        for reply, token in zip(self.live, tokens, strict=True):
            reply.tokens.append(token)
            reply.ended = ended(reply.tokens, reply.stops, reply.until)
        if logprobs:
            for reply, logprob in zip(self.live, logprobs, strict=True):
                reply.token_logprobs.append(logprob)
        grown = [
            Grown(
                row=row,
                tokens=[*self._prompts[reply.prompt], *reply.tokens[:-1]],
                filled=len(self._prompts[reply.prompt]) - 1,
                base=self._base,
                fed=self._base + slot,
                width=self.width,
            )
            for (row, slot), reply in zip(self._slots, self.live, strict=True)
            if reply.finished
        ]
        if grown:
            self._refresh()
        return grown

    def widen(self, more: int) -> None:
        """Add `more` columns, as the buffer did."""
        for view in self._views:
            view.widen(more)

    def shrink(self, buffer: LayeredKV, size: int) -> None:
        """Drop rows without live replies, here and in the buffer."""
        live = self.live_rows()
        places = buffer.keep(live, size, self.column)
        source = torch.arange(size)
        source[places] = torch.tensor(live, dtype=torch.long)
        source = source.to(self._device)
        self.tokens, self.positions = self.tokens[source], self.positions[source]
        for view in self._views:
            view.take(source)
        rows = self._rows
        self._rows = [None] * size
        for row, place in zip(live, places, strict=True):
            self._rows[place] = rows[row]
        self._refresh()

    @property
    def _views(self) -> list[View]:
        return [view for view in (self.far, self.near) if view is not None]

    def _view(self, buffer: LayeredKV, *, shift: int) -> View:
        """Return a view in which no slot sees anything."""
        rows, columns, dtype = buffer.rows, buffer.columns, buffer.shape.dtype
        mask = torch.full((rows, 1, self.width, columns), -torch.inf, dtype=dtype, device=self._device)
        return View(mask, torch.zeros((rows, columns), dtype=torch.long, device=self._device), shift)

    def _refresh(self) -> None:
        self._slots = [
            (place, slot)
            for place, row in enumerate(self._rows)
            if row is not None
            for slot, number in enumerate(row.replies)
            if not self._replies[number].finished
        ]
        self._numbers = [row.replies[slot] for place, slot in self._slots if (row := self._rows[place]) is not None]
        self.live = [self._replies[number] for number in self._numbers]
        self._flat = torch.tensor([place * self.width + slot for place, slot in self._slots], device=self._device)
        self._temperature = self._column_of([reply.temperature for reply in self.live])
        self._top_p = self._column_of([reply.top_p for reply in self.live])
        limits = [reply.top_k for reply in self.live]
        self._top_k = torch.tensor(limits, device=self._device) if any(limits) else None
        least = [reply.min_p for reply in self.live]
        self._min_p = self._column_of(least) if any(least) else None
        if self._seen is not None:
            self._penalty = self._column_of([reply.repetition_penalty for reply in self.live])
            lines = [self._seen_places.get(number, -1) for number in self._numbers]
            self._places = torch.tensor(lines, device=self._device)

    def _column_of(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)


_COLUMNS_AHEAD = 64
_STEPS_AHEAD = 16
"""A wave reserves this many columns at a time, and columns for this many decode steps at least. All
are read in every step, because rows in one piece are read several times as fast as parts of rows.
"""


# Transformers' continuous batching (`generate_batch`) is measured beside this loop in
# tests/bench/bench_generation.py: on a CPU it is faster for one prompt, and about half as fast for
# sixteen.
class Decoder:
    """Decodes waves of replies with one model. Not thread-safe: one worker owns it.

    `model` is a Transformers causal language model in evaluation mode, `shape` what its layers
    store, `attention` how far they look back, `vocabulary` the number of token ids that may be
    sampled, and `ended(tokens, stops, until)` says whether the last token ends a reply. No prompt
    and its reply may have more than `context_length` tokens together.

    `passes` counts the forward passes begun so far, and `written` the tokens of all replies; once
    another thread sets `given_up`, no pass is begun.
    """

    def __init__(
        self,
        model: Any,
        shape: KVShape,
        attention: Attention,
        *,
        vocabulary: int,
        context_length: int,
        ended: Callable[[Sequence[int], tuple[str, ...], str], bool],
        prefix_cache_bytes: int,
    ) -> None:
        self._model = model
        self._shape = shape
        self._attention = attention
        self._vocabulary = vocabulary
        self._last_position = context_length - 1
        self._ended = ended
        self._prefixes = PrefixCache(prefix_cache_bytes)
        sizes = ON_CPU if shape.device.type == "cpu" else ON_GPU
        self.prefill = Prefill(model, attention, self._prefixes, self._last_position, sizes, self._begin)
        self.passes = 0
        self.written = 0
        self.given_up = False
        self._spare: LayeredKV | None = None

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the model's parameters with those of the same names, and drop whatever was
        computed with the old ones.

        Raises `ModelFault` when names or shapes differ.
        """
        own = dict(self._model.named_parameters())
        strangers = [n for n in own.keys() | weights.keys() if _shape(own, n) != _shape(weights, n)]
        if strangers:
            raise ModelFault(f"the new weights are of another model: {', '.join(sorted(strangers)[:3])}")
        for name, parameter in own.items():
            parameter.copy_(weights[name])
        self._prefixes.clear()

    @torch.inference_mode()
    def decode(self, wave: Wave, prompts: Sequence[Sequence[int]], replies: Sequence[Reply]) -> None:
        """Complete the replies of a wave in place.

        Raises `ModelFault` when the model's output is not a number, or the work was given up.
        """
        # The last prompt token is fed by the first decode step, so that step is like all others.
        heads = [prompts[row.prompt][:-1] for row in wave.rows]
        base = padded_columns(max(len(head) for head in heads))
        # The buffer of a wave that fails is dropped: a NaN in it would reach the next wave through
        # the mask.
        buffer, self._spare = self._spare or LayeredKV(self._shape, self._attention.near, self._attention.window), None
        buffer.reset(padded_rows(len(wave.rows), wave.width), base + max(_COLUMNS_AHEAD, _STEPS_AHEAD * wave.width))
        self.prefill.fill(buffer, heads)
        self._prefixes.trim()
        self._generate(buffer, Grid(wave, prompts, replies, buffer, base, self._attention.window, self._vocabulary))
        self._prefixes.trim()
        self._spare = buffer

    def _begin(self) -> None:
        if self.given_up:
            raise ModelFault("the work under way was given up")
        self.passes += 1

    def _generate(self, buffer: LayeredKV, grid: Grid) -> None:
        while grid.live:
            self._begin()
            start = grid.column
            if start + grid.width > buffer.columns:
                more = max(_COLUMNS_AHEAD, _STEPS_AHEAD * grid.width)
                buffer.grow(buffer.columns + more)
                grid.widen(more)
            first, last = self._attention.span(start - buffer.shift + grid.width, grid.width)
            buffer.far.window(start, buffer.columns)
            buffer.near.window(start - buffer.shift, last, first)
            grid.open()
            within = None
            if grid.near is not None:
                mask, columns = grid.near.mask[..., first:last], grid.near.positions[:, first:last]
                within = self._attention.within(mask, columns, grid.positions)
            output = self._model(
                input_ids=grid.tokens,
                attention_mask=self._attention.masks(grid.far.mask, within),
                # Slots whose reply has ended keep advancing their position; their output is not
                # read, but must stay computable.
                position_ids=grid.positions.clamp(max=self._last_position),
                use_cache=True,
                **{CACHE: buffer.cache},
            )
            self.written += len(grid.live)
            for ended in grid.accept(*self._sample(output.logits, grid), self._ended):
                self._remember(buffer, ended)
            size = padded_rows(max(1, len(grid.live_rows())), grid.width)
            if size < buffer.rows:
                grid.shrink(buffer, size)

    def _remember(self, buffer: LayeredKV, reply: Grown) -> None:
        """Cache the blocks that a reply has completed: later prompts of its conversation begin with
        them.
        """
        if not self._prefixes.max_bytes:
            return
        names = block_names(reply.tokens, BLOCK)
        for number in range(reply.filled // BLOCK, len(names)):
            if names[number] not in self._prefixes:
                start, stop = number * BLOCK, (number + 1) * BLOCK
                columns, near = reply.columns(start, stop), reply.near_columns(start, stop)
                self._prefixes.put(names[number], buffer.read_reply(reply.row, columns, near))

    def _sample(self, logits: Tensor, grid: Grid) -> tuple[list[int], list[float]]:
        """Return the next token of each live reply, and its log-probability if any reply wants
        them.
        """
        rows, slots, draws, penalties = logits.flatten(0, 1), grid.slots(), grid.draws(), grid.penalties()
        wanted = any(reply.logprobs for reply in grid.live)
        size = rows_at_once(self._vocabulary) if logits.device.type == "cpu" else len(slots)
        tokens, logprobs = [], []
        for start in range(0, len(slots), size):
            part = slice(start, start + size)
            own = rows.index_select(0, slots[part])[:, : self._vocabulary].float()
            model = Logits(own)
            if not bool(torch.isfinite(model.peak).all()):
                raise ModelFault(
                    "the model's output is not a number; its weights are damaged or overflow in this dtype"
                )
            penalty = None if penalties is None else [column[part] for column in penalties]
            adjusted = model if penalty is None else Logits(penalised(own, *penalty))
            temperature, top_p, uniform, top_k, min_p = draws
            limits = (None if column is None else column[part] for column in (top_k, min_p))
            chosen = choose(adjusted, temperature[part], top_p[part], uniform[part], *limits)
            tokens += chosen.tolist()
            logprobs += log_probabilities(model, chosen).tolist() if wanted else []
        return tokens, logprobs


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


# Attention of the in-process sampler: few queries on many stored keys.
#
# A decode step has one query for each reply, or a few that share a row. There PyTorch's fused
# kernel takes four to eight times as long as two plain products on a CPU in bfloat16, and somewhat
# longer in float32 (deployments/LOG.md).
#
# Transformers repeats keys and values for each query head as soon as a row has several queries and
# a mask: with 8 replies on one row it would write and read all of them once per head in every
# layer. Here the queries of the heads that share keys are laid side by side as queries of one head;
# only the mask is repeated, which is far smaller.

NAME = "agentr_grouped"


def use_grouped_attention(model: Any) -> bool:
    """Switch a model to grouped attention where possible; return whether it was switched.

    A model that was loaded with an attention other than Transformers' `sdpa`, such as one with
    capped scores, keeps it.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output of attention [rows, queries, heads, size]; called by the layers of a
    Transformers model.

    Masks are [rows or 1, 1, queries, columns]. Without a mask, or if the model has a position bias
    or capped scores, Transformers' own function is called. Stored keys and values that lie in one
    piece are read fastest.
    """
    groups = query.shape[1] // key.shape[1]
    biased = options.get("position_bias") is not None or options.get("softcap") is not None
    if attention_mask is None or attention_mask.shape[1] != 1 or biased:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended
    rows, heads, queries, size = query.shape
    # Query heads that share keys lie side by side, so a reshape is all it takes.
    folded = query.reshape(rows, key.shape[1], groups * queries, size)
    mask = attention_mask.repeat(1, 1, groups, 1)
    # A decode step; Transformers' own masks, of truth values, belong to plain forward passes.
    if queries <= MAX_WIDTH and mask.is_floating_point() and query.device.type == "cpu":
        # In bfloat16, softmax of 16-bit scores would lose what the fused kernel keeps.
        scores = torch.matmul(folded, key.transpose(-1, -2)).float()
        weights = scores.mul_(size**-0.5 if scaling is None else scaling).add_(mask).softmax(dim=-1)
        output = torch.matmul(weights.to(value.dtype), value)
    else:
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, queries, value.shape[3]).transpose(1, 2).contiguous(), None
