"""One AgentGym server as this process sees it: requests over shared connections, its errors as
ours, spare ids.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import httpx

from agentr_core.errors import (
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentUnavailable,
    MalformedAnswer,
)
from agentr_core.models.connections import MIB, GarbledAnswer, LargeAnswer, LateAnswer, reading_now
from agentr_core.retrying import RetryPolicy, wait_before_retry

T = TypeVar("T")
_log = logging.getLogger(__name__)

# An idle connection is closed before a Uvicorn server closes it (5 s): if the server closed it
# while a request was on its way, nobody would know whether the request was carried out.
_KEPT_SECONDS = 3
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
# Status codes that a proxy gives for a server that is absent or overloaded.
_UNAVAILABLE = (429, 502, 503, 504)
_WRONG_SERVER = (404, 405, 422)
_LOCKED = 401


class _Client(threading.local):
    """A thread's own HTTP client, closed when the thread ends. One client for all threads would
    close idle connections that another thread has just been given: its request would fail, or wait
    for an answer that never comes.
    """

    def __init__(self, **settings: Any) -> None:
        self.http = httpx.Client(**settings)
        # This thread's attributes go when it ends, which runs the finalizer; until then, the
        # finalizer keeps the client alive.
        self._thread = _Thread()
        weakref.finalize(self._thread, self.http.close)


class _Thread:
    """An object that lives as long as its thread."""


class Connection:
    """A connection to one world of a server, at an address with the prefix of its paths. Several
    threads may use it at once.

    Args:
        timeout_s: seconds that the answer to a request may take, from the request to its last
            byte.
        answer_mib: the most MiB of an answer, unpacked.
        patience_s: seconds for which connecting is retried before the server counts as gone.
        kind: what the server is, for error messages.
        token: what the server asks for, if it does.
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
        """How often a connection was refused: an id from before may now be invalid, or another
        client's.
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
        self._lent: set[int] = set()
        self._responsive = True
        self._lock = threading.Lock()

    def post(self, path: str, body: dict[str, Any], *, patient: bool = False) -> Any:
        """Return the answer to a request, which is sent at most once.

        With `patient`, connecting is retried until `patience_s` have passed. That is for requests
        without an id: when the server is back, an id from before may be another client's.

        Raises:
            EnvironmentUnavailable: no connection, no answer, or an answer on behalf of a server
                that is not there.
            EnvironmentRefusal: the server answered with an error, in either style.
            MalformedAnswer: the answer is not JSON.
            EnvironmentServerError: the server has no such path, or wants other fields.
        """
        return self._connected(lambda: self._post(path, body, self._timeout), patient=patient)

    def reach(self) -> None:
        """Return once the server answers anything at all. Raises `EnvironmentUnavailable` after
        `patience_s`.
        """
        self._connected(lambda: self._send("GET", "/", None, self._timeout), patient=True)

    def close(self, path: str, body: dict[str, Any]) -> None:
        """Ask the server to close an environment; a failure is logged, and a server that hung is
        not asked again.
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
        """Return the number of restarts so far, with an environment that the server just created
        lent to the caller, until `end` or `give_back`.

        Raises `EnvironmentUnavailable` when it is lent already: two episodes would act in it.
        """
        with self._lock:
            if env_id in self._lent:
                raise EnvironmentUnavailable(
                    f"{self.url}/create gave environment {env_id}, in which another episode is under way; if it goes "
                    "on, lower scale.concurrency to the number of environments that the server holds"
                )
            # It may have been given back while the server answered with it.
            self._spare = [spare for spare in self._spare if spare != env_id]
            self._lent.add(env_id)
            return self.restarts

    def spare(self) -> tuple[int, int] | None:
        """Return the id of an environment that was given back, which is then lent to the caller,
        and the number of restarts so far; None if there is none.
        """
        with self._lock:
            if not self._spare:
                return None
            env_id = self._spare.pop()
            self._lent.add(env_id)
            return env_id, self.restarts

    def end(self, env_id: int, restarts: int) -> bool:
        """Return whether an environment, lent after so many restarts, is still on the server; it is
        no longer lent.
        """
        with self._lock:
            # After a restart, the id may be lent to another episode.
            if restarts != self.restarts:
                return False
            self._lent.discard(env_id)
            return True

    def give_back(self, env_id: int, restarts: int, *, last: bool = False) -> None:
        """Keep an environment, lent after so many restarts, for the next caller that needs one; if
        `last`, only once there is no other.
        """
        with self._lock:
            if restarts == self.restarts:
                self._lent.discard(env_id)
                self._spare.insert(0 if last else len(self._spare), env_id)

    def distrust(self) -> None:
        """Forget the environments that were given back: after a fault, they may be gone as well."""
        with self._lock:
            self._spare.clear()

    def _count_restart(self) -> None:
        with self._lock:
            self.restarts += 1
            self._spare.clear()
            self._lent.clear()

    def _connected(self, send: Callable[[], T], *, patient: bool) -> T:
        """Return the result of `send`, once a connection for it is made."""
        began, failures = time.monotonic(), 0
        while True:
            try:
                return send()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failures += 1
                if isinstance(error, httpx.ConnectError):
                    self._count_restart()
                elapsed = time.monotonic() - began
                wait = wait_before_retry(self._patience, failures=failures, elapsed=elapsed, uniform=random.random())
                if wait is None or not patient:
                    raise EnvironmentUnavailable(
                        f"{self.url} cannot be reached ({error}); start the server, or correct its address"
                    ) from error
                time.sleep(wait)

    def _post(self, path: str, body: dict[str, Any], timeout: httpx.Timeout) -> Any:
        return _read(f"{self.url}{path}", self._send("POST", path, body, timeout), self._kind)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: httpx.Timeout) -> httpx.Response:
        where = f"{self.url}{path}"
        try:
            until = time.monotonic() + (timeout.read or 0)
            response = self._client.http.request(method, path, json=body, timeout=timeout, extensions={"until": until})
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except LargeAnswer as error:
            raise EnvironmentFault(
                f"{where} gives too large an answer: {error}; raise environment.options.answer_mib"
            ) from error
        except GarbledAnswer as error:
            raise MalformedAnswer(f"{where} gives an answer that cannot be read: {error}") from error
        except (httpx.TimeoutException, LateAnswer) as error:
            raise EnvironmentUnavailable(
                f"{where} gave no answer within {timeout.read:g} s; see whether the server works, or raise timeout_s"
            ) from error
        except httpx.HTTPError as error:
            raise EnvironmentUnavailable(f"{where} broke the connection ({error or type(error).__name__})") from error
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
    """Return the one connection of this process to a server; it outlives environments, since it
    holds the spare ids.
    """
    return Connection(url, timeout_s=timeout_s, patience_s=patience_s, answer_mib=answer_mib, kind=kind, token=token)


def _read(where: str, response: httpx.Response, kind: str) -> Any:
    status = response.status_code
    said = " ".join(response.text.split())[:300] or "without a word"
    if status in _UNAVAILABLE:
        raise EnvironmentUnavailable(f"{where} answered {status}: {said}")
    if status == _LOCKED:
        raise EnvironmentServerError(f"{where} answered {status} ({said}): set its token")
    if status in _WRONG_SERVER:
        raise EnvironmentServerError(f"{where} answered {status} ({said}): this is not {kind}; correct the address")
    if status != httpx.codes.OK:
        raise EnvironmentRefusal(f"{where} answered {status}: {said}")
    try:
        answer = response.json()
    except ValueError as error:
        raise MalformedAnswer(f"{where} did not answer with JSON: {said}") from error
    if isinstance(answer, dict) and "error" in answer:
        raise EnvironmentRefusal(f"{where} answered: {answer['error']}")
    return answer
