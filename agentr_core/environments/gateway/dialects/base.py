"""What the dialects share: turns of a conversation, replies, refusals, and streamed events.

A dialect is a class of requests, `AgentRequest`. It parses the body of a request into turns, and
formats a reply or a refusal for the clients of its protocol.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final, NamedTuple, NotRequired, TypedDict

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError

from agentr_core.episodes.transcript import CALL_START, readable_calls
from agentr_core.models.openai.wire import ReportedCall, argument_text, reply_text
from agentr_core.texts import lone_surrogate

MODEL: Final = "policy"
"""The name of the model. Agents may send any name: harnesses use a second, small model
themselves.
"""
OVER_CODES: Final = ("episode_over", "episode_not_found")
"""The codes of refusals after which an agent should stop."""
_CODES_BY_STATUS: Final = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
}


class Refused(Exception):
    """A request that gets no reply: an HTTP status, a message of one sentence, a code, and
    optionally the field at fault (`param`).

    With the code `context_length_exceeded`, `prompt_tokens` and `context` are the length of the
    prompt and the model's limit, or None if unknown.
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
        self.error_type = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        self.code = code or _CODES_BY_STATUS.get(status, self.error_type)
        self.param = param
        self.prompt_tokens = prompt_tokens
        self.context = context

    @property
    def openai_message(self) -> str:
        """The message for clients of OpenAI. If the context limit is known, it begins with words by
        which harnesses recognise, whatever the code, that they should summarise their history.
        """
        limit = f"This model's maximum context length is {self.context} tokens: " if self.context is not None else ""
        return limit + self.message


# What agents send.


class Turn(TypedDict):
    """A turn as the run reads it. `ids` are the ids of the tool calls in an assistant's turn, in
    order, or, in a turn of role `tool`, the one id of the call that it answers.
    """

    role: str
    text: str
    ids: NotRequired[list[str]]


def _check_name(function: dict[str, Any]) -> dict[str, Any]:
    if not (isinstance(function.get("name"), str) and function["name"]):
        raise ValueError("a function needs a name")
    return function


Function = Annotated[dict[str, Any], AfterValidator(_check_name)]
"""The definition of a function as the agent sent it, with `name`, `description` and
`parameters`.
"""


def _plain_text(content: Any) -> Any:
    """Return the content of a message as one text; other types are left to pydantic. Raises
    `ValueError` for a part that is not text.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        part_type = part.get("type") if isinstance(part, dict) else None
        # Some harnesses send thoughts back, whole or in part, and some do not, so they are left
        # out.
        if part_type in ("thinking", "redacted_thinking", "reasoning"):
            continue
        text = part.get("refusal" if part_type == "refusal" else "text") if isinstance(part, dict) else None
        if part_type not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ValueError(f"a part of type {str(part_type)[:40]!r} is no text; the gateway takes text")
        texts.append(text)
    return "\n".join(texts)


Text = Annotated[str, BeforeValidator(_plain_text)]
"""The content of a message: a text, a list of parts that are text, or null."""


class ToolCall(NamedTuple):
    """A tool call: its id, which may be empty, the tool's name, and its arguments as JSON."""

    id: str
    name: str
    arguments: str


def tools_turn(functions: Sequence[Function]) -> list[Turn]:
    """Return a list with the turn that offers the functions; empty if there are none. Raises
    `Refused` if the definitions are not valid JSON.
    """
    if not functions:
        return []
    tools = [{"type": "function", "function": function} for function in functions]
    try:
        return [make_turn("tools", json.dumps(tools, ensure_ascii=False, allow_nan=False))]
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"tools: {error}", "invalid_request", "tools") from error


def make_turn(role: str, text: str, ids: Sequence[str] = ()) -> Turn:
    """Return a turn; it gets `ids` only if none of them is empty, since some programs leave ids
    out.
    """
    return {"role": role, "text": text, "ids": [*ids]} if ids and all(ids) else {"role": role, "text": text}


def assistant_turn(text: str, tool_calls: Sequence[ToolCall]) -> Turn:
    """Return the turn of an earlier reply: its text, followed by its tool calls as text."""
    if tool_calls:
        text = reply_text(text, [ReportedCall(call.name, call.arguments) for call in tool_calls])
    return make_turn("assistant", text, [call.id for call in tool_calls])


def refusal_of(error: ValidationError) -> Refused:
    """Return the refusal of an invalid request body; its message does not quote the body."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field_path = ".".join(map(str, fault["loc"]))
    reason = f"{field_path or 'the body'}: {fault['msg'].removeprefix('Value error, ')}"
    return Refused(HTTPStatus.BAD_REQUEST, reason, "invalid_request", field_path or None)


# What agents get.


class Answer(NamedTuple):
    """The parts of a reply: `text` is what stands beside the tool calls, and `finish_reason` is
    `stop`, `length` or `tool_calls`. Token counts are None if no model generated the reply.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None


def read_answer(reply: Mapping[str, Any], reply_id: str, *, offers_tools: bool) -> Answer:
    """Return the parts of a run's reply.

    Calls are recognised only if tools are offered and all arguments can be written as JSON;
    otherwise they stay in the text. Their ids are those that the run gives in `ids`, else they are
    made from `reply_id`, the name of the agent's call.
    """
    calls = readable_calls(reply["text"]) if offers_tools else ()
    try:
        arguments = json.dumps([call.arguments for call in calls], ensure_ascii=False, allow_nan=False)
    except ValueError:
        calls = ()
    else:
        calls = calls if lone_surrogate(arguments) is None else ()
    token_counts = reply.get("prompt_tokens"), reply.get("completion_tokens")
    if not calls:
        return Answer(reply["text"], (), reply.get("finish_reason") or "stop", *token_counts)
    ids = reply.get("ids") or [f"call{reply_id[:8]}{number}" for number in range(len(calls))]
    tool_calls = (ToolCall(key, call.name, argument_text(call.arguments)) for key, call in zip(ids, calls, strict=True))
    return Answer(calls[0].text_outside, tuple(tool_calls), "tool_calls", *token_counts)


def sendable_text(text: str, *, offers_tools: bool) -> str:
    """Return the part of an unfinished reply's text that can be sent already. If tools are offered,
    it ends before anything that may become a tool call, and before white space, which is removed
    before a call.
    """
    if not offers_tools:
        return text
    end = text.find(CALL_START)
    if end < 0:
        overlap = next((size for size in range(len(CALL_START) - 1, 0, -1) if text.endswith(CALL_START[:size])), 0)
        end = len(text) - overlap
    return text[:end].rstrip()


def format_event(data: Mapping[str, Any], name: str = "") -> str:
    """Return a server-sent event; an empty name is left out."""
    line = f"event: {name}\n" if name else ""
    # In ASCII: some clients treat U+2028 and similar characters as line ends.
    return f"{line}data: {json.dumps(data)}\n\n"


class EventStream(ABC):
    """A streamed answer: a head, pieces of text, and an end or a fault.

    Every method returns the text to send, which may be empty.
    """

    def __init__(self, *, offers_tools: bool) -> None:
        self._offers_tools = offers_tools
        self._sent_text = ""

    @abstractmethod
    def head_events(self) -> str:
        """Return what comes first."""

    @abstractmethod
    def ping_event(self) -> str:
        """Return an event that shows that the server is alive: clients close a silent
        connection.
        """

    @abstractmethod
    def failure_events(self, refusal: Refused) -> str:
        """Return the end of a stream whose reply was refused."""

    @abstractmethod
    def _piece_events(self, text: str) -> str:
        """Return the events of a piece of text."""

    @abstractmethod
    def _final_events(self, answer: Answer) -> str:
        """Return the events after all text."""

    def text_events(self, partial_text: str) -> str:
        """Return the events for the new text in the reply so far, as far as it can be sent
        already.
        """
        text = sendable_text(partial_text, offers_tools=self._offers_tools)
        if len(text) <= len(self._sent_text) or not text.startswith(self._sent_text):
            return ""
        piece, self._sent_text = text[len(self._sent_text) :], text
        return self._piece_events(piece)

    def end_events(self, answer: Answer) -> str:
        """Return the events for the rest of the text and the end of the stream. Raises `Refused` if
        the answer does not begin with the text that was sent.
        """
        # White space before a call is not part of the answer's text.
        for prefix in (self._sent_text, self._sent_text.lstrip()):
            if answer.text.startswith(prefix):
                remaining_text = answer.text[len(prefix) :]
                return (self._piece_events(remaining_text) if remaining_text else "") + self._final_events(answer)
        reason = "the reply is another one than that whose beginning was sent; ask again"
        raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, reason, "reply_changed")


class AgentRequest(BaseModel, ABC):
    """A request of an agent to the policy. The recipe decides how replies are sampled, so the
    agent's temperature, limits and stop strings are ignored, as are all unknown fields.
    """

    model: str
    stream: bool | None = None

    status_when_over: ClassVar[int]
    """The HTTP status at which the harnesses of this dialect stop at once."""

    @property
    @abstractmethod
    def functions(self) -> Sequence[Function]:
        """The functions that the agent offers."""

    @abstractmethod
    def history(self) -> Iterable[Turn]:
        """Return the turns, without that of the tools. Raises `Refused` if a part of the
        conversation is missing.
        """

    @abstractmethod
    def answer_body(self, answer: Answer, reply_id: str, timestamp: int) -> dict[str, Any]:
        """Return the response body for an answer. `reply_id` and `timestamp` (Unix seconds) are
        those of the call.
        """

    @abstractmethod
    def event_stream(self, reply_id: str, timestamp: int) -> EventStream:
        """Return the stream of an answer. `reply_id` and `timestamp` are those of the call."""

    @staticmethod
    @abstractmethod
    def error_body(refusal: Refused) -> dict[str, Any]:
        """Return the response body of a refusal."""

    def turns(self) -> list[Turn]:
        """Return the whole conversation; a turn with the offered tools comes first. Raises
        `Refused` for a conversation that the policy cannot answer, since the episode would fail on
        it.
        """
        turns = list(self.history())
        if not turns or turns[-1]["role"] == "assistant":
            last = "the last turn is the assistant's" if turns else "there is no turn"
            reason = f"{last}; end with one of the user, a tool or the system"
            raise Refused(HTTPStatus.BAD_REQUEST, reason, "invalid_request")
        return [*tools_turn(self.functions), *turns]

    @classmethod
    def error_status(cls, refusal: Refused) -> int:
        """Return the HTTP status of a refusal."""
        return cls.status_when_over if refusal.code in OVER_CODES else refusal.status


def openai_error_body(refusal: Refused) -> dict[str, Any]:
    """Return the response body of a refusal in OpenAI's format."""
    fields = {"type": refusal.error_type, "param": refusal.param, "code": refusal.code}
    return {"error": {"message": refusal.openai_message, **fields}}
