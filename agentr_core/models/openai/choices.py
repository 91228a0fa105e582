"""A reply in a server's answer: its text, how it ended, and whether it is whole.

Servers that follow OpenAI's protocol differ in some fields of a reply. What is read here beyond the
protocol is what such servers are known to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentr_core.answers import HIGHEST_LOGPROB, MOST_TOKENS
from agentr_core.errors import MalformedReply, ModelFault
from agentr_core.models.openai.tool_calls import ToldCall, argument_text, reply_text

Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
"""A token id, or a number of tokens."""
Ending = Literal["stop", "length", "tool_calls", "content_filter"]

ENDINGS: Final[dict[str, Ending]] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "complete": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "content_filtered": "content_filter",
    "refusal": "content_filter",
    "safety": "content_filter",
}
"""The finish reasons of servers, in lower case, in terms of OpenAI's: of Together, TGI, WatsonX and
Mistral, and of gateways that pass on those of Anthropic, Bedrock, Cohere and Gemini.

Missing are reasons of replies that broke off, such as `abort` and `error`.
"""
_TEXT_PARTS = ("text", "output_text")
_THOUGHT_PARTS = ("thinking", "reasoning")
_THINKS = "a model that thinks first needs a higher max_new_tokens, or its thinking switched off in server.extra_body"
_PARSED = (
    "all of it is a thought by the server's own reading: start it with the reasoning parser for this model, or switch "
    "the thinking off in server.extra_body"
)
_PROVES = "with server.token_ids a server can prove that the model meant to say nothing"


class Strict(BaseModel):
    """A part of a server's answer, read strictly: text is not converted to numbers, and NaN is
    refused.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Function(Strict):
    name: str
    arguments: str | dict[str, Any] | None = None
    """The protocol has JSON as text here; llama.cpp has sent the object itself."""


class _ToolCall(Strict):
    function: _Function


class _Part(Strict):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(Strict):
    content: str | list[_Part] | None = None
    """Text, or parts, as Mistral's reasoning models send them."""
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: Any = None
    """A thought that the server cut out of the content; newer servers call it `reasoning`."""
    reasoning: Any = None
    reasoning_details: Any = None

    @property
    def parts(self) -> list[_Part]:
        """The content in parts."""
        return [_Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []

    @property
    def text(self) -> str:
        """The content as one text, without a thought."""
        return "".join(part.text or "" for part in self.parts if part.type in _TEXT_PARTS)

    @property
    def withheld(self) -> str | None:
        """The words in which the server or the model refuses."""
        return self.refusal or next((part.refusal for part in self.parts if part.refusal), None)

    @property
    def thinks(self) -> bool:
        """Whether the server reports a thought apart from the text."""
        return bool(self.reasoning_content or self.reasoning or self.reasoning_details) or any(
            p.type in _THOUGHT_PARTS for p in self.parts
        )


class _Token(Strict):
    logprob: Annotated[float, Field(le=HIGHEST_LOGPROB)]


class _Logprobs(Strict):
    content: list[_Token] | None = None


class Choice(Strict):
    """One reply in a server's answer."""

    index: int
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[Tokens] | None = None
    stop_reason: str | int | None = None
    """vLLM's extension: the stop string or token that ended the reply."""

    @property
    def ending(self) -> Ending | None:
        """How the reply ended, in OpenAI's terms; None where that is not known."""
        return ENDINGS.get((self.finish_reason or "").lower())

    @property
    def is_cut(self) -> bool:
        """Whether the reply reached a limit of tokens."""
        return self.ending == "length"

    @property
    def text(self) -> str:
        """What the reply says, its calls included, before it is cut at stop strings."""
        calls = [call.function for call in self.message.tool_calls or ()]
        return reply_text(self.message.text, [ToldCall(call.name, argument_text(call.arguments)) for call in calls])

    def check(self, total: int, tools: Sequence[str], *, helper: bool = False) -> None:
        """Raise unless this is a whole reply of the model. `total` is the number of tokens in the
        server's answer, `tools` are the names of the tools that were offered; what a `helper` may
        say says `Request`.

        Raises:
            MalformedReply: it is not whole, empty, or no more than a thought that was cut.
            ModelFault: it was withheld, or calls a tool where none was offered.
        """
        message = self.message
        if message.withheld or self.ending == "content_filter":
            raise ModelFault(f"the server withheld a reply: {message.withheld or 'its content filter cut it'}")
        if strange := sorted({part.type for part in message.parts} - {*_TEXT_PARTS, *_THOUGHT_PARTS, "refusal"}):
            raise MalformedReply(f"reply {self.index} has parts that are not text: {', '.join(strange)}")
        if self.ending is None:
            raise MalformedReply(f"reply {self.index} {self._unknown_ending()}")
        if self.ending == "tool_calls" or message.tool_calls:
            self._check_call(tools)
        else:
            self._check_words(total, helper=helper)

    def _unknown_ending(self) -> str:
        if not self.finish_reason:
            return "has no finish reason: the server does not say that it is whole"
        return (
            f"has the finish reason {self.finish_reason!r}, which does not say that it is whole; these do: "
            f"{', '.join(reason for reason, ending in ENDINGS.items() if ending != 'content_filter')}"
        )

    def _check_call(self, tools: Sequence[str]) -> None:
        calls = ", ".join(call.function.name for call in self.message.tool_calls or ())
        if not tools:
            raise ModelFault(
                f"the model called a tool{f' ({calls})' if calls else ''}, and none was offered; switch tools off at "
                "the server"
            )
        if not calls:
            raise MalformedReply(
                f"reply {self.index} has the finish reason {self.finish_reason!r} and no call in it; offered were the "
                f"tools {', '.join(tools)}; start the server with the tool-call parser for this model"
            )

    def _check_words(self, total: int, *, helper: bool) -> None:
        count = len(self.token_ids or ()) or total
        if self.is_cut and self.message.thinks and not self.message.text.strip():
            if helper:
                return
            raise MalformedReply(f"reply {self.index} is a thought that was cut after {count} tokens; {_THINKS}")
        if not self.message.text and not self.token_ids:
            hint = _THINKS if self.is_cut else _PARSED if self.message.thinks else _PROVES
            raise MalformedReply(f"reply {self.index} is empty after {total} tokens; {hint}")
