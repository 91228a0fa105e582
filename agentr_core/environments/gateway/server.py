"""The gateway as an ASGI application: three protocols for agents, and five paths for runs.

An agent asks `POST /episodes` for an episode and receives its addresses, instance and task. Its
calls there, in OpenAI's or Anthropic's protocols, are answered by the policy of the run that
offered the episode. The episode ends with `POST /episodes/ID/reward`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentr_core.environments.gateway.broker import Broker, Call, Episode
from agentr_core.environments.gateway.dialects.base import (
    MODEL,
    AgentRequest,
    Answer,
    Refused,
    openai_error_body,
    read_answer,
    refusal_of,
)
from agentr_core.environments.gateway.dialects.chat import ChatRequest
from agentr_core.environments.gateway.dialects.messages import MessagesRequest
from agentr_core.environments.gateway.dialects.responses import ResponsesRequest
from agentr_core.http_server import LOST_CALLBACK_KEY, STOPPING_CALLBACK_KEY, Guard, TokenGuard, api_key
from agentr_core.texts import error_summary, escape_invisible

_DIALECTS: Final[Mapping[str, type[AgentRequest]]] = {
    "/chat/completions": ChatRequest,
    "/responses": ResponsesRequest,
    "/messages": MessagesRequest,
    # A base address that ends with /v1 is right for other clients, and a common mistake with this
    # one.
    "/v1/messages": MessagesRequest,
}
"""The dialects, by the ends of their paths."""
_HEAD_SECONDS = 1.0
"""Seconds for which a stream waits for the first text before it begins: until then a refusal can
still have its own HTTP status, which harnesses handle better than an error in a stream.
"""
_PING_SECONDS = 5.0
"""Seconds of silence after which a stream sends a ping."""
_SESSION_HEADERS: Final = ("x-claude-code-session-id", "session-id", "x-session-id")
"""Headers in which harnesses send their own session ids."""

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
Seconds = Annotated[float, Field(ge=0, le=60)]


class Offer(BaseModel):
    """An episode that a run offers. `run` is the name from `Broker.arrive`, or empty."""

    environment: str
    split: str
    index: int
    task: Any = None
    run: str = ""


class NextRequest(BaseModel):
    """A run's reply to the last call, if there is one, and the seconds that it waits for the next
    event.
    """

    episode: str
    reply: dict[str, Any] | None = None
    wait: Seconds = 5.0


class CloseRequest(BaseModel):
    """A run's notice that it ends an episode, and why."""

    episode: str
    why: str
    code: str = "episode_over"


class ProgressReport(BaseModel):
    """The texts so far of replies that are being sampled, by episode."""

    texts: dict[str, str]


class RewardReport(BaseModel):
    """An agent's report at the end of an episode. If `success` is left out, only a reward of 1 is a
    success.

    Types are strict: the text "1" and `true` are not rewards.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    reward: Annotated[float, Field(ge=0, le=1)]
    success: bool | None = None


class FaultReport(BaseModel):
    """An agent's report that it gave its episode up because of its own fault, which is not a reward
    of 0.
    """

    reason: str = "it gave no reason"


class TakeRequest(BaseModel):
    """An agent's request for an episode, and the seconds that it waits for one."""

    wait: Seconds = 20.0


class TrackedResponse(Response):
    """A response that reports whether it was delivered.

    Args:
        send_answer: sends the answer and returns whether it was complete; cancelled when the client
            leaves.
        on_settled: is called once, with whether a complete answer was sent while the client was
            there.
        on_lost: is called if it turns out afterwards that the client did not read the answer.
    """

    def __init__(
        self,
        send_answer: Callable[[Scope, Receive, Send], Awaitable[bool]],
        on_settled: Callable[[bool], Any],
        on_lost: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()
        self._send_answer = send_answer
        self._on_settled = on_settled
        self._on_lost = on_lost
        self._is_sent = False
        self._is_lost = False
        self._is_settled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answer and send it. Raises what `send_answer` raises, and `Refused` if the
        server is stopped.
        """
        scope[LOST_CALLBACK_KEY] = self._mark_lost
        disconnect_task = asyncio.ensure_future(_disconnected(receive))
        answer_task = asyncio.ensure_future(self._deliver(disconnect_task, scope, receive, send))
        scope[STOPPING_CALLBACK_KEY] = answer_task.cancel
        try:
            await asyncio.wait((disconnect_task, answer_task), return_when=asyncio.FIRST_COMPLETED)
            if answer_task.cancelled():
                raise _stopped_refusal()
            if answer_task.done():
                answer_task.result()
        finally:
            disconnect_task.cancel()
            answer_task.cancel()
            self._is_settled = True
            self._on_settled(self._is_sent)

    async def _deliver(self, disconnect_task: asyncio.Future[None], scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = await self._send_answer(scope, receive, send)
        # The server only reports that the client left once the answer has been sent.
        self._is_sent = is_complete and not (disconnect_task.done() or self._is_lost)

    def _mark_lost(self) -> None:
        self._is_lost = True
        if self._is_sent:
            self._is_sent = False
            # Before `on_settled` was called, nobody was told that it was delivered.
            if self._is_settled:
                self._on_lost()


class RegistrationResponse(Response):
    """An endless response that gives a run its name: the run counts as gone when its connection
    closes.
    """

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._broker = broker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the name, wait until the run's connection closes, and end its episodes."""
        run_name = self._broker.register_run()
        try:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
            await send({"type": "http.response.body", "body": f"{run_name}\n".encode(), "more_body": True})
            disconnect_task = asyncio.ensure_future(_disconnected(receive))
            scope[STOPPING_CALLBACK_KEY] = disconnect_task.cancel
            await asyncio.wait((disconnect_task,))
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._broker.unregister_run(run_name)


async def _disconnected(receive: Receive) -> None:
    """Return when the client leaves. The body of its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def app(token: str | None = None) -> ASGIApp:
    """Return the ASGI application. Without a token, it admits every request; with one, only
    requests with the token as their key, or with the id of the episode that they are about.
    """
    broker = Broker()
    handlers = {HTTPException: _handle_http_error, Refused: _handle_refused, Exception: _handle_error}
    application: ASGIApp = Starlette(routes=[*_agent_routes(broker), *_run_routes(broker)], exception_handlers=handlers)
    application = Guard(application, refusal=_refuse_request)
    if token is None:
        return application

    def admits(scope: Scope, episode_id: str) -> bool:
        path: str = scope["path"]
        return broker.knows(episode_id) and path.startswith((f"/episodes/{episode_id}/", "/v1/"))

    reason = (
        "this gateway answers only requests with its token, or, about an episode, the id of that: give it as the API "
        "key, in Authorization: Bearer or x-api-key"
    )
    return TokenGuard(application, token, why=reason, refusal=_refuse_request, admits=admits)


def _agent_routes(broker: Broker) -> list[Route]:
    async def reward(request: Request) -> Response:
        episode_id = _episode_id(request)
        body = await _read_body(request, RewardReport)
        success = body.reward >= 1 if body.success is None else body.success
        broker.end_with_reward(episode_id, body.reward, success)

        async def answer(scope: Scope, receive: Receive, send: Send) -> bool:
            await JSONResponse({"reward": body.reward, "success": success})(scope, receive, send)
            return True

        def settle(is_sent: bool) -> None:
            broker.mark_reward_delivered(episode_id, is_delivered=is_sent)

        return TrackedResponse(answer, settle, lambda: settle(False))

    async def failed(request: Request) -> Response:
        broker.end_with_failure(_episode_id(request), (await _read_body(request, FaultReport)).reason)
        return JSONResponse({})

    async def describe(request: Request) -> Response:
        return JSONResponse(broker.describe(_episode_id(request)))

    async def list_models(request: Request) -> Response:
        broker.episode(_episode_id(request))
        page = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return JSONResponse({"object": "list", "data": [_model_description(MODEL)], **page})

    async def describe_model(request: Request) -> Response:
        broker.episode(_episode_id(request))
        return JSONResponse(_model_description(request.path_params["model"]))

    async def count(request: Request) -> Response:
        turns = (await _read_body(request, MessagesRequest)).turns()
        return JSONResponse({"input_tokens": broker.estimate_num_tokens(_episode_id(request), turns)})

    # The episode is the one in the path or, at the shared base address, the one whose id is the API
    # key.
    bases = ("/episodes/{key}/v1", "/v1")
    return [
        _post_route("/episodes", _take_endpoint(broker)),
        Route("/episodes/{key}", describe),
        _post_route("/episodes/{key}/reward", reward),
        _post_route("/episodes/{key}/failed", failed),
        *(
            _post_route(f"{base}{path}", _ask_endpoint(broker, dialect))
            for base in bases
            for path, dialect in _DIALECTS.items()
        ),
        *(_post_route(f"{base}/messages/count_tokens", count) for base in bases),
        *(Route(f"{base}/models", list_models) for base in bases),
        *(Route(f"{base}/models/{{model:path}}", describe_model) for base in bases),
    ]


def _ask_endpoint(broker: Broker, dialect: type[AgentRequest]) -> Callable[[Request], Awaitable[Response]]:
    async def ask(request: Request) -> Response:
        episode_id = _episode_id(request)
        body = await _read_body(request, dialect)
        is_repeat = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = broker.ask(episode_id, body.turns(), is_repeat=is_repeat, is_streamed=bool(body.stream))
        # Harnesses send their own session ids, which help to find their logs.
        episode = broker.episode(episode_id)
        if not episode.session_id and (
            session_id := next(filter(None, map(request.headers.get, _SESSION_HEADERS)), "")
        ):
            episode.session_id = escape_invisible(session_id)[:80]
            _log.info("episode %s is session %s of its harness", episode.id, episode.session_id)

        async def answer(scope: Scope, receive: Receive, send: Send) -> bool:
            if body.stream:
                await call.wait_for_text(0, _HEAD_SECONDS)
                if not call.is_refused:
                    return await _send_stream(call, body, scope, send)
            # Another client may wait for the same reply.
            reply = await asyncio.shield(call.reply)
            content = body.answer_body(_read_answer(reply, call, body), call.reply_id, call.timestamp)
            await JSONResponse(content)(scope, receive, send)
            return True

        return TrackedResponse(
            answer,
            lambda is_sent: broker.release_call(episode_id, call, is_delivered=is_sent),
            lambda: broker.mark_undelivered(call),
        )

    return ask


def _read_answer(reply: Mapping[str, Any], call: Call, body: AgentRequest) -> Answer:
    return read_answer(reply, call.reply_id, offers_tools=bool(body.functions))


async def _send_stream(call: Call, body: AgentRequest, scope: Scope, send: Send) -> bool:
    """Send a reply as it is sampled, and return whether it was complete."""
    scope[STOPPING_CALLBACK_KEY] = lambda: call.refuse(_stopped_refusal())
    events = body.event_stream(call.reply_id, call.timestamp)

    async def write(text: str, is_more: bool = True) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": is_more})

    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
    await write(events.head_events())
    num_chars, last_write_time = 0, time.monotonic()
    while not call.reply.done():
        await call.wait_for_text(num_chars, _PING_SECONDS)
        num_chars = len(call.partial_text)
        # Sampled text may be held back for a long time.
        is_silent = time.monotonic() - last_write_time >= _PING_SECONDS
        if text := events.text_events(call.partial_text) or (events.ping_event() if is_silent else ""):
            await write(text)
            last_write_time = time.monotonic()
    try:
        await write(events.end_events(_read_answer(call.reply.result(), call, body)), is_more=False)
    except Refused as refusal:
        await write(events.failure_events(refusal), is_more=False)
        return False
    return True


def _episode_id(request: Request) -> str:
    """Return the id of the episode that a request is about: the one in its path, else its API
    key.
    """
    return str(request.path_params.get("key") or api_key(request.scope))


def _model_description(name: str) -> dict[str, Any]:
    """Return the description of a model, with the fields of OpenAI's and of Anthropic's
    protocol.
    """
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentr"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _take_endpoint(broker: Broker) -> Callable[[Request], Awaitable[Response]]:
    async def take(request: Request) -> Response:
        body = await _read_body(request, TakeRequest)
        base = str(request.base_url).rstrip("/")
        episodes: list[Episode] = []

        async def answer(scope: Scope, receive: Receive, send: Send) -> bool:
            if (episode := await broker.take_episode(body.wait)) is None:
                await Response(status_code=204)(scope, receive, send)
                return True
            episodes.append(episode)
            url = f"{base}/episodes/{episode.id}"
            address_fields = {"base_url": f"{url}/v1", "anthropic_url": url, "key": episode.id}
            content = {"episode": episode.id, **address_fields, "model": MODEL, **episode.offer}
            await JSONResponse(content)(scope, receive, send)
            return True

        def offer_again() -> None:
            for episode in episodes:
                broker.offer_again(episode)

        return TrackedResponse(answer, lambda is_sent: None if is_sent else offer_again(), offer_again)

    return take


def _run_routes(broker: Broker) -> list[Route]:
    async def alive(request: Request) -> Response:
        return JSONResponse({"gateway": MODEL})

    async def arrive(request: Request) -> Response:
        return RegistrationResponse(broker)

    async def open_episode(request: Request) -> Response:
        offer = (await _read_body(request, Offer)).model_dump()
        run_name = offer.pop("run")
        return JSONResponse({"episode": broker.open_episode(offer, run_name)})

    async def next_event(request: Request) -> Response:
        body = await _read_body(request, NextRequest)
        try:
            return JSONResponse(await broker.next_event(body.episode, body.reply, body.wait))
        except KeyError:
            # Runs treat this error as temporary, and offer the episode again.
            message = f"episode {body.episode[:40]} is gone: the gateway was started anew"
            raise Refused(503, message, "episode_not_found") from None

    async def progress(request: Request) -> Response:
        broker.set_partial_texts((await _read_body(request, ProgressReport)).texts)
        return JSONResponse({})

    async def close_episode(request: Request) -> Response:
        body = await _read_body(request, CloseRequest)
        broker.close_episode(body.episode, body.why, body.code)
        return JSONResponse({})

    return [
        Route("/", alive),
        _post_route("/run/arrive", arrive),
        _post_route("/run/open", open_episode),
        _post_route("/run/next", next_event),
        _post_route("/run/progress", progress),
        _post_route("/run/close", close_episode),
    ]


async def _read_body(request: Request, model: type[M]) -> M:
    try:
        return model.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise refusal_of(error) from error


def _post_route(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _stopped_refusal() -> Refused:
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the gateway was stopped, and its episodes with it")


def _refusal_response(scope: Scope, refusal: Refused) -> Response:
    """Return the response to a refused request, in the dialect of its path, else in OpenAI's
    format.
    """
    for path_end, dialect in _DIALECTS.items():
        if scope["path"].removesuffix("/count_tokens").endswith(path_end):
            return JSONResponse(dialect.error_body(refusal), dialect.error_status(refusal))
    return JSONResponse(openai_error_body(refusal), refusal.status)


def _refuse_request(scope: Scope, status: int, why: str) -> Response:
    return _refusal_response(scope, Refused(status, why))


def _handle_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _refusal_response(request.scope, error)


def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    paths = f"POST /episodes, and below the base_url of an episode {', '.join(_DIALECTS)} and /models"
    why = f"{request.method} {request.url.path[:80]} is not served here; agents have {paths}"
    answer = _refuse_request(request.scope, error.status_code, why)
    answer.headers.update(error.headers or {})
    return answer


def _handle_error(request: Request, error: Exception) -> Response:
    why = f"the gateway has a fault of its own: {error_summary(error)}; see its log"
    return _refuse_request(request.scope, HTTPStatus.INTERNAL_SERVER_ERROR, why)
