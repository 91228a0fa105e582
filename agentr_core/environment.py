"""Worlds: the one base class of them, what it checks of their answers, and how an episode of them
becomes a conversation.
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
from agentr_core.replies import OBSERVATION, Labels, line_after_label
from agentr_core.texts import abbreviate, cause, lone_surrogate
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


MOST_ELSEWHERE = 0.01
"""The share of pairs of equal state and action that may lead elsewhere; a world may leave out of
its state what rarely matters.
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


def repeats(text: str, recorded: str, repeatability: Repeatability) -> bool:
    """Return whether a text repeats the recorded one: to the letter if that is promised, else in
    its words, in any order.
    """
    if text == recorded or repeatability is Repeatability.EXACT:
        return text == recorded
    return Counter(_WORD.findall(text)) == Counter(_WORD.findall(recorded))


# How steps become a conversation.


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


class Part(NamedTuple):
    """A conversation of an episode: the positions of the steps whose replies are its own, and its
    turns, in which other replies may stand untrained.

    A `side` conversation is not about the agent's task, such as one that finds a title.
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

    def parts(self, first_observation: str, steps: Sequence[Step]) -> tuple[Part, ...]:
        """Return the conversations in the order of their first replies. Each step is a position of
        one of them, where its reply is trained, unless that is left out on purpose.
        """
        ...


# The base class.

Fact = str | int | float | bool
"""What a world tells of an instance under one name."""
MOST_FACTS = 8
"""More would be more columns than a list has room for."""
_FACT_NAME = re.compile(r"[a-z][a-z0-9_]{0,29}")
_FACT_CHARS = 200


class Undelivered(EnvironmentUnavailable):
    """A reply did not reach the agent outside that had asked for it, so it was no step.

    `instead` is where the step before it led to, given what the agent did next. `stop` is why the
    episode is over if the agent can do nothing more in it.
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

    The words are Gymnasium's. A world needs `instruction`, `splits`, `instances`, `reset` and
    `step`; all else has a default, and `has` tells whether a class has its own version of a method.
    What a world returns is checked whenever one of its methods is called, also by itself: a wrong
    type raises `IllTypedAnswer`. `agentr_core.environments.contract.check` tests any world.
    """

    name: str = ""
    """The name under which it is registered; by default that of the class in lower case."""
    instruction: str
    """The first user turn: what the world is, which actions there are, how to reply."""
    acknowledgement: str = "Ok."
    """The assistant's turn after the instruction; never trained. A growing turn has none."""
    step_limit: int = 20
    """The number of steps after which an episode is usually cut; a recipe may say otherwise."""
    can_snapshot: bool = False
    """Whether `snapshot` and `restore` work; true for a class with its own `snapshot`, unless it
    says otherwise. Without them a state is restored by exact replay.
    """
    blocking: bool = False
    """Whether calls wait for something outside the process, and so belong in a thread."""
    # An attribute of the world, not a field of the recipe: what is too long differs between a
    # browser and a simulator, and whoever writes the world knows it.
    time_limit: float | None = None
    """The seconds that one call of a world that blocks, such as a reset or a step, may take.

    A call that takes longer is given up. The episode is tried again with another environment, and
    this one is closed while the call may still be at work.
    """
    repeatability: Repeatability = Repeatability.EXACT
    """How exactly equal instances and actions give equal texts."""
    labels: Labels | None = "lenient"
    """How the label of an action is read, which a recipe may set; None if actions have none, which
    is the default of a class with its own `parse`.
    """
    first_action: str = ""
    """The regular expression at whose first match a reply ends that a recipe ends at its first
    action; needed where actions are no lines after a label.
    """
    stops: Sequence[str] = (OBSERVATION,)
    """The texts that end such a reply, too."""
    grader: Grader | None = None
    """The source of rewards that replace those of the steps once an episode has ended.

    The class itself has the attribute, which may be a property: a grader's questions determine
    which runs share their work.
    """
    asks_in_steps: bool = True
    """Whether a world with an own `answer` asks models as its options stand."""
    transcript: Transcript | None = None
    """How steps become a conversation; None for alternating turns."""
    until: Any = None
    """Where a recipe ends replies; see `episodes.transcript.Until`."""
    opening: Any = None
    """What comes before the first observation; see `episodes.transcript.Opening`."""
    summary_prompt: str = ""
    """What a recipe asks a summary with (`context: summary`)."""
    licence: ClassVar[str] = ""
    """The licence of its texts in a few words, which the card of an export repeats; empty: none is
    named.
    """
    variables: ClassVar[Mapping[str, str]] = {}
    """The environment variables that stand in for options, by option."""

    _role = ""
    """The role of the model that the last step asked."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        bases = [kind for kind in cls.__mro__ if kind not in (Environment, ABC, object)]
        if not any("name" in vars(kind) for kind in bases):
            cls.name = cls.__name__.lower()
        # The class itself and the mixins that come before the world that it derives from.
        own_classes = list(takewhile(lambda kind: kind is cls or not issubclass(kind, Environment), cls.__mro__))
        if any("snapshot" in vars(kind) for kind in own_classes) and not any(
            "can_snapshot" in vars(kind) for kind in own_classes
        ):
            cls.can_snapshot = True
        if not any("labels" in vars(kind) for kind in bases):
            cls.labels = None if cls.has(Environment.parse) else "lenient"
        _check_answers(cls)

    @classmethod
    def has(cls, method: Callable[..., Any]) -> bool:
        """Return whether a class has its own version of a method of this one, as in
        `world.has(Environment.oracle)`.
        """
        attribute: Any = getattr(cls, method.__name__)
        return getattr(attribute, "__func__", attribute) is not getattr(method, "__func__", method)

    @staticmethod
    def version_of(options: Mapping[str, Any]) -> int:
        """Return the version of the texts for some options, which is part of a run's id: it grows
        when stored episodes would no longer replay.
        """
        return 1

    @classmethod
    def variables_of(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the environment variables that stand in for options, given some of them."""
        return cls.variables

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> Sequence[str]:
        """Return the files and folders that are read with some options: their contents are part of
        a run's id. A class with its own version names all of them.
        """
        return ()

    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits; `train` and `test` must be among them."""

    @abstractmethod
    def instances(self, split: str) -> Sequence[Instance]:
        """Return all instances of a split, in a fixed order. A `LookupError` for an unknown split
        becomes a `ConfigError` that names those that there are.
        """

    @abstractmethod
    def reset(self, instance: Instance) -> str:
        """Return the first observation of a fresh episode. Raises `EnvironmentFault` for an unknown
        instance.
        """

    @abstractmethod
    def step(self, action: str) -> Transition:
        """Return what one action leads to. An invalid action is an observation that says so, never
        an error.

        A step that asks a model of another role returns a transition with a `Question` as
        "question" in its info; nothing else in that transition counts, and `answer` goes on.
        """

    # Two calls, so that a world holds neither a thread nor a client of a model while one is asked,
    # and the questions of hundreds of episodes share batches.
    def answer(self, reply: str) -> Transition:
        """Return how the step goes on, given the reply to its last question without its thoughts;
        empty if it was cut within them. The step is done once this returns a transition without a
        question. A replay is given the recorded answers.
        """
        where = f"{self.name}: the step that asked a model of role {self._role}"
        raise IllTypedAnswer(f"{where} cannot go on; an environment that asks needs a method answer")

    def parse(self, reply: str) -> str:
        """Return the action in a model's reply, or the empty string if there is none. Pure."""
        return line_after_label(reply, self.labels or "lenient")

    def reply_with(self, answer: str) -> str:
        """Return a reply that ends an episode with an answer, such as a gold one; by default, the
        answer as a labelled action.
        """
        return f"Action: {answer}"

    def hear(self, reply: str) -> None:
        """Take note of the whole reply that the action of the next step is found in."""

    def called(self, reply: str) -> str:
        """Return a reply with a labelled action as this world's actions are written: by default as
        it is, else as a tool call.
        """
        return reply

    def state(self) -> str:
        """Return a text that two moments of episodes of one instance share only if every action has
        the same result in both: the same observation, up to the order of what it lists, the same
        reward and success, and again the same state.

        A count of steps, which no two moments of an episode share, is left out, and with it when an
        episode is cut. A world says what else it leaves out. A class without its own cannot tell
        that an episode is back in a state.
        """
        raise EnvironmentFault(f"{self.name} does not tell its state")

    def snapshot(self) -> Any:
        """Return an opaque copy of the state of the episode, valid until `close`."""
        raise EnvironmentFault(f"{type(self).__name__} has no snapshots; a state is restored by replay")

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a state returned by `snapshot` of this object."""
        raise EnvironmentFault(f"{type(self).__name__} has no snapshots; a state is restored by replay")

    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        """Return the first observation, with the episode in the state after recorded steps; no step
        is taken again. A class without its own replays them.
        """
        raise EnvironmentFault(f"{self.name} goes on from recorded steps by replay alone")

    def recall(self, instance: Instance, text: str, reward: float | None = None) -> Trajectory:
        """Return the episode, played elsewhere, with the steps of the whole text of its turn,
        without calling tools. Its reward is the one given or, without it, that of the rule.
        """
        raise EnvironmentFault(f"{self.name} reads no episodes from texts")

    def depth(self, instance: Instance) -> int | None:
        """Return the difficulty class of an instance for the report's breakdown, or None if there
        is none.
        """
        return None

    def facts(self, instance: Instance) -> Mapping[str, Fact]:
        """Return what tells an instance from others, by name: a few short texts and numbers, such
        as its task, which lists of episodes have as columns and filters. No id depends on them.
        """
        return {}

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the replies of an expert that solves the instance from its start, or None if there
        is none.
        """
        return None

    def oracle(self, instance: Instance, actions: Sequence[str]) -> Sequence[Verdict]:
        """Return the true verdict on each action of an episode, played from its start; never
        unparsable. Judges are measured against it.
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
        """Look the answers of tools up in `kept` from now on, and keep new ones there, for later
        calls, also of other runs.
        """

    def sandbox(self) -> str:
        """Return how far code of the model is confined on this machine, for a person, once that has
        been tested; the empty string if none is run. Raises `SandboxError` where it does not hold.
        """
        return ""

    def reach(self) -> None:
        """Return once the server answers that the world runs on. Raises `UserError` when it does
        not.
        """

    def flaws(self) -> Sequence[tuple[str, str]]:
        """Return what of the server that the world runs on cannot be trained on, as the options
        stand, each as the name of a rule and a sentence with the option for it.
        """
        return ()

    def start_hint(self) -> str:
        """Return how the server that the world runs on is started, as a clause that ends a
        sentence; empty if there is none.
        """
        return ""

    # An outside agent that waits for replies, and whose own messages make the conversation: its
    # world has its own `relay`, and calls wait for the agent, however long it takes.

    def relay(self, generation: Generation) -> None:
        """Take note of how the reply of the next step was drawn."""

    def listener(self) -> Callable[[str], None] | None:
        """Return what takes the text of the next reply while it is written, from any thread and
        without delay; None if nobody reads it before it is whole.
        """
        return None

    def refuse(self, why: str) -> None:
        """Take note of why the last request of an agent outside gets no reply; the episode ends
        with that.
        """

    def decline(self, fault: AgentrError) -> NoReturn:
        """Tell an agent outside why its request gets no reply, though the episode goes on. Raises
        `Undelivered` with what the agent does next, as a step does whose reply did not reach it.
        """
        raise EnvironmentFault(f"{self.name} is played by no agent outside, so a request cannot be declined: {fault}")

    def release(self, why: str = "") -> None:
        """Let go of the episode: an agent outside that still plays it is told that it is over, and
        why. Calling it twice is harmless.
        """

    def close(self) -> None:
        """Release what the episode holds. Calling it twice is harmless."""


# The instances of a split, made when they are asked for: a split may hold billions.


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
# the text "False" is true, a NaN is below no threshold, half of a surrogate pair cannot be stored.

_SCALE = "it must be a finite number, and an environment scales its rewards to [0, 1]"

Check = Callable[..., Any]
"""Calls a method of a world with its arguments, and returns its result once that is checked."""


# The methods of the class are replaced, so that no caller can forget the check.
class _Checked:
    """A method of a world's class whose results are checked; a static or class method stays one."""

    def __init__(self, method: Any, check: Check) -> None:
        self._method = method
        self._check = check

    def __get__(self, env: Any, kind: type[Any] | None = None) -> Any:
        method = self._method.__get__(env, kind)
        if env is None:
            return method

        @wraps(method)
        def checked(*args: Any, **keywords: Any) -> Any:
            return self._check(env, method, *args, **keywords)

        return checked


def _check_answers(kind: type[Any]) -> None:
    """Let what a class of worlds returns be checked, whether a method is its own, or one of a mixin
    that is no world itself.
    """
    for name, check in _CHECKS.items():
        method = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        if not isinstance(method, _Checked) and not getattr(method, "__isabstractmethod__", False):
            setattr(kind, name, _Checked(method, check))


def _instances(env: Environment, method: Check, split: str) -> Sequence[Instance]:
    """Raises `ConfigError` when the environment has no such split or the split is empty, and
    `IllTypedAnswer` when its instances are no sequence of `Instance`.
    """
    with _own_code(env, f"its instances of split {split}"):
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


def _reset(env: Environment, method: Check, instance: Instance) -> str:
    return checked_text(method(instance), f"{env.name}: the first observation of {instance.key}")


def _resume(env: Environment, method: Check, instance: Instance, steps: Sequence[Step]) -> str:
    return checked_text(method(instance, steps), f"the first observation of {instance.key}")


def _step(env: Environment, method: Check, action: str) -> Transition:
    return _record_role(env, checked_transition(method(action), f"{env.name}: action {abbreviate(action)}"))


def _answer(env: Environment, method: Check, reply: str) -> Transition:
    where = f"{env.name}: the step that asked a model of role {env._role}"
    return _record_role(env, checked_transition(method(reply), where))


def _record_role(env: Environment, transition: Transition) -> Transition:
    """Return a transition; the role that it asks is kept for what is said about its answer."""
    if (question := transition.info.get("question")) is not None:
        env._role = question.role
    return transition


def _parse(env: Environment, method: Check, reply: str) -> str:
    return checked_text(method(reply), f"{env.name}: the action that was found in a reply")


def _identity(env: Environment, method: Check, instance: Instance) -> str:
    with _own_code(env, f"the beginning of {instance.key}"):
        return checked_text(method(instance), f"{env.name}: the identity of {instance.key}")


def _depth(env: Environment, method: Check, instance: Instance) -> int | None:
    with _own_code(env, f"the depth of {instance.key}"):
        value = method(instance)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or abs(int(value)) > MOST_TOKENS:
        raise IllTypedAnswer(
            f"{env.name}: the depth of {instance.key} is {abbreviate(value)}; it must be a whole number or None"
        )
    return int(value)


def _facts(env: Environment, method: Check, instance: Instance) -> dict[str, Fact]:
    subject = f"{env.name}: the facts of {instance.key}"
    with _own_code(env, subject.removeprefix(f"{env.name}: ")):
        facts = method(instance)
    if not isinstance(facts, Mapping) or len(facts) > MOST_FACTS:
        raise IllTypedAnswer(f"{subject} are {abbreviate(facts)}; they must be a mapping of at most {MOST_FACTS} names")
    return {_fact_name(name, subject): _fact(value, f"{subject}: {name}") for name, value in facts.items()}


def _fact_name(name: Any, subject: str) -> str:
    if not isinstance(name, str) or not _FACT_NAME.fullmatch(name):
        raise IllTypedAnswer(
            f"{subject} have a name {abbreviate(name)}; one has at most 30 small letters, digits and underscores, and "
            "begins with a letter"
        )
    return name


def _fact(value: Any, where: str) -> Fact:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and abs(int(value)) <= MOST_TOKENS:
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    if not isinstance(value, str) or len(value) > _FACT_CHARS:
        raise IllTypedAnswer(
            f"{where} is {abbreviate(value)}; it must be a finite number, true or false, or a text of at most "
            f"{_FACT_CHARS} characters"
        )
    return checked_text(value, where)


def _expert(env: Environment, method: Check, instance: Instance) -> tuple[str, ...] | None:
    with _own_code(env, f"the expert's replies to {instance.key}"):
        replies = method(instance)
    if replies is None:
        return None
    subject = f"{env.name}: the expert's replies to {instance.key}"
    if isinstance(replies, str) or not isinstance(replies, Sequence):
        raise IllTypedAnswer(f"{subject} are {abbreviate(replies)}; they must be a sequence of texts")
    return tuple(checked_text(reply, subject) for reply in replies)


_CHECKS: Mapping[str, Check] = {
    "instances": _instances,
    "reset": _reset,
    "resume": _resume,
    "step": _step,
    "answer": _answer,
    "parse": _parse,
    "identity": _identity,
    "depth": _depth,
    "facts": _facts,
    "expert": _expert,
}
_check_answers(Environment)


def checked_transition(value: Any, where: str) -> Transition:
    """Return the answer to a step with plain Python numbers and flags; `where` begins an error
    message.

    Raises `IllTypedAnswer` when a part has a wrong type, or the reward is not finite or above 1.
    """
    if not isinstance(value, tuple | list) or len(value) != 5:
        raise IllTypedAnswer(
            f"{where} gave {abbreviate(value)}; a step returns observation, reward, terminated, truncated and info"
        )
    observation, reward, terminated, truncated, info = value
    number = checked_number(reward, f"{where}: the reward", requirement=_SCALE)
    if number > 1:
        raise IllTypedAnswer(f"{where}: the reward is {number!r}; {_SCALE}")
    if not isinstance(info, Mapping) or "success" not in info:
        raise IllTypedAnswer(f'{where}: info is {abbreviate(info)}; it must be a mapping with the flag "success"')
    checked = {**info, "success": checked_flag(info["success"], f'{where}: info["success"]')}
    if info.get("valid") is not None:
        checked["valid"] = checked_flag(info["valid"], f'{where}: info["valid"]')
    if info.get("matched") is not None:
        checked["matched"] = checked_text(info["matched"], f'{where}: info["matched"]')
    if not isinstance(info.get("question"), Question | None):
        raise IllTypedAnswer(
            f'{where}: info["question"] is {abbreviate(info["question"])}; it must be a types.Question'
        )
    calls, subject = info.get("tool_calls", ()), f'{where}: info["tool_calls"]'
    if not isinstance(calls, tuple | list) or not all(isinstance(call, ToolCall) for call in calls):
        raise IllTypedAnswer(f"{subject} are {abbreviate(calls)}; they must be a sequence of types.ToolCall")
    for call in calls:
        for name in ("tool", "provider", "key", "status", "output"):
            checked_text(getattr(call, name), f"{subject}: {name}")
        checked_number(call.milliseconds, f"{subject}: milliseconds")
        checked_flag(call.cached, f"{subject}: cached")
        try:
            plain = json.dumps(call.parameters, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise IllTypedAnswer(
                f"{subject}: parameters are {abbreviate(call.parameters)}, not JSON: {error}"
            ) from error
        checked_text(plain, f"{subject}: parameters")
    if calls:
        checked["tool_calls"] = tuple(calls)
    return Transition(
        checked_text(observation, f"{where}: the observation"),
        number,
        checked_flag(terminated, f"{where}: terminated"),
        checked_flag(truncated, f"{where}: truncated"),
        checked,
    )


@contextmanager
def _own_code(env: Environment, task: str) -> Iterator[None]:
    """Turn an exception of an environment's own code into an `EnvironmentFault` that says where it
    was raised. Calls of an episode are not treated so: their exceptions become events.
    """
    try:
        yield
    except AgentrError:
        raise
    except Exception as error:
        sentence = f"environment {env.name} cannot tell {task} ({cause(error)}); correct the environment"
        raise own_fault(env.name, error, sentence) from error


def own_fault(name: str, error: BaseException, sentence: str) -> AgentrError:
    """Return the error for an exception of an environment's own code: a `MissingPart` that says
    what is not on this machine, if it is that, else an `EnvironmentFault` with the given sentence.
    """
    if missing := missing_part(error):
        return MissingPart(f"environment {name} needs {missing}")
    return EnvironmentFault(sentence)


def missing_part(error: BaseException) -> str:
    """Return what an exception of somebody else's code says is not on this machine, such as a
    package, and how it is brought there; empty if it says nothing of the kind.
    """
    explicit: BaseException | None = error
    while explicit is not None:
        if isinstance(explicit, ModuleNotFoundError) and explicit.name:
            package = explicit.name.partition(".")[0]
            return f"the Python package {package}, which is not installed: `pip install {package}`, or as its page says"
        if isinstance(explicit, FileNotFoundError) and explicit.filename:
            path = os.fsdecode(explicit.filename)
            if traceback.extract_tb(explicit.__traceback__)[-1].filename == subprocess.__file__:
                return f"the program {path}, which is not found: install it, or put its folder on PATH"
            return f"{path}, which is not there: fetch or make it as the environment's page says"
        explicit = explicit.__cause__
    # Clients of HTTP raise errors of their own while they handle this one. Of the others, such a
    # context tells nothing: code that does without a file may fail at something else.
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ConnectionRefusedError):
            return f"a server, and none answers ({cause(error)}): start it, or correct its address"
        at = at.__cause__ or at.__context__
    return ""


def checked_text(value: Any, name: str) -> str:
    """Return a text that can be stored. Raises `IllTypedAnswer` for any other type and for half a
    surrogate pair.
    """
    if not isinstance(value, str):
        raise IllTypedAnswer(f"{name} is {abbreviate(value)}; it must be a text")
    if (position := lone_surrogate(value)) is not None:
        raise IllTypedAnswer(f"{name} has half a surrogate pair at {position}; it must be text that UTF-8 can write")
    return str(value)


def checked_number(value: Any, name: str, *, requirement: str = "it must be a finite number") -> float:
    """Return a finite number. Raises `IllTypedAnswer` for any other type, NaN and infinity."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            if math.isfinite(plain := float(value)):
                return plain
        except OverflowError:
            pass
    raise IllTypedAnswer(f"{name} is {abbreviate(value)}; {requirement}")


def checked_flag(value: Any, name: str) -> bool:
    """Return a flag, which may be NumPy's. Raises `IllTypedAnswer` for anything else, numbers and
    texts included.
    """
    kind = type(value)
    # Gymnasium's worlds return NumPy's bool, whose name depends on the version.
    if kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")):
        return bool(value)
    raise IllTypedAnswer(f"{name} is {abbreviate(value)}; it must be true or false")
