"""What worlds and models are, and the optional abilities that they may have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

from agentr_core.errors import EnvironmentUnavailable
from agentr_core.types import (
    Generation,
    Grade,
    Instance,
    Message,
    Question,
    Request,
    Sampling,
    Step,
    ToolCall,
    Trajectory,
    Transition,
    Verdict,
)

# An environment's promise to repeat itself, and the comparison of its texts with recorded ones
# under that promise.

_WORD = re.compile(r"\w+")


class Repeatability(StrEnum):
    """The degree to which equal instances and actions give equal texts; the attribute
    `repeatability` of an environment.
    """

    EXACT = "exact"
    """To the letter. The promise of an environment without the attribute."""
    UNORDERED = "unordered"
    """Up to the order in which things are listed."""
    NEVER = "never"
    """Not at all: an instance may begin with a different text after a restart of its server, or at
    any reset.
    """


def repeatability_of(env: Any) -> Repeatability:
    """Return what an environment promises about repeating itself."""
    return Repeatability(getattr(env, "repeatability", Repeatability.EXACT))


def repeats(seen: str, recorded: str, promise: Repeatability) -> bool:
    """Return whether a text repeats the recorded one: to the letter if that is promised, else in
    its words, in any order.
    """
    if seen == recorded or promise is Repeatability.EXACT:
        return seen == recorded
    return Counter(_WORD.findall(seen)) == Counter(_WORD.findall(recorded))


# A chat model that acts, and its optional abilities.


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


# The protocols of an environment, of the transcript of its steps, and of the tools that it
# calls.


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
        `repeatability`: see `agentr_core.protocols`. One whose conversation is not alternating
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


# Optional abilities of an environment; `isinstance` tells whether it has one.

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
