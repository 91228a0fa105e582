"""The gateway as an application: OpenAI's protocol for agents, and four paths for runs.

An agent asks `POST /episodes` for an episode and receives `base_url`, instance and task. Its calls
to that address, in OpenAI's protocol, are answered by the policy of the run that offered the
episode. The episode ends with `POST /episodes/ID/reward`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentr_core.environments.gateway.desk import Desk
from agentr_core.environments.gateway.wire import (
    MODEL,
    ChatCall,
    Failed,
    Refused,
    Rewarded,
    chunks,
    completion,
    models,
    sentence,
)
from agentr_core.http_server.guard import Guard

M = TypeVar("M", bound=BaseModel)
Seconds = Annotated[float, Field(ge=0, le=60)]


class Offer(BaseModel):
    """An episode that a run offers."""

    environment: str
    split: str
    index: int
    task: Any = None


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


def app() -> Starlette:
    """Return the ASGI application."""
    desk = Desk()
    return Starlette(middleware=[Middleware(Guard)], routes=[*_for_agents(desk), *_for_runs(desk)])


def _for_agents(desk: Desk) -> list[Route]:
    async def take(request: Request) -> Response:
        wanted = await _read(request, Take)
        seat = await desk.take(wanted.wait, request.is_disconnected)
        if seat is None:
            return Response(status_code=204)
        base = f"{str(request.base_url).rstrip('/')}/episodes/{seat.id}/v1"
        return JSONResponse({"episode": seat.id, "base_url": base, "model": MODEL, **seat.offer})

    async def chat(request: Request) -> Response:
        key = request.path_params["key"]
        call = await _read(request, ChatCall)
        _check_answerable(call)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        reply = await desk.ask(key, call.turns(), again=again)
        if call.stream:
            return StreamingResponse(chunks(call, reply), media_type="text/event-stream")
        return JSONResponse(completion(call, reply))

    async def reward(request: Request) -> Response:
        told = await _read(request, Rewarded)
        success = told.reward >= 1 if told.success is None else told.success
        desk.reward(request.path_params["key"], told.reward, success)
        return JSONResponse({"reward": told.reward, "success": success})

    async def failed(request: Request) -> Response:
        desk.failed(request.path_params["key"], (await _read(request, Failed)).reason)
        return JSONResponse({})

    async def listed(request: Request) -> Response:
        return JSONResponse(models())

    return [
        _post("/episodes", take),
        _post("/episodes/{key}/v1/chat/completions", chat),
        Route("/episodes/{key}/v1/models", listed),
        _post("/episodes/{key}/reward", reward),
        _post("/episodes/{key}/failed", failed),
    ]


def _for_runs(desk: Desk) -> list[Route]:
    async def alive(request: Request) -> Response:
        return JSONResponse({"gateway": MODEL})

    async def opened(request: Request) -> Response:
        return JSONResponse({"episode": await desk.open((await _read(request, Offer)).model_dump())})

    async def following(request: Request) -> Response:
        asked = await _read(request, Next)
        try:
            return JSONResponse(await desk.next(asked.episode, asked.reply, asked.wait))
        except KeyError:
            # Runs treat this error as temporary, and offer the episode again.
            return JSONResponse({"error": f"episode {asked.episode[:40]} is gone: the gateway was started anew"}, 503)

    async def closed(request: Request) -> Response:
        told = await _read(request, Close)
        desk.close(told.episode, told.why, told.code)
        return JSONResponse({})

    return [
        Route("/", alive),
        _post("/run/open", opened),
        _post("/run/next", following),
        _post("/run/close", closed),
    ]


def _check_answerable(call: ChatCall) -> None:
    """Raise `Refused` for a call that the policy cannot answer; handed on, it would cost the
    episode.
    """
    if call.model != MODEL:
        raise Refused(404, f"there is no model {call.model[:60]!r} here; ask for {MODEL!r}", "model_not_found")
    if call.messages[-1].role == "assistant":
        why = "messages: the last turn is the assistant's; end with one of the user, a tool or the system"
        raise Refused(400, why, "invalid_request")


async def _read(request: Request, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise Refused(400, sentence(error), "invalid_request") from error


def _post(path: str, act: Callable[[Request], Awaitable[Response]]) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            return await act(request)
        except Refused as refusal:
            return JSONResponse(refusal.body, refusal.status)

    return Route(path, endpoint, methods=["POST"])
