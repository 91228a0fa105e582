"""OpenAI's chat completions: `POST /chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

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
    openai_error_body,
)
from agentr_core.models.openai.wire import argument_text


class _CalledFunction(BaseModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    id: str | None = None
    function: _CalledFunction


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: Function


class _StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(AgentRequest):
    """A request for a chat completion."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    n: Literal[1] | None = None
    stream_options: _StreamOptions | None = None

    # At status 410, some harnesses retry for minutes.
    status_when_over: ClassVar[int] = HTTPStatus.NOT_FOUND

    @property
    def functions(self) -> Sequence[Function]:
        """The functions that the agent offers."""
        return [tool.function for tool in self.tools or ()]

    def history(self) -> Iterator[Turn]:
        """Yield the messages as turns."""
        for message in self.messages:
            match message.role:
                case "assistant":
                    calls = [
                        ToolCall(call.id or "", call.function.name, argument_text(call.function.arguments))
                        for call in message.tool_calls or ()
                    ]
                    yield assistant_turn(message.content, calls)
                case "tool":
                    yield make_turn("tool", message.content, [message.tool_call_id or ""])
                case "developer":
                    yield make_turn("system", message.content)
                case role:
                    yield make_turn(role, message.content)

    def answer_body(self, answer: Answer, reply_id: str, timestamp: int) -> dict[str, Any]:
        """Return the body of a whole completion."""
        content = answer.text or (None if answer.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.tool_calls:
            message["tool_calls"] = _tool_calls(answer)
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        return {
            **self._base_body(reply_id, timestamp),
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(answer),
        }

    def event_stream(self, reply_id: str, timestamp: int) -> EventStream:
        """Return a completion as a stream of chunks."""
        wants_usage = self.stream_options is not None and self.stream_options.include_usage
        base_body = {**self._base_body(reply_id, timestamp), "object": "chat.completion.chunk"}
        return _ChunkStream(base_body, offers_tools=bool(self.tools), wants_usage=wants_usage)

    @staticmethod
    def error_body(refusal: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""
        return openai_error_body(refusal)

    def _base_body(self, reply_id: str, timestamp: int) -> dict[str, Any]:
        return {"id": f"chatcmpl-{reply_id}", "created": timestamp, "model": self.model}


class _ChunkStream(EventStream):
    def __init__(self, base_body: dict[str, Any], *, offers_tools: bool, wants_usage: bool) -> None:
        super().__init__(offers_tools=offers_tools)
        self._base_body = base_body
        self._wants_usage = wants_usage

    def head_events(self) -> str:
        return self._chunk({"role": "assistant", "content": ""})

    def ping_event(self) -> str:
        return ": wait\n\n"

    def failure_events(self, refusal: Refused) -> str:
        return f"{format_event(openai_error_body(refusal))}data: [DONE]\n\n"

    def _piece_events(self, text: str) -> str:
        return self._chunk({"content": text})

    def _final_events(self, answer: Answer) -> str:
        tool_calls = [{"index": number, **call} for number, call in enumerate(_tool_calls(answer))]
        events = [self._chunk({"tool_calls": tool_calls})] if tool_calls else []
        events.append(self._chunk({}, answer.finish_reason))
        if self._wants_usage:
            events.append(format_event({**self._base_body, "choices": [], "usage": _usage(answer)}))
        return "".join([*events, "data: [DONE]\n\n"])

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> str:
        return format_event(
            {**self._base_body, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
        )


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]


def _usage(answer: Answer) -> dict[str, int] | None:
    if answer.prompt_tokens is None or answer.completion_tokens is None:
        return None
    total_tokens = answer.prompt_tokens + answer.completion_tokens
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return {**counts, "total_tokens": total_tokens}
