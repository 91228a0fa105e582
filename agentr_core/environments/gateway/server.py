"""The gateway as an application: OpenAI's protocol for agents, and four paths for runs.

An agent asks `POST /episodes` for an episode and receives `base_url`, instance and task. Its calls
to that address, in OpenAI's protocol, are answered by the policy of the run that offered the
episode. The episode ends with `POST /episodes/ID/reward`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentr_core.environments.gateway.broker import (
    MODEL,
    Broker,
    Call,
    ChatCall,
    Episode,
    Failed,
    Refused,
    Rewarded,
    check_tools,
    chunks,
    completion,
    model,
    refusal_of,
)
from agentr_core.http_server import LOST, STOPPING, Guard, Locked
from agentr_core.texts import cause

M = TypeVar("M", bound=BaseModel)
Seconds = Annotated[float, Field(ge=0, le=60)]


class Offer(BaseModel):
    """An episode that a run offers. `run` is its name, if it has one; see `Broker.arrive`."""

    environment: str
    split: str
    index: int
    task: Any = None
    run: str = ""


class Next(BaseModel):
    """A run's reply to the last call, if there was one, and how long it waits for the next."""

    episode: str
    reply: dict[str, Any] | None = None
    wait: Seconds = 5.0


class Close(BaseModel):
    """A run's notice that it ends an episode, and why."""

    episode: str
    why: str
    code: str = "episode_over"


class Take(BaseModel):
    """An agent's request for an episode, and how long it waits."""

    wait: Seconds = 20.0


class Observed(Response):
    """An answer that says what became of it.

    Args:
        wait: returns the answer; cancelled when the client leaves.
        settle: is called once, with whether the answer was sent to a client that was still there.
        lose: is called if it turns out later that the client did not read it.
    """

    def __init__(
        self,
        wait: Callable[[], Awaitable[Response]],
        settle: Callable[[bool], Any],
        lose: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()
        self._wait = wait
        self._settle = settle
        self._lose = lose
        self._sent = False
        self._lost = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer when it is there. Raises what `wait` raises."""
        scope[LOST] = self._lose_it
        leaving = asyncio.ensure_future(_disconnected(receive))
        waiting = asyncio.ensure_future(self._wait())
        scope[STOPPING] = waiting.cancel
        try:
            await asyncio.wait((leaving, waiting), return_when=asyncio.FIRST_COMPLETED)
            if waiting.cancelled():
                raise Refused(503, "the gateway was stopped, and its episodes with it")
            if not (leaving.done() or self._lost):
                await waiting.result()(scope, receive, send)
                self._sent = not (leaving.done() or self._lost)
        finally:
            leaving.cancel()
            waiting.cancel()
            self._settle(self._sent)

    def _lose_it(self) -> None:
        self._lost = True
        if self._sent:
            self._sent = False
            self._lose()


class Presence(Response):
    """An answer without end that gives a run its name: the run is gone when its connection is."""

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._desk = broker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the name, and end the run's episodes when it leaves."""
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
    """Return when the client leaves; its request was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def app(token: str | None = None) -> ASGIApp:
    """Return the ASGI application. It admits every request, or, with a token, those that have
    it.
    """
    broker = Broker()
    handlers = {HTTPException: _unserved, Refused: _refused, Exception: _broken}
    application: ASGIApp = Starlette(routes=[*_for_agents(broker), *_for_runs(broker)], exception_handlers=handlers)
    application = Guard(application, refusal=_refusal)
    if token is None:
        return application
    reason = "this gateway answers only requests with its token: give it as the API key, in Authorization: Bearer"
    return Locked(application, token, why=reason, refusal=_refusal)


def _for_agents(broker: Broker) -> list[Route]:
    async def chat(request: Request) -> Response:
        key = request.path_params["key"]
        body = await _read(request, ChatCall)
        # What the policy cannot answer is refused here; handed on, it would cost the episode.
        _check_model(body.model)
        check_tools(body.tools or [])
        if body.messages[-1].role == "assistant":
            reason = "messages: the last turn is the assistant's; end with one of the user, a tool or the system"
            raise Refused(400, reason, "invalid_request", "messages")
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = broker.ask(key, body.turns(), again=again)
        return Observed(
            lambda: _reply(body, call), lambda sent: broker.settle(key, call, delivered=sent), lambda: broker.lose(call)
        )

    async def reward(request: Request) -> Response:
        key = request.path_params["key"]
        body = await _read(request, Rewarded)
        success = body.reward >= 1 if body.success is None else body.success
        broker.reward(key, body.reward, success)

        async def wait() -> Response:
            return JSONResponse({"reward": body.reward, "success": success})

        def settle(sent: bool) -> None:
            broker.rewarded(key, delivered=sent)

        return Observed(wait, settle, lambda: settle(False))

    async def failed(request: Request) -> Response:
        broker.failed(request.path_params["key"], (await _read(request, Failed)).reason)
        return JSONResponse({})

    async def describe(request: Request) -> Response:
        return JSONResponse(broker.state(request.path_params["key"]))

    async def list_models(request: Request) -> Response:
        broker.episode(request.path_params["key"])
        return JSONResponse({"object": "list", "data": [model()]})

    async def describe_model(request: Request) -> Response:
        broker.episode(request.path_params["key"])
        _check_model(request.path_params["model"])
        return JSONResponse(model())

    return [
        _post("/episodes", _taking(broker)),
        Route("/episodes/{key}", describe),
        _post("/episodes/{key}/v1/chat/completions", chat),
        Route("/episodes/{key}/v1/models", list_models),
        Route("/episodes/{key}/v1/models/{model}", describe_model),
        _post("/episodes/{key}/reward", reward),
        _post("/episodes/{key}/failed", failed),
    ]


def _taking(broker: Broker) -> Callable[[Request], Awaitable[Response]]:
    async def take(request: Request) -> Response:
        body = await _read(request, Take)
        base = str(request.base_url).rstrip("/")
        episodes: list[Episode] = []

        async def wait() -> Response:
            if (episode := await broker.take(body.wait)) is None:
                return Response(status_code=204)
            episodes.append(episode)
            offer = {
                "episode": episode.id,
                "base_url": f"{base}/episodes/{episode.id}/v1",
                "model": MODEL,
                **episode.offer,
            }
            return JSONResponse(offer)

        def lose() -> None:
            for episode in episodes:
                broker.offer_again(episode)

        return Observed(wait, lambda sent: None if sent else lose(), lose)

    return take


async def _reply(body: ChatCall, call: Call) -> Response:
    """Return the answer to a call. A stream comes in one piece, so that it is delivered as a whole
    or not at all.
    """
    # Another client may wait for the same reply.
    reply = await asyncio.shield(call.reply)
    if body.stream:
        events = chunks(body, reply, name=call.name, created=call.created)
        return Response("".join(events), media_type="text/event-stream")
    return JSONResponse(completion(body, reply, name=call.name, created=call.created))


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

    async def close_episode(request: Request) -> Response:
        body = await _read(request, Close)
        broker.close(body.episode, body.why, body.code)
        return JSONResponse({})

    return [
        Route("/", alive),
        _post("/run/arrive", arrive),
        _post("/run/open", open_episode),
        _post("/run/next", next_event),
        _post("/run/close", close_episode),
    ]


def _check_model(name: str) -> None:
    if name != MODEL:
        raise Refused(404, f"there is no model {name[:60]!r} here; ask for {MODEL!r}", "model_not_found", "model")


async def _read(request: Request, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise refusal_of(error) from error


def _post(path: str, act: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, act, methods=["POST"])


def _refusal(status: int, why: str) -> Response:
    return JSONResponse(Refused(status, why).body, status)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status)


def _unserved(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    paths = "POST /episodes, and below the base_url of an episode /chat/completions and /models"
    answer = _refusal(
        error.status_code, f"{request.method} {request.url.path[:80]} is not served here; agents have {paths}"
    )
    answer.headers.update(error.headers or {})
    return answer


def _broken(request: Request, error: Exception) -> Response:
    return _refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR, f"the gateway has a fault of its own: {cause(error)}; see its log"
    )
