"""An environment on an AgentGym server: opened once, reset many times, restored by replay after a
fault, and released on close.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import httpx

from agentr_core.environment import Instances
from agentr_core.environments.agentgym.wire import WIRES, Wire, check_apart, names_file, read_ids
from agentr_core.environments.remote import RemoteWorld, Turn
from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentUnavailable,
    MalformedAnswer,
)
from agentr_core.models.connections import MIB, GarbledAnswer, LargeAnswer, LateAnswer, reading_now
from agentr_core.replies import Labels
from agentr_core.system import RetryPolicy, wait_before_retry
from agentr_core.types import Instance

# One AgentGym server as this process sees it: requests over shared connections, its errors
# translated into ours, and the ids of environments that are not in use (spare).

# An idle connection is closed before a Uvicorn server closes it (5 s): if the server closed it
# while a request was on its way, nobody would know whether the request was carried out.
_KEPT_SECONDS = 3
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
# Status codes that a proxy returns for a server that is absent or overloaded.
_UNAVAILABLE = (429, 502, 503, 504)
_WRONG_SERVER = (404, 405, 422)
_LOCKED = 401


class _Client(threading.local):
    """A thread's own HTTP client, closed when the thread ends. A client that all threads share
    would close idle connections that another thread was just given: its request would fail, or wait
    for an answer that never comes.
    """

    def __init__(self, **settings: Any) -> None:
        self.http = httpx.Client(**settings)
        # A thread's attributes are deleted when it ends, which runs the finalizer; until then, the
        # finalizer keeps the client alive.
        self._thread = _Thread()
        weakref.finalize(self._thread, self.http.close)


class _Thread:
    """An object that lives as long as its thread."""


class Connection:
    """A connection to one world of a server. Several threads may use it at once.

    Args:
        url: the address of the server, including the prefix of the world's paths.
        timeout_s: seconds that the answer to a request may take, from the request to its last
            byte.
        answer_mib: the largest size of an answer, decompressed, in MiB.
        patience_s: seconds for which connecting is retried before the server counts as gone.
        kind: what the server is, for error messages.
        token: the bearer token that the server wants; empty for none.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        patience_s: float,
        answer_mib: int = 16,
        kind: str = "an AgentGym server of that world",
        token: str = "",
    ) -> None:
        self.url = url
        self._kind = kind
        self.restarts = 0
        """How often a connection was refused, which counts as a restart of the server: an older id
        may now be invalid, or belong to another client.
        """
        self._timeout = httpx.Timeout(timeout_s, connect=_CONNECT_SECONDS, pool=None)
        self._patience = RetryPolicy(retries=10**6, seconds=patience_s)
        self._client = _Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=self._timeout,
            limits=httpx.Limits(keepalive_expiry=_KEPT_SECONDS),
            verify=httpx.create_ssl_context(),
            event_hooks=reading_now(answer_mib * MIB),
        )
        self._spare: list[int] = []
        self._ids_in_use: set[int] = set()
        self._responsive = True
        self._lock = threading.Lock()

    def post(self, path: str, body: dict[str, Any], *, patient: bool = False) -> Any:
        """Return the answer to a request, which is sent at most once.

        With `patient`, connecting is retried for `patience_s` seconds. That is only for requests
        without an id: once the server is back, an older id may belong to another client.

        Raises:
            EnvironmentUnavailable: no connection, no answer in time, or a proxy's answer that the
                server is absent or overloaded.
            EnvironmentRefusal: the server answered with an error, as a status or in the body.
            MalformedAnswer: the answer is not JSON.
            EnvironmentFault: the answer is too large.
            EnvironmentServerError: the server has no such path, or wants other fields or a token.
        """
        return self._connected(lambda: self._post(path, body, self._timeout), patient=patient)

    def reach(self) -> None:
        """Wait until the server answers anything at all. Raises `EnvironmentUnavailable` if it does
        not within `patience_s`.
        """
        self._connected(lambda: self._send("GET", "/", None, self._timeout), patient=True)

    def close(self, path: str, body: dict[str, Any]) -> None:
        """Ask the server to close an environment. A failure is only logged; a server that did not
        answer the last time is not asked.
        """
        if not self._responsive:
            return
        try:
            self._post(path, body, httpx.Timeout(_CLOSE_SECONDS))
        except (EnvironmentFault, EnvironmentServerError, httpx.ConnectError, httpx.ConnectTimeout) as error:
            # A refused connection costs nothing, and the server may be back for the next one.
            self._responsive = not isinstance(error, EnvironmentUnavailable | httpx.ConnectTimeout)
            if isinstance(error, httpx.ConnectError):
                self._count_restart()
            _log.warning("%s may keep the environment %s, since closing it failed: %s", self.url, body, error)

    def lend(self, env_id: int) -> int:
        """Record that an environment which the server just created is lent to the caller, until
        `end` or `give_back`, and return the number of restarts so far.

        Raises `EnvironmentUnavailable` if it is lent already: two episodes would act in it.
        """
        with self._lock:
            if env_id in self._ids_in_use:
                raise EnvironmentUnavailable(
                    f"{self.url}/create gave environment {env_id}, in which another episode is under way; if it goes "
                    "on, lower scale.concurrency to the number of environments that the server holds"
                )
            # It may have been given back while the server was answering.
            self._spare = [spare for spare in self._spare if spare != env_id]
            self._ids_in_use.add(env_id)
            return self.restarts

    # Most servers never free an environment, so environments are reused: there are only as many as
    # episodes in flight.
    def spare(self) -> tuple[int, int] | None:
        """Lend a spare environment to the caller. Return its id and the number of restarts so far;
        None if there is no spare one.
        """
        with self._lock:
            if not self._spare:
                return None
            env_id = self._spare.pop()
            self._ids_in_use.add(env_id)
            return env_id, self.restarts

    def end(self, env_id: int, restarts: int) -> bool:
        """Take back an environment that was lent after `restarts` restarts. Return False, and
        change nothing, if the server has restarted since, so that the environment is gone.
        """
        with self._lock:
            # After a restart, the id may be lent to another episode.
            if restarts != self.restarts:
                return False
            self._ids_in_use.discard(env_id)
            return True

    def give_back(self, env_id: int, restarts: int, *, last: bool = False) -> None:
        """Make an environment that was lent after `restarts` restarts available again; with `last`,
        it is lent only if there is no other. Do nothing if the server has restarted since.
        """
        with self._lock:
            if restarts == self.restarts:
                self._ids_in_use.discard(env_id)
                self._spare.insert(0 if last else len(self._spare), env_id)

    def distrust(self) -> None:
        """Forget all spare environments: after a fault, they may be gone as well."""
        with self._lock:
            self._spare.clear()

    def _count_restart(self) -> None:
        with self._lock:
            self.restarts += 1
            self._spare.clear()
            self._ids_in_use.clear()

    def _connected(self, send: Callable[[], T], *, patient: bool) -> T:
        """Return the result of `send`, retrying failed attempts to connect if `patient`. Raises
        `EnvironmentUnavailable` if no connection can be made.
        """
        start, failures = time.monotonic(), 0
        while True:
            try:
                return send()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failures += 1
                if isinstance(error, httpx.ConnectError):
                    self._count_restart()
                seconds = time.monotonic() - start
                wait = wait_before_retry(self._patience, failures=failures, elapsed=seconds, uniform=random.random())
                if wait is None or not patient:
                    raise EnvironmentUnavailable(
                        f"{self.url} cannot be reached ({error}); start the server, or correct its address"
                    ) from error
                time.sleep(wait)

    def _post(self, path: str, body: dict[str, Any], timeout: httpx.Timeout) -> Any:
        url, response = f"{self.url}{path}", self._send("POST", path, body, timeout)
        status = response.status_code
        words = " ".join(response.text.split())[:300] or "without a word"
        if status in _UNAVAILABLE:
            raise EnvironmentUnavailable(f"{url} answered {status}: {words}")
        if status == _LOCKED:
            raise EnvironmentServerError(f"{url} answered {status} ({words}): set its token")
        if status in _WRONG_SERVER:
            raise EnvironmentServerError(
                f"{url} answered {status} ({words}): this is not {self._kind}; correct the address"
            )
        if status != httpx.codes.OK:
            raise EnvironmentRefusal(f"{url} answered {status}: {words}")
        try:
            answer = response.json()
        except ValueError as error:
            raise MalformedAnswer(f"{url} did not answer with JSON: {words}") from error
        if isinstance(answer, dict) and "error" in answer:
            raise EnvironmentRefusal(f"{url} answered: {answer['error']}")
        return answer

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: httpx.Timeout) -> httpx.Response:
        url = f"{self.url}{path}"
        try:
            until = time.monotonic() + (timeout.read or 0)
            response = self._client.http.request(method, path, json=body, timeout=timeout, extensions={"until": until})
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except LargeAnswer as error:
            raise EnvironmentFault(
                f"{url} gives too large an answer: {error}; raise environment.options.answer_mib"
            ) from error
        except GarbledAnswer as error:
            raise MalformedAnswer(f"{url} gives an answer that cannot be read: {error}") from error
        except (httpx.TimeoutException, LateAnswer) as error:
            raise EnvironmentUnavailable(
                f"{url} gave no answer within {timeout.read:g} s; see whether the server works, or raise timeout_s"
            ) from error
        except httpx.HTTPError as error:
            raise EnvironmentUnavailable(f"{url} broke the connection ({error or type(error).__name__})") from error
        self._responsive = True
        return response


@cache
def connection(
    url: str,
    timeout_s: float,
    patience_s: float,
    answer_mib: int = 16,
    kind: str = "an AgentGym server of that world",
    token: str = "",
) -> Connection:
    """Return this process's only connection with these settings. It outlives environments, since it
    holds the spare ids.
    """
    return Connection(url, timeout_s=timeout_s, patience_s=patience_s, answer_mib=answer_mib, kind=kind, token=token)


T = TypeVar("T")
_log = logging.getLogger(__name__)

# How the servers report an id that they do not know, or no longer know.
_UNKNOWN_ID = ("is not valid", "has been deleted")


class RemoteEnvironment(NamedTuple):
    """An environment on the server, lent to us until the server is seen to restart. `started` says
    whether it has answered a reset.
    """

    env_id: int
    restarts: int
    started: bool = False


class AgentGymWorld(RemoteWorld):
    """A world on an AgentGym server, which must be running at `url`. A subclass with `world="x"` is
    the environment `agentgym-x`.

    A step is sent once. If it is unknown whether it was carried out (no connection, no answer in
    time, a broken connection, an error, an unreadable answer), the environment is abandoned: a
    fresh one is opened, the episode is replayed in it, with every answer compared with the earlier
    one, and the step is sent there.

    Args:
        url: the address of the server, such as http://127.0.0.1:36001; by default the value of the
            variable named in `variables`.
        train: the instances of the split: numbers and ranges such as "0-99,120", or the path of an
            AgentGym data file; by default the published ones, where they are known.
        test: the same for the test split.
        timeout_s: seconds that an answer may take, from the request to its last byte.
        patience_s: seconds for which connecting to an unreachable server is retried.
        retries: how often an episode is restored for one step before the fault is raised.
        answer_mib: the largest size of an answer, decompressed, in MiB.
    """

    wire: ClassVar[Wire]
    playable: ClassVar[range | None] = None
    """The numbers of the instances that the server can begin; None if any number may exist."""
    labels: Labels | None = None

    def __init_subclass__(cls, *, world: str = "") -> None:
        super().__init_subclass__()
        if world:
            cls.name = f"agentgym-{world}"
            cls.wire = WIRES[world]
            cls.variables = {"url": f"AGENTR_AGENTGYM_{world.upper()}"}

    def __init__(
        self,
        *,
        url: str = "",
        train: str = "",
        test: str = "",
        timeout_s: float = 60.0,
        patience_s: float = 30.0,
        retries: int = 2,
        answer_mib: int = 16,
    ) -> None:
        super().__init__(
            url=url,
            example="http://127.0.0.1:36001",
            timeout_s=timeout_s,
            patience_s=patience_s,
            retries=retries,
            answer_mib=answer_mib,
        )
        self._server = connection(url.rstrip("/") + self.wire.prefix, float(timeout_s), float(patience_s), answer_mib)
        self._ids: dict[str, Sequence[int]] = {"train": (), "test": ()} | dict(self.published_ids())
        self._ids |= {
            split: read_ids(value, f"{self.name}: option {split}")
            for split, value in (("train", train), ("test", test))
            if value
        }
        if not any(self._ids.values()):
            raise ConfigError(
                f"{self.name} needs the options train and test: instances such as 0-99,120, or a data file of AgentGym"
            )
        playable = self.playable
        for split, ids in self._ids.items():
            if playable is not None and (unplayable := [number for number in ids if number not in playable]):
                raise ConfigError(
                    f"{self.name}: option {split} has the number {unplayable[0]}, which the server cannot begin; "
                    f"{playable[0]} to {playable[-1]} can be played"
                )
        check_apart(self._ids["train"], self._ids["test"], self.name)
        self._remote: RemoteEnvironment | None = None

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the AgentGym data files that list the instances of splits."""
        return tuple(value for split in ("train", "test") if names_file(value := str(options.get(split, ""))))

    def reach(self) -> None:
        """Wait until the server answers, and begin the instances of `probes` to check them.

        Raises `EnvironmentServerError` if it does not answer within `patience_s`, or if a probe
        begins otherwise than expected.
        """
        try:
            self._server.reach()
        except EnvironmentUnavailable as fault:
            raise EnvironmentServerError(f"{self.name}: {fault}; {self.start_hint()}") from fault
        for instance in self.probes():
            try:
                self.reset(instance)
            except EnvironmentFault as fault:
                # It is not known here whether a run needs this instance; if it does, its episode
                # raises the fault.
                _log.warning("%s could not be begun to see what the server has there: %s", instance.key, fault)

    def probes(self) -> Sequence[Instance]:
        """Return the instances that `reach` begins so that `check_first` checks them; by default
        none.
        """
        return ()

    def check_first(self, instance: Instance, first: str) -> None:
        """Raise `EnvironmentServerError` if the first observation of an instance is not the
        expected one; by default any is accepted.
        """
        return

    def published_ids(self) -> Mapping[str, Sequence[int]]:
        """Return the numbers of the published instances, by split; by default none."""
        return {}

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._ids)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split; an index is AgentGym's own number for the instance."""
        if split not in self._ids:
            raise ConfigError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits())}")
        return Instances(self.name, split, self._ids[split])

    def _begin(self, instance: Instance) -> str:
        wire = self.wire
        if self._remote is None or not self._is_open():
            self._remote = None
            allocation = self._server.spare()
            if allocation is None:
                answer = self._server.post("/create", wire.create_body(instance.index), patient=True)
                try:
                    env_id = self.wire.read_id(answer)
                except MalformedAnswer as error:
                    raise EnvironmentServerError(
                        f"this is not an AgentGym server of {self.name}: {self._server.url}/create: {error}"
                    ) from error
                # Refused connections during the create came before the id, so restarts are counted
                # only now.
                allocation = env_id, self._server.lend(env_id)
            self._remote = RemoteEnvironment(*allocation)
        first = self._ask("reset", wire.reset_body(self._remote.env_id, instance.index), wire.read_first)
        self._remote = self._remote._replace(started=True)
        self.check_first(instance, first)
        return first

    def _is_open(self) -> bool:
        return self._remote is not None and self._remote.restarts == self._server.restarts

    def _act(self, action: str) -> Turn:
        if self._remote is None:
            raise EnvironmentFault(f"{self.name}: there is no environment to act in")
        return self._ask("step", self.wire.step_body(self._remote.env_id, action), self.wire.read_step)

    def _ask(self, endpoint: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        answer = self._server.post(f"/{endpoint}", body)
        try:
            return read(answer)
        except MalformedAnswer as error:
            raise MalformedAnswer(f"{self._server.url}/{endpoint}: {error}") from None

    def _give_up(self, fault: EnvironmentFault) -> None:
        """Release an environment that must not be used again; its close is not sent if its id may
        by now be invalid or belong to another client.

        A server with few environments (`Wire.few`) makes no others: there, one that had begun
        before the fault is used again, after all others.
        """
        remote, self._remote = self._remote, None
        if self.wire.few and (remote is None or remote.started):
            if remote is not None:
                self._server.give_back(remote.env_id, remote.restarts, last=True)
            return
        self._server.distrust()
        if remote is None or not self._server.end(remote.env_id, remote.restarts):
            return
        unknown = isinstance(fault, EnvironmentRefusal) and any(words in str(fault) for words in _UNKNOWN_ID)
        if self.wire.closes and not unknown:
            self._server.close("/close", {self.wire.id_key: remote.env_id})

    def _release(self) -> None:
        remote, self._remote = self._remote, None
        if remote is None:
            return
        if not self.wire.closes:
            self._server.give_back(remote.env_id, remote.restarts)
        elif self._server.end(remote.env_id, remote.restarts):
            self._server.close("/close", {self.wire.id_key: remote.env_id})

    @property
    def url(self) -> str:
        """The address of the server, with the prefix of the world."""
        return self._server.url

    def start_hint(self) -> str:
        """Return a hint on how to start a server of this world."""
        return "AgentGym's repository says how to start one"
