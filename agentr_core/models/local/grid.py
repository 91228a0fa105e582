"""The replies of a wave while they are decoded, and the grid of slots in which they grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentr_core.models.local.kv import LayeredKV
from agentr_core.models.local.masks import View
from agentr_core.models.local.sampling import uniforms
from agentr_core.models.local.waves import Row, Wave


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
        self.near = None if window is None else self._settle(buffer, positions[:, 0].tolist(), base, window)
        self.tokens = torch.from_numpy(tokens).to(self._device)
        self.positions = torch.from_numpy(positions).to(self._device)
        self._draws = {
            number: uniforms(replies[number].seed, replies[number].number, replies[number].limit)
            for row in wave.rows
            for number in row.replies
            if replies[number].temperature > 0
        }
        self._seen, self._seen_places = self._read(wave, prompts, vocabulary)
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
            self._grown(place, slot, reply)
            for (place, slot), reply in zip(self._slots, self.live, strict=True)
            if reply.finished
        ]
        if grown:
            self._refresh()
        return grown

    def _grown(self, row: int, slot: int, reply: Reply) -> Grown:
        prompt = self._prompts[reply.prompt]
        return Grown(
            row=row,
            tokens=[*prompt, *reply.tokens[:-1]],
            filled=len(prompt) - 1,
            base=self._base,
            fed=self._base + slot,
            width=self.width,
        )

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

    def _read(
        self, wave: Wave, prompts: Sequence[Sequence[int]], vocabulary: int
    ) -> tuple[Tensor | None, dict[int, int]]:
        """Return which tokens occur in the prompts of replies with a penalty, one line per reply,
        and the line of each; all other replies share the last line.
        """
        numbers = [n for row in wave.rows for n in row.replies if self._replies[n].repetition_penalty != 1]
        if not numbers:
            return None, {}
        seen = torch.zeros((len(numbers) + 1, vocabulary), dtype=torch.bool, device=self._device)
        for line, number in enumerate(numbers):
            ids = torch.tensor(prompts[self._replies[number].prompt], device=self._device)
            seen[line, ids[ids < vocabulary]] = True
        return seen, {number: line for line, number in enumerate(numbers)}

    def _view(self, buffer: LayeredKV, *, shift: int) -> View:
        """Return a view in which no slot sees anything."""
        rows, columns, dtype = buffer.rows, buffer.columns, buffer.shape.dtype
        mask = torch.full((rows, 1, self.width, columns), -torch.inf, dtype=dtype, device=self._device)
        return View(mask, torch.zeros((rows, columns), dtype=torch.long, device=self._device), shift)

    def _settle(self, buffer: LayeredKV, prompts: Sequence[int], base: int, window: int) -> View:
        """Keep only the last tokens of each prompt in near layers, and return the slots' view of
        them.
        """
        kept = buffer.settle(prompts, base, window)
        view = self._view(buffer, shift=buffer.shift)
        view.positions[:, : kept.shape[1]] = kept
        view.mask[..., : kept.shape[1]].masked_fill_((kept >= 0)[:, None, None, :], 0)
        return view

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
