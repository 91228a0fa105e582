"""One model in several worker processes, each with its own threads, device and prefix cache.

The threads of one process wait for each other at every operation; with small models this costs more
than they gain.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentr_core.errors import AgentrError, ModelFault, ModelUnavailable
from agentr_core.models.batching import gather_or_cancel, replica_of
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.models import ModelConfig
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.system import processors, python_path, raise_if_cancelled
from agentr_core.types import Generation, Request

# Messages between a worker process and the process that started it.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCommand:
    """An order to load a model: the arguments of `TransformersModel.load`."""

    path: Path
    dtype: str
    device: str
    max_batch: int
    context_length: int
    prefix_cache_bytes: int
    at: datetime | None

    def load(self) -> TransformersModel:
        """Return the model, loaded in this process. Raises what `TransformersModel.load` raises."""
        return TransformersModel.load(
            self.path,
            dtype=self.dtype,
            device=self.device,
            max_batch=self.max_batch,
            context_length=self.context_length,
            prefix_cache_bytes=self.prefix_cache_bytes,
            at=self.at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A worker's report about the model that it has loaded."""

    name: str
    fingerprint: str
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadCommand:
    """An order to replace the weights by those of a file; the worker answers None."""

    weights: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCommand:
    """An order for replies. While the worker decodes those of the requests whose indices are in
    `streamed_indices`, it sends their text so far.
    """

    requests: tuple[Request, ...]
    streamed_indices: frozenset[int]


class PartialText(NamedTuple):
    """The text so far of the reply to the request with index `request_index`."""

    request_index: int
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker's sign that it is making progress; the answer is still to come.

    `num_sampled_tokens` counts all tokens that it has sampled so far.
    """

    num_sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReplies:
    """The replies to a batch; the share of all prompt tokens so far that came from the cache, in
    [0, 1]; and the number of all tokens sampled so far.
    """

    replies: list[list[Generation]]
    cached_share: float
    num_sampled_tokens: int


_WORKER_MODULE = "agentr_core.models.local.worker"
_MAX_RESTARTS = 3
"""The most times that a worker is restarted after it died or hung."""
_EXIT_SECONDS = 10.0
_CHECK_SECONDS = 0.2
"""Seconds between two checks whether the model is still wanted while it loads."""
_MIN_BATCH = 32
"""The fewest replies at once for which `auto` adds a worker."""


def load_local(
    load_command: LoadCommand, *, num_workers: int | Literal["auto"], timeout_seconds: float = 600.0
) -> TransformersModel | Workers:
    """Return a model in this process or, if `num_workers` is more than one, in that many worker
    processes.

    `auto` means one for each GPU if the device is a GPU, otherwise one for each processor, as long
    as each decodes at least 32 replies at once. A worker process that gives no sign of progress for
    `timeout_seconds` seconds is restarted. Raises what `TransformersModel.load` and `Workers.load`
    raise.
    """
    devices = _devices(load_command, num_workers)
    if len(devices) == 1:
        return load_command.load()
    return Workers.load(load_command, devices=devices, num_processors=processors(), timeout_seconds=timeout_seconds)


def worker_count(model: ModelConfig) -> int:
    """Return the number of processes in which a model samples on a CPU of this machine."""
    max_workers = max(1, model.max_batch // _MIN_BATCH)
    return min(processors(), max_workers) if model.workers == "auto" else model.workers


def _devices(load_command: LoadCommand, num_workers: int | Literal["auto"]) -> list[str]:
    """Return the device of each worker; one device means no worker processes."""
    if load_command.device in ("auto", "cuda"):
        import torch

        if num_gpus := torch.cuda.device_count():
            return [f"cuda:{number % num_gpus}" for number in range(num_gpus if num_workers == "auto" else num_workers)]
    if load_command.device in ("auto", "cpu"):
        max_workers = max(1, load_command.max_batch // _MIN_BATCH)
        return ["cpu"] * (min(processors(), max_workers) if num_workers == "auto" else num_workers)
    return [load_command.device] * (1 if num_workers == "auto" else num_workers)


class Worker:
    """A ChatModel in a process of its own. A process that dies or hangs is restarted, and its batch
    raises `ModelUnavailable`.

    The process ends with this one, even if this one is killed. Use `Workers.load`.

    Args:
        load_command: The model that it loads.
        num_threads: The threads of its process on a CPU.
        renderer: The renderer of the model's directory, to count tokens with.
        timeout_seconds: The seconds without a sign of progress after which a process counts as
            hung.
    """

    def __init__(
        self, load_command: LoadCommand, *, num_threads: int, renderer: Renderer, timeout_seconds: float
    ) -> None:
        self.name = load_command.path.name
        self.fingerprint = ""
        self.context_length = 0
        self._load_command = load_command
        self._num_threads = num_threads
        self._renderer = renderer
        self._timeout_seconds = timeout_seconds
        self._weights: Path | None = None
        self._cached_share = 0.0
        self._num_sampled_tokens = 0
        self._num_earlier_tokens = 0
        self._num_deaths = 0
        self._give_up_reason = ""
        self._closed = False
        # Held while the process is started or killed, so that none is started after the last one
        # was killed.
        self._process_lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close_blocking`)
        # Only this thread talks to the process.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"worker-{self.name}")
        self._start()

    def start_loading(self) -> Future[None]:
        """Start loading the model; return a future that is done when it is loaded. The future
        raises what loading raises, and `ModelFault` if process after process dies or hangs while it
        loads.
        """
        return self._executor.submit(self._load)

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies to each request. Raises what `TransformersModel.generate` raises,
        `ModelUnavailable` if the process died or hung, and `ModelFault` if this happens too often.
        """
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._generate, tuple(requests))

    async def reload(self, weights: Path) -> None:
        """Replace the weights by those of a file, in the process and in any that replaces it.

        Raises what `TransformersModel.reload` raises, and `ModelFault` if process after process
        died or hung.
        """
        self._check_open()
        self._weights = weights
        await asyncio.get_running_loop().run_in_executor(self._executor, self._send_weights)

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens, including the header of the reply."""
        return len(self._renderer.render_prompt(request.messages))

    def cached_share(self) -> float:
        """Return the share of all prompt tokens so far that came from the cache, in [0, 1]."""
        return self._cached_share

    def written(self) -> int:
        """Return the number of tokens sampled so far, including those of replies in progress and of
        processes that have died.
        """
        return self._num_earlier_tokens + self._num_sampled_tokens

    def abandon(self) -> None:
        """Kill the process, even in the middle of a batch, which then fails. Any thread may call
        this.
        """
        with self._process_lock:
            self._closed = True
            self._process.kill()

    async def close(self) -> None:
        """Wait for the batch in progress, then end the process."""
        self._closed = True
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """Do what `close` does, but wait in this thread."""
        self._closed = True
        self._executor.shutdown()
        self._stop()
        self._log.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ModelFault(f"model {self.name} is closed; load it again")

    def _start(self) -> None:
        with self._process_lock:
            self._check_open()
            parent_end, worker_end = socket.socketpair()
            # A read or a write that takes longer raises BlockingIOError.
            timeout = struct.pack("ll", int(self._timeout_seconds), int(self._timeout_seconds % 1 * 1e6))
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                parent_end.setsockopt(socket.SOL_SOCKET, direction, timeout)
            self._connection = Connection(parent_end.detach())
            with worker_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _WORKER_MODULE, str(worker_end.fileno())],
                    # Never written to: the worker sees this pipe end when this process dies,
                    # however that happens.
                    stdin=subprocess.PIPE,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=[worker_end.fileno()],
                    env=os.environ
                    | {
                        "PYTHONPATH": python_path(),
                        "OMP_NUM_THREADS": str(self._num_threads),
                        "MKL_NUM_THREADS": str(self._num_threads),
                        "HF_HUB_OFFLINE": "1",
                        "TOKENIZERS_PARALLELISM": "false",
                    },
                    # An interrupt at the terminal is for this process, which then shuts the worker
                    # down.
                    start_new_session=True,
                )

    def _load(self) -> None:
        """Have the process load the model, and then the weights that have replaced the model's own.
        A process that dies or hangs meanwhile is replaced.
        """
        while True:
            phase = "while it loaded the model"
            try:
                report: LoadReport = self._call(self._load_command)
                if self._weights is not None:
                    phase = "while it took over weights"
                    self._call(ReloadCommand(weights=self._weights))
            except (EOFError, OSError) as error:
                self._restart(f"{self._stop_and_describe(error)} {phase}", error)
            else:
                self.name, self.fingerprint = report.name, report.fingerprint
                self.context_length = report.context_length
                return

    def _send_weights(self) -> None:
        assert self._weights is not None
        try:
            self._call(ReloadCommand(weights=self._weights))
        except (EOFError, OSError) as error:
            self._restart(f"{self._stop_and_describe(error)} while it took over weights", error)
            self._load()

    def _generate(self, requests: tuple[Request, ...]) -> list[list[Generation]]:
        listeners = [request.on_text for request in requests]
        batch = GenerateCommand(
            requests=tuple(replace(request, on_text=None) for request in requests),
            streamed_indices=frozenset(number for number, listener in enumerate(listeners) if listener is not None),
        )
        try:
            answer: BatchReplies = self._call(batch, listeners)
        except (EOFError, OSError) as error:
            ending = self._stop_and_describe(error)
            self._restart(ending, error)
            self._load()
            raise ModelUnavailable(f"{ending}; it was restarted") from error
        self._cached_share, self._num_sampled_tokens = answer.cached_share, answer.num_sampled_tokens
        return answer.replies

    def _restart(self, ending: str, error: Exception) -> None:
        """Start a process in place of one that has ended; `ending` says how. Raises `ModelFault` if
        this has been done too often, or after `close` or `abandon`.
        """
        self._num_deaths += 1
        self._num_earlier_tokens, self._num_sampled_tokens = self.written(), 0
        if self._num_deaths > _MAX_RESTARTS:
            self._give_up_reason = f"{ending}; it has died {self._num_deaths} times and is not started again"
            raise ModelFault(self._give_up_reason) from error
        self._start()

    def _call(self, message: Any, listeners: Sequence[Callable[[str], None] | None] = ()) -> Any:
        """Send a message and return the process's answer; texts that arrive before it go to the
        listeners. Raises the error that the process sent, `BlockingIOError` if it is silent for too
        long, and `EOFError` or another `OSError` if it is gone.
        """
        if self._give_up_reason:
            raise ModelFault(self._give_up_reason)
        self._connection.send(message)
        while isinstance(answer := self._connection.recv(), Progress | PartialText):
            if isinstance(answer, Progress):
                self._num_sampled_tokens = answer.num_sampled_tokens
            elif (listener := listeners[answer.request_index]) is not None:
                listener(answer.text)
        if isinstance(answer, AgentrError):
            raise answer
        return answer

    def _stop_and_describe(self, error: Exception) -> str:
        """Stop the process if it still runs; return how it ended, as a sentence without its full
        stop.
        """
        is_hung = isinstance(error, BlockingIOError)
        if is_hung:
            self._process.kill()
        self._stop()
        worker, status = f"a worker of model {self.name}", self._process.returncode
        if is_hung:
            return (
                f"{worker} was silent for {self._timeout_seconds:g} seconds and was ended (if it only was slow, raise "
                "model.worker_timeout)"
            )
        if status == -signal.SIGKILL:
            return (
                f"{worker} was killed, probably because memory ran out (set model.workers=1 or lower model.max_batch)"
            )
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"{worker} ended with status {status}{f' ({lines[-1]})' if lines else ''}"

    def _stop(self) -> None:
        self._connection.close()
        assert self._process.stdin is not None
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()


class Workers:
    """A ChatModel that distributes requests among workers; all requests of a session go to the same
    one.

    A seed gives the same reply on any worker, up to rounding. Use `load`.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)
        self.name = workers[0].name
        self.fingerprint = workers[0].fingerprint
        self.context_length = workers[0].context_length

    @classmethod
    def load(
        cls, load_command: LoadCommand, *, devices: Sequence[str], num_processors: int, timeout_seconds: float
    ) -> Workers:
        """Load the model on each of the devices, and return it once all have loaded it; processors,
        batch and cache are divided among the workers.

        If one fails, all processes are killed. Raises what the future of `Worker.begin` raises, and
        what `raise_if_cancelled` raises if the caller was cancelled.
        """
        num_workers = len(devices)
        worker_command = replace(
            load_command,
            max_batch=-(-load_command.max_batch // num_workers),
            prefix_cache_bytes=load_command.prefix_cache_bytes // num_workers,
        )
        renderer = load_renderer(load_command.path, at=load_command.at)
        num_threads = max(1, num_processors // num_workers)
        workers = [
            Worker(
                replace(worker_command, device=d),
                num_threads=num_threads,
                renderer=renderer,
                timeout_seconds=timeout_seconds,
            )
            for d in devices
        ]
        try:
            load_futures = [worker.start_loading() for worker in workers]
            remaining = set(load_futures)
            while remaining:
                done, remaining = wait(remaining, timeout=_CHECK_SECONDS, return_when=FIRST_EXCEPTION)
                for load_future in done:
                    load_future.result()
                raise_if_cancelled()
        except BaseException:
            for worker in workers:
                worker.abandon()
                worker.close_blocking()
            raise
        return cls(workers)

    def worker_of(self, request: Request) -> Worker:
        """Return the worker that a request goes to; without a session its seed decides."""
        return self.workers[replica_of(request.session or str(request.seed), len(self.workers))]

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies to each request, in order. Raises what `Worker.generate` raises."""
        positions_by_worker: dict[Worker, list[int]] = {}
        for position, request in enumerate(requests):
            positions_by_worker.setdefault(self.worker_of(request), []).append(position)
        results = await gather_or_cancel(
            [
                worker.generate([requests[position] for position in positions])
                for worker, positions in positions_by_worker.items()
            ]
        )
        replies = {
            position: reply
            for positions, generations in zip(positions_by_worker.values(), results, strict=True)
            for position, reply in zip(positions, generations, strict=True)
        }
        return [replies[position] for position in range(len(requests))]

    async def reload(self, weights: Path) -> None:
        """Replace the weights of all workers by those of a file. Raises what `Worker.reload`
        raises.
        """
        await asyncio.gather(*(worker.reload(weights) for worker in self.workers))

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens, including the header of the reply."""
        return self.workers[0].count_tokens(request)

    def cached_share(self) -> float:
        """Return the share of all prompt tokens so far that came from the cache: the mean over the
        workers.
        """
        return sum(worker.cached_share() for worker in self.workers) / len(self.workers)

    def written(self) -> int:
        """Return the number of tokens sampled so far, including those of replies in progress."""
        return sum(worker.written() for worker in self.workers)

    def abandon(self) -> None:
        """Kill all workers, even in the middle of a batch. Any thread may call this."""
        for worker in self.workers:
            worker.abandon()

    async def close(self) -> None:
        """Wait for the batches in progress, then end all workers."""
        await asyncio.gather(*(worker.close() for worker in self.workers))
