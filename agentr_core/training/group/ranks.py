"""The processes of a training that share its updates, seen from the one that samples.

Each holds a `Learner`, and all of them do the same calls at the same time; weights, gradients and
optimizer are theirs, whole or in parts (`split`). A process ends with the one that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch

from agentr_core.errors import TrainingFault
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.system import check_wanted, keep_freed_memory
from agentr_core.training.group.learner import Learner, shared_out
from agentr_core.training.group.policy import PolicyRow, Totals
from agentr_core.training.group.split import split
from agentr_core.training.job import OnlineJob, TrainingStep
from agentr_core.training.process import KINDS
from agentr_core.training.run import describe, use_threads

P = ParamSpec("P")
T = TypeVar("T")

LESS_MEMORY: Final = (
    "lower grpo.micro_batch_tokens, set training.gradient_checkpointing=true, or split the training "
    "(training.launch.deepspeed=zero3 or fsdp=true)"
)
"""What a user can do when the processes run out of memory."""
_LOOK_SECONDS = 0.2
"""How often it is looked whether what the processes compute is still wanted."""
_CAUSE_SECONDS = 2.0
"""Seconds after a first fault in which another process may tell the cause of it."""
_loaded: list[tuple[Learner, Path]] = []
"""In one of the processes, its learner, and the folder for files."""


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
    """Return what trains a policy as the settings say: in this process if it is the only one, and
    nothing is split. The arguments are those of `Ranks`, which see for errors, too.
    """
    launch = training.launch
    if launch is None or (launch.num_processes == 1 and not launch.deepspeed):
        return Learner(model_dir, training, grpo, updates=updates, max_tokens=max_tokens, seed=seed)
    return Ranks(model_dir, training, grpo, updates=updates, max_tokens=max_tokens, folder=folder, seed=seed)


# The run holds no policy itself: a collective operation that waits for a lost process ends in no
# other way than with its process.
class Ranks:
    """A `Learner` whose work several processes share, with the same methods; `close` it.

    Args:
        updates: the number of updates in the schedule.
        most: the most sampled tokens that an episode may have.
        folder: for files that are read at once and then removed, ideally in memory.
        seed: for the initialisation of new adapters.

    Raises what loading the model raises, and `TrainingFault` if one of the processes dies.
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
        # Forked from one process that has imported everything, for this takes seconds.
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
        return self._all(_learning_rate)[0]

    def settled(self, rows: Sequence[PolicyRow]) -> list[PolicyRow]:
        """As `Learner.settled`, for all episodes."""
        if self._bf16:
            return list(rows)
        result = list(rows)
        shares = shared_out([len(row.input_ids) for row in rows], len(self._processes))
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
        """End the processes, whatever they do: they have nothing to keep, and one may hang."""
        for process in self._processes:
            # Python 3.14 has a method for this.
            for worker in list((process._processes or {}).values()):
                worker.kill()
            process.shutdown(cancel_futures=True)

    def _all(self, work: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Have each process do some work with its learner; return the results in order. Raises
        `TrainingFault` if a process dies, and as `check_wanted` while they work.
        """
        return self._results([_submitted(process, _do, work, args, kwargs) for process in self._processes])

    def _results(self, futures: Sequence[Future[T]]) -> list[T]:
        while True:
            done, open_ = wait(futures, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            if any(future.exception() for future in done):
                # The others wait for one that is gone, or report that it is.
                wait(futures, timeout=_CAUSE_SECONDS)
                errors = [error for future in futures if future.done() and (error := future.exception())]
                # That a process died counts more than what the others then say.
                if any(isinstance(error, BrokenProcessPool) for error in errors):
                    raise TrainingFault(
                        "a process that shares the updates of the training ended, probably because memory ran out; "
                        f"{LESS_MEMORY}"
                    )
                # The others only say that one does not answer.
                raise next((error for error in errors if type(error) is not TrainingFault), errors[0])
            if not open_:
                return [future.result() for future in futures]
            check_wanted()


def _submitted(process: ProcessPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Return the future of some work; that of a process which died while it had none has failed
    already.
    """
    try:
        return process.submit(work, *args, **kwargs)
    except RuntimeError as error:
        # Broken, or shut down: which of them it says of one that was ended depends on the moment.
        failed: Future[T] = Future()
        failed.set_exception(BrokenProcessPool(str(error)))
        return failed


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
    with _described(file.parent):
        group = split(rank, training, model_dir, meeting=file.with_suffix(".meeting"), updates=options["updates"])
        _loaded.append((Learner(model_dir, training, grpo, group=group, **options), file.parent))


def _do(work: Callable[..., T], args: Any, kwargs: Any) -> T:
    ((learner, folder),) = _loaded
    with _described(folder):
        return work(learner, *args, **kwargs)


@contextmanager
def _described(folder: Path) -> Iterator[None]:
    """Raise what the block raises as one of our errors: those of libraries may not survive the way
    to another process.
    """
    try:
        yield
    except Exception as error:
        fault = describe(error, folder, less_memory=LESS_MEMORY)
        raise KINDS[fault.kind](fault.message) from error


def _learning_rate(learner: Learner) -> float:
    return learner.learning_rate


def _write_state(learner: Learner, folder: Path, file: Path) -> None:
    state = learner.state(folder)
    if learner.policy.group.rank == 0:
        torch.save(state, file)


def _read_state(learner: Learner, folder: Path, file: Path) -> None:
    learner.restore(torch.load(file, weights_only=True, map_location="cpu"), folder)
