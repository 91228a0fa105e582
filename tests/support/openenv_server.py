"""A server of OpenEnv's protocol, written by the wire alone: a game of guesses that can be told to
break, to be full, to ignore what a reset says, and to take calls of tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

TOOL = {
    "name": "guess",
    "description": "Guess the number.",
    "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


@dataclass
class Guessing:
    """The secret of seed s is 7 s modulo 10; a right guess has reward 1, a wrong one none.

    Args:
        places: how many WebSockets may be open.
        heeds: whether the secret depends on what a reset says.
        restless: whether each reset has another secret.
        raises: whether a guess that is no number is an exception of the environment.
        standing: whether each step repeats the reward so far, 0.5 for a guess that is next to it.
        tools: whether guesses are calls of a tool.
        tasks: the sizes of the splits of its Task API, of types train and test in this order.
        faults: what happens to the n-th message of a kind, from 0: `drop` breaks the connection
            before it is carried out, `lose` after, `hang` never answers, all else is the answer.
        seen: for each WebSocket, the messages that it got.
    """

    places: int = 8
    heeds: bool = True
    restless: bool = False
    raises: bool = False
    standing: bool = False
    tools: bool = False
    tasks: Mapping[str, int] = field(default_factory=dict)
    faults: dict[tuple[str, int], Any] = field(default_factory=dict)
    seen: list[list[dict[str, Any]]] = field(default_factory=list)
    open: int = 0
    resets: int = 0

    @property
    def app(self) -> Starlette:
        """The application."""
        posts = [Route(f"/guess/{name}", self._count, methods=["POST"]) for name in ("num_tasks",)]
        task_routes = [Route("/list_environments", self._names), Route("/guess/splits", self._splits), *posts]
        routes = [
            Route("/schema", self._schema),
            WebSocketRoute("/ws", self._play),
            *(task_routes if self.tasks else []),
        ]
        return Starlette(routes=routes)

    def count(self, kind: str) -> int:
        """Return how many messages of a kind there were."""
        return sum(message["type"] == kind for messages in self.seen for message in messages)

    async def _names(self, request: Request) -> Response:
        return JSONResponse(["guess"])

    async def _splits(self, request: Request) -> Response:
        kinds = ("train", "test")
        return JSONResponse([{"name": name, "type": kind} for name, kind in zip(self.tasks, kinds, strict=False)])

    async def _count(self, request: Request) -> Response:
        return JSONResponse({"num_tasks": self.tasks[(await request.json())["split"]]})

    async def _schema(self, request: Request) -> Response:
        words = {"title": "Guess", "properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}}}
        calls = {"title": "CallToolAction", "properties": {"tool_name": {"type": "string"}}}
        return JSONResponse({"action": {**(calls if self.tools else words), "type": "object", "required": ["guess"]}})

    async def _play(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.open >= self.places:
            full = {"message": "Server at capacity", "code": "CAPACITY_REACHED", "max_sessions": self.places}
            await socket.send_json({"type": "error", "data": full})
            await socket.close()
            return
        self.open += 1
        self.seen.append([])
        try:
            await _Episode(self, socket).play(self.seen[-1])
        except WebSocketDisconnect:
            pass
        finally:
            self.open -= 1


class _Episode:
    def __init__(self, server: Guessing, socket: WebSocket) -> None:
        self._server = server
        self._socket = socket
        self._secret = -1
        self._best = 0.0

    async def play(self, seen: list[dict[str, Any]]) -> None:
        server = self._server
        while True:
            message = json.loads(await self._socket.receive_text())
            fault = server.faults.pop((message["type"], server.count(message["type"])), None)
            seen.append(message)
            if fault == "hang":
                await asyncio.sleep(600)
            answer = None if fault == "drop" else self._answer(message)
            if fault in ("drop", "lose"):
                await self._socket.close(1011)
                return
            if isinstance(fault, str):
                await self._socket.send_text(fault)
            else:
                await self._socket.send_json(answer if fault is None else fault)

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        server, data = self._server, message.get("data", {})
        if message["type"] == "state":
            return {"type": "state", "data": {"episode_id": None, "step_count": 0, "secret": self._secret}}
        if message["type"] == "reset":
            server.resets += 1
            number = data.get("seed", data.get("index", 0)) + 1000 * (data.get("split") == "held-out")
            number = server.resets if server.restless else number if server.heeds else 0
            self._secret, self._best = 7 * number % 10, 0.0
            return _observation_message(
                f"Game {number if server.heeds else 0}: guess a number from 0 to 9.", None, False
            )
        if server.tools:
            return self._call(data)
        if not isinstance(data.get("guess"), str) or set(data) != {"guess"}:
            errors = [{"loc": ["guess"], "msg": "Input should be a valid string"}]
            return _error_message("VALIDATION_ERROR", "Invalid message", errors=errors)
        return self._guess(data["guess"])

    def _guess(self, guess: str) -> dict[str, Any]:
        if not guess.lstrip("-").isdigit():
            if self._server.raises:
                return _error_message("EXECUTION_ERROR", f"{guess} is not a valid guess")
            return _observation_message("Say a number.", None, False)
        distance = abs(int(guess) - self._secret)
        self._best = max(self._best, {0: 1.0, 1: 0.5}.get(distance, 0.0))
        reward = self._best if self._server.standing else 1.0 if distance == 0 else None
        text = "Right." if distance == 0 else "Higher." if int(guess) < self._secret else "Lower."
        return _observation_message(text, reward, distance == 0, won=distance == 0)

    def _call(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if data.get("type") == "list_tools":
            answer = _observation_message("", None, False)
            answer["data"]["observation"] = {"tools": [TOOL]}
            return answer
        if not isinstance(data["arguments"].get("number"), int):
            answer = _observation_message("", None, False)
            error = {"error_type": "invalid_args", "message": "number is missing"}
            answer["data"]["observation"] = {"tool_name": "guess", "result": None, "error": error}
            return answer
        answer = self._guess(str(data["arguments"]["number"]))
        answer["data"]["observation"] = {
            "tool_name": "guess",
            "result": {"data": answer["data"]["observation"]["prompt"], "content": []},
            "error": None,
        }
        return answer


def _observation_message(text: str, reward: float | None, done: bool, **metadata: Any) -> dict[str, Any]:
    observation = {"prompt": text, "legal": [0, 9], "metadata": metadata}
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data | ({"metadata": metadata} if metadata else {})}


def _error_message(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}
