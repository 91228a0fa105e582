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

from agentr_core.environments.gateway.desk import (
    MODEL,
    Call,
    ChatCall,
    Desk,
    Failed,
    Refused,
    Rewarded,
    Seat,
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
    """An episode that a run offers. `run` is its name, if it has one; see `Desk.arrive`."""

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
        leaving = asyncio.ensure_future(_left(receive))
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

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the name, and end the run's episodes when it leaves."""
        name = self._desk.arrive()
        try:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
            await send({"type": "http.response.body", "body": f"{name}\n".encode(), "more_body": True})
            leaving = asyncio.ensure_future(_left(receive))
            scope[STOPPING] = leaving.cancel
            await asyncio.wait((leaving,))
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._desk.leave(name)


async def _left(receive: Receive) -> None:
    """Return when the client leaves; its request was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def app(token: str | None = None) -> ASGIApp:
    """Return the ASGI application. It admits every request, or, with a token, those that have
    it.
    """
    desk = Desk()
    handlers = {HTTPException: _unserved, Refused: _refused, Exception: _broken}
    made: ASGIApp = Starlette(routes=[*_for_agents(desk), *_for_runs(desk)], exception_handlers=handlers)
    made = Guard(made, refusal=_refusal)
    if token is None:
        return made
    why = "this gateway answers only requests with its token: give it as the API key, in Authorization: Bearer"
    return Locked(made, token, why=why, refusal=_refusal)


def _for_agents(desk: Desk) -> list[Route]:
    async def chat(request: Request) -> Response:
        key = request.path_params["key"]
        asked = await _read(request, ChatCall)
        # What the policy cannot answer is refused here; handed on, it would cost the episode.
        _check_model(asked.model)
        check_tools(asked.tools or [])
        if asked.messages[-1].role == "assistant":
            why = "messages: the last turn is the assistant's; end with one of the user, a tool or the system"
            raise Refused(400, why, "invalid_request", "messages")
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = desk.ask(key, asked.turns(), again=again)
        return Observed(
            lambda: _reply(asked, call), lambda sent: desk.settle(key, call, reached=sent), lambda: desk.lose(call)
        )

    async def reward(request: Request) -> Response:
        key = request.path_params["key"]
        told = await _read(request, Rewarded)
        success = told.reward >= 1 if told.success is None else told.success
        desk.reward(key, told.reward, success)

        async def wait() -> Response:
            return JSONResponse({"reward": told.reward, "success": success})

        def settle(sent: bool) -> None:
            desk.rewarded(key, reached=sent)

        return Observed(wait, settle, lambda: settle(False))

    async def failed(request: Request) -> Response:
        desk.failed(request.path_params["key"], (await _read(request, Failed)).reason)
        return JSONResponse({})

    async def listed(request: Request) -> Response:
        desk.seat(request.path_params["key"])
        return JSONResponse({"object": "list", "data": [model()]})

    async def described(request: Request) -> Response:
        desk.seat(request.path_params["key"])
        _check_model(request.path_params["model"])
        return JSONResponse(model())

    return [
        _post("/episodes", _taking(desk)),
        _post("/episodes/{key}/v1/chat/completions", chat),
        Route("/episodes/{key}/v1/models", listed),
        Route("/episodes/{key}/v1/models/{model}", described),
        _post("/episodes/{key}/reward", reward),
        _post("/episodes/{key}/failed", failed),
    ]


def _taking(desk: Desk) -> Callable[[Request], Awaitable[Response]]:
    async def take(request: Request) -> Response:
        wanted = await _read(request, Take)
        base = str(request.base_url).rstrip("/")
        seats: list[Seat] = []

        async def wait() -> Response:
            if (seat := await desk.take(wanted.wait)) is None:
                return Response(status_code=204)
            seats.append(seat)
            offer = {"episode": seat.id, "base_url": f"{base}/episodes/{seat.id}/v1", "model": MODEL, **seat.offer}
            return JSONResponse(offer)

        def lose() -> None:
            for seat in seats:
                desk.offer_again(seat)

        return Observed(wait, lambda sent: None if sent else lose(), lose)

    return take


async def _reply(asked: ChatCall, call: Call) -> Response:
    """Return the answer to a call. A stream comes in one piece, so that it is delivered as a whole
    or not at all.
    """
    # Another client may wait for the same reply.
    reply = await asyncio.shield(call.reply)
    if asked.stream:
        events = chunks(asked, reply, name=call.name, created=call.created)
        return Response("".join(events), media_type="text/event-stream")
    return JSONResponse(completion(asked, reply, name=call.name, created=call.created))


def _for_runs(desk: Desk) -> list[Route]:
    async def alive(request: Request) -> Response:
        return JSONResponse({"gateway": MODEL})

    async def arrived(request: Request) -> Response:
        return Presence(desk)

    async def opened(request: Request) -> Response:
        offer = (await _read(request, Offer)).model_dump()
        run = offer.pop("run")
        return JSONResponse({"episode": desk.open(offer, run)})

    async def following(request: Request) -> Response:
        asked = await _read(request, Next)
        try:
            return JSONResponse(await desk.next(asked.episode, asked.reply, asked.wait))
        except KeyError:
            # Runs treat this error as temporary, and offer the episode again.
            gone = f"episode {asked.episode[:40]} is gone: the gateway was started anew"
            raise Refused(503, gone, "episode_not_found") from None

    async def closed(request: Request) -> Response:
        told = await _read(request, Close)
        desk.close(told.episode, told.why, told.code)
        return JSONResponse({})

    return [
        Route("/", alive),
        _post("/run/arrive", arrived),
        _post("/run/open", opened),
        _post("/run/next", following),
        _post("/run/close", closed),
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
