"""Requests and replies in the form of OpenAI's chat-completions protocol. Pure functions: the
caller sends and receives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentr_core.episodes.transcript import call_text, readable_calls
from agentr_core.errors import ConfigError, MalformedReply, ModelFault
from agentr_core.fingerprint import derive_seed
from agentr_core.models.local.waves import cut_at_stop, is_thought
from agentr_core.protocols import HIGHEST_LOGPROB, MOST_TOKENS
from agentr_core.recipes.models import ServerConfig
from agentr_core.types import Generation, Message, Request, Sampling

# Translates native tool calls between our messages and the fields of OpenAI's protocol.
#
# Our messages hold a call as text, which `episodes.transcript` parses. The protocol has calls in
# `tool_calls` of the assistant's message, each with an id that the message with its result repeats.


class ReportedCall(NamedTuple):
    """A call as a server reports it; `arguments` is JSON, or what the model wrote in its place."""

    name: str
    arguments: str


def tool_fields(messages: Sequence[Message]) -> dict[str, Any]:
    """Return the fields of a request that offer the tools of a conversation; empty without tools.
    Parallel calls are allowed: a server that drops all calls but the first would report a text that
    does not match the reply's tokens.
    """
    if not messages or messages[0].role != "tools":
        return {}
    return {"tools": json.loads(messages[0].text), "parallel_tool_calls": True}


def argument_text(arguments: str | Mapping[str, Any] | None) -> str:
    """Return the arguments of a call as JSON. The protocol has JSON text, but some programs send
    the object itself, or nothing if there are no arguments.
    """
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


def wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a request in the protocol's form.

    An assistant's turn is sent as plain text if its calls cannot be parsed, or if fewer results
    than calls follow it, as where a context window has dropped some. A result without its call is
    sent as the user's text. The definitions of the tools, of role `tools`, are left out:
    `tool_fields` sends them.
    """
    turns = [message for message in messages if message.role != "tools"]
    result: list[dict[str, Any]] = []
    pending_ids: list[str] = []
    for index, message in enumerate(turns):
        if message.role == "tool" and pending_ids:
            result.append({"role": "tool", "tool_call_id": pending_ids.pop(0), "content": message.text})
            continue
        num_results = sum(1 for _ in takewhile(lambda turn: turn.role == "tool", turns[index + 1 :]))
        calls = readable_calls(message.text) if message.role == "assistant" and num_results else ()
        if not 0 < len(calls) <= num_results:
            result.append({"role": "user" if message.role == "tool" else message.role, "content": message.text})
            continue
        # Some servers require ids of nine letters and digits. Each call is followed by a message
        # with its result, so the numbers of two turns never overlap.
        pending_ids = [f"call{index + number:05}" for number in range(len(calls))]
        tool_calls = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": argument_text(call.arguments)},
            }
            for call_id, call in zip(pending_ids, calls, strict=True)
        ]
        result.append({"role": "assistant", "content": calls[0].text_outside, "tool_calls": tool_calls})
    return result


def reply_text(content: str, calls: Iterable[ReportedCall]) -> str:
    """Return a reply as the text that the environment reads: its content, followed by its calls."""
    text = content.strip() if (call_list := list(calls)) else content
    for name, arguments in call_list:
        text = call_text(name, arguments.strip() or "{}", before=text)
    return text


# A reply in a server's answer: its text, how it ended, and whether it is complete.
#
# Servers that follow OpenAI's protocol differ in some fields of a reply. Fields beyond the protocol
# are read here where such servers are known to send them.

TokenNumber = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
"""A token id, or a number of tokens."""
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

FINISH_REASONS: Final[dict[str, FinishReason]] = {
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
"""The finish reasons of servers, in lower case, and OpenAI's terms for them: those of Together,
TGI, WatsonX and Mistral, and of gateways that pass on those of Anthropic, Bedrock, Cohere and
Gemini.

Reasons of replies that broke off, such as `abort` and `error`, are left out on purpose.
"""
_TEXT_PARTS = ("text", "output_text")
_THOUGHT_PARTS = ("thinking", "reasoning")
_THINKING_HINT = (
    "a model that thinks first needs a higher max_new_tokens, or its thinking switched off in server.extra_body"
)
_PARSER_HINT = (
    "all of it is a thought by the server's own reading: start it with the reasoning parser for this model, or switch "
    "the thinking off in server.extra_body"
)
_TOKEN_IDS_HINT = "with server.token_ids a server can prove that the model meant to say nothing"


class Strict(BaseModel):
    """A part of a server's answer, read strictly: text is not converted to numbers, and NaN is
    refused.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Function(Strict):
    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text in the protocol; llama.cpp has sent the object itself."""


class _ToolCall(Strict):
    function: _Function


class _Part(Strict):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(Strict):
    content: str | list[_Part] | None = None
    """Text, or a list of parts as Mistral's reasoning models send it."""
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: Any = None
    """A thought that the server cut out of the content; newer servers call it `reasoning`."""
    reasoning: Any = None
    reasoning_details: Any = None

    @property
    def content_parts(self) -> list[_Part]:
        """The content as a list of parts."""
        return [_Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []

    @property
    def text(self) -> str:
        """The content as one text, without thoughts."""
        return "".join(part.text or "" for part in self.content_parts if part.type in _TEXT_PARTS)

    @property
    def refusal_text(self) -> str | None:
        """The words in which the server or the model refuses; None if it does not."""
        return self.refusal or next((part.refusal for part in self.content_parts if part.refusal), None)

    @property
    def has_thought(self) -> bool:
        """Whether the server reports a thought separately from the text."""
        return bool(self.reasoning_content or self.reasoning or self.reasoning_details) or any(
            p.type in _THOUGHT_PARTS for p in self.content_parts
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
    token_ids: list[TokenNumber] | None = None
    stop_reason: str | int | None = None
    """vLLM's extension: the stop string or token that ended the reply."""

    @property
    def openai_finish_reason(self) -> FinishReason | None:
        """How the reply ended, in OpenAI's terms; None if that is unknown."""
        return FINISH_REASONS.get((self.finish_reason or "").lower())

    @property
    def is_cut(self) -> bool:
        """Whether the reply was cut by a token limit."""
        return self.openai_finish_reason == "length"

    @property
    def text(self) -> str:
        """The text of the reply, including its calls, before it is cut at stop strings."""
        calls = [call.function for call in self.message.tool_calls or ()]
        return reply_text(self.message.text, [ReportedCall(call.name, argument_text(call.arguments)) for call in calls])

    def check(self, num_answer_tokens: int, tool_names: Sequence[str], *, helper: bool = False) -> None:
        """Raise unless this is a complete reply of the model.

        Args:
            num_answer_tokens: the number of tokens in the server's answer, for messages.
            tool_names: the names of the tools that were offered.
            helper: `Request.helper`; a thought that was cut is then accepted.

        Raises:
            MalformedReply: it is incomplete, empty, or no more than a thought that was cut.
            ModelFault: it was withheld, or calls a tool although none was offered.
        """
        message = self.message
        if message.refusal_text or self.openai_finish_reason == "content_filter":
            raise ModelFault(f"the server withheld a reply: {message.refusal_text or 'its content filter cut it'}")
        if unknown_types := sorted(
            {part.type for part in message.content_parts} - {*_TEXT_PARTS, *_THOUGHT_PARTS, "refusal"}
        ):
            raise MalformedReply(f"reply {self.index} has parts that are not text: {', '.join(unknown_types)}")
        # No finish reason is a fault, too: servers that broke off send null.
        if self.openai_finish_reason is None:
            if not self.finish_reason:
                raise MalformedReply(
                    f"reply {self.index} has no finish reason: the server does not say that it is whole"
                )
            complete_reasons = ", ".join(
                server_reason
                for server_reason, openai_reason in FINISH_REASONS.items()
                if openai_reason != "content_filter"
            )
            raise MalformedReply(
                f"reply {self.index} has the finish reason {self.finish_reason!r}, which does not say that it is "
                f"whole; these do: {complete_reasons}"
            )
        if self.openai_finish_reason == "tool_calls" or message.tool_calls:
            calls = ", ".join(call.function.name for call in self.message.tool_calls or ())
            if not tool_names:
                raise ModelFault(
                    f"the model called a tool{f' ({calls})' if calls else ''}, and none was offered; switch tools off "
                    "at the server"
                )
            if not calls:
                raise MalformedReply(
                    f"reply {self.index} has the finish reason {self.finish_reason!r} and no call in it; offered were "
                    f"the tools {', '.join(tool_names)}; start the server with the tool-call parser for this model"
                )
        elif self.is_cut and message.has_thought and not message.text.strip():
            if not helper:
                num_tokens = len(self.token_ids or ()) or num_answer_tokens
                raise MalformedReply(
                    f"reply {self.index} is a thought that was cut after {num_tokens} tokens; {_THINKING_HINT}"
                )
        # A broken server and a model that ends its turn at once look the same; only token ids tell
        # them apart.
        elif not message.text and not self.token_ids:
            hint = _THINKING_HINT if self.is_cut else _PARSER_HINT if message.has_thought else _TOKEN_IDS_HINT
            raise MalformedReply(f"reply {self.index} is empty after {num_answer_tokens} tokens; {hint}")


_MAX_QUOTED_CHARS = 200
"""Characters of a malformed body that an error message quotes."""


class _Usage(Strict):
    prompt_tokens: TokenNumber
    completion_tokens: TokenNumber


class _Completion(Strict):
    choices: list[Choice]
    usage: _Usage


class _UsageOnly(Strict):
    usage: _Usage


class _ServedModel(Strict):
    id: str
    max_model_len: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None


class _ModelList(Strict):
    data: list[_ServedModel]


def request_bodies(request: Request, server: ServerConfig, max_tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of the HTTP requests that together ask for the `request.n` replies, in
    order.

    There is one body, unless `server.n_per_request` is smaller than `n`. The first carries the
    request's seed, each further one a seed derived from it and the number of its first reply.
    `max_tokens` is the most tokens of a reply.

    Raises `ConfigError` if the request continues a turn, keeps stop strings or has settings beyond
    OpenAI's protocol, and the recipe does not say that the server supports this.
    """
    sampling = request.sampling
    continues_turn = bool(request.messages[-1].spans)
    if (continues_turn or sampling.include_stop) and not server.continues:
        raise ConfigError(
            f"the world of this recipe lets {server.model} go on with its own turn and keeps stop strings, which "
            "OpenAI's protocol does not know; if the server has vLLM's fields for it, set server.continues"
        )
    body: dict[str, Any] = {
        **server.extra_body,
        "model": server.model,
        "messages": wire_messages(request.messages),
        **tool_fields(request.messages),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        server.max_tokens_field: max_tokens,
    }
    # Settings beyond the protocol are sent if the server supports them, even with a value that has
    # no effect.
    extra_fields = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty}
    defaults = Sampling()
    if unsupported_fields := [
        n for n in extra_fields if getattr(sampling, n) != getattr(defaults, n) and n not in server.sampling_fields
    ]:
        raise ConfigError(
            f"OpenAI's protocol does not know {', '.join(unsupported_fields)}; leave it out or, if the server of "
            f"{server.model} has a field of this name as vLLM does, name it in server.sampling_fields"
        )
    # All servers accept -1 for no limit, but some do not accept 0.
    extra_fields["top_k"] = sampling.top_k or -1
    body |= {name: value for name, value in extra_fields.items() if name in server.sampling_fields}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.include_stop:
        body["include_stop_str_in_output"] = True
    if continues_turn:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if sampling.logprobs:
        body["logprobs"] = True
    if server.token_ids:
        body["return_token_ids"] = True
    per_request = server.n_per_request or request.n
    result = []
    for first_index in range(0, request.n, per_request):
        seed = derive_seed(request.seed, first_index) if first_index else request.seed
        result.append(
            {**body, "n": min(per_request, request.n - first_index)} | ({"seed": seed} if server.send_seed else {})
        )
    return result


def read_completion(
    payload: bytes, request: Request, *, n: int, max_tokens: int, opens_thought: bool = False
) -> list[Generation]:
    """Return the `n` replies in a response body, in the order of their indices.

    If the server returns token ids, they give the token count of each reply. Otherwise the server's
    total is divided: `max_tokens` to each reply that was cut there, the rest by length of text.
    Sums are always the server's. `opens_thought` says that the prompt opens a thought.

    Raises:
        MalformedReply: the body is truncated or breaks the protocol, or has a wrong number of
            replies or an empty reply, or one that ends within its thought (unless
            `request.helper`). An empty reply is accepted as the model's choice only when token ids
            prove that the model generated it.
        ModelFault: a reply was withheld, calls a tool although none was offered, or lacks the
            log-probabilities that were asked for.
    """
    try:
        completion = _Completion.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"])) or "body"
        raise MalformedReply(f"the reply is malformed ({location}: {first['msg']}): {_quote(payload)}") from None
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if len(choices) != n:
        raise MalformedReply(
            f"{n} replies were asked for and {len(choices)} came; if the server does not support n, set "
            "server.n_per_request to 1"
        )
    if indices != list(range(n)):
        raise MalformedReply(f"{n} replies were asked for and {n} came, numbered {', '.join(map(str, indices))}")
    # A tool other than a function is named by its type: an agent behind the gateway may offer any.
    tools = tool_fields(request.messages).get("tools", ())
    tools = [str((tool.get("function") or {}).get("name") or tool.get("type")) for tool in tools]
    for choice in choices:
        choice.check(completion.usage.completion_tokens, tools, helper=request.helper)
    token_counts = _completion_token_counts(choices, completion.usage.completion_tokens, max_tokens)
    return [
        _generation(
            choice,
            request.sampling,
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=num_tokens,
            opens_thought=opens_thought,
        )
        for choice, num_tokens in zip(choices, token_counts, strict=True)
    ]


def read_prompt_tokens(payload: bytes) -> int:
    """Return the number of prompt tokens that the server counted, from a response body. Raises
    `MalformedReply` if it is missing.
    """
    try:
        return _UsageOnly.model_validate_json(payload).usage.prompt_tokens
    except ValidationError:
        raise MalformedReply(f"the reply does not tell the tokens of its prompt: {_quote(payload)}") from None


def read_models(payload: bytes) -> dict[str, int | None]:
    """Return the context length of each model that a server lists, by the model's id; None where it
    gives none. Raises `MalformedReply`.
    """
    try:
        return {model.id: model.max_model_len for model in _ModelList.model_validate_json(payload).data}
    except ValidationError:
        raise MalformedReply(f"the list of models is malformed: {_quote(payload)}") from None


def _generation(
    choice: Choice, sampling: Sampling, *, prompt_tokens: int, completion_tokens: int, opens_thought: bool
) -> Generation:
    text = choice.text
    stop_reason = choice.stop_reason
    # A server that omits the stop string nevertheless reports which one it was.
    if sampling.include_stop and stop_reason in sampling.stop and not any(stop in text for stop in sampling.stop):
        text += str(stop_reason)
    # A server that reports thoughts apart has cut them out of the text, even an empty one, of which
    # it reports nothing.
    has_thought = choice.message.has_thought
    may_end_in_thought = opens_thought and choice.is_cut and not has_thought
    text = cut_at_stop(text, sampling, in_thought=may_end_in_thought)
    is_shortened = bool(sampling.until) and text != choice.text
    # After a cut by `until`, it is unknown which of the reported tokens belong to the text that
    # remains.
    is_untraceable = is_shortened or (bool(sampling.until) and choice.stop_reason is not None)
    logprobs = None
    if sampling.logprobs and not is_untraceable:
        logprobs = tuple(token.logprob for token in (choice.logprobs.content if choice.logprobs else None) or ())
        if choice.token_ids is not None and len(logprobs) != len(choice.token_ids):
            raise MalformedReply(
                f"reply {choice.index} has {len(choice.token_ids)} token ids and {len(logprobs)} log-probabilities"
            )
        if not logprobs:
            raise ModelFault("the server gives no log-probabilities; do not ask for them, or use one that does")
    is_cut = choice.is_cut and not is_shortened
    return Generation(
        text=text,
        token_ids=() if is_untraceable else tuple(choice.token_ids or ()),
        finish_reason="length" if is_cut else "stop",
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        logprobs=logprobs,
        thinks=has_thought or opens_thought,
        unfinished_thought=is_cut and may_end_in_thought and is_thought(text),
    )


def _completion_token_counts(choices: Sequence[Choice], total_tokens: int, max_tokens: int) -> list[int]:
    """Return the number of tokens of each choice: counted, or estimated from the total as
    `read_completion` says.
    """
    if all(choice.token_ids is not None for choice in choices):
        return [len(choice.token_ids or ()) for choice in choices]
    if len(choices) == 1:
        return [total_tokens]
    cut_flags = [choice.is_cut for choice in choices]
    if all(cut_flags):
        return _proportional_shares(total_tokens, [1] * len(choices))
    cut_share = min(max_tokens, total_tokens // max(1, sum(cut_flags)))
    lengths = [0 if is_cut else len(choice.text) for is_cut, choice in zip(cut_flags, choices, strict=True)]
    shares = _proportional_shares(total_tokens - cut_share * sum(cut_flags), lengths)
    return [cut_share if is_cut else share for is_cut, share in zip(cut_flags, shares, strict=True)]


def _proportional_shares(total: int, weights: Sequence[int]) -> list[int]:
    """Return integers in proportion to the weights that sum to `total`; zeros if all weights are
    zero.
    """
    weight_sum = sum(weights)
    if not weight_sum:
        return [0] * len(weights)
    ends = (total * end // weight_sum for end in accumulate(weights, initial=0))
    return [end - start for start, end in pairwise(ends)]


def _quote(payload: bytes) -> str:
    text = " ".join(payload[: 4 * _MAX_QUOTED_CHARS].decode("utf-8", "replace").split())
    return repr(text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + "…")
