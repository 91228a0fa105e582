"""Processes that each compute a part of a gradient: on a CPU, two processes with one thread each
are faster than one process with two.

Weights and gradients are exchanged as files in memory. A process ends with the one that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors.torch import load_file, save_file

from agentr_core.errors import TrainingFault
from agentr_core.models.cpu_memory import keep_freed_memory
from agentr_core.recipes import GrpoConfig, TrainingConfig
from agentr_core.threads import check_wanted
from agentr_core.training.cpu_threads import use_threads
from agentr_core.training.group.policy import Policy, Totals
from agentr_core.training.group.rows import PolicyRow

P = ParamSpec("P")
T = TypeVar("T")
Share = tuple[Sequence[PolicyRow], Sequence[float]]
"""Episodes, and for each of them the weight of any of its tokens."""

_LOOK_SECONDS = 0.2
"""How often it is looked whether what a process computes is still wanted."""
_policies: list[Policy] = []
"""In a helper process, the one policy that it has loaded."""


class Helpers:
    """`count` processes, each with the policy's model.

    Args:
        folder: for files that are read at once and then overwritten.
    """

    def __init__(self, count: int, model_dir: Path, training: TrainingConfig, grpo: GrpoConfig, folder: Path) -> None:
        self._folder = folder
        self._processes = [
            ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(model_dir, training, grpo),
            )
            for _ in range(count)
        ]

    def start(self, shares: Sequence[Share], parameters: dict[str, Any]) -> list[Future[Totals]]:
        """Make each process compute the gradient of a share with these weights; return the futures
        of what they measure.
        """
        weights = self._write(parameters)
        return [
            _submitted(process, _compute, share, weights, self._gradient(number))
            for number, (process, share) in enumerate(zip(self._processes, shares, strict=True))
        ]

    def settle(
        self, shares: Sequence[Sequence[PolicyRow]], parameters: dict[str, Any]
    ) -> list[Future[list[PolicyRow]]]:
        """Make each process settle a share of the episodes that these weights sampled; return the
        futures of these.
        """
        weights = self._write(parameters)
        return [
            _submitted(process, _settle, share, weights) for process, share in zip(self._processes, shares, strict=True)
        ]

    def collect(self, started: Sequence[Future[Totals]], parameters: dict[str, Any]) -> Iterator[Totals]:
        """Add the gradients of all processes to those of the parameters, in order; yield what each
        process measured.

        Raises `TrainingFault` if one of the processes died.
        """
        for number, future in enumerate(started):
            totals = result(future)
            for name, gradient in load_file(self._gradient(number)).items():
                parameters[name].grad = gradient if parameters[name].grad is None else parameters[name].grad + gradient
            yield totals

    def close(self) -> None:
        """End the processes, whatever they do: they have nothing to keep, and one may hang."""
        for process in self._processes:
            # Python 3.14 has a method for this.
            for worker in list((process._processes or {}).values()):
                worker.kill()
            process.shutdown(cancel_futures=True)

    def _write(self, parameters: dict[str, Any]) -> Path:
        weights = self._folder / "helpers.safetensors"
        save_file({name: value.detach().contiguous() for name, value in parameters.items()}, weights)
        return weights

    def _gradient(self, number: int) -> Path:
        return self._folder / f"gradient-{number}.safetensors"


def result(future: Future[T]) -> T:
    """Return what a process computed. Raises `TrainingFault` if the process died before, and as
    `check_wanted` while it computes.
    """
    while not wait([future], timeout=_LOOK_SECONDS).done:
        check_wanted()
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise TrainingFault(
            "a process that shares the gradient ended, probably because memory ran out; set "
            "training.launch.num_processes=1 or lower grpo.micro_batch_tokens"
        ) from error


def _submitted(process: ProcessPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Return the future of some work; that of a process which died while it had none has failed
    already.
    """
    try:
        return process.submit(work, *args, **kwargs)
    except BrokenProcessPool as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed


def shared_out(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return which rows, by their lengths, each of `count` processes takes: the longest first, each
    to the process with the fewest tokens so far.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        least = held.index(min(held))
        shares[least].append(index)
        held[least] += lengths[index]
    return shares


def _begin(model_dir: Path, training: TrainingConfig, grpo: GrpoConfig) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # An interrupt at the terminal is for the process that started this one, which then shuts it
    # down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    use_threads(training.num_threads)
    _policies.append(Policy(model_dir, training, grpo))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        parent.join()
    os._exit(1)


def _compute(share: Share, weights: Path, gradient: Path) -> Totals:
    policy = _with_weights(weights)
    totals = policy.accumulate(*share)
    save_file({name: p.grad for name, p in policy.parameters.items() if p.grad is not None}, gradient)
    return totals


def _settle(rows: Sequence[PolicyRow], weights: Path) -> list[PolicyRow]:
    return _with_weights(weights).settled(rows)


def _with_weights(file: Path) -> Policy:
    (policy,) = _policies
    parameters = policy.parameters
    with torch.no_grad():
        for name, value in load_file(file).items():
            parameters[name].copy_(value)
            parameters[name].grad = None
    return policy
