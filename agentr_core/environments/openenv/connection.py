"""OpenEnv's protocol on the client's side: a server, and one WebSocket for each episode on it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from agentr_core.episodes.transcript import Tool
from agentr_core.errors import EnvironmentServerError, EnvironmentUnavailable, IllTypedAnswer, MalformedAnswer
from agentr_core.system import LOOPBACK, RetryPolicy, wait_before_retry
from agentr_core.texts import abbreviate

_RETRY_STATUSES = (429, 502, 503, 504)
_NO_TASK_API_STATUSES = (404, 405, 501)
_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 1.0


class Session:
    """One WebSocket, which occupies one place on the server. It is closed after one episode, since
    a second reset in the same place may continue where the first one ended.
    """

    def __init__(self, url: str, socket: ClientConnection, timeout_s: float, answer_mib: int) -> None:
        self._url = url
        self._socket = socket
        self._timeout_s = timeout_s
        self._answer_mib = answer_mib

    def ask(self, message_type: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Send a message and return the answer: an error, or what was asked for. After an exception
        the session must not be used again: a late answer would be taken for the next one.

        Raises `EnvironmentUnavailable` if the connection breaks or there is no answer in time,
        `IllTypedAnswer` if the answer is too large, and `MalformedAnswer`.
        """
        message = {"type": message_type} if data is None else {"type": message_type, "data": data}
        try:
            # A full server sends a message before it closes, which can still be read.
            with suppress(ConnectionClosed):
                self._socket.send(json.dumps(message))
            text = self._socket.recv(timeout=self._timeout_s)
        except TimeoutError as error:
            raise EnvironmentUnavailable(
                f"{self._url} gave no answer within {self._timeout_s:g} s; see whether the server works, or raise "
                "timeout_s"
            ) from error
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == 1009:
                raise IllTypedAnswer(
                    f"{self._url} gives an answer of more than {self._answer_mib} MiB; raise "
                    "environment.options.answer_mib"
                ) from error
            raise EnvironmentUnavailable(f"{self._url} broke the connection ({error})") from error
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MalformedAnswer(f"{self._url} did not answer with JSON: {abbreviate(text)}") from error
        expected_type = "observation" if message_type in ("reset", "step") else message_type
        if (
            not isinstance(answer, dict)
            or answer.get("type") not in ("error", expected_type)
            or not isinstance(answer.get("data"), dict)
        ):
            raise MalformedAnswer(f"{self._url}: a {message_type} was answered with {abbreviate(answer)}")
        return answer

    def close(self) -> None:
        """Close the WebSocket, which frees the place. Never raises."""
        self._socket.close()


class Server:
    """One OpenEnv server as this process sees it.

    Args:
        timeout_s: seconds that an answer may take.
        patience_s: seconds for which an absent or full server is tried again.
        answer_mib: the largest size of an answer, in MiB.
    """

    def __init__(self, url: str, timeout_s: float, patience_s: float, answer_mib: int) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._retry_policy = RetryPolicy(retries=10**6, seconds=patience_s)
        self._answer_mib = answer_mib

    def open_session(
        self, message_type: str, data: Mapping[str, Any] | None = None
    ) -> tuple[Session, Mapping[str, Any]]:
        """Open a session and return it with the answer to its first message. While the server
        cannot be reached or has no free place, this is tried again for `patience_s` seconds. Raises
        `EnvironmentUnavailable` after that, and as `Session.ask`.
        """

        def attempt() -> tuple[Session, Mapping[str, Any]]:
            session = self._connect()
            try:
                answer = session.ask(message_type, data)
                error = answer["data"] if answer["type"] == "error" else {}
                if error.get("code") == "CAPACITY_REACHED":
                    raise _TemporaryError(
                        f"{self.url} has no place free ({error.get('message')}); lower scale.concurrency to the number "
                        "of its places, or have it started with more (max_concurrent_envs)"
                    )
                return session, answer
            except BaseException:
                session.close()
                raise

        session_and_answer: tuple[Session, Mapping[str, Any]] = self._retry(attempt)
        return session_and_answer

    def _connect(self) -> Session:
        parts = urlsplit(self.url)
        url = f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path}/ws"
        try:
            socket = connect(
                url,
                open_timeout=_CONNECT_SECONDS,
                close_timeout=_CLOSE_SECONDS,
                # A server whose step blocks its event loop answers no pings; `timeout_s` is the
                # limit.
                ping_interval=None,
                compression=None,
                max_size=self._answer_mib * 2**20,
                proxy=None if parts.hostname in LOOPBACK else True,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status in _RETRY_STATUSES:
                raise _TemporaryError(f"{url} answered {status}") from error
            raise EnvironmentServerError(
                f"{url} answered {status}: this is no OpenEnv server; correct the address"
            ) from error
        # A server that dies during the handshake closes a connection that was never open.
        except (OSError, InvalidHandshake, ConnectionClosed, EOFError) as error:
            raise self._unreachable_error(error) from error
        return Session(url, socket, self._timeout_s, self._answer_mib)

    def _unreachable_error(self, error: Exception) -> _TemporaryError:
        reason = str(error) or type(error).__name__
        return _TemporaryError(f"{self.url} cannot be reached ({reason}); start the server, or correct its address")

    def _retry(self, attempt: Callable[[], Any]) -> Any:
        start, failures = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except _TemporaryError:
                failures += 1
                elapsed_s = time.monotonic() - start
                # The wait is at most half a second before the second try, and four seconds from the
                # fifth try on, since a place may become free at any moment.
                wait_s = wait_before_retry(
                    self._retry_policy,
                    num_failures=min(failures, 4),
                    elapsed_seconds=elapsed_s,
                    random_fraction=random.random(),
                )
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    def _request_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer to a request that changes nothing; None if the server has no such
        path.
        """
        url = f"{self.url}{path}"

        def attempt() -> httpx.Response:
            try:
                return httpx.request(method, url, json=body, timeout=self._timeout_s)
            except httpx.HTTPError as error:
                raise self._unreachable_error(error) from error

        response: httpx.Response = self._retry(attempt)
        if response.status_code in _NO_TASK_API_STATUSES:
            return None
        try:
            return response.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError) as error:
            raise EnvironmentServerError(
                f"{url} answered {response.status_code} and {abbreviate(response.text)}; correct the server"
            ) from error

    @property
    def takes_tool_calls(self) -> bool:
        """Whether the server's actions are calls of tools."""
        return self.action_schema.get("title") == "CallToolAction"

    @cached_property
    def action_schema(self) -> Mapping[str, Any]:
        """The JSON schema of an action."""
        schema = self._request_json("GET", "/schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
            raise EnvironmentServerError(f"{self.url}/schema has no schema of actions: this is no OpenEnv server")
        action: Mapping[str, Any] = schema["action"]
        return action

    @cached_property
    def task_splits(self) -> Mapping[str, tuple[str, int]]:
        """The type and size of each split of the Task API, by its name; empty if the server has no
        Task API.
        """
        environment_names = self._request_json("GET", "/list_environments")
        splits = (
            self._request_json("GET", f"/{environment_names[0]}/splits")
            if environment_names and isinstance(environment_names, list)
            else None
        )
        try:
            return {
                split["name"]: (
                    str(split.get("type")),
                    int(
                        self._request_json("POST", f"/{environment_names[0]}/num_tasks", {"split": split["name"]})[
                            "num_tasks"
                        ]
                    ),
                )
                for split in splits or ()
            }
        except (TypeError, KeyError, ValueError) as error:
            raise EnvironmentServerError(
                f"{self.url} lists no splits that can be read: {abbreviate(splits)}"
            ) from error

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that a model may call; if the server has none, a single tool `act` that takes
        the fields of an action. The server is asked when they are first used.

        Raises `EnvironmentServerError` if the list cannot be read, and what `open_session` raises.
        """
        if not self.takes_tool_calls:
            field_schemas = {
                name: schema for name, schema in properties(self.action_schema).items() if name != "metadata"
            }
            schema = {**self.action_schema, "properties": field_schemas}
            return (ServerTool(name="act", description="Do one thing in the world.", arguments=(), schema=schema),)
        session, answer = self.open_session("step", {"type": "list_tools"})
        session.close()
        observation = answer["data"].get("observation", {})
        try:
            return tuple(
                ServerTool(
                    name=tool["name"],
                    description=tool.get("description") or "",
                    arguments=(),
                    schema=tool.get("input_schema") or {"type": "object", "properties": {}},
                )
                for tool in observation["tools"]
            )
        except (TypeError, KeyError) as error:
            raise EnvironmentServerError(f"{self.url} lists no tools that can be read: {abbreviate(answer)}") from error


class _TemporaryError(EnvironmentUnavailable):
    """The server is absent or full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool(Tool):
    """A tool whose arguments are described by its JSON schema."""

    schema: Mapping[str, Any]

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as a function definition of OpenAI's protocol and chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}


@cache
def shared_server(url: str, timeout_s: float, patience_s: float, answer_mib: int) -> Server:
    """Return this process's only server with these settings, so that its schema and tasks are
    fetched once.
    """
    return Server(url, timeout_s, patience_s, answer_mib)


def properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the schemas of the fields of a JSON schema, by field."""
    return schema.get("properties") or {}
