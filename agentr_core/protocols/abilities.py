"""What an environment may have besides; whether it has it is found by `isinstance`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from agentr_core.types import Generation, Grade, Instance, Question, Step, ToolCall, Trajectory, Transition, Verdict


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


class Grader(Protocol):
    """Gives an episode its reward after it ended. Pure: who asks the model is `episodes.asking`."""

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade where a rule decides it; None where a model must be asked."""
        ...

    def question(self, trajectory: Trajectory) -> Question:
        """Return what to ask about an episode that no rule decides."""
        ...

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        """Return the grade that a reply gives; None where none can be read from it."""
        ...


@runtime_checkable
class Graded(Protocol):
    """What an environment may have besides: a grader, whose rewards replace its own where an
    episode ended.

    The class itself has the attribute, which may be a property: what a grader asks decides which
    runs share their work.
    """

    grader: Grader


@runtime_checkable
class Asking(Protocol):
    """What an environment may have besides: steps in which it asks a model of another role.

    `step` returns a transition with a `Question` as "question" in its info, of which nothing else
    counts, and is not done before `answer` returned one without. A replay is given the recorded
    answers.
    """

    def answer(self, reply: str) -> Transition:
        """Return how the step goes on, given the reply to its last question."""
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
class Resuming(Protocol):
    """What an environment may have besides: a state that recorded steps tell, so that an episode
    goes on from them without a replay.
    """

    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        """Return the first observation, with the episode in the state after the steps; none of them
        is taken again. Raises `EnvironmentFault` for an unknown instance.
        """
        ...


class Kept(Protocol):
    """Where answers of tools outlive the process, such as `store.answered_calls`. Threads may share
    it. Two that keep the same answers are equal, and have one hash.
    """

    def __hash__(self) -> int: ...

    def identities(self) -> Collection[str]:
        """Return the identities of all calls that are kept now."""
        ...

    def find(self, calls: Sequence[ToolCall]) -> Mapping[str, ToolCall]:
        """Return those calls that are answered, with their answers, by identity."""
        ...

    def keep(self, calls: Sequence[ToolCall]) -> None:
        """Keep answered calls; they are safe when it returns."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """What an environment may have besides: tools whose answers later calls, also those of other
    runs, may use.
    """

    def keep_answers(self, kept: Kept) -> None:
        """Look answers up there from now on, and keep new ones there."""
        ...


@runtime_checkable
class Calling(Protocol):
    """What an environment may have besides: actions that are calls of a tool, in place of lines
    with a label.
    """

    def called(self, reply: str) -> str:
        """Return a reply with a labelled action as one that calls for the same."""
        ...


@runtime_checkable
class Deriving(Protocol):
    """What an environment may have besides: instances that are variants of one another."""

    def origin(self, instance: Instance) -> Instance:
        """Return the instance that this one is a variant of; itself if there is none."""
        ...


@runtime_checkable
class Relaying(Protocol):
    """What an environment may have besides: an agent outside that waits for replies, and whose own
    messages make the conversation. Its calls wait for others, as long as these take.
    """

    def relay(self, generation: Generation) -> None:
        """Be told how the reply of the next step was drawn."""
        ...

    def refuse(self, why: str) -> None:
        """Be told why there is no reply to what was asked last; the episode ends with that."""
        ...

    def release(self) -> None:
        """Let go of the episode: an agent that still plays it is told that it is over. Calling it
        twice is harmless.
        """
        ...


@runtime_checkable
class Served(Protocol):
    """What an environment may have besides: a server that it lives on."""

    def reach(self) -> None:
        """Return once the server answers. Raises `UserError` when it does not."""
        ...
