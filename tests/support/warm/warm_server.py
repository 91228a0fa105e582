"""The warm process: it imports what trainers and samplers import, and forks for each of them.

To import Torch, Transformers and TRL takes seven seconds of a processor, and the tests train more
than a hundred times. `python warm_server.py SOCKET` imports when it is first asked, and ends when
its standard input does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from warm_client import LONGEST

IMPORTED = (
    "agentr_core.models.local.loading",
    "agentr_core.models.local.transformers",
    "agentr_core.training.process",
    "agentr_core.training.run",
    "agentr_core.training.trainers",
)
_ABOVE_ALL_FILES = 1000
"""A number that no file has which a program is started with."""


@dataclass(frozen=True)
class Fork:
    """A running fork, and the socket of the process that stands for it."""

    pid: int
    end: int
    asker: socket.socket


def serve(path: str) -> dict[str, Any] | None:
    """Fork for each that connects, and return in a fork what it is to be; None at the end of
    standard input, when all forks are killed.
    """
    chosen = selectors.DefaultSelector()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(64)
    chosen.register(listening, selectors.EVENT_READ)
    chosen.register(0, selectors.EVENT_READ)
    forks: list[Fork] = []
    while True:
        for key, _ in chosen.select():
            if key.fileobj is listening:
                request = _accept_fork(listening.accept()[0], forks, chosen)
                if request is not None:
                    listening.close()
                    return request
            elif key.fileobj == 0:
                for fork in forks:
                    _kill(fork)
                return None
            elif key.data in forks:
                _report_end(key.data, forks, chosen)


def _accept_fork(asker: socket.socket, forks: list[Fork], chosen: selectors.BaseSelector) -> dict[str, Any] | None:
    """Return, in a new fork, what it is to be, with `files` by their wanted numbers; else None."""
    message, files, _, _ = socket.recv_fds(asker, LONGEST, 250)
    if not message:
        asker.close()
        return None
    _warm_up()
    pid = os.fork()
    if not pid:
        chosen.close()
        for fork in forks:
            fork.asker.close()
            os.close(fork.end)
        asker.close()
        request: dict[str, Any] = json.loads(message)
        return request | {"files": dict(zip(request["files"], files, strict=True))}
    for file in files:
        os.close(file)
    fork = Fork(pid, os.pidfd_open(pid), asker)
    forks.append(fork)
    chosen.register(fork.end, selectors.EVENT_READ, fork)
    chosen.register(asker, selectors.EVENT_READ, fork)
    # Who asked may have been killed meanwhile; the end of its socket is then the next to be read.
    with contextlib.suppress(BrokenPipeError):
        asker.send(str(pid).encode())
    return None


def _warm_up() -> None:
    """Import for all forks to come, as `agentr_core.system.gc_paused_for_imports` does."""
    if IMPORTED[0] not in sys.modules:
        gc.disable()
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()
        gc.enable()


def _report_end(fork: Fork, forks: list[Fork], chosen: selectors.BaseSelector) -> None:
    """Tell how a fork ended; kill it where it is the process that stands for it that has ended."""
    _kill(fork)
    _, status = os.waitpid(fork.pid, 0)
    forks.remove(fork)
    chosen.unregister(fork.end)
    chosen.unregister(fork.asker)
    os.close(fork.end)
    with fork.asker:
        try:
            fork.asker.send(str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            return


def _kill(fork: Fork) -> None:
    # One that has ended by itself stays as it is until it is waited for.
    os.kill(fork.pid, signal.SIGKILL)


def become(request: dict[str, Any]) -> NoReturn:
    """Run a program in this fork as Python runs it in a process of its own."""
    os.setsid()
    _take_files(request["files"])
    os.chdir(request["folder"])
    own_paths = (sys.path[0], *os.environ["PYTHONPATH"].split(os.pathsep))
    os.environ.clear()
    os.environ.update(request["env"])
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [request["folder"], *paths, *(path for path in sys.path if path not in own_paths)]
    sys.argv[:] = request["words"]
    _leave(_run(request["words"][0]))


def _take_files(files: dict[int, int]) -> None:
    """Give files the numbers that the program knows them by."""
    aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE_ALL_FILES) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in aside.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(status: int) -> NoReturn:
    """End as the interpreter does, without taking apart what was imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    socket_path = Path(sys.argv[1])
    found = serve(str(socket_path))
    if found is not None:
        become(found)
    socket_path.unlink()
