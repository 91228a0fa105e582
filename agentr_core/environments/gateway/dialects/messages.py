"""Anthropic's Messages: `POST /messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field

from agentr_core.environments.gateway.dialects.base import (
    AgentRequest,
    Answer,
    Events,
    Function,
    Refused,
    Text,
    ToolCall,
    Turn,
    assistant_turn,
    event,
    turn,
)

_ERRORS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
_THREAD: Final = "thread_unsupported_request"
"""The error code after which the official client sends whole histories."""


class _Words(BaseModel):
    type: Literal["text"]
    text: str


class _Thought(BaseModel):
    type: Literal["thinking", "redacted_thinking"]


class _Use(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _Result(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""


_Block = Annotated[_Words | _Thought | _Use | _Result, Field(discriminator="type")]


def _blocks(content: Any) -> Any:
    # Claude Code sends the same content now as a text and now as a list of one block.
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(_blocks)]

    def turns(self) -> Iterator[Turn]:
        """Yield the turns of a message; each result of a tool call is a turn of its own."""
        texts = [block.text for block in self.content if isinstance(block, _Words)]
        calls = [
            ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in self.content
            if isinstance(block, _Use)
        ]
        results = [block for block in self.content if isinstance(block, _Result)]
        for block in results:
            yield turn("tool", block.content, [block.tool_use_id])
        if self.role == "assistant":
            yield assistant_turn("\n".join(texts), calls)
        elif texts or not results:
            yield turn(self.role, "\n".join(texts))


def _functions(tools: Any) -> Any:
    """Return the agent's tools as functions. Tools without a schema are left out: Anthropic runs
    these.
    """
    if not isinstance(tools, list):
        return tools or []
    return [
        {
            "name": tool.get("name"),
            **({"description": tool["description"]} if tool.get("description") else {}),
            "parameters": tool["input_schema"],
        }
        for tool in tools
        if isinstance(tool, Mapping) and isinstance(tool.get("input_schema"), Mapping)
    ]


class MessagesRequest(AgentRequest):
    """A request for a message."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    system: Text = ""
    tools: Annotated[list[Function], BeforeValidator(_functions)] = Field(default_factory=list)
    thread: Any = None

    # Claude Code stops at this status only.
    status_when_over: ClassVar[int] = HTTPStatus.GONE

    @property
    def functions(self) -> Sequence[Function]:
        """The functions that the agent offers."""
        return self.tools

    def history(self) -> Iterator[Turn]:
        """Yield the messages as turns. Raises `Refused` if the beginning of the conversation is
        missing, as the agent takes it to be stored here.
        """
        if self.thread is not None:
            raise Refused(
                HTTPStatus.BAD_REQUEST, "thread: nothing is stored here; send the whole conversation", _THREAD, "thread"
            )
        if self.system:
            yield turn("system", self.system)
        for message in self.messages:
            yield from message.turns()

    def answer(self, answer: Answer, name: str, timestamp: int) -> dict[str, Any]:
        """Return the body of a whole message."""
        content = [*([{"type": "text", "text": answer.text}] if answer.text else []), *map(_use, answer.calls)]
        end = {"stop_reason": _stop_reason(answer), "usage": _usage(answer)}
        return {**self._frame(name), "content": content, **end}

    def events(self, name: str, timestamp: int) -> Events:
        """Return a message as a stream of events."""
        return _MessageEvents(self._frame(name), offers_tools=bool(self.tools))

    @staticmethod
    def error(refusal: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""
        return _error(refusal)

    def _frame(self, name: str) -> dict[str, Any]:
        message = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": self.model, "content": []}
        # The length of the prompt is not known before the reply.
        usage = {"input_tokens": 0, "output_tokens": 0}
        return {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}


class _MessageEvents(Events):
    """The events of a message. The official client skips those without a name."""

    def __init__(self, frame: dict[str, Any], *, offers_tools: bool) -> None:
        super().__init__(offers_tools=offers_tools)
        self._frame = frame
        self._blocks = 0

    def head(self) -> str:
        return _event("message_start", message=self._frame)

    def ping(self) -> str:
        return _event("ping")

    def fault(self, refusal: Refused) -> str:
        return event(_error(refusal), "error")

    def _piece(self, text: str) -> str:
        begin = "" if self._blocks else self._begin({"type": "text", "text": ""})
        return begin + self._delta({"type": "text_delta", "text": text})

    def _end(self, answer: Answer) -> str:
        parts = [self._stop()] if self._blocks else []
        for call in answer.calls:
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            parts += [self._begin({**_use(call), "input": {}}), self._delta(delta), self._stop()]
        end = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        return "".join((*parts, _event("message_delta", delta=end, usage=_usage(answer)), _event("message_stop")))

    def _begin(self, block: dict[str, Any]) -> str:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> str:
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _stop_reason(answer: Answer) -> str:
    return {"tool_calls": "tool_use", "length": "max_tokens"}.get(answer.finish, "end_turn")


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens or 0, "output_tokens": answer.completion_tokens or 0}


def _error(refusal: Refused) -> dict[str, Any]:
    message = refusal.message
    if refusal.context is not None and refusal.prompt_tokens is not None:
        # Claude Code knows a prompt that does not fit by these words.
        message = f"prompt is too long: {refusal.prompt_tokens} tokens > {refusal.context} maximum; {message}"
    is_ours = refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _ERRORS.get(refusal.status, "api_error" if is_ours else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if refusal.code == _THREAD:
        error["details"] = {"error_code": _THREAD, "unsupported": ["thread"]}
    return {"type": "error", "error": error}
