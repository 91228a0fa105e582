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
from agentr_core.models.batching import all_or_none
from agentr_core.models.connections import (
    MIB,
    GarbledAnswer,
    LargeAnswer,
    allow_connections,
    limits,
    reading,
    reading_now,
)
from agentr_core.models.openai.wire import bodies, read_completion, read_models, read_prompt_tokens
from agentr_core.recipes.models import MASK, ServerConfig, filled, references, url_fault
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.system import RetryPolicy, seconds_told, wait_before_retry
from agentr_core.types import Generation, Message, Request, Sampling, Span, grown_turn

# The address of an OpenAI-compatible server, whether it can be used, and what its errors mean. No
# error repeats the key.

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
    """The address of a server, and its key. Creating one raises `EndpointError` for an address or a
    key that cannot be sent.
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
        """Return the keyword arguments of an OpenAI client; its own retries are off."""
        from openai import Timeout

        timeout = Timeout(
            connect=server.connect_seconds, read=server.timeout_seconds, write=server.timeout_seconds, pool=None
        )
        # The client refuses an empty key; a server that wants none ignores what it gets.
        return {"base_url": self.url, "api_key": self.key or "none", "timeout": timeout, "max_retries": 0}

    def redacted(self, text: str) -> str:
        """Return a text with the key and the values of variables masked, in case a server repeated
        one.
        """
        # Shorter values are not secrets, and removing them would damage words.
        secrets = [value for value in (self.key, *self.variables.values()) if len(value) >= _SHORTEST_SECRET]
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text


def endpoint(server: ServerConfig, environment: Mapping[str, str]) -> Endpoint:
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


def served_context_length(target: Endpoint, server: ServerConfig, configured_length: int) -> int:
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

    http = DefaultHttpxClient(event_hooks=reading_now(server.answer_mib * MIB))
    try:
        with OpenAI(**target.options(server), http_client=http) as client:
            models = read_models(client.get("/models", cast_to=bytes))
    except (OpenAIError, MalformedReply, LargeAnswer, GarbledAnswer) as error:
        if not (isinstance(error, APIStatusError) and error.status_code in _NO_LIST):
            raise fault_of(error, target, server) from None
        models = {server.model: None}
    if server.model not in models:
        raise EndpointError(
            f"{target.url} has no model {server.model!r}; it has {', '.join(sorted(models)) or 'none'}: set "
            "server.model"
        )
    lengths = [length for length in (configured_length, models[server.model]) if length]
    if not lengths:
        raise ConfigError(
            f"{target.url} does not say how long the context of {server.model} is; set context_length beside server"
        )
    return min(lengths)


def fault_of(error: Exception, target: Endpoint, server: ServerConfig) -> AgentrError:
    """Return our error for an exception of the client, without secrets. It is `Transient` if and
    only if the same request may succeed later.
    """
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(error, ModelFault):
        return type(error)(target.redacted(f"{target.url}: {error}"))
    if isinstance(error, TimeoutError | APITimeoutError):
        return ModelUnavailable(
            f"{target.url} did not answer in time; see whether it works, or raise server.timeout_seconds "
            f"({server.timeout_seconds:g}) or server.connect_seconds ({server.connect_seconds:g})"
        )
    if isinstance(error, APIStatusError):
        status = error.status_code
        detail = target.redacted(" ".join(_message(error.body).split()))[:500] or "without a word"
        if error.code == _NO_CREDIT:
            return EndpointError(
                f"the account at {target.url} has no credit left: {detail}; top it up, and resume the run"
            )
        if status in _HEALING or status >= 500:
            return ModelUnavailable(f"{target.url} answered {status}: {detail}")
        if status in (401, 403):
            return EndpointError(
                f"{target.url} refuses the key in {server.api_key_env or 'the request (none was sent)'} ({status}); "
                "set server.api_key_env to the variable with the right one"
            )
        if status == 404:
            return EndpointError(
                f"{target.url} knows no model {server.model!r}, or is not such a server ({detail}); correct "
                "server.model or the address, which usually ends with /v1"
            )
        # The list of words cannot be complete: a refusal in other words is a plain fault, which
        # costs its episode but ends no path.
        is_context_error = error.code in _CONTEXT_CODES or error.type in _CONTEXT_CODES
        if is_context_error or (status in _TOO_LONG and any(words in detail.lower() for words in _CONTEXT_WORDS)):
            return RequestTooLong(f"{target.url} refuses a conversation and its reply together ({status}): {detail}")
        remedy = next((f"; {fix}" for name, fix in _CHANGED_BY.items() if re.search(rf"\b{name}\b", detail)), "")
        return ModelFault(f"{target.url} refused the request ({status}): {detail}{remedy}")
    if isinstance(error, LargeAnswer):
        return ModelFault(f"{target.url} gives too large an answer: {error}; raise server.answer_mib")
    if isinstance(error, GarbledAnswer):
        return MalformedReply(f"{target.url} gives an answer that cannot be read: {error}")
    if isinstance(error, APIConnectionError):
        cause = target.redacted(" ".join(str(error.__cause__ or error).split()))
        return ModelUnavailable(f"{target.url} cannot be reached ({cause}); start the server, or correct its address")
    return ModelFault(target.redacted(f"{target.url}: {type(error).__name__}: {error}"))


def retry_after(error: Exception) -> float | None:
    """Return the seconds that a server asks clients to wait before the next try; None if it does
    not say.
    """
    from openai import APIStatusError

    if not isinstance(error, APIStatusError):
        return None
    return seconds_told(error.response.headers.get("retry-after", ""), now=time.time())


def _message(body: object) -> str:
    """Return the message in the body of an error response. The client finds it only in OpenAI's
    form, but many servers answer with plain text, or put it under another name.
    """
    if isinstance(body, Mapping) and isinstance(body.get("message"), str):
        return str(body["message"])
    return body if isinstance(body, str) else "" if body is None else json.dumps(body, ensure_ascii=False)


T = TypeVar("T")
_log = logging.getLogger(__name__)

_CACHED_PROMPTS = 4096
_BYTES_A_TOKEN = 3
_TOKENS_A_TURN = 4
_TEMPLATE_TOKENS = 64
"""Tokens reserved for what a server's template adds to ours: a date, a default system message."""
_MOST_TEMPLATE_TOKENS = 1024
_MOST_TOKENS_A_TURN = 16
_LEAST_SHARE = 8
_IDLE_SECONDS = 4.0
"""Less than the five seconds after which Python servers close an idle connection."""


class _Prompt(NamedTuple):
    tokens: int
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
        self, target: Endpoint, server: ServerConfig, *, context_length: int, renderer: Renderer | None = None
    ) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self.name = server.model
        self.fingerprint = fingerprint("openai", target.url, server.model, server.send_seed, server.extra_body)
        self.context_length = context_length
        self._target = target
        # The fingerprint has the names of the variables, not their values: a new key does not make
        # another model.
        self._server = replace(server, extra_body=filled(server.extra_body, target.variables))
        self._policy = RetryPolicy(retries=server.max_retries, seconds=server.retry_seconds)
        self._renderer = renderer
        self.estimates = renderer is None
        self._prompt = lru_cache(_CACHED_PROMPTS)(self._prompt_uncached)
        self._slots = asyncio.Semaphore(server.concurrency)
        allow_connections(server.concurrency)
        connections = limits(server.concurrency, idle_seconds=_IDLE_SECONDS)
        client = DefaultAsyncHttpxClient(limits=connections, event_hooks=reading(server.answer_mib * MIB))
        self._client = AsyncOpenAI(**target.options(server), http_client=client)
        self._closed = False

    @classmethod
    def connect(cls, target: Endpoint, server: ServerConfig, *, context_length: int = 0) -> OpenAIModel:
        """Return the model of a server, after asking the server whether it has that model. Waits
        for the server.

        Args:
            context_length: the most tokens of a prompt and its reply, if fewer than the server's
                limit; 0 means that limit.

        Raises what `served_context_length` raises, and `ModelDirectoryError` when
        `server.tokenizer` cannot be loaded.
        """
        length = served_context_length(target, server, context_length)
        # The renderer only counts tokens: every date has about as many, and the server prints its
        # own.
        now = datetime.now(UTC)
        renderer = load_renderer(Path(server.tokenizer), at=now) if server.tokenizer else None
        return cls(target, server, context_length=length, renderer=renderer)

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
        return await all_or_none([self._replies(request) for request in requests])

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens: exact with a tokenizer, else the estimate."""
        return self._prompt(request.messages).tokens

    async def close(self) -> None:
        """Close the connections. Calling it twice is harmless."""
        self._closed = True
        await self._client.close()

    async def _replies(self, request: Request) -> list[Generation]:
        max_tokens = request.sampling.max_new_tokens
        count = self.count_tokens(request)
        if count >= self.context_length and not self.estimates:
            raise PromptTooLong.counted(count, self.context_length, self.name)
        refused = False
        if count + max_tokens + self._share(_TEMPLATE_TOKENS) <= self.context_length:
            try:
                return await self._parts(request, max_tokens)
            except RequestTooLong:
                refused = True
        remaining = self.context_length - await self._measure(request)
        # What was refused would be refused again, so that limit is halved at once, and then as long
        # as the server refuses.
        limit = max_tokens // 2 if refused and remaining >= max_tokens else min(max_tokens, remaining)
        refusal = None
        while limit > 0:
            try:
                return await self._parts(request, limit)
            except RequestTooLong as error:
                refusal, limit = error, limit // 2
                _log.warning("%s; a reply of %d tokens is tried: set model.context_length lower", refusal, limit)
        raise ModelFault(f"{refusal or self._target.url}: no reply fits beside the prompt; set model.context_length")

    async def _parts(self, request: Request, limit: int) -> list[Generation]:
        parts = [self._part(body, request, limit) for body in bodies(request, self._server, limit)]
        opens = self._prompt(request.messages).opens_thought
        return [replace(reply, thinks=reply.thinks or opens) for part in await all_or_none(parts) for reply in part]

    async def _part(self, body: dict[str, Any], request: Request, limit: int) -> list[Generation]:
        return await self._ask(body, lambda payload: read_completion(payload, request, n=body["n"], limit=limit))

    # A refusal alone ends no path: each server words it differently, and length is not the only
    # reason. Nothing is learned from earlier requests: a reply must not depend on them.
    async def _measure(self, request: Request) -> int:
        """Return the server's count of the tokens in a prompt, or our own if the server refuses to
        reply with a single token.

        Raises `PromptTooLong` when the server finds the prompt and one token too long, which is
        plausible for its size; `ModelFault` when it is not.
        """
        (body,) = bodies(replace(request, n=1, sampling=Sampling(max_new_tokens=1)), self._server, 1)
        try:
            tokens = await self._ask(body, read_prompt_tokens)
        except RequestTooLong as refusal:
            # An upper bound for any tokenizer, since a token has at least one byte.
            turns = sum(_MOST_TOKENS_A_TURN + len(message.text.encode()) for message in request.messages)
            max_tokens = turns + self._share(_MOST_TEMPLATE_TOKENS)
            if max_tokens < self.context_length:
                raise ModelFault(
                    f"{refusal}: it refuses a conversation of at most {max_tokens} tokens, but its context is said to "
                    f"have {self.context_length}; set model.context_length to what the server was started with"
                ) from None
            raise PromptTooLong(f"a prompt leaves no room for a reply at {refusal}") from None
        except ModelFault as error:
            if isinstance(error, Transient):
                raise
            # Some servers refuse a reply of one token.
            return min(self.count_tokens(request), self.context_length - 1)
        if tokens >= self.context_length:
            raise PromptTooLong(
                f"a prompt leaves no room for a reply at {self._target.url}: it counts {tokens} tokens, and the "
                f"context has {self.context_length}"
            )
        return tokens

    def _share(self, tokens: int) -> int:
        """Return the number of tokens to reserve for an unknown template: `tokens`, but at most an
        eighth of the context.
        """
        return min(tokens, self.context_length // _LEAST_SHARE)

    async def _ask(self, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
        """Send an HTTP request, as often as the retry policy allows, and return what `read` makes
        of the response body. Raises the last fault as `fault_of` gives it.
        """
        from openai import OpenAIError

        async with self._slots:
            start = time.monotonic()
            failures = 0
            while True:
                try:
                    async with asyncio.timeout(self._server.timeout_seconds):
                        payload = await self._client.post("/chat/completions", cast_to=bytes, body=body)
                    return read(payload)
                except (OpenAIError, ModelFault, TimeoutError, LargeAnswer, GarbledAnswer) as error:
                    failures += 1
                    fault, delay = fault_of(error, self._target, self._server), retry_after(error)
                wait = wait_before_retry(
                    self._policy,
                    failures=failures,
                    elapsed=time.monotonic() - start,
                    uniform=random.random(),
                    retry_after=delay,
                )
                if not isinstance(fault, Transient):
                    raise fault
                if wait is None:
                    tries = "1 try" if failures == 1 else f"{failures} tries"
                    raise type(fault)(f"{fault}; {tries} in {time.monotonic() - start:.0f} s, given up")
                await asyncio.sleep(wait)

    def _prompt_uncached(self, messages: tuple[Message, ...]) -> _Prompt:
        if self._renderer is None:
            sizes = (_TOKENS_A_TURN - -len(message.text.encode()) // _BYTES_A_TOKEN for message in messages)
            return _Prompt(sum(sizes), opens_thought=False)
        # The server gets text, and tokenises it again.
        ids = self._renderer.render_prompt(
            [
                grown_turn([Span(text=message.text)])
                if message.spans
                else Message(role=message.role, text=message.text)
                for message in messages
            ]
        )
        return _Prompt(len(ids), self._renderer.opens_thought(ids))
