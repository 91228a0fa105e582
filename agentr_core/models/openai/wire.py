"""Requests and replies in OpenAI's chat-completions form. Pure: sending and receiving is up to the
caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any

from pydantic import Field, ValidationError

from agentr_core.answers import MOST_TOKENS
from agentr_core.errors import ConfigError, MalformedReply, ModelFault
from agentr_core.fingerprint import derive_seed
from agentr_core.models.openai.choices import Choice, Strict, Tokens
from agentr_core.models.openai.tool_calls import offered, tool_names, wire_messages
from agentr_core.models.stopping import cut_at_stop
from agentr_core.recipes.models import ServerConfig
from agentr_core.types import Generation, Request, Sampling

_SHOWN = 200
"""Characters of a malformed body that an error message quotes."""


class _Usage(Strict):
    prompt_tokens: Tokens
    completion_tokens: Tokens


class _Completion(Strict):
    choices: list[Choice]
    usage: _Usage


class _Measured(Strict):
    usage: _Usage


class _Served(Strict):
    id: str
    max_model_len: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None


class _ModelList(Strict):
    data: list[_Served]


def bodies(request: Request, server: ServerConfig, limit: int) -> list[dict[str, Any]]:
    """Return the bodies of the HTTP requests that together ask for the `request.n` replies, in
    order.

    There is one body, unless `server.n_per_request` is smaller than `n`. The first carries the
    request's seed, each further one a seed derived from it and the number of its first reply.
    `limit` is the most tokens of a reply.

    Raises `ConfigError` if the request continues a turn, keeps stop strings or has settings beyond
    OpenAI's protocol, and the recipe does not say that the server supports this.
    """
    sampling = request.sampling
    continues = bool(request.messages[-1].spans)
    if (continues or sampling.include_stop) and not server.continues:
        raise ConfigError(
            f"the world of this recipe lets {server.model} go on with its own turn and keeps stop strings, which "
            "OpenAI's protocol does not know; if the server has vLLM's fields for it, set server.continues"
        )
    body: dict[str, Any] = {
        **server.extra_body,
        "model": server.model,
        "messages": wire_messages(request.messages),
        **offered(request.messages),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        server.max_tokens_field: limit,
    }
    body |= _beyond_protocol(sampling, server)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.include_stop:
        body["include_stop_str_in_output"] = True
    if continues:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if sampling.logprobs:
        body["logprobs"] = True
    if server.token_ids:
        body["return_token_ids"] = True
    most = server.n_per_request or request.n
    made = []
    for first in range(0, request.n, most):
        seed = derive_seed(request.seed, first) if first else request.seed
        made.append({**body, "n": min(most, request.n - first)} | ({"seed": seed} if server.send_seed else {}))
    return made


def _beyond_protocol(sampling: Sampling, server: ServerConfig) -> dict[str, float]:
    """Return the settings beyond the protocol that the server supports, including those of no
    effect.
    """
    told = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty}
    plain = Sampling()
    if strange := [n for n in told if getattr(sampling, n) != getattr(plain, n) and n not in server.sampling_fields]:
        raise ConfigError(
            f"OpenAI's protocol does not know {', '.join(strange)}; leave it out or, if the server of {server.model} "
            "has a field of this name as vLLM does, name it in server.sampling_fields"
        )
    # All servers accept -1 for no limit, but some do not accept 0.
    told["top_k"] = sampling.top_k or -1
    return {name: value for name, value in told.items() if name in server.sampling_fields}


def read_completion(payload: bytes, request: Request, *, n: int, limit: int) -> list[Generation]:
    """Return the `n` replies in a response body, in the order of their indices.

    If the server returns token ids, they give the token count of each reply. Otherwise the server's
    total is divided: `limit` to each reply that was cut there, the rest by length of text. Sums are
    always the server's.

    Raises:
        MalformedReply: the body is cut off or breaks the protocol, or has a wrong number of replies
            or an empty reply, or one that ends within its thought. An empty reply is accepted as
            the model's choice only when token ids prove that the model generated it.
        ModelFault: the model refused, was filtered, or called a tool.
    """
    try:
        completion = _Completion.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise MalformedReply(f"the reply is malformed ({where}: {first['msg']}): {_quote(payload)}") from None
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    numbers = [choice.index for choice in choices]
    if len(choices) != n:
        raise MalformedReply(
            f"{n} replies were asked for and {len(choices)} came; if the server does not support n, set "
            "server.n_per_request to 1"
        )
    if numbers != list(range(n)):
        raise MalformedReply(f"{n} replies were asked for and {n} came, numbered {', '.join(map(str, numbers))}")
    tools = tool_names(request.messages)
    for choice in choices:
        choice.check(completion.usage.completion_tokens, tools, helper=request.helper)
    counts = _completion_tokens(choices, completion.usage.completion_tokens, limit)
    return [
        _generation(choice, request.sampling, prompt=completion.usage.prompt_tokens, count=count)
        for choice, count in zip(choices, counts, strict=True)
    ]


def read_prompt_tokens(payload: bytes) -> int:
    """Return how many tokens the server counted in the prompt of a response. Raises
    `MalformedReply`.
    """
    try:
        return _Measured.model_validate_json(payload).usage.prompt_tokens
    except ValidationError:
        raise MalformedReply(f"the reply does not tell the tokens of its prompt: {_quote(payload)}") from None


def read_models(payload: bytes) -> dict[str, int | None]:
    """Return the context length of each model that a server lists, None where it gives none. Raises
    `MalformedReply`.
    """
    try:
        return {served.id: served.max_model_len for served in _ModelList.model_validate_json(payload).data}
    except ValidationError:
        raise MalformedReply(f"the list of models is malformed: {_quote(payload)}") from None


def _generation(choice: Choice, sampling: Sampling, *, prompt: int, count: int) -> Generation:
    text = _text(choice, sampling)
    shortened = bool(sampling.until) and text != choice.text
    # Whose tokens a server reports beyond a text that was cut, nobody here can tell.
    beyond = shortened or (bool(sampling.until) and choice.stop_reason is not None)
    return Generation(
        text=text,
        token_ids=() if beyond else tuple(choice.token_ids or ()),
        finish_reason="length" if choice.is_cut and not shortened else "stop",
        prompt_tokens=prompt,
        completion_tokens=count,
        logprobs=_logprobs(choice) if sampling.logprobs and not beyond else None,
        thinks=choice.message.thinks,
    )


def _text(choice: Choice, sampling: Sampling) -> str:
    text = choice.text
    ended_by = choice.stop_reason
    # A server that nevertheless omits the stop string says which one it was.
    if sampling.include_stop and ended_by in sampling.stop and not any(stop in text for stop in sampling.stop):
        text += str(ended_by)
    return cut_at_stop(text, sampling)


def _logprobs(choice: Choice) -> tuple[float, ...]:
    given = tuple(token.logprob for token in (choice.logprobs.content if choice.logprobs else None) or ())
    if choice.token_ids is not None and len(given) != len(choice.token_ids):
        raise MalformedReply(
            f"reply {choice.index} has {len(choice.token_ids)} token ids and {len(given)} log-probabilities"
        )
    if not given:
        raise ModelFault("the server gives no log-probabilities; do not ask for them, or use one that does")
    return given


def _completion_tokens(choices: Sequence[Choice], total: int, limit: int) -> list[int]:
    """Return the number of tokens of each choice."""
    if all(choice.token_ids is not None for choice in choices):
        return [len(choice.token_ids or ()) for choice in choices]
    if len(choices) == 1:
        return [total]
    cut = [choice.is_cut for choice in choices]
    if all(cut):
        return _shares(total, [1] * len(choices))
    each = min(limit, total // max(1, sum(cut)))
    rest = [0 if is_cut else len(choice.text) for is_cut, choice in zip(cut, choices, strict=True)]
    shares = _shares(total - each * sum(cut), rest)
    return [each if is_cut else share for is_cut, share in zip(cut, shares, strict=True)]


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """Return whole numbers in proportion to the weights that sum to `total`; zeros where all
    weights are zero.
    """
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    ends = (total * end // whole for end in accumulate(weights, initial=0))
    return [end - start for start, end in pairwise(ends)]


def _quote(payload: bytes) -> str:
    text = " ".join(payload[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
