"""A chat model behind any OpenAI-compatible server, through the official client."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentr_core.errors import ModelFault, PromptTooLong, RequestTooLong, Transient
from agentr_core.fingerprint import fingerprint
from agentr_core.models.batching import all_or_none
from agentr_core.models.connections import MIB, GarbledAnswer, LargeAnswer, allow_connections, limits, reading
from agentr_core.models.openai import endpoint as endpoints
from agentr_core.models.openai.endpoint import Endpoint, fault_of, retry_after
from agentr_core.models.openai.wire import bodies, read_completion, read_prompt_tokens
from agentr_core.recipes.models import ServerConfig, filled
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.system import RetryPolicy, wait_before_retry
from agentr_core.types import Generation, Message, Request, Sampling, Span, grown_turn

T = TypeVar("T")
_log = logging.getLogger(__name__)

_CACHED_PROMPTS = 4096
_BYTES_A_TOKEN = 3
_TOKENS_A_TURN = 4
_TEMPLATE_TOKENS = 64
"""Tokens set aside for what a server's template adds to ours: a date, a default system turn."""
_MOST_TEMPLATE_TOKENS = 1024
_MOST_TOKENS_A_TURN = 16
_LEAST_SHARE = 8
_IDLE_SECONDS = 4.0
"""Less than the five seconds after which Python servers close an idle connection."""


class _Prompt(NamedTuple):
    tokens: int
    opens_thought: bool


class OpenAIModel:
    """A ChatModel on a server. Requests go out at once, at most `server.concurrency` at a time; the
    server batches them.

    It is up to the server whether a seed always gives the same reply, whatever else the server
    does. Replies carry token ids if the server returns them (`server.token_ids`); otherwise
    training renders their text. Without `server.tokenizer`, prompt tokens are estimated at three
    bytes per token, an overestimate for English; the server's own count decides what fits. Use
    `connect`.
    """

    def __init__(
        self, where: Endpoint, server: ServerConfig, *, context_length: int, renderer: Renderer | None = None
    ) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self.name = server.model
        self.fingerprint = fingerprint("openai", where.url, server.model, server.send_seed, server.extra_body)
        self.context_length = context_length
        self._where = where
        # The fingerprint has the names of the variables, not their values: a new key does not make
        # another model.
        self._server = replace(server, extra_body=filled(server.extra_body, where.variables))
        self._policy = RetryPolicy(retries=server.max_retries, seconds=server.retry_seconds)
        self._renderer = renderer
        self.estimates = renderer is None
        self._prompt = lru_cache(_CACHED_PROMPTS)(self._prompt_uncached)
        self._slots = asyncio.Semaphore(server.concurrency)
        allow_connections(server.concurrency)
        connections = limits(server.concurrency, idle_seconds=_IDLE_SECONDS)
        client = DefaultAsyncHttpxClient(limits=connections, event_hooks=reading(server.answer_mib * MIB))
        self._client = AsyncOpenAI(**where.options(server), http_client=client)
        self._closed = False

    @classmethod
    def connect(cls, where: Endpoint, server: ServerConfig, *, context_length: int = 0) -> OpenAIModel:
        """Return the model of a server, after asking the server whether it has that model. Blocks.

        Args:
            context_length: the most tokens of a prompt and its reply, if fewer than the server's
                limit; 0 means that limit.

        Raises as `endpoint.context_length`, and `ModelDirectoryError` when `server.tokenizer`
        cannot be loaded.
        """
        length = endpoints.context_length(where, server, context_length)
        # The renderer only counts tokens: every date has about as many, and the server prints its
        # own.
        now = datetime.now(UTC)
        renderer = load_renderer(Path(server.tokenizer), at=now) if server.tokenizer else None
        return cls(where, server, context_length=length, renderer=renderer)

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies; when one request fails for good, the others are cancelled.

        Near the end of the context the server is first asked for a reply of one token, which
        reveals the prompt's length in its own template; then for as many tokens as are left.

        Raises:
            PromptTooLong: a prompt fills the context, by `server.tokenizer` or by the server's
                count.
            ModelUnavailable, MalformedReply: the server gave no usable reply within
                `server.max_retries` further tries.
            EndpointError: the server refuses the key or the model's name, or the account is empty.
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
        wanted = request.sampling.max_new_tokens
        count = self.count_tokens(request)
        if count >= self.context_length and not self.estimates:
            raise PromptTooLong.counted(count, self.context_length, self.name)
        refused = False
        if count + wanted + self._share(_TEMPLATE_TOKENS) <= self.context_length:
            try:
                return await self._parts(request, wanted)
            except RequestTooLong:
                refused = True
        left = self.context_length - await self._measure(request)
        # What was refused would be refused again.
        # The limit is halved as long as the server refuses.
        limit = wanted // 2 if refused and left >= wanted else min(wanted, left)
        refusal = None
        while limit > 0:
            try:
                return await self._parts(request, limit)
            except RequestTooLong as error:
                refusal, limit = error, limit // 2
                _log.warning("%s; a reply of %d tokens is tried: set model.context_length lower", refusal, limit)
        raise ModelFault(f"{refusal or self._where.url}: no reply fits beside the prompt; set model.context_length")

    async def _parts(self, request: Request, limit: int) -> list[Generation]:
        parts = [self._part(body, request, limit) for body in bodies(request, self._server, limit)]
        opens = self._prompt(request.messages).opens_thought
        return [replace(reply, thinks=reply.thinks or opens) for part in await all_or_none(parts) for reply in part]

    async def _part(self, body: dict[str, Any], request: Request, limit: int) -> list[Generation]:
        return await self._ask(body, lambda payload: read_completion(payload, request, n=body["n"], limit=limit))

    async def _measure(self, request: Request) -> int:
        """Return the server's count of the tokens in a prompt, or our own if the server does not
        tell.

        Raises `PromptTooLong` when the server refuses a reply of one token and the prompt may be
        too long; `ModelFault` when it cannot be.
        """
        (body,) = bodies(replace(request, n=1, sampling=Sampling(max_new_tokens=1)), self._server, 1)
        try:
            tokens = await self._ask(body, read_prompt_tokens)
        except RequestTooLong as refusal:
            # For any tokenizer: a token has at least one byte.
            turns = sum(_MOST_TOKENS_A_TURN + len(message.text.encode()) for message in request.messages)
            most = turns + self._share(_MOST_TEMPLATE_TOKENS)
            if most < self.context_length:
                raise ModelFault(
                    f"{refusal}: it refuses a conversation of at most {most} tokens, but its context is said to have "
                    f"{self.context_length}; set model.context_length to what the server was started with"
                ) from None
            raise PromptTooLong(f"a prompt leaves no room for a reply at {refusal}") from None
        except ModelFault as error:
            if isinstance(error, Transient):
                raise
            # Some servers refuse a reply of one token.
            return min(self.count_tokens(request), self.context_length - 1)
        if tokens >= self.context_length:
            raise PromptTooLong(
                f"a prompt leaves no room for a reply at {self._where.url}: it counts {tokens} tokens, and the context "
                f"has {self.context_length}"
            )
        return tokens

    def _share(self, tokens: int) -> int:
        """Return the number of tokens set aside for an unknown template: `tokens`, but at most an
        eighth of the context.
        """
        return min(tokens, self.context_length // _LEAST_SHARE)

    async def _ask(self, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of the answer to one HTTP request, tried as often as the policy
        allows.
        """
        from openai import OpenAIError

        async with self._slots:
            started = time.monotonic()
            failures = 0
            while True:
                try:
                    async with asyncio.timeout(self._server.timeout_seconds):
                        payload = await self._client.post("/chat/completions", cast_to=bytes, body=body)
                    return read(payload)
                except (OpenAIError, ModelFault, TimeoutError, LargeAnswer, GarbledAnswer) as error:
                    failures += 1
                    fault, asked = fault_of(error, self._where, self._server), retry_after(error)
                wait = wait_before_retry(
                    self._policy,
                    failures=failures,
                    elapsed=time.monotonic() - started,
                    uniform=random.random(),
                    retry_after=asked,
                )
                if not isinstance(fault, Transient):
                    raise fault
                if wait is None:
                    tries = "1 try" if failures == 1 else f"{failures} tries"
                    raise type(fault)(f"{fault}; {tries} in {time.monotonic() - started:.0f} s, given up")
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
