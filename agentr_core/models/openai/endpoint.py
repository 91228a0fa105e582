"""The address of an OpenAI-compatible server, whether it can be used, and what its errors mean. No
error repeats the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
import time
from typing import Any

from agentr_core.errors import (
    AgentrError,
    ConfigError,
    EndpointError,
    MalformedReply,
    ModelFault,
    ModelUnavailable,
    RequestTooLong,
)
from agentr_core.models.connections import MIB, GarbledAnswer, LargeAnswer, reading_now
from agentr_core.models.openai.wire import read_models
from agentr_core.recipes.models import MASK, ServerConfig, references, url_fault
from agentr_core.system import seconds_told

_SHORTEST_SECRET = 4
_HEALING = (408, 409, 429)
_NO_CREDIT = "insufficient_quota"
_TOO_LONG = (400, 413, 422)
_CONTEXT_CODES = ("context_length_exceeded", "exceed_context_size_error")
_CONTEXT_WORDS = (
    "maximum context length",
    "context length exceeded",
    "model's context length",
    "exceeds the context",
    "exceeds the available context",
    "context window",
    "prompt is too long",
    "`max_new_tokens` must be <=",
)
_NO_LIST = (404, 405, 501)
_CHANGED_BY = {
    "seed": "server.send_seed: false leaves it out",
    "max_tokens": "server.max_tokens_field: max_completion_tokens is the other name",
}
"""What a recipe can do about a field that some servers refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An address with its key. Raises `EndpointError` for an address or a key that cannot be
    sent.
    """

    url: str
    key: str = field(repr=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values of the environment variables that `server.extra_body` refers to."""

    def __post_init__(self) -> None:
        if wrong := url_fault(self.url):
            raise EndpointError(f"model server: {wrong}")
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise EndpointError(
                f"the key for {self.url} has spaces, line ends or other characters no key has; export it again"
            )

    def options(self, server: ServerConfig) -> dict[str, Any]:
        """Return the arguments of an OpenAI client; its own retries are off."""
        from openai import Timeout

        timeout = Timeout(
            connect=server.connect_seconds, read=server.timeout_seconds, write=server.timeout_seconds, pool=None
        )
        # The client refuses an empty key; a server that wants none ignores what it gets.
        return {"base_url": self.url, "api_key": self.key or "none", "timeout": timeout, "max_retries": 0}

    def redacted(self, text: str) -> str:
        """Return a text without the key and the values of variables, in case a server repeated
        one.
        """
        # Shorter values are not secrets, and removing them would damage words.
        secrets = [value for value in (self.key, *self.variables.values()) if len(value) >= _SHORTEST_SECRET]
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text


def endpoint(server: ServerConfig, environment: Mapping[str, str]) -> Endpoint:
    """Return the endpoint of a recipe's server. Raises `EndpointError` when an environment variable
    that it needs is not set.
    """
    url = server.base_url or environment.get(server.base_url_env, "")
    if not url:
        raise EndpointError(
            f"model {server.model} has no address; set server.base_url in the recipe, or the environment variable "
            f"{server.base_url_env or 'that server.base_url_env names'}"
        )
    # The address is checked without the key first: it may hold a secret, which no error repeats.
    address = Endpoint(url=url.rstrip("/"), key="").url
    key = environment.get(server.api_key_env, "") if server.api_key_env else ""
    if server.api_key_env and not key:
        raise EndpointError(
            f"the environment variable {server.api_key_env} with the key for {address} is not set; export it, or "
            "set server.api_key_env to another variable, or to nothing if the server wants no key"
        )
    wanted = references(server.extra_body)
    if unset := [name for name in wanted if not environment.get(name)]:
        raise EndpointError(
            f"server.extra_body of model {server.model} refers to the environment variable {unset[0]}, which is not "
            "set; export it"
        )
    return Endpoint(url=address, key=key, variables={name: environment[name] for name in wanted})


def served_context_length(where: Endpoint, server: ServerConfig, configured: int) -> int:
    """Return the context length of a served model: the server's number, or `configured` if that is
    less. Blocks.

    The server is always asked which models it has; a server without such a list is assumed to have
    the model.

    Raises:
        EndpointError: the server has no such model, or refuses the key.
        ConfigError: the context length is neither configured nor given by the server.
        ModelUnavailable, MalformedReply, ModelFault: the server does not answer, or not as it
            should.
    """
    from openai import APIStatusError, DefaultHttpxClient, OpenAI, OpenAIError

    http = DefaultHttpxClient(event_hooks=reading_now(server.answer_mib * MIB))
    try:
        with OpenAI(**where.options(server), http_client=http) as client:
            served = read_models(client.get("/models", cast_to=bytes))
    except (OpenAIError, MalformedReply, LargeAnswer, GarbledAnswer) as error:
        if not (isinstance(error, APIStatusError) and error.status_code in _NO_LIST):
            raise fault_of(error, where, server) from None
        served = {server.model: None}
    if server.model not in served:
        raise EndpointError(
            f"{where.url} has no model {server.model!r}; it has {', '.join(sorted(served)) or 'none'}: set server.model"
        )
    lengths = [length for length in (configured, served[server.model]) if length]
    if not lengths:
        raise ConfigError(
            f"{where.url} does not say how long the context of {server.model} is; set context_length beside server"
        )
    return min(lengths)


def fault_of(error: Exception, where: Endpoint, server: ServerConfig) -> AgentrError:
    """Return our error for an error of the client; it is `Transient` exactly if the same request
    may succeed later.
    """
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(error, ModelFault):
        return type(error)(where.redacted(f"{where.url}: {error}"))
    if isinstance(error, TimeoutError | APITimeoutError):
        return ModelUnavailable(
            f"{where.url} did not answer in time; see whether it works, or raise server.timeout_seconds "
            f"({server.timeout_seconds:g}) or server.connect_seconds ({server.connect_seconds:g})"
        )
    if isinstance(error, APIStatusError):
        status = error.status_code
        said = where.redacted(" ".join(_said(error.body).split()))[:500] or "without a word"
        if error.code == _NO_CREDIT:
            return EndpointError(
                f"the account at {where.url} has no credit left: {said}; top it up, and resume the run"
            )
        if status in _HEALING or status >= 500:
            return ModelUnavailable(f"{where.url} answered {status}: {said}")
        if status in (401, 403):
            return EndpointError(
                f"{where.url} refuses the key in {server.api_key_env or 'the request (none was sent)'} ({status}); "
                "set server.api_key_env to the variable with the right one"
            )
        if status == 404:
            return EndpointError(
                f"{where.url} knows no model {server.model!r}, or is not such a server ({said}); correct server.model "
                "or the address, which usually ends with /v1"
            )
        # The list cannot be complete: a refusal in other words is a fault, which costs its episode
        # and ends no path.
        told = error.code in _CONTEXT_CODES or error.type in _CONTEXT_CODES
        if told or (status in _TOO_LONG and any(words in said.lower() for words in _CONTEXT_WORDS)):
            return RequestTooLong(f"{where.url} refuses a conversation and its reply together ({status}): {said}")
        remedy = next((f"; {way}" for name, way in _CHANGED_BY.items() if re.search(rf"\b{name}\b", said)), "")
        return ModelFault(f"{where.url} refused the request ({status}): {said}{remedy}")
    if isinstance(error, LargeAnswer):
        return ModelFault(f"{where.url} gives too large an answer: {error}; raise server.answer_mib")
    if isinstance(error, GarbledAnswer):
        return MalformedReply(f"{where.url} gives an answer that cannot be read: {error}")
    if isinstance(error, APIConnectionError):
        cause = where.redacted(" ".join(str(error.__cause__ or error).split()))
        return ModelUnavailable(f"{where.url} cannot be reached ({cause}); start the server, or correct its address")
    return ModelFault(where.redacted(f"{where.url}: {type(error).__name__}: {error}"))


def retry_after(error: Exception) -> float | None:
    """Return the seconds that a server asks us to wait before the next try, or None if it does not
    say.
    """
    from openai import APIStatusError

    if not isinstance(error, APIStatusError):
        return None
    return seconds_told(error.response.headers.get("retry-after", ""), now=time.time())


def _said(body: object) -> str:
    """Return what the body of an error says. The client's own message has it in OpenAI's form only,
    but many servers answer with a plain text, or have one under another name.
    """
    if isinstance(body, Mapping) and isinstance(body.get("message"), str):
        return str(body["message"])
    return body if isinstance(body, str) else "" if body is None else json.dumps(body, ensure_ascii=False)
