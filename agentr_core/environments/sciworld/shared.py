"""Simulators of ScienceWorld that are started once, shared by all episodes, and brought to the
state of the one that needs it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

from agentr_core.environments.sciworld.simulator import Answer, JavaSettings, Simulator
from agentr_core.environments.sciworld.tasks import Variation
from agentr_core.errors import EnvironmentFault, ReplayDiverged
from agentr_core.fingerprint import fingerprint


@dataclass(frozen=True, slots=True)
class Deed:
    """An executed action, and the hash of the observation after it."""

    action: str
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The state of an episode: how it began, and the actions since then. `first` is the hash of its
    first observation.
    """

    variation: Variation
    simplifications: str
    first: str
    deeds: tuple[Deed, ...] = ()

    def then(self, action: str, observation: str) -> Path:
        """Return the path with one more action."""
        return replace(self, deeds=(*self.deeds, Deed(action, fingerprint(observation))))

    def leads_to(self, other: Path) -> bool:
        """Return whether the other path is this one or continues it."""
        begun_alike = (self.variation, self.simplifications) == (other.variation, other.simplifications)
        return begun_alike and self.deeds == other.deeds[: len(self.deeds)]


@dataclass(slots=True, eq=False)
class Standing:
    """A simulator, the path that it has followed (None if there is none), and its owner (None if
    that episode is over).
    """

    simulator: Simulator
    path: Path | None = None
    owner: object = None

    def begin(self, variation: Variation, simplifications: str) -> str:
        """Begin an episode and return its first observation."""
        self.path = None
        first = self.simulator.begin(variation, simplifications)
        self.path = Path(variation=variation, simplifications=simplifications, first=fingerprint(first))
        return first

    def act(self, action: str) -> Answer:
        """Carry out an action, add it to the path and return the answer."""
        if self.path is None:
            raise EnvironmentFault("sciworld: there is no episode in this simulator")
        answer = self.simulator.act(action)
        self.path = self.path.then(action, answer.observation)
        return answer


class SharedSimulators:
    """At most `limit` simulators; each is lent for the duration of one call, so that any number of
    episodes can share them.

    A simulator in which an exception was raised is ended, and another takes its place when one is
    needed.
    """

    def __init__(self, start: Callable[[], Simulator], limit: int) -> None:
        self._start = start
        self._limit = limit
        self._free = threading.Condition()
        self._idle: list[Standing] = []
        self._count = 0
        self._closed = False
        self._splits: dict[str, dict[str, tuple[int, ...]]] = {}
        self._gold: dict[tuple[Variation, str], tuple[str, ...]] = {}

    def begin(self, variation: Variation, simplifications: str, owner: object) -> tuple[Path, str]:
        """Return the path of a fresh episode, and its first observation."""
        with self._lend(None, owner) as standing:
            first = standing.begin(variation, simplifications)
            return Path(variation=variation, simplifications=simplifications, first=fingerprint(first)), first

    @contextmanager
    def at(self, path: Path, owner: object) -> Iterator[Standing]:
        """Lend a simulator that stands at the end of a path.

        The choice is one that already stands on the path, or else one that no episode needs, a new
        one, or the least recently used one. The missing actions are repeated. Raises
        `ReplayDiverged` if one leads to another observation.
        """
        with self._lend(path, owner) as standing:
            _bring(standing, path)
            yield standing

    def release(self, owner: object) -> None:
        """Mark an episode as over, so that others may have its simulators."""
        with self._free:
            for standing in self._idle:
                if standing.owner is owner:
                    standing.owner = None

    def splits(self, task: str) -> dict[str, tuple[int, ...]]:
        """Return the simulator's own splits of the variations of a task."""
        if task not in self._splits:
            with self._lend(None, None) as standing:
                self._splits[task] = standing.simulator.splits(task)
        return self._splits[task]

    def gold_actions(self, variation: Variation, simplifications: str) -> tuple[str, ...]:
        """Return the simulator's own solution of a variation."""
        key = variation, simplifications
        if key not in self._gold:
            with self._lend(None, None) as standing:
                self._gold[key] = standing.simulator.gold_actions(variation, simplifications)
        return self._gold[key]

    def close(self) -> None:
        """End all simulators, those on loan as soon as they come back. Calling it twice is
        harmless.
        """
        with self._free:
            self._closed = True
            idle, self._idle = self._idle, []
            self._count -= len(idle)
        for standing in idle:
            standing.simulator.close()

    @contextmanager
    def _lend(self, path: Path | None, owner: object) -> Iterator[Standing]:
        """Lend the simulator that is nearest to a path; the simulator's own path is unchanged if
        `path` is given, otherwise None.
        """
        standing = self._take(path)
        standing.owner = owner
        if path is None:
            standing.path = None
        try:
            yield standing
        except BaseException:
            self._drop(standing)
            raise
        self._give_back(standing)

    def _take(self, path: Path | None) -> Standing:
        with self._free:
            while True:
                nearest = max(self._idle, key=lambda standing: _nearness(standing, path), default=None)
                useful = nearest is not None and _nearness(nearest, path) >= 0
                if nearest is not None and (useful or self._count >= self._limit):
                    self._idle.remove(nearest)
                    return nearest
                if self._count < self._limit:
                    self._count += 1
                    break
                self._free.wait()
        try:
            return Standing(self._start())
        except BaseException:
            self._forget()
            raise

    def _give_back(self, standing: Standing) -> None:
        with self._free:
            if not self._closed:
                self._idle.append(standing)
                self._free.notify()
                return
        self._drop(standing)

    def _drop(self, standing: Standing) -> None:
        standing.simulator.close()
        self._forget()

    def _forget(self) -> None:
        with self._free:
            self._count -= 1
            self._free.notify()


@lru_cache(maxsize=4)
def simulators(settings: JavaSettings, limit: int) -> SharedSimulators:
    """Return the simulators that all environments of this process share; they are closed when the
    process ends.
    """
    shared = SharedSimulators(lambda: Simulator(settings), limit)
    atexit.register(shared.close)
    return shared


def _nearness(standing: Standing, path: Path | None) -> int:
    """Return one more than the number of actions of a path that a simulator has done; off the path,
    0 if it has no owner, -1 if an episode needs it.
    """
    if path is not None and standing.path is not None and standing.path.leads_to(path):
        return len(standing.path.deeds) + 1
    return 0 if standing.owner is None else -1


def _bring(standing: Standing, path: Path) -> None:
    """Carry out the missing actions of a path; a simulator that does not stand on it begins
    anew.
    """
    if standing.path is None or not standing.path.leads_to(path):
        _compare(path, "the beginning", standing.begin(path.variation, path.simplifications), path.first)
    done = len(standing.path.deeds) if standing.path else 0
    for position, deed in enumerate(path.deeds[done:], done):
        observation = standing.act(deed.action).observation
        _compare(path, f"step {position}, {deed.action!r},", observation, deed.observation)


def _compare(path: Path, what: str, seen: str, recorded: str) -> None:
    if fingerprint(seen) != recorded:
        raise ReplayDiverged(
            f"{path.variation.task}, variation {path.variation.number}: {what} led to another observation when it was "
            f"done again: {seen[:200]!r}"
        )
