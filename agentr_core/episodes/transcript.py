"""Transcripts: how the steps of an episode become a conversation, both the prompt of the next reply
and the conversation that is trained on. Each environment has one transcript.

Search, rollouts, splices and preferences all build their conversations here, so a model is trained
on exactly what it reads while it acts. There are three transcripts: the two below, and
`NativeTurns` for messages with native tool calls.

    alternating turns   instruction | "Ok." | first observation | reply | observation | reply ...
                        user          asst.   user                asst.   user          assistant

    continuation        instruction | first observation | reply, observation, reply, ... reply
                        system        user                one assistant turn of several spans

Example episodes given as turns come before the first observation.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from agentr_core.environment import Conversation, Dividing, Environment, Transcript
from agentr_core.errors import ConfigError
from agentr_core.texts import blank_thoughts, json_end, lone_surrogate
from agentr_core.types import Message, Request, Sampling, Span, Step, Trajectory, grown_turn

# What a recipe puts before the first observation: a system turn, another instruction, examples.
#
# It is an attribute of the environment, where the transcript finds it, so that search, episodes,
# samples and previews all begin alike. No part of it carries loss.

OPENING_ATTRIBUTE = "opening"
_OBSERVATION_PREFIX = "Observation: "
_ONE_EXAMPLE_TITLE = "Here is an example of an episode."
_EXAMPLES_TITLE = "Here are {} examples of episodes."
_EXAMPLES_END = "That was the last example. What comes next is the problem that you solve."


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A recipe's changes to what an environment puts before the first observation."""

    system: str = ""
    """The text of a system turn; put before the instruction if that is the system turn."""
    instruction: str | None = None
    """The instruction that replaces the environment's; None keeps that."""
    examples: tuple[str, ...] = ()
    """Example episodes as texts, which follow the instruction in its turn."""
    turns: tuple[Message, ...] = ()
    """Example episodes as turns, which come before the first observation."""


def set_opening(env: Any, opening: Opening) -> None:
    """Set the opening of an environment's episodes. Raises `ConfigError` if its class does not
    allow the attribute, as one with `__slots__` may not.
    """
    try:
        setattr(env, OPENING_ATTRIBUTE, opening)
    except AttributeError as error:
        raise ConfigError(
            f"environment {env.name} takes no attribute {OPENING_ATTRIBUTE}; let its class have one, or leave the "
            "prompt out"
        ) from error


def instruction_of(env: Any) -> str:
    """Return the instruction, the recipe's if it has one, and the example episodes as texts."""
    opening = _opening_of(env)
    instruction: str = env.instruction if opening.instruction is None else opening.instruction
    if not opening.examples:
        return instruction
    num_examples = len(opening.examples)
    title = _ONE_EXAMPLE_TITLE if num_examples == 1 else _EXAMPLES_TITLE.format(num_examples)
    return "\n\n".join((instruction, title, *opening.examples, _EXAMPLES_END))


def with_system(env: Any, instruction: str) -> str:
    """Return the text of a system turn: the recipe's system text, if any, and the instruction."""
    return "\n\n".join(filter(None, (_opening_of(env).system, instruction)))


def system_turns(env: Any) -> tuple[Message, ...]:
    """Return the recipe's system text as a turn of its own; empty if the recipe has none."""
    system = _opening_of(env).system
    return (Message(role="system", text=system),) if system else ()


def example_turns(env: Any) -> tuple[Message, ...]:
    """Return the turns of the example episodes; empty if there are none, or they are texts."""
    return _opening_of(env).turns


def example_text(turns: Sequence[Message]) -> str:
    """Return the turns of an episode, the first of which states the problem, as one text. Later
    user turns are marked with "Observation: "; turns after the last reply are left out.
    """
    last_reply = max((position for position, turn in enumerate(turns) if turn.role == "assistant"), default=0)
    return "\n\n".join(
        f"{_OBSERVATION_PREFIX}{turn.text}"
        if position and turn.role == "user" and not turn.text.startswith(_OBSERVATION_PREFIX)
        else turn.text
        for position, turn in enumerate(turns[: last_reply + 1])
    )


def _opening_of(env: Any) -> Opening:
    opening: Opening = env.opening or Opening()
    return opening


NUM_OPENING_TURNS = 3
"""Turns before the first reply of alternating turns, not counting a system turn and examples."""


def opening_length(messages: Sequence[Message]) -> int:
    """Return how many turns come before the first reply of a conversation in alternating turns."""
    examples = sum(message.example for message in messages)
    return NUM_OPENING_TURNS + examples + bool(messages and messages[0].role == "system")


class TurnTranscript(ABC):
    """Base of transcripts in turns: an opening, then each reply and the turns that answer it."""

    @abstractmethod
    def opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        """Return the turns before the first reply."""

    @abstractmethod
    def results(self, step: Step) -> tuple[Message, ...]:
        """Return the turns that answer the reply of a step, at least one."""

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the prompt of the next reply, without what a summary has replaced."""
        return self._conversation(env, first_observation, steps, [False] * len(steps))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation up to the last reply; the reply of step i carries loss if
        `train[i]`. The last observation is left out: it would lengthen a sample and teach nothing.
        """
        if not steps:
            return self.opening(env, first_observation)
        num_summarised = steps[-1].summary_of
        if num_summarised is None:
            before = self._conversation(env, first_observation, steps[:-1], train[:-1])
        else:
            before = self._before_summary(env, first_observation, steps[:-1], train[:-1], num_summarised)
        return (*before, reply_turn(steps[-1], train[-1]))

    def summary_prompt(
        self, env: Environment, first_observation: str, steps: Sequence[Step], num_summarised: int
    ) -> tuple[Message, ...]:
        """Return the conversation that a summary of the first `num_summarised` steps is drawn from;
        it ends with the recipe's request for one.
        """
        return self._before_summary(env, first_observation, steps, [False] * len(steps), num_summarised)

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings as they are: a reply ends with its turn."""
        return sampling

    def _conversation(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        opening, start = self.opening(env, first_observation), 0
        if summaries := summary_positions(steps):
            last_summary = summaries[-1]
            start = steps[last_summary].summary_of or 0
            summary = reply_turn(steps[last_summary], train[last_summary])
            opening = (*with_summary_request(opening, env.summary_prompt), summary, *self.results(steps[start - 1]))
        later = (
            turn
            for step, is_trained in zip(steps[start:], train[start:], strict=True)
            if step.summary_of is None
            for turn in (reply_turn(step, is_trained), *self.results(step))
        )
        return (*opening, *later)

    def _before_summary(
        self,
        env: Environment,
        first_observation: str,
        steps: Sequence[Step],
        train: Sequence[bool],
        num_summarised: int,
    ) -> tuple[Message, ...]:
        # An earlier summary may come later in `steps` than the steps that are summed up now.
        positions = [i for i, step in enumerate(steps) if i < num_summarised or step.summary_of is not None]
        before = self._conversation(
            env, first_observation, [steps[i] for i in positions], [train[i] for i in positions]
        )
        return with_summary_request(before, env.summary_prompt)


@dataclass(frozen=True, slots=True)
class AlternatingTurns(TurnTranscript):
    """Instruction, acknowledgement and first observation, then replies and observations in turn.

    There is a system turn only if the recipe has one. Source: Agent-R (arXiv 2501.11425), the
    prompts of its search and its evaluation.
    """

    def opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        """Return the turns before the first reply."""
        return (
            *system_turns(env),
            Message(role="user", text=instruction_of(env)),
            Message(role="assistant", text=env.acknowledgement),
            *example_turns(env),
            Message(role="user", text=first_observation),
        )

    def results(self, step: Step) -> tuple[Message, ...]:
        """Return the observation as a user turn."""
        return (Message(role="user", text=step.observation),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The transcript of one assistant turn that grows: the model generates up to a stop string,
    which is kept; the observation is appended to the same turn as it is; then the model goes on.

    The instruction is the system turn, and the first observation the user turn. Each step adds two
    spans: its reply, and its observation, which may be empty and never carries loss.

    Args:
        stop: the strings that end a reply, at least one, such as `</search>` and `</answer>`.
    """

    stop: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not self.stop or not all(self.stop):
            raise ConfigError(f"a continuation needs texts that end a reply, not {self.stop!r}; name the closing tags")

    def prompt(self, env: Environment, first_observation: str, steps: Sequence[Step]) -> tuple[Message, ...]:
        """Return the prompt of the next reply. With steps, it ends inside the assistant turn."""
        spans = self._spans(steps, [False] * len(steps))
        return (*self._opening(env, first_observation), *([grown_turn(spans)] if spans else []))

    def sample(
        self, env: Environment, first_observation: str, steps: Sequence[Step], train: Sequence[bool]
    ) -> tuple[Message, ...]:
        """Return the conversation up to the last reply; the reply of step i carries loss if
        `train[i]`. One that is only its end token carries loss only as the last one: elsewhere that
        token is not in the conversation.
        """
        last = len(steps) - 1
        flags = [
            is_trained and (position == last or bool(steps[position].reply) or len(steps[position].token_ids) > 1)
            for position, is_trained in enumerate(train)
        ]
        spans = self._spans(steps, flags)[:-1]
        return (*self._opening(env, first_observation), *([grown_turn(spans)] if spans else []))

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the settings with this transcript's stop strings put before theirs, and with
        `include_stop`, so that they stay in the replies.
        """
        return replace(sampling, stop=tuple(dict.fromkeys((*self.stop, *sampling.stop))), include_stop=True)

    def _opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        instruction = with_system(env, instruction_of(env))
        problem = Message(role="user", text=first_observation)
        return Message(role="system", text=instruction), *example_turns(env), problem

    def _spans(self, steps: Sequence[Step], train: Sequence[bool]) -> list[Span]:
        return [
            span
            for step, is_trained in zip(steps, train, strict=True)
            for span in (_reply_span(step, is_trained), Span(text=step.observation))
        ]


_ALTERNATING = AlternatingTurns()


def transcript_of(env: Environment) -> Transcript:
    """Return an environment's attribute `transcript`; alternating turns if that is None."""
    return env.transcript or _ALTERNATING


def whole_episode(env: Environment, trajectory: Trajectory, train: Sequence[bool] | None = None) -> tuple[Message, ...]:
    """Return the conversation of an episode with all its replies trained, or those of the steps
    that `train` flags: the last one with such a reply that is no side conversation, if there are
    several; see `Conversation`.
    """
    flags = [True] * len(trajectory.steps) if train is None else train
    parts = [part for part in conversations(env, trajectory) if any(flags[position] for position in part.positions)]
    part = next((part for part in reversed(parts) if not part.side), parts[-1] if parts else Conversation((), ()))
    end = max(part.positions, default=-1) + 1
    own_flags = [flags[position] and position in part.positions and not part.is_left_out for position in range(end)]
    return transcript_of(env).sample(env, trajectory.first_observation, trajectory.steps[:end], own_flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyEnd:
    """Where a reply ends if the recipe ends replies at their first action: at a match of `pattern`
    (see `Sampling.until`), or at a `stop` string, such as one that begins an invented observation.

    What a small model writes after its first action is invented, and would be trained if kept.
    """

    pattern: str
    stop: tuple[str, ...]


def conversations(env: Environment, trajectory: Trajectory) -> tuple[Conversation, ...]:
    """Return the conversations of an episode, in the order of their first replies. There are
    several only if the environment's transcript is `Dividing`, or summaries divide the episode.

    Each reply is trained in exactly one of them, except those that a `Dividing` transcript leaves
    out on purpose.
    """
    env_transcript, first_observation, steps = transcript_of(env), trajectory.first_observation, trajectory.steps
    if isinstance(env_transcript, Dividing):
        return env_transcript.parts(first_observation, steps)
    parts = []
    for positions in _positions_by_conversation(steps):
        prefix = steps[: positions[-1] + 1] if positions else ()
        train = [position in positions for position in range(len(prefix))]
        messages = env_transcript.sample(env, first_observation, prefix, train)
        parts.append(Conversation(positions, messages))
    return tuple(parts)


def _positions_by_conversation(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """Return for each conversation of an episode in turns the positions of its steps. A summary
    ends the conversation that it sums up; it is one of its own if it leaves out some of its steps.
    """
    parts: list[tuple[int, ...]] = []
    start = 0
    for position in summary_positions(steps):
        act_positions = tuple(range(start, position))
        sums_up_all = steps[position].summary_of == position
        parts += [(*act_positions, position)] if sums_up_all else [act_positions, (position,)]
        start = position + 1
    parts.append(tuple(range(start, len(steps))))
    return [positions for positions in parts if positions] or [()]


# Replies may be sampled with a diagnosis of an earlier attempt in the prompt, and are trained
# without it: the steps of the episode stay as the environment returned them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A text that is appended, in prompts only, to the observation of step number `after`, counted
    from 1, or to the first observation if that is 0.
    """

    text: str
    after: int

    def append_to(self, first_observation: str, steps: Sequence[Step]) -> tuple[str, Sequence[Step]]:
        """Return the first observation and the steps of an episode with the text appended."""
        if not self.after:
            return f"{first_observation}\n\n{self.text}", steps
        before, step, later = steps[: self.after - 1], steps[self.after - 1], steps[self.after :]
        # If the observation holds the results of several calls, append to the last one.
        *results, last = results_in(step.observation)
        observation = format_results((*results, f"{last}\n\n{self.text}"))
        return first_observation, (*before, replace(step, observation=observation), *later)


def next_request(
    env: Environment,
    first_observation: str,
    steps: Sequence[Step],
    sampling: Sampling,
    *,
    seed: int,
    session: str,
    n: int = 1,
    diagnosis: Diagnosis | None = None,
) -> Request:
    """Return the request for the reply after the given steps. The environment's transcript gives
    the prompt and the stop strings; those of `env.until` and `diagnosis`, if any, are added.
    """
    env_transcript = transcript_of(env)
    if diagnosis is not None:
        first_observation, steps = diagnosis.append_to(first_observation, steps)
    settings = env_transcript.sampling(sampling)
    if env.until is not None:
        # The reply may end at its first action.
        stops = dict.fromkeys((*settings.stop, *env.until.stop))
        settings = replace(settings, stop=tuple(stops), until=env.until.pattern)
    messages = env_transcript.prompt(env, first_observation, steps)
    return Request(messages=messages, sampling=settings, seed=seed, n=n, session=session)


def _reply_span(step: Step, train: bool) -> Span:
    """Return the reply of a step as a span, with the sampled token ids, so that the same tokens are
    read again and trained, and the finish reason, so that a cut reply is not trained to end there.
    """
    return Span(
        text=step.reply,
        train=train,
        token_ids=step.token_ids or None,
        finish_reason=step.finish_reason,
        tokenizer=step.tokenizer,
    )


def reply_turn(step: Step, train: bool) -> Message:
    """Return the reply of a step as an assistant turn, with the token ids that were sampled."""
    reply = _reply_span(step, train)
    return Message(
        role="assistant",
        text=reply.text,
        train=reply.train,
        token_ids=reply.token_ids,
        finish_reason=reply.finish_reason,
        tokenizer=reply.tokenizer,
    )


FitsContext = Callable[[tuple[Message, ...]], bool]
"""Returns whether a prompt leaves room in the context for a reply of the maximum length."""

# Summaries of a conversation in turns.
#
# The policy may sum up a history that fills the context. It is asked for a summary after the last
# turn, and goes on from instruction, goal and summary:
#
#     instruction, "Ok.", goal             | reply   | turn | reply | turn and request | summary
#     instruction, "Ok.", goal and request | summary | turn | reply | turn ...
#
# A summary is stored as a step that is not sent to the environment, so it is sampled, stored and
# trained like any reply. If the last turns are so long that there is no room for a summary after
# them, it is drawn from the conversation before them, and they then follow it.


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLimits:
    """When a history is summed up: once `fits_summary_and_reply` is False for a summary request."""

    fits_summary_and_reply: FitsContext
    """Returns whether a prompt that asks for a summary has room for that and a whole reply."""
    fits_summary: FitsContext
    """Returns whether a prompt that asks for a summary has room for a whole summary."""
    max_new_tokens: int
    """The maximum number of tokens of a summary."""


def with_summary_request(messages: tuple[Message, ...], prompt: str) -> tuple[Message, ...]:
    """Return a conversation with the request `prompt` for a summary at its end: in the last turn if
    that is a user turn, since many chat templates refuse two in a row, else in a new user turn.
    """
    *before, last = messages
    if last.role != "user":
        return (*messages, Message(role="user", text=prompt))
    return (*before, replace(last, text=f"{last.text}\n\n{prompt}"))


def summary_positions(steps: Sequence[Step]) -> list[int]:
    """Return the positions of the steps that are summaries, in order."""
    return [position for position, step in enumerate(steps) if step.summary_of is not None]


def without_summaries(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that were taken in the environment: all but summaries."""
    return [step for step in steps if step.summary_of is None]


def summarisable_transcript(env: Environment) -> TurnTranscript:
    """Return the transcript of an environment whose history can be summed up. Raises `ConfigError`
    if it cannot: the transcript is not one of `TurnTranscript`, or an episode has a single step.
    """
    env_transcript = transcript_of(env)
    if not isinstance(env_transcript, TurnTranscript):
        raise ConfigError(
            f"context: summary needs replies and answers to them in turns, which {env.name} does not have; leave it out"
        )
    if env.step_limit == 1:
        raise ConfigError(f"context: an episode of {env.name} has a single step and nothing to sum up; leave it out")
    return env_transcript


# Windows over a conversation of alternating turns.
#
# If a history outgrows the context, the oldest exchanges may be left out of the prompt, as in
# Agent-R's code. An exchange is an observation, which may be several turns, and the reply to it.
#
#     instruction, "Ok.", first observation, first reply | turn        | turn        | observation
#     always kept                                          dropped = 1   dropped = 2   always kept
#
# Nothing is left out of a turn that was grown by continuation.

CountTokens = Callable[[tuple[Message, ...]], int]
"""Returns the number of tokens of a prompt."""


def without_exchanges(messages: tuple[Message, ...], num_dropped: int) -> tuple[Message, ...]:
    """Return a conversation without its `num_dropped` oldest exchanges, at most `max_droppable` in
    a prompt. The opening and the first reply are kept.
    """
    if not num_dropped:
        return messages
    first, *later = reply_positions(messages)
    return messages[: first + 1] + messages[later[num_dropped - 1] + 1 :]


def max_droppable(messages: tuple[Message, ...]) -> int:
    """Return how many exchanges of a prompt may be left out: all between the first reply and the
    last observation. 0 if a turn was grown by continuation.
    """
    return 0 if is_grown(messages) else max(0, len(reply_positions(messages[:-1])) - 1)


def reply_positions(messages: Sequence[Message]) -> list[int]:
    """Return the positions of the replies in a conversation of turns, in order: those of the
    assistant turns after the opening.
    """
    start = opening_length(messages)
    return [start + number for number, message in enumerate(messages[start:]) if message.role == "assistant"]


def min_dropped_to_fit(messages: tuple[Message, ...], fits: FitsContext, *, minimum: int = 0) -> int:
    """Return the smallest number of exchanges, `minimum` or more, that must be left out of a prompt
    to make it fit. If no number is enough, return `max_droppable(messages)`.
    """
    maximum = max_droppable(messages)
    num_dropped = min(minimum, maximum)
    while num_dropped < maximum and not fits(without_exchanges(messages, num_dropped)):
        num_dropped += 1
    return num_dropped


def without_foreign_tokens(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return steps that another run recorded, for use in this one.

    Steps that do not name their tokenizer, such as those that earlier versions stored, lose their
    token ids and log-probabilities: the tokenizer may not be that of this run.
    """
    return tuple(step if step.tokenizer else replace(step, token_ids=(), logprobs=None) for step in steps)


def is_grown(messages: Sequence[Message]) -> bool:
    """Return whether any turn of a conversation was grown by continuation."""
    return any(message.spans for message in messages)


# Tool calls as text, in the form of chat models that were trained on tools: a JSON object between
# two marks.
#
#     I look it up.
#     <tool_call>
#     {"name": "search", "arguments": {"query": "Ostra"}}
#     </tool_call>
#
# Models of the Qwen and Hermes families write this; a server of OpenAI's protocol returns calls in
# separate fields, which `models.openai.wire` translates. A reply may have several calls.

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_CALL_START_PATTERN: Final = re.compile(rf"{CALL_START}\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that a model is offered. `arguments` are pairs of name and description; each argument
    is a required string.
    """

    name: str
    description: str
    arguments: tuple[tuple[str, str], ...]

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as OpenAI's protocol and chat templates define a function."""
        properties = {name: {"type": "string", "description": description} for name, description in self.arguments}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }


class NativeCall(NamedTuple):
    """A tool call in a reply; `text_outside` is the reply's text outside of all calls."""

    name: str
    arguments: Mapping[str, Any]
    text_outside: str


class UnreadableCall(NamedTuple):
    """A tool call that cannot be read; `reason` says what is wrong, without quoting the reply."""

    reason: str


def tool_definitions(tools: Sequence[Tool]) -> str:
    """Return the text of a turn of role `tools`: the definitions as a JSON list."""
    return json.dumps([tool.definition for tool in tools], ensure_ascii=False)


def read_calls(reply: str) -> tuple[NativeCall, ...] | UnreadableCall | None:
    """Return the tool calls in a reply, in order, or None if it has none. Text within a thought is
    not searched.

    If any call cannot be read, return an `UnreadableCall` for the whole reply; it says which of
    several calls that is. Never raises.
    """
    searchable = blank_thoughts(reply)
    calls: list[tuple[str, Mapping[str, Any]]] = []
    text_outside, position = "", 0
    while opening := _CALL_START_PATTERN.search(searchable, position):
        # Code in an argument may contain the marks, so the end of the JSON is found first.
        start = opening.end()
        end = searchable.find(CALL_END, json_end(searchable, start))
        call = _parse_call(searchable[start:end]) if end >= 0 else UnreadableCall(f"it does not end with {CALL_END}")
        if isinstance(call, UnreadableCall):
            is_only_call = not calls and CALL_START not in searchable[start:]
            return call if is_only_call else UnreadableCall(f"{call.reason} (call {len(calls) + 1}; none was made)")
        calls.append(call)
        text_outside += reply[position : opening.start()]
        position = end + len(CALL_END)
    if not calls:
        return UnreadableCall("a call ends that was not opened") if CALL_END in searchable else None
    text = (text_outside + reply[position:]).strip()
    return tuple(NativeCall(name, arguments, text) for name, arguments in calls)


def readable_calls(reply: str) -> tuple[NativeCall, ...]:
    """Return the tool calls in a reply; empty if it has none or any of them cannot be read."""
    calls = read_calls(reply)
    return () if calls is None or isinstance(calls, UnreadableCall) else calls


def _parse_call(call_json: str) -> tuple[str, Mapping[str, Any]] | UnreadableCall:
    """Return the name and the arguments of a call, given the text between its marks."""
    try:
        call = json.loads(call_json, strict=False)
    except (ValueError, RecursionError):
        return UnreadableCall("it is not valid JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return UnreadableCall('it is no JSON object with "name" and "arguments"')
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return UnreadableCall('its "arguments" are no JSON object')
    return call["name"], arguments


def text_arguments(call: NativeCall, tools: Sequence[Tool]) -> dict[str, str] | UnreadableCall:
    """Return the arguments of a call by name; an `UnreadableCall` if no given tool has its name,
    the names of the arguments are not exactly the tool's, or a value is not a valid string.
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return UnreadableCall(f"there is no such tool; there are {', '.join(tool.name for tool in tools)}")
    names = [name for name, _ in tool.arguments]
    if call.arguments.keys() != set(names):
        return UnreadableCall(f"{tool.name} takes the arguments {', '.join(names)}")
    texts = {name: value for name, value in call.arguments.items() if isinstance(value, str)}
    if len(texts) < len(names):
        return UnreadableCall("an argument is no text")
    if any(lone_surrogate(value) is not None for value in texts.values()):
        return UnreadableCall("an argument has half a surrogate pair, which is no text")
    return texts


def call_text(name: str, arguments: str, *, before: str = "") -> str:
    """Return a reply with a tool call after the text `before`; `arguments` is a JSON object."""
    call = f'{CALL_START}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{CALL_END}'
    return f"{before}\n{call}" if before else call


def call_reply(tool: Tool, *texts: str, before: str = "") -> str:
    """Return a reply: `before`, then a call of a tool with a text for each argument, in order."""
    arguments = dict(zip((name for name, _ in tool.arguments), texts, strict=True))
    return call_text(tool.name, json.dumps(arguments, ensure_ascii=False), before=before)


# The transcript of native tool calls: messages with tools, as OpenAI's protocol has them.
#
# tools    system        user                assistant   tool     assistant   user      assistant
# tools  | instruction | first observation | call      | result | no call   | answer  | ...
#
# A turn of role `tools` comes first; its text is the JSON list of the tools' definitions, which
# chat templates and servers are given as `tools`. The result of each call is a turn of role `tool`;
# the observation after a reply without a readable call is a user turn.


# A call stays the text that was sampled, so that training uses the sampled tokens; only the adapter
# of OpenAI's protocol translates calls to and from fields.
@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTurns(TurnTranscript):
    """Tools, instruction and first observation, then replies and their calls' results in turn.

    Args:
        tools: the tools that the model is offered, at least one.
        note: a text that is appended to the instruction.
    """

    tools: tuple[Tool, ...]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.tools:
            raise ConfigError("a world without tools has nothing to call; leave transcript: native out")

    def opening(self, env: Environment, first_observation: str) -> tuple[Message, ...]:
        """Return three turns: the tool definitions, the instruction and the first observation."""
        return (
            Message(role="tools", text=tool_definitions(self.tools)),
            Message(role="system", text=with_system(env, "\n\n".join(filter(None, (instruction_of(env), self.note))))),
            Message(role="user", text=first_observation),
        )

    def results(self, step: Step) -> tuple[Message, ...]:
        """Return a turn of role `tool` for each call of the reply, in order. If the reply has no
        readable calls, or the observation not one result for each, return it as one user turn.
        """
        results = read_results(step.observation, len(readable_calls(step.reply)))
        if results is None:
            return (Message(role="user", text=step.observation),)
        return tuple(Message(role="tool", text=text) for text in results)


# A step has one observation, so the results of several calls are stored as one text: a JSON list of
# turns. A single result is stored as it is, so that steps stored by earlier versions, and
# environments that take one call only, need no conversion.
#
# The turns that an outside agent sends have the same form. If they do not continue the conversation
# of the last reply, the list begins with a head, an entry of role `NEW_CONVERSATION`.
TURN_LIST_START: Final = '[{"role": '
"""How an observation begins that is a JSON list of turns."""
NEW_CONVERSATION: Final = "anew"
"""The role of the head of a list of turns that begins another conversation."""
_RESULT_LIST_START: Final = TURN_LIST_START + '"tool"'


def format_results(results: Sequence[str]) -> str:
    """Return the results of the calls in a reply as an observation: a single result as it is,
    several as a JSON list of turns.
    """
    if len(results) == 1:
        return results[0]
    return json.dumps([{"role": "tool", "content": text} for text in results], ensure_ascii=False)


def read_results(observation: str, num_calls: int) -> tuple[str, ...] | None:
    """Return the results in the observation after a reply with `num_calls` calls, in order. None if
    there were no calls, or not one result for each: some environments take one call only.
    """
    results = (observation,) if num_calls == 1 else results_in(observation)
    return results if len(results) == num_calls else None


def results_in(observation: str) -> tuple[str, ...]:
    """Return the results of calls in an observation: those in a JSON list of `tool` turns, or else
    the observation as the only one.
    """
    if observation.startswith(_RESULT_LIST_START):
        with suppress(ValueError, RecursionError, TypeError, KeyError):
            turns = json.loads(observation)
            if all(turn["role"] == "tool" and isinstance(turn["content"], str) for turn in turns):
                return tuple(turn["content"] for turn in turns)
    return (observation,)


def turn_texts(observation: str) -> tuple[str, ...]:
    """Return an observation for people to read: a text for each turn if it is a JSON list of turns,
    or else the observation alone. Turns other than results of calls begin with their role.
    """
    if not observation.startswith(TURN_LIST_START):
        return (observation,)
    texts = []
    with suppress(ValueError, RecursionError, TypeError, KeyError):
        for turn in json.loads(observation):
            if turn["role"] == NEW_CONVERSATION:
                overlap = (
                    f" with the first {turn['turns']} turns of that of reply {turn['after']}" if "turns" in turn else ""
                )
                texts.append(f"Another conversation{overlap}.")
            elif "step" in turn:
                texts.append(f"assistant: reply {turn['step']}, as it was sampled")
            else:
                texts.append(turn["content"] if turn["role"] == "tool" else f"{turn['role']}: {turn['content']}")
        return tuple(texts)
    return (observation,)
