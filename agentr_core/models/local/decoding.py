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
from typing import Any

import torch
from torch import Tensor

from agentr_core.errors import ModelFault
from agentr_core.models.local.grid import Grid, Grown, Reply
from agentr_core.models.local.kv import CACHE, KVShape, LayeredKV
from agentr_core.models.local.masks import Attention, MaskInput
from agentr_core.models.local.prefill import BLOCK, ON_CPU, ON_GPU, Prefill
from agentr_core.models.local.prefix_cache import PrefixCache, block_names
from agentr_core.models.local.sampling import Logits, choose, log_probabilities, penalised, rows_at_once
from agentr_core.models.local.waves import Wave, padded_columns, padded_rows

_COLUMNS_AHEAD = 64
_STEPS_AHEAD = 16
"""A wave reserves this many columns at a time, and columns for this many decode steps at least. All
are read in every step, because rows in one piece are read several times as fast as parts of rows.
"""


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
        buffer.reset(padded_rows(len(wave.rows), wave.width), base + _ahead(wave.width))
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
                more = _ahead(grid.width)
                buffer.grow(buffer.columns + more)
                grid.widen(more)
            first, last = self._attention.span(start - buffer.shift + grid.width, grid.width)
            buffer.far.window(start, buffer.columns)
            buffer.near.window(start - buffer.shift, last, first)
            output = self._model(
                input_ids=grid.tokens,
                attention_mask=self._masks(grid, slice(first, last)),
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

    def _masks(self, grid: Grid, near: slice) -> MaskInput:
        """Return the masks of a step: [rows, 1, width, columns] for far layers."""
        grid.open()
        far = grid.far.mask
        if grid.near is None:
            return self._attention.masks(far, None)
        within = self._attention.within(grid.near.mask[..., near], grid.near.positions[:, near], grid.positions)
        return self._attention.masks(far, within)


def _ahead(width: int) -> int:
    return max(_COLUMNS_AHEAD, _STEPS_AHEAD * width)


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
