"""TRL's SFTTrainer, driven by a plan: one row of its dataset is one process's share of an optimizer
step.

A share is a few forward passes, the same number in each process: if weights are split among
processes, a pass needs all processes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORED
from agentr_core.training.job import Report, TrainingJob
from agentr_core.training.packing import (
    LENGTH_STEP,
    Plan,
    TokenRow,
    forward_passes,
    idle_pass,
    together,
    trained_tokens,
)
from agentr_core.training.parent import Parent
from agentr_core.training.planned import FollowsPlan, MarkSaved, plain_arguments


# Steps are divided here and not by the data loader, so that any number of processes has the losses
# of one, up to rounding. TRL's own packing makes one row with a dense mask of a batch, which takes
# three times as long on a CPU.
class PlannedSFTTrainer(FollowsPlan, SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that follows a `Plan`.

    The loss of a step is the mean over all trained tokens of all its passes in all processes, as in
    TRL for accumulated batches.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # TRL scores only the trained positions where Triton runs; elsewhere it scores all, which
        # doubles the time of a step.
        forward = inspect.signature(type(self.accelerator.unwrap_model(self.model)).forward)
        takes = {"logits_to_keep", "kwargs"} & set(forward.parameters)
        self._keeps_logits = self.args.device.type == "cpu" and bool(takes)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of one optimizer step, its gradients accumulated over the passes. Raises
        `NonFiniteLoss`.
        """
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = torch.zeros((), device=self.args.device)
        for number, batch in enumerate(inputs["passes"], start=1):
            last = number == len(inputs["passes"])
            # Gradients are exchanged between processes once per step, with the last pass.
            self.accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, batch, num_items_in_batch=inputs["tokens"])
                # To DeepSpeed, one of our steps is one batch, however many passes it takes.
                self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))
            total += loss.detach()
        self.check_finite(model, total)
        return total

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the summed loss of a pass over `num_items_in_batch`; on CPU only trained positions
        are scored.
        """
        if not self._keeps_logits or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = inputs["labels"][0, 1:]
        positions = (targets != IGNORED).nonzero().squeeze(1)
        logits = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
            # Padded to a few lengths: each new shape of a matrix product is compiled anew.
            logits_to_keep=torch.nn.functional.pad(positions, (0, -len(positions) % LENGTH_STEP)),
        ).logits[0, : len(positions)]
        summed = torch.nn.functional.cross_entropy(logits.float(), targets[positions], reduction="sum")
        # Gradients are averaged over processes, but the tokens are counted over all of them.
        return summed / num_items_in_batch * self.accelerator.num_processes


def make_trainer(
    job: TrainingJob,
    plan: Plan,
    rows: Sequence[TokenRow],
    *,
    parent: Parent,
    settings: Any,
    tell: Callable[[Report], None],
) -> PlannedSFTTrainer:
    """Return the trainer of a job; `settings` are its `arguments`."""
    rows_per_pass = 1 if settings.use_cpu else together(job.config, job.config.per_device_train_batch_size)
    # Accelerate deals out rows in turn: process i of n gets the rows i, i + n, i + 2n and so on.
    shares = [(list(step), share) for step in plan.steps for share in range(job.config.num_processes)]
    return PlannedSFTTrainer(
        job=job,
        plan=plan,
        tell=tell,
        model=parent.model,
        args=settings,
        data_collator=_collator(rows, job.config, rows_per_pass),
        train_dataset=Dataset.from_dict(
            {"samples": [samples for samples, _ in shares], "share": [share for _, share in shares]}
        ),
        processing_class=parent.tokenizer,
        peft_config=parent.lora,
        callbacks=[MarkSaved()],
    )


def _collator(
    rows: Sequence[TokenRow], config: TrainingConfig, rows_per_pass: int
) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Return a function that makes the forward passes of one process's share of a step."""
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

    return collate


def arguments(job: TrainingJob, *, steps: int) -> Any:
    """Return the Trainer's arguments for a job of `steps` optimizer steps; see
    `planned.plain_arguments`.
    """
    return SFTConfig(
        **plain_arguments(job, steps=steps),
        per_device_train_batch_size=1,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
    )
