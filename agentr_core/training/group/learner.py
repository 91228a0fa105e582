"""Training of a policy: AdamW, a schedule, and updates on episodes."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers.optimization import get_scheduler

from agentr_core.errors import NonFiniteLoss
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.system import sync, writing
from agentr_core.training.group.policy import Policy, PolicyRow, Totals, token_weights
from agentr_core.training.group.split import Whole
from agentr_core.training.job import STEP, OnlineJob, TrainingStep
from agentr_core.training.parent import write_result

# Reports each step to the loggers in `training.report_to`, as a Trainer does.

Tell = Callable[[int, Mapping[str, float | None]], None]
"""Called with a step and numbers by name: `loss`, `learning_rate`, `grad_norm`, `trained_tokens`
and `seconds` as a training on a dataset logs them, and those of group RL. Loggers show all as
`train/`, but those that begin with `eval_` as `eval/`.
"""
_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"


@contextmanager
def reporting(job: OnlineJob, model: Any) -> Iterator[Tell]:
    """Yield a function that reports to the loggers of a job; it does nothing if the job names
    none.
    """
    config, steps = job.config, job.objective.grpo.steps
    if not config.report_to:
        yield lambda step, numbers: None
        return
    # Slow to import.
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    arguments = TrainingArguments(
        output_dir=str(job.work.checkpoints),
        run_name=job.output_dir.name,
        max_steps=steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        logging_steps=1,
        report_to=list(config.report_to),
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=job.seed,
    )
    before = os.environ.get(_TENSORBOARD)
    os.environ[_TENSORBOARD] = str(job.reports)
    try:
        loggers = get_reporting_integration_callbacks(list(config.report_to))
        handler = CallbackHandler([DefaultFlowCallback, *loggers], model, None, None, None)
    finally:
        if before is None:
            del os.environ[_TENSORBOARD]
        else:
            os.environ[_TENSORBOARD] = before
    state, control = TrainerState(max_steps=steps, logging_steps=1), TrainerControl()

    def tell(step: int, numbers: Mapping[str, float | None]) -> None:
        state.global_step = step
        handler.on_step_end(arguments, state, control)
        handler.on_log(arguments, state, control, {name: value for name, value in numbers.items() if value is not None})

    handler.on_train_begin(arguments, state, control)
    yield tell
    # To loggers this means success, so it is left out when a training fails.
    handler.on_train_end(arguments, state, control)


# The saved state of a training that samples, written completely or not at all.
#
# They contain no state of a random generator, because each draw has its own seed. Processes that
# hold parts of the state write these into a folder beside its file.


class Snapshot(NamedTuple):
    """The state after a step: that of the learner, with the folder of the parts that processes
    hold, the history up to it, and the hashes of what it was made of; none in a state of an earlier
    version.
    """

    step: int
    learner: dict[str, Any]
    parts: Path
    history: list[TrainingStep]
    made_of: list[str]


def save_snapshot(
    folder: Path,
    step: int,
    state: Callable[[Path], dict[str, Any]],
    history: list[TrainingStep],
    made_of: Sequence[str],
) -> None:
    """Write the state after a step, and remove earlier ones.

    Args:
        state: returns that of the learner; it may write parts of it to a folder, which it makes.

    Raises `DiskError`.
    """
    file = folder / f"step-{step:06d}.pt"
    draft = file.with_suffix(".new")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_parts(file), ignore_errors=True)
        learner = state(_parts(file))
        lines = [STEP.dump_json(entry).decode() for entry in history]
        with draft.open("wb") as stream:
            torch.save({"step": step, "learner": learner, "history": lines, "made_of": list(made_of)}, stream)
        # Before the earlier states go, this one must outlast a loss of power.
        for path in (draft, *(path for path in _parts(file).rglob("*") if path.is_file())):
            sync(path)
        draft.replace(file)
        sync(folder)
        for old in sorted(folder.glob("step-*.pt"))[:-1]:
            old.unlink()
        for parts in folder.glob("step-*.parts"):
            if parts != _parts(file):
                shutil.rmtree(parts)


def load_snapshot(folder: Path) -> Snapshot | None:
    """Return the newest saved state; None if there is none."""
    files = sorted(folder.glob("step-*.pt"))
    if not files:
        return None
    state = torch.load(files[-1], weights_only=True, map_location="cpu")
    history = [STEP.validate_json(line) for line in state["history"]]
    return Snapshot(state["step"], state["learner"], _parts(files[-1]), history, state.get("made_of", []))


def remove_snapshots(folder: Path) -> None:
    """Remove all saved states."""
    shutil.rmtree(folder, ignore_errors=True)


def _parts(file: Path) -> Path:
    return file.with_suffix(".parts")


class Learner:
    """A policy with its optimizer, alone or as one of the processes of `ranks.Ranks`, which then
    all call the same methods with the same arguments. Not thread-safe; `close` it.

    Args:
        updates: the number of updates in the schedule.
        most: the most sampled tokens that an episode may have.
        seed: for the initialisation of new adapters.
        held: how this process and others hold the policy.

    Raises `ModelDirectoryError` if the model cannot be loaded.
    """

    def __init__(
        self,
        model_dir: Path,
        training: TrainingConfig,
        grpo: GrpoConfig,
        *,
        updates: int,
        max_tokens: int,
        seed: int = 0,
        group: Whole | None = None,
    ) -> None:
        self.policy = Policy(model_dir, training, grpo, seed=seed, group=group)
        self._group = self.policy.group
        self._training, self._grpo, self._max_tokens = training, grpo, max_tokens
        self._schedule = get_scheduler(
            training.lr_scheduler_type,
            self._group.optimizer,
            num_warmup_steps=math.ceil(updates * training.warmup_ratio),
            num_training_steps=updates,
            scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._schedule.get_last_lr()[0])

    def settled(self, rows: Sequence[PolicyRow]) -> list[PolicyRow]:
        """Return episodes that the current weights sampled, as `Policy.settled` does, or this
        process's share of them; in bfloat16, where policy and sampler differ by more than rounding,
        they are unchanged.
        """
        indices, passes = self._share(rows)
        chosen = [rows[index] for index in indices]
        return chosen if self._training.bf16 is True else self.policy.settled(chosen, passes=passes)

    def update(self, rows: Sequence[PolicyRow]) -> Totals:
        """Take one optimizer step on episodes, and return what was measured in all processes.

        Raises `NonFiniteLoss` before any weight is changed; DeepSpeed changes weights at once.
        """
        self._group.clear()
        weights = token_weights(
            [len(row.positions) for row in rows],
            wholes=[row.episode_tokens for row in rows],
            loss_type=self._grpo.loss_type,
            max_tokens=self._max_tokens,
        )
        indices, passes = self._share(rows)
        totals = self.policy.accumulate([rows[i] for i in indices], [weights[i] for i in indices], passes=passes)
        names = [field.name for field in fields(Totals)]
        sums = self._group.total([getattr(totals, name) for name in names])
        totals = Totals(**{name: type(getattr(totals, name))(value) for name, value in zip(names, sums, strict=True)})
        norm = self._group.step(
            self.policy.parameters.values(), self._training.max_grad_norm, finite=math.isfinite(totals.loss)
        )
        if not (math.isfinite(totals.loss) and math.isfinite(norm)):
            raise NonFiniteLoss(
                f"an update has loss {totals.loss} and gradient norm {norm}; lower training.learning_rate (it is "
                f"{self._training.learning_rate})"
            )
        self._schedule.step()
        totals += Totals(updates=1, norm=norm)
        return totals

    def skip(self, updates: int) -> None:
        """Move on in the schedule by updates that were planned and had nothing to train on."""
        self._group.clear()
        for _ in range(updates):
            self._group.idle_step()
            self._schedule.step()

    def write_weights(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write all weights by name as safetensors, each once, in the number format of the samplers
        that load them.
        """
        weights = self.policy.weights(dtype)
        if self._group.rank == 0:
            save_file(weights, file)

    def write_result(self, job: OnlineJob, history: Sequence[TrainingStep], *, goes_on: bool = False) -> None:
        """Write the training as it is to the staging folder of its job. Unless it `goes_on`, the
        policy is of no use afterwards.
        """
        model, alone = self.policy.model, self._group.count == 1 and not self._group.even
        if not alone:
            weights: dict[str, torch.Tensor] | None = self.policy.whole_state()
        elif goes_on and not job.config.lora_r:
            weights = model.state_dict(keep_vars=True)
        else:
            weights = None
        if self._group.rank == 0:
            write_result(job, model, history, self.policy.dtype, weights)

    def state(self, folder: Path) -> dict[str, Any]:
        """Return everything that the next update depends on, as tensors and plain values. If
        processes hold parts of it, these are written to a folder instead.
        """
        return {**self._group.save(folder, self.policy.state()), "schedule": self._schedule.state_dict()}

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Return to an earlier state of the same training."""
        self._group.load(folder, state, self.policy.restore)
        self._schedule.load_state_dict(state["schedule"])

    def rest(self) -> None:
        """Leave the GPU to a sampler until `wake`."""
        self._group.clear()
        self._group.move(away=True)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Return to the GPU."""
        self._group.move(away=False)

    def close(self) -> None:
        """Give the memory of a GPU back, which a later training of the run needs. The policy is
        gone afterwards.
        """
        if torch.cuda.is_available():
            del self.policy, self._group, self._schedule
            gc.collect()
            torch.cuda.empty_cache()

    def _share(self, rows: Sequence[PolicyRow]) -> tuple[list[int], int]:
        """Return the numbers of the episodes that this process computes, and the least number of
        its passes: where weights are split, a pass needs all processes.
        """
        shares = shared_out([len(row.input_ids) for row in rows], self._group.count)
        passes = (self.policy.count_passes([rows[i] for i in share]) for share in shares)
        return shares[self._group.rank], max(passes) if self._group.even else 0


def shared_out(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return which rows, by their lengths, each of `count` processes takes: the longest first, each
    to the process with the fewest tokens so far. One process takes them as they come.
    """
    if count == 1:
        return [list(range(len(lengths)))]
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        smallest = loads.index(min(loads))
        shares[smallest].append(index)
        loads[smallest] += lengths[index]
    return shares
