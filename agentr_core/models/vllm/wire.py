"""Requests to vLLM and its replies. Pure: sending and receiving is up to the caller.

Prompts are sent as the token ids of our own rendering, and replies return as the sampled ids. A
chat endpoint would render the conversation with its own template code, and tokenise earlier replies
again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentr_core.answers import HIGHEST_LOGPROB, MOST_TOKENS
from agentr_core.errors import MalformedReply
from agentr_core.fingerprint import derive_seed
from agentr_core.types import Request

_SHOWN = 300


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Logprobs(_Strict):
    token_logprobs: list[Annotated[float, Field(le=HIGHEST_LOGPROB)]]


class Choice(_Strict):
    """One reply from vLLM; `token_ids` includes the end-of-turn token."""

    index: int
    finish_reason: str
    token_ids: list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]]
    logprobs: _Logprobs | None = None


class _Completion(_Strict):
    choices: list[Choice]


class _Weights(_Strict):
    version: str


def body(
    request: Request, prompt: Sequence[int], *, served_name: str, limit: int, stop_ids: Collection[int], seeds: bool
) -> dict[str, Any]:
    """Return the body of a request; `limit` is the most tokens of each reply."""
    sampling = request.sampling
    made: dict[str, Any] = {
        "model": served_name,
        "prompt": list(prompt),
        "n": request.n,
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(stop_ids),
        "return_token_ids": True,
    }
    if sampling.top_k:
        made["top_k"] = sampling.top_k
    if sampling.min_p:
        made["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1:
        made["repetition_penalty"] = sampling.repetition_penalty
    if sampling.include_stop:
        made["include_stop_str_in_output"] = True
    if sampling.logprobs:
        # Only the sampled token, without other candidates.
        made["logprobs"] = 0
    if seeds and sampling.temperature > 0:
        # vLLM draws reply i from seed + i. The seed is hashed, so that nearby seeds share no
        # stream, and halved against overflow.
        made["seed"] = derive_seed("vllm", request.seed) >> 1
    return made


def read_choices(payload: bytes, request: Request) -> list[Choice]:
    """Return the replies in a response, in the order of their numbers.

    Raises `MalformedReply` if the response is not what was asked for; no fault becomes an empty
    reply. The error is transient, because a server that is stopped aborts the replies under way.
    """
    try:
        completion = _Completion.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        shown = payload[:_SHOWN].decode("utf-8", "replace")
        raise MalformedReply(f"vLLM's answer is malformed ({where}: {first['msg']}): {shown!r}") from None
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(request.n)):
        raise MalformedReply(f"vLLM gave {len(choices)} replies where {request.n} were asked for")
    for choice in choices:
        if choice.finish_reason not in ("stop", "length") or not choice.token_ids:
            raise MalformedReply(
                f"vLLM's reply {choice.index} is not whole: it ended with {choice.finish_reason!r} after "
                f"{len(choice.token_ids)} tokens"
            )
        given = len(choice.logprobs.token_logprobs) if choice.logprobs else 0
        if request.sampling.logprobs and given != len(choice.token_ids):
            raise MalformedReply(f"vLLM gave {given} log-probabilities for {len(choice.token_ids)} tokens")
    return choices


def read_version(payload: bytes) -> str:
    """Return the version of the weights that a replica says it has. Raises `MalformedReply`."""
    try:
        return _Weights.model_validate_json(payload).version
    except ValidationError:
        raise MalformedReply(f"vLLM's server does not say which weights it has: {payload[:_SHOWN]!r}") from None
