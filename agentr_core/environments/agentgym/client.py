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
from agentr_core.environments.agentgym.wire import WIRE_FORMATS, WireFormat, check_disjoint, names_file, read_ids
from agentr_core.environments.remote import RemoteWorld, StepOutcome
from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentUnavailable,
    MalformedAnswer,
)
from agentr_core.models.connections import MIB, GarbledAnswer, LargeAnswer, LateAnswer, sync_read_hooks
from agentr_core.replies import LabelStyle
from agentr_core.system import RetryPolicy, wait_before_retry
from agentr_core.types import Instance

# One AgentGym server as this process sees it: requests over shared connections, its errors
# translated into ours, and the ids of environments that are not in use (spare).

# An idle connection is closed before a Uvicorn server closes it (5 s): if the server closed it
# while a request was on its way, nobody would know whether the request was carried out.
_KEEPALIVE_SECONDS = 3
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
# Status codes that a proxy returns for a server that is absent or overloaded.
_UNAVAILABLE_STATUSES = (429, 502, 503, 504)
_WRONG_SERVER_STATUSES = (404, 405, 422)
_UNAUTHORIZED = 401


class _ThreadClient(threading.local):
    """A thread's own HTTP client, closed when the thread ends. A client that all threads share
    would close idle connections that another thread was just given: its request would fail, or wait
    for an answer that never comes.
    """

    def __init__(self, **settings: Any) -> None:
        self.http = httpx.Client(**settings)
        # A thread's attributes are deleted when it ends, which runs the finalizer; until then, the
        # finalizer keeps the client alive.
        self._thread = _ThreadLifetime()
        weakref.finalize(self._thread, self.http.close)


class _ThreadLifetime:
    """An object that lives as long as its thread."""


class Connection:
    """A connection to one world of a server. Several threads may use it at once.

    Args:
        url: the address of the server, including the prefix of the world's paths.
        timeout_s: seconds that the answer to a request may take, from the request to its last
            byte.
        answer_mib: the largest size of an answer, decompressed, in MiB.
        patience_s: seconds for which connecting is retried before the server counts as gone.
        description: what the server is, for error messages.
        token: the bearer token that the server wants; empty for none.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        patience_s: float,
        answer_mib: int = 16,
        description: str = "an AgentGym server of that world",
        token: str = "",
    ) -> None:
        self.url = url
        self._description = description
        self.num_restarts = 0
        """How often a connection was refused, which counts as a restart of the server: an older id
        may now be invalid, or belong to another client.
        """
        self._timeout = httpx.Timeout(timeout_s, connect=_CONNECT_SECONDS, pool=None)
        self._retry_policy = RetryPolicy(retries=10**6, seconds=patience_s)
        self._client = _ThreadClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=self._timeout,
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_SECONDS),
            verify=httpx.create_ssl_context(),
            event_hooks=sync_read_hooks(answer_mib * MIB),
        )
        self._spare_ids: list[int] = []
        self._ids_in_use: set[int] = set()
        self._is_responsive = True
        self._lock = threading.Lock()

    def post(self, path: str, body: dict[str, Any], *, retries_connecting: bool = False) -> Any:
        """Return the answer to a request, which is sent at most once.

        With `retries_connecting`, connecting is retried for `patience_s` seconds. That is only for
        requests without an id: once the server is back, an older id may belong to another client.

        Raises:
            EnvironmentUnavailable: no connection, no answer in time, or a proxy's answer that the
                server is absent or overloaded.
            EnvironmentRefusal: the server answered with an error, as a status or in the body.
            MalformedAnswer: the answer is not JSON.
            EnvironmentFault: the answer is too large.
            EnvironmentServerError: the server has no such path, or wants other fields or a token.
        """
        return self._call_server(lambda: self._post(path, body, self._timeout), retries_connecting=retries_connecting)

    def reach(self) -> None:
        """Wait until the server answers anything at all. Raises `EnvironmentUnavailable` if it does
        not within `patience_s`.
        """
        self._call_server(lambda: self._send("GET", "/", None, self._timeout), retries_connecting=True)

    def close(self, path: str, body: dict[str, Any]) -> None:
        """Ask the server to close an environment. A failure is only logged; a server that did not
        answer the last time is not asked.
        """
        if not self._is_responsive:
            return
        try:
            self._post(path, body, httpx.Timeout(_CLOSE_SECONDS))
        except (EnvironmentFault, EnvironmentServerError, httpx.ConnectError, httpx.ConnectTimeout) as error:
            # A refused connection costs nothing, and the server may be back for the next one.
            self._is_responsive = not isinstance(error, EnvironmentUnavailable | httpx.ConnectTimeout)
            if isinstance(error, httpx.ConnectError):
                self._count_restart()
            _log.warning("%s may keep the environment %s, since closing it failed: %s", self.url, body, error)

    def lend_new(self, env_id: int) -> int:
        """Record that an environment which the server just created is lent to the caller, until
        `take_back` or `make_spare`, and return the number of restarts so far.

        Raises `EnvironmentUnavailable` if it is lent already: two episodes would act in it.
        """
        with self._lock:
            if env_id in self._ids_in_use:
                raise EnvironmentUnavailable(
                    f"{self.url}/create gave environment {env_id}, in which another episode is under way; if it goes "
                    "on, lower scale.concurrency to the number of environments that the server holds"
                )
            # It may have been given back while the server was answering.
            self._spare_ids = [spare_id for spare_id in self._spare_ids if spare_id != env_id]
            self._ids_in_use.add(env_id)
            return self.num_restarts

    # Most servers never free an environment, so environments are reused: there are only as many as
    # episodes in flight.
    def lend_spare(self) -> tuple[int, int] | None:
        """Lend a spare environment to the caller. Return its id and the number of restarts so far;
        None if there is no spare one.
        """
        with self._lock:
            if not self._spare_ids:
                return None
            env_id = self._spare_ids.pop()
            self._ids_in_use.add(env_id)
            return env_id, self.num_restarts

    def take_back(self, env_id: int, num_restarts: int) -> bool:
        """Take back an environment that was lent after `num_restarts` restarts. Return False, and
        change nothing, if the server has restarted since, so that the environment is gone.
        """
        with self._lock:
            # After a restart, the id may be lent to another episode.
            if num_restarts != self.num_restarts:
                return False
            self._ids_in_use.discard(env_id)
            return True

    def make_spare(self, env_id: int, num_restarts: int, *, as_last: bool = False) -> None:
        """Make an environment that was lent after `num_restarts` restarts available again; with
        `as_last`, it is lent only if there is no other. Do nothing if the server has restarted
        since.
        """
        with self._lock:
            if num_restarts == self.num_restarts:
                self._ids_in_use.discard(env_id)
                self._spare_ids.insert(0 if as_last else len(self._spare_ids), env_id)

    def forget_spare(self) -> None:
        """Forget all spare environments: after a fault, they may be gone as well."""
        with self._lock:
            self._spare_ids.clear()

    def _count_restart(self) -> None:
        with self._lock:
            self.num_restarts += 1
            self._spare_ids.clear()
            self._ids_in_use.clear()

    def _call_server(self, request: Callable[[], T], *, retries_connecting: bool) -> T:
        """Return the result of `request`, retrying failed attempts to connect if
        `retries_connecting`. Raises `EnvironmentUnavailable` if no connection can be made.
        """
        start, failures = time.monotonic(), 0
        while True:
            try:
                return request()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failures += 1
                if isinstance(error, httpx.ConnectError):
                    self._count_restart()
                elapsed_s = time.monotonic() - start
                wait_s = wait_before_retry(
                    self._retry_policy,
                    num_failures=failures,
                    elapsed_seconds=elapsed_s,
                    random_fraction=random.random(),
                )
                if wait_s is None or not retries_connecting:
                    raise EnvironmentUnavailable(
                        f"{self.url} cannot be reached ({error}); start the server, or correct its address"
                    ) from error
                time.sleep(wait_s)

    def _post(self, path: str, body: dict[str, Any], timeout: httpx.Timeout) -> Any:
        url, response = f"{self.url}{path}", self._send("POST", path, body, timeout)
        status = response.status_code
        detail = " ".join(response.text.split())[:300] or "without a word"
        if status in _UNAVAILABLE_STATUSES:
            raise EnvironmentUnavailable(f"{url} answered {status}: {detail}")
        if status == _UNAUTHORIZED:
            raise EnvironmentServerError(f"{url} answered {status} ({detail}): set its token")
        if status in _WRONG_SERVER_STATUSES:
            raise EnvironmentServerError(
                f"{url} answered {status} ({detail}): this is not {self._description}; correct the address"
            )
        if status != httpx.codes.OK:
            raise EnvironmentRefusal(f"{url} answered {status}: {detail}")
        try:
            answer = response.json()
        except ValueError as error:
            raise MalformedAnswer(f"{url} did not answer with JSON: {detail}") from error
        if isinstance(answer, dict) and "error" in answer:
            raise EnvironmentRefusal(f"{url} answered: {answer['error']}")
        return answer

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: httpx.Timeout) -> httpx.Response:
        url = f"{self.url}{path}"
        try:
            deadline = time.monotonic() + (timeout.read or 0)
            response = self._client.http.request(
                method, path, json=body, timeout=timeout, extensions={"until": deadline}
            )
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
        self._is_responsive = True
        return response


@cache
def shared_connection(
    url: str,
    timeout_s: float,
    patience_s: float,
    answer_mib: int = 16,
    description: str = "an AgentGym server of that world",
    token: str = "",
) -> Connection:
    """Return this process's only connection with these settings. It outlives environments, since it
    holds the spare ids.
    """
    return Connection(
        url, timeout_s=timeout_s, patience_s=patience_s, answer_mib=answer_mib, description=description, token=token
    )


T = TypeVar("T")
_log = logging.getLogger(__name__)

# How the servers report an id that they do not know, or no longer know.
_UNKNOWN_ID_PHRASES = ("is not valid", "has been deleted")


class RemoteEnvironment(NamedTuple):
    """An environment on the server, lent to us until the server is seen to restart. `has_started`
    says whether it has answered a reset.
    """

    env_id: int
    num_restarts: int
    has_started: bool = False


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

    wire: ClassVar[WireFormat]
    playable_ids: ClassVar[range | None] = None
    """The numbers of the instances that the server can begin; None if any number may exist."""
    labels: LabelStyle | None = None

    def __init_subclass__(cls, *, world: str = "") -> None:
        super().__init_subclass__()
        if world:
            cls.name = f"agentgym-{world}"
            cls.wire = WIRE_FORMATS[world]
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
        self._server = shared_connection(
            url.rstrip("/") + self.wire.prefix, float(timeout_s), float(patience_s), answer_mib
        )
        self._ids_by_split: dict[str, Sequence[int]] = {"train": (), "test": ()} | dict(self.published_ids())
        self._ids_by_split |= {
            split: read_ids(value, f"{self.name}: option {split}")
            for split, value in (("train", train), ("test", test))
            if value
        }
        if not any(self._ids_by_split.values()):
            raise ConfigError(
                f"{self.name} needs the options train and test: instances such as 0-99,120, or a data file of AgentGym"
            )
        playable_ids = self.playable_ids
        for split, ids in self._ids_by_split.items():
            if playable_ids is not None and (
                unplayable_ids := [number for number in ids if number not in playable_ids]
            ):
                raise ConfigError(
                    f"{self.name}: option {split} has the number {unplayable_ids[0]}, which the server cannot begin; "
                    f"{playable_ids[0]} to {playable_ids[-1]} can be played"
                )
        check_disjoint(self._ids_by_split["train"], self._ids_by_split["test"], self.name)
        self._remote_environment: RemoteEnvironment | None = None

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
        """Return the instances that `reach` begins so that `check_first_observation` checks them;
        by default none.
        """
        return ()

    def check_first_observation(self, instance: Instance, first_observation: str) -> None:
        """Raise `EnvironmentServerError` if the first observation of an instance is not the
        expected one; by default any is accepted.
        """
        return

    def published_ids(self) -> Mapping[str, Sequence[int]]:
        """Return the numbers of the published instances, by split; by default none."""
        return {}

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._ids_by_split)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split; an index is AgentGym's own number for the instance."""
        if split not in self._ids_by_split:
            raise ConfigError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits())}")
        return Instances(self.name, split, self._ids_by_split[split])

    def _begin(self, instance: Instance) -> str:
        wire = self.wire
        if self._remote_environment is None or not self._is_open():
            self._remote_environment = None
            id_and_num_restarts = self._server.lend_spare()
            if id_and_num_restarts is None:
                answer = self._server.post("/create", wire.create_body(instance.index), retries_connecting=True)
                try:
                    env_id = self.wire.read_id(answer)
                except MalformedAnswer as error:
                    raise EnvironmentServerError(
                        f"this is not an AgentGym server of {self.name}: {self._server.url}/create: {error}"
                    ) from error
                # Refused connections during the create came before the id, so restarts are counted
                # only now.
                id_and_num_restarts = env_id, self._server.lend_new(env_id)
            self._remote_environment = RemoteEnvironment(*id_and_num_restarts)
        first_observation = self._request(
            "reset", wire.reset_body(self._remote_environment.env_id, instance.index), wire.read_first_observation
        )
        self._remote_environment = self._remote_environment._replace(has_started=True)
        self.check_first_observation(instance, first_observation)
        return first_observation

    def _is_open(self) -> bool:
        return (
            self._remote_environment is not None and self._remote_environment.num_restarts == self._server.num_restarts
        )

    def _act(self, action: str) -> StepOutcome:
        if self._remote_environment is None:
            raise EnvironmentFault(f"{self.name}: there is no environment to act in")
        return self._request("step", self.wire.step_body(self._remote_environment.env_id, action), self.wire.read_step)

    def _request(self, endpoint: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        answer = self._server.post(f"/{endpoint}", body)
        try:
            return read(answer)
        except MalformedAnswer as error:
            raise MalformedAnswer(f"{self._server.url}/{endpoint}: {error}") from None

    def _give_up(self, fault: EnvironmentFault) -> None:
        """Release an environment that must not be used again; its close is not sent if its id may
        by now be invalid or belong to another client.

        A server with few environments (`WireFormat.has_few_environments`) makes no others: there,
        one that had begun before the fault is used again, after all others.
        """
        environment, self._remote_environment = self._remote_environment, None
        if self.wire.has_few_environments and (environment is None or environment.has_started):
            if environment is not None:
                self._server.make_spare(environment.env_id, environment.num_restarts, as_last=True)
            return
        self._server.forget_spare()
        if environment is None or not self._server.take_back(environment.env_id, environment.num_restarts):
            return
        is_unknown_id = isinstance(fault, EnvironmentRefusal) and any(
            phrase in str(fault) for phrase in _UNKNOWN_ID_PHRASES
        )
        if self.wire.has_close and not is_unknown_id:
            self._server.close("/close", {self.wire.id_key: environment.env_id})

    def _release(self) -> None:
        environment, self._remote_environment = self._remote_environment, None
        if environment is None:
            return
        if not self.wire.has_close:
            self._server.make_spare(environment.env_id, environment.num_restarts)
        elif self._server.take_back(environment.env_id, environment.num_restarts):
            self._server.close("/close", {self.wire.id_key: environment.env_id})

    @property
    def url(self) -> str:
        """The address of the server, with the prefix of the world."""
        return self._server.url

    def start_hint(self) -> str:
        """Return a hint on how to start a server of this world."""
        return "AgentGym's repository says how to start one"
