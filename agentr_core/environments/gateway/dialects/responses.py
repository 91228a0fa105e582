"""OpenAI's Responses: `POST /responses`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

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


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text = ""


class _Call(BaseModel):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None


class _Output(BaseModel):
    call_id: str
    output: Text


class _Reasoning(BaseModel):
    type: Literal["reasoning"]


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(
        # A message may leave its type out.
        lambda item: (item.get("type") or "message") if isinstance(item, Mapping) else None,
        custom_error_type="item",
        custom_error_message="the gateway takes messages, function calls, their outputs and reasoning",
    ),
]


def _items(content: Any) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _functions(tools: Any) -> Any:
    """Return the functions among the tools. Others are left out: services of OpenAI, such as
    `web_search`, and the functions of a `namespace`, which our calls could not name.
    """
    if not isinstance(tools, list):
        return tools or []
    return [
        {name: value for name, value in tool.items() if name != "type"}
        for tool in tools
        if isinstance(tool, Mapping) and tool.get("type") == "function"
    ]


class ResponsesRequest(AgentRequest):
    """A request for a response."""

    input: Annotated[list[_Item], BeforeValidator(_items)]
    instructions: str | None = None
    tools: Annotated[list[Function], BeforeValidator(_functions)] = Field(default_factory=list)
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None

    # At a status from 401 to 422, codex retries for a while.
    status_when_over: ClassVar[int] = HTTPStatus.BAD_REQUEST

    @property
    def functions(self) -> Sequence[Function]:
        """The functions that the agent offers."""
        return self.tools

    def history(self) -> Iterator[Turn]:
        """Yield the items as turns; an assistant's message and the calls after it are one turn.
        Raises `Refused` if a part of the conversation is missing, as the agent takes it to be
        stored here.
        """
        for field in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, field) is not None:
                reason = f"{field}: nothing is stored here; send the whole conversation as input"
                raise Refused(HTTPStatus.BAD_REQUEST, reason, "invalid_request", field)
        if self.instructions:
            yield turn("system", self.instructions)
        text: str | None = None
        calls: list[ToolCall] = []
        for item in (*self.input, None):
            if isinstance(item, _Call):
                calls.append(ToolCall(item.call_id, item.name, argument_text(item.arguments)))
                continue
            if isinstance(item, _Reasoning):
                continue
            if calls or text is not None:
                yield assistant_turn(text or "", calls)
                text, calls = None, []
            if isinstance(item, _Output):
                yield turn("tool", item.output, [item.call_id])
            elif item is not None and item.role == "assistant":
                text = item.content
            elif item is not None:
                yield turn("system" if item.role == "developer" else item.role, item.content)

    def answer(self, answer: Answer, name: str, timestamp: int) -> dict[str, Any]:
        """Return the body of a whole response."""
        return _completed(self._frame(name, timestamp), answer, name)

    def events(self, name: str, timestamp: int) -> Events:
        """Return a response as a stream of events."""
        return _ResponseEvents(self._frame(name, timestamp), name, offers_tools=bool(self.tools))

    @staticmethod
    def error(refusal: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""
        return openai_error(refusal)

    def _frame(self, name: str, timestamp: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
        }
        tools = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {"id": f"resp_{name}", "object": "response", "created_at": timestamp, **state, **tools, "usage": None}


class _ResponseEvents(Events):
    def __init__(self, frame: dict[str, Any], name: str, *, offers_tools: bool) -> None:
        super().__init__(offers_tools=offers_tools)
        self._frame = frame
        self._name = name
        self._number = 0
        self._has_message = False

    def head(self) -> str:
        return self._event("response.created", response=self._frame)

    def ping(self) -> str:
        # Codex counts only events as a sign of life, not comments.
        return self._event("response.in_progress", response=self._frame)

    def fault(self, refusal: Refused) -> str:
        # Codex stops at `invalid_prompt` and `context_length_exceeded`, and retries at all other
        # codes.
        is_final = refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR and refusal.code != "context_length_exceeded"
        error = {"code": "invalid_prompt" if is_final else refusal.code, "message": refusal.openai_message}
        return self._event("response.failed", response={**self._frame, "status": "failed", "error": error})

    def _piece(self, text: str) -> str:
        return self._message_head() + self._part_event("output_text.delta", delta=text, logprobs=[])

    def _end(self, answer: Answer) -> str:
        response = _completed(self._frame, answer, self._name)
        items = (self._item(index, item) for index, item in enumerate(response["output"]))
        return "".join((*items, self._event("response.completed", response=response)))

    def _message_head(self) -> str:
        if self._has_message:
            return ""
        self._has_message = True
        item = {**_message(self._name, ""), "status": "in_progress", "content": []}
        item_event = self._event("response.output_item.added", output_index=0, item=item)
        return item_event + self._part_event("content_part.added", part=_part(""))

    def _item(self, index: int, item: dict[str, Any]) -> str:
        """Return the events of an output item, from its beginning to its end; codex reads only the
        last one.
        """
        if item["type"] == "message":
            (part,) = item["content"]
            parts = [
                self._message_head(),
                self._part_event("output_text.done", text=part["text"], logprobs=[]),
                self._part_event("content_part.done", part=part),
            ]
        else:
            ids, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
            item_in_progress = {**item, "status": "in_progress", "arguments": ""}
            parts = [
                self._event("response.output_item.added", output_index=index, item=item_in_progress),
                self._event("response.function_call_arguments.delta", **ids, delta=arguments),
                self._event("response.function_call_arguments.done", **ids, name=item["name"], arguments=arguments),
            ]
        return "".join((*parts, self._event("response.output_item.done", output_index=index, item=item)))

    def _part_event(self, kind: str, **fields: Any) -> str:
        return self._event(f"response.{kind}", item_id=f"msg_{self._name}", output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)


def _completed(frame: Mapping[str, Any], answer: Answer, name: str) -> dict[str, Any]:
    # A reply that reached its token limit is complete, too: at `incomplete`, codex, openai-agents
    # and the official client end with an error, and it is the recipe that sets the limit.
    output = [] if answer.calls and not answer.text else [_message(name, answer.text)]
    for number, call in enumerate(answer.calls):
        function = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        output.append({"type": "function_call", "id": f"fc_{name}_{number}", **function, "status": "completed"})
    return {**frame, "status": "completed", "output": output, "usage": _usage(answer)}


def _message(name: str, text: str) -> dict[str, Any]:
    message = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed"}
    return {**message, "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _usage(answer: Answer) -> dict[str, Any] | None:
    if answer.prompt_tokens is None or answer.completion_tokens is None:
        return None
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
