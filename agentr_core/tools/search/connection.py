"""Requests to search servers, retried while an error may be temporary."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import time
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import httpx2

from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    MalformedAnswer,
    Transient,
)
from agentr_core.models.connections import MIB, GarbledAnswer, LargeAnswer, limits, reading
from agentr_core.recipes.models import url_fault
from agentr_core.recipes.secret_values import MASK
from agentr_core.retrying import RetryPolicy, seconds_told, wait_before_retry
from agentr_core.threads import LoopThread

_log = logging.getLogger(__name__)
_CONNECT_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 4.0
"""Less than the five seconds after which Python servers close an idle connection."""
_MOST_CONNECTIONS: Final = 256
_HEALING: Final = (408, 429)
_REFUSED_KEY: Final = (401, 403)
_UNPAID: Final = 402
_NO_CREDIT: Final = re.compile(r"\b(?:credits?|quota)\b", re.IGNORECASE)
_NO_SUCH_SERVER: Final = (404, 405, 422)


class Connection:
    """A connection to a server that takes and returns JSON. Searches change nothing, so each may be
    sent again. Threads share it.

    Args:
        url: the server's address, without the paths.
        secret: a text sent in `headers`; no error repeats it.
        timeout_s: the most seconds that an answer may take, from the request to its last byte.
        answer_mib: the most MiB of an answer, unpacked.

    Raises `ConfigError` for an invalid address, or a secret that cannot be sent.
    """

    def __init__(
        self,
        url: str,
        *,
        policy: RetryPolicy,
        timeout_s: float,
        answer_mib: int = 16,
        headers: Mapping[str, str] | None = None,
        secret: str = "",
    ) -> None:
        if fault := url_fault(url, example="http://127.0.0.1:1243"):
            raise ConfigError(f"search server: {fault}")
        if not secret.isascii() or not secret.isprintable() or " " in secret:
            raise ConfigError(
                f"the key for {url} has spaces, line ends or other characters no key has; export it again"
            )
        self.url = url.rstrip("/")
        self._secret = secret
        self._policy = policy
        self._timeout_s = timeout_s
        # Asynchronous: a limit of a client that blocks is for each part of an answer.
        self._loop = _loop()
        self._client = httpx2.AsyncClient(
            headers=dict(headers or {}),
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            limits=limits(_MOST_CONNECTIONS, idle_seconds=_IDLE_SECONDS),
            event_hooks=reading(answer_mib * MIB),
        )
        weakref.finalize(self, _close, self._client, self._loop, os.getpid()).atexit = False

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request.

        Raises:
            EnvironmentTimeout: no answer came in time in the last of several tries.
            EnvironmentUnavailable: the server cannot be reached, or is overloaded.
            MalformedAnswer: the answer is not JSON, or cannot be unpacked.
            EnvironmentFault: the answer is larger than allowed.
            EnvironmentRefusal: the server refuses the request.
            EnvironmentServerError: the server refuses the key, its account has no credit left, or
                the server has no such path.
        """
        return self._patiently("POST", path, body)

    def get(self, path: str) -> Any:
        """Return the answer to a request without a body. Raises as `post`."""
        return self._patiently("GET", path, None)

    def _patiently(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        began, failures = time.monotonic(), 0
        while True:
            told: float | None = None
            try:
                response = self._send(method, path, body)
                told = seconds_told(response.headers.get("retry-after", ""), now=time.time())
                return self._read(path, response)
            except EnvironmentFault as error:
                failures += 1
                elapsed, uniform = time.monotonic() - began, random.random()
                wait = wait_before_retry(
                    self._policy, failures=failures, elapsed=elapsed, uniform=uniform, retry_after=told
                )
                if wait is None or not isinstance(error, Transient):
                    raise
                _log.info("%s; try %d follows in %.1f s", error, failures + 1, wait)
                time.sleep(wait)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        where = f"{self.url}{path}"
        try:
            return self._loop.run(self._answer(method, where, body))
        except LargeAnswer as error:
            raise EnvironmentFault(
                f"{where} gives too large an answer: {error}; raise environment.options.search_answer_mib"
            ) from None
        except GarbledAnswer as error:
            raise MalformedAnswer(f"{where} gives an answer that cannot be read: {error}") from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise EnvironmentUnavailable(
                f"{where} cannot be reached ({self._redacted(error)}); start the server, or correct its address"
            ) from None
        except (httpx2.TimeoutException, TimeoutError):
            raise EnvironmentTimeout(f"{where} gave no answer within {self._timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise EnvironmentUnavailable(f"{where} broke the connection ({self._redacted(error)})") from None

    async def _answer(self, method: str, where: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        async with asyncio.timeout(self._timeout_s):
            return await self._client.request(method, where, json=body)

    def _read(self, path: str, response: httpx2.Response) -> Any:
        where, status = f"{self.url}{path}", response.status_code
        said = self._redacted(" ".join(response.text.split()))[:300] or "without a word"
        if status in _HEALING or status >= 500:
            raise EnvironmentUnavailable(f"{where} answered {status}: {said}")
        if status in _REFUSED_KEY:
            raise EnvironmentServerError(f"{where} refuses the key ({status}: {said}); export the right one")
        # Some services answer 400 when an account is empty, as they do to an odd query.
        if status == _UNPAID or (status == 400 and self._secret and _NO_CREDIT.search(said)):
            raise EnvironmentServerError(
                f"the account at {where} has no credit left ({status}: {said}); pay for more, or export the key of "
                "another one"
            )
        if status in _NO_SUCH_SERVER:
            raise EnvironmentServerError(
                f"{where} is not a search server of this kind ({status}: {said}); correct the address"
            )
        if status != 200:
            raise EnvironmentRefusal(f"{where} answered {status}: {said}")
        try:
            return response.json()
        except ValueError:
            raise MalformedAnswer(f"{where} did not answer with JSON: {said}") from None

    def _redacted(self, words: object) -> str:
        text = str(words) or type(words).__name__
        return text.replace(self._secret, MASK) if self._secret else text


@cache
def _loop() -> LoopThread:
    """Return the thread of this process in which requests are sent."""
    return LoopThread()


# A forked process has no thread of its parent.
os.register_at_fork(after_in_child=_loop.cache_clear)


def _close(client: httpx2.AsyncClient, loop: LoopThread, process: int) -> None:
    """Close a client that nobody has any longer, without waiting for it."""
    if os.getpid() == process:
        loop.start(client.aclose())
