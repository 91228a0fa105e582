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
    openai_error,
    read_answer,
    refusal_of,
)
from agentr_core.environments.gateway.dialects.chat import ChatRequest
from agentr_core.environments.gateway.dialects.messages import MessagesRequest
from agentr_core.environments.gateway.dialects.responses import ResponsesRequest
from agentr_core.http_server import LOST, STOPPING, Guard, TokenGuard, api_key
from agentr_core.texts import cause, visible

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
_SESSIONS: Final = ("x-claude-code-session-id", "session-id", "x-session-id")
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


class Next(BaseModel):
    """A run's reply to the last call, if there is one, and the seconds that it waits for the next
    event.
    """

    episode: str
    reply: dict[str, Any] | None = None
    wait: Seconds = 5.0


class Close(BaseModel):
    """A run's notice that it ends an episode, and why."""

    episode: str
    why: str
    code: str = "episode_over"


class Progress(BaseModel):
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


class Take(BaseModel):
    """An agent's request for an episode, and the seconds that it waits for one."""

    wait: Seconds = 20.0


class TrackedResponse(Response):
    """A response that reports whether it was delivered.

    Args:
        answer: sends the answer and returns whether it was complete; cancelled when the client
            leaves.
        settle: is called once, with whether a complete answer was sent while the client was there.
        lose: is called if it turns out afterwards that the client did not read the answer.
    """

    def __init__(
        self,
        answer: Callable[[Scope, Receive, Send], Awaitable[bool]],
        settle: Callable[[bool], Any],
        lose: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._settle = settle
        self._lose = lose
        self._sent = False
        self._lost = False
        self._is_settled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answer and send it. Raises what `answer` raises, and `Refused` if the server
        is stopped.
        """
        scope[LOST] = self._lose_it
        leaving = asyncio.ensure_future(_disconnected(receive))
        answering = asyncio.ensure_future(self._deliver(leaving, scope, receive, send))
        scope[STOPPING] = answering.cancel
        try:
            await asyncio.wait((leaving, answering), return_when=asyncio.FIRST_COMPLETED)
            if answering.cancelled():
                raise _stopped()
            if answering.done():
                answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
            self._is_settled = True
            self._settle(self._sent)

    async def _deliver(self, leaving: asyncio.Future[None], scope: Scope, receive: Receive, send: Send) -> None:
        complete = await self._answer(scope, receive, send)
        # The server only reports that the client left once the answer has been sent.
        self._sent = complete and not (leaving.done() or self._lost)

    def _lose_it(self) -> None:
        self._lost = True
        if self._sent:
            self._sent = False
            # Before `settle` was called, nobody was told that it was delivered.
            if self._is_settled:
                self._lose()


class Presence(Response):
    """An endless response that gives a run its name: the run counts as gone when its connection
    closes.
    """

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._desk = broker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the name, wait until the run's connection closes, and end its episodes."""
        name = self._desk.arrive()
        try:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
            await send({"type": "http.response.body", "body": f"{name}\n".encode(), "more_body": True})
            leaving = asyncio.ensure_future(_disconnected(receive))
            scope[STOPPING] = leaving.cancel
            await asyncio.wait((leaving,))
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._desk.leave(name)


async def _disconnected(receive: Receive) -> None:
    """Return when the client leaves. The body of its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def app(token: str | None = None) -> ASGIApp:
    """Return the ASGI application. Without a token, it admits every request; with one, only
    requests with the token as their key, or with the id of the episode that they are about.
    """
    broker = Broker()
    handlers = {HTTPException: _unserved, Refused: _refused, Exception: _broken}
    application: ASGIApp = Starlette(routes=[*_for_agents(broker), *_for_runs(broker)], exception_handlers=handlers)
    application = Guard(application, refusal=_refusal)
    if token is None:
        return application

    def admits(scope: Scope, key: str) -> bool:
        path: str = scope["path"]
        return broker.knows(key) and path.startswith((f"/episodes/{key}/", "/v1/"))

    reason = (
        "this gateway answers only requests with its token, or, about an episode, the id of that: give it as the API "
        "key, in Authorization: Bearer or x-api-key"
    )
    return TokenGuard(application, token, why=reason, refusal=_refusal, admits=admits)


def _for_agents(broker: Broker) -> list[Route]:
    async def reward(request: Request) -> Response:
        key = _episode(request)
        body = await _read(request, RewardReport)
        success = body.reward >= 1 if body.success is None else body.success
        broker.reward(key, body.reward, success)

        async def answer(scope: Scope, receive: Receive, send: Send) -> bool:
            await JSONResponse({"reward": body.reward, "success": success})(scope, receive, send)
            return True

        def settle(sent: bool) -> None:
            broker.rewarded(key, delivered=sent)

        return TrackedResponse(answer, settle, lambda: settle(False))

    async def failed(request: Request) -> Response:
        broker.failed(_episode(request), (await _read(request, FaultReport)).reason)
        return JSONResponse({})

    async def describe(request: Request) -> Response:
        return JSONResponse(broker.state(_episode(request)))

    async def list_models(request: Request) -> Response:
        broker.episode(_episode(request))
        page = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return JSONResponse({"object": "list", "data": [_model(MODEL)], **page})

    async def describe_model(request: Request) -> Response:
        broker.episode(_episode(request))
        return JSONResponse(_model(request.path_params["model"]))

    async def count(request: Request) -> Response:
        turns = (await _read(request, MessagesRequest)).turns()
        return JSONResponse({"input_tokens": broker.estimate(_episode(request), turns)})

    # The episode is the one in the path or, at the shared base address, the one whose id is the API
    # key.
    bases = ("/episodes/{key}/v1", "/v1")
    return [
        _post("/episodes", _taking(broker)),
        Route("/episodes/{key}", describe),
        _post("/episodes/{key}/reward", reward),
        _post("/episodes/{key}/failed", failed),
        *(_post(f"{base}{path}", _asking(broker, dialect)) for base in bases for path, dialect in _DIALECTS.items()),
        *(_post(f"{base}/messages/count_tokens", count) for base in bases),
        *(Route(f"{base}/models", list_models) for base in bases),
        *(Route(f"{base}/models/{{model:path}}", describe_model) for base in bases),
    ]


def _asking(broker: Broker, dialect: type[AgentRequest]) -> Callable[[Request], Awaitable[Response]]:
    async def ask(request: Request) -> Response:
        key = _episode(request)
        body = await _read(request, dialect)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = broker.ask(key, body.turns(), again=again, stream=bool(body.stream))
        # Harnesses send their own session ids, which help to find their logs.
        episode = broker.episode(key)
        if not episode.session and (session := next(filter(None, map(request.headers.get, _SESSIONS)), "")):
            episode.session = visible(session)[:80]
            _log.info("episode %s is session %s of its harness", episode.id, episode.session)

        async def answer(scope: Scope, receive: Receive, send: Send) -> bool:
            if body.stream:
                await call.change(0, _HEAD_SECONDS)
                if not call.is_refused:
                    return await _stream(call, body, scope, send)
            # Another client may wait for the same reply.
            reply = await asyncio.shield(call.reply)
            content = body.answer(_answer_of(reply, call, body), call.name, call.created)
            await JSONResponse(content)(scope, receive, send)
            return True

        return TrackedResponse(answer, lambda sent: broker.settle(key, call, delivered=sent), lambda: broker.lose(call))

    return ask


def _answer_of(reply: Mapping[str, Any], call: Call, body: AgentRequest) -> Answer:
    return read_answer(reply, call.name, offers_tools=bool(body.functions))


async def _stream(call: Call, body: AgentRequest, scope: Scope, send: Send) -> bool:
    """Send a reply as it is sampled, and return whether it was complete."""
    scope[STOPPING] = lambda: call.refuse(_stopped())
    events = body.events(call.name, call.created)

    async def write(text: str, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
    await write(events.head())
    size, last = 0, time.monotonic()
    while not call.reply.done():
        await call.change(size, _PING_SECONDS)
        size = len(call.partial)
        # Sampled text may be held back for a long time.
        is_silent = time.monotonic() - last >= _PING_SECONDS
        if text := events.more(call.partial) or (events.ping() if is_silent else ""):
            await write(text)
            last = time.monotonic()
    try:
        await write(events.end(_answer_of(call.reply.result(), call, body)), more=False)
    except Refused as refusal:
        await write(events.fault(refusal), more=False)
        return False
    return True


def _episode(request: Request) -> str:
    """Return the id of the episode that a request is about: the one in its path, else its API
    key.
    """
    return str(request.path_params.get("key") or api_key(request.scope))


def _model(name: str) -> dict[str, Any]:
    """Return the description of a model, with the fields of OpenAI's and of Anthropic's
    protocol.
    """
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentr"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _taking(broker: Broker) -> Callable[[Request], Awaitable[Response]]:
    async def take(request: Request) -> Response:
        body = await _read(request, Take)
        base = str(request.base_url).rstrip("/")
        episodes: list[Episode] = []

        async def answer(scope: Scope, receive: Receive, send: Send) -> bool:
            if (episode := await broker.take(body.wait)) is None:
                await Response(status_code=204)(scope, receive, send)
                return True
            episodes.append(episode)
            url = f"{base}/episodes/{episode.id}"
            addresses = {"base_url": f"{url}/v1", "anthropic_url": url, "key": episode.id}
            content = {"episode": episode.id, **addresses, "model": MODEL, **episode.offer}
            await JSONResponse(content)(scope, receive, send)
            return True

        def lose() -> None:
            for episode in episodes:
                broker.offer_again(episode)

        return TrackedResponse(answer, lambda sent: None if sent else lose(), lose)

    return take


def _for_runs(broker: Broker) -> list[Route]:
    async def alive(request: Request) -> Response:
        return JSONResponse({"gateway": MODEL})

    async def arrive(request: Request) -> Response:
        return Presence(broker)

    async def open_episode(request: Request) -> Response:
        offer = (await _read(request, Offer)).model_dump()
        run = offer.pop("run")
        return JSONResponse({"episode": broker.open(offer, run)})

    async def next_event(request: Request) -> Response:
        body = await _read(request, Next)
        try:
            return JSONResponse(await broker.next(body.episode, body.reply, body.wait))
        except KeyError:
            # Runs treat this error as temporary, and offer the episode again.
            message = f"episode {body.episode[:40]} is gone: the gateway was started anew"
            raise Refused(503, message, "episode_not_found") from None

    async def progress(request: Request) -> Response:
        broker.progress((await _read(request, Progress)).texts)
        return JSONResponse({})

    async def close_episode(request: Request) -> Response:
        body = await _read(request, Close)
        broker.close(body.episode, body.why, body.code)
        return JSONResponse({})

    return [
        Route("/", alive),
        _post("/run/arrive", arrive),
        _post("/run/open", open_episode),
        _post("/run/next", next_event),
        _post("/run/progress", progress),
        _post("/run/close", close_episode),
    ]


async def _read(request: Request, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise refusal_of(error) from error


def _post(path: str, act: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, act, methods=["POST"])


def _stopped() -> Refused:
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the gateway was stopped, and its episodes with it")


def _answer_to(scope: Scope, refusal: Refused) -> Response:
    """Return the response to a refused request, in the dialect of its path, else in OpenAI's
    format.
    """
    for end, dialect in _DIALECTS.items():
        if scope["path"].removesuffix("/count_tokens").endswith(end):
            return JSONResponse(dialect.error(refusal), dialect.status(refusal))
    return JSONResponse(openai_error(refusal), refusal.status)


def _refusal(scope: Scope, status: int, why: str) -> Response:
    return _answer_to(scope, Refused(status, why))


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _answer_to(request.scope, error)


def _unserved(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    paths = f"POST /episodes, and below the base_url of an episode {', '.join(_DIALECTS)} and /models"
    why = f"{request.method} {request.url.path[:80]} is not served here; agents have {paths}"
    answer = _refusal(request.scope, error.status_code, why)
    answer.headers.update(error.headers or {})
    return answer


def _broken(request: Request, error: Exception) -> Response:
    why = f"the gateway has a fault of its own: {cause(error)}; see its log"
    return _refusal(request.scope, HTTPStatus.INTERNAL_SERVER_ERROR, why)
