"""The base class of all worlds, the checks of what their methods return, and the interface by which
their episodes become conversations.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import subprocess
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, runtime_checkable

from agentr_core.errors import (
    AgentrError,
    ConfigError,
    EnvironmentFault,
    EnvironmentUnavailable,
    IllTypedAnswer,
    MissingPart,
)
from agentr_core.protocols import MOST_TOKENS, AnswerStore, Grader
from agentr_core.replies import OBSERVATION, LabelStyle, line_after_label
from agentr_core.texts import abbreviate, error_summary, lone_surrogate
from agentr_core.types import (
    Generation,
    Instance,
    Message,
    Question,
    Sampling,
    Step,
    StopReason,
    ToolCall,
    Trajectory,
    Transition,
    Verdict,
)

# An environment's promise to repeat itself, and the comparison of its texts with recorded ones
# under that promise.

_WORD = re.compile(r"\w+")

MAX_DIFFERENT_SHARE = 0.01
"""The largest share of repeated pairs of state and action that may lead to another result: a world
may leave out of its state what rarely matters.
"""


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


def is_repetition(text: str, recorded_text: str, repeatability: Repeatability) -> bool:
    """Return whether a text repeats the recorded one: to the letter if that is promised, else in
    its words, in any order.
    """
    if text == recorded_text or repeatability is Repeatability.EXACT:
        return text == recorded_text
    return Counter(_WORD.findall(text)) == Counter(_WORD.findall(recorded_text))


# How steps become a conversation.


class Transcript(Protocol):
    """How the steps of an episode become a conversation. The methods are pure, and the same for all
    episodes of a world.

    The prompt of each reply, rendered as token ids, must be a prefix of the sample, so that the
    model is trained on exactly the tokens that it was prompted with.
    """

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the conversation that the next reply continues, given the steps so far; no part of
        it carries loss.
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
        """Return the given settings with the transcript's stop strings added."""
        ...


class Conversation(NamedTuple):
    """One conversation of an episode: its messages, and the positions of the steps whose replies
    belong to it. Its messages may also contain replies of other conversations, which are not
    trained here.

    A `side` conversation is not about the agent's task: one that asks for a title, for example.
    """

    positions: tuple[int, ...]
    messages: tuple[Message, ...]
    side: bool = False

    @property
    def is_left_out(self) -> bool:
        """Whether it is a side conversation that is not trained."""
        return self.side and not any(message.train for message in self.messages)


@runtime_checkable
class Dividing(Protocol):
    """An optional ability of a transcript: several conversations in one episode, of which `prompt`
    and `sample` give that of the last reply.
    """

    def parts(self, first_observation: str, steps: Sequence[Step]) -> tuple[Conversation, ...]:
        """Return the conversations, ordered by their first replies. Each step's position is in
        exactly one of them, and its reply is trained there, unless it is left out on purpose.
        """
        ...


# The base class.

Fact = str | int | float | bool
"""The value of one fact about an instance; see `Environment.facts`."""
MAX_NUM_FACTS = 8
"""The largest number of facts of an instance; lists of episodes show each as a column."""
_FACT_NAME = re.compile(r"[a-z][a-z0-9_]{0,29}")
_MAX_FACT_CHARS = 200


class Undelivered(EnvironmentUnavailable):
    """A reply did not reach the outside agent that had asked for it, so it is not a step.

    `instead` is the transition to what the agent did next; it replaces that of the step before.
    `stop` is why the episode is over if the agent can do nothing more in it, else None.
    """

    def __init__(self, message: str, instead: Transition, stop: StopReason | None = None) -> None:
        super().__init__(message, instead, stop)
        self.instead = instead
        self.stop = stop

    def __str__(self) -> str:
        return str(self.args[0])


class Environment(ABC):
    """A world in which an agent acts by text: the base class of every world. One object holds one
    episode at a time.

    The terms are those of Gymnasium. A world needs `instruction`, `splits`, `instances`, `reset`
    and `step`; everything else has a default, and `has` tells whether a class overrides a method.
    Whatever a method returns is checked, also when the world calls the method itself: a wrong type
    raises `IllTypedAnswer`. `agentr_core.environments.contract.check` tests any world.
    """

    name: str = ""
    """The name under which it is registered; by default that of the class in lower case."""
    instruction: str
    """The first user turn: what the world is, which actions there are, how to reply."""
    acknowledgement: str = "Ok."
    """The assistant's message after the instruction; never trained on. Unused where the assistant's
    whole episode is one growing message (`Continuation`).
    """
    step_limit: int = 20
    """The number of steps after which an episode is usually cut; a recipe may say otherwise."""
    can_snapshot: bool = False
    """Whether `snapshot` and `restore` work; true for a class with its own `snapshot`, unless it
    says otherwise. Without them a state is restored by exact replay.
    """
    blocking: bool = False
    """Whether its methods wait for something outside the process, and so must run in a thread."""
    # An attribute of the world, not a field of the recipe: what is too long differs between a
    # browser and a simulator, and whoever writes the world knows it.
    time_limit: float | None = None
    """The seconds that one call of a blocking world, such as a reset or a step, may take.

    A call that takes longer is abandoned. The episode is tried again with another environment, and
    this one is closed, possibly while the call is still running.
    """
    repeatability: Repeatability = Repeatability.EXACT
    """How exactly equal instances and actions give equal texts."""
    labels: LabelStyle | None = "lenient"
    """How the label of an action is read, which a recipe may set. None if actions have no label,
    which is the default for a class with its own `parse`.
    """
    first_action: str = ""
    """A regular expression: a reply ends at its first match if the recipe ends replies at their
    first action. Needed if actions are not lines after a label.
    """
    stops: Sequence[str] = (OBSERVATION,)
    """Stop strings that also end such a reply."""
    grader: Grader | None = None
    """The source of rewards that replace those of the steps once an episode has ended.

    Set it on the class, as a value or a property: it is looked up there before a world is made.
    """
    asks_in_steps: bool = True
    """Whether the steps of a world with its own `answer` ask models under its present options."""
    transcript: Transcript | None = None
    """How steps become a conversation; None for alternating turns."""
    until: Any = None
    """Where replies end, if the recipe ends them early; see `episodes.transcript.ReplyEnd`."""
    opening: Any = None
    """The recipe's changes to what comes before the first observation; see
    `episodes.transcript.Opening`.
    """
    summary_prompt: str = ""
    """The recipe's prompt for a summary of the history (`context: summary`)."""
    licence: ClassVar[str] = ""
    """The licence of its texts in a few words, which the dataset card of an export repeats; empty
    if none is named.
    """
    variables: ClassVar[Mapping[str, str]] = {}
    """The environment variable that supplies an option left out of the recipe, keyed by option."""

    _asked_role = ""
    """The role of the model that the last step asked, for error messages."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        bases = [base for base in cls.__mro__ if base not in (Environment, ABC, object)]
        if not any("name" in vars(base) for base in bases):
            cls.name = cls.__name__.lower()
        # The class itself and the mixins that come before the world that it derives from.
        own_classes = list(takewhile(lambda base: base is cls or not issubclass(base, Environment), cls.__mro__))
        if any("snapshot" in vars(base) for base in own_classes) and not any(
            "can_snapshot" in vars(base) for base in own_classes
        ):
            cls.can_snapshot = True
        if not any("labels" in vars(base) for base in bases):
            cls.labels = None if cls.has(Environment.parse) else "lenient"
        _wrap_methods(cls)

    @classmethod
    def has(cls, method: Callable[..., Any]) -> bool:
        """Return whether the class overrides a method of `Environment`, as in
        `world.has(Environment.oracle)`.
        """
        attribute: Any = getattr(cls, method.__name__)
        return getattr(attribute, "__func__", attribute) is not getattr(method, "__func__", method)

    @staticmethod
    def version_of(options: Mapping[str, Any]) -> int:
        """Return the version of the world's texts under some options. It is part of a run's id;
        raise it when stored episodes would no longer replay.
        """
        return 1

    @classmethod
    def variables_of(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the environment variable of each option, given the options that are set."""
        return cls.variables

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> Sequence[str]:
        """Return the files and folders that a world with these options reads; their contents are
        part of a run's id. A class that overrides this must name all of them.
        """
        return ()

    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits; `train` and `test` must be among them."""

    @abstractmethod
    def instances(self, split: str) -> Sequence[Instance]:
        """Return all instances of a split, in a fixed order. Raise a `LookupError` for an unknown
        split: the caller gets a `ConfigError` that names the existing ones.
        """

    @abstractmethod
    def reset(self, instance: Instance) -> str:
        """Return the first observation of a fresh episode. Raises `EnvironmentFault` for an unknown
        instance.
        """

    @abstractmethod
    def step(self, action: str) -> Transition:
        """Carry out one action and return the transition. An invalid action is answered with an
        observation that says so, never with an error.

        A step that needs the reply of a model in another role returns a transition whose info has a
        `Question` as "question". The rest of that transition is ignored, and `answer` continues the
        step.
        """

    # Two calls, so that a world holds neither a thread nor a client of a model while one is asked,
    # and the questions of hundreds of episodes share batches.
    def answer(self, reply: str) -> Transition:
        """Continue a step with the reply to its last question, and return the next transition; the
        step is done once that has no question.

        The reply comes without its thoughts, and is empty if it was cut off within them. A replay
        passes the recorded replies.
        """
        context = f"{self.name}: the step that asked a model of role {self._asked_role}"
        raise IllTypedAnswer(f"{context} cannot go on; an environment that asks needs a method answer")

    def parse(self, reply: str) -> str:
        """Return the action in a model's reply, or the empty string if there is none. Pure."""
        return line_after_label(reply, self.labels or "lenient")

    def reply_with(self, answer: str) -> str:
        """Return a reply that gives an answer, such as a gold one, and so ends the episode; by
        default the answer as a labelled action.
        """
        return f"Action: {answer}"

    def hear(self, reply: str) -> None:
        """Receive the whole reply that the next action was parsed from; called after `parse` and
        before `step`. Does nothing by default.
        """

    def called(self, reply: str) -> str:
        """Return a reply with a labelled action in the form that this world reads: unchanged by
        default, as a tool call if its actions are tool calls.
        """
        return reply

    def state(self) -> str:
        """Return a text that identifies the present state. Two moments in episodes of one instance
        may have the same text only if every action has the same result in both: the same
        observation, up to the order of what it lists, the same reward and success, and again the
        same state.

        The number of steps is left out, since it always differs, and with it when an episode is cut
        off. A world documents what else it leaves out. By default raises `EnvironmentFault`.
        """
        raise EnvironmentFault(f"{self.name} does not tell its state")

    def snapshot(self) -> Any:
        """Return an opaque copy of the state of the episode, valid until `close`."""
        raise EnvironmentFault(f"{type(self).__name__} has no snapshots; a state is restored by replay")

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a state returned by `snapshot` of this object."""
        raise EnvironmentFault(f"{type(self).__name__} has no snapshots; a state is restored by replay")

    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        """Put the episode into the state after recorded steps without taking them again, and return
        the first observation. If a class does not override this, callers replay the steps.
        """
        raise EnvironmentFault(f"{self.name} goes on from recorded steps by replay alone")

    def recall(self, instance: Instance, text: str, reward: float | None = None) -> Trajectory:
        """Return the trajectory of an episode that another program generated, read from the whole
        text of its assistant message; no tool is called. The reward is the given one, else by rule.
        """
        raise EnvironmentFault(f"{self.name} reads no episodes from texts")

    def depth(self, instance: Instance) -> int | None:
        """Return the difficulty class of an instance, by which reports break results down, or None
        if it has none.
        """
        return None

    def facts(self, instance: Instance) -> Mapping[str, Fact]:
        """Return facts that tell instances apart, keyed by name: at most `MAX_NUM_FACTS` short
        texts, numbers or flags, such as the task. Lists of episodes use them as columns and
        filters. No id depends on them.
        """
        return {}

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of an expert that solves the instance from its start, or None if there
        is none.
        """
        return None

    def oracle(self, instance: Instance, actions: Sequence[str]) -> Sequence[Verdict]:
        """Return the true verdict on each action of an episode played from its start, in order;
        never `Verdict.UNPARSABLE`. Judges are measured against these verdicts.
        """
        raise EnvironmentFault(f"{self.name} has no true verdicts")

    def identity(self, instance: Instance) -> str:
        """Return a text that two instances share only if they are the same problem: by default the
        first observation.
        """
        return self.reset(instance)

    # Three renamings of one goal are not three independent goals: intervals are clustered by
    # origin, and variants of a held-out instance are kept out of training.
    def origin(self, instance: Instance) -> Instance:
        """Return the instance that this one is a variant of; itself if there is none."""
        return instance

    def keep_answers(self, kept: AnswerStore) -> None:
        """From now on, look up results of tool calls in `kept` and store new ones there, for later
        calls, also those of other runs. Does nothing by default.
        """

    def sandbox(self) -> str:
        """Test the sandbox for the model's code on this machine, and return for a person how it
        confines the code; empty if the world runs none. Raises `SandboxError` if it does not hold.
        """
        return ""

    def reach(self) -> None:
        """Wait until the server of the world answers. Raises a `UserError` if it does not."""

    def flaws(self) -> Sequence[tuple[str, str]]:
        """Return what makes the world's server unsuitable for training, as the options stand: pairs
        of a rule's name and a sentence that names the option to change.
        """
        return ()

    def start_hint(self) -> str:
        """Return how the server that the world runs on is started, as a clause that ends a
        sentence; empty if there is none.
        """
        return ""

    # For worlds that are played by an outside agent, which waits for replies and whose own messages
    # are the conversation. Such a world overrides `relay`, and its calls wait for the agent.

    def relay(self, generation: Generation) -> None:
        """Record how the reply of the next step was generated, for the outside agent."""

    def listener(self) -> Callable[[str], None] | None:
        """Return a function that takes the text of the next reply so far while it is generated,
        from any thread and without delay; None if nobody reads partial replies.
        """
        return None

    def refuse(self, why: str) -> None:
        """Record why the outside agent's last request gets no reply; the episode then ends."""

    def decline(self, fault: AgentrError) -> NoReturn:
        """Tell the outside agent why its request gets no reply, though the episode goes on. Always
        raises: `Undelivered` with the transition to what the agent does next.
        """
        raise EnvironmentFault(f"{self.name} is played by no agent outside, so a request cannot be declined: {fault}")

    def release(self, why: str = "") -> None:
        """End the episode: an outside agent that still plays it is told that it is over, and why.
        Calling it twice is harmless.
        """

    def close(self) -> None:
        """Release what the episode holds. Calling it twice is harmless."""


# The instances of a split, made on access: a split may hold billions.


class Instances(Sequence[Instance]):
    """The instances of one split of an environment, in the order of `indices`."""

    def __init__(self, environment: str, split: str, indices: Sequence[int]) -> None:
        self._environment = environment
        self._split = split
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, item: object) -> bool:
        return (
            isinstance(item, Instance)
            and (item.environment, item.split) == (self._environment, self._split)
            and item.index in self._indices
        )

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return Instances(self._environment, self._split, self._indices[position])
        return Instance(environment=self._environment, split=self._split, index=self._indices[position])


# What worlds return, checked in one place.
#
# Worlds are other people's code. A wrong type that gets in here shows up much later, and elsewhere:
# the text "False" is truthy, a NaN is below no threshold, a lone surrogate cannot be stored.

_REWARD_REQUIREMENT = "it must be a finite number, and an environment scales its rewards to [0, 1]"

CheckedCall = Callable[..., Any]
"""Calls a method of a world with its arguments, checks the result, and returns it."""


# The methods of the class are replaced, so that no caller can forget the check.
class _CheckedMethod:
    """A method of a world's class whose results are checked; a static or class method stays one."""

    def __init__(self, method: Any, call: CheckedCall) -> None:
        self._method = method
        self._checked_call = call

    def __get__(self, env: Any, owner: type[Any] | None = None) -> Any:
        method = self._method.__get__(env, owner)
        if env is None:
            return method

        @wraps(method)
        def checked_method(*args: Any, **keywords: Any) -> Any:
            return self._checked_call(env, method, *args, **keywords)

        return checked_method


def _wrap_methods(world_class: type[Any]) -> None:
    """Wrap the methods of a world's class that `_CHECKED_CALL_BY_METHOD` names, so that what they
    return is checked; methods that come from a mixin, which is no world itself, are wrapped, too.
    """
    for name, checked_call in _CHECKED_CALL_BY_METHOD.items():
        method = next(vars(base)[name] for base in world_class.__mro__ if name in vars(base))
        if not isinstance(method, _CheckedMethod) and not getattr(method, "__isabstractmethod__", False):
            setattr(world_class, name, _CheckedMethod(method, checked_call))


def _call_instances(env: Environment, method: Callable[..., Any], split: str) -> Sequence[Instance]:
    """Return the instances of a split. Raises `ConfigError` if there is no such split or it is
    empty, and `IllTypedAnswer` if its instances are not a sequence of `Instance`.
    """
    with _convert_errors(env, f"its instances of split {split}"):
        try:
            instances = method(split)
        except LookupError as error:
            if split in (splits := env.splits()):
                raise
            raise ConfigError(f"environment {env.name} has no split {split!r}; it has {', '.join(splits)}") from error
        subject = f"{env.name}: the instances of split {split}"
        if not isinstance(instances, Sequence):
            raise IllTypedAnswer(f"{subject} are {abbreviate(instances)}; they must be a sequence, such as a list")
        if not len(instances):
            raise ConfigError(f"split {split} of environment {env.name} is empty; name another one")
        if not isinstance(instances[0], Instance):
            raise IllTypedAnswer(f"{subject} begin with {abbreviate(instances[0])}; each must be a types.Instance")
    return instances


def _call_reset(env: Environment, method: Callable[..., Any], instance: Instance) -> str:
    return checked_text(method(instance), f"{env.name}: the first observation of {instance.key}")


def _call_resume(env: Environment, method: Callable[..., Any], instance: Instance, steps: Sequence[Step]) -> str:
    return checked_text(method(instance, steps), f"the first observation of {instance.key}")


def _call_step(env: Environment, method: Callable[..., Any], action: str) -> Transition:
    return _record_role(env, checked_transition(method(action), f"{env.name}: action {abbreviate(action)}"))


def _call_answer(env: Environment, method: Callable[..., Any], reply: str) -> Transition:
    context = f"{env.name}: the step that asked a model of role {env._asked_role}"
    return _record_role(env, checked_transition(method(reply), context))


def _record_role(env: Environment, transition: Transition) -> Transition:
    """Return the transition; keep the role of its question, if it has one, for error messages."""
    if (question := transition.info.get("question")) is not None:
        env._asked_role = question.role
    return transition


def _call_parse(env: Environment, method: Callable[..., Any], reply: str) -> str:
    return checked_text(method(reply), f"{env.name}: the action that was found in a reply")


def _call_identity(env: Environment, method: Callable[..., Any], instance: Instance) -> str:
    with _convert_errors(env, f"the beginning of {instance.key}"):
        return checked_text(method(instance), f"{env.name}: the identity of {instance.key}")


def _call_depth(env: Environment, method: Callable[..., Any], instance: Instance) -> int | None:
    with _convert_errors(env, f"the depth of {instance.key}"):
        depth = method(instance)
    if depth is None:
        return None
    if isinstance(depth, bool) or not isinstance(depth, numbers.Integral) or abs(int(depth)) > MOST_TOKENS:
        raise IllTypedAnswer(
            f"{env.name}: the depth of {instance.key} is {abbreviate(depth)}; it must be a whole number or None"
        )
    return int(depth)


def _call_facts(env: Environment, method: Callable[..., Any], instance: Instance) -> dict[str, Fact]:
    subject = f"{env.name}: the facts of {instance.key}"
    with _convert_errors(env, subject.removeprefix(f"{env.name}: ")):
        facts = method(instance)
    if not isinstance(facts, Mapping) or len(facts) > MAX_NUM_FACTS:
        raise IllTypedAnswer(
            f"{subject} are {abbreviate(facts)}; they must be a mapping of at most {MAX_NUM_FACTS} names"
        )
    return {
        _checked_fact_name(name, subject): _checked_fact(value, f"{subject}: {name}") for name, value in facts.items()
    }


def _checked_fact_name(name: Any, subject: str) -> str:
    if not isinstance(name, str) or not _FACT_NAME.fullmatch(name):
        raise IllTypedAnswer(
            f"{subject} have a name {abbreviate(name)}; one has at most 30 small letters, digits and underscores, and "
            "begins with a letter"
        )
    return name


def _checked_fact(value: Any, context: str) -> Fact:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and abs(int(value)) <= MOST_TOKENS:
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    if not isinstance(value, str) or len(value) > _MAX_FACT_CHARS:
        raise IllTypedAnswer(
            f"{context} is {abbreviate(value)}; it must be a finite number, true or false, or a text of at most "
            f"{_MAX_FACT_CHARS} characters"
        )
    return checked_text(value, context)


def _call_expert(env: Environment, method: Callable[..., Any], instance: Instance) -> tuple[str, ...] | None:
    with _convert_errors(env, f"the expert's replies to {instance.key}"):
        replies = method(instance)
    if replies is None:
        return None
    subject = f"{env.name}: the expert's replies to {instance.key}"
    if isinstance(replies, str) or not isinstance(replies, Sequence):
        raise IllTypedAnswer(f"{subject} are {abbreviate(replies)}; they must be a sequence of texts")
    return tuple(checked_text(reply, subject) for reply in replies)


_CHECKED_CALL_BY_METHOD: Mapping[str, CheckedCall] = {
    "instances": _call_instances,
    "reset": _call_reset,
    "resume": _call_resume,
    "step": _call_step,
    "answer": _call_answer,
    "parse": _call_parse,
    "identity": _call_identity,
    "depth": _call_depth,
    "facts": _call_facts,
    "expert": _call_expert,
}
_wrap_methods(Environment)


def checked_transition(value: Any, context: str) -> Transition:
    """Return the result of a step as a `Transition` with plain Python numbers and flags; `context`
    begins error messages.

    Raises `IllTypedAnswer` if a part is missing or mistyped, or the reward above 1 or not finite.
    """
    if not isinstance(value, tuple | list) or len(value) != 5:
        raise IllTypedAnswer(
            f"{context} gave {abbreviate(value)}; a step returns observation, reward, terminated, truncated and info"
        )
    observation, reward, terminated, truncated, info = value
    checked_reward = checked_number(reward, f"{context}: the reward", requirement=_REWARD_REQUIREMENT)
    if checked_reward > 1:
        raise IllTypedAnswer(f"{context}: the reward is {checked_reward!r}; {_REWARD_REQUIREMENT}")
    if not isinstance(info, Mapping) or "success" not in info:
        raise IllTypedAnswer(f'{context}: info is {abbreviate(info)}; it must be a mapping with the flag "success"')
    checked_info = {**info, "success": checked_flag(info["success"], f'{context}: info["success"]')}
    if info.get("valid") is not None:
        checked_info["valid"] = checked_flag(info["valid"], f'{context}: info["valid"]')
    if info.get("matched") is not None:
        checked_info["matched"] = checked_text(info["matched"], f'{context}: info["matched"]')
    if not isinstance(info.get("question"), Question | None):
        raise IllTypedAnswer(
            f'{context}: info["question"] is {abbreviate(info["question"])}; it must be a types.Question'
        )
    tool_calls, subject = info.get("tool_calls", ()), f'{context}: info["tool_calls"]'
    if not isinstance(tool_calls, tuple | list) or not all(isinstance(call, ToolCall) for call in tool_calls):
        raise IllTypedAnswer(f"{subject} are {abbreviate(tool_calls)}; they must be a sequence of types.ToolCall")
    for call in tool_calls:
        for name in ("tool", "provider", "key", "status", "output"):
            checked_text(getattr(call, name), f"{subject}: {name}")
        checked_number(call.milliseconds, f"{subject}: milliseconds")
        checked_flag(call.cached, f"{subject}: cached")
        try:
            parameters_json = json.dumps(call.parameters, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise IllTypedAnswer(
                f"{subject}: parameters are {abbreviate(call.parameters)}, not JSON: {error}"
            ) from error
        checked_text(parameters_json, f"{subject}: parameters")
    if tool_calls:
        checked_info["tool_calls"] = tuple(tool_calls)
    return Transition(
        checked_text(observation, f"{context}: the observation"),
        checked_reward,
        checked_flag(terminated, f"{context}: terminated"),
        checked_flag(truncated, f"{context}: truncated"),
        checked_info,
    )


@contextmanager
def _convert_errors(env: Environment, task: str) -> Iterator[None]:
    """Turn an exception of an environment's own code into the error that `error_of_own_code`
    returns. Not used for calls of an episode, such as a step: their exceptions become events.
    """
    try:
        yield
    except AgentrError:
        raise
    except Exception as error:
        message = f"environment {env.name} cannot tell {task} ({error_summary(error)}); correct the environment"
        raise error_of_own_code(env.name, error, message) from error


def error_of_own_code(name: str, error: BaseException, message: str) -> AgentrError:
    """Return the error for an exception of an environment's own code: a `MissingPart` if something
    is missing on this machine, else an `EnvironmentFault` with the given sentence.
    """
    if missing := missing_part(error):
        return MissingPart(f"environment {name} needs {missing}")
    return EnvironmentFault(message)


def missing_part(error: BaseException) -> str:
    """Return what is missing on this machine according to an exception of third-party code, such as
    a package, with how to get it; empty if the exception says nothing of the kind.
    """
    explicit_cause: BaseException | None = error
    while explicit_cause is not None:
        if isinstance(explicit_cause, ModuleNotFoundError) and explicit_cause.name:
            package = explicit_cause.name.partition(".")[0]
            return f"the Python package {package}, which is not installed: `pip install {package}`, or as its page says"
        if isinstance(explicit_cause, FileNotFoundError) and explicit_cause.filename:
            path = os.fsdecode(explicit_cause.filename)
            if traceback.extract_tb(explicit_cause.__traceback__)[-1].filename == subprocess.__file__:
                return f"the program {path}, which is not found: install it, or put its folder on PATH"
            return f"{path}, which is not there: fetch or make it as the environment's page says"
        explicit_cause = explicit_cause.__cause__
    # HTTP clients raise their own errors while they handle this one, so `__context__` counts here.
    # Above it does not: code that copes with a missing file may fail later for another reason.
    current_error: BaseException | None = error
    while current_error is not None:
        if isinstance(current_error, ConnectionRefusedError):
            return f"a server, and none answers ({error_summary(error)}): start it, or correct its address"
        current_error = current_error.__cause__ or current_error.__context__
    return ""


def checked_text(value: Any, name: str) -> str:
    """Return a text that can be stored. Raises `IllTypedAnswer` for any other type, and for a text
    with a lone surrogate.
    """
    if not isinstance(value, str):
        raise IllTypedAnswer(f"{name} is {abbreviate(value)}; it must be a text")
    if (position := lone_surrogate(value)) is not None:
        raise IllTypedAnswer(f"{name} has half a surrogate pair at {position}; it must be text that UTF-8 can write")
    return str(value)


def checked_number(value: Any, name: str, *, requirement: str = "it must be a finite number") -> float:
    """Return a finite number as a float. Raises `IllTypedAnswer` for any other type, flags
    included, NaN and infinity.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            if math.isfinite(number := float(value)):
                return number
        except OverflowError:
            pass
    raise IllTypedAnswer(f"{name} is {abbreviate(value)}; {requirement}")


def checked_flag(value: Any, name: str) -> bool:
    """Return a flag, which may be NumPy's, as a bool. Raises `IllTypedAnswer` for anything else,
    numbers and texts included.
    """
    value_type = type(value)
    # Gymnasium's worlds return NumPy's bool, whose name depends on the version.
    if value_type is bool or (value_type.__module__ == "numpy" and value_type.__name__ in ("bool", "bool_")):
        return bool(value)
    raise IllTypedAnswer(f"{name} is {abbreviate(value)}; it must be true or false")
