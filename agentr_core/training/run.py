"""One training in this process, alone or with others: from a job to a published checkpoint."""

from __future__ import annotations

import atexit
import errno
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, set_seed
from transformers.integrations.deepspeed import set_hf_deepspeed_config

from agentr_core.errors import AlarmRaised, ConfigError, DataFault, ModelDirectoryError, OutOfMemory, TrainingFault
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.system import keep_freed_memory
from agentr_core.training.checkpoints import Manifest, publish, publish_step
from agentr_core.training.job import JOB, LESS_MEMORY_HINT, Fault, Preference, Report, TrainingJob, TrainingStep
from agentr_core.training.packing import Plan, TokenPair, TokenRow, make_plan, num_trained_tokens
from agentr_core.training.parent import Parent, adapter_faults, load_parent, mixing_faults, text_config, write_result
from agentr_core.training.requirements import check_requirements
from agentr_core.training.trainers import (
    MarkSaved,
    last_checkpoint,
    preference_arguments,
    preference_trainer,
    samples_per_step,
    supervised_arguments,
    supervised_trainer,
)

# Turns exceptions of the trainer's process into faults for its parent, in one sentence each.

# Writers in Rust and C++ report a failed write only in their message; torch's does not give the
# cause.
_WRITE_ERRORS = ("No space left on device", "PytorchStreamWriter failed", "inline_container")
_MEMORY_ERRORS = ("can't allocate memory", "CUDA out of memory")


def make_fault(error: BaseException, folder: Path, *, memory_hint: str = LESS_MEMORY_HINT) -> Fault:
    """Return the fault for an exception: its kind, what happened and what the user can do.

    `folder` is where the training writes; after a failed write, the message says how much space is
    left there. `memory_hint` tells the user which fields of a recipe reduce the need for memory.
    """
    if isinstance(error, AlarmRaised | ConfigError | DataFault | ModelDirectoryError | TrainingFault):
        return Fault(kind=type(error).__name__, message=str(error))
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(
        (isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT))
        or any(text in str(link) for text in _WRITE_ERRORS)
        for link in chain
    ):
        free_mb = shutil.disk_usage(folder).free / 1e6
        return Fault(
            kind=TrainingFault.__name__,
            message=f"a checkpoint could not be written to {folder}: {_first_line(error)}; its disk has {free_mb:.1f} "
            "MB left, free some and train again",
        )
    if any(
        isinstance(link, MemoryError | torch.OutOfMemoryError)
        or (isinstance(link, RuntimeError) and any(text in str(link) for text in _MEMORY_ERRORS))
        for link in chain
    ):
        return Fault(kind=OutOfMemory.__name__, message=f"memory ran out ({_first_line(error)}); {memory_hint}")
    return Fault(
        kind=TrainingFault.__name__, message=f"the trainer failed with {type(error).__name__}: {_first_line(error)}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


# The number of threads that compute on a CPU.


def use_threads(num_threads: int) -> None:
    """Let PyTorch compute on `num_threads` threads of this process.

    0 leaves the number to `OMP_NUM_THREADS`; if that is not set and there is no GPU, one thread is
    used. Threads meet at the end of every operation, of which a step has thousands, and spin until
    the last one arrives: when another program takes a core from one of them, all wait.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        torch.set_num_threads(1)


@contextmanager
def limited_threads(num_threads: int) -> Iterator[None]:
    """Let PyTorch compute on `num_threads` threads, as with `use_threads`, but only during the
    block.
    """
    num_before = torch.get_num_threads()
    use_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(num_before)


# Datasets of token rows, read and checked before any compute is spent on them.


def read_rows(file: Path, *, vocabulary: int, context: int, column_prefix: str = "") -> list[TokenRow]:
    """Return the checked rows of a .parquet, .arrow or .feather file, in the file's order.

    Args:
        vocabulary: how many token ids the model knows.
        context: the most tokens the model takes.
        column_prefix: the prefix of the columns `input_ids` and `labels`, for a file of pairs.

    Raises:
        DataFault: the file cannot be read, or a row is invalid; the message names the first such
            row.
    """
    try:
        if file.suffix == ".parquet":
            table = parquet.read_table(file)
        elif file.suffix in (".arrow", ".feather"):
            table = feather.read_table(file)
        else:
            raise DataFault(f"dataset {file} has the unknown type {file.suffix!r}; write .parquet, .arrow or .feather")
    except (OSError, pa.ArrowInvalid) as error:
        raise DataFault(f"dataset {file} cannot be read ({error}); build it again") from error
    ids, labels = f"{column_prefix}input_ids", f"{column_prefix}labels"
    missing = [name for name in (ids, labels) if name not in table.column_names]
    if missing:
        raise DataFault(
            f"dataset {file} lacks the columns {', '.join(missing)}; it has {', '.join(table.column_names)}"
        )
    columns = zip(table[ids].to_pylist(), table[labels].to_pylist(), strict=True)
    rows = [TokenRow(tuple(tokens or ()), tuple(row_labels or ())) for tokens, row_labels in columns]
    for number, row in enumerate(rows):
        fault = _row_fault(row, vocabulary=vocabulary, context=context)
        if fault:
            raise DataFault(
                f"dataset {file}, row {number}{f' ({column_prefix[:-1]} side)' if column_prefix else ''}: {fault}"
            )
    return rows


def read_pairs(file: Path, *, vocabulary: int, context: int) -> list[TokenPair]:
    """Return the checked pairs of a file, in the file's order. Arguments and errors are those of
    `read_rows`.
    """
    sides = (
        read_rows(file, vocabulary=vocabulary, context=context, column_prefix=side) for side in ("chosen_", "rejected_")
    )
    return [TokenPair(*pair) for pair in zip(*sides, strict=True)]


def _row_fault(row: TokenRow, *, vocabulary: int, context: int) -> str:
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
    if any(label not in (IGNORE_INDEX, token) for token, label in pairs):
        return f"a label is neither its own token id nor {IGNORE_INDEX}; labels are not shifted"
    if not num_trained_tokens(row):
        return "no token is trained; leave the row out"
    return ""


_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


def run(job: TrainingJob, on_report: Callable[[Report], None]) -> Manifest | None:
    """Train a job, starting from its last intermediate checkpoint if there is one, and publish the
    result.

    Return the manifest, or None if this is not the main process of the training: only the main
    process reports and publishes.

    Raises:
        ConfigError: the settings ask for something that is not available, or for adapters that do
            not fit the model.
        DataFault: the dataset is empty or has invalid rows.
        ModelDirectoryError: the model cannot be loaded.
        NonFiniteLoss: loss or gradient became NaN or infinite.
        AlarmRaised: an alarm ended the training, and nothing is to be published.
        TrainingFault: the model would mix packed samples, Accelerate ignores DeepSpeed or FSDP, the
            main machine trains another job, or the result cannot be merged or published.
    """
    use_threads(job.config.num_threads)
    if not torch.cuda.is_available():
        keep_freed_memory()
    check_requirements(job.config)
    set_seed(job.seed)
    rows = _load_rows(job)
    plan = make_plan(
        [num_trained_tokens(row) for row in rows],
        per_step=samples_per_step(job.config),
        # A plan that is repeated until the time is up must consist of whole passes.
        epochs=math.ceil(job.num_train_epochs) if job.config.max_seconds else job.num_train_epochs,
        max_tokens=job.config.max_tokens,
        seed=job.seed,
        lengths=[len(row.input_ids) for row in rows] if job.config.step_tokens else (),
        step_tokens=job.config.step_tokens,
    )
    # The arguments come before the model: they create the process group and tell Transformers about
    # ZeRO-3.
    is_preference = isinstance(job.objective, Preference)
    settings = (preference_arguments if is_preference else supervised_arguments)(job, steps=len(plan.steps))
    # This machine may have joined late or after a crash.
    main_job = broadcast_object_list([job.fingerprint])[0]
    if main_job != job.fingerprint:
        raise TrainingFault(f"the main machine trains job {main_job}, this one {job.fingerprint}; join it again")
    zero3 = settings.deepspeed_plugin is not None and settings.deepspeed_plugin.zero_stage == 3
    if zero3:
        # On a CPU DeepSpeed would learn of the process group only after splitting the weights.
        from deepspeed import comm

        if not comm.is_initialized():
            comm.init_distributed(dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    parent = load_parent(job.model_dir, job.config, zero3=zero3)
    make_trainer: Any = preference_trainer if is_preference else supervised_trainer
    hf_trainer = make_trainer(job, plan, rows, parent=parent, settings=settings, on_report=on_report)
    if settings.deepspeed_plugin is not None and not hf_trainer.is_deepspeed_enabled:
        raise TrainingFault("training.launch.deepspeed is set, but Accelerate left DeepSpeed out of this training")
    fsdp = bool(settings.fsdp)
    if fsdp and not hf_trainer.is_fsdp_enabled:
        raise TrainingFault("training.launch.fsdp is set, but Accelerate left FSDP out of this training")
    resume_from = last_checkpoint(job.work_folder.checkpoints, settings)
    if job.config.save_total_limit != 0:
        # Before `MarkSaved`: who resumes from a marked checkpoint does not publish it again.
        mark_saved = hf_trainer.pop_callback(MarkSaved)
        hf_trainer.add_callback(_PublishSteps(job, plan, hf_trainer, parent, split=zero3 or fsdp))
        hf_trainer.add_callback(mark_saved)
    hf_trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)

    ended_by: str = job.config.ended_by
    if hf_trainer.crossings:
        ended_by = f"alarms.{hf_trainer.crossings[0].name}"
        hf_trainer.load_last_checkpoint()
    history = hf_trainer.step_history()
    weights = hf_trainer.accelerator.get_state_dict(hf_trainer.model_wrapped) if zero3 or fsdp else None
    _leave_process_group(hf_trainer)
    if not hf_trainer.is_world_process_zero():
        return None
    model = hf_trainer.accelerator.unwrap_model(hf_trainer.model)
    write_result(job, model, history, parent.dtype, weights)
    return publish(job.work_folder.staging, job.output_dir, _manifest(job, plan, history, ended_by))


class _PublishSteps(TrainerCallback):  # type: ignore[misc]
    """A callback that publishes the weights every `save_steps` steps, except after the last step,
    whose weights are the result. `split` says whether each process holds only a part of them.
    """

    def __init__(self, job: TrainingJob, plan: Plan, hf_trainer: Any, parent: Parent, *, split: bool) -> None:
        self._job, self._plan, self._trainer, self._parent, self._split = job, plan, hf_trainer, parent, split

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Publish the weights after the current step, and wait for all processes. Raises what
        `publish` raises.
        """
        job, trainer = self._job, self._trainer
        if state.global_step % job.checkpoint_every or state.global_step >= state.max_steps:
            return
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if self._split else None
        if state.is_world_process_zero:
            model, history = trainer.accelerator.unwrap_model(trainer.model), trainer.step_history()
            if weights is None and not job.config.lora_r:
                # Not copied, so that names that share a tensor still share it.
                weights = model.state_dict(keep_vars=True)
            # Loading a model to merge adapters into it draws random numbers, and so would change
            # the dropout from here on.
            with torch.random.fork_rng():
                write_result(job, model, history, self._parent.dtype, weights)
            manifest = _manifest(job, self._plan, history, "save_steps")
            publish_step(job.work_folder.staging, job.output_dir, manifest, max_folders=job.config.save_total_limit)
        if args.deepspeed:
            # Merging made Transformers load whole models from then on; undo that.
            set_hf_deepspeed_config(args.hf_deepspeed_config)
        args.distributed_state.wait_for_everyone()


def _load_rows(job: TrainingJob) -> Sequence[Any]:
    """Return the rows or pairs of the dataset, checked against the vocabulary and the context of
    the model.

    Raises `TrainingFault` if the model would mix packed samples, `ConfigError` if the adapters do
    not fit it, and what `read_rows` raises.
    """
    # Only for samples: each side of a pair has a row of its own.
    if job.objective.row_type == "samples" and (faults := mixing_faults(job.model_dir, job.config)):
        raise TrainingFault("; ".join(faults))
    if faults := adapter_faults(job.model_dir, job.config):
        raise ConfigError("; ".join(faults))
    model_config = text_config(job.model_dir)
    read_dataset = read_pairs if isinstance(job.objective, Preference) else read_rows
    return read_dataset(
        job.dataset_file, vocabulary=model_config.vocab_size, context=model_config.max_position_embeddings
    )


def _manifest(job: TrainingJob, plan: Plan, history: Sequence[TrainingStep], ended_by: str) -> Manifest:
    launch = job.config.launch
    packages = (*_PACKAGES, "deepspeed") if launch and launch.deepspeed else _PACKAGES
    return Manifest(
        job=job.fingerprint,
        parent=job.parent,
        dataset_hash=job.dataset_hash,
        config=JOB.dump_python(job, mode="json")["config"],
        seed=job.seed,
        steps=len(history),
        epochs=plan.epochs * len(history) / len(plan.steps),
        ended_by=ended_by,
        parent_weights=job.parent_weights,
        iteration=job.iteration,
        trained_tokens=history[-1].trained_tokens,
        final_loss=history[-1].loss,
        seconds=history[-1].seconds,
        versions={"python": platform.python_version(), **{name: version(name) for name in packages}},
    )


def _leave_process_group(hf_trainer: Any) -> None:
    """Wait for all processes, then end the process group, so that none is left waiting for one that
    is gone.
    """
    distributed_state = hf_trainer.args.distributed_state
    distributed_state.wait_for_everyone()
    if torch.distributed.is_initialized():
        # The object that exchanged gradients refers to the group and must not be freed: that would
        # wait, holding the interpreter's lock, for a thread of Gloo, which may itself be waiting
        # for this lock to free a tensor. So it is kept until the process exits.
        atexit.register(lambda: hf_trainer)
    distributed_state.destroy_process_group()
