"""Instances, the steps of their episodes, and how these ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from agentr_core.fingerprint import fingerprint
from agentr_core.types.conversation import FinishReason
from agentr_core.types.generation import Answer


class StopReason(StrEnum):
    """Why an episode or a path of a tree ended."""

    SUCCESS = "success"
    """The environment ended the episode and set its success flag."""
    FAILURE = "failure"
    """The environment ended the episode without success."""
    DISASTER = "disaster"
    """The environment gave a negative reward: the episode counts as reward 0."""
    STEP_LIMIT = "step_limit"
    """The episode used up all the steps it was allowed."""
    CONTEXT_LIMIT = "context_limit"
    """The conversation no longer fits the model's context."""
    REPEATS = "repeats"
    """The model gave the same reply in the same state so often that the episode was ended; it
    counts as failed.
    """
    TOKEN_LIMIT = "token_limit"
    """The episode used up its tokens, `max_episode_tokens`."""
    TIME_LIMIT = "time_limit"
    """The episode used up its time, `max_episode_seconds`."""


OUT_OF_ROOM = frozenset({StopReason.CONTEXT_LIMIT, StopReason.TOKEN_LIMIT, StopReason.TIME_LIMIT})
"""The reasons for which an episode is cut off, so that it has no end that could be graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The most tokens and seconds of a whole episode, as the fields of recipes say; 0: no limit."""

    tokens: int = 0
    seconds: float = 0.0


NO_LIMITS = EpisodeLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One problem of an environment. `split` is a name the environment knows; `index` counts from
    0.
    """

    environment: str
    split: str
    index: int

    @property
    def key(self) -> str:
        """`environment/split/index`, unique across all environments."""
        return f"{self.environment}/{self.split}/{self.index}"

    def episode(self, number: int, begun: int = 0) -> str:
        """Return the key of an episode of this instance: `key#number`, with `@begun` if the episode
        continues from `begun` recorded steps.
        """
        return f"{self.key}#{number}" + (f"@{begun}" if begun else "")


class Transition(NamedTuple):
    """What `Environment.step` returns, in Gymnasium's order.

    `reward` is the standing score of the episode after this step, in [0, 1], or negative for a
    disaster. `info` has the key "success" (bool), the environment's own flag; "valid" (bool) from
    an environment that reports whether it accepted the action; and "matched" (str) from one that
    replaces the agent's action with a possible one. "tool_calls" are `ToolCall`s that the step
    made. "question" is a `Question` that a model has to answer before the step is done; see
    `protocols.Asking`. `info` may have further keys for the log.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool in a step.

    `provider` is the service that answered, if there are several; `key` is the query in normal
    form, so that calls with the same tool, provider and key ask the same. `status` is ok, empty,
    error, timeout, or a word of the tool's own. `output` is the tool's whole result; the
    observation may show less of it.
    """

    tool: str
    provider: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    status: str = "ok"
    milliseconds: float = 0.0
    cached: bool = False
    output: str = ""

    @property
    def identity(self) -> str:
        """A hash that two calls share if and only if they ask the same of the same provider."""
        return fingerprint(self.tool, self.provider, self.parameters, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A grader's result for an episode: `reward` in [0, 1], and whether the episode succeeded."""

    reward: float
    success: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """The grade of an episode, and the grade it had before.

    `answer` is the model's answer that the grade was read from; None if a rule decided.
    """

    grade: Grade
    before: Grade
    answer: Answer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One reply and its results. `action` is what the environment's parser found in `reply`.

    `matched` is the possible action that the environment carried out in place of `action`, which
    may be the same; None from an environment that takes actions as they are. A replay sends
    `action`, which is matched again. With `terminated` the environment goes on no further, by its
    rules or by a limit of its own. `valid` is whether the environment accepted the action; None
    from one that does not report it. `finish_reason` and `tokenizer` are those of the reply's
    generation, None for a reply that no model gave.
    """

    reply: str
    action: str
    observation: str
    reward: float
    matched: str | None = None
    valid: bool | None = None
    terminated: bool = False
    success: bool = False
    disaster: bool = False
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    tokenizer: str | None = None
    dropped: int = 0
    """How many of the oldest exchanges were left out of the conversation that the reply was drawn
    from, since the whole no longer fitted; see `conversation.windowed`.
    """
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls that the step made, in order."""
    answers: tuple[Answer, ...] = ()
    """The answers of models of other roles to the environment's questions, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The steps of one episode. `reward` is in [0, 1]; `success` is the environment's own flag."""

    instance: Instance
    first_observation: str
    steps: tuple[Step, ...]
    reward: float
    success: bool
    stop: StopReason

    @classmethod
    def ended(cls, instance: Instance, first_observation: str, steps: Sequence[Step], stop: StopReason) -> Trajectory:
        """Return the trajectory of steps, with the reward and success of the last one; without
        steps, 0 and False.
        """
        return cls(
            instance=instance,
            first_observation=first_observation,
            steps=tuple(steps),
            reward=steps[-1].reward if steps else 0.0,
            success=bool(steps) and steps[-1].success,
            stop=stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """A trajectory that a method made from another one, both named by their ids.

    `operator` is the method's name for the way it was made; `position` is the step at which the
    child departs from the parent, None if it differs as a whole. `prompt_hash` and `seed` are those
    of the request to a model that helped make it, if there was one. `round` is that of a flywheel.
    """

    child: str
    parent: str
    operator: str
    position: int | None = None
    prompt_hash: str = ""
    seed: int | None = None
    round: int | None = None
