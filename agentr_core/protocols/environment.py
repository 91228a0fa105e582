"""The protocols of an environment, of the transcript of its steps, and of the tools that it
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agentr_core.types import Instance, Message, Sampling, Step, ToolCall, Transition


@runtime_checkable
class Environment(Protocol):
    """A world in which an agent acts by text. One object holds one episode at a time.

    The words are Gymnasium's. `agentr_core.environments.contract.check` tests any implementation.
    """

    # Nobody sets these, so an attribute of the class or a property will do.
    @property
    def name(self) -> str:
        """The name under which it is registered."""
        ...

    @property
    def instruction(self) -> str:
        """The first user turn: what the world is, which actions there are, how to reply."""
        ...

    @property
    def acknowledgement(self) -> str:
        """The assistant's turn after the instruction; never trained. A growing turn has none."""
        ...

    @property
    def step_limit(self) -> int:
        """The number of steps after which an episode is usually cut; a recipe may say otherwise."""
        ...

    @property
    def can_snapshot(self) -> bool:
        """Whether `snapshot` and `restore` work. Otherwise a state is restored by exact replay."""
        ...

    @property
    def blocking(self) -> bool:
        """Whether calls wait for something outside the process, and so belong in a thread.

        An environment that does not repeat itself to the letter says so in a further attribute,
        `repeatability`: see `agentr_core.repeating`. One whose conversation is not alternating
        turns has a `transcript`: see `agentr_core.episodes.transcript`.
        """
        ...

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
        """Return the action in a model's reply, or the empty string if there is none. Pure."""
        ...

    def snapshot(self) -> Any:
        """Return an opaque copy of the state of the episode, valid until `close`."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a state returned by `snapshot` of this object."""
        ...

    def depth(self, instance: Instance) -> int | None:
        """Return the difficulty class of an instance for the report's breakdown, or None if there
        is none.
        """
        ...

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of an expert that solves the instance from its start, or None if there
        is none.
        """
        ...

    def close(self) -> None:
        """Release what the episode holds. Calling it twice is harmless."""
        ...


class Transcript(Protocol):
    """The way the steps of an episode become a conversation. Pure, and the same for all episodes of
    a world.

    The prompt of each reply, rendered as token ids, must be a prefix of the sample: token for token
    the model is trained on what it read.
    """

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation that the reply after the given steps continues; no part of it
        carries loss.
        """
        ...

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation up to the last reply. A reply carries loss if its flag is set; an
        observation never does.
        """
        ...

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings for drawing a reply: those given, with the transcript's stop
        strings.
        """
        ...


@runtime_checkable
class Dividing(Protocol):
    """An optional ability of a transcript: several conversations in one episode, of which `prompt`
    and `sample` give the last.
    """

    def begins(self, steps: Sequence[Step]) -> tuple[int, ...]:
        """Return the positions of the steps at which conversations begin, 0 first."""
        ...


class Toolbox(Protocol):
    """The tools that a world calls for a model. The episodes of a process share one, so calls come
    from several threads.
    """

    tools: tuple[str, ...]
    """The names of the tools."""
    blocking: bool
    """Whether a call waits for something outside the process."""

    def call(self, tool: str, query: str) -> ToolCall:
        """Return a call with its result: status, milliseconds, output.

        A fault of the query becomes a status. Raises `EnvironmentFault` when the tool itself is
        broken, `EnvironmentUnavailable` when it cannot be reached.
        """
        ...
