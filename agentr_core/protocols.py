"""The two seams of the system: an environment to act in, and a chat model that acts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agentr_core.types import Generation, Instance, Request, Transition, Verdict


@runtime_checkable
class Environment(Protocol):
    """A world in which an agent acts by text. One object holds one episode at a time.

    The words are Gymnasium's. `agentr_core.environments.contract.check` tests any implementation.
    """

    name: str
    """The name under which it is registered."""
    instruction: str
    """The first user turn: what the world is, which actions there are, how to reply."""
    acknowledgement: str
    """The assistant's turn after the instruction; never trained."""
    step_limit: int
    """The number of steps after which an episode is usually cut; a recipe may say otherwise."""
    can_snapshot: bool
    """Whether `snapshot` and `restore` work. Otherwise a state is restored by exact replay."""
    blocking: bool
    """Whether calls wait for something outside the process, and so belong in a thread.

    An environment that does not repeat itself to the letter says so in a further attribute,
    `repeatability`: see `agentr_core.repeating`.
    """

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        ...

    def instances(self, split: str) -> Sequence[Instance]:
        """Return all instances of a split, in a fixed order. Raises `ConfigError` for an unknown
        split.
        """
        ...

    def reset(self, instance: Instance) -> str:
        """Return the first observation of a fresh episode. Raises `EnvironmentFault` for an unknown
        instance.
        """
        ...

    def step(self, action: str) -> Transition:
        """Return what one action leads to. An invalid action is an observation that says so, never
        an error.
        """
        ...

    def parse(self, reply: str) -> str:
        """Return the action in a model's reply: the empty string when there is none. Pure."""
        ...

    def snapshot(self) -> Any:
        """Return an opaque copy of the state of the episode, valid until `close`."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a state returned by `snapshot` of this object."""
        ...

    def depth(self, instance: Instance) -> int | None:
        """Return the difficulty class of an instance for the report's breakdown, or None where
        there is none.
        """
        ...

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of an expert that solves the instance from its start, or None where
        there is none.
        """
        ...

    def close(self) -> None:
        """Release what the episode holds. Calling it twice is harmless."""
        ...


@runtime_checkable
class Oracle(Protocol):
    """What an environment may have besides: the truth about each step, to measure judges
    against.
    """

    def oracle(self, instance: Instance, actions: Sequence[str]) -> Sequence[Verdict]:
        """Return the true verdict on each action of an episode, played from its start; never
        unparsable.
        """
        ...


@runtime_checkable
class Identifying(Protocol):
    """What an environment may have besides: what tells its instances apart where their beginnings
    do not.
    """

    def identity(self, instance: Instance) -> str:
        """Return a text that two instances share only if they are one problem. Raises
        `EnvironmentFault`.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """What an environment may have besides: its state as a text, to see when an episode comes back
    to one.
    """

    def state(self) -> str:
        """Return a text that two moments of one episode share only if every action leads to the
        same from both.
        """
        ...


@runtime_checkable
class Deriving(Protocol):
    """What an environment may have besides: instances that are variants of one another."""

    def origin(self, instance: Instance) -> Instance:
        """Return the instance that this one is a variant of; itself where there is none."""
        ...


@runtime_checkable
class Served(Protocol):
    """What an environment may have besides: a server that it lives on."""

    def reach(self) -> None:
        """Return once the server answers. Raises `UserError` when it does not."""
        ...


@runtime_checkable
class ChatModel(Protocol):
    """A model that continues conversations. Batches in, batches out."""

    name: str
    """What a report calls the model."""
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
    """What a model may have besides: counts of tokens that may be estimates, which end no path."""

    estimates: bool
    """Whether `count_tokens` estimates; then `generate` alone knows whether a prompt is too
    long.
    """


@runtime_checkable
class Caching(Protocol):
    """What a model may have besides: a cache of prompt beginnings."""

    def cached_share(self) -> float:
        """Return the part of all prompt tokens so far that did not have to be computed, in [0,
        1].
        """
        ...


@runtime_checkable
class Starting(Protocol):
    """What a model may have besides: a backend that takes its time to start, and can be interrupted
    in it.
    """

    async def ready(self) -> Any:
        """Return once replies can be asked for. Raises `UserError` when the backend does not
        start.
        """
        ...
