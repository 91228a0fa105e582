"""One model in several worker processes, each with its own threads, device and prefix cache.

Threads of one process wait for each other at every operation; with small models this costs more
than they gain.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from agentr_core.errors import AgentrError, ModelFault, ModelUnavailable
from agentr_core.lifetime import python_path
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.local.worker_messages import Loaded, Loading, Reload, Replies
from agentr_core.models.processors import processors
from agentr_core.models.sticky import replica_of
from agentr_core.models.together import all_or_none
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.types import Generation, Request

_WORKER = "agentr_core.models.local.worker"
_RESTARTS = 3
"""The most times that a dead worker is restarted."""
_ENDING_SECONDS = 10.0
_LEAST_BATCH = 32
"""The fewest replies at once for which `auto` adds a worker."""


def load_local(loading: Loading, *, workers: int | Literal["auto"]) -> TransformersModel | Workers:
    """Return a model in this process or, if `workers` is more than one, in that many worker
    processes.

    `auto` means one for each GPU if the device is a GPU, otherwise one for each processor, as long
    as each decodes at least 32 replies at once. Raises as `TransformersModel.load`.
    """
    devices = _devices(loading, workers)
    if len(devices) == 1:
        return loading.load()
    return Workers.load(loading, devices=devices, processors=processors())


def _devices(loading: Loading, workers: int | Literal["auto"]) -> list[str]:
    """Return the device of each worker."""
    if loading.device in ("auto", "cuda"):
        import torch

        if gpus := torch.cuda.device_count():
            return [f"cuda:{number % gpus}" for number in range(gpus if workers == "auto" else workers)]
    if loading.device in ("auto", "cpu"):
        most = max(1, loading.max_batch // _LEAST_BATCH)
        return ["cpu"] * (min(processors(), most) if workers == "auto" else workers)
    return [loading.device] * (1 if workers == "auto" else workers)


class Worker:
    """A ChatModel in a process of its own. A process that dies is restarted, and its batch raises
    `ModelUnavailable`.

    The process ends with this one, even if this one is killed. Use `Workers.load`.

    Args:
        loading: The model that it loads.
        threads: The threads of its process on a CPU.
        renderer: The renderer of the model's directory, to count tokens with.
    """

    def __init__(self, loading: Loading, *, threads: int, renderer: Renderer) -> None:
        self.name = loading.path.name
        self.fingerprint = ""
        self.context_length = 0
        self._loading = loading
        self._threads = threads
        self._renderer = renderer
        self._weights: Path | None = None
        self._cached_share = 0.0
        self._deaths = 0
        self._closed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        # Only this thread talks to the process.
        self._speaker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"worker-{self.name}")
        self._start()

    def ready(self) -> None:
        """Return once the model is loaded. Raises what loading it raises; `ModelFault` if the
        process dies while it loads.
        """
        self._speaker.submit(self._greet).result()

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies. Raises as `TransformersModel.generate`, and `ModelUnavailable` if the
        process died.
        """
        self._must_be_open()
        return await asyncio.get_running_loop().run_in_executor(self._speaker, self._ask, tuple(requests))

    async def reload(self, weights: Path) -> None:
        """Have the process, and any that replaces it, take over the weights of a file.

        Raises as `TransformersModel.reload`, and `ModelFault` if the process died.
        """
        self._must_be_open()
        self._weights = weights
        await asyncio.get_running_loop().run_in_executor(self._speaker, self._send_weights)

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens, the header of the reply included."""
        return len(self._renderer.render_prompt(request.messages))

    def cached_share(self) -> float:
        """Return the share of all prompt tokens so far that came from the cache, in [0, 1]."""
        return self._cached_share

    async def close(self) -> None:
        """End the process once the batch under way is done."""
        self._closed = True
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Like `close`, but wait in this thread."""
        self._closed = True
        self._speaker.shutdown()
        self._stop()
        self._log.close()

    def _must_be_open(self) -> None:
        if self._closed:
            raise ModelFault(f"model {self.name} is closed; load it again")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER, str(theirs.fileno())],
                # Never written to: the worker sees this pipe end when this process dies, however
                # that happens.
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env=self._environment(),
                # An interrupt at the terminal is for this process, which then shuts the worker
                # down.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": str(self._threads),
            "MKL_NUM_THREADS": str(self._threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _greet(self) -> None:
        try:
            loaded: Loaded = self._exchange(self._loading)
        except (EOFError, OSError) as error:
            raise ModelFault(
                f"a worker of model {self.name} {self._end_of_process()} while it loaded the model"
            ) from error
        self.name, self.fingerprint, self.context_length = loaded.name, loaded.fingerprint, loaded.context_length
        if self._weights is not None:
            self._send_weights()

    def _send_weights(self) -> None:
        assert self._weights is not None
        try:
            self._exchange(Reload(weights=self._weights))
        except (EOFError, OSError) as error:
            raise ModelFault(
                f"a worker of model {self.name} {self._end_of_process()} while it took over weights"
            ) from error

    def _ask(self, requests: tuple[Request, ...]) -> list[list[Generation]]:
        try:
            answer: Replies = self._exchange(requests)
        except (EOFError, OSError) as error:
            how = f"a worker of model {self.name} {self._end_of_process()}"
            # One that is not started again dies no more.
            self._deaths = min(self._deaths, _RESTARTS) + 1
            if self._deaths > _RESTARTS:
                raise ModelFault(f"{how}; it has died {self._deaths} times and is not started again") from error
            self._start()
            self._greet()
            raise ModelUnavailable(f"{how}; it was restarted") from error
        self._cached_share = answer.cached_share
        return answer.replies

    def _exchange(self, message: Any) -> Any:
        """Return the process's answer. Raises the error that it sent, or EOFError or OSError if it
        is gone.
        """
        self._connection.send(message)
        answer = self._connection.recv()
        if isinstance(answer, AgentrError):
            raise answer
        return answer

    def _end_of_process(self) -> str:
        """Return how the process ended, as the end of a sentence."""
        self._stop()
        status = self._process.returncode
        if status == -signal.SIGKILL:
            return "was killed, probably because memory ran out (set model.workers=1 or lower model.max_batch)"
        self._log.seek(0)
        said = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"ended with status {status}{f' ({said[-1]})' if said else ''}"

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

    A seed gives the same reply on any worker. Use `load`.
    """

    def __init__(self, members: Sequence[Worker]) -> None:
        self.members = tuple(members)
        self.name = members[0].name
        self.fingerprint = members[0].fingerprint
        self.context_length = members[0].context_length

    @classmethod
    def load(cls, loading: Loading, *, devices: Sequence[str], processors: int) -> Workers:
        """Return the model once it is loaded on each of the devices; processors, batch and cache
        are divided among the workers.

        Raises as `TransformersModel.load`, and `ModelFault` if a worker dies while it loads.
        """
        count = len(devices)
        share = replace(
            loading, max_batch=-(-loading.max_batch // count), prefix_cache_bytes=loading.prefix_cache_bytes // count
        )
        renderer = load_renderer(loading.path, at=loading.at)
        threads = max(1, processors // count)
        members = [Worker(replace(share, device=d), threads=threads, renderer=renderer) for d in devices]
        try:
            with ThreadPoolExecutor(count) as together:
                list(together.map(Worker.ready, members))
        except BaseException:
            for member in members:
                member.end()
            raise
        return cls(members)

    def member(self, request: Request) -> Worker:
        """Return the worker that a request goes to; without a session its seed decides."""
        return self.members[replica_of(request.session or str(request.seed), len(self.members))]

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies. Raises as `Worker.generate`."""
        parts: dict[Worker, list[int]] = {}
        for place, request in enumerate(requests):
            parts.setdefault(self.member(request), []).append(place)
        given = await all_or_none(
            [worker.generate([requests[place] for place in places]) for worker, places in parts.items()]
        )
        replies = {
            place: reply
            for places, found in zip(parts.values(), given, strict=True)
            for place, reply in zip(places, found, strict=True)
        }
        return [replies[place] for place in range(len(requests))]

    async def reload(self, weights: Path) -> None:
        """Have all workers take over the weights of a file. Raises as `Worker.reload`."""
        await asyncio.gather(*(member.reload(weights) for member in self.members))

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens, the header of the reply included."""
        return self.members[0].count_tokens(request)

    def cached_share(self) -> float:
        """Return the share of all prompt tokens so far that came from the cache: the mean over the
        workers.
        """
        return sum(member.cached_share() for member in self.members) / len(self.members)

    async def close(self) -> None:
        """End all workers once their batches are done."""
        await asyncio.gather(*(member.close() for member in self.members))
