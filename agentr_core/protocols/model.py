"""A chat model that acts, and its optional abilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentr_core.types import Generation, Request


@runtime_checkable
class ChatModel(Protocol):
    """A model that continues conversations. Batches in, batches out."""

    name: str
    """The name of the model in reports."""
    fingerprint: str
    """A hash of what determines its replies: weights, tokenizer, chat template, numeric
    settings.
    """
    context_length: int
    """The most tokens a prompt and its reply may have together."""

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return `requests[i].n` replies for each request i.

        A reply is determined by the request's messages, sampling and (seed, reply number) alone.
        Raises `PromptTooLong` when a prompt leaves no room for a reply, `ModelUnavailable`
        (transient) when the backend cannot be reached, `ModelFault` otherwise. No fault becomes an
        empty reply.
        """
        ...

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens of a request, by the model's own chat template."""
        ...

    async def close(self) -> None:
        """Release the model's memory and connections. Calling it twice is harmless."""
        ...


@runtime_checkable
class Estimating(Protocol):
    """An optional ability of a model: token counts that may be estimates, which end no path."""

    estimates: bool
    """Whether `count_tokens` estimates; then `generate` alone knows whether a prompt is too
    long.
    """


@runtime_checkable
class Caching(Protocol):
    """An optional ability of a model: a cache of prompt prefixes."""

    def cached_share(self) -> float:
        """Return the share of all prompt tokens so far that came from the cache, in [0, 1]."""
        ...


@runtime_checkable
class Counting(Protocol):
    """An optional ability of a model: a count of tokens that goes on while replies are under
    way.
    """

    def written(self) -> int:
        """Return the number of tokens of all replies so far, those under way included. Any thread
        may call this.
        """
        ...


@runtime_checkable
class Reloading(Protocol):
    """An optional ability of a model: weights that can be replaced while it runs."""

    async def reload(self, weights: Path) -> None:
        """Load the weights of a safetensors file, which has each parameter by its name and is alone
        in its folder, once the current batch is done. The file stays until another one is loaded.

        Raises `ModelFault` when they are not this model's parameters.
        """
        ...


@runtime_checkable
class Sleeping(Protocol):
    """An optional ability of a model whose weights can be replaced: it leaves its GPU to others."""

    async def sleep(self) -> None:
        """Give back the memory of weights and cache once the replies under way are done. The model
        answers again after the next `Reloading.reload`. Raises `ModelFault` if it cannot.
        """
        ...


@runtime_checkable
class Abandoning(Protocol):
    """An optional ability of a model: work under way that can be given up."""

    def abandon(self) -> None:
        """Give up the work under way and all that comes after it, so that `close` need not wait.
        Any thread may call this.
        """
        ...


@runtime_checkable
class Starting(Protocol):
    """An optional ability of a model: a backend that takes long to start, and can be interrupted
    meanwhile.
    """

    async def ready(self) -> Any:
        """Return once replies can be asked for. Raises `UserError` when the backend does not
        start.
        """
        ...
