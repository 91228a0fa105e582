"""OpenAI's chat completions: `POST /chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

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
    openai_error,
    turn,
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
                    yield turn("tool", message.content, [message.tool_call_id or ""])
                case "developer":
                    yield turn("system", message.content)
                case role:
                    yield turn(role, message.content)

    def answer(self, answer: Answer, name: str, timestamp: int) -> dict[str, Any]:
        """Return the body of a whole completion."""
        content = answer.text or (None if answer.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.calls:
            message["tool_calls"] = _tool_calls(answer)
        choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
        return {
            **self._frame(name, timestamp),
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(answer),
        }

    def events(self, name: str, timestamp: int) -> Events:
        """Return a completion as a stream of chunks."""
        wants_usage = self.stream_options is not None and self.stream_options.include_usage
        frame = {**self._frame(name, timestamp), "object": "chat.completion.chunk"}
        return _Chunks(frame, offers_tools=bool(self.tools), wants_usage=wants_usage)

    @staticmethod
    def error(refusal: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""
        return openai_error(refusal)

    def _frame(self, name: str, timestamp: int) -> dict[str, Any]:
        return {"id": f"chatcmpl-{name}", "created": timestamp, "model": self.model}


class _Chunks(Events):
    def __init__(self, frame: dict[str, Any], *, offers_tools: bool, wants_usage: bool) -> None:
        super().__init__(offers_tools=offers_tools)
        self._frame = frame
        self._wants_usage = wants_usage

    def head(self) -> str:
        return self._chunk({"role": "assistant", "content": ""})

    def ping(self) -> str:
        return ": wait\n\n"

    def fault(self, refusal: Refused) -> str:
        return f"{event(openai_error(refusal))}data: [DONE]\n\n"

    def _piece(self, text: str) -> str:
        return self._chunk({"content": text})

    def _end(self, answer: Answer) -> str:
        calls = [{"index": number, **call} for number, call in enumerate(_tool_calls(answer))]
        parts = [self._chunk({"tool_calls": calls})] if calls else []
        parts.append(self._chunk({}, answer.finish))
        if self._wants_usage:
            parts.append(event({**self._frame, "choices": [], "usage": _usage(answer)}))
        return "".join([*parts, "data: [DONE]\n\n"])

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> str:
        return event({**self._frame, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]


def _usage(answer: Answer) -> dict[str, int] | None:
    if answer.prompt_tokens is None or answer.completion_tokens is None:
        return None
    total = answer.prompt_tokens + answer.completion_tokens
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return {**counts, "total_tokens": total}
