"""Optional abilities of an environment; `isinstance` tells whether it has one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NoReturn, Protocol, runtime_checkable

from agentr_core.errors import EnvironmentUnavailable
from agentr_core.types import Generation, Grade, Instance, Question, Step, ToolCall, Trajectory, Transition, Verdict

Labels = Literal["lenient", "published"]
"""How the label of an action is read: see `environments.replies`."""
Take = Literal["first", "last"]
"""Whether a reply ends at its first action, or the last one in it counts."""


@runtime_checkable
class Labelled(Protocol):
    """An optional ability of an environment: actions that follow a label, which it reads as this
    attribute says; a recipe may set it.

    If its actions are no lines, the attribute `first_action` is the regular expression at whose
    first match a reply ends that a recipe ends at its first action, and `stops` are the texts that
    end one, too, if not a line that begins with "Observation:".
    """

    labels: Labels


@runtime_checkable
class Oracle(Protocol):
    """An optional ability of an environment: the true verdict on each step, to measure judges
    against.
    """

    def oracle(self, instance: Instance, actions: Sequence[str]) -> Sequence[Verdict]:
        """Return the true verdict on each action of an episode, played from its start; never
        unparsable.
        """
        ...


class Grader(Protocol):
    """The source of an episode's reward after its end. Pure: `episodes.asking` asks the model."""

    @property
    def asks(self) -> str | None:
        """The role of the model that decides where the rule does not; None if it always does."""
        ...

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade if a rule decides it; None if a model must be asked."""
        ...

    def question(self, trajectory: Trajectory) -> Question:
        """Return what to ask about an episode that no rule decides."""
        ...

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        """Return the grade that a reply, without its thoughts, gives; None if none can be read from
        it.
        """
        ...


@runtime_checkable
class Graded(Protocol):
    """An optional ability of an environment: a grader, whose rewards replace the environment's once
    an episode has ended.

    The class itself has the attribute, which may be a property: a grader's questions determine
    which runs share their work.
    """

    grader: Grader


@runtime_checkable
class Asking(Protocol):
    """An optional ability of an environment: steps in which it asks a model of another role.

    `step` returns a transition with a `Question` as "question" in its info; nothing else in that
    transition counts. The step is done once `answer` returns a transition without a question. A
    replay is given the recorded answers. A class that asks only with some options may say so in a
    flag `asks_in_steps`.
    """

    def answer(self, reply: str) -> Transition:
        """Return how the step goes on, given the reply to its last question without its thoughts;
        empty if it was cut within them.
        """
        ...


@runtime_checkable
class Identifying(Protocol):
    """An optional ability of an environment: a text that tells its instances apart where their
    first observations do not.
    """

    def identity(self, instance: Instance) -> str:
        """Return a text that two instances share only if they are the same problem. Raises
        `EnvironmentFault`.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """An optional ability of an environment: its state as a text, to detect that an episode returns
    to an earlier state.
    """

    def state(self) -> str:
        """Return a text that two moments of one episode share only if every action has the same
        result in both.
        """
        ...


@runtime_checkable
class Limited(Protocol):
    """An optional ability of an environment that blocks: a limit to the time of its calls.

    A call that takes longer is given up. The episode is tried again with another environment, and
    this one is closed while the call may still be at work.
    """

    @property
    def time_limit(self) -> float:
        """The seconds that one call, such as a reset or a step, may take; above 0."""
        ...


@runtime_checkable
class Resuming(Protocol):
    """An optional ability of an environment: a state that follows from the recorded steps, so that
    an episode continues from them without a replay.
    """

    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        """Return the first observation, with the episode in the state after the steps; no step is
        taken again. Raises `EnvironmentFault` for an unknown instance.
        """
        ...


class Kept(Protocol):
    """A memory of tool answers that outlives the process, such as `store.answered_calls`. Threads
    may share it. Two objects that keep the same answers are equal and have the same hash.
    """

    def __hash__(self) -> int: ...

    def identities(self) -> Collection[str]:
        """Return the identities of all calls that are kept now."""
        ...

    def find(self, calls: Sequence[ToolCall]) -> Mapping[str, ToolCall]:
        """Return the calls that have a kept answer, with that answer, by identity."""
        ...

    def keep(self, calls: Sequence[ToolCall]) -> None:
        """Keep answered calls; they are stored when this returns."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """An optional ability of an environment: tools whose answers later calls may reuse, also in
    other runs.
    """

    def keep_answers(self, kept: Kept) -> None:
        """Look answers up in `kept` from now on, and keep new ones there."""
        ...


@runtime_checkable
class Calling(Protocol):
    """An optional ability of an environment: actions that are tool calls instead of lines with a
    label.
    """

    def called(self, reply: str) -> str:
        """Return a reply with a labelled action as a reply with the same action as a tool call."""
        ...


@runtime_checkable
class Deriving(Protocol):
    """An optional ability of an environment: instances that are variants of one another."""

    def origin(self, instance: Instance) -> Instance:
        """Return the instance that this one is a variant of; itself if there is none."""
        ...


class Undelivered(EnvironmentUnavailable):
    """A reply did not reach the agent outside that had asked for it, so it was no step.

    `instead` is where the step before it led to, given what the agent did next.
    """

    def __init__(self, message: str, instead: Transition) -> None:
        super().__init__(message, instead)
        self.instead = instead

    def __str__(self) -> str:
        return str(self.args[0])


@runtime_checkable
class Relaying(Protocol):
    """An optional ability of an environment: an outside agent that waits for replies, and whose own
    messages make the conversation. The environment's calls wait for the agent, however long it
    takes.
    """

    def relay(self, generation: Generation) -> None:
        """Take note of how the reply of the next step was drawn."""
        ...

    def refuse(self, why: str) -> None:
        """Take note of why the last request gets no reply; the episode ends with that."""
        ...

    def decline(self, why: str) -> NoReturn:
        """Tell the agent why its request gets no reply, though the episode goes on. Raises
        `Undelivered` with what the agent does next, as a step does whose reply did not reach it.
        """
        ...

    def release(self, why: str = "") -> None:
        """Let go of the episode: an agent that still plays it is told that it is over, and why.
        Calling it twice is harmless.
        """
        ...


@runtime_checkable
class Listening(Protocol):
    """An optional ability of an environment: it takes note of whole replies, since what surrounds
    an action matters to it.
    """

    def hear(self, reply: str) -> None:
        """Take note of the reply that the action of the next step is found in."""
        ...


@runtime_checkable
class Sandboxed(Protocol):
    """An optional ability of an environment: a sandbox in which it runs code of the model."""

    def sandbox(self) -> str:
        """Return how far code is confined on this machine, for a person, once that has been tested;
        the empty string if none is run. Raises `SandboxError` where it does not hold.
        """
        ...


@runtime_checkable
class Served(Protocol):
    """An optional ability of an environment: a server that it runs on."""

    def reach(self) -> None:
        """Return once the server answers. Raises `UserError` when it does not."""
        ...


@runtime_checkable
class Recalling(Protocol):
    """An optional ability of an environment: reading an episode that was played elsewhere from the
    whole text of its turn.
    """

    def recall(self, instance: Instance, text: str, reward: float | None = None) -> Trajectory:
        """Return the episode with the steps of a text, without calling tools. Its reward is the one
        given or, without it, that of the environment's rule.
        """
        ...
