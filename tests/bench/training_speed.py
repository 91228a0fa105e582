"""Training tokens a second, and the model FLOPs that they are worth."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.training.job import TrainingJob
from agentr_core.training.packing import TokenRow, make_plan, num_trained_tokens
from agentr_core.training.parent import load_parent
from agentr_core.training.trainers import samples_per_step, supervised_arguments, supervised_trainer

Run = Callable[[], int]
_DATA_SHEETS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0}
"""Dense bfloat16 TFLOP/s by a part of the device's name."""
_STEPS = 8
_UNTIMED = 2
_TRAINED = 0.35
"""The part of tokens that carry loss, about that of episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What one training came to, after its first steps."""

    tokens_per_second: float
    tokens_per_step: float
    mean_length: float
    flops_per_second: float


class StepTimes(TrainerCallback):  # type: ignore[misc]
    """Notes the time at the end of each optimizer step, when the device has finished it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(self._clock())


def measure(model_dir: Path, folder: Path, *, quick: bool, **settings: Any) -> Speed:
    """Return the speed of fine-tuning a model in bfloat16 on packed random rows, a third of them
    trained.
    """
    per_step, longest = (2, 60) if quick else (32, 1500)
    generator = random.Random(0)
    lengths = [generator.randint(longest // 5, longest) for _ in range(per_step * _STEPS)]
    rows = [_random_row(length, generator) for length in lengths]
    job = TrainingJob(
        model_dir=model_dir,
        dataset_file=folder / "none",
        output_dir=folder / "out",
        config=TrainingConfig(per_device_train_batch_size=per_step, **settings),
        num_train_epochs=1,
        seed=0,
        parent="parent",
        dataset_hash="rows",
        checkpoint_every=0,
    )
    steps = make_plan(
        [num_trained_tokens(row) for row in rows], per_step=samples_per_step(job.config), epochs=1, max_tokens=0, seed=0
    )
    parent = load_parent(model_dir, job.config, zero3=False)
    flops = model_flops(parent.model, rows, job.config)
    trainer = supervised_trainer(
        job, steps, rows, parent=parent, settings=supervised_arguments(job, steps=_STEPS), on_report=lambda step: None
    )
    times = StepTimes()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(times)
    trainer.train()
    seconds = (times.seconds[-1] - times.seconds[_UNTIMED - 1]) / (_STEPS - _UNTIMED)
    tokens_per_step = sum(lengths) / _STEPS
    return Speed(
        tokens_per_second=tokens_per_step / seconds,
        tokens_per_step=tokens_per_step,
        mean_length=sum(lengths) / len(lengths),
        flops_per_second=flops / _STEPS / seconds,
    )


def _random_row(length: int, generator: random.Random) -> TokenRow:
    ids = tuple(generator.choices(range(3, 1000), k=length))
    return TokenRow(
        ids, tuple(token if generator.random() < _TRAINED else IGNORE_INDEX for token in ids[:-1]) + ids[-1:]
    )


def model_flops(model: Any, rows: Sequence[TokenRow], config: TrainingConfig) -> float:
    """Return the FLOPs that training on rows once takes at least, without recomputed activations.

    Two for each weight and token forward, twice that backward (once that where weights are frozen
    under adapters); attention over the half of each row that a token may see; the output layer for
    trained tokens only, as it is computed. Source: PaLM (arXiv 2204.02311), appendix B, with causal
    attention halved.
    """
    shape = model.config
    passes = 4 if config.lora_r else 6
    embedding = shape.vocab_size * shape.hidden_size
    num_embeddings = 1 if shape.tie_word_embeddings else 2
    body = sum(parameter.numel() for parameter in model.parameters()) - num_embeddings * embedding
    attention_width = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    tokens = sum(len(row.labels) for row in rows)
    # Scores and sums of values: two products each, over half the row; backward doubles, adapters or
    # not.
    attention = 6 * attention_width * sum(len(row.labels) ** 2 for row in rows)
    return float(passes * (body * tokens + embedding * sum(map(num_trained_tokens, rows))) + attention)


def peak_flops(device: str, told: float | None) -> tuple[float, str]:
    """Return the bfloat16 FLOP/s to compare with, and where the number comes from.

    A device without a data sheet here is asked how fast it multiplies large matrices.
    """
    if told:
        return told * 1e12, "as told"
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    for part, number in _DATA_SHEETS.items():
        if part in name:
            return number * 1e12, f"data sheet of {name}"
    side, num_products = (8192, 20) if device == "cuda" else (2048, 5)
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    factor = matrix.clone()
    matrix @ factor
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_products):
        matrix @ factor
    if device == "cuda":
        torch.cuda.synchronize()
    return 2 * side**3 * num_products / (time.perf_counter() - start), f"matrix products measured on {name}"
