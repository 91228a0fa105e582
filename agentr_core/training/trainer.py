"""TRL's SFTTrainer, fed by a plan: one row of its dataset is one optimizer step, one step is a few forward passes."""

from __future__ import annotations

import inspect
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from agentr_core.config import TrainingConfig
from agentr_core.errors import NonFiniteLoss
from agentr_core.labels import IGNORED
from agentr_core.training.job import TrainingJob, TrainingStep
from agentr_core.training.packing import QUANTUM, TokenRow, forward_passes
from agentr_core.training.plan import Plan

_SAVED = "complete"
"""Marks an intermediate checkpoint that was written to its end."""


class PlannedSFTTrainer(SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that follows a `Plan` and tells of each step.

    The loss of a step is the mean over all trained tokens of all its passes, as TRL has it for accumulated batches.
    A step whose loss or gradient is not finite ends the training before any weight is changed.
    """

    def __init__(self, *, plan: Plan, tell: Callable[[TrainingStep], None], **options: Any) -> None:
        super().__init__(**options)
        self._plan = plan
        self._tell = tell
        self._clock = time.monotonic()
        # TRL scores only the trained positions where Triton runs; elsewhere it scores all, at twice the time of a step.
        forward = inspect.signature(type(self.accelerator.unwrap_model(self.model)).forward)
        takes = {"logits_to_keep", "kwargs"} & set(forward.parameters)
        self._keeps_logits = self.args.device.type == "cpu" and bool(takes)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of one optimizer step, its gradients accumulated over the passes. Raises `NonFiniteLoss`."""
        model.train()
        passes = self._prepare_inputs(inputs)["passes"]
        tokens = sum((one["labels"][:, 1:] != IGNORED).sum() for one in passes)
        total = torch.zeros((), device=self.args.device)
        for one in passes:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, one, num_items_in_batch=tokens)
            self.accelerator.backward(loss)
            total += loss.detach()
        self._check_finite(model, total)
        return total

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the summed loss of a pass over `num_items_in_batch`; on CPU only trained positions are scored."""
        if not self._keeps_logits or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = inputs["labels"][0, 1:]
        positions = (targets != IGNORED).nonzero().squeeze(1)
        logits = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
            # Filled up to few lengths: each new shape of a matrix product is compiled anew.
            logits_to_keep=torch.nn.functional.pad(positions, (0, -len(positions) % QUANTUM)),
        ).logits[0, : len(positions)]
        summed = torch.nn.functional.cross_entropy(logits.float(), targets[positions], reduction="sum")
        return summed / num_items_in_batch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step with its tokens and time, so that they survive in the trainer's state, and tell of it."""
        if "loss" not in logs:
            super().log(logs, start_time)
            return
        number = self.state.global_step
        earlier = self.state.log_history[-1]["seconds"] if self.state.log_history else 0.0
        now = time.monotonic()
        step = TrainingStep(
            step=number,
            total_steps=self.state.max_steps,
            loss=logs["loss"],
            trained_tokens=self._plan.trained_tokens[number - 1],
            seconds=earlier + now - self._clock,
        )
        self._clock = now
        super().log({**logs, "trained_tokens": step.trained_tokens, "seconds": step.seconds}, start_time)
        self._tell(step)

    def steps_done(self) -> list[TrainingStep]:
        """Return every step of this training so far, those before an interruption included."""
        return [
            TrainingStep(
                step=entry["step"],
                total_steps=self.state.max_steps,
                loss=entry["loss"],
                trained_tokens=entry["trained_tokens"],
                seconds=entry["seconds"],
            )
            for entry in self.state.log_history
            if "loss" in entry
        ]

    def _check_finite(self, model: Any, loss: torch.Tensor) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if math.isfinite(loss.item()) and math.isfinite(norm.item()):
            return
        raise NonFiniteLoss(
            f"step {self.state.global_step + 1} of {self.state.max_steps} has loss {loss.item()} and gradient norm "
            f"{norm.item()}; lower training.learning_rate (it is {self.args.learning_rate}) or look at the data"
        )


class _MarkSaved(TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _SAVED).touch()


def make_trainer(
    job: TrainingJob,
    plan: Plan,
    rows: Sequence[TokenRow],
    *,
    model: Any,
    tokenizer: Any,
    tell: Callable[[TrainingStep], None],
) -> PlannedSFTTrainer:
    """Return the trainer of a job, on the first visible CUDA device or else on the CPU."""
    config = job.config
    on_gpu = torch.cuda.is_available()
    rows_per_pass = config.per_device_train_batch_size if on_gpu else 1

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        samples = [rows[row] for row in batch[0]["samples"]]
        return {"passes": forward_passes(samples, packing=config.packing, rows_per_pass=rows_per_pass)}

    return PlannedSFTTrainer(
        plan=plan,
        tell=tell,
        model=model,
        args=_arguments(job, steps=len(plan.steps), on_gpu=on_gpu),
        data_collator=collate,
        train_dataset=Dataset.from_dict({"samples": [list(step) for step in plan.steps]}),
        processing_class=tokenizer,
        peft_config=_lora(config) if config.lora_r else None,
        callbacks=[_MarkSaved()],
    )


def samples_per_step(config: TrainingConfig) -> int:
    """Return how many samples an optimizer step has."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest intermediate checkpoint that was written to its end, or None; removes those that were not."""
    for torn in [path for path in folder.glob("checkpoint-*") if not (path / _SAVED).exists()]:
        shutil.rmtree(torn)
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _arguments(job: TrainingJob, *, steps: int, on_gpu: bool) -> Any:
    config = job.config
    return SFTConfig(
        output_dir=str(job.work.checkpoints),
        # The plan holds the epochs and the batches; to the Trainer it is one pass over rows of one step each.
        num_train_epochs=1,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        max_length=None,
        packing=False,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=math.ceil(steps * config.warmup_ratio),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        bf16=config.bf16,
        use_cpu=not on_gpu,
        activation_checkpointing=on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps" if job.checkpoint_every else "no",
        save_steps=job.checkpoint_every or 1,
        # Two, so that a crash while one is written leaves the other.
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
    )


def _lora(config: TrainingConfig) -> Any:
    return LoraConfig(r=config.lora_r, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
