"""The decode loop: prompts in, sampled token ids out, on a Transformers causal language model.

Transformers' `generate` has one random generator for a whole batch, so it cannot give each reply
its own stream. This loop can, and it is built for many short replies to long, similar prompts:

- Prompt prefixes that were computed before, earlier replies included, come from a prefix cache.
- The replies to one prompt share its keys and values: they are several queries on one row of the
  cache, and each is masked to the columns of the prompt and its own.
- Keys and values are written in place; rows whose replies have ended are dropped as soon as a
  smaller shape suffices.
- Layers with a sliding window read little more than the columns in that window.
- The next tokens of a reply are drafted from earlier text, and checked together in one step
  (speculative decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentr_core.errors import ModelFault
from agentr_core.models.local.cache import (
    BLOCK_SIZE,
    CACHE,
    CPU_PASS_SIZES,
    GPU_PASS_SIZES,
    AttentionLayers,
    KVShape,
    LayeredKV,
    MaskView,
    Prefill,
    PrefixCache,
    block_hashes,
)
from agentr_core.models.local.drafting import Drafter, History
from agentr_core.models.local.sampling import (
    Logits,
    apply_penalty,
    choose_tokens,
    log_probabilities,
    rows_at_once,
    uniforms,
)
from agentr_core.models.local.waves import MAX_WIDTH, MIN_SLOTS, DecodeBatch, Row, padded_columns, padded_rows

# The replies of a batch while they are decoded, and the grid of slots in which they grow.


@dataclass(slots=True)
class Reply:
    """One reply while it is decoded. `prompt_index` is the number of its prompt, `seed` and
    `number` select its random stream, `limit` is the most tokens that it may have, and
    `ended_by_model` says that the model ended it. `on_tokens` is called with all its tokens after
    each step.
    """

    prompt_index: int
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
    ended_by_model: bool = False
    on_tokens: Callable[[Sequence[int]], None] | None = None

    @property
    def is_finished(self) -> bool:
        return self.ended_by_model or len(self.tokens) >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLocation:
    """Where the keys and values of a finished reply are: in row `row` of the batch's buffer.

    `tokens` are those of the prompt, then those of the reply without its last one, which was never
    fed. The first `num_filled` of them, all of the prompt but its last token, were filled in from
    column 0 on; in near layers (those with a sliding window) they end just before column
    `base_column`. The others were fed one by one, the i-th of them into column `fed_columns[i]`.
    """

    row: int
    tokens: Sequence[int]
    num_filled: int
    base_column: int
    fed_columns: Sequence[int]

    def columns(self, start: int, stop: int) -> list[int]:
        """Return the columns in far layers of the tokens with indices from `start` up to `stop`."""
        return [
            number if number < self.num_filled else self.fed_columns[number - self.num_filled]
            for number in range(start, stop)
        ]

    def near_columns(self, start: int, stop: int) -> list[int]:
        """Return the columns in near layers of the tokens with indices from `start` up to `stop`,
        before the buffer's shift is subtracted.
        """
        before = self.base_column - self.num_filled
        return [
            before + number if number < self.num_filled else self.fed_columns[number - self.num_filled]
            for number in range(start, stop)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What the model reads in a step with `size` tokens for each slot: tokens and their positions
    [rows, width * size], and the masks of its far and its near layers [rows, 1, width * size,
    columns]; `near_mask` is None without near layers.

    The tokens of a slot lie side by side: the last one of its reply, then its draft.
    """

    tokens: Tensor
    positions: Tensor
    far_mask: Tensor
    near_mask: Tensor | None


class Grid:
    """The slots of a batch while it is decoded: which reply grows where, what is fed next, and what
    each slot may see.

    A step writes the columns from `column` on, one for each token fed to a slot of a row; so
    columns mean the same in all rows, and a step's keys and values are stored with one slice.
    Columns of draft tokens that turned out wrong stay masked.

    Args:
        base: the first column of the replies; prompts end before it.
        window: that of the near layers; None without such layers.
        vocabulary: the number of token ids that may be sampled.
        drafter: where drafts come from; None for steps of one token a slot.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        prompts: Sequence[Sequence[int]],
        replies: Sequence[Reply],
        buffer: LayeredKV,
        base: int,
        window: int | None,
        vocabulary: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.width = batch.width
        self.column = self._base = base
        self._device = buffer.shape.device
        self._rows: list[Row | None] = [*batch.rows, *[None] * (buffer.num_rows - len(batch.rows))]
        self._prompts = prompts
        self._replies = replies
        tokens = np.zeros((buffer.num_rows, batch.width), dtype=np.int64)
        positions = np.zeros_like(tokens)
        self._far = self._empty_view(buffer, shift=0)
        # The positions of prompt tokens; those of reply tokens are added step by step.
        self._far.positions += torch.arange(buffer.num_columns, device=self._device)
        for place, row in enumerate(batch.rows):
            prompt = prompts[row.prompt_index]
            tokens[place] = prompt[-1]
            positions[place] = len(prompt) - 1
            self._far.mask[place, :, :, : len(prompt) - 1] = 0
        self._near: MaskView | None = None
        if window is not None:
            # Near layers keep only the last tokens of each prompt.
            near = buffer.finish_prompts(positions[:, 0].tolist(), base, window)
            self._near = self._empty_view(buffer, shift=buffer.shift)
            self._near.positions[:, : near.shape[1]] = near
            self._near.mask[..., : near.shape[1]].masked_fill_((near >= 0)[:, None, None, :], 0)
        self._tokens = torch.from_numpy(tokens).to(self._device)
        self._positions = torch.from_numpy(positions).to(self._device)
        numbers = [number for row in batch.rows for number in row.reply_indices]
        self._uniforms = {
            number: uniforms(replies[number].seed, replies[number].number, replies[number].limit)
            for number in numbers
            if replies[number].temperature > 0
        }
        # Which tokens occur in the prompts of replies with a penalty, one line per reply, and the
        # line of each; all other replies share the last line.
        penalised_numbers = [number for number in numbers if replies[number].repetition_penalty != 1]
        self._seen_tokens: Tensor | None = None
        self._seen_lines_by_reply = {number: line for line, number in enumerate(penalised_numbers)}
        if penalised_numbers:
            shape = (len(penalised_numbers) + 1, vocabulary)
            self._seen_tokens = torch.zeros(shape, dtype=torch.bool, device=self._device)
            for line, number in enumerate(penalised_numbers):
                ids = torch.tensor(prompts[replies[number].prompt_index], device=self._device)
                self._seen_tokens[line, ids[ids < vocabulary]] = True
        # The penalty depends on the tokens just before, so a batch with one has no drafts.
        self._drafter = None if penalised_numbers else drafter
        drafted_numbers = numbers if self._drafter is not None else []
        self._histories = {number: History(prompts[replies[number].prompt_index]) for number in drafted_numbers}
        self._fed_columns: dict[int, list[int]] = {number: [] for number in numbers}
        self._step_columns: list[int] = []
        self._update_live()

    def live_rows(self) -> list[int]:
        """Return the rows in which a reply still grows."""
        return sorted({place for place, _ in self._slots})

    def choose_drafts(self) -> int:
        """Choose a draft for each live reply; return how many tokens the next step feeds to each
        slot, 1 if there are no drafts.
        """
        self._current_drafts: list[Sequence[int]] = [()] * len(self.live_replies)
        if self._drafter is None or not self._drafter.should_draft():
            return 1
        for place, (number, reply) in enumerate(zip(self._reply_indices, self.live_replies, strict=True)):
            # The token after a draft is chosen in the same step.
            self._current_drafts[place] = self._drafter.draft(self._histories[number])[
                : reply.limit - len(reply.tokens) - 1
            ]
        longest = self._drafter.max_tokens if len(self.live_replies) <= _FEW_SLOTS else self._drafter.max_tokens // 2
        self._current_drafts = [draft[:longest] for draft in self._current_drafts]
        if sum(map(len, self._current_drafts)) < _MIN_DRAFT_SHARE * longest * len(self.live_replies):
            self._current_drafts = [()] * len(self.live_replies)
            return 1
        return 1 + longest

    def step_input(self, size: int, attention: AttentionLayers, columns: tuple[int, int]) -> StepInput:
        """Return what the next step reads, with `size` tokens for each slot; `columns` are
        the first column and the end of the columns that near layers see.
        """
        tokens, positions = self._tokens, self._positions
        if size > 1:
            steps = torch.arange(size, device=self._device)
            drafts = np.zeros((tokens.numel(), size - 1), dtype=np.int64)
            for place, draft in zip(self._flat_slots.tolist(), self._current_drafts, strict=True):
                drafts[place, : len(draft)] = draft
            draft_tokens = torch.from_numpy(drafts).to(self._device)
            tokens = torch.cat([tokens.view(-1, 1), draft_tokens], dim=1).view(len(tokens), -1)
            positions = (positions[:, :, None] + steps).flatten(1)
        far, near = self._far.step_mask(self.column, positions, size), None
        if self._near is not None:
            part = slice(*columns)
            mask = self._near.step_mask(self.column, positions, size)[..., part]
            near = attention.window_mask(mask, self._near.positions[:, part], positions)
        return StepInput(tokens=tokens, positions=positions, far_mask=far, near_mask=near)

    def first_near_column(self, window: int) -> int:
        """Return the first column that near layers need in the next step: tokens of a reply before
        it are outside the window of every token in that step. The buffer's shift is not yet
        subtracted.
        """
        # A step adds at least one token to each live slot.
        before = self._step_columns[len(self._step_columns) - min(window - 1, len(self._step_columns)) :]
        missing = window - 1 - len(before)
        return self._base - missing if missing else before[0] if before else self.column

    def logit_selection(self, size: int) -> tuple[Tensor, Tensor]:
        """Return two tensors [picks] that say which logits of a step are read, reply by reply: the
        flat index of slot and token, slot * `size` + token, and the index of the reply in
        `live_replies`. A reply has one pick for its last token and one for each token of its draft.
        """
        counts = torch.tensor([1 + len(draft) for draft in self._current_drafts])
        owners = torch.arange(len(self.live_replies)).repeat_interleave(counts)
        steps = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        owners = owners.to(self._device)
        return self._flat_slots[owners] * size + steps.to(self._device), owners

    def sampling_arguments(self, owners: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the arguments of `sampling.choose_tokens` after the logits, each [picks]:
        temperature, top-p, this step's uniform random numbers, top-k and min-p. The last two are
        None if no live reply has one. `owners` are the second result of `logit_selection`.
        """
        numbers = [
            self._uniforms[number][len(reply.tokens) + step] if number in self._uniforms else 0.0
            for number, reply, draft in zip(self._reply_indices, self.live_replies, self._current_drafts, strict=True)
            for step in range(1 + len(draft))
        ]
        uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        top_k, min_p = (None if column is None else column[owners] for column in (self._top_k, self._min_p))
        return self._temperature[owners], self._top_p[owners], uniform, top_k, min_p

    def penalty_arguments(self) -> tuple[Tensor, Tensor] | None:
        """Return the arguments of `sampling.apply_penalty` after the logits: the penalties [live],
        and a mask [live, vocabulary] of the tokens that each reply has seen. None if no reply has a
        penalty.
        """
        return None if self._seen_tokens is None else (self._penalty, self._seen_tokens[self._seen_lines])

    def accept(
        self,
        size: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        is_end: Callable[[Sequence[int], tuple[str, ...], str], bool],
    ) -> tuple[int, list[ReplyLocation]]:
        """Append to each live reply what a step of `size` tokens chose for it, up to and
        including the first token that differs from its draft. Return the number of tokens appended
        to all replies, and the places of the replies that have now ended.

        `tokens` and `logprobs` [picks] are in the order of `logit_selection`; `logprobs` may be
        empty. `is_end` is that of `Decoder`.
        """
        counts = torch.ones(self._tokens.numel(), dtype=torch.long)
        start, total, last, flat = 0, 0, [], self._flat_slots.tolist()
        for place, number, reply, draft in zip(
            flat, self._reply_indices, self.live_replies, self._current_drafts, strict=True
        ):
            before = len(reply.tokens)
            for step, token in enumerate(tokens[start : start + 1 + len(draft)]):
                reply.tokens.append(token)
                if logprobs:
                    reply.token_logprobs.append(logprobs[start + step])
                reply.ended_by_model = is_end(reply.tokens, reply.stops, reply.until)
                if reply.is_finished or step == len(draft) or token != draft[step]:
                    break
            start += 1 + len(draft)
            last.append(reply.tokens[-1])
            counts[place] = count = len(reply.tokens) - before
            total += count
            column = self.column + place % self.width * size
            self._fed_columns[number] += range(column, column + count)
            if self._drafter is not None:
                self._histories[number].add(reply.tokens[before:])
            if reply.on_tokens is not None:
                reply.on_tokens(reply.tokens)
        fed = torch.tensor(last, device=self._device)
        self._tokens.view(-1)[self._flat_slots] = fed
        if self._seen_tokens is not None:
            self._seen_tokens[self._seen_lines, fed] = True
        counts = counts.view(self._tokens.shape).to(self._device)
        if self._drafter is not None and size > 1:
            self._drafter.record_gain(total / len(self.live_replies))
            for view in self._views:
                view.unmask(self.column, counts, size)
        self._positions += counts
        self._step_columns.append(self.column)
        self.column += self.width * size
        reply_locations = self._collect_finished()
        if reply_locations:
            self._update_live()
        return total, reply_locations

    def _collect_finished(self) -> list[ReplyLocation]:
        """Return the places of the replies that have just ended, and give these replies to `drafts`
        as a source of later drafts.
        """
        reply_locations = []
        for (row, _), number, reply in zip(self._slots, self._reply_indices, self.live_replies, strict=True):
            if reply.is_finished:
                prompt = self._prompts[reply.prompt_index]
                tokens = [*prompt, *reply.tokens[:-1]]
                reply_locations.append(
                    ReplyLocation(
                        row=row,
                        tokens=tokens,
                        num_filled=len(prompt) - 1,
                        base_column=self._base,
                        fed_columns=self._fed_columns[number],
                    )
                )
                if self._drafter is not None:
                    self._drafter.add_reply(self._histories[number], len(prompt))
        return reply_locations

    def add_columns(self, num_columns: int) -> None:
        """Add `num_columns` columns, as was done with the buffer."""
        for view in self._views:
            view.add_columns(num_columns)

    def shrink(self, buffer: LayeredKV, num_rows: int) -> None:
        """Reduce the grid and the buffer to `num_rows` rows that include all live ones."""
        live = self.live_rows()
        new_rows = buffer.shrink(live, num_rows, self.column)
        source_rows = torch.arange(num_rows)
        source_rows[new_rows] = torch.tensor(live, dtype=torch.long)
        source_rows = source_rows.to(self._device)
        self._tokens, self._positions = self._tokens[source_rows], self._positions[source_rows]
        for view in self._views:
            view.select_rows(source_rows)
        rows = self._rows
        self._rows = [None] * num_rows
        for row, place in zip(live, new_rows, strict=True):
            self._rows[place] = rows[row]
        self._update_live()

    @property
    def _views(self) -> list[MaskView]:
        return [view for view in (self._far, self._near) if view is not None]

    def _empty_view(self, buffer: LayeredKV, *, shift: int) -> MaskView:
        """Return a view of the buffer in which no slot sees anything yet."""
        rows, columns, dtype = buffer.num_rows, buffer.num_columns, buffer.shape.dtype
        mask = torch.full((rows, 1, self.width, columns), -torch.inf, dtype=dtype, device=self._device)
        return MaskView(mask, torch.zeros((rows, columns), dtype=torch.long, device=self._device), shift)

    def _update_live(self) -> None:
        self._slots = [
            (place, slot)
            for place, row in enumerate(self._rows)
            if row is not None
            for slot, number in enumerate(row.reply_indices)
            if not self._replies[number].is_finished
        ]
        self._reply_indices = [
            row.reply_indices[slot] for place, slot in self._slots if (row := self._rows[place]) is not None
        ]
        self.live_replies = [self._replies[number] for number in self._reply_indices]
        self._flat_slots = torch.tensor([place * self.width + slot for place, slot in self._slots], device=self._device)
        self._temperature = self._float_tensor([reply.temperature for reply in self.live_replies])
        self._top_p = self._float_tensor([reply.top_p for reply in self.live_replies])
        limits = [reply.top_k for reply in self.live_replies]
        self._top_k = torch.tensor(limits, device=self._device) if any(limits) else None
        least = [reply.min_p for reply in self.live_replies]
        self._min_p = self._float_tensor(least) if any(least) else None
        if self._seen_tokens is not None:
            self._penalty = self._float_tensor([reply.repetition_penalty for reply in self.live_replies])
            lines = [self._seen_lines_by_reply.get(number, -1) for number in self._reply_indices]
            self._seen_lines = torch.tensor(lines, device=self._device)

    def _float_tensor(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)


_COLUMNS_AHEAD = 64
_STEPS_AHEAD = 16
"""A batch reserves this many columns at a time, and columns for this many decode steps at least.
All are read in every step, because rows in one piece are read several times as fast as parts of
rows.
"""
_MIN_DRAFT_SLOTS = 4
"""The least number of slots of a batch with drafts. It may be small: a slot then has several
tokens, and the last bits depend on the size of a step anyway.
"""
_FEW_SLOTS = 16
"""Up to this many live replies have drafts of full length; if there are more, drafts are half as
long.
"""
_MIN_DRAFT_SHARE = 0.25
"""The least share of a step's draft tokens for which there must be a guess; otherwise the step has
no drafts.
"""


# Transformers' continuous batching (`generate_batch`) is measured beside this loop in
# tests/bench/bench_generation.py: on a CPU it is faster for one prompt, and about half as fast for
# sixteen.
class Decoder:
    """Decodes batches of replies with one model. Not thread-safe: one worker owns it.

    `model` is a Transformers causal language model in evaluation mode, `shape` what its layers
    store, `attention` how far they look back, `vocabulary` the number of token ids that may be
    sampled, and `is_end(tokens, stops, until)` says whether the last token ends a reply. No prompt
    and its reply may have more than `context_length` tokens together. A draft has at most
    `max_draft_tokens` tokens; with 0 there are none.

    `num_passes` counts the forward passes begun so far, and `num_sampled_tokens` the tokens of all
    replies; once another thread sets `is_aborted`, no further pass is begun.
    """

    def __init__(
        self,
        model: Any,
        shape: KVShape,
        attention: AttentionLayers,
        *,
        vocabulary: int,
        context_length: int,
        is_end: Callable[[Sequence[int], tuple[str, ...], str], bool],
        prefix_cache_bytes: int,
        max_draft_tokens: int = 0,
    ) -> None:
        self._model = model
        self._shape = shape
        self._attention = attention
        self._vocabulary = vocabulary
        self._last_position = context_length - 1
        self._is_end = is_end
        self._prefix_cache = PrefixCache(prefix_cache_bytes)
        self._drafter = Drafter(max_draft_tokens) if max_draft_tokens else None
        self._min_slots = _MIN_DRAFT_SLOTS if max_draft_tokens else MIN_SLOTS
        sizes = CPU_PASS_SIZES if shape.device.type == "cpu" else GPU_PASS_SIZES
        self.prefill = Prefill(model, attention, self._prefix_cache, self._last_position, sizes, self._begin_pass)
        self.num_passes = 0
        self.num_sampled_tokens = 0
        self.is_aborted = False
        self._spare: LayeredKV | None = None

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the model's parameters by those of the same names, and drop whatever was computed
        with the old ones.

        Raises `ModelFault` when names or shapes differ.
        """
        parameters = dict(self._model.named_parameters())
        mismatches = [
            n for n in parameters.keys() | weights.keys() if _shape_or_none(parameters, n) != _shape_or_none(weights, n)
        ]
        if mismatches:
            raise ModelFault(f"the new weights are of another model: {', '.join(sorted(mismatches)[:3])}")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        for module in self._model.modules():
            if isinstance(module, PackedLinear):
                module.pack()
        self._prefix_cache.clear()

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch, prompts: Sequence[Sequence[int]], replies: Sequence[Reply]) -> None:
        """Complete the replies of a batch in place. `prompts` and `replies` are all those that the
        numbers in the batch refer to.

        Raises `ModelFault` when a logit is NaN or infinite, or the work was given up.
        """
        # The last prompt token is fed in the first decode step, so that this step is like all
        # others.
        prefixes = [prompts[row.prompt_index][:-1] for row in batch.rows]
        base = padded_columns(max(len(head) for head in prefixes))
        # The buffer of a batch that fails is dropped: a NaN in it would reach the next batch
        # through the mask.
        buffer, self._spare = (
            self._spare or LayeredKV(self._shape, self._attention.near_layers, self._attention.window),
            None,
        )
        buffer.reset(
            padded_rows(len(batch.rows), batch.width, self._min_slots),
            base + max(_COLUMNS_AHEAD, _STEPS_AHEAD * batch.width),
        )
        self.prefill.fill(buffer, prefixes)
        self._prefix_cache.trim()
        window, vocabulary = self._attention.window, self._vocabulary
        self._generate(buffer, Grid(batch, prompts, replies, buffer, base, window, vocabulary, self._drafter))
        self._prefix_cache.trim()
        self._spare = buffer

    def _begin_pass(self) -> None:
        if self.is_aborted:
            raise ModelFault("the work under way was given up")
        self.num_passes += 1

    def _generate(self, buffer: LayeredKV, grid: Grid) -> None:
        while grid.live_replies:
            self._begin_pass()
            size = grid.choose_drafts()
            start, count = grid.column, grid.width * size
            if start + count > buffer.num_columns:
                num_columns = max(_COLUMNS_AHEAD, _STEPS_AHEAD * grid.width, count)
                buffer.grow(buffer.num_columns + num_columns)
                grid.add_columns(num_columns)
            window = self._attention.window
            first = 0 if window is None else grid.first_near_column(window) - buffer.shift
            near_columns = self._attention.padded_range(first, start - buffer.shift + count)
            buffer.far.set_range(start, buffer.num_columns)
            buffer.near.set_range(start - buffer.shift, near_columns[1], near_columns[0])
            step_input = grid.step_input(size, self._attention, near_columns)
            output = self._model(
                input_ids=step_input.tokens,
                attention_mask=self._attention.mask_input(step_input.far_mask, step_input.near_mask),
                # Slots whose reply has ended keep advancing their position; their output is not
                # read, but must stay computable.
                position_ids=step_input.positions.clamp(max=self._last_position),
                use_cache=True,
                **{CACHE: buffer.cache},
            )
            num_tokens, reply_locations = grid.accept(size, *self._sample(output.logits, grid, size), self._is_end)
            self.num_sampled_tokens += num_tokens
            for reply in reply_locations:
                self._cache_reply(buffer, reply)
            rows = padded_rows(max(1, len(grid.live_rows())), grid.width, self._min_slots)
            if rows < buffer.num_rows:
                grid.shrink(buffer, rows)

    def _cache_reply(self, buffer: LayeredKV, reply: ReplyLocation) -> None:
        """Put the blocks of a finished reply into the prefix cache: later prompts of its
        conversation begin with them.
        """
        if not self._prefix_cache.max_bytes:
            return
        names = block_hashes(reply.tokens, BLOCK_SIZE)
        for number in range(reply.num_filled // BLOCK_SIZE, len(names)):
            if names[number] not in self._prefix_cache:
                start, stop = number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE
                columns, near = reply.columns(start, stop), reply.near_columns(start, stop)
                self._prefix_cache.put(names[number], buffer.read_reply(reply.row, columns, near))

    def _sample(self, logits: Tensor, grid: Grid, size: int) -> tuple[list[int], list[float]]:
        """Return the tokens chosen after the last token of each live reply and after each token of
        its draft, in the order of `Grid.picks`; and their log-probabilities, an empty list if no
        reply wants them.
        """
        picks, owners = grid.logit_selection(size)
        rows, draws, penalties = logits.flatten(0, 1), grid.sampling_arguments(owners), grid.penalty_arguments()
        with_logprobs = any(reply.logprobs for reply in grid.live_replies)
        chunk_size = rows_at_once(self._vocabulary) if logits.device.type == "cpu" else len(picks)
        tokens, logprobs = [], []
        for start in range(0, len(picks), chunk_size):
            chunk = slice(start, start + chunk_size)
            part_logits = rows.index_select(0, picks[chunk])[:, : self._vocabulary].float()
            model_logits = Logits(part_logits)
            if not bool(torch.isfinite(model_logits.peak).all()):
                raise ModelFault(
                    "the model's output is not a number; its weights are damaged or overflow in this dtype"
                )
            penalty = None if penalties is None else [column[chunk] for column in penalties]
            adjusted_logits = model_logits if penalty is None else Logits(apply_penalty(part_logits, *penalty))
            temperature, top_p, uniform, top_k, min_p = draws
            limits = (None if column is None else column[chunk] for column in (top_k, min_p))
            part_tokens = choose_tokens(adjusted_logits, temperature[chunk], top_p[chunk], uniform[chunk], *limits)
            tokens += part_tokens.tolist()
            logprobs += log_probabilities(model_logits, part_tokens).tolist() if with_logprobs else []
        return tokens, logprobs


def _shape_or_none(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


class PackedLinear(nn.Linear):
    """A linear layer that also holds its weights in oneDNN's own layout: for a product with few
    rows, converting them each time takes as long as the product. Results are bit-identical.

    It shares the parameters of the layer that it replaces.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.pack()

    def pack(self) -> None:
        """Convert the current weights; call it after each change of them."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return product


_PACKED_ROWS = 64
"""About how many rows a product has; oneDNN chooses the layout for this number."""


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a model in bfloat16 on a CPU by `PackedLinear`, if oneDNN
    supports bfloat16 there.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.bfloat16:
            model.set_submodule(name, PackedLinear(module))


# Attention of the in-process sampler: few queries on many stored keys.
#
# A decode step has one query for each token fed to a row. On a CPU, two plain products are somewhat
# faster than PyTorch's fused kernel for a few of them: in float32 for all decode steps without
# drafts; in bfloat16 neither for a single one nor for those of a draft (PyTorch 2.13).
#
# Transformers repeats keys and values for each query head as soon as a row has several queries and
# a mask: with 8 replies on one row it would write and read all of them once per head in every
# layer. Here the queries of the heads that share keys are laid side by side as queries of one head;
# only the mask is repeated, which is far smaller.

NAME = "agentr_grouped"


def use_grouped_attention(model: Any) -> bool:
    """Switch a model to grouped attention where possible; return whether it was switched.

    A model that was loaded with an attention other than Transformers' `sdpa`, such as one with
    soft-capped scores, keeps it.
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
    """Return the output of attention [rows, queries, heads, size], and None for the weights; called
    by the layers of a Transformers model.

    Masks are [rows or 1, 1, queries, columns]. Without such a mask, or if the model has a position
    bias or soft-capped scores, Transformers' own function is called. Contiguous keys and values are
    read fastest.
    """
    group_size = query.shape[1] // key.shape[1]
    is_biased = options.get("position_bias") is not None or options.get("softcap") is not None
    if attention_mask is None or attention_mask.shape[1] != 1 or is_biased:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    rows, heads, queries, size = query.shape
    # Query heads that share keys are adjacent, so a reshape groups them.
    grouped_query = query.reshape(rows, key.shape[1], group_size * queries, size)
    mask = attention_mask.repeat(1, 1, group_size, 1)
    # A decode step has few queries and an additive mask; boolean masks, which Transformers makes,
    # belong to plain forward passes.
    uses_plain_products = (
        queries <= MAX_WIDTH if query.dtype == torch.float32 else 1 < grouped_query.shape[2] <= MAX_WIDTH
    )
    if uses_plain_products and mask.is_floating_point() and query.device.type == "cpu":
        # In bfloat16, softmax of 16-bit scores would lose what the fused kernel keeps.
        scores = torch.matmul(grouped_query, key.transpose(-1, -2)).float()
        weights = scores.mul_(size**-0.5 if scaling is None else scaling).add_(mask).softmax(dim=-1)
        output = torch.matmul(weights.to(value.dtype), value)
    else:
        output = scaled_dot_product_attention(grouped_query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, queries, value.shape[3]).transpose(1, 2).contiguous(), None
