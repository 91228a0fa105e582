"""What the dialects share: turns of a conversation, replies, refusals, and the steps of a stream.

A dialect is a class of requests, `AgentRequest`. It reads the body of a request into turns, and
writes a reply, or a refusal, as the clients of its protocol read it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final, NamedTuple, NotRequired, TypedDict

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError

from agentr_core.episodes.transcript import OPENS, calls_in
from agentr_core.models.openai.wire import ToldCall, argument_text, reply_text
from agentr_core.texts import lone_surrogate

MODEL: Final = "policy"
"""The name of the model. Agents may use any: harnesses name a second, small one themselves."""
OVER: Final = ("episode_over", "episode_not_found")
"""The codes of refusals after which an agent should stop."""
_CODES: Final = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class Refused(Exception):
    """A request that gets no reply: a status, one sentence, a code, and perhaps the field at fault.

    With the code `context_length_exceeded`, `prompt_tokens` and `context` say how long the prompt
    is and how much the model reads, where that is known.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        param: str | None = None,
        *,
        prompt_tokens: int | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        self.code = code or _CODES.get(status, self.kind)
        self.param = param
        self.prompt_tokens = prompt_tokens
        self.context = context

    @property
    def openai_message(self) -> str:
        """The sentence for clients of OpenAI: whatever the code, harnesses know by these words that
        they should sum up their history.
        """
        limit = f"This model's maximum context length is {self.context} tokens: " if self.context is not None else ""
        return limit + self.message


# What agents send.


class Turn(TypedDict):
    """A turn as the run reads it. `ids` are those of the calls in an assistant's turn, in their
    order, or, of a turn of role `tool`, the one of the call that it answers.
    """

    role: str
    text: str
    ids: NotRequired[list[str]]


def _named(function: dict[str, Any]) -> dict[str, Any]:
    if not (isinstance(function.get("name"), str) and function["name"]):
        raise ValueError("a function needs a name")
    return function


Function = Annotated[dict[str, Any], AfterValidator(_named)]
"""The definition of a function, with `name`, `description` and `parameters`, as it was sent."""


def _plain_text(content: Any) -> Any:
    """Return the content of a message as one text. Raises `ValueError` for what is no text."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        # Some harnesses send thoughts back and some do not; what they leave of one is not trusted.
        if kind in ("thinking", "redacted_thinking", "reasoning"):
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ValueError(f"a part of type {str(kind)[:40]!r} is no text; the gateway takes text")
        texts.append(text)
    return "\n".join(texts)


Text = Annotated[str, BeforeValidator(_plain_text)]
"""The content of a message: a text, a list of parts that are text, or null."""


class ToolCall(NamedTuple):
    """A call of a tool: its id, which may be empty, and its arguments as JSON."""

    id: str
    name: str
    arguments: str


def tools_turn(functions: Sequence[Function]) -> list[Turn]:
    """Return the turn that offers functions; none without functions. Raises `Refused` for
    definitions that are no JSON.
    """
    if not functions:
        return []
    tools = [{"type": "function", "function": function} for function in functions]
    try:
        return [turn("tools", json.dumps(tools, ensure_ascii=False, allow_nan=False))]
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"tools: {error}", "invalid_request", "tools") from error


def turn(role: str, text: str, ids: Sequence[str] = ()) -> Turn:
    """Return a turn. Some programs leave ids out; then it has none."""
    return {"role": role, "text": text, "ids": [*ids]} if ids and all(ids) else {"role": role, "text": text}


def assistant_turn(text: str, calls: Sequence[ToolCall]) -> Turn:
    """Return the turn of an earlier reply: its text, and its calls as text."""
    if calls:
        text = reply_text(text, [ToldCall(call.name, call.arguments) for call in calls])
    return turn("assistant", text, [call.id for call in calls])


def refusal_of(error: ValidationError) -> Refused:
    """Return the refusal of a body with an error: a sentence that does not quote the body."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    location = ".".join(map(str, fault["loc"]))
    reason = f"{location or 'the body'}: {fault['msg'].removeprefix('Value error, ')}"
    return Refused(HTTPStatus.BAD_REQUEST, reason, "invalid_request", location or None)


# What agents get.


class Answer(NamedTuple):
    """A reply, taken apart: `finish` is `stop`, `length` or `tool_calls`, and `text` what stands
    beside the calls. Token counts are None where no model generated it.
    """

    text: str
    calls: tuple[ToolCall, ...]
    finish: str
    prompt_tokens: int | None
    completion_tokens: int | None


def read_answer(reply: Mapping[str, Any], name: str, *, offers_tools: bool) -> Answer:
    """Return the reply of a run, taken apart.

    A call is one only if tools are offered and its arguments can be told as JSON; else it stays
    text. The run names calls in `ids`; without them their ids are made of the call's `name`.
    """
    calls = calls_in(reply["text"]) if offers_tools else ()
    try:
        arguments = json.dumps([call.arguments for call in calls], ensure_ascii=False, allow_nan=False)
    except ValueError:
        calls = ()
    else:
        calls = calls if lone_surrogate(arguments) is None else ()
    counts = reply.get("prompt_tokens"), reply.get("completion_tokens")
    if not calls:
        return Answer(reply["text"], (), reply.get("finish_reason") or "stop", *counts)
    ids = reply.get("ids") or [f"call{name[:8]}{number}" for number in range(len(calls))]
    tool_calls = (ToolCall(key, call.name, argument_text(call.arguments)) for key, call in zip(ids, calls, strict=True))
    return Answer(calls[0].beside, tuple(tool_calls), "tool_calls", *counts)


def sendable(text: str, *, offers_tools: bool) -> str:
    """Return how much of the text of a reply so far can be told. Where tools are offered, that ends
    before what may become a call, and before white space, which a call would cut off.
    """
    if not offers_tools:
        return text
    end = text.find(OPENS)
    if end < 0:
        overlap = next((size for size in range(len(OPENS) - 1, 0, -1) if text.endswith(OPENS[:size])), 0)
        end = len(text) - overlap
    return text[:end].rstrip()


def event(data: Mapping[str, Any], name: str = "") -> str:
    """Return an event of a stream, with or without a name."""
    line = f"event: {name}\n" if name else ""
    # In ASCII: some clients take U+2028 and its like for the end of a line.
    return f"{line}data: {json.dumps(data)}\n\n"


class Events(ABC):
    """An answer as the events of a stream, in steps: a head, pieces of text, and an end or a fault.

    Every step returns the text to send, which may be empty.
    """

    def __init__(self, *, offers_tools: bool) -> None:
        self._offers_tools = offers_tools
        self._sent = ""

    @abstractmethod
    def head(self) -> str:
        """Return what comes first."""

    @abstractmethod
    def ping(self) -> str:
        """Return a sign of life: clients give up a silent connection."""

    @abstractmethod
    def fault(self, refusal: Refused) -> str:
        """Return the end of a stream that has no reply."""

    @abstractmethod
    def _piece(self, text: str) -> str:
        """Return the events of a piece of text."""

    @abstractmethod
    def _end(self, answer: Answer) -> str:
        """Return the events after all text."""

    def more(self, partial: str) -> str:
        """Return what is new in the text of the reply so far and can be told."""
        text = sendable(partial, offers_tools=self._offers_tools)
        if len(text) <= len(self._sent) or not text.startswith(self._sent):
            return ""
        piece, self._sent = text[len(self._sent) :], text
        return self._piece(piece)

    def end(self, answer: Answer) -> str:
        """Return the rest of the text and what follows it. Raises `Refused` if the answer does not
        begin with what was sent.
        """
        # White space before a call is not part of what stands beside it.
        for prefix in (self._sent, self._sent.lstrip()):
            if answer.text.startswith(prefix):
                rest = answer.text[len(prefix) :]
                return (self._piece(rest) if rest else "") + self._end(answer)
        reason = "the reply is another one than that whose beginning was sent; ask again"
        raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, reason, "reply_changed")


class AgentRequest(BaseModel, ABC):
    """What an agent asks the policy. The recipe decides how a reply is drawn, so the agent's
    temperature, limits and stop strings have no effect, and neither has any field unknown here.
    """

    model: str
    stream: bool | None = None

    status_when_over: ClassVar[int]
    """The status at which the harnesses of this dialect stop at once."""

    @property
    @abstractmethod
    def functions(self) -> Sequence[Function]:
        """The functions that the agent offers."""

    @abstractmethod
    def history(self) -> Iterable[Turn]:
        """Return the turns but that of the tools. Raises `Refused`."""

    @abstractmethod
    def answer(self, answer: Answer, name: str, timestamp: int) -> dict[str, Any]:
        """Return the body of the answer to a call of a name that was made at a time, in seconds."""

    @abstractmethod
    def events(self, name: str, timestamp: int) -> Events:
        """Return the same as a stream."""

    @staticmethod
    @abstractmethod
    def error(refusal: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""

    def turns(self) -> list[Turn]:
        """Return the whole conversation; the tools that are offered come first. Raises `Refused`
        for one that the policy cannot answer: handed on, it would cost the episode.
        """
        turns = list(self.history())
        if not turns or turns[-1]["role"] == "assistant":
            last = "the last turn is the assistant's" if turns else "there is no turn"
            reason = f"{last}; end with one of the user, a tool or the system"
            raise Refused(HTTPStatus.BAD_REQUEST, reason, "invalid_request")
        return [*tools_turn(self.functions), *turns]

    @classmethod
    def status(cls, refusal: Refused) -> int:
        """Return the status of a refusal."""
        return cls.status_when_over if refusal.code in OVER else refusal.status


def openai_error(refusal: Refused) -> dict[str, Any]:
    """Return the body of a refusal in OpenAI's form."""
    fields = {"type": refusal.kind, "param": refusal.param, "code": refusal.code}
    return {"error": {"message": refusal.openai_message, **fields}}
