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
from agentr_core.training.group.split import Whole, split
from agentr_core.training.job import STEP, OnlineJob, TrainingStep
from agentr_core.training.packing import balanced_shares
from agentr_core.training.parent import write_result
from agentr_core.training.process import ERRORS_BY_NAME
from agentr_core.training.run import make_fault, use_threads

# Reports each step to the loggers in `training.report_to`, as a Trainer does.

Tell = Callable[[int, Mapping[str, float | None]], None]
"""Called with a step and numbers by name: `loss`, `learning_rate`, `grad_norm`, `trained_tokens`
and `seconds` as a training on a dataset logs them, and those of group RL. Loggers show them under
`train/`, those whose name begins with `eval_` under `eval/`.
"""
_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"


@contextmanager
def reporting(job: OnlineJob, model: Any) -> Iterator[Tell]:
    """Yield a function that reports a step to the loggers of a job. It does nothing if the job
    names none.
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
    before = os.environ.get(_TENSORBOARD)
    os.environ[_TENSORBOARD] = str(job.logger_folder)
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
    # To loggers this call means success, so it is left out when a training fails.
    handler.on_train_end(arguments, state, control)


# The saved state of a training that samples, written atomically.
#
# It contains no state of a random generator, because each draw has its own seed. Processes that
# hold parts of the state write them into a folder beside its file.


class Snapshot(NamedTuple):
    """The saved state after step `step`: the learner's state, the folder `parts` with what single
    processes hold of it, the history of all steps so far, and in `made_of` the hashes that
    `save_snapshot` was given; empty in a state of an earlier version.
    """

    step: int
    learner: dict[str, Any]
    parts: Path
    history: list[TrainingStep]
    made_of: list[str]

    @property
    def sampler(self) -> tuple[int, Path] | None:
        """The step after which the sampler's weights were taken, and their file; None if none were
        saved.
        """
        file = next(self.parts.glob(f"{_SAMPLER}*.safetensors"), None)
        return None if file is None else (int(file.stem.removeprefix(_SAMPLER)), file)


_SAMPLER = "sampler-"
"""The beginning of the name of a file with the sampler's weights, before the number of their step.
"""


def save_snapshot(
    folder: Path,
    step: int,
    state: Callable[[Path], dict[str, Any]],
    history: list[TrainingStep],
    made_of: Sequence[str],
    *,
    sampler: tuple[int, Path] | None = None,
) -> None:
    """Write the state after a step, and remove earlier ones.

    Args:
        state: returns the learner's state; it may create the given folder and write parts of the
            state into it.
        history: all steps so far.
        made_of: hashes of what the weights were made from: the initial weights and the data of each
            step.
        sampler: the step after which the weights that sample the next step were taken, and their
            file; None if they are the learner's own.

    Raises `DiskError`.
    """
    file = folder / f"step-{step:06d}.pt"
    draft = file.with_suffix(".new")
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_parts(file), ignore_errors=True)
        learner = state(_parts(file))
        if sampler is not None:
            _parts(file).mkdir(exist_ok=True)
            shutil.copyfile(sampler[1], _parts(file) / f"{_SAMPLER}{sampler[0]}.safetensors")
        lines = [STEP.dump_json(entry).decode() for entry in history]
        with draft.open("wb") as stream:
            torch.save({"step": step, "learner": learner, "history": lines, "made_of": list(made_of)}, stream)
        # Before the earlier states are removed, this one must be safe from a power failure.
        for path in (draft, *(path for path in _parts(file).rglob("*") if path.is_file())):
            flush_to_disk(path)
        draft.replace(file)
        flush_to_disk(folder)
        for old in sorted(folder.glob("step-*.pt"))[:-1]:
            old.unlink()
        for parts in folder.glob("step-*.parts"):
            if parts != _parts(file):
                shutil.rmtree(parts)


def load_snapshot(folder: Path) -> Snapshot | None:
    """Return the newest saved state, on the CPU; None if there is none."""
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
    """A policy with its optimizer, alone or in one of the processes of `Ranks`, all of which then
    call the same methods with the same arguments. Not thread-safe; `close` it.

    Args:
        updates: the number of updates in the schedule.
        max_tokens: the most sampled tokens that an episode may have.
        seed: for the initialisation of new adapters.
        group: how this process and others hold the policy; None: this process holds all of it.

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
        """Return this process's share of episodes that the current weights sampled, with
        log-probabilities as `Policy.settled` gives them; in bfloat16, where policy and sampler
        differ by more than rounding, with those of the sampler.
        """
        indices, passes = self._share(rows)
        chosen_rows = [rows[index] for index in indices]
        return chosen_rows if self._training.bf16 is True else self.policy.settled(chosen_rows, passes=passes)

    def update(self, rows: Sequence[PolicyRow]) -> Totals:
        """Take one optimizer step on episodes; return the totals over all processes.

        Raises `NonFiniteLoss` before any weight is changed, except under DeepSpeed, which changes
        weights at once.
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
        """Advance the schedule by updates that were planned but had nothing to train on."""
        self._group.clear()
        for _ in range(updates):
            self._group.idle_step()
            self._schedule.step()

    def write_weights(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write all weights by name as a safetensors file, each once, in the dtype of the samplers
        that load them. The process of rank 0 writes; the others help to gather.
        """
        weights = self.policy.weights(dtype)
        if self._group.rank == 0:
            save_file(weights, file)

    def write_result(self, job: OnlineJob, history: Sequence[TrainingStep], *, goes_on: bool = False) -> None:
        """Write the current model to the staging folder of its job, ready to be published. Unless
        the training `goes_on`, the policy must not be used afterwards.
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
        several processes hold parts of it, they write these to the folder instead.
        """
        return {**self._group.save(folder, self.policy.state()), "schedule": self._schedule.state_dict()}

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go back to an earlier state of the same training, as `state` returned and wrote it."""
        self._group.load(folder, state, self.policy.restore)
        self._schedule.load_state_dict(state["schedule"])

    def rest(self) -> None:
        """Free the GPU for a sampler until `wake`."""
        self._group.clear()
        self._group.move(away=True)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move models and optimizer back to the GPU."""
        self._group.move(away=False)

    def close(self) -> None:
        """Free the GPU's memory, which a later training of the run needs. The learner must not be
        used afterwards.
        """
        if torch.cuda.is_available():
            del self.policy, self._group, self._schedule
            gc.collect()
            torch.cuda.empty_cache()

    def _share(self, rows: Sequence[PolicyRow]) -> tuple[list[int], int]:
        """Return the indices of the episodes that this process computes, and the number of passes
        that it must make: where weights are split, a pass needs all processes, so all make as many
        as the busiest one; otherwise 0.
        """
        shares = balanced_shares([len(row.input_ids) for row in rows], self._group.count)
        passes = (self.policy.count_passes([rows[i] for i in share]) for share in shares)
        return shares[self._group.rank], max(passes) if self._group.even else 0


# The processes of a training that share its updates, seen from the one that samples.
#
# Each holds a `Learner`, and all of them make the same calls at the same time; each has the
# weights, gradients and optimizer whole or in part (`split`). The processes end with the one that
# started them.


P = ParamSpec("P")
T = TypeVar("T")

LESS_MEMORY: Final = (
    "lower grpo.micro_batch_tokens, set training.gradient_checkpointing=true, or split the training "
    "(training.launch.deepspeed=zero3 or fsdp=true)"
)
"""What a user can do when the processes run out of memory."""
_LOOK_SECONDS = 0.2
"""Seconds between two checks whether the result of the processes is still wanted."""
_CAUSE_SECONDS = 2.0
"""Seconds to wait after a first fault, in which another process may report its cause."""
_learners: list[tuple[Learner, Path]] = []
"""In a process of `Ranks`: its learner, and the folder for files."""


def make_learner(
    model_dir: Path,
    training: TrainingConfig,
    grpo: GrpoConfig,
    *,
    updates: int,
    max_tokens: int,
    folder: Path,
    seed: int = 0,
) -> Learner | Ranks:
    """Return what trains a policy as the settings say: a `Learner` in this process if one process
    suffices without DeepSpeed, otherwise `Ranks`. Arguments and errors are those of `Ranks`.
    """
    launch = training.launch
    if launch is None or (launch.num_processes == 1 and not launch.deepspeed):
        return Learner(model_dir, training, grpo, updates=updates, max_tokens=max_tokens, seed=seed)
    return Ranks(model_dir, training, grpo, updates=updates, max_tokens=max_tokens, folder=folder, seed=seed)


# The run's own process holds no policy: a collective operation that waits for a lost process can
# only be ended by killing the process that waits.
class Ranks:
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
        self._file = folder / f"ranks-{uuid.uuid4().hex}"
        self._bf16 = training.bf16 is True
        # Forked from a server process that has imported everything, since importing takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._processes = [
            ProcessPoolExecutor(
                1,
                mp_context=context,
                initializer=_begin,
                initargs=(rank, training),
            )
            for rank in range(training.num_processes)
        ]
        options = {"updates": updates, "max_tokens": max_tokens, "seed": seed}
        try:
            self._results(
                [
                    _submitted(process, _load, rank, model_dir, training, grpo, self._file, options)
                    for rank, process in enumerate(self._processes)
                ]
            )
        except BaseException:
            self.close()
            raise

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._all(attrgetter("learning_rate"))[0])

    def settled(self, rows: Sequence[PolicyRow]) -> list[PolicyRow]:
        """As `Learner.settled`, but for all episodes, in their order."""
        if self._bf16:
            return list(rows)
        result = list(rows)
        shares = balanced_shares([len(row.input_ids) for row in rows], len(self._processes))
        for share, part in zip(shares, self._all(Learner.settled, rows), strict=True):
            for index, row in zip(share, part, strict=True):
                result[index] = row
        return result

    def update(self, rows: Sequence[PolicyRow]) -> Totals:
        """As `Learner.update`."""
        return self._all(Learner.update, rows)[0]

    def skip(self, updates: int) -> None:
        """As `Learner.skip`."""
        self._all(Learner.skip, updates)

    def write_weights(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        """As `Learner.write_weights`."""
        self._all(Learner.write_weights, file, dtype)

    def write_result(self, job: OnlineJob, history: Sequence[TrainingStep], *, goes_on: bool = False) -> None:
        """As `Learner.write_result`."""
        self._all(Learner.write_result, job, history, goes_on=goes_on)

    def state(self, folder: Path) -> dict[str, Any]:
        """As `Learner.state`."""
        self._all(_write_state, folder, self._file)
        try:
            state: dict[str, Any] = torch.load(self._file, weights_only=True, map_location="cpu")
        finally:
            self._file.unlink()
        return state

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """As `Learner.restore`."""
        try:
            torch.save(dict(state), self._file)
            self._all(_read_state, folder, self._file)
        finally:
            self._file.unlink(missing_ok=True)

    def rest(self) -> None:
        """As `Learner.rest`."""
        self._all(Learner.rest)

    def wake(self) -> None:
        """As `Learner.wake`."""
        self._all(Learner.wake)

    def close(self) -> None:
        """Kill the processes, even in the middle of an operation: they have nothing to save, and
        one may hang.
        """
        for process in self._processes:
            # Python 3.14 has a method for this.
            for worker in list((process._processes or {}).values()):
                worker.kill()
            process.shutdown(cancel_futures=True)

    def _all(self, work: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `work` with the learner in each process; return the results in the order of ranks.
        Raises the error that a process reports, `TrainingFault` if a process dies, and what
        `raise_if_cancelled` raises while they work.
        """
        return self._results([_submitted(process, _do, work, args, kwargs) for process in self._processes])

    def _results(self, futures: Sequence[Future[T]]) -> list[T]:
        while True:
            done, open_ = wait(futures, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            if any(future.exception() for future in done):
                # The others wait for one that is gone, or report that it is.
                wait(futures, timeout=_CAUSE_SECONDS)
                errors = [error for future in futures if future.done() and (error := future.exception())]
                # A process that died is the cause of whatever the others then report.
                if any(isinstance(error, BrokenProcessPool) for error in errors):
                    raise TrainingFault(
                        "a process that shares the updates of the training ended, probably because memory ran out; "
                        f"{LESS_MEMORY}"
                    )
                # A plain `TrainingFault` may only say that another process does not answer.
                raise next((error for error in errors if type(error) is not TrainingFault), errors[0])
            if not open_:
                return [future.result() for future in futures]
            raise_if_cancelled()


def _submitted(process: ProcessPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Submit a call to a process and return its future. If the process died while it was idle, the
    future fails with `BrokenProcessPool`.
    """
    try:
        return process.submit(work, *args, **kwargs)
    except RuntimeError as error:
        # The pool is broken or shut down; for a process that was killed, either may be reported
        # first.
        future: Future[T] = Future()
        future.set_exception(BrokenProcessPool(str(error)))
        return future


def _begin(rank: int, training: TrainingConfig) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # An interrupt at the terminal is for the process that started this one, which then shuts it
    # down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    count, launch = training.num_processes, training.launch
    # DeepSpeed asks the environment, and would take any GPU that the machine seems to have.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
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


def _load(
    rank: int, model_dir: Path, training: TrainingConfig, grpo: GrpoConfig, file: Path, options: dict[str, Any]
) -> None:
    with _own_errors(file.parent):
        group = split(rank, training, model_dir, meeting=file.with_suffix(".meeting"), updates=options["updates"])
        _learners.append((Learner(model_dir, training, grpo, group=group, **options), file.parent))


def _do(work: Callable[..., T], args: Any, kwargs: Any) -> T:
    ((learner, folder),) = _learners
    with _own_errors(folder):
        return work(learner, *args, **kwargs)


@contextmanager
def _own_errors(folder: Path) -> Iterator[None]:
    """Convert an exception of the block into one of our errors: those of libraries may not survive
    pickling on the way to another process.
    """
    try:
        yield
    except Exception as error:
        fault = make_fault(error, folder, memory_hint=LESS_MEMORY)
        raise ERRORS_BY_NAME[fault.kind](fault.message) from error


def _write_state(learner: Learner, folder: Path, file: Path) -> None:
    state = learner.state(folder)
    if learner.policy.group.rank == 0:
        torch.save(state, file)


def _read_state(learner: Learner, folder: Path, file: Path) -> None:
    learner.restore(torch.load(file, weights_only=True, map_location="cpu"), folder)
