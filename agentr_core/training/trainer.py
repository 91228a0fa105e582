"""TRL's SFTTrainer, fed by a plan: one row of its dataset is one process's share of an optimizer step.

A share is a few forward passes, as many in each process: where weights are split over processes, a pass needs them all.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from agentr_core.config import TrainingConfig
from agentr_core.errors import NonFiniteLoss
from agentr_core.labels import IGNORED
from agentr_core.training.job import TrainingJob, TrainingStep
from agentr_core.training.packing import QUANTUM, TokenRow, forward_passes, idle_pass, trained_tokens
from agentr_core.training.parent import Parent
from agentr_core.training.plan import Plan
from agentr_core.training.zero import read_zero

_SAVED = "complete"
"""Marks an intermediate checkpoint that was written to its end."""


class PlannedSFTTrainer(SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that follows a `Plan` and tells of each step.

    The loss of a step is the mean over all trained tokens of all its passes in all processes, as TRL has it for
    accumulated batches. A step whose loss or gradient is not finite ends the training before any weight is changed
    (DeepSpeed changes them at once, but they are not kept).
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
        inputs = self._prepare_inputs(inputs)
        total = torch.zeros((), device=self.args.device)
        for number, one in enumerate(inputs["passes"], start=1):
            last = number == len(inputs["passes"])
            # Gradients travel between processes once a step, with the last pass.
            self.accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, one, num_items_in_batch=inputs["tokens"])
                # One step of ours is one batch to DeepSpeed, however many passes it takes.
                self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))
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
        # Gradients are averaged over processes, while the tokens are those of all of them.
        return summed / num_items_in_batch * self.accelerator.num_processes

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
        if self.is_world_process_zero():
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
        if self.is_deepspeed_enabled:
            norm = float(self.accelerator.deepspeed_engine_wrapped.get_global_grad_norm() or 0.0)
        else:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item()
        if math.isfinite(loss.item()) and math.isfinite(norm):
            return
        raise NonFiniteLoss(
            f"step {self.state.global_step + 1} of {self.state.max_steps} has loss {loss.item()} and gradient norm "
            f"{norm}; lower training.learning_rate (it is {self.args.learning_rate}) or look at the data"
        )


class _MarkSaved(TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _SAVED).touch()


def make_trainer(
    job: TrainingJob,
    plan: Plan,
    rows: Sequence[TokenRow],
    *,
    parent: Parent,
    settings: Any,
    tell: Callable[[TrainingStep], None],
) -> PlannedSFTTrainer:
    """Return the trainer of a job; `settings` are its `arguments`."""
    config = job.config
    rows_per_pass = 1 if settings.use_cpu else config.per_device_train_batch_size
    processes = config.num_processes

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        step, share = [rows[row] for row in batch[0]["samples"]], batch[0]["share"]
        shares = [
            forward_passes(step[first::processes], packing=config.packing, rows_per_pass=rows_per_pass)
            for first in range(processes)
        ]
        idle = max(len(passes) for passes in shares) - len(shares[share])
        return {
            "passes": shares[share] + [idle_pass()] * idle,
            "tokens": torch.tensor(sum(trained_tokens(row) for row in step)),
        }

    # Accelerate deals out rows in turn: process i of n gets the rows i, i + n, i + 2n and so on.
    shares = [(list(step), share) for step in plan.steps for share in range(processes)]
    return PlannedSFTTrainer(
        plan=plan,
        tell=tell,
        model=parent.model,
        args=settings,
        data_collator=collate,
        train_dataset=Dataset.from_dict(
            {"samples": [samples for samples, _ in shares], "share": [share for _, share in shares]}
        ),
        processing_class=parent.tokenizer,
        peft_config=parent.lora,
        callbacks=[_MarkSaved()],
    )


def samples_per_step(config: TrainingConfig) -> int:
    """Return how many samples an optimizer step has, over all processes."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * config.num_processes


def last_checkpoint(folder: Path, settings: Any) -> Path | None:
    """Return the newest intermediate checkpoint that was written to its end, or None; removes those that were not."""
    if settings.should_save:
        for torn in [path for path in folder.glob("checkpoint-*") if not (path / _SAVED).exists()]:
            shutil.rmtree(torn)
    settings.distributed_state.wait_for_everyone()
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def arguments(job: TrainingJob, *, steps: int) -> Any:
    """Return the Trainer's arguments for a job of so many optimizer steps, on CUDA where there is a device.

    Where the job has several processes, this one joins the others here.
    """
    config = job.config
    on_gpu = torch.cuda.is_available()
    checkpointing = on_gpu if config.gradient_checkpointing is None else config.gradient_checkpointing
    return SFTConfig(
        output_dir=str(job.work.checkpoints),
        run_name=job.output_dir.name,
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
        activation_checkpointing=checkpointing,
        dataloader_pin_memory=on_gpu,
        # Every pass, an idle one too, goes through all weights.
        ddp_find_unused_parameters=False,
        deepspeed=read_zero(config.launch.deepspeed) if config.launch and config.launch.deepspeed else None,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps" if job.checkpoint_every else "no",
        save_steps=job.checkpoint_every or 1,
        # Two, so that a crash while one is written leaves the other.
        save_total_limit=2,
        report_to=list(config.report_to) or "none",
        disable_tqdm=True,
        seed=job.seed,
    )
