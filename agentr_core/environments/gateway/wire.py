"""The requests of agents to the gateway, and its answers: chat completions in OpenAI's protocol."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from agentr_core.episodes.native_calls import NativeCall, read_call
from agentr_core.models.openai.tool_calls import ToldCall, argument_text, reply_text

MODEL: Final = "policy"
"""The name by which agents ask for the model."""


class Refused(Exception):
    """A request of an agent that is answered with an error: one sentence, a status, and a code."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    function: _Function


class _Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    def told(self) -> dict[str, str]:
        """Return the turn as role and text."""
        text = self.content or ""
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        calls = [ToldCall(call.function.name, argument_text(call.function.arguments)) for call in self.tool_calls or ()]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "text": reply_text(text, calls) if calls else text}


class _StreamOptions(BaseModel):
    include_usage: bool = False


class ChatCall(BaseModel):
    """A chat completion that an agent asks for. The recipe decides how it is drawn, so the agent's
    temperature, limits and stop strings have no effect.
    """

    model: str
    messages: Annotated[list[_Turn], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def turns(self) -> list[dict[str, str]]:
        """Return the turns as roles and texts; the tools that are offered come first."""
        offered = [{"role": "tools", "text": json.dumps(self.tools, ensure_ascii=False)}] if self.tools else []
        return [*offered, *(turn.told() for turn in self.messages)]


class Rewarded(BaseModel):
    """An agent's report at the end of an episode. Without `success`, a reward of 1 is a success."""

    reward: Annotated[float, Field(ge=0, le=1)]
    success: bool | None = None


class Failed(BaseModel):
    """A report that an agent gave its episode up for a fault of its own, which is not a reward of
    0.
    """

    reason: str = "it gave no reason"


def sentence(error: ValidationError) -> str:
    """Return the error in a body as one sentence, without quoting the body."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "the body"
    ours = where.startswith("messages.") or where == "n"
    return f"{where}: {first['msg']}" + ("; the gateway takes text, and one reply at a time" if ours else "")


def completion(call: ChatCall, reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a call; the reply has a text and, if a model generated it, a finish
    reason and token counts.
    """
    message, finish = _message(call, reply)
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chunks(call: ChatCall, reply: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer to a call as events of a stream. The reply is in one piece, since it was
    checked and counted as a whole.
    """
    message, finish = _message(call, reply)
    for number, told in enumerate(message.get("tool_calls", ())):
        told["index"] = number
    head = _head("chat.completion.chunk")
    for delta, reason in ((message, None), ({}, finish)):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    if call.stream_options and call.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def models() -> dict[str, Any]:
    """Return the list of models, which has one entry."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "agentr"}]}


def _message(call: ChatCall, reply: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    found = read_call(reply["text"]) if call.tools else None
    if not isinstance(found, NativeCall):
        return {"role": "assistant", "content": reply["text"]}, reply.get("finish_reason") or "stop"
    function = {"name": found.name, "arguments": json.dumps(dict(found.arguments), ensure_ascii=False)}
    told = {"id": f"call{secrets.token_hex(4)}", "type": "function", "function": function}
    return {"role": "assistant", "content": found.beside or None, "tool_calls": [told]}, "tool_calls"


def _usage(reply: Mapping[str, Any]) -> dict[str, int] | None:
    if "prompt_tokens" not in reply:
        return None
    prompt, made = reply["prompt_tokens"], reply["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
