"""Training of a policy in one or several processes: AdamW, a learning-rate schedule, and updates on
episodes.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import torch
from safetensors.torch import save_file
from transformers.optimization import get_scheduler

from agentr_core.errors import NonFiniteLoss, TrainingFault
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.system import flush_to_disk, keep_freed_memory, raise_if_cancelled, report_write_errors
from agentr_core.training.group.policy import Policy, PolicyRow, Totals, token_weights
from agentr_core.training.group.split import Strategy, make_strategy
from agentr_core.training.job import STEP, OnlineJob, TrainingStep
from agentr_core.training.packing import balanced_shares
from agentr_core.training.parent import write_result
from agentr_core.training.process import ERRORS_BY_NAME
from agentr_core.training.run import make_fault, use_threads

# Reports each step to the loggers in `training.report_to`, as a Trainer does.

ReportStep = Callable[[int, Mapping[str, float | None]], None]
"""Called with a step and numbers by name: `loss`, `learning_rate`, `grad_norm`, `trained_tokens`
and `seconds` as a training on a dataset logs them, and those of group RL. Loggers show them under
`train/`, those whose name begins with `eval_` under `eval/`.
"""
_TENSORBOARD_VARIABLE = "TENSORBOARD_LOGGING_DIR"


@contextmanager
def open_step_reporter(job: OnlineJob, model: Any) -> Iterator[ReportStep]:
    """Yield a function that reports a step to the loggers of a job. It does nothing if the job
    names none.
    """
    config, steps = job.config, job.objective.grpo.steps
    if not config.report_to:
        yield lambda step, metrics: None
        return
    # Slow to import.
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    arguments = TrainingArguments(
        output_dir=str(job.work_folder.checkpoints),
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
    old_folder = os.environ.get(_TENSORBOARD_VARIABLE)
    os.environ[_TENSORBOARD_VARIABLE] = str(job.logger_folder)
    try:
        loggers = get_reporting_integration_callbacks(list(config.report_to))
        handler = CallbackHandler([DefaultFlowCallback, *loggers], model, None, None, None)
    finally:
        if old_folder is None:
            del os.environ[_TENSORBOARD_VARIABLE]
        else:
            os.environ[_TENSORBOARD_VARIABLE] = old_folder
    state, control = TrainerState(max_steps=steps, logging_steps=1), TrainerControl()

    def report_step(step: int, metrics: Mapping[str, float | None]) -> None:
        state.global_step = step
        handler.on_step_end(arguments, state, control)
        handler.on_log(arguments, state, control, {name: value for name, value in metrics.items() if value is not None})

    handler.on_train_begin(arguments, state, control)
    yield report_step
    # To loggers this call means success, so it is left out when a training fails.
    handler.on_train_end(arguments, state, control)


# The saved state of a training that samples, written atomically.
#
# It contains no state of a random generator, because each draw has its own seed. Processes that
# hold parts of the state write them into a folder beside its file.


class Snapshot(NamedTuple):
    """The saved state after step `step`: the learner's state, the folder `parts_folder` with
    what single processes hold of it, the history of all steps so far, and in `input_hashes` the
    hashes that `save_snapshot` was given; empty in a state of an earlier version.
    """

    step: int
    learner_state: dict[str, Any]
    parts_folder: Path
    history: list[TrainingStep]
    input_hashes: list[str]

    @property
    def sampler_weights(self) -> tuple[int, Path] | None:
        """The step after which the sampler's weights were taken, and their file; None if none were
        saved.
        """
        file = next(self.parts_folder.glob(f"{_SAMPLER_PREFIX}*.safetensors"), None)
        return None if file is None else (int(file.stem.removeprefix(_SAMPLER_PREFIX)), file)


_SAMPLER_PREFIX = "sampler-"
"""The beginning of the name of a file with the sampler's weights, before the number of their step.
"""


def save_snapshot(
    folder: Path,
    step: int,
    write_state: Callable[[Path], dict[str, Any]],
    history: list[TrainingStep],
    input_hashes: Sequence[str],
    *,
    sampler_weights: tuple[int, Path] | None = None,
) -> None:
    """Write the state after a step, and remove earlier ones.

    Args:
        write_state: returns the learner's state; it may create the given folder and write parts of
            the state into it.
        history: all steps so far.
        input_hashes: hashes of what the weights were made from: the initial weights and the data of
            each step.
        sampler_weights: the step after which the weights that sample the next step were taken,
            and their file; None if they are the learner's own.

    Raises `DiskError`.
    """
    state_file = folder / f"step-{step:06d}.pt"
    temporary_file = state_file.with_suffix(".new")
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_parts_folder(state_file), ignore_errors=True)
        learner_state = write_state(_parts_folder(state_file))
        if sampler_weights is not None:
            _parts_folder(state_file).mkdir(exist_ok=True)
            shutil.copyfile(
                sampler_weights[1], _parts_folder(state_file) / f"{_SAMPLER_PREFIX}{sampler_weights[0]}.safetensors"
            )
        history_lines = [STEP.dump_json(entry).decode() for entry in history]
        with temporary_file.open("wb") as stream:
            torch.save(
                {"step": step, "learner": learner_state, "history": history_lines, "made_of": list(input_hashes)},
                stream,
            )
        # Before the earlier states are removed, this one must be safe from a power failure.
        for path in (temporary_file, *(path for path in _parts_folder(state_file).rglob("*") if path.is_file())):
            flush_to_disk(path)
        temporary_file.replace(state_file)
        flush_to_disk(folder)
        for old_file in sorted(folder.glob("step-*.pt"))[:-1]:
            old_file.unlink()
        for parts_folder in folder.glob("step-*.parts"):
            if parts_folder != _parts_folder(state_file):
                shutil.rmtree(parts_folder)


def load_snapshot(folder: Path) -> Snapshot | None:
    """Return the newest saved state, on the CPU; None if there is none."""
    files = sorted(folder.glob("step-*.pt"))
    if not files:
        return None
    state = torch.load(files[-1], weights_only=True, map_location="cpu")
    history = [STEP.validate_json(line) for line in state["history"]]
    return Snapshot(state["step"], state["learner"], _parts_folder(files[-1]), history, state.get("made_of", []))


def remove_snapshots(folder: Path) -> None:
    """Remove all saved states."""
    shutil.rmtree(folder, ignore_errors=True)


def _parts_folder(file: Path) -> Path:
    return file.with_suffix(".parts")


class Learner:
    """A policy with its optimizer, alone or in one of the processes of `ProcessLearner`, all of
    which then call the same methods with the same arguments. Not thread-safe; `close` it.

    Args:
        updates: the number of updates in the schedule.
        max_tokens: the most sampled tokens that an episode may have.
        seed: for the initialisation of new adapters.
        strategy: how this process and others hold the policy; None: this process holds all of it.

    Raises what `Policy` raises.
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
        strategy: Strategy | None = None,
    ) -> None:
        self.policy = Policy(model_dir, training, grpo, seed=seed, strategy=strategy)
        self._strategy = self.policy.strategy
        self._training, self._grpo, self._max_tokens = training, grpo, max_tokens
        self._schedule = get_scheduler(
            training.lr_scheduler_type,
            self._strategy.optimizer,
            num_warmup_steps=math.ceil(updates * training.warmup_ratio),
            num_training_steps=updates,
            scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._schedule.get_last_lr()[0])

    def remove_rounding_noise(self, rows: Sequence[PolicyRow]) -> list[PolicyRow]:
        """Return this process's share of episodes that the current weights sampled, with
        log-probabilities as `Policy.remove_rounding_noise` gives them; in bfloat16, where policy
        and sampler differ by more than rounding, with those of the sampler.
        """
        indices, min_passes = self._own_share(rows)
        own_rows = [rows[index] for index in indices]
        return (
            own_rows
            if self._training.bf16 is True
            else self.policy.remove_rounding_noise(own_rows, min_passes=min_passes)
        )

    def update(self, rows: Sequence[PolicyRow]) -> Totals:
        """Take one optimizer step on episodes; return the totals over all processes.

        Raises `NonFiniteLoss` before any weight is changed, except under DeepSpeed, which changes
        weights at once.
        """
        self._strategy.zero_grad()
        weights = token_weights(
            [len(row.positions) for row in rows],
            episode_lengths=[row.episode_tokens for row in rows],
            loss_type=self._grpo.loss_type,
            max_tokens=self._max_tokens,
        )
        indices, min_passes = self._own_share(rows)
        totals = self.policy.accumulate_gradient(
            [rows[i] for i in indices], [weights[i] for i in indices], min_passes=min_passes
        )
        names = [field.name for field in fields(Totals)]
        sums = self._strategy.sum_over_processes([getattr(totals, name) for name in names])
        totals = Totals(**{name: type(getattr(totals, name))(value) for name, value in zip(names, sums, strict=True)})
        norm = self._strategy.step(
            self.policy.parameters.values(), self._training.max_grad_norm, is_loss_finite=math.isfinite(totals.loss)
        )
        if not (math.isfinite(totals.loss) and math.isfinite(norm)):
            raise NonFiniteLoss(
                f"an update has loss {totals.loss} and gradient norm {norm}; lower training.learning_rate (it is "
                f"{self._training.learning_rate})"
            )
        self._schedule.step()
        totals += Totals(updates=1, norm=norm)
        return totals

    def skip(self, num_updates: int) -> None:
        """Advance the schedule by updates that were planned but had nothing to train on."""
        self._strategy.zero_grad()
        for _ in range(num_updates):
            self._strategy.idle_step()
            self._schedule.step()

    def write_weights(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write all weights by name as a safetensors file, each once, in the dtype of the samplers
        that load them. The process of rank 0 writes; the others help to gather.
        """
        weights = self.policy.weights(dtype)
        if self._strategy.rank == 0:
            save_file(weights, file)

    def write_result(
        self, job: OnlineJob, history: Sequence[TrainingStep], *, training_continues: bool = False
    ) -> None:
        """Write the current model to the staging folder of its job, ready to be published. Unless
        the training `training_continues`, the policy must not be used afterwards.
        """
        model, is_single_process = (
            self.policy.model,
            self._strategy.num_processes == 1 and not self._strategy.needs_equal_passes,
        )
        if not is_single_process:
            weights: dict[str, torch.Tensor] | None = self.policy.full_state()
        elif training_continues and not job.config.lora_r:
            weights = model.state_dict(keep_vars=True)
        else:
            weights = None
        if self._strategy.rank == 0:
            write_result(job, model, history, self.policy.dtype, weights)

    def state(self, folder: Path) -> dict[str, Any]:
        """Return everything that the next update depends on, as tensors and plain values. If
        several processes hold parts of it, they write these to the folder instead.
        """
        return {**self._strategy.save(folder, self.policy.state()), "schedule": self._schedule.state_dict()}

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go back to an earlier state of the same training, as `state` returned and wrote it."""
        self._strategy.load(folder, state, self.policy.restore)
        self._schedule.load_state_dict(state["schedule"])

    def offload(self) -> None:
        """Free the GPU for a sampler until `load_to_gpu`."""
        self._strategy.zero_grad()
        self._strategy.move_state(to_cpu=True)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def load_to_gpu(self) -> None:
        """Move models and optimizer back to the GPU."""
        self._strategy.move_state(to_cpu=False)

    def close(self) -> None:
        """Free the GPU's memory, which a later training of the run needs. The learner must not be
        used afterwards.
        """
        if torch.cuda.is_available():
            del self.policy, self._strategy, self._schedule
            gc.collect()
            torch.cuda.empty_cache()

    def _own_share(self, rows: Sequence[PolicyRow]) -> tuple[list[int], int]:
        """Return the indices of the episodes that this process computes, and the number of passes
        that it must make: where weights are split, a pass needs all processes, so all make as many
        as the busiest one; otherwise 0.
        """
        shares = balanced_shares([len(row.input_ids) for row in rows], self._strategy.num_processes)
        pass_counts = (self.policy.count_passes([rows[i] for i in share]) for share in shares)
        return shares[self._strategy.rank], max(pass_counts) if self._strategy.needs_equal_passes else 0


# The processes of a training that share its updates, seen from the one that samples.
#
# Each holds a `Learner`, and all of them make the same calls at the same time; each has the
# weights, gradients and optimizer whole or in part (`make_strategy`). The processes end with the
# one that started them.


P = ParamSpec("P")
T = TypeVar("T")

LESS_MEMORY: Final = (
    "lower grpo.micro_batch_tokens, set training.gradient_checkpointing=true, or split the training "
    "(training.launch.deepspeed=zero3 or fsdp=true)"
)
"""What a user can do when the processes run out of memory."""
_POLL_SECONDS = 0.2
"""Seconds between two checks whether the result of the processes is still wanted."""
_CAUSE_WAIT_SECONDS = 2.0
"""Seconds to wait after a first fault, in which another process may report its cause."""
_learners: list[tuple[Learner, Path]] = []
"""In a process of `ProcessLearner`: its learner, and the folder for files."""


def make_learner(
    model_dir: Path,
    training: TrainingConfig,
    grpo: GrpoConfig,
    *,
    updates: int,
    max_tokens: int,
    folder: Path,
    seed: int = 0,
) -> Learner | ProcessLearner:
    """Return what trains a policy as the settings say: a `Learner` in this process if one process
    suffices without DeepSpeed, otherwise `ProcessLearner`. Arguments and errors are
    those of `ProcessLearner`.
    """
    launch = training.launch
    if launch is None or (launch.num_processes == 1 and not launch.deepspeed):
        return Learner(model_dir, training, grpo, updates=updates, max_tokens=max_tokens, seed=seed)
    return ProcessLearner(model_dir, training, grpo, updates=updates, max_tokens=max_tokens, folder=folder, seed=seed)


# The run's own process holds no policy: a collective operation that waits for a lost process can
# only be ended by killing the process that waits.
class ProcessLearner:
    """A `Learner` whose work several processes share, with the same methods; `close` it.

    Args:
        updates: the number of updates in the schedule.
        max_tokens: the most sampled tokens that an episode may have.
        folder: for files that are read at once and then removed, ideally in memory.
        seed: for the initialisation of new adapters.

    Raises what `Learner` raises, and `TrainingFault` if one of the processes dies.
    """

    def __init__(
        self,
        model_dir: Path,
        training: TrainingConfig,
        grpo: GrpoConfig,
        *,
        updates: int,
        max_tokens: int,
        folder: Path,
        seed: int = 0,
    ) -> None:
        self._state_file = folder / f"ranks-{uuid.uuid4().hex}"
        self._uses_bf16 = training.bf16 is True
        # Forked from a server process that has imported everything, since importing takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._processes = [
            ProcessPoolExecutor(
                1,
                mp_context=context,
                initializer=_init_process,
                initargs=(rank, training),
            )
            for rank in range(training.num_processes)
        ]
        options = {"updates": updates, "max_tokens": max_tokens, "seed": seed}
        try:
            self._wait_for_results(
                [
                    _submit(process, _create_learner, rank, model_dir, training, grpo, self._state_file, options)
                    for rank, process in enumerate(self._processes)
                ]
            )
        except BaseException:
            self.close()
            raise

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._call_all(attrgetter("learning_rate"))[0])

    def remove_rounding_noise(self, rows: Sequence[PolicyRow]) -> list[PolicyRow]:
        """As `Learner.remove_rounding_noise`, but for all episodes, in their order."""
        if self._uses_bf16:
            return list(rows)
        result = list(rows)
        shares = balanced_shares([len(row.input_ids) for row in rows], len(self._processes))
        for share, share_rows in zip(shares, self._call_all(Learner.remove_rounding_noise, rows), strict=True):
            for index, row in zip(share, share_rows, strict=True):
                result[index] = row
        return result

    def update(self, rows: Sequence[PolicyRow]) -> Totals:
        """As `Learner.update`."""
        return self._call_all(Learner.update, rows)[0]

    def skip(self, num_updates: int) -> None:
        """As `Learner.skip`."""
        self._call_all(Learner.skip, num_updates)

    def write_weights(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        """As `Learner.write_weights`."""
        self._call_all(Learner.write_weights, file, dtype)

    def write_result(
        self, job: OnlineJob, history: Sequence[TrainingStep], *, training_continues: bool = False
    ) -> None:
        """As `Learner.write_result`."""
        self._call_all(Learner.write_result, job, history, training_continues=training_continues)

    def state(self, folder: Path) -> dict[str, Any]:
        """As `Learner.state`."""
        self._call_all(_write_state, folder, self._state_file)
        try:
            state: dict[str, Any] = torch.load(self._state_file, weights_only=True, map_location="cpu")
        finally:
            self._state_file.unlink()
        return state

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """As `Learner.restore`."""
        try:
            torch.save(dict(state), self._state_file)
            self._call_all(_read_state, folder, self._state_file)
        finally:
            self._state_file.unlink(missing_ok=True)

    def offload(self) -> None:
        """As `Learner.offload`."""
        self._call_all(Learner.offload)

    def load_to_gpu(self) -> None:
        """As `Learner.load_to_gpu`."""
        self._call_all(Learner.load_to_gpu)

    def close(self) -> None:
        """Kill the processes, even in the middle of an operation: they have nothing to save, and
        one may hang.
        """
        for process in self._processes:
            # Python 3.14 has a method for this.
            for worker in list((process._processes or {}).values()):
                worker.kill()
            process.shutdown(cancel_futures=True)

    def _call_all(self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `method` with the learner in each process; return the results in the order of ranks.
        Raises the error that a process reports, `TrainingFault` if a process dies, and what
        `raise_if_cancelled` raises while they work.
        """
        return self._wait_for_results(
            [_submit(process, _call_learner, method, args, kwargs) for process in self._processes]
        )

    def _wait_for_results(self, futures: Sequence[Future[T]]) -> list[T]:
        while True:
            done, pending = wait(futures, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            if any(future.exception() for future in done):
                # The others wait for one that is gone, or report that it is.
                wait(futures, timeout=_CAUSE_WAIT_SECONDS)
                errors = [error for future in futures if future.done() and (error := future.exception())]
                # A process that died is the cause of whatever the others then report.
                if any(isinstance(error, BrokenProcessPool) for error in errors):
                    raise TrainingFault(
                        "a process that shares the updates of the training ended, probably because memory ran out; "
                        f"{LESS_MEMORY}"
                    )
                # A plain `TrainingFault` may only say that another process does not answer.
                raise next((error for error in errors if type(error) is not TrainingFault), errors[0])
            if not pending:
                return [future.result() for future in futures]
            raise_if_cancelled()


def _submit(process: ProcessPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Submit a call to a process and return its future. If the process died while it was idle, the
    future fails with `BrokenProcessPool`.
    """
    try:
        return process.submit(function, *args, **kwargs)
    except RuntimeError as error:
        # The pool is broken or shut down; for a process that was killed, either may be reported
        # first.
        future: Future[T] = Future()
        future.set_exception(BrokenProcessPool(str(error)))
        return future


def _init_process(rank: int, training: TrainingConfig) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # An interrupt at the terminal is for the process that started this one, which then shuts it
    # down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    num_processes, launch = training.num_processes, training.launch
    # DeepSpeed asks the environment, and would take any GPU that the machine seems to have.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    if launch is not None and launch.deepspeed and not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    keep_freed_memory()
    use_threads(training.num_threads)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        parent.join()
    os._exit(1)


def _create_learner(
    rank: int, model_dir: Path, training: TrainingConfig, grpo: GrpoConfig, state_file: Path, options: dict[str, Any]
) -> None:
    with _convert_errors(state_file.parent):
        strategy = make_strategy(
            rank, training, model_dir, rendezvous_file=state_file.with_suffix(".meeting"), updates=options["updates"]
        )
        _learners.append((Learner(model_dir, training, grpo, strategy=strategy, **options), state_file.parent))


def _call_learner(method: Callable[..., T], args: Any, kwargs: Any) -> T:
    ((learner, folder),) = _learners
    with _convert_errors(folder):
        return method(learner, *args, **kwargs)


@contextmanager
def _convert_errors(folder: Path) -> Iterator[None]:
    """Convert an exception of the block into one of our errors: those of libraries may not survive
    pickling on the way to another process.
    """
    try:
        yield
    except Exception as error:
        fault = make_fault(error, folder, memory_hint=LESS_MEMORY)
        raise ERRORS_BY_NAME[fault.kind](fault.message) from error


def _write_state(learner: Learner, folder: Path, state_file: Path) -> None:
    state = learner.state(folder)
    if learner.policy.strategy.rank == 0:
        torch.save(state, state_file)


def _read_state(learner: Learner, folder: Path, state_file: Path) -> None:
    learner.restore(torch.load(state_file, weights_only=True, map_location="cpu"), folder)
