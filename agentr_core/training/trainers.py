"""TRL's trainers, driven by a plan: their common part, the supervised trainer, and the one for
preference pairs.

They take the steps of a plan, report each step, and stop at a loss or gradient that is not finite.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, disable_progress_bars, load_from_disk
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from agentr_core.errors import NonFiniteLoss
from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.training.job import Preference, Report, TrainingJob, TrainingStep
from agentr_core.training.packing import (
    LENGTH_STEP,
    Plan,
    TokenPair,
    TokenRow,
    balanced_shares,
    forward_passes,
    idle_pass,
    max_rows_per_pass,
    num_trained_tokens,
    padded_length,
)
from agentr_core.training.parent import Parent, uses_gradient_checkpointing
from agentr_core.training.process import read_deepspeed

_COMPLETE_MARK = "complete"
"""The file that marks an intermediate checkpoint as complete."""
_MAX_EPOCHS = 1_000_000
"""The number of epochs over a plan when the clock ends a training."""
_NUM_CLOCK_STEPS = 1000
"""The number of steps of a learning-rate schedule that follows the clock."""
_NAMES_BY_TRL_METRIC = {
    "logps/chosen": "chosen_logps",
    "logps/rejected": "rejected_logps",
    "rewards/chosen": "chosen_rewards",
    "rewards/rejected": "rejected_rewards",
    "rewards/accuracies": "reward_accuracy",
}
"""TRL's names of the metrics of preference training, and ours."""


class PlanMixin:
    """A mixin for TRL's trainers that takes the steps of a `Plan` and reports each.

    With `max_seconds` above 0 it repeats the plan until the time is up, by the clock of the main
    process. A step whose loss or gradient is not finite ends the training before any weight is
    changed (DeepSpeed changes weights at once, but they are not kept).
    """

    args: Any
    accelerator: Any
    is_deepspeed_enabled: bool
    is_world_process_zero: Callable[[], bool]
    state: Any
    control: Any

    def __init__(self, *, job: TrainingJob, plan: Plan, on_report: Callable[[Report], None], **options: Any) -> None:
        super().__init__(**options)
        self._job = job
        self._plan = plan
        self._on_report = on_report
        self._max_seconds = job.config.max_seconds
        self.crossings = job.alarms.find_crossings(())
        """The thresholds that were crossed in the step that ended the training."""
        self._last_log_time = time.monotonic()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step with its trained tokens and seconds, so that they are kept in the trainer's
        state, report it, and check the alarms. This ends the training at `max_seconds`, or if an
        alarm asks for it.
        """
        if "loss" not in logs:
            super().log(logs, start_time)  # type: ignore[misc]
            return
        number = self.state.global_step
        seconds = self._seconds()
        entry = {**logs, "trained_tokens": self._plan.cumulative_tokens_after(number), "seconds": seconds}
        self._last_log_time = time.monotonic()
        super().log(entry, start_time)  # type: ignore[misc]
        if 0 < self._max_seconds <= seconds:
            self.control.should_training_stop = True
        if self.is_world_process_zero():
            self._on_report(self._make_step(number, entry))
        # Report the thresholds that the step has crossed, and end the training if the recipe asks
        # for it; the weights of this step are not saved then.
        alarms = self._job.alarms
        crossings = alarms.find_crossings(self.state.log_history, self._watched_values, step=number)
        if self.is_world_process_zero():
            for crossing in crossings:
                self._on_report(crossing)
        if alarms.reaction != "tell":
            # The main process decides for all: rounding differs, and so might their decisions.
            self.crossings = broadcast_object_list([crossings])[0]
            if self.crossings:
                self.control.should_training_stop, self.control.should_save = True, False

    def _watched_values(self, entry: dict[str, float]) -> dict[str, float | None]:
        """Return the values of a logged step that alarms watch, by name; None for one that was not
        logged.
        """
        return {"gradient_norm": entry.get("grad_norm")}

    # The schedule follows the share of the seconds that has passed: nobody knows how many steps fit
    # into them, and every arm of a comparison must run through its whole schedule.
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the learning-rate schedule over the steps, or over the seconds if time is the
        budget.
        """
        if not self._max_seconds:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        scheduler = super().create_scheduler(_NUM_CLOCK_STEPS, optimizer)  # type: ignore[misc]
        scheduler.lr_lambdas = [self._timed_lambda(lr_lambda) for lr_lambda in scheduler.lr_lambdas]
        return scheduler

    def _timed_lambda(self, lr_lambda: Any) -> Callable[[int], float]:
        # The share of the time that has passed, in [0, `_NUM_CLOCK_STEPS`].
        return lambda _: float(lr_lambda(_NUM_CLOCK_STEPS * min(1.0, self._seconds() / self._max_seconds)))

    def _seconds(self) -> float:
        """Return the seconds spent in training so far, including those of earlier attempts up to
        the checkpoint that this one resumed from.

        Where time is the budget, all processes get the value of the main process.
        """
        previous = self.state.log_history[-1]["seconds"] if self.state.log_history else 0.0
        seconds: float = previous + time.monotonic() - self._last_log_time
        return float(broadcast_object_list([seconds])[0]) if self._max_seconds else seconds

    def load_last_checkpoint(self) -> None:
        """Load the last checkpoint that was saved before an alarm ended the training, and drop the
        later steps from the history.

        Raises `AlarmRaised` if nothing was saved, or if the recipe's reaction is not to go back.
        """
        checkpoint = last_checkpoint(Path(self.args.output_dir), self.args)
        if checkpoint is None or self._job.alarms.reaction != "back":
            # The last checkpoint that was saved stays, and a later attempt resumes from it.
            raise self.crossings[0].to_error(
                "trains on" if checkpoint else "trains anew, since nothing was saved before"
            )
        step = int(checkpoint.name.rpartition("-")[2])
        self._load_from_checkpoint(str(checkpoint))  # type: ignore[attr-defined]
        self.state.log_history = [entry for entry in self.state.log_history if entry["step"] <= step]

    def step_history(self) -> list[TrainingStep]:
        """Return all steps of this training so far in order, including those before an
        interruption.
        """
        return [self._make_step(entry["step"], entry) for entry in self.state.log_history if "loss" in entry]

    def check_finite(self, model: Any, loss: torch.Tensor) -> None:
        """Raise `NonFiniteLoss` if the loss or the norm of the gradient is not finite; under fp16,
        where the scaler skips steps that overflow, only the loss counts.
        """
        if self.is_deepspeed_enabled:
            norm = float(self.accelerator.deepspeed_engine_wrapped.get_global_grad_norm() or 0.0)
        else:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            total = torch.nn.utils.get_total_norm(gradients)
            # When gradients are split among processes, each process has its part of the norm.
            norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
        # Gradients in 16 bits are scaled; the scaler skips a step in which they overflow.
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if math.isfinite(loss.item()) and (scaled or math.isfinite(norm)):
            return
        raise NonFiniteLoss(
            f"step {self.state.global_step + 1} has loss {loss.item()} and gradient norm {norm}; lower "
            f"training.learning_rate (it is {self.args.learning_rate}) or look at the data"
        )

    def _make_step(self, number: int, entry: dict[str, float]) -> TrainingStep:
        num_steps = round(number * self._max_seconds / entry["seconds"]) if self._max_seconds else self.state.max_steps
        return TrainingStep(
            step=number,
            total_steps=max(number, num_steps),
            loss=entry["loss"],
            trained_tokens=int(entry["trained_tokens"]),
            seconds=entry["seconds"],
            learning_rate=entry.get("learning_rate"),
            grad_norm=entry.get("grad_norm"),
            scores={name: entry[trl_name] for trl_name, name in _NAMES_BY_TRL_METRIC.items() if trl_name in entry},
        )


class MarkSaved(TrainerCallback):  # type: ignore[misc]
    """A callback that marks an intermediate checkpoint once it is complete."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for all processes, then write the mark."""
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _COMPLETE_MARK).touch()


def last_checkpoint(folder: Path, settings: Any) -> Path | None:
    """Remove incomplete intermediate checkpoints, wait for all processes, and return the newest
    complete one; None if there is none.
    """
    if settings.should_save:
        for incomplete in [path for path in folder.glob("checkpoint-*") if not (path / _COMPLETE_MARK).exists()]:
            shutil.rmtree(incomplete)
    settings.distributed_state.wait_for_everyone()
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def samples_per_step(config: TrainingConfig) -> int:
    """Return how many samples (or pairs) an optimizer step has, over all processes."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * config.num_processes


def common_arguments(job: TrainingJob, *, steps: int) -> dict[str, Any]:
    """Return the arguments of the Trainer's configuration that all trainers share, for a job of
    `steps` optimizer steps, on CUDA if available.

    If the job has several processes, this process joins the others when the configuration is
    constructed.
    """
    config = job.config
    on_gpu = torch.cuda.is_available()
    checkpointing = uses_gradient_checkpointing(config)
    return {
        "output_dir": str(job.work_folder.checkpoints),
        "run_name": job.output_dir.name,
        # The plan contains all epochs in order; to the Trainer it is one epoch, or one of many.
        "num_train_epochs": _MAX_EPOCHS if config.max_seconds else 1,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "learning_rate": config.learning_rate,
        "optim": config.optim,
        "lr_scheduler_type": config.lr_scheduler_type,
        "lr_scheduler_kwargs": dict(config.lr_scheduler_kwargs) or None,
        "warmup_steps": math.ceil((_NUM_CLOCK_STEPS if config.max_seconds else steps) * config.warmup_ratio),
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "bf16": config.bf16,
        "fp16": config.fp16,
        "use_liger_kernel": config.use_liger_kernel,
        "use_cpu": not on_gpu,
        "activation_checkpointing": checkpointing,
        "dataloader_pin_memory": on_gpu,
        # Every pass uses all weights, even an idle one.
        "ddp_find_unused_parameters": False,
        "deepspeed": read_deepspeed(config.launch.deepspeed) if config.launch and config.launch.deepspeed else None,
        "fsdp": True if config.launch and config.launch.fsdp else None,
        "fsdp_config": dict(config.launch.fsdp_config) if config.launch and config.launch.fsdp else None,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps" if job.checkpoint_every else "no",
        "save_steps": job.checkpoint_every or 1,
        # Two, so that a crash while one is written leaves the other.
        "save_total_limit": 2,
        "report_to": list(config.report_to) or "none",
        "disable_tqdm": True,
        "seed": job.seed,
    }


# TRL's SFTTrainer, driven by a plan: one row of its dataset is one process's share of an optimizer
# step.
#
# A share is a few forward passes, the same number in each process: if weights are split among
# processes, a pass needs all processes.


# Steps are divided here and not by the data loader, so that any number of processes has the losses
# of one, up to rounding. TRL's own packing makes one row with a dense mask of a batch, which takes
# three times as long on a CPU.
class PlannedSFTTrainer(PlanMixin, SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that follows a `Plan`.

    The loss of a step is the mean over all trained tokens of all its passes in all processes, as in
    TRL for accumulated batches.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # TRL scores only the trained positions where Triton runs; elsewhere it scores all, which
        # doubles the time of a step.
        forward = inspect.signature(type(self.accelerator.unwrap_model(self.model)).forward)
        supported_arguments = {"logits_to_keep", "kwargs"} & set(forward.parameters)
        self._scores_trained_only = self.args.device.type == "cpu" and bool(supported_arguments)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of one optimizer step, after accumulating its gradient over the passes.
        Raises `NonFiniteLoss`.
        """
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss_sum = torch.zeros((), device=self.args.device)
        for number, batch in enumerate(inputs["passes"], start=1):
            is_last = number == len(inputs["passes"])
            # Gradients are exchanged between processes once per step, with the last pass.
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, batch, num_items_in_batch=inputs["tokens"])
                # To DeepSpeed, one of our steps is one batch, however many passes it takes.
                self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))
            loss_sum += loss.detach()
        self.check_finite(model, loss_sum)
        return loss_sum

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a pass: its sum over the trained tokens, divided by
        `num_items_in_batch` and scaled by the number of processes. On a CPU only trained positions
        are scored.
        """
        if not self._scores_trained_only or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = inputs["labels"][0, 1:]
        positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        logits = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            use_cache=False,
            # Padded to a few lengths: each new shape of a matrix product is compiled anew.
            logits_to_keep=torch.nn.functional.pad(positions, (0, -len(positions) % LENGTH_STEP)),
        ).logits[0, : len(positions)]
        loss_sum = torch.nn.functional.cross_entropy(logits.float(), targets[positions], reduction="sum")
        # Gradients are averaged over processes, but the tokens are counted over all of them.
        return loss_sum / num_items_in_batch * self.accelerator.num_processes


def supervised_trainer(
    job: TrainingJob,
    plan: Plan,
    rows: Sequence[TokenRow],
    *,
    parent: Parent,
    settings: Any,
    on_report: Callable[[Report], None],
) -> PlannedSFTTrainer:
    """Return the trainer of a supervised job. `settings` are its `supervised_arguments`;
    `on_report` is called with each report in the main process.
    """
    rows_per_pass = 1 if settings.use_cpu else max_rows_per_pass(job.config, job.config.per_device_train_batch_size)
    num_processes = job.config.num_processes
    # Accelerate deals out rows in turn: process i of n gets the rows i, i + n, i + 2n and so on.
    shares = [(list(step), share) for step in plan.steps for share in range(num_processes)]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the forward passes of one process's share of a step."""
        step, share = [rows[row] for row in batch[0]["samples"]], batch[0]["share"]
        # Shares of about equal length, since processes wait for each other in each step.
        shares_of_step = balanced_shares([len(row.labels) for row in step], num_processes)
        passes = [
            forward_passes([step[row] for row in part], packing=job.config.packing, rows_per_pass=rows_per_pass)
            for part in shares_of_step
        ]
        num_idle = max(map(len, passes)) - len(passes[share])
        return {
            "passes": passes[share] + [idle_pass()] * num_idle,
            "tokens": torch.tensor(sum(num_trained_tokens(row) for row in step)),
        }

    return PlannedSFTTrainer(
        job=job,
        plan=plan,
        on_report=on_report,
        model=parent.model,
        args=settings,
        data_collator=collate,
        train_dataset=Dataset.from_dict(
            {"samples": [samples for samples, _ in shares], "share": [share for _, share in shares]}
        ),
        processing_class=parent.tokenizer,
        peft_config=parent.lora,
        callbacks=[MarkSaved()],
    )


def supervised_arguments(job: TrainingJob, *, steps: int) -> Any:
    """Return the trainer's configuration for `steps` optimizer steps; see `common_arguments`."""
    return SFTConfig(
        **common_arguments(job, steps=steps),
        per_device_train_batch_size=1,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
    )


# TRL's DPOTrainer on token pairs: the loss applies to the replies of both sides, and to nothing
# else.
#
# TRL masks only the prompt, so observations between two replies would count as text of the agent.
# Its loss reads a mask with one flag for each token, however, and here that is the mask of the
# labels.


class PlannedDPOTrainer(PlanMixin, DPOTrainer):  # type: ignore[misc]
    """A DPOTrainer that follows a `Plan` over pairs of token rows.

    The loss of a step is the mean over its pairs; if the last batch of a training is not full, its
    pairs weigh more. Several processes always have full batches: some pairs of the last step may
    then count once more than others.
    """

    def _watched_values(self, entry: dict[str, float]) -> dict[str, float | None]:
        objective, reward = self._job.objective, entry.get("rewards/chosen")
        assert isinstance(objective, Preference)
        chosen_drop = None if reward is None else -reward / objective.preference.beta
        return {**super()._watched_values(entry), "chosen_drop": chosen_drop}

    def training_step(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Return the loss of one batch, after adding its gradient to that of the step. Raises
        `NonFiniteLoss`.
        """
        loss: torch.Tensor = super().training_step(*inputs, **options)
        self.check_finite(self.model, loss)
        return loss

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        # TRL's own method would render and tokenise texts, with a mask of its own.
        return dataset


def preference_trainer(
    job: TrainingJob,
    plan: Plan,
    rows: Sequence[TokenPair],
    *,
    parent: Parent,
    settings: Any,
    on_report: Callable[[Report], None],
) -> PlannedDPOTrainer:
    """Return the trainer of a preference job; `settings` are its `preference_arguments`. Before
    that, compute the reference model's log-probabilities of all pairs, unless an earlier attempt
    has stored them.

    The reference is the model that training starts from: without adapters if training adds new
    ones, or with a copy of those that it starts with. Raises `NonFiniteLoss` if a log-probability
    of the reference is not finite.
    """
    disable_progress_bars()
    assert isinstance(job.objective, Preference)
    # A dataset with files of its own: TRL keeps what it computes from them beside these.
    folder = job.work_folder.reference_dataset
    with PartialState().main_process_first():
        if not folder.exists():
            draft = folder.with_suffix(".new")
            columns = {
                f"{side}_{name}": [list(getattr(getattr(row, side), name)) for row in rows]
                for side in SIDES
                for name in TokenRow._fields
            }
            Dataset.from_dict(columns).save_to_disk(draft)
            draft.replace(folder)
    trainer = PlannedDPOTrainer(
        job=job,
        plan=plan,
        on_report=on_report,
        model=parent.model,
        args=settings,
        data_collator=collate,
        train_dataset=load_from_disk(folder),
        processing_class=parent.tokenizer,
        peft_config=parent.lora,
        callbacks=[MarkSaved()],
    )
    if not all(np.isfinite(trainer.train_dataset[f"ref_{side}_logps"]).all() for side in SIDES):
        # A later attempt computes them again.
        if PartialState().is_main_process:
            shutil.rmtree(job.work_folder.reference_dataset)
        raise NonFiniteLoss(
            "the log-probabilities of the reference are NaN or infinite; look at the weights of the model that "
            "training starts from, or set training.bf16=false"
        )
    positions = [position for step in plan.steps for position in step]
    # Accelerate would fill up the batches of the last step with pairs of the first one.
    if job.config.num_processes > 1:
        num_missing = -len(positions) % (job.config.per_device_train_batch_size * job.config.num_processes)
        positions += islice(cycle(plan.steps[-1]), num_missing)
    trainer.train_dataset = trainer.train_dataset.select(positions)
    return trainer


def preference_arguments(job: TrainingJob, *, steps: int) -> Any:
    """Return the trainer's configuration for `steps` optimizer steps; see `common_arguments`."""
    assert isinstance(job.objective, Preference)
    loss = job.objective.preference
    common = common_arguments(job, steps=steps)
    return DPOConfig(
        **common,
        per_device_train_batch_size=job.config.per_device_train_batch_size,
        gradient_accumulation_steps=job.config.gradient_accumulation_steps,
        max_length=None,
        precompute_ref_log_probs=True,
        beta=loss.beta,
        loss_type=list(loss.loss_type),
        loss_weights=list(loss.loss_weights) or None,
        label_smoothing=loss.label_smoothing,
        ld_alpha=loss.ld_alpha,
    )


def collate(batch: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the batch that TRL's loss reads, as tensors [2 * pairs, length]: first the chosen
    rows, then the rejected ones, padded to one of a few lengths.

    `completion_mask` has a 1 for each token that carries loss. `ref_chosen_logps` and
    `ref_rejected_logps` [pairs] are included once they have been computed.
    """
    rows = [TokenRow(pair[f"{side}_input_ids"], pair[f"{side}_labels"]) for side in SIDES for pair in batch]
    length = padded_length(max(len(row.labels) for row in rows))

    def padded(values: Sequence[int]) -> list[int]:
        return [*values, *[0] * (length - len(values))]

    tensors = {
        "input_ids": torch.tensor([padded(row.input_ids) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row.labels)) for row in rows]),
        # The first token has nothing before it from which to predict it.
        "completion_mask": torch.tensor(
            [padded([0, *(label != IGNORE_INDEX for label in row.labels[1:])]) for row in rows]
        ),
    }
    for side in SIDES:
        if f"ref_{side}_logps" in batch[0]:
            tensors[f"ref_{side}_logps"] = torch.tensor([pair[f"ref_{side}_logps"] for pair in batch])
    return tensors


SIDES = ("chosen", "rejected")
