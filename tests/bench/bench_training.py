"""Training tokens a second on CPU: our packed rows and selected scores against TRL's own packing
and loss.

Counted in CPU seconds of one thread, so that other work on the machine does not decide the ratio.
Both train the same samples, of 300 to 700 tokens with a third of them trained, in bfloat16.

    pytest -s tests/bench/bench_training.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from training_jobs import make_job, random_row
from training_speed import StepTimes
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from agentr_core.training.packing import TokenRow, make_plan, num_trained_tokens
from agentr_core.training.parent import load_parent
from agentr_core.training.trainers import supervised_arguments, supervised_trainer

SAMPLES_PER_STEP = 8
STEPS = 4
LEAST_RATIO = 1.5


def tokens_per_cpu_second(trainer: Any, tokens: int) -> float:
    """Return the speed of all steps but the first, which compiles; `tokens` are those of all
    steps.
    """
    times = StepTimes(time.process_time)
    trainer.add_callback(times)
    trainer.train()
    steps = len(times.seconds)
    return tokens * (steps - 1) / steps / (times.seconds[-1] - times.seconds[0])


@pytest.mark.slow
def test_training_on_cpu_is_faster_than_trl_as_it_comes(tmp_path: Path, save_tiny_model: Callable[..., Path]) -> None:
    path = save_tiny_model(
        tmp_path / "model",
        context=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        vocab_size=4096,
    )
    generator = random.Random(0)
    lengths = [generator.randint(300, 700) for _ in range(SAMPLES_PER_STEP * STEPS)]
    rows = [TokenRow(*random_row(length, seed)) for seed, length in enumerate(lengths)]
    tokenizer = AutoTokenizer.from_pretrained(path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        job = make_job(path, tmp_path, bf16=True, per_device_train_batch_size=SAMPLES_PER_STEP)
        plan = make_plan(
            [num_trained_tokens(row) for row in rows], per_step=SAMPLES_PER_STEP, epochs=1, max_tokens=0, seed=0
        )
        parent = load_parent(path, job.config, zero3=False)
        settings = supervised_arguments(job, steps=len(plan.steps))
        ours = supervised_trainer(job, plan, rows, parent=parent, settings=settings, on_report=lambda step: None)
        our_speed = tokens_per_cpu_second(ours, sum(lengths))

        stock = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(path),
            args=SFTConfig(
                output_dir=str(tmp_path / "stock"),
                packing=True,
                max_length=1024,
                num_train_epochs=1,
                per_device_train_batch_size=4,
                bf16=True,
                use_cpu=True,
                activation_checkpointing=False,
                dataloader_pin_memory=False,
                report_to="none",
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list([row._asdict() for row in rows]),
            processing_class=tokenizer,
        )
        stock_speed = tokens_per_cpu_second(stock, sum(lengths))
    finally:
        torch.set_num_threads(threads)
    ratio = our_speed / stock_speed
    print(f"\n{our_speed:.0f} tokens/s against {stock_speed:.0f} of TRL as it comes: {ratio:.1f} times")  # noqa: T201
    assert ratio > LEAST_RATIO
