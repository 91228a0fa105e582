"""Any chat model as an OpenAI-compatible server: `/v1/models` and `/v1/chat/completions`, without
streaming.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentr_core.errors import AgentrError, DataFault, PromptTooLong, Transient
from agentr_core.models.batching import Batcher
from agentr_core.protocols import ChatModel
from agentr_core.types import Generation, Message, Request, Sampling, Span, grown_turn


class _Turn(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class _Body(BaseModel):
    """What a request may say; a field we do not know is refused rather than ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[_Turn] = Field(min_length=1)
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """These three are vLLM's extensions."""
    logprobs: bool = False
    stream: Literal[False] = False
    user: str = ""
    return_token_ids: bool = False
    """vLLM's extension: each choice has its `token_ids`."""
    include_stop_str_in_output: bool = False
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    """vLLM's extensions: stop strings are kept, and the reply goes on with the last turn."""

    def request(self, context_length: int) -> Request:
        """Return what our model is asked; without a seed, one is drawn."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        messages = [Message(role=turn.role, text=turn.content) for turn in self.messages]
        if self.continue_final_message:
            assert not self.add_generation_prompt
            messages[-1] = grown_turn([Span(text=messages[-1].text)])
        return Request(
            messages=tuple(messages),
            sampling=Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(0, self.top_k),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                max_new_tokens=self.max_completion_tokens or self.max_tokens or context_length,
                stop=stop,
                logprobs=self.logprobs,
                include_stop=self.include_stop_str_in_output,
            ),
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            n=self.n,
        )


def chat_app(model: ChatModel, *, max_batch: int) -> Starlette:
    """Return an ASGI application that serves a model under its own name; its shutdown closes the
    model.

    Requests that arrive together share batches of at most `max_batch` replies. Errors have OpenAI's
    form: 400 with the code `context_length_exceeded` for a prompt without room, 404 for another
    model, 503 for what may heal, else 500.
    """
    batcher = Batcher(model, max_batch=max_batch)
    start_time = int(time.time())

    async def models(_: HttpRequest) -> JSONResponse:
        entry = {"id": model.name, "object": "model", "created": start_time, "owned_by": "agentr"}
        return JSONResponse({"object": "list", "data": [entry | {"max_model_len": model.context_length}]})

    async def completions(http: HttpRequest) -> JSONResponse:
        try:
            body = _Body.model_validate_json(await http.body())
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
            return _refusal(400, faults, "invalid_request_error")
        if body.model != model.name:
            return _refusal(404, f"there is no model {body.model!r}; this server has {model.name!r}", "model_not_found")
        request = body.request(model.context_length)
        try:
            generations = await batcher.sample(request)
        except PromptTooLong as error:
            return _refusal(400, str(error), "context_length_exceeded")
        except DataFault as error:
            return _refusal(400, str(error), "invalid_request_error")
        except AgentrError as error:
            return _refusal(503 if isinstance(error, Transient) else 500, str(error), "server_error")
        return JSONResponse(_completion(model.name, generations, token_ids=body.return_token_ids))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await batcher.close()
        await model.close()

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", completions, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


def _completion(name: str, generations: list[Generation], *, token_ids: bool) -> dict[str, Any]:
    prompt, completion = generations[0].prompt_tokens, sum(g.completion_tokens for g in generations)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [_choice(index, generation, token_ids) for index, generation in enumerate(generations)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }


def _choice(index: int, generation: Generation, token_ids: bool) -> dict[str, Any]:
    content: list[dict[str, Any]] | None = None
    if generation.logprobs is not None:
        # A token's own text is the tokenizer's affair; its id names it, as in vLLM's
        # `return_tokens_as_token_ids`.
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(generation.token_ids, generation.logprobs, strict=True)
        ]
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": generation.text},
        "finish_reason": generation.finish_reason,
        "logprobs": None if content is None else {"content": content},
    }
    return choice | ({"token_ids": list(generation.token_ids)} if token_ids else {})


def _refusal(status: int, message: str, code: str) -> JSONResponse:
    error = {"message": message, "type": "server_error" if status >= 500 else "invalid_request_error", "code": code}
    return JSONResponse({"error": error}, status_code=status)
