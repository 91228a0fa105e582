"""A training pass of the shipped tiny model with our attention and with that of Transformers, on
rows of one length: forward and backward, in bfloat16 where the processor has it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from measures import Clock, Measure
from transformers import AutoModelForCausalLM

from agentr_core.runtime.machine import bfloat16_hardware
from agentr_core.training.attention import use_training_attention

MODEL = Path("data/models/textcraft-tiny")
TOKENS = 2_400
"""About as many tokens of a pass, in rows of one length."""


def measure(*, lengths: dict[str, int], runs: int, clock: Clock) -> list[Measure]:
    """Return how many times as fast a pass is as with `sdpa`, by name for rows of each length: the
    fastest of `runs` passes with each, one after the other.
    """
    fast = bool(bfloat16_hardware("cpu"))
    models = {name: AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) for name in ("ours", "sdpa")}
    use_training_attention(models["ours"])
    measures: list[Measure] = []
    for title, length in lengths.items():
        ids = torch.arange(3, 3 + max(1, TOKENS // length) * length).view(-1, length) % 1000
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(runs + 1):
            for name, model in models.items():
                model.zero_grad()
                start = clock()
                with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                    logits = model(input_ids=ids, use_cache=False).logits
                torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()  # type: ignore[no-untyped-call]
                seconds[name].append(clock() - start)
        # The first pass of a length allocates.
        ours, sdpa = (min(seconds[name][1:]) for name in ("ours", "sdpa"))
        note = f"{ids.numel() / ours:,.0f} tokens/s in rows of {length} tokens, {'bfloat16' if fast else 'float32'}"
        measures.append(
            Measure(
                name=f"training_attention_ratio_{title}", value=sdpa / ours, unit="times sdpa", goal="> 1", note=note
            )
        )
    return measures
