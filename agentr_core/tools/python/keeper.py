"""A warm interpreter that forks one confined process for each call, and outlives it.

`python -c ... main()`: requests come on standard input and answers go to standard output, one line
of JSON each; the first line has the settings. It runs one call at a time, and ends when its input
ends. It has only its main thread, since it forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentr_core.tools.python import child, kernel, landlock
from agentr_core.tools.python.confinement import confine
from agentr_core.tools.python.levels import Level
from agentr_core.tools.python.limits import Limits
from agentr_core.tools.python.watch import Watch

_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Paths that a library may need when it is loaded late."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main() -> None:
    """Serve calls until standard input ends."""
    source = sys.stdin.buffer
    settings = json.loads(source.readline())
    try:
        keeper = Keeper(**settings)
    except (ImportError, OSError) as error:
        _answer({"refused": str(error)})
        return
    _answer({"ready": True})
    while line := source.readline():
        _answer(keeper.call(**json.loads(line)))


class Keeper:
    """One warm interpreter."""

    def __init__(self, level: str, limits: dict[str, Any], packages: list[str], folder: str) -> None:
        """Import packages and give up privileges. Raises `ImportError` for a package that is not
        installed, and `OSError`.
        """
        self._level = Level(level)
        self._limits = Limits(**limits)
        self._folder = Path(folder) / "work"
        self._folder.mkdir(mode=0o700)
        before = set(sys.modules)
        for name in packages:
            importlib.import_module(name)
        if "numpy" in packages:
            # Otherwise it would be loaded at its first use, and then seed itself at random.
            importlib.import_module("numpy.random")
        needed = frozenset(name.partition(".")[0] for name in set(sys.modules) - before)
        self._rules = -1
        if self._level.includes(Level.LANDLOCK):
            readable = (*_SYSTEM, *_DEVICES, *_library(), *_places(needed | set(packages)))
            self._rules = landlock.ruleset(readable, str(self._folder), landlock.abi())
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if self._level.includes(Level.LIMITS):
            kernel.drop_privileges()
        os.environ.update(HOME=str(self._folder), TMPDIR=str(self._folder))
        child.prepare(packages, needed)
        gc.collect()
        gc.disable()
        # Existing objects stay in pages that all children share.
        gc.freeze()

    def call(self, code: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the outcome of one call as plain data, or `refused` with the reason why the code
        was not run.
        """
        start = time.monotonic()
        limits = replace(self._limits, timeout_s=timeout_s) if timeout_s else self._limits
        watch = self._start(code, limits)
        if isinstance(watch, str):
            return {"refused": watch}
        outcome = watch.wait(start + limits.timeout_s)
        self._clear()
        return {**outcome, "ms": 1000 * (time.monotonic() - start)}

    def _start(self, code: str, limits: Limits) -> Watch | str:
        """Return the watch over a process that runs the code, or why a barrier could not be set."""
        ready, raised = os.pipe()
        stdout, stdout_end = os.pipe()
        stderr, stderr_end = os.pipe()
        keeper = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                self._become(code, keeper, raised, stdout_end, stderr_end)
            finally:
                os._exit(child.EXCEPTION)
        for descriptor in (raised, stdout_end, stderr_end):
            os.close(descriptor)
        watch = Watch(process, stdout, stderr, limits, self._folder)
        with open(ready, "rb") as barrier:  # noqa: PTH123 - a descriptor
            if refusal := barrier.read().decode():
                watch.wait(time.monotonic())
                return refusal
        return watch

    def _clear(self) -> None:
        """Empty the working folder, without replacing it: Landlock's rules refer to it."""
        for entry in os.scandir(self._folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)  # noqa: PTH108

    def _become(self, code: str, keeper: int, raised: int, stdout: int, stderr: int) -> None:
        """In the child: confine it, signal that this is done, run the code and exit."""
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        _close_all_but(raised, self._rules)
        try:
            confine(self._level, self._limits, str(self._folder), self._rules, keeper)
        except OSError as error:
            os.write(raised, str(error).encode())
            os._exit(child.EXCEPTION)
        os.close(raised)
        gc.enable()
        os._exit(child.run(code))


def _close_all_but(*kept: int) -> None:
    """Close all descriptors above standard error except these."""
    low = 3
    for descriptor in (*sorted(one for one in kept if one >= low), os.sysconf("SC_OPEN_MAX")):
        os.closerange(low, descriptor)
        low = descriptor + 1


def _library() -> list[str]:
    """Return the paths of the standard library, without the packages that may be installed in the
    same folder.
    """
    folder = sysconfig.get_path("stdlib")
    return [f"{folder}/{name}" for name in os.listdir(folder) if not name.endswith("-packages")]  # noqa: PTH208


def _places(packages: frozenset[str]) -> list[str]:
    """Return the paths of packages, and of the libraries that come with their wheels."""
    places = []
    for name in packages - sys.stdlib_module_names:
        module = sys.modules[name]
        folders = [*getattr(module, "__path__", ())]
        places += folders or [getattr(module, "__file__", None) or ""]
        places += [f"{folder}.libs" for folder in folders]
    return [place for place in places if place]


def _answer(data: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")
        sys.stdout.flush()
