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
    EventStream,
    Function,
    Refused,
    Text,
    ToolCall,
    Turn,
    assistant_turn,
    format_event,
    make_turn,
)

_ERROR_TYPES_BY_STATUS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
_THREAD_ERROR_CODE: Final = "thread_unsupported_request"
"""The error code after which the official client sends whole histories."""


class _TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class _ThinkingBlock(BaseModel):
    type: Literal["thinking", "redacted_thinking"]


class _ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""


_Block = Annotated[_TextBlock | _ThinkingBlock | _ToolUseBlock | _ToolResultBlock, Field(discriminator="type")]


def _to_blocks(content: Any) -> Any:
    # Claude Code sends the same content now as a text and now as a list of one block.
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(_to_blocks)]

    def turns(self) -> Iterator[Turn]:
        """Yield the turns of a message; each result of a tool call is a turn of its own."""
        texts = [block.text for block in self.content if isinstance(block, _TextBlock)]
        calls = [
            ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in self.content
            if isinstance(block, _ToolUseBlock)
        ]
        results = [block for block in self.content if isinstance(block, _ToolResultBlock)]
        for block in results:
            yield make_turn("tool", block.content, [block.tool_use_id])
        if self.role == "assistant":
            yield assistant_turn("\n".join(texts), calls)
        elif texts or not results:
            yield make_turn(self.role, "\n".join(texts))


def _read_functions(tools: Any) -> Any:
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
    tools: Annotated[list[Function], BeforeValidator(_read_functions)] = Field(default_factory=list)
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
                HTTPStatus.BAD_REQUEST,
                "thread: nothing is stored here; send the whole conversation",
                _THREAD_ERROR_CODE,
                "thread",
            )
        if self.system:
            yield make_turn("system", self.system)
        for message in self.messages:
            yield from message.turns()

    def answer_body(self, answer: Answer, reply_id: str, timestamp: int) -> dict[str, Any]:
        """Return the body of a whole message."""
        content = [
            *([{"type": "text", "text": answer.text}] if answer.text else []),
            *map(_tool_use_block, answer.tool_calls),
        ]
        end_fields = {"stop_reason": _stop_reason(answer), "usage": _usage(answer)}
        return {**self._base_body(reply_id), "content": content, **end_fields}

    def event_stream(self, reply_id: str, timestamp: int) -> EventStream:
        """Return a message as a stream of events."""
        return _MessageStream(self._base_body(reply_id), offers_tools=bool(self.tools))

    @staticmethod
    def error_body(refusal: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""
        return _error_body(refusal)

    def _base_body(self, reply_id: str) -> dict[str, Any]:
        message = {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": self.model, "content": []}
        # The length of the prompt is not known before the reply.
        usage = {"input_tokens": 0, "output_tokens": 0}
        return {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}


class _MessageStream(EventStream):
    """The events of a message. The official client skips those without a name."""

    def __init__(self, base_body: dict[str, Any], *, offers_tools: bool) -> None:
        super().__init__(offers_tools=offers_tools)
        self._base_body = base_body
        self._num_blocks = 0

    def head_events(self) -> str:
        return _event("message_start", message=self._base_body)

    def ping_event(self) -> str:
        return _event("ping")

    def failure_events(self, refusal: Refused) -> str:
        return format_event(_error_body(refusal), "error")

    def _piece_events(self, text: str) -> str:
        begin_event = "" if self._num_blocks else self._begin_block({"type": "text", "text": ""})
        return begin_event + self._delta_event({"type": "text_delta", "text": text})

    def _final_events(self, answer: Answer) -> str:
        events = [self._stop_block()] if self._num_blocks else []
        for call in answer.tool_calls:
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            events += [
                self._begin_block({**_tool_use_block(call), "input": {}}),
                self._delta_event(delta),
                self._stop_block(),
            ]
        stop_fields = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        return "".join(
            (*events, _event("message_delta", delta=stop_fields, usage=_usage(answer)), _event("message_stop"))
        )

    def _begin_block(self, block: dict[str, Any]) -> str:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta_event(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stop_block(self) -> str:
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(event_type: str, **fields: Any) -> str:
    return format_event({"type": event_type, **fields}, event_type)


def _tool_use_block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _stop_reason(answer: Answer) -> str:
    return {"tool_calls": "tool_use", "length": "max_tokens"}.get(answer.finish_reason, "end_turn")


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens or 0, "output_tokens": answer.completion_tokens or 0}


def _error_body(refusal: Refused) -> dict[str, Any]:
    message = refusal.message
    if refusal.context is not None and refusal.prompt_tokens is not None:
        # Claude Code knows a prompt that does not fit by these words.
        message = f"prompt is too long: {refusal.prompt_tokens} tokens > {refusal.context} maximum; {message}"
    is_server_error = refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    error_type = _ERROR_TYPES_BY_STATUS.get(refusal.status, "api_error" if is_server_error else "invalid_request_error")
    error: dict[str, Any] = {"type": error_type, "message": message}
    if refusal.code == _THREAD_ERROR_CODE:
        error["details"] = {"error_code": _THREAD_ERROR_CODE, "unsupported": ["thread"]}
    return {"type": "error", "error": error}
