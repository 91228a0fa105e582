"""What models, tools and graders are, and the optional abilities that models may have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentr_core.errors import ModelFault
from agentr_core.texts import abbreviate, lone_surrogate
from agentr_core.types import (
    Generation,
    Grade,
    Question,
    Request,
    ToolCall,
    Trajectory,
)

# A chat model that acts, and its optional abilities.


@runtime_checkable
class ChatModel(Protocol):
    """A model that continues conversations, in batches."""

    name: str
    """The name of the model in reports."""
    fingerprint: str
    """A hash of what determines its replies: weights, tokenizer, chat template, numeric
    settings.
    """
    context_length: int
    """The maximum number of tokens of a prompt and its reply together."""

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


MOST_TOKENS = 2**31 - 1
"""The largest token id, and the largest number of tokens, that is accepted and can be stored."""
HIGHEST_LOGPROB = 0.01
"""The largest accepted log-probability: rounding may lift that of a certain token above 0."""


def checked_generations(replies: Sequence[Generation], request: Request, model: str) -> list[Generation]:
    """Return the replies of a model to one request unchanged, if all of them are as `Generation`
    says.

    Raises `ModelFault` otherwise: for a wrong type or range, a text that cannot be stored, NaN
    among the log-probabilities, or a number of them that is not that of the token ids.
    """
    for reply in replies:
        if fault := _fault_of(reply):
            raise ModelFault(f"model {model}: a reply to {request.session or 'a request'} {fault}")
    return list(replies)


def _fault_of(reply: Any) -> str:
    if not isinstance(reply, Generation):
        return f"is {abbreviate(reply)}, not a Generation"
    if not isinstance(reply.text, str) or lone_surrogate(reply.text) is not None:
        return f"has the text {abbreviate(reply.text)}, which cannot be stored"
    if reply.finish_reason not in ("stop", "length"):
        return f"has the finish reason {abbreviate(reply.finish_reason)}"
    for name, count in (("prompt_tokens", reply.prompt_tokens), ("completion_tokens", reply.completion_tokens)):
        if not _is_count(count):
            return f"has {abbreviate(count)} as {name}"
    if not all(map(_is_count, reply.token_ids)):
        return f"has token ids that are none: {abbreviate(reply.token_ids)}"
    if reply.logprobs is None:
        return ""
    if any(
        type(logprob) not in (float, int) or not -math.inf < logprob <= HIGHEST_LOGPROB for logprob in reply.logprobs
    ):
        return f"has log-probabilities that are none: {abbreviate(reply.logprobs)}"
    if reply.token_ids and len(reply.logprobs) != len(reply.token_ids):
        return f"has {len(reply.logprobs)} log-probabilities for {len(reply.token_ids)} tokens"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_TOKENS


@runtime_checkable
class Estimating(Protocol):
    """An optional ability of a model: token counts that may be estimates. No episode is ended by
    an estimate.
    """

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
    """An optional ability of a model: a count of generated tokens that is up to date while replies
    are still being generated.
    """

    def written(self) -> int:
        """Return the number of tokens generated so far, those of unfinished replies included. Any
        thread may call this.
        """
        ...


@runtime_checkable
class Reloading(Protocol):
    """An optional ability of a model: weights that can be replaced while it runs."""

    async def reload(self, weights: Path) -> None:
        """Load the weights of a safetensors file once the current batch is done. The file has each
        parameter under its name and is alone in its folder; keep it until another one is loaded.

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
        """Wait until the backend can answer requests. Raises `UserError` when it does not start."""
        ...


# The tools that a world calls for a model, the store of their answers, and the grader of an
# episode.


class Toolbox(Protocol):
    """The tools that a world calls for a model. The episodes of a process share one, so calls come
    from several threads.
    """

    tools: tuple[str, ...]
    """The names of the tools."""
    blocking: bool
    """Whether a call waits for something outside the process."""

    def call(self, tool: str, query: str) -> ToolCall:
        """Call a tool and return the call with its status, duration in milliseconds and output.

        An error in the query only changes the status. Raises `EnvironmentFault` when the tool
        itself is broken, `EnvironmentUnavailable` when it cannot be reached.
        """
        ...


class Grader(Protocol):
    """A grader, which decides the reward of an episode after its end. It asks no model itself:
    `episodes.grading.grade` does.
    """

    @property
    def asks(self) -> str | None:
        """The role of the model that decides where `rule` does not; None if `rule` always does."""
        ...

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade if a rule decides it; None if a model must be asked."""
        ...

    def question(self, trajectory: Trajectory) -> Question:
        """Return what to ask about an episode that no rule decides."""
        ...

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        """Return the grade that a model's reply, given without its thoughts, states; None if it
        cannot be read.
        """
        ...


@runtime_checkable
class Blocking(Protocol):
    """An optional ability of a grader: a `rule` that waits for something outside the process, and
    must therefore be called in a thread of its own.
    """

    blocking: bool


class AnswerStore(Protocol):
    """A store of tool answers that outlives the process, such as
    `store.codec.trajectories.AnsweredCalls`. Threads may share it. Two objects for the same stored
    answers are equal and have the same hash.
    """

    def __hash__(self) -> int: ...

    def identities(self) -> Collection[str]:
        """Return the `ToolCall.identity` of every stored call."""
        ...

    def find(self, calls: Sequence[ToolCall]) -> Mapping[str, ToolCall]:
        """Return the stored answers to the given calls, as answered calls by `ToolCall.identity`;
        calls without one are left out.
        """
        ...

    def keep(self, calls: Sequence[ToolCall]) -> None:
        """Store answered calls, and return once they are stored."""
        ...
