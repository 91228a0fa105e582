"""The common part of our TRL trainers: they follow a plan, report each step, and stop at a loss or
gradient that is not finite.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import torch
from accelerate.utils import broadcast_object_list
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from agentr_core.errors import DataFault, NonFiniteLoss
from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORED
from agentr_core.training.job import Report, TrainingJob, TrainingStep
from agentr_core.training.packing import Plan, TokenPair, TokenRow, trained_tokens
from agentr_core.training.parent import recomputes
from agentr_core.training.process import read_zero

# Datasets of token rows, read and checked before any compute is spent on them.


def read_rows(file: Path, *, vocabulary: int, context: int, side: str = "") -> list[TokenRow]:
    """Return the checked rows of a .parquet, .arrow or .feather file, in its order.

    Args:
        vocabulary: how many token ids the model knows.
        context: the most tokens the model takes.
        side: the prefix of the two columns, for a file of pairs.

    Raises:
        DataFault: the file cannot be read, or a row is broken; the message names the first such
            row.
    """
    table = _read(file)
    ids, labels = f"{side}input_ids", f"{side}labels"
    missing = [name for name in (ids, labels) if name not in table.column_names]
    if missing:
        raise DataFault(
            f"dataset {file} lacks the columns {', '.join(missing)}; it has {', '.join(table.column_names)}"
        )
    columns = zip(table[ids].to_pylist(), table[labels].to_pylist(), strict=True)
    rows = [TokenRow(tuple(tokens or ()), tuple(flags or ())) for tokens, flags in columns]
    for number, row in enumerate(rows):
        fault = _fault(row, vocabulary=vocabulary, context=context)
        if fault:
            raise DataFault(f"dataset {file}, row {number}{f' ({side[:-1]} side)' if side else ''}: {fault}")
    return rows


def read_pairs(file: Path, *, vocabulary: int, context: int) -> list[TokenPair]:
    """Return the checked pairs of a file, in its order. Arguments and errors are those of
    `read_rows`.
    """
    sides = (read_rows(file, vocabulary=vocabulary, context=context, side=side) for side in ("chosen_", "rejected_"))
    return [TokenPair(*pair) for pair in zip(*sides, strict=True)]


def _read(file: Path) -> Any:
    try:
        if file.suffix == ".parquet":
            return parquet.read_table(file)
        if file.suffix in (".arrow", ".feather"):
            return feather.read_table(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataFault(f"dataset {file} cannot be read ({error}); build it again") from error
    raise DataFault(f"dataset {file} has the unknown type {file.suffix!r}; write .parquet, .arrow or .feather")


def _fault(row: TokenRow, *, vocabulary: int, context: int) -> str:
    if len(row.input_ids) != len(row.labels):
        return f"{len(row.input_ids)} token ids and {len(row.labels)} labels; there must be a label for each token"
    if len(row.input_ids) > context:
        return f"{len(row.input_ids)} tokens do not fit the model's context of {context}; lower data.max_length"
    unknown_ids = [token for token in row.input_ids if not 0 <= token < vocabulary]
    if unknown_ids:
        return (
            f"token id {unknown_ids[0]} is not in the model's vocabulary of {vocabulary}; use the model's own tokenizer"
        )
    pairs = zip(row.input_ids, row.labels, strict=True)
    if any(label not in (IGNORED, token) for token, label in pairs):
        return f"a label is neither its own token id nor {IGNORED}; labels are not shifted"
    if not trained_tokens(row):
        return "no token is trained; leave the row out"
    return ""


_SAVED = "complete"
"""The mark of an intermediate checkpoint that was written completely."""
_FOREVER = 1_000_000
"""The number of passes over a plan when the clock ends a training."""
_TICKS = 1000
"""The number of steps of a schedule that follows the clock."""
_SCORES = {
    "logps/chosen": "chosen_logps",
    "logps/rejected": "rejected_logps",
    "rewards/chosen": "chosen_rewards",
    "rewards/rejected": "rejected_rewards",
    "rewards/accuracies": "reward_accuracy",
}
"""TRL's names of the measures of preference training, and ours."""


class FollowsPlan:
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

    def __init__(self, *, job: TrainingJob, plan: Plan, tell: Callable[[Report], None], **options: Any) -> None:
        super().__init__(**options)
        self._job = job
        self._plan = plan
        self._tell = tell
        self._max_seconds = job.config.max_seconds
        self.crossed = job.alarms.crossed(())
        """The thresholds that were crossed in the step that ended the training."""
        self._clock = time.monotonic()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step with its tokens and time, so that they survive in the trainer's state, and
        report it.
        """
        if "loss" not in logs:
            super().log(logs, start_time)  # type: ignore[misc]
            return
        number = self.state.global_step
        seconds = self._seconds()
        entry = {**logs, "trained_tokens": self._plan.tokens_after(number), "seconds": seconds}
        self._clock = time.monotonic()
        super().log(entry, start_time)  # type: ignore[misc]
        if 0 < self._max_seconds <= seconds:
            self.control.should_training_stop = True
        if self.is_world_process_zero():
            self._tell(self._step(number, entry))
        self._watch(number)

    def _watch(self, number: int) -> None:
        """Report the thresholds that a step has crossed, and end the training if the recipe says
        so; its weights are not saved then.
        """
        alarms = self._job.alarms
        crossed = alarms.crossed(self.state.log_history, self._watched, step=number)
        if self.is_world_process_zero():
            for crossing in crossed:
                self._tell(crossing)
        if alarms.reaction != "tell":
            # All processes end with the first one, whatever rounding says.
            self.crossed = broadcast_object_list([crossed])[0]
            if self.crossed:
                self.control.should_training_stop, self.control.should_save = True, False

    def _watched(self, entry: dict[str, float]) -> dict[str, float | None]:
        """Return what is watched of a logged step."""
        return {"gradient_norm": entry.get("grad_norm")}

    # By the share of the seconds that has passed: nobody knows how many steps fit into them, and
    # every arm of a comparison must have its whole schedule.
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule over the steps, or over the seconds if time is the budget."""
        if not self._max_seconds:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        scheduler = super().create_scheduler(_TICKS, optimizer)  # type: ignore[misc]
        scheduler.lr_lambdas = [self._by_clock(share) for share in scheduler.lr_lambdas]
        return scheduler

    def _by_clock(self, share: Any) -> Callable[[int], float]:
        return lambda _: float(share(self._time_share()))

    def _time_share(self) -> float:
        """Return the share of the time that has passed, scaled to [0, `_TICKS`]."""
        return _TICKS * min(1.0, self._seconds() / self._max_seconds)

    def _seconds(self) -> float:
        """Return the seconds spent in training so far, including earlier attempts up to their
        checkpoint.

        Where time is the budget, all processes get the value of the main process.
        """
        previous = self.state.log_history[-1]["seconds"] if self.state.log_history else 0.0
        seconds: float = previous + time.monotonic() - self._clock
        return float(broadcast_object_list([seconds])[0]) if self._max_seconds else seconds

    def go_back(self) -> None:
        """Restore the last weights that were saved before an alarm ended the training.

        Raises `AlarmRaised` where nothing was saved, or the recipe does not go back.
        """
        saved = last_checkpoint(Path(self.args.output_dir), self.args)
        if saved is None or self._job.alarms.reaction != "back":
            # The last weights that were saved stay, and a later try goes on from them.
            raise self.crossed[0].ends("trains on" if saved else "trains anew, since nothing was saved before")
        step = int(saved.name.rpartition("-")[2])
        self._load_from_checkpoint(str(saved))  # type: ignore[attr-defined]
        self.state.log_history = [entry for entry in self.state.log_history if entry["step"] <= step]

    def steps_done(self) -> list[TrainingStep]:
        """Return every step of this training so far, those before an interruption included."""
        return [self._step(entry["step"], entry) for entry in self.state.log_history if "loss" in entry]

    def check_finite(self, model: Any, loss: torch.Tensor) -> None:
        """Raise `NonFiniteLoss` when a loss or an existing gradient is not finite."""
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

    def _step(self, number: int, entry: dict[str, float]) -> TrainingStep:
        expected = round(number * self._max_seconds / entry["seconds"]) if self._max_seconds else self.state.max_steps
        return TrainingStep(
            step=number,
            total_steps=max(number, expected),
            loss=entry["loss"],
            trained_tokens=int(entry["trained_tokens"]),
            seconds=entry["seconds"],
            learning_rate=entry.get("learning_rate"),
            grad_norm=entry.get("grad_norm"),
            scores={name: entry[trl_name] for trl_name, name in _SCORES.items() if trl_name in entry},
        )


class MarkSaved(TrainerCallback):  # type: ignore[misc]
    """A callback that marks an intermediate checkpoint once it is complete."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for all processes, then write the mark."""
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _SAVED).touch()


def last_checkpoint(folder: Path, settings: Any) -> Path | None:
    """Return the newest intermediate checkpoint that was written completely, or None; remove those
    that were not.
    """
    if settings.should_save:
        for incomplete in [path for path in folder.glob("checkpoint-*") if not (path / _SAVED).exists()]:
            shutil.rmtree(incomplete)
    settings.distributed_state.wait_for_everyone()
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def samples_per_step(config: TrainingConfig) -> int:
    """Return how many rows an optimizer step has, over all processes."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * config.num_processes


def plain_arguments(job: TrainingJob, *, steps: int) -> dict[str, Any]:
    """Return the arguments that all trainers share, for a job of `steps` optimizer steps, on CUDA
    if available.

    If the job has several processes, this process joins the others when the arguments are
    constructed.
    """
    config = job.config
    on_gpu = torch.cuda.is_available()
    checkpointing = recomputes(config)
    return {
        "output_dir": str(job.work.checkpoints),
        "run_name": job.output_dir.name,
        # The plan holds the epochs and the order; to the Trainer it is one epoch, or one of many.
        "num_train_epochs": _FOREVER if config.max_seconds else 1,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "learning_rate": config.learning_rate,
        "optim": config.optim,
        "lr_scheduler_type": config.lr_scheduler_type,
        "lr_scheduler_kwargs": dict(config.lr_scheduler_kwargs) or None,
        "warmup_steps": math.ceil((_TICKS if config.max_seconds else steps) * config.warmup_ratio),
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
        "deepspeed": read_zero(config.launch.deepspeed) if config.launch and config.launch.deepspeed else None,
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
