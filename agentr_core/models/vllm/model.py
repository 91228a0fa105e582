"""A chat model on managed vLLM servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from agentr_core.errors import ConfigError, MalformedReply, ModelFault, ModelUnavailable, PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.models.batching import gather_or_cancel, replica_of
from agentr_core.models.checkpoint_dir import end_ids, read_json, weight_files
from agentr_core.models.connections import (
    EVENT_STREAM,
    MIB,
    LargeAnswer,
    allow_connections,
    async_read_hooks,
    connection_limits,
)
from agentr_core.models.local.waves import make_generation, text_streamer, visible_text
from agentr_core.models.vllm.replicas import Fleet, Launch
from agentr_core.models.vllm.server.agentr_weights import VERSION_HEADER, WEIGHTS_PATH, WRONG_WEIGHTS_STATUS
from agentr_core.protocols import HIGHEST_LOGPROB, MOST_TOKENS
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.types import Generation, Request

# Checks whether a file can replace the weights of a server: if some are missing, vLLM only warns.

_TIED_PARAMETER = "lm_head.weight"
"""A checkpoint may contain it even when it is tied to the embedding."""
_MAX_LISTED_NAMES = 3


def check_replacement(weights_file: Path, model_dir: Path) -> None:
    """Raise `ModelFault` unless a file, alone in its folder, has the parameters of a model
    directory, by name and shape, and no others.

    Then vLLM loads the file completely if it loads the directory completely.
    """
    try:
        new_shapes, current_shapes = _parameter_shapes([weights_file]), _parameter_shapes(weight_files(model_dir))
    except (OSError, SafetensorError) as error:
        raise ModelFault(f"the weights in {weights_file} cannot be read: {error}") from error
    if other_files := sorted(file.name for file in weights_file.parent.glob("*.safetensors") if file != weights_file):
        raise ModelFault(
            f"{weights_file} must be alone in its folder, which vLLM reads whole, and beside it is {other_files[0]}"
        )
    if _TIED_PARAMETER not in new_shapes and read_json(model_dir / "config.json").get("tie_word_embeddings"):
        current_shapes.pop(_TIED_PARAMETER, None)
    if mismatches := sorted(
        name for name in current_shapes.keys() | new_shapes.keys() if current_shapes.get(name) != new_shapes.get(name)
    ):
        raise ModelFault(
            f"the weights in {weights_file} are not those of {model_dir}: {', '.join(mismatches[:_MAX_LISTED_NAMES])} "
            f"({len(mismatches)} of {len(current_shapes)})"
        )


def _parameter_shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as handle:
            shapes |= {name: handle.get_slice(name).get_shape() for name in handle.keys()}  # noqa: SIM118
    return shapes


# Requests to vLLM and its replies. Pure: sending and receiving is up to the caller.
#
# Prompts are sent as the token ids of our own rendering, and replies return as the sampled ids.

_EXCERPT_BYTES = 300


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


class _ChoiceDelta(_Strict):
    """What an event of a stream adds to the stream's only reply."""

    finish_reason: str | None = None
    token_ids: list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]] | None = None
    logprobs: _Logprobs | None = None


class _Event(_Strict):
    choices: list[_ChoiceDelta]


class _WeightsVersion(_Strict):
    version: str


# Token ids, not the chat endpoint: that renders with its own copy of the template and tokenises
# earlier replies again, so the tokens that are trained would not be those that were sampled.
def make_body(
    request: Request,
    prompt_ids: Sequence[int],
    *,
    served_name: str,
    max_tokens: int,
    stop_ids: Collection[int],
    send_seed: bool,
) -> dict[str, Any]:
    """Return the JSON body of a request.

    Args:
        max_tokens: the most tokens of each reply.
        stop_ids: the token ids that end a reply.
        send_seed: whether to send the request's seed.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {
        "model": served_name,
        "prompt": list(prompt_ids),
        "n": request.n,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(stop_ids),
        "return_token_ids": True,
    }
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.min_p:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1:
        fields["repetition_penalty"] = sampling.repetition_penalty
    if sampling.include_stop:
        fields["include_stop_str_in_output"] = True
    if sampling.logprobs:
        # Only the sampled token, without other candidates.
        fields["logprobs"] = 0
    if send_seed and sampling.temperature > 0:
        # vLLM draws reply i from seed + i. The seed is hashed, so that nearby seeds share no
        # stream, and halved against overflow.
        fields["seed"] = derive_seed("vllm", request.seed) >> 1
    return fields


def read_choices(payload: bytes, request: Request) -> list[Choice]:
    """Return the replies in a response body, in the order of their numbers.

    Raises `MalformedReply` if the response is not what was asked for; an incomplete reply never
    becomes an empty one. The error is transient, because a server that is being stopped aborts the
    replies in progress.
    """
    try:
        completion = _Completion.model_validate_json(payload)
    except ValidationError as error:
        raise _malformed_reply(error, payload) from None
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(request.n)):
        raise MalformedReply(f"vLLM gave {len(choices)} replies where {request.n} were asked for")
    for choice in choices:
        if choice.finish_reason not in ("stop", "length") or not choice.token_ids:
            raise MalformedReply(
                f"vLLM's reply {choice.index} is not whole: it ended with {choice.finish_reason!r} after "
                f"{len(choice.token_ids)} tokens"
            )
        num_logprobs = len(choice.logprobs.token_logprobs) if choice.logprobs else 0
        if request.sampling.logprobs and num_logprobs != len(choice.token_ids):
            raise MalformedReply(f"vLLM gave {num_logprobs} log-probabilities for {len(choice.token_ids)} tokens")
    return choices


@dataclass(slots=True)
class StreamedReply:
    """The only reply of a request, assembled from the events of a stream."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, event: object) -> None:
        """Append what an event brings. Raises `MalformedReply`."""
        try:
            deltas = _Event.model_validate(event).choices
        except ValidationError as error:
            raise _malformed_reply(error, json.dumps(event).encode()) from None
        for delta in deltas:
            self.token_ids += delta.token_ids or ()
            self.logprobs += delta.logprobs.token_logprobs if delta.logprobs else ()
            self.finish_reason = delta.finish_reason or self.finish_reason

    def response_body(self) -> bytes:
        """Return the body with which the server would have answered without a stream."""
        reply = {"index": 0, "finish_reason": self.finish_reason, "token_ids": self.token_ids}
        return json.dumps({"choices": [{**reply, "logprobs": {"token_logprobs": self.logprobs}}]}).encode()


def _malformed_reply(error: ValidationError, payload: bytes) -> MalformedReply:
    first = error.errors()[0]
    location = ".".join(map(str, first["loc"])) or "body"
    excerpt = payload[:_EXCERPT_BYTES].decode("utf-8", "replace")
    return MalformedReply(f"vLLM's answer is malformed ({location}: {first['msg']}): {excerpt!r}")


def read_version(payload: bytes) -> str:
    """Return the version of the weights that a replica reports. Raises `MalformedReply`."""
    try:
        return _WeightsVersion.model_validate_json(payload).version
    except ValidationError:
        raise MalformedReply(f"vLLM's server does not say which weights it has: {payload[:_EXCERPT_BYTES]!r}") from None


_MAX_CACHED_PROMPTS = 4096
_POLL_SECONDS = 0.25
_MAX_CONNECTIONS = 8192
"""The number of requests in flight for which files may be opened; the caller limits the requests.
"""
_IDLE_SECONDS = 2.0
"""Less than the five seconds after which vLLM's server closes an idle connection."""


class VllmModel:
    """A ChatModel on the replicas of a fleet; closing the model closes the fleet.

    All requests of a session go to one replica, whose prefix cache holds the earlier turns of the
    session. All requests are sent at once; the engine batches them. With `model.vllm.seeds`, reply
    i of a request is drawn from (seed, i) whatever else the engine does; only rounding still
    depends on its batch. Log-probabilities are the model's own, at temperature 1.

    If the launch has a key, the weights can be replaced in place. Each request says which weights
    it is for, so that a replica that was restarted, or failed to load them, refuses it.

    Args:
        launch: What the fleet serves; the tokenizer is that of `launch.model`.
        fleet: The replicas.
        at: When the run started, for chat templates that print the date.

    Raises `ModelDirectoryError` if the tokenizer or its template is unsound.
    """

    def __init__(self, launch: Launch, fleet: Fleet, *, at: datetime | None = None) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

        self.name = launch.model.name
        self.fingerprint = launch.served_name
        self.context_length = launch.context_length
        self._launch = launch
        self._fleet = fleet
        self._tokenizer = load_tokenizer(launch.model)
        self.renderer = Renderer(self._tokenizer, at=at)
        self._end_ids = end_ids(launch.model, self._tokenizer) | {self.renderer.end_of_turn}
        self._prompt_ids = lru_cache(_MAX_CACHED_PROMPTS)(lambda messages: tuple(self.renderer.render_prompt(messages)))
        self._closed = False
        # Empty until the replicas answer, and after a failed request until they answer again.
        self._addresses: tuple[str, ...] = ()
        self._ready_lock = asyncio.Lock()
        # The weights that are to replace those the replicas start with, and their version.
        self._weights_file: Path | None = None
        self._weights_version, self._num_versions = "", 0
        allow_connections(_MAX_CONNECTIONS)
        self._client = AsyncOpenAI(
            base_url="http://127.0.0.1",
            api_key=launch.key or "none",
            max_retries=0,
            timeout=Timeout(launch.settings.request_timeout, pool=None),
            # The servers are on this machine: a proxy that the environment names must not be used.
            http_client=DefaultAsyncHttpxClient(
                trust_env=False,
                limits=connection_limits(None, idle_seconds=_IDLE_SECONDS),
                event_hooks=async_read_hooks(launch.settings.answer_mib * MIB),
            ),
        )

    async def ready(self) -> tuple[str, ...]:
        """Wait until all replicas answer with the right weights, and return their addresses;
        replicas that died are restarted.

        Raises `ModelServerError` if one does not start, and `ModelFault` if one has died too often,
        does not load the weights, or after `close`.
        """
        async with self._ready_lock:
            while not self._addresses:
                self._check_open()
                addresses = await asyncio.to_thread(self._fleet.poll_addresses)
                weights_file = self._weights_file
                # Replicas that lack the right weights load them.
                if addresses is not None and (
                    weights_file is None
                    or all(
                        await asyncio.gather(*(self._ensure_weights(address, weights_file) for address in addresses))
                    )
                ):
                    self._addresses = addresses
                else:
                    await asyncio.sleep(_POLL_SECONDS)
            return self._addresses

    # That vLLM reads a file again is the only way that works for CPUs and GPUs, for whole weights
    # and merged adapters, and for any number of workers; and a replica that is restarted finds the
    # file, too. Weight transfer needs NCCL or CUDA IPC.
    async def reload(self, weights: Path) -> None:
        """Replace the weights of all replicas by those of a safetensors file, without a restart,
        once the replies in progress are done. Whatever was computed with the old weights is
        dropped.

        Raises `ConfigError` if other runs may use the replicas or they serve an adapter,
        `ModelFault` if the model is closed, if the file does not have the parameters of the model,
        or if a replica does not load them.
        """
        self._check_replaceable()
        await asyncio.to_thread(check_replacement, weights, self._launch.model)
        self._num_versions += 1
        self._weights_file, self._weights_version = weights, f"{weights.parent.name} ({self._num_versions})"
        self._addresses = ()
        await self.ready()

    async def sleep(self) -> None:
        """Have all replicas free the memory of their GPUs until `reload`, once the replies in
        progress are done. A replica that is restarted meanwhile serves no request before `reload`,
        either.

        Raises `ConfigError` as `reload` does, `ModelFault` if a replica reports that it cannot, and
        what `ready` raises.
        """
        self._check_replaceable()
        addresses = await self.ready()
        # No request is for the weights of a sleeping replica, so `ready` must not wait for them.
        self._num_versions += 1
        self._weights_file, self._weights_version, self._addresses = None, f"asleep ({self._num_versions})", ()
        await asyncio.gather(*(self._put_to_sleep(address) for address in addresses))

    def _check_replaceable(self) -> None:
        self._check_open()
        if not self._launch.key:
            raise ConfigError(
                "the weights behind `agentr models serve` cannot be replaced in place, since other runs may use them; "
                "unset AGENTR_VLLM, so that this run starts servers of its own"
            )
        if self._launch.adapter is not None:
            raise ConfigError(
                f"vLLM serves {self._launch.model} as an adapter, whose weights cannot be replaced; begin with a "
                "merged model, and leave training.publish=merged"
            )

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies to each request.

        Raises `PromptTooLong` before anything is sent, `ModelUnavailable` or `MalformedReply`
        (transient) if a replica does not answer or answers with a fault of its own, `ModelFault` if
        it refuses a request or after `close`, and what `ready` raises. A fault cancels the requests
        sent together with the failed one.
        """
        self._check_open()
        prompts = [self._prompt_ids(request.messages) for request in requests]
        for prompt_ids in prompts:
            if len(prompt_ids) >= self.context_length:
                raise PromptTooLong.counted(len(prompt_ids), self.context_length, self.name)
        addresses = await self.ready()
        return await gather_or_cancel(
            [
                self._generate_one(request, prompt_ids, addresses)
                for request, prompt_ids in zip(requests, prompts, strict=True)
            ]
        )

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens, including the header of the reply."""
        return len(self._prompt_ids(request.messages))

    async def close(self) -> None:
        """Release the fleet and close the connections."""
        self._closed, self._addresses = True, ()
        await self._client.close()
        await asyncio.to_thread(self._fleet.close)

    async def _generate_one(
        self, request: Request, prompt_ids: tuple[int, ...], addresses: tuple[str, ...]
    ) -> list[Generation]:
        # Without a session, requests that begin alike go to one replica and share its cache.
        address = addresses[replica_of(request.session or request.messages[0].text, len(addresses))]
        request_body = make_body(
            request,
            prompt_ids,
            served_name=self._launch.served_name,
            max_tokens=min(request.sampling.max_new_tokens, self.context_length - len(prompt_ids)),
            stop_ids=self._end_ids,
            send_seed=self._launch.settings.seeds,
        )
        from openai import APIConnectionError, APIError, APIStatusError

        url = f"{address}/v1/completions"
        headers = {VERSION_HEADER: self._weights_version} if self._launch.key else {}
        try:
            if request.on_text is None or request.n > 1:
                response_body = await self._client.post(
                    url, cast_to=bytes, body=request_body, options={"headers": headers}
                )
            else:
                ids_to_text = partial(visible_text, self.renderer, self._end_ids, prompt_ids)
                on_tokens = text_streamer(
                    request.on_text,
                    request.sampling,
                    ids_to_text,
                    in_thought=self.renderer.opens_thought(prompt_ids),
                )
                response_body = await self._post_streamed(url, request_body, headers, on_tokens)
        except LargeAnswer as error:
            raise ModelFault(
                f"the vLLM replica at {address} gives too large an answer: {error}; raise model.vllm.answer_mib"
            ) from error
        except APIConnectionError as error:
            self._fleet.report_failure(address)
            self._addresses = ()
            reason = " ".join(str(error.__cause__ or error).split()) or type(error.__cause__ or error).__name__
            raise ModelUnavailable(f"the vLLM replica at {address} does not answer ({reason})") from error
        except APIStatusError as error:
            message = f"the vLLM replica at {address} answered {error.status_code}: {error.message[:500]}"
            # 404 and 409: the replica serves other weights now.
            if error.status_code >= 500 or error.status_code in (404, 408, WRONG_WEIGHTS_STATUS, 429):
                self._fleet.report_failure(address)
                self._addresses = ()
                raise ModelUnavailable(message) from error
            raise ModelFault(message) from error
        except APIError as error:
            # A fault that occurs after a stream has begun arrives as an event.
            self._fleet.report_failure(address)
            self._addresses = ()
            raise ModelUnavailable(f"the vLLM replica at {address} broke off: {error.message[:500]}") from error
        return [self._generation(choice, request, prompt_ids) for choice in read_choices(response_body, request)]

    async def _post_streamed(
        self, url: str, body: dict[str, Any], headers: dict[str, str], on_tokens: Callable[[Sequence[int]], None]
    ) -> bytes:
        """Send a request whose reply is streamed, call `on_tokens` with all its tokens after each
        event, and return the body that `StreamedReply.response_body` makes. Raises
        `MalformedReply`, and what the client raises.
        """
        from openai import AsyncStream

        reply = StreamedReply()
        async with await self._client.post(
            url,
            cast_to=object,
            body={**body, "stream": True},
            options={"headers": {**headers, "Accept": EVENT_STREAM}},
            stream=True,
            stream_cls=AsyncStream[object],
        ) as events:
            try:
                async for event in events:
                    reply.add(event)
                    if reply.token_ids:
                        on_tokens(reply.token_ids)
            except json.JSONDecodeError as error:
                raise MalformedReply(f"vLLM's stream has an event that is no JSON ({error})") from None
        return reply.response_body()

    def _check_open(self) -> None:
        if self._closed:
            raise ModelFault(f"model {self.name} is closed; load it again")

    async def _ensure_weights(self, address: str, weights_file: Path) -> bool:
        from openai import APIConnectionError, APIStatusError

        replacement = {"folder": str(weights_file.parent.absolute()), "version": self._weights_version}
        try:
            payload = await self._client.get(f"{address}{WEIGHTS_PATH}", cast_to=bytes)
            if read_version(payload) != self._weights_version:
                payload = await self._client.post(f"{address}{WEIGHTS_PATH}", cast_to=bytes, body=replacement)
        except APIConnectionError:
            self._fleet.report_failure(address)
            return False
        except APIStatusError as error:
            raise ModelFault(
                f"the vLLM replica at {address} did not take the weights in {weights_file}: {error.message[:500]}"
            ) from error
        if (version := read_version(payload)) != self._weights_version:
            raise ModelFault(
                f"the vLLM replica at {address} has the weights {version!r}, not {self._weights_version!r}"
            )
        return True

    async def _put_to_sleep(self, address: str) -> None:
        from openai import APIConnectionError, APIStatusError

        try:
            await self._client.post(f"{address}{WEIGHTS_PATH}", cast_to=bytes, body={"sleep": True})
        except APIConnectionError:
            # It died, which has freed its memory.
            self._fleet.report_failure(address)
        except APIStatusError as error:
            raise ModelFault(f"the vLLM replica at {address} does not sleep: {error.message[:500]}") from error

    def _generation(self, choice: Choice, request: Request, prompt_ids: tuple[int, ...]) -> Generation:
        logprobs = choice.logprobs.token_logprobs if request.sampling.logprobs and choice.logprobs else None
        ended_by_model = choice.finish_reason != "length"
        return make_generation(
            self.renderer,
            self._end_ids,
            prompt_ids,
            choice.token_ids,
            request.sampling,
            ended_by_model=ended_by_model,
            logprobs=logprobs,
        )
