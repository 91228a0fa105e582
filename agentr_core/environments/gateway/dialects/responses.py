"""OpenAI's Responses: `POST /responses`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

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


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text = ""


class _FunctionCall(BaseModel):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None


class _FunctionCallOutput(BaseModel):
    call_id: str
    output: Text


class _Reasoning(BaseModel):
    type: Literal["reasoning"]


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_FunctionCallOutput, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(
        # A message may leave its type out.
        lambda item: (item.get("type") or "message") if isinstance(item, Mapping) else None,
        custom_error_type="item",
        custom_error_message="the gateway takes messages, function calls, their outputs and reasoning",
    ),
]


def _to_items(content: Any) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _read_functions(tools: Any) -> Any:
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

    input: Annotated[list[_Item], BeforeValidator(_to_items)]
    instructions: str | None = None
    tools: Annotated[list[Function], BeforeValidator(_read_functions)] = Field(default_factory=list)
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
            yield make_turn("system", self.instructions)
        text: str | None = None
        calls: list[ToolCall] = []
        for item in (*self.input, None):
            if isinstance(item, _FunctionCall):
                calls.append(ToolCall(item.call_id, item.name, argument_text(item.arguments)))
                continue
            if isinstance(item, _Reasoning):
                continue
            if calls or text is not None:
                yield assistant_turn(text or "", calls)
                text, calls = None, []
            if isinstance(item, _FunctionCallOutput):
                yield make_turn("tool", item.output, [item.call_id])
            elif item is not None and item.role == "assistant":
                text = item.content
            elif item is not None:
                yield make_turn("system" if item.role == "developer" else item.role, item.content)

    def answer_body(self, answer: Answer, reply_id: str, timestamp: int) -> dict[str, Any]:
        """Return the body of a whole response."""
        return _completed_response(self._base_body(reply_id, timestamp), answer, reply_id)

    def event_stream(self, reply_id: str, timestamp: int) -> EventStream:
        """Return a response as a stream of events."""
        return _ResponseStream(self._base_body(reply_id, timestamp), reply_id, offers_tools=bool(self.tools))

    @staticmethod
    def error_body(refusal: Refused) -> dict[str, Any]:
        """Return the body of a refusal."""
        return openai_error_body(refusal)

    def _base_body(self, reply_id: str, timestamp: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
        }
        tools = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {
            "id": f"resp_{reply_id}",
            "object": "response",
            "created_at": timestamp,
            **state,
            **tools,
            "usage": None,
        }


class _ResponseStream(EventStream):
    def __init__(self, base_body: dict[str, Any], reply_id: str, *, offers_tools: bool) -> None:
        super().__init__(offers_tools=offers_tools)
        self._base_body = base_body
        self._reply_id = reply_id
        self._num_events = 0
        self._has_message = False

    def head_events(self) -> str:
        return self._event("response.created", response=self._base_body)

    def ping_event(self) -> str:
        # Codex counts only events as a sign of life, not comments.
        return self._event("response.in_progress", response=self._base_body)

    def failure_events(self, refusal: Refused) -> str:
        # Codex stops at `invalid_prompt` and `context_length_exceeded`, and retries at all other
        # codes.
        is_final = refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR and refusal.code != "context_length_exceeded"
        error = {"code": "invalid_prompt" if is_final else refusal.code, "message": refusal.openai_message}
        return self._event("response.failed", response={**self._base_body, "status": "failed", "error": error})

    def _piece_events(self, text: str) -> str:
        return self._message_head_events() + self._content_event("output_text.delta", delta=text, logprobs=[])

    def _final_events(self, answer: Answer) -> str:
        response = _completed_response(self._base_body, answer, self._reply_id)
        items = (self._item_events(index, item) for index, item in enumerate(response["output"]))
        return "".join((*items, self._event("response.completed", response=response)))

    def _message_head_events(self) -> str:
        if self._has_message:
            return ""
        self._has_message = True
        item = {**_message_item(self._reply_id, ""), "status": "in_progress", "content": []}
        item_event = self._event("response.output_item.added", output_index=0, item=item)
        return item_event + self._content_event("content_part.added", part=_text_part(""))

    def _item_events(self, index: int, item: dict[str, Any]) -> str:
        """Return the events of an output item, from its beginning to its end; codex reads only the
        last one.
        """
        if item["type"] == "message":
            (part,) = item["content"]
            events = [
                self._message_head_events(),
                self._content_event("output_text.done", text=part["text"], logprobs=[]),
                self._content_event("content_part.done", part=part),
            ]
        else:
            id_fields, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
            item_in_progress = {**item, "status": "in_progress", "arguments": ""}
            events = [
                self._event("response.output_item.added", output_index=index, item=item_in_progress),
                self._event("response.function_call_arguments.delta", **id_fields, delta=arguments),
                self._event(
                    "response.function_call_arguments.done", **id_fields, name=item["name"], arguments=arguments
                ),
            ]
        return "".join((*events, self._event("response.output_item.done", output_index=index, item=item)))

    def _content_event(self, event_type: str, **fields: Any) -> str:
        return self._event(
            f"response.{event_type}", item_id=f"msg_{self._reply_id}", output_index=0, content_index=0, **fields
        )

    def _event(self, event_type: str, **fields: Any) -> str:
        self._num_events += 1
        return format_event({"type": event_type, "sequence_number": self._num_events - 1, **fields}, event_type)


def _completed_response(base_body: Mapping[str, Any], answer: Answer, reply_id: str) -> dict[str, Any]:
    # A reply that reached its token limit is complete, too: at `incomplete`, codex, openai-agents
    # and the official client end with an error, and it is the recipe that sets the limit.
    output = [] if answer.tool_calls and not answer.text else [_message_item(reply_id, answer.text)]
    for number, call in enumerate(answer.tool_calls):
        function = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        output.append({"type": "function_call", "id": f"fc_{reply_id}_{number}", **function, "status": "completed"})
    return {**base_body, "status": "completed", "output": output, "usage": _usage(answer)}


def _message_item(reply_id: str, text: str) -> dict[str, Any]:
    message = {"type": "message", "id": f"msg_{reply_id}", "role": "assistant", "status": "completed"}
    return {**message, "content": [_text_part(text)]}


def _text_part(text: str) -> dict[str, Any]:
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
