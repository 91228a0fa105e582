"""The share of a decode step that choosing the tokens takes, with the vocabularies of real models:
greedy and at temperature 1, log-probabilities asked for.

The weights are random, in the shapes of SmolLM2-135M and Gemma 3 270M; both shares are of the same
steps.
"""

from __future__ import annotations

from typing import Any

import torch
from measures import Clock, Measure
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from agentr_core.models.local.cache import AttentionLayers, KVShape
from agentr_core.models.local.decoding import Decoder, Grid, Reply, use_grouped_attention
from agentr_core.models.local.waves import DecodeBatch, Row

HISTORY = 300
ROWS = (16, 64)
SMOL, GEMMA = 49_152, 262_144
GOALS = {SMOL: "<= 5", GEMMA: "<= 10"}


class TimedDecoder(Decoder):
    """A decoder that knows how long its steps took, and choosing their tokens."""

    def __init__(self, *args: Any, clock: Clock, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clock = clock
        self.choosing = self.stepping = 0.0

    def _generate(self, *args: Any) -> None:
        start = self._clock()
        super()._generate(*args)
        self.stepping += self._clock() - start

    def _sample(self, logits: torch.Tensor, grid: Grid, size: int) -> tuple[list[int], list[float]]:
        start = self._clock()
        sample = super()._sample(logits, grid, size)
        self.choosing += self._clock() - start
        return sample


def measure(*, small: bool, clock: Clock) -> list[Measure]:
    """Return the largest share for each vocabulary. `small`: one layer, fewer rows and tokens."""
    part, steps, history, batches = (64, 2, 30, ROWS[:1]) if small else (1, 8, HISTORY, ROWS)
    smol = LlamaConfig(
        vocab_size=SMOL // part, hidden_size=576, intermediate_size=1536, num_hidden_layers=1 if small else 30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    gemma = Gemma3TextConfig(
        vocab_size=GEMMA // part, hidden_size=640, intermediate_size=2048, num_hidden_layers=1 if small else 18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256,
    )  # fmt: skip
    measures = []
    for size, config, kind in ((SMOL, smol, LlamaForCausalLM), (GEMMA, gemma, Gemma3ForCausalLM)):
        model = kind(config).bfloat16().eval()
        use_grouped_attention(model)
        shares = {
            (rows, temperature): _share(model, rows, temperature, history, steps, clock)
            for rows in batches
            for temperature in (0.0, 1.0)
        }
        parts = [
            f"{rows} rows {'sampled' if temperature else 'greedy'} {share:.1f} % of {step * 1e3:.0f} ms"
            for (rows, temperature), (share, step) in shares.items()
        ]
        name = f"choosing_share_{size // 1000}k"
        worst = max(share for share, _ in shares.values())
        measures.append(Measure(name=name, value=worst, unit="%", goal=GOALS[size], note="; ".join(parts)))
    return measures


def _share(model: Any, rows: int, temperature: float, history: int, steps: int, clock: Clock) -> tuple[float, float]:
    """Return what choosing takes, in per cent of a step, and the seconds of a step."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, head, head, model.dtype, torch.device("cpu"))
    decoder = TimedDecoder(
        model,
        shape,
        AttentionLayers(has_both_kinds=isinstance(config, Gemma3TextConfig)),
        vocabulary=config.vocab_size,
        context_length=config.max_position_embeddings,
        is_end=lambda tokens, stops, until: False,
        prefix_cache_bytes=0,
        clock=clock,
    )
    prompt = torch.randint(config.vocab_size, (history,), generator=torch.Generator().manual_seed(rows)).tolist()
    wave = DecodeBatch(1, tuple(Row(0, (number,)) for number in range(rows)))
    for limit in (1, steps):  # The first step compiles kernels.
        each: dict[str, Any] = {"prompt_index": 0, "seed": rows, "top_p": 1.0, "logprobs": True, "stops": ()}
        replies = [Reply(number=row, temperature=temperature, limit=limit, **each) for row in range(rows)]
        decoder.choosing = decoder.stepping = 0.0
        decoder.decode(wave, [prompt], replies)
    return 100 * decoder.choosing / decoder.stepping, decoder.stepping / steps
