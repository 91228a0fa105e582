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
from agentr_core.models.batching import all_or_none, replica_of
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.models import ModelConfig
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.system import check_wanted, processors, python_path
from agentr_core.types import Generation, Request

# Messages between a worker process and the process that started it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
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
class Reload:
    """An order to replace the weights by those of a file; the worker answers None."""

    weights: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """An order for replies. While the worker decodes those of the requests whose indices are in
    `streamed`, it sends their text so far.
    """

    requests: tuple[Request, ...]
    streamed: frozenset[int]


class Text(NamedTuple):
    """The text so far of the reply to the request with index `number`."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Working:
    """A worker's sign that it is making progress; the answer is still to come.

    `written` counts all tokens that it has sampled so far.
    """

    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """The replies to a batch; the share of all prompt tokens so far that came from the cache, in
    [0, 1]; and the number of all tokens sampled so far.
    """

    replies: list[list[Generation]]
    cached_share: float
    written: int


_WORKER = "agentr_core.models.local.worker"
_RESTARTS = 3
"""The most times that a worker is restarted after it died or hung."""
_ENDING_SECONDS = 10.0
_LOOK_SECONDS = 0.2
"""Seconds between two checks whether the model is still wanted while it loads."""
_LEAST_BATCH = 32
"""The fewest replies at once for which `auto` adds a worker."""


def load_local(
    loading: Loading, *, workers: int | Literal["auto"], patience: float = 600.0
) -> TransformersModel | Workers:
    """Return a model in this process or, if `workers` is more than one, in that many worker
    processes.

    `auto` means one for each GPU if the device is a GPU, otherwise one for each processor, as long
    as each decodes at least 32 replies at once. A worker process that gives no sign of progress for
    `patience` seconds is restarted. Raises what `TransformersModel.load` and `Workers.load` raise.
    """
    devices = _devices(loading, workers)
    if len(devices) == 1:
        return loading.load()
    return Workers.load(loading, devices=devices, processors=processors(), patience=patience)


def worker_count(model: ModelConfig) -> int:
    """Return the number of processes in which a model samples on a CPU of this machine."""
    most = max(1, model.max_batch // _LEAST_BATCH)
    return min(processors(), most) if model.workers == "auto" else model.workers


def _devices(loading: Loading, workers: int | Literal["auto"]) -> list[str]:
    """Return the device of each worker; one device means no worker processes."""
    if loading.device in ("auto", "cuda"):
        import torch

        if gpus := torch.cuda.device_count():
            return [f"cuda:{number % gpus}" for number in range(gpus if workers == "auto" else workers)]
    if loading.device in ("auto", "cpu"):
        most = max(1, loading.max_batch // _LEAST_BATCH)
        return ["cpu"] * (min(processors(), most) if workers == "auto" else workers)
    return [loading.device] * (1 if workers == "auto" else workers)


class Worker:
    """A ChatModel in a process of its own. A process that dies or hangs is restarted, and its batch
    raises `ModelUnavailable`.

    The process ends with this one, even if this one is killed. Use `Workers.load`.

    Args:
        loading: The model that it loads.
        threads: The threads of its process on a CPU.
        renderer: The renderer of the model's directory, to count tokens with.
        patience: The seconds without a sign of progress after which a process counts as hung.
    """

    def __init__(self, loading: Loading, *, threads: int, renderer: Renderer, patience: float) -> None:
        self.name = loading.path.name
        self.fingerprint = ""
        self.context_length = 0
        self._loading = loading
        self._threads = threads
        self._renderer = renderer
        self._patience = patience
        self._weights: Path | None = None
        self._cached_share = 0.0
        self._written = 0
        self._earlier = 0
        self._deaths = 0
        self._given_up = ""
        self._closed = False
        # Held while the process is started or killed, so that none is started after the last one
        # was killed.
        self._change = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        # Only this thread talks to the process.
        self._speaker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"worker-{self.name}")
        self._start()

    def begin(self) -> Future[None]:
        """Start loading the model; return a future that is done when it is loaded. The future
        raises what loading raises, and `ModelFault` if process after process dies or hangs while it
        loads.
        """
        return self._speaker.submit(self._load)

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies to each request. Raises what `TransformersModel.generate` raises,
        `ModelUnavailable` if the process died or hung, and `ModelFault` if this happens too often.
        """
        self._must_be_open()
        return await asyncio.get_running_loop().run_in_executor(self._speaker, self._ask, tuple(requests))

    async def reload(self, weights: Path) -> None:
        """Replace the weights by those of a file, in the process and in any that replaces it.

        Raises what `TransformersModel.reload` raises, and `ModelFault` if process after process
        died or hung.
        """
        self._must_be_open()
        self._weights = weights
        await asyncio.get_running_loop().run_in_executor(self._speaker, self._send_weights)

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
        return self._earlier + self._written

    def abandon(self) -> None:
        """Kill the process, even in the middle of a batch, which then fails. Any thread may call
        this.
        """
        with self._change:
            self._closed = True
            self._process.kill()

    async def close(self) -> None:
        """Wait for the batch in progress, then end the process."""
        self._closed = True
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Do what `close` does, but wait in this thread."""
        self._closed = True
        self._speaker.shutdown()
        self._stop()
        self._log.close()

    def _must_be_open(self) -> None:
        if self._closed:
            raise ModelFault(f"model {self.name} is closed; load it again")

    def _start(self) -> None:
        with self._change:
            self._must_be_open()
            parent_end, worker_end = socket.socketpair()
            # A read or a write that takes longer raises BlockingIOError.
            limit = struct.pack("ll", int(self._patience), int(self._patience % 1 * 1e6))
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                parent_end.setsockopt(socket.SOL_SOCKET, direction, limit)
            self._connection = Connection(parent_end.detach())
            with worker_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _WORKER, str(worker_end.fileno())],
                    # Never written to: the worker sees this pipe end when this process dies,
                    # however that happens.
                    stdin=subprocess.PIPE,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=[worker_end.fileno()],
                    env=os.environ
                    | {
                        "PYTHONPATH": python_path(),
                        "OMP_NUM_THREADS": str(self._threads),
                        "MKL_NUM_THREADS": str(self._threads),
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
                report: LoadReport = self._exchange(self._loading)
                if self._weights is not None:
                    phase = "while it took over weights"
                    self._exchange(Reload(weights=self._weights))
            except (EOFError, OSError) as error:
                self._replace(f"{self._end_of_process(error)} {phase}", error)
            else:
                self.name, self.fingerprint = report.name, report.fingerprint
                self.context_length = report.context_length
                return

    def _send_weights(self) -> None:
        assert self._weights is not None
        try:
            self._exchange(Reload(weights=self._weights))
        except (EOFError, OSError) as error:
            self._replace(f"{self._end_of_process(error)} while it took over weights", error)
            self._load()

    def _ask(self, requests: tuple[Request, ...]) -> list[list[Generation]]:
        listeners = [request.on_text for request in requests]
        batch = Batch(
            requests=tuple(replace(request, on_text=None) for request in requests),
            streamed=frozenset(number for number, listener in enumerate(listeners) if listener is not None),
        )
        try:
            answer: Replies = self._exchange(batch, listeners)
        except (EOFError, OSError) as error:
            ending = self._end_of_process(error)
            self._replace(ending, error)
            self._load()
            raise ModelUnavailable(f"{ending}; it was restarted") from error
        self._cached_share, self._written = answer.cached_share, answer.written
        return answer.replies

    def _replace(self, ending: str, error: Exception) -> None:
        """Start a process in place of one that has ended; `ending` says how. Raises `ModelFault` if
        this has been done too often, or after `close` or `abandon`.
        """
        self._deaths += 1
        self._earlier, self._written = self.written(), 0
        if self._deaths > _RESTARTS:
            self._given_up = f"{ending}; it has died {self._deaths} times and is not started again"
            raise ModelFault(self._given_up) from error
        self._start()

    def _exchange(self, message: Any, listeners: Sequence[Callable[[str], None] | None] = ()) -> Any:
        """Send a message and return the process's answer; texts that arrive before it go to the
        listeners. Raises the error that the process sent, `BlockingIOError` if it is silent for too
        long, and `EOFError` or another `OSError` if it is gone.
        """
        if self._given_up:
            raise ModelFault(self._given_up)
        self._connection.send(message)
        while isinstance(answer := self._connection.recv(), Working | Text):
            if isinstance(answer, Working):
                self._written = answer.written
            elif (listener := listeners[answer.number]) is not None:
                listener(answer.text)
        if isinstance(answer, AgentrError):
            raise answer
        return answer

    def _end_of_process(self, error: Exception) -> str:
        """Stop the process if it still runs; return how it ended, as a sentence without its full
        stop.
        """
        hung = isinstance(error, BlockingIOError)
        if hung:
            self._process.kill()
        self._stop()
        worker, status = f"a worker of model {self.name}", self._process.returncode
        if hung:
            return (
                f"{worker} was silent for {self._patience:g} seconds and was ended (if it only was slow, raise "
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
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()


class Workers:
    """A ChatModel that distributes requests among workers; all requests of a session go to the same
    one.

    A seed gives the same reply on any worker, up to rounding. Use `load`.
    """

    def __init__(self, members: Sequence[Worker]) -> None:
        self.members = tuple(members)
        self.name = members[0].name
        self.fingerprint = members[0].fingerprint
        self.context_length = members[0].context_length

    @classmethod
    def load(cls, loading: Loading, *, devices: Sequence[str], processors: int, patience: float) -> Workers:
        """Load the model on each of the devices, and return it once all have loaded it; processors,
        batch and cache are divided among the workers.

        If one fails, all processes are killed. Raises what the future of `Worker.begin` raises, and
        what `check_wanted` raises if the caller was cancelled.
        """
        count = len(devices)
        share = replace(
            loading, max_batch=-(-loading.max_batch // count), prefix_cache_bytes=loading.prefix_cache_bytes // count
        )
        renderer = load_renderer(loading.path, at=loading.at)
        threads = max(1, processors // count)
        members = [
            Worker(replace(share, device=d), threads=threads, renderer=renderer, patience=patience) for d in devices
        ]
        try:
            loads = [member.begin() for member in members]
            remaining = set(loads)
            while remaining:
                done, remaining = wait(remaining, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
                for load in done:
                    load.result()
                check_wanted()
        except BaseException:
            for member in members:
                member.abandon()
                member.end()
            raise
        return cls(members)

    def member(self, request: Request) -> Worker:
        """Return the worker that a request goes to; without a session its seed decides."""
        return self.members[replica_of(request.session or str(request.seed), len(self.members))]

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies to each request, in order. Raises what `Worker.generate` raises."""
        parts: dict[Worker, list[int]] = {}
        for position, request in enumerate(requests):
            parts.setdefault(self.member(request), []).append(position)
        results = await all_or_none(
            [worker.generate([requests[position] for position in positions]) for worker, positions in parts.items()]
        )
        replies = {
            position: reply
            for positions, generations in zip(parts.values(), results, strict=True)
            for position, reply in zip(positions, generations, strict=True)
        }
        return [replies[position] for position in range(len(requests))]

    async def reload(self, weights: Path) -> None:
        """Replace the weights of all workers by those of a file. Raises what `Worker.reload`
        raises.
        """
        await asyncio.gather(*(member.reload(weights) for member in self.members))

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens, including the header of the reply."""
        return self.members[0].count_tokens(request)

    def cached_share(self) -> float:
        """Return the share of all prompt tokens so far that came from the cache: the mean over the
        workers.
        """
        return sum(member.cached_share() for member in self.members) / len(self.members)

    def written(self) -> int:
        """Return the number of tokens sampled so far, including those of replies in progress."""
        return sum(member.written() for member in self.members)

    def abandon(self) -> None:
        """Kill all workers, even in the middle of a batch. Any thread may call this."""
        for member in self.members:
            member.abandon()

    async def close(self) -> None:
        """Wait for the batches in progress, then end all workers."""
        await asyncio.gather(*(member.close() for member in self.members))
