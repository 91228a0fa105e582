"""A chat model behind any OpenAI-compatible server, through the official client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentr_core.config import ServerConfig
from agentr_core.errors import ModelFault, PromptTooLong, Transient
from agentr_core.fingerprint import fingerprint
from agentr_core.models import openai_endpoint as endpoints
from agentr_core.models.connections import allow_connections, limits
from agentr_core.models.openai_endpoint import Endpoint, fault_of, retry_after
from agentr_core.models.openai_wire import bodies, read_completion
from agentr_core.rendering import Renderer, load_renderer
from agentr_core.retrying import RetryPolicy, wait_before_retry
from agentr_core.types import Generation, Message, Request

_CACHED_PROMPTS = 4096
_BYTES_A_TOKEN = 3
_TOKENS_A_TURN = 4
_IDLE_SECONDS = 4.0
"""Servers in Python close a connection that was idle for five."""


class OpenAIModel:
    """A ChatModel on a server. Requests go out at once, at most `server.concurrency` at a time; the server batches.

    Whether a reply repeats for a seed, and does not depend on what else the server does, is the server's promise.
    Replies carry token ids where the server gives them (`server.token_ids`), else none, so that training renders their
    text. Without `server.tokenizer` prompt tokens are estimated at three bytes a token, which is high for English; what
    the estimate lets through and the server refuses is `PromptTooLong`, too. Use `connect`.
    """

    def __init__(
        self, where: Endpoint, server: ServerConfig, *, context_length: int, renderer: Renderer | None = None
    ) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self.name = server.model
        self.fingerprint = fingerprint("openai", where.url, server.model, server.send_seed, server.extra_body)
        self.context_length = context_length
        self._where = where
        self._server = server
        self._policy = RetryPolicy(retries=server.max_retries, seconds=server.retry_seconds)
        self._renderer = renderer
        self._count = lru_cache(_CACHED_PROMPTS)(self._count_uncached)
        self._slots = asyncio.Semaphore(server.concurrency)
        allow_connections(server.concurrency)
        pool = limits(server.concurrency, idle_seconds=_IDLE_SECONDS)
        self._client = AsyncOpenAI(**where.options(server), http_client=DefaultAsyncHttpxClient(limits=pool))
        self._closed = False

    @classmethod
    def connect(cls, where: Endpoint, server: ServerConfig, *, context_length: int = 0) -> OpenAIModel:
        """Return the model of a server that was asked whether it has it. Blocks.

        Args:
            context_length: the most tokens of a prompt and its reply; 0 means what the server says.

        Raises as `openai_endpoint.context_length`, and `ModelDirectoryError` when `server.tokenizer` cannot be loaded.
        """
        length = endpoints.context_length(where, server, context_length)
        # It only counts: a date has as many tokens on any day, or nearly so, and the server prints its own.
        now = datetime.now(UTC)
        renderer = load_renderer(Path(server.tokenizer), at=now) if server.tokenizer else None
        return cls(where, server, context_length=length, renderer=renderer)

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies; when one request fails for good, the others are cancelled.

        Raises:
            PromptTooLong: a prompt fills the context, by our count or by the server's.
            ModelUnavailable, MalformedReply: the server gave no usable reply within `server.max_retries` further tries.
            EndpointError: it refuses the key or the model's name, or the account is empty.
            ModelFault: it refuses the request; or the model is closed.
        """
        if self._closed:
            raise ModelFault(f"model {self.name} is closed; connect again")
        limits = [min(request.sampling.max_new_tokens, self._room(request)) for request in requests]
        parts = [
            [asyncio.ensure_future(self._part(body, request, limit)) for body in bodies(request, self._server, limit)]
            for request, limit in zip(requests, limits, strict=True)
        ]
        tasks = [task for of_request in parts for task in of_request]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [[generation for task in of_request for generation in task.result()] for of_request in parts]

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens: exact with a tokenizer, else the estimate."""
        return self._count(request.messages)

    async def close(self) -> None:
        """Close the connections. Calling it twice is harmless."""
        self._closed = True
        await self._client.close()

    async def _part(self, body: dict[str, Any], request: Request, limit: int) -> list[Generation]:
        """Return the replies to one HTTP request, tried as often as the policy allows."""
        from openai import OpenAIError

        async with self._slots:
            started = time.monotonic()
            failures = 0
            while True:
                try:
                    async with asyncio.timeout(self._server.timeout_seconds):
                        payload = await self._client.post("/chat/completions", cast_to=bytes, body=body)
                    return read_completion(payload, request, n=body["n"], limit=limit)
                except (OpenAIError, ModelFault, TimeoutError) as error:
                    failures += 1
                    fault, told = fault_of(error, self._where, self._server), retry_after(error)
                wait = wait_before_retry(
                    self._policy,
                    failures=failures,
                    elapsed=time.monotonic() - started,
                    uniform=random.random(),
                    retry_after=told,
                )
                if not isinstance(fault, Transient):
                    raise fault
                if wait is None:
                    raise type(fault)(f"{fault}; {_tries(failures)} in {time.monotonic() - started:.0f} s, given up")
                await asyncio.sleep(wait)

    def _room(self, request: Request) -> int:
        """Return how many tokens a reply may have. Raises `PromptTooLong` when there is no room."""
        tokens = self.count_tokens(request)
        if tokens >= self.context_length:
            raise PromptTooLong(
                f"a prompt of {tokens} tokens leaves no room for a reply in the {self.context_length} of {self.name}"
            )
        return self.context_length - tokens

    def _count_uncached(self, messages: tuple[Message, ...]) -> int:
        if self._renderer is None:
            return sum(_TOKENS_A_TURN - -len(message.text.encode()) // _BYTES_A_TOKEN for message in messages)
        # The server is sent texts, and tokenises them anew.
        return len(self._renderer.render_prompt([Message(role=m.role, text=m.text) for m in messages]))


def _tries(failures: int) -> str:
    return "1 try" if failures == 1 else f"{failures} tries"
