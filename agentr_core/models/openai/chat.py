"""A chat model behind any OpenAI-compatible server, through the official client."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentr_core.errors import (
    AgentrError,
    ConfigError,
    EndpointError,
    MalformedReply,
    ModelFault,
    ModelUnavailable,
    PromptTooLong,
    RequestTooLong,
    Transient,
)
from agentr_core.fingerprint import fingerprint
from agentr_core.models.batching import gather_or_cancel
from agentr_core.models.connections import (
    MIB,
    GarbledAnswer,
    LargeAnswer,
    allow_connections,
    async_read_hooks,
    connection_limits,
    sync_read_hooks,
)
from agentr_core.models.openai.wire import read_completion, read_models, read_prompt_tokens, request_bodies
from agentr_core.recipes.models import MASK, ServerConfig, fill_references, references, url_fault
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.system import RetryPolicy, retry_after_seconds, wait_before_retry
from agentr_core.types import Generation, Message, Request, Sampling, Span, grown_turn

# The address of an OpenAI-compatible server, whether it can be used, and what its errors mean. No
# error repeats the key.

_MIN_SECRET_CHARS = 4
_TRANSIENT_STATUSES = (408, 409, 429)
_NO_CREDIT_CODE = "insufficient_quota"
_TOO_LONG_STATUSES = (400, 413, 422)
_CONTEXT_CODES = ("context_length_exceeded", "exceed_context_size_error")
_CONTEXT_PHRASES = (
    "maximum context length",
    "context length exceeded",
    "model's context length",
    "exceeds the context",
    "exceeds the available context",
    "context window",
    "prompt is too long",
    "`max_new_tokens` must be <=",
)
_NO_MODEL_LIST_STATUSES = (404, 405, 501)
_REMEDIES_BY_FIELD = {
    "seed": "server.send_seed: false leaves it out",
    "max_tokens": "server.max_tokens_field: max_completion_tokens is the other name",
}
"""What a recipe can do about a field that some servers refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of a server, and its key. Creating one raises `EndpointError` for an address or a
    key that cannot be sent.
    """

    url: str
    key: str = field(repr=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values of the environment variables that `server.extra_body` refers to."""

    def __post_init__(self) -> None:
        if fault := url_fault(self.url):
            raise EndpointError(f"model server: {fault}")
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise EndpointError(
                f"the key for {self.url} has spaces, line ends or other characters no key has; export it again"
            )

    def client_options(self, server: ServerConfig) -> dict[str, Any]:
        """Return the keyword arguments of an OpenAI client; its own retries are off."""
        from openai import Timeout

        timeout = Timeout(
            connect=server.connect_seconds, read=server.timeout_seconds, write=server.timeout_seconds, pool=None
        )
        # The client refuses an empty key; a server that wants none ignores what it gets.
        return {"base_url": self.url, "api_key": self.key or "none", "timeout": timeout, "max_retries": 0}

    def redact(self, text: str) -> str:
        """Return a text with the key and the values of variables masked, in case a server repeated
        one.
        """
        # Shorter values are not secrets, and removing them would damage words.
        secrets = [value for value in (self.key, *self.variables.values()) if len(value) >= _MIN_SECRET_CHARS]
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text


def make_endpoint(server: ServerConfig, environment: Mapping[str, str]) -> Endpoint:
    """Return the endpoint of a recipe's server. Raises `EndpointError` if the address, the key or
    another environment variable that it needs is missing, or the address or key is invalid.
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
    names = references(server.extra_body)
    if unset_names := [name for name in names if not environment.get(name)]:
        raise EndpointError(
            f"server.extra_body of model {server.model} refers to the environment variable {unset_names[0]}, which is "
            "not set; export it"
        )
    return Endpoint(url=address, key=key, variables={name: environment[name] for name in names})


def served_context_length(endpoint: Endpoint, server: ServerConfig, configured_length: int) -> int:
    """Return the context length of a served model: the server's number or `configured_length` (0:
    not configured), whichever is less. Waits for the server.

    The server is always asked which models it has; a server without such a list is assumed to have
    the model.

    Raises:
        EndpointError: the server has no such model, or refuses the key.
        ConfigError: the context length is neither configured nor given by the server.
        ModelUnavailable, MalformedReply, ModelFault: the server does not answer, or not as it
            should.
    """
    from openai import APIStatusError, DefaultHttpxClient, OpenAI, OpenAIError

    http_client = DefaultHttpxClient(event_hooks=sync_read_hooks(server.answer_mib * MIB))
    try:
        with OpenAI(**endpoint.client_options(server), http_client=http_client) as client:
            models = read_models(client.get("/models", cast_to=bytes))
    except (OpenAIError, MalformedReply, LargeAnswer, GarbledAnswer) as error:
        if not (isinstance(error, APIStatusError) and error.status_code in _NO_MODEL_LIST_STATUSES):
            raise convert_error(error, endpoint, server) from None
        models = {server.model: None}
    if server.model not in models:
        raise EndpointError(
            f"{endpoint.url} has no model {server.model!r}; it has {', '.join(sorted(models)) or 'none'}: set "
            "server.model"
        )
    lengths = [length for length in (configured_length, models[server.model]) if length]
    if not lengths:
        raise ConfigError(
            f"{endpoint.url} does not say how long the context of {server.model} is; set context_length beside server"
        )
    return min(lengths)


def convert_error(error: Exception, endpoint: Endpoint, server: ServerConfig) -> AgentrError:
    """Return our error for an exception of the client, without secrets. It is `Transient` if and
    only if the same request may succeed later.
    """
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(error, ModelFault):
        return type(error)(endpoint.redact(f"{endpoint.url}: {error}"))
    if isinstance(error, TimeoutError | APITimeoutError):
        return ModelUnavailable(
            f"{endpoint.url} did not answer in time; see whether it works, or raise server.timeout_seconds "
            f"({server.timeout_seconds:g}) or server.connect_seconds ({server.connect_seconds:g})"
        )
    if isinstance(error, APIStatusError):
        status = error.status_code
        detail = endpoint.redact(" ".join(_error_message(error.body).split()))[:500] or "without a word"
        if error.code == _NO_CREDIT_CODE:
            return EndpointError(
                f"the account at {endpoint.url} has no credit left: {detail}; top it up, and resume the run"
            )
        if status in _TRANSIENT_STATUSES or status >= 500:
            return ModelUnavailable(f"{endpoint.url} answered {status}: {detail}")
        if status in (401, 403):
            return EndpointError(
                f"{endpoint.url} refuses the key in {server.api_key_env or 'the request (none was sent)'} ({status}); "
                "set server.api_key_env to the variable with the right one"
            )
        if status == 404:
            return EndpointError(
                f"{endpoint.url} knows no model {server.model!r}, or is not such a server ({detail}); correct "
                "server.model or the address, which usually ends with /v1"
            )
        # The list of words cannot be complete: a refusal in other words is a plain fault, which
        # costs its episode but ends no path.
        is_context_error = error.code in _CONTEXT_CODES or error.type in _CONTEXT_CODES
        if is_context_error or (
            status in _TOO_LONG_STATUSES and any(phrase in detail.lower() for phrase in _CONTEXT_PHRASES)
        ):
            return RequestTooLong(f"{endpoint.url} refuses a conversation and its reply together ({status}): {detail}")
        remedy = next(
            (
                f"; {remedy_text}"
                for name, remedy_text in _REMEDIES_BY_FIELD.items()
                if re.search(rf"\b{name}\b", detail)
            ),
            "",
        )
        return ModelFault(f"{endpoint.url} refused the request ({status}): {detail}{remedy}")
    if isinstance(error, LargeAnswer):
        return ModelFault(f"{endpoint.url} gives too large an answer: {error}; raise server.answer_mib")
    if isinstance(error, GarbledAnswer):
        return MalformedReply(f"{endpoint.url} gives an answer that cannot be read: {error}")
    if isinstance(error, APIConnectionError):
        cause = endpoint.redact(" ".join(str(error.__cause__ or error).split()))
        return ModelUnavailable(f"{endpoint.url} cannot be reached ({cause}); start the server, or correct its address")
    return ModelFault(endpoint.redact(f"{endpoint.url}: {type(error).__name__}: {error}"))


def requested_delay_seconds(error: Exception) -> float | None:
    """Return the seconds that a server asks clients to wait before the next try; None if it does
    not say.
    """
    from openai import APIStatusError

    if not isinstance(error, APIStatusError):
        return None
    return retry_after_seconds(error.response.headers.get("retry-after", ""), now=time.time())


def _error_message(body: object) -> str:
    """Return the message in the body of an error response. The client finds it only in OpenAI's
    form, but many servers answer with plain text, or put it under another name.
    """
    if isinstance(body, Mapping) and isinstance(body.get("message"), str):
        return str(body["message"])
    return body if isinstance(body, str) else "" if body is None else json.dumps(body, ensure_ascii=False)


T = TypeVar("T")
_log = logging.getLogger(__name__)

_MAX_CACHED_PROMPTS = 4096
_BYTES_PER_TOKEN = 3
_TOKENS_PER_TURN = 4
_TEMPLATE_TOKENS = 64
"""Tokens reserved for what a server's template adds to ours: a date, a default system message."""
_MAX_TEMPLATE_TOKENS = 1024
_MAX_TOKENS_PER_TURN = 16
_TEMPLATE_DIVISOR = 8
_IDLE_SECONDS = 4.0
"""Less than the five seconds after which Python servers close an idle connection."""


class _PromptInfo(NamedTuple):
    num_tokens: int
    opens_thought: bool


class OpenAIModel:
    """A ChatModel on a server. Requests are sent without batching, at most `server.concurrency` at
    a time; the server batches them.

    It is up to the server whether a seed always gives the same reply, whatever else the server
    does. Replies carry token ids if the server returns them (`server.token_ids`); otherwise
    training renders their text. Without `server.tokenizer`, prompt tokens are estimated at three
    bytes per token, an overestimate for English; the server's own count decides what fits. Use
    `connect`.
    """

    def __init__(
        self, endpoint: Endpoint, server: ServerConfig, *, context_length: int, renderer: Renderer | None = None
    ) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self.name = server.model
        self.fingerprint = fingerprint("openai", endpoint.url, server.model, server.send_seed, server.extra_body)
        self.context_length = context_length
        self._endpoint = endpoint
        # The fingerprint has the names of the variables, not their values: a new key does not make
        # another model.
        self._server = replace(server, extra_body=fill_references(server.extra_body, endpoint.variables))
        self._retry_policy = RetryPolicy(retries=server.max_retries, seconds=server.retry_seconds)
        self._renderer = renderer
        self.estimates = renderer is None
        self._prompt_info = lru_cache(_MAX_CACHED_PROMPTS)(self._make_prompt_info)
        self._request_slots = asyncio.Semaphore(server.concurrency)
        allow_connections(server.concurrency)
        connections = connection_limits(server.concurrency, idle_seconds=_IDLE_SECONDS)
        client = DefaultAsyncHttpxClient(limits=connections, event_hooks=async_read_hooks(server.answer_mib * MIB))
        self._client = AsyncOpenAI(**endpoint.client_options(server), http_client=client)
        self._closed = False

    @classmethod
    def connect(cls, endpoint: Endpoint, server: ServerConfig, *, context_length: int = 0) -> OpenAIModel:
        """Return the model of a server, after asking the server whether it has that model. Waits
        for the server.

        Args:
            context_length: the most tokens of a prompt and its reply, if fewer than the server's
                limit; 0 means that limit.

        Raises what `served_context_length` raises, and `ModelDirectoryError` when
        `server.tokenizer` cannot be loaded.
        """
        length = served_context_length(endpoint, server, context_length)
        # The renderer only counts tokens: every date has about as many, and the server prints its
        # own.
        now = datetime.now(UTC)
        renderer = load_renderer(Path(server.tokenizer), at=now) if server.tokenizer else None
        return cls(endpoint, server, context_length=length, renderer=renderer)

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies to each request; when one request fails for good, the others are
        cancelled.

        Near the end of the context the server is first asked for a reply of one token, which
        reveals the prompt's length in its own template; then for as many tokens as are left.

        Raises:
            PromptTooLong: a prompt fills the context, by `server.tokenizer` or by the server's
                count.
            ModelUnavailable, MalformedReply: the server gave no usable reply within
                `server.max_retries` further tries.
            EndpointError: the server refuses the key or the model's name, or the account is empty.
            ConfigError: the request needs something that the recipe does not say the server
                supports.
            ModelFault: the server refuses the request, or calls a short one too long; or the model
                is closed.
        """
        if self._closed:
            raise ModelFault(f"model {self.name} is closed; connect again")
        return await gather_or_cancel([self._generate_one(request) for request in requests])

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens: exact with a tokenizer, else the estimate."""
        return self._prompt_info(request.messages).num_tokens

    async def close(self) -> None:
        """Close the connections. Calling it twice is harmless."""
        self._closed = True
        await self._client.close()

    async def _generate_one(self, request: Request) -> list[Generation]:
        max_tokens = request.sampling.max_new_tokens
        num_prompt_tokens = self.count_tokens(request)
        if num_prompt_tokens >= self.context_length and not self.estimates:
            raise PromptTooLong.counted(num_prompt_tokens, self.context_length, self.name)
        was_refused = False
        if num_prompt_tokens + max_tokens + self._template_reserve(_TEMPLATE_TOKENS) <= self.context_length:
            try:
                return await self._post_all(request, max_tokens)
            except RequestTooLong:
                was_refused = True
        remaining = self.context_length - await self._count_server_tokens(request)
        # What was refused would be refused again, so that limit is halved at once, and then as long
        # as the server refuses.
        limit = max_tokens // 2 if was_refused and remaining >= max_tokens else min(max_tokens, remaining)
        refusal = None
        while limit > 0:
            try:
                return await self._post_all(request, limit)
            except RequestTooLong as error:
                refusal, limit = error, limit // 2
                _log.warning("%s; a reply of %d tokens is tried: set model.context_length lower", refusal, limit)
        raise ModelFault(f"{refusal or self._endpoint.url}: no reply fits beside the prompt; set model.context_length")

    async def _post_all(self, request: Request, max_tokens: int) -> list[Generation]:
        calls = [
            self._post_for_replies(body, request, max_tokens)
            for body in request_bodies(request, self._server, max_tokens)
        ]
        return [reply for replies in await gather_or_cancel(calls) for reply in replies]

    async def _post_for_replies(self, body: dict[str, Any], request: Request, max_tokens: int) -> list[Generation]:
        opens_thought = self._prompt_info(request.messages).opens_thought
        return await self._post(
            body,
            lambda payload: read_completion(
                payload, request, n=body["n"], max_tokens=max_tokens, opens_thought=opens_thought
            ),
        )

    # A refusal alone ends no path: each server words it differently, and length is not the only
    # reason. Nothing is learned from earlier requests: a reply must not depend on them.
    async def _count_server_tokens(self, request: Request) -> int:
        """Return the server's count of the tokens in a prompt, or our own if the server refuses to
        reply with a single token.

        Raises `PromptTooLong` when the server finds the prompt and one token too long, which is
        plausible for its size; `ModelFault` when it is not.
        """
        (body,) = request_bodies(replace(request, n=1, sampling=Sampling(max_new_tokens=1)), self._server, 1)
        try:
            num_tokens = await self._post(body, read_prompt_tokens)
        except RequestTooLong as refusal:
            # An upper bound for any tokenizer, since a token has at least one byte.
            num_turn_tokens = sum(_MAX_TOKENS_PER_TURN + len(message.text.encode()) for message in request.messages)
            max_prompt_tokens = num_turn_tokens + self._template_reserve(_MAX_TEMPLATE_TOKENS)
            if max_prompt_tokens < self.context_length:
                raise ModelFault(
                    f"{refusal}: it refuses a conversation of at most {max_prompt_tokens} tokens, but its context is "
                    f"said to have {self.context_length}; set model.context_length to what the server was started with"
                ) from None
            raise PromptTooLong(f"a prompt leaves no room for a reply at {refusal}") from None
        except ModelFault as error:
            if isinstance(error, Transient):
                raise
            # Some servers refuse a reply of one token.
            return min(self.count_tokens(request), self.context_length - 1)
        if num_tokens >= self.context_length:
            raise PromptTooLong(
                f"a prompt leaves no room for a reply at {self._endpoint.url}: it counts {num_tokens} tokens, and the "
                f"context has {self.context_length}"
            )
        return num_tokens

    def _template_reserve(self, num_tokens: int) -> int:
        """Return the number of tokens to reserve for an unknown template: `num_tokens`, but at most
        an eighth of the context.
        """
        return min(num_tokens, self.context_length // _TEMPLATE_DIVISOR)

    async def _post(self, body: dict[str, Any], read_payload: Callable[[bytes], T]) -> T:
        """Send an HTTP request, as often as the retry policy allows, and return what `read_payload`
        makes of the response body. Raises the last fault as `convert_error` gives it.
        """
        from openai import OpenAIError

        async with self._request_slots:
            start = time.monotonic()
            num_failures = 0
            while True:
                try:
                    async with asyncio.timeout(self._server.timeout_seconds):
                        payload = await self._client.post("/chat/completions", cast_to=bytes, body=body)
                    return read_payload(payload)
                except (OpenAIError, ModelFault, TimeoutError, LargeAnswer, GarbledAnswer) as error:
                    num_failures += 1
                    fault, requested_seconds = (
                        convert_error(error, self._endpoint, self._server),
                        requested_delay_seconds(error),
                    )
                wait_seconds = wait_before_retry(
                    self._retry_policy,
                    num_failures=num_failures,
                    elapsed_seconds=time.monotonic() - start,
                    random_fraction=random.random(),
                    retry_after=requested_seconds,
                )
                if not isinstance(fault, Transient):
                    raise fault
                if wait_seconds is None:
                    tries_text = "1 try" if num_failures == 1 else f"{num_failures} tries"
                    raise type(fault)(f"{fault}; {tries_text} in {time.monotonic() - start:.0f} s, given up")
                await asyncio.sleep(wait_seconds)

    def _make_prompt_info(self, messages: tuple[Message, ...]) -> _PromptInfo:
        if self._renderer is None:
            sizes = (_TOKENS_PER_TURN - -len(message.text.encode()) // _BYTES_PER_TOKEN for message in messages)
            return _PromptInfo(sum(sizes), opens_thought=False)
        # The server gets text, and tokenises it again.
        ids = self._renderer.render_prompt(
            [
                grown_turn([Span(text=message.text)])
                if message.spans
                else Message(role=message.role, text=message.text)
                for message in messages
            ]
        )
        return _PromptInfo(len(ids), self._renderer.opens_thought(ids))
