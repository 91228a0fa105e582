"""The requests of agents to the gateway, and its answers: chat completions in OpenAI's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentr_core.episodes.native_calls import NativeCall, read_call
from agentr_core.models.openai.tool_calls import ToldCall, argument_text, reply_text

MODEL: Final = "policy"
"""The name by which agents ask for the model."""


_CODES: Final = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class Refused(Exception):
    """A request that is answered with an error: one sentence, a status, a code, and perhaps the
    field at fault.
    """

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        code = code or _CODES.get(status, kind)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


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


class _Named(BaseModel):
    name: Annotated[str, Field(min_length=1)]


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Named


_TOOLS: Final = TypeAdapter(list[_Tool])


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
    """An agent's report at the end of an episode. Without `success`, a reward of 1 is a success.

    The text "1" and `true` are no rewards.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    reward: Annotated[float, Field(ge=0, le=1)]
    success: bool | None = None


class Failed(BaseModel):
    """A report that an agent gave its episode up for a fault of its own, which is not a reward of
    0.
    """

    reason: str = "it gave no reason"


_KINDS: Final = ("str", "list[_Part]", "dict[str,any]")
"""Names of kinds of content among the fields of an error."""


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raise `Refused` for tools that have no names, which no model's template can show."""
    try:
        _TOOLS.validate_python(tools)
        json.dumps(tools, allow_nan=False)
    except ValidationError as error:
        raise refusal_of(error, within=("tools",)) from error
    except ValueError as error:
        raise Refused(400, f"tools: {error}", "invalid_request", "tools") from error


def refusal_of(error: ValidationError, *, within: tuple[str, ...] = ()) -> Refused:
    """Return the answer to a body with an error: a sentence that does not quote the body. `within`
    is the field that has the error, if not the body as a whole was read.
    """
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    # Where a field may be of several kinds, the one that the body comes nearest to.
    nearest = max(faults, key=lambda fault: len(fault["loc"])) if faults[0]["loc"][-1:] == ("str",) else faults[0]
    where = ".".join(str(part) for part in (*within, *nearest["loc"]) if part not in _KINDS)
    ours = where.startswith("messages.") or where == "n"
    why = f"{where or 'the body'}: {nearest['msg']}" + (
        "; the gateway takes text, and one reply at a time" if ours else ""
    )
    return Refused(400, why, "invalid_request", where or None)


def completion(call: ChatCall, reply: Mapping[str, Any], *, name: str = "", created: int = 0) -> dict[str, Any]:
    """Return the answer to a call; the reply has a text and, if a model generated it, a finish
    reason and token counts. Ids are made of its name.
    """
    message, finish = _message(call, reply, name)
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {**_head("chat.completion", name, created), "choices": [choice], "usage": _usage(reply)}


def chunks(call: ChatCall, reply: Mapping[str, Any], *, name: str, created: int) -> Iterator[str]:
    """Yield the answer to a call as events of a stream. The reply is in one piece, since it was
    checked and counted as a whole.
    """
    message, finish = _message(call, reply, name)
    for number, told in enumerate(message.get("tool_calls", ())):
        told["index"] = number
    head = _head("chat.completion.chunk", name, created)
    for delta, reason in ((message, None), ({}, finish)):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    if call.stream_options and call.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def model() -> dict[str, Any]:
    """Return the one model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentr"}


def _message(call: ChatCall, reply: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str]:
    found = read_call(reply["text"]) if call.tools else None
    if not isinstance(found, NativeCall):
        return {"role": "assistant", "content": reply["text"]}, reply.get("finish_reason") or "stop"
    function = {"name": found.name, "arguments": json.dumps(dict(found.arguments), ensure_ascii=False)}
    told = {"id": f"call{name[:8]}", "type": "function", "function": function}
    return {"role": "assistant", "content": found.beside or None, "tool_calls": [told]}, "tool_calls"


def _usage(reply: Mapping[str, Any]) -> dict[str, int] | None:
    if "prompt_tokens" not in reply:
        return None
    prompt, made = reply["prompt_tokens"], reply["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _head(kind: str, name: str, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": created, "model": MODEL}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
