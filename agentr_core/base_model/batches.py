"""From samples to training batches of a few fixed shapes: every new shape would make the CPU
compile new kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from agentr_core.samples.labels import IGNORED
from agentr_core.samples.rendering import RenderedSample

LENGTHS = (192, 256, 320, 448, 640, 896, 1280, 2048)


def batches(
    rows: Iterable[RenderedSample], *, batch_tokens: int, pad: int, lengths: Sequence[int] = LENGTHS
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield right-padded batches of about `batch_tokens` tokens, each of rows of one length; rows
    that are too long are left out.

    Causal attention never looks ahead, so padding at the end needs no attention mask.
    Shapes: `input_ids` and `labels` are (B, L), with L in `lengths` and B = batch_tokens // L.
    """
    waiting: dict[int, list[RenderedSample]] = {length: [] for length in lengths}
    for row in rows:
        length = next((length for length in lengths if length >= len(row.input_ids)), None)
        if length is None:
            continue
        bucket = waiting[length]
        bucket.append(row)
        if len(bucket) == max(1, batch_tokens // length):
            yield {
                "input_ids": torch.tensor([[*r.input_ids, *[pad] * (length - len(r.input_ids))] for r in bucket]),
                "labels": torch.tensor([[*r.labels, *[IGNORED] * (length - len(r.labels))] for r in bucket]),
            }
            bucket.clear()
