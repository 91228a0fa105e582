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
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from agentr_core.errors import ConfigError, ModelDirectoryError, ModelFault
from agentr_core.models.checkpoint_dir import ADAPTER_WEIGHTS, adapter_base
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
from agentr_core.samples.rendering import Renderer

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
    on_tokens: Callable[[Sequence[int]], None] | None = None

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
            if reply.on_tokens is not None:
                reply.on_tokens(reply.tokens)
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
        parameters = dict(self._model.named_parameters())
        mismatches = [n for n in parameters.keys() | weights.keys() if _shape(parameters, n) != _shape(weights, n)]
        if mismatches:
            raise ModelFault(f"the new weights are of another model: {', '.join(sorted(mismatches)[:3])}")
        for name, parameter in parameters.items():
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
        with_logprobs = any(reply.logprobs for reply in grid.live)
        size = rows_at_once(self._vocabulary) if logits.device.type == "cpu" else len(slots)
        tokens, logprobs = [], []
        for start in range(0, len(slots), size):
            part = slice(start, start + size)
            part_logits = rows.index_select(0, slots[part])[:, : self._vocabulary].float()
            model = Logits(part_logits)
            if not bool(torch.isfinite(model.peak).all()):
                raise ModelFault(
                    "the model's output is not a number; its weights are damaged or overflow in this dtype"
                )
            penalty = None if penalties is None else [column[part] for column in penalties]
            adjusted = model if penalty is None else Logits(penalised(part_logits, *penalty))
            temperature, top_p, uniform, top_k, min_p = draws
            limits = (None if column is None else column[part] for column in (top_k, min_p))
            chosen = choose(adjusted, temperature[part], top_p[part], uniform[part], *limits)
            tokens += chosen.tolist()
            logprobs += log_probabilities(model, chosen).tolist() if with_logprobs else []
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


# Loads a Hugging Face model directory and makes sure that the decode loop suits its
# architecture.


# The device that a model in this process runs on, by its name in a recipe.


def torch_device(name: str, *, field: str = "model.device") -> torch.device:
    """Return the device with a name; "auto" is CUDA if available. Raises `ConfigError` if the
    device does not exist.

    `field` is the name of the setting in error messages.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{field} {name!r} is not a device; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{field} is {name!r}, which this backend does not run on; use auto, cpu or cuda")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"{field} is {name!r}, but torch sees no CUDA device; use auto or cpu")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"{field} is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices, counted from 0; name one "
            "of them, or use auto"
        )
    return device


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BY_LENGTH = ("dynamic", "longrope")
_TOLERANCE = {"float32": 0.01, "bfloat16": 0.5}
"""The largest difference in a log-probability that rounding can explain, by number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for the decode loop. Sampled ids lie below `vocabulary`; one of `end_ids` ends
    a reply.

    `shares_rows` says whether several queries on one row need no copy of its keys and values.
    """

    model: Any
    tokenizer: Any
    renderer: Renderer
    shape: KVShape
    attention: Attention
    context_length: int
    vocabulary: int
    end_ids: frozenset[int]
    shares_rows: bool


def load_model(path: Path, *, dtype: str, device: str, context_length: int, at: datetime | None = None) -> LoadedModel:
    """Return a model in evaluation mode on its device. `at` is the moment whose date its chat
    template prints.

    Raises:
        ModelDirectoryError: files do not fit together, or the architecture has layers other than
            full or sliding attention.
        ConfigError: an unknown dtype or device, or a context longer than the model's.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    place = torch_device(device)
    tokenizer, model = _read(path, _DTYPES[dtype])
    model = model.to(place).eval().requires_grad_(False)
    config = model.config.get_text_config()
    max_positions: Any = getattr(config, "max_position_embeddings", None)
    if max_positions is None and not context_length:
        raise ConfigError(f"{path / 'config.json'} does not say how long a context may be; set model.context_length")
    if max_positions is not None and context_length > max_positions:
        raise ConfigError(
            f"model.context_length is {context_length}, but the model of {path} was made for {max_positions}; lower it"
        )
    context: int = context_length or max_positions
    renderer = Renderer(tokenizer, at=at)
    heads = getattr(config, "num_attention_heads", None)
    shape = _kv_shape(path, model, _DTYPES[dtype], place)
    shares_rows = use_grouped_attention(model) or heads == shape.heads
    end_ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        end_ids.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        renderer=renderer,
        shape=shape,
        attention=attention_of(path, config, context),
        context_length=context,
        vocabulary=min(model.get_output_embeddings().weight.shape[0], max(tokenizer.get_vocab().values()) + 1),
        end_ids=frozenset(end_ids) | {renderer.end_of_turn},
        shares_rows=shares_rows,
    )
    _check_decoding(path, loaded, _TOLERANCE[dtype])
    return loaded


def _read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a directory; an adapter comes with its model."""
    # The stages of a run show their own progress.
    transformers_logging.disable_progress_bar()
    base = adapter_base(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            base or path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        if base is not None:
            # The adapter stays in the layers, not merged into the weights.
            # Slow to import, and most models have none.
            from peft import PeftModel, get_peft_model_state_dict

            adapted = PeftModel.from_pretrained(model, path)
            with safe_open(path / ADAPTER_WEIGHTS, framework="numpy") as tensors:
                mismatches = set(get_peft_model_state_dict(adapted)) ^ set(tensors.keys())
            if mismatches:
                raise ValueError(f"adapter and model do not fit: {', '.join(sorted(mismatches)[:3])}")
            model = adapted.get_base_model()
    # What foreign files make a library raise is anyone's guess.
    except Exception as error:
        raise ModelDirectoryError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ModelDirectoryError(
            f"{path} lacks weights or has them in another shape: {', '.join(wrong[:3])}; save it again"
        )
    return tokenizer, model


def attention_of(path: Path, config: Any, context: int) -> Attention:
    """Return how far the layers of a text configuration look back in a context of `context` tokens.

    Raises `ModelDirectoryError` for layers that are neither full nor sliding attention, and for
    positions that depend on what else is in a batch.
    """
    # Transformers turns the keys by the longest row of a batch, also those stored before.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    max_positions = getattr(config, "original_max_position_embeddings", None) or getattr(
        config, "max_position_embeddings", None
    )
    for positions in rope.values() if any(isinstance(part, dict) for part in rope.values()) else [rope]:
        limit = positions.get("original_max_position_embeddings") or max_positions
        if positions.get("rope_type") in _BY_LENGTH and limit and context > limit:
            raise ModelDirectoryError(
                f"the model of {path} has positions of type {positions['rope_type']}, which change with the longest "
                f"row of a batch beyond {limit} tokens; set model.context_length to {limit} or less, or serve it with "
                "vLLM"
            )
    # Without a list of layer types, a model with a window has it in all layers.
    layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    kinds = set(layers)
    if unsupported := kinds - {"full_attention", "sliding_attention"}:
        raise ModelDirectoryError(
            f"the model of {path} has layers of kind {', '.join(sorted(unsupported))}, which this backend cannot "
            "decode; serve it with vLLM"
        )
    window = getattr(config, "sliding_window", None)
    if window is None or window >= context or kinds == {"full_attention"}:
        return Attention(by_kind=len(kinds) == 2)
    near = frozenset(number for number, kind in enumerate(layers) if kind == "sliding_attention")
    return Attention(window=window, near=near, by_kind=len(kinds) == 2)


@torch.inference_mode()
def _kv_shape(path: Path, model: Any, dtype: torch.dtype, device: torch.device) -> KVShape:
    """Return the shape of what the layers store, found by a trial pass: configurations name it in
    many ways.
    """
    output = model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device), use_cache=True)
    layers = getattr(getattr(output, CACHE, None), "layers", [])
    stored = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    shapes = {
        (keys.shape[1], keys.shape[3], values.shape[3]) if keys is not None and values is not None else None
        for keys, values in stored
    }
    if len(shapes) != 1 or None in shapes:
        raise ModelDirectoryError(
            f"the model of {path} does not keep equal keys and values in all layers, so this backend cannot decode it; "
            "serve it with vLLM"
        )
    ((heads, key_size, value_size),) = (shape for shape in shapes if shape is not None)
    return KVShape(len(stored), heads, key_size, value_size, dtype, device)


@torch.inference_mode()
def _check_decoding(path: Path, loaded: LoadedModel, tolerance: float) -> None:
    """Compare the decode loop with a plain forward pass: architectures with other position or mask
    rules would differ.
    """
    decoder = Decoder(
        loaded.model,
        loaded.shape,
        loaded.attention,
        vocabulary=loaded.vocabulary,
        context_length=loaded.context_length,
        ended=lambda tokens, stops, until: False,
        prefix_cache_bytes=0,
    )
    prompts = [[(7 * i + 1) % loaded.vocabulary for i in range(length)] for length in (4, 9)]
    replies = [
        Reply(prompt=number, seed=0, number=0, temperature=0.0, top_p=1.0, limit=3, logprobs=True, stops=())
        for number in range(2)
    ]
    decoder.decode(Wave(1, (Row(0, (0,)), Row(1, (1,)))), prompts, replies)
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([prompt + reply.tokens], device=loaded.shape.device)
        logits = loaded.model(input_ids=ids).logits[0, len(prompt) - 1 : -1, : loaded.vocabulary]
        plain = logits.double().log_softmax(dim=-1)[range(len(reply.tokens)), reply.tokens].tolist()
        difference = max(abs(a - b) for a, b in zip(plain, reply.token_logprobs, strict=True))
        if difference > tolerance:
            raise ModelDirectoryError(
                f"the model of {path} gives other results token by token than at once (log-probabilities differ by "
                f"{difference:.2g}), so this backend cannot decode it; serve it with vLLM"
            )
