"""A server that offers any environment to clients of OpenEnv, over its WebSocket protocol.

An action is a whole reply as the world's instruction asks for, or an action alone. The first
observation includes the instruction and the step limit, since the protocol has no other place for
them. The rewards of the steps sum to that of the episode. A fault of the world is an error, never a
reward.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentr_core.environment import Environment
from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import act, no_helper
from agentr_core.errors import AgentrError
from agentr_core.http_server import Guard
from agentr_core.texts import abbreviate, error_summary
from agentr_core.types import Instance, Step, StopReason, Trajectory

MAX_LISTED = 10_000
"""The most tasks in one answer of the Task API."""
_RESET_ARGUMENTS = ("seed", "split", "index", "episode_id")
_TEXT_SCHEMA, _FLAG_SCHEMA = {"type": "string"}, {"type": "boolean"}
_SCHEMA = {
    "action": {
        "title": "Reply",
        "type": "object",
        "properties": {
            "reply": {**_TEXT_SCHEMA, "description": "A reply as the instruction asks for, or an action alone."}
        },
        "required": ["reply"],
        "additionalProperties": False,
    },
    "observation": {
        "title": "Observation",
        "type": "object",
        "properties": {
            "text": _TEXT_SCHEMA,
            "instruction": {**_TEXT_SCHEMA, "description": "At the beginning: how to act and to reply."},
            "step_limit": {"type": "integer", "description": "At the beginning: the most steps of an episode."},
            "success": {**_FLAG_SCHEMA, "description": "Whether the episode is a success by now."},
            "valid": {**_FLAG_SCHEMA, "description": "Whether the world took the action, if it tells."},
        },
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
    },
}


class Refused(Exception):
    """A message that is not carried out: OpenEnv's error code, and a sentence."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(code, sentence)
        self.code = code
        self.sentence = sentence


def read_message(text: str | bytes) -> Mapping[str, Any]:
    """Return the JSON object in a text. Raises `Refused` if it is not one."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise Refused("INVALID_JSON", f"A message must be JSON: {error}.") from error
    if not isinstance(value, dict):
        raise Refused("SESSION_ERROR", f"A message must be a JSON object, not {abbreviate(value)}.")
    return value


def check_number(value: Any, name: str) -> int:
    """Return the value if it is a whole number of at least 0. Raises `Refused` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise Refused("VALIDATION_ERROR", f"The {name} must be a whole number of at least 0, not {abbreviate(value)}.")
    return value


class Slot:
    """One environment with the episode that is played in it. The calls of a blocking world run in a
    thread of their own.

    Args:
        splits: the instances that can be asked for.
    """

    def __init__(self, env: Environment, splits: Mapping[str, Sequence[Instance]]) -> None:
        self._env = env
        self._splits = splits
        self._executor = ThreadPoolExecutor(1) if env.blocking else None
        self._episode: Trajectory | None = None
        self._end_reason = "no episode has begun"
        self._episode_id: str | None = None

    async def reset(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin an episode and return its first observation: that of the instance at `index` in the
        split, else at `seed` modulo its size, else a random one. Raises `Refused` for invalid
        arguments and faults of the world.
        """
        if unknown := sorted(arguments.keys() - set(_RESET_ARGUMENTS)):
            raise Refused(
                "VALIDATION_ERROR",
                f"A reset takes {', '.join(_RESET_ARGUMENTS)}, and not {abbreviate(', '.join(unknown))}.",
            )
        split, index, seed = (arguments.get(name) for name in ("split", "index", "seed"))
        split = ("train" if "train" in self._splits else next(iter(self._splits))) if split is None else split
        position = check_index(self._splits, split, index) if index is not None else None
        size = len(self._splits[split]) if position is not None else len(split_instances(self._splits, split))
        if position is None:
            position = secrets.randbelow(size) if seed is None else check_number(seed, "seed") % size
        instance = self._splits[split][position]
        self._episode, self._end_reason = None, "no episode has begun"
        first = await self._call_environment(lambda: self._env.reset(instance))
        self._episode = Trajectory.ended(instance, first, (), StopReason.STEP_LIMIT)
        self._episode_id = str(arguments.get("episode_id") or secrets.token_hex(8))
        fields = {"text": first, "instruction": self._env.instruction, "step_limit": self._env.step_limit}
        return _observation(fields, None, False, {"split": split, "index": position})

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the step of a reply and return its observation. Raises `Refused` without a running
        episode, for an invalid action, and for a fault of the world.
        """
        episode = self._episode
        if episode is None:
            raise Refused("EXECUTION_ERROR", f"There is nothing to act in: {self._end_reason}. Reset first.")
        reply = action.get("reply")
        if not isinstance(reply, str) or action.keys() - {"reply", "metadata"}:
            raise Refused(
                "VALIDATION_ERROR", f'An action is an object such as {{"reply": "..."}}, not {abbreviate(action)}.'
            )
        env = self._env
        # If this step ends in any other way than with an answer, the world's state is unknown.
        self._episode, self._end_reason = None, "the episode was lost"
        outcome = await self._call_environment(lambda: act(env, reply if env.parse(reply) else env.reply_with(reply)))
        steps = (*episode.steps, outcome.step)
        stop_reason = outcome.stop or (StopReason.STEP_LIMIT if len(steps) >= env.step_limit else None)
        trajectory = Trajectory.ended(
            episode.instance, episode.first_observation, steps, stop_reason or StopReason.STEP_LIMIT
        )
        step = outcome.step
        if stop_reason is None:
            self._episode = trajectory
        else:
            trajectory, _ = await grade_episode(env, trajectory, no_helper, seed=0)
            self._end_reason = "the episode is over"
        fields: dict[str, Any] = {"text": step.observation, "success": trajectory.success}
        fields |= {} if step.valid is None else {"valid": step.valid}
        metadata = {} if stop_reason is None else {"stop": stop_reason.value}
        return _observation(fields, trajectory.reward - _reward(episode.steps), stop_reason is not None, metadata)

    def state(self) -> Mapping[str, Any]:
        """Return the id and the number of steps of the episode; nothing that helps to solve it."""
        return {"episode_id": self._episode_id, "step_count": len(self._episode.steps) if self._episode else 0}

    async def close(self) -> None:
        """Close the environment, after any call that is still running. Never raises."""
        with suppress(Refused):
            await self._call_environment(self._env.close)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def _call_environment(self, function: Callable[[], Any]) -> Any:
        try:
            if self._executor is None:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except AgentrError as error:
            raise Refused("EXECUTION_ERROR", str(error)) from error
        except Exception as error:
            raise Refused("EXECUTION_ERROR", f"The world broke: {error_summary(error)}.") from error


def _reward(steps: Sequence[Step]) -> float:
    return steps[-1].reward if steps else 0.0


def _observation(
    fields: Mapping[str, Any], reward: float | None, done: bool, metadata: Mapping[str, Any]
) -> Mapping[str, Any]:
    data = {"observation": {**fields, "metadata": metadata}, "reward": reward, "done": done}
    return data | ({"metadata": metadata} if metadata else {})


def split_instances(splits: Mapping[str, Sequence[Instance]], split: Any) -> Sequence[Instance]:
    """Return the instances of a split. Raises `Refused` for an unknown split."""
    if not isinstance(split, str) or split not in splits:
        raise Refused("VALIDATION_ERROR", f"There is no split {abbreviate(split)}; there are {', '.join(splits)}.")
    return splits[split]


def check_index(splits: Mapping[str, Sequence[Instance]], split: Any, index: Any) -> int:
    """Return `index` if it is a position in the split. Raises `Refused` otherwise."""
    size = len(split_instances(splits, split))
    if check_number(index, "index") >= size:
        raise Refused("VALIDATION_ERROR", f"Split {split} has the indices 0 to {size - 1}, and not {index}.")
    return int(index)


class SlotPool:
    """The slots of a server: each is made when a WebSocket opens and closed with it.

    Args:
        make_env: returns a new environment.
        splits: the instances that can be asked for, by split.
        idle_s: seconds without a message after which a slot is closed.
        max_slots: the largest number of slots at once.
    """

    def __init__(
        self,
        make_env: Callable[[], Environment],
        splits: Mapping[str, Sequence[Instance]],
        *,
        idle_s: float,
        max_slots: int,
    ) -> None:
        self._make_env = make_env
        self._splits = splits
        self._idle_s = idle_s
        self._max_slots = max_slots
        self._num_taken = 0

    async def open(self) -> Slot:
        """Return a new slot. Raises `Refused` if too many are taken, or if no environment can be
        made.
        """
        if self._num_taken >= self._max_slots:
            raise Refused(
                "CAPACITY_REACHED", f"All {self._max_slots} places are taken; close some, or raise --max-environments."
            )
        self._num_taken += 1
        try:
            return Slot(await asyncio.to_thread(self._make_env), self._splits)
        except BaseException as error:
            self._num_taken -= 1
            if not isinstance(error, Exception):
                raise
            reason = str(error) if isinstance(error, AgentrError) else error_summary(error)
            raise Refused("FACTORY_ERROR", f"The world cannot be made: {reason}.") from error

    async def close(self, slot: Slot) -> None:
        """Close a slot."""
        self._num_taken -= 1
        await slot.close()

    async def play(self, socket: WebSocket) -> None:
        """Play episodes over a WebSocket until the client closes it, or is idle for too long."""
        await socket.accept()
        try:
            if "session_id" in socket.query_params:
                raise Refused("SESSION_ERROR", "There is no such session; connect without session_id.")
            slot = await self.open()
        except Refused as refusal:
            capacity = {"active_sessions": self._num_taken, "max_sessions": self._max_slots}
            await _refuse(socket, refusal, capacity if refusal.code == "CAPACITY_REACHED" else {})
            await socket.close()
            return
        try:
            while True:
                async with asyncio.timeout(self._idle_s):
                    message = await socket.receive()
                if message["type"] != "websocket.receive":
                    break
                try:
                    answer = await self._answer(slot, read_message(message.get("text") or message.get("bytes") or ""))
                except Refused as refusal:
                    await _refuse(socket, refusal, {})
                    if refusal.code == "SESSION_ERROR":
                        await socket.close()
                        break
                    continue
                if answer is None:
                    await socket.close()
                    break
                await socket.send_text(json.dumps(answer))
        except TimeoutError:
            await socket.close(1001, "idle for too long")
        except (WebSocketDisconnect, OSError):
            # The client left while it was answered.
            pass
        finally:
            await self.close(slot)

    async def _answer(self, slot: Slot, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the answer to a message; None if the WebSocket is to be closed. Raises
        `Refused`.
        """
        message_type, data = message.get("type"), message.get("data")
        if not isinstance(message_type, str) or message_type not in ("reset", "step", "state", "mcp", "close"):
            raise Refused(
                "UNKNOWN_TYPE",
                f"A message has the type reset, step, state, mcp or close, and not {abbreviate(message_type)}.",
            )
        if unknown := sorted(message.keys() - {"type", "data"}):
            raise Refused("VALIDATION_ERROR", f"A message has type and data, and not {abbreviate(', '.join(unknown))}.")
        data = {} if data is None and message_type != "step" else data
        if not isinstance(data, dict):
            raise Refused(
                "VALIDATION_ERROR", f"The data of a {message_type} must be an object, not {abbreviate(data)}."
            )
        if message_type == "close":
            return None
        if message_type == "state":
            return {"type": message_type, "data": slot.state()}
        if message_type == "mcp":
            return {"type": message_type, "data": _rpc(data)}
        observation = await (slot.reset(data) if message_type == "reset" else slot.step(data))
        return {"type": "observation", "data": observation}

    async def reset(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the first observation of an episode that ends at once: over HTTP, nothing is kept
        between requests.
        """
        slot = await self.open()
        try:
            return await slot.reset(arguments)
        finally:
            await self.close(slot)


async def _refuse(socket: WebSocket, refusal: Refused, details: Mapping[str, Any]) -> None:
    error = {"message": refusal.sentence, "code": refusal.code, **details}
    await socket.send_text(json.dumps({"type": "error", "data": error}))


def _rpc(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer to a JSON-RPC request: there are no tools, since worlds are played by
    text.
    """
    request_id = body.get("id")
    is_valid = isinstance(request_id, str) or (isinstance(request_id, int) and abs(request_id) < 2**63)
    answer = {"jsonrpc": "2.0", "id": request_id if is_valid else None}
    if body.get("method") == "tools/list":
        return answer | {"result": {"tools": []}}
    return answer | {"error": {"code": -32601, "message": "There is no such method; episodes are played at /ws."}}


def app(
    make_env: Callable[[], Environment],
    name: str,
    splits: Mapping[str, Sequence[Instance]],
    *,
    idle_s: float = 3600.0,
    max_slots: int = 1024,
) -> Starlette:
    """Return the ASGI application; `name` is that of the world. For the other arguments see
    `SlotPool`.
    """
    slots = SlotPool(make_env, splits, idle_s=idle_s, max_slots=max_slots)
    split_records = [
        {"name": split, "type": "train" if split == "train" else "test" if "test" in split else "validation"}
        for split in splits
    ]
    metadata = {"name": name, "description": f"{name}, an environment of agentr, in words", "version": "1.0.0"}

    async def step(body: Mapping[str, Any]) -> Any:
        raise Refused("EXECUTION_ERROR", "HTTP keeps no episode between two requests; play at /ws.")

    async def list_tasks(body: Mapping[str, Any]) -> Any:
        instances = split_instances(splits, body.get("split"))
        start, stop = (body.get(bound) for bound in ("start", "stop"))
        first = 0 if start is None else check_number(start, "start")
        last = min(len(instances) if stop is None else check_number(stop, "stop"), len(instances), first + MAX_LISTED)
        return {"tasks": [{"split": body["split"], "index": position} for position in range(first, last)]}

    async def count_tasks(body: Mapping[str, Any]) -> Any:
        return {"num_tasks": len(split_instances(splits, body.get("split")))}

    async def get_task(body: Mapping[str, Any]) -> Any:
        return {
            "task": {"split": body.get("split"), "index": check_index(splits, body.get("split"), body.get("index"))}
        }

    async def rpc(body: Mapping[str, Any]) -> Any:
        return _rpc(body)

    post_handlers = {
        "/reset": slots.reset,
        "/step": step,
        "/mcp": rpc,
        "/{env}/tasks": list_tasks,
        "/{env}/task_range": list_tasks,
    }
    post_handlers |= {"/{env}/num_tasks": count_tasks, "/{env}/task": get_task}
    get_values: dict[str, Any] = {
        "/health": {"status": "healthy"},
        "/metadata": metadata,
        "/schema": {**_SCHEMA, "reset_observation": _SCHEMA["observation"]},
        "/state": {"episode_id": None, "step_count": 0},
        "/list_environments": [name],
        "/{env}/splits": split_records,
    }
    paths: dict[str, Any] = {path: {"post": {}} for path in post_handlers} | {path: {"get": {}} for path in get_values}
    get_values["/openapi.json"] = {"openapi": "3.1.0", "info": {"title": name, "version": "1.0.0"}, "paths": paths}
    routes = [
        *(Route(path, _get_handler(name, value)) for path, value in get_values.items()),
        *(Route(path, _post_handler(name, handler), methods=["POST"]) for path, handler in post_handlers.items()),
        WebSocketRoute("/ws", slots.play),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard)])


def _is_known(name: str, request: Request) -> bool:
    return str(request.path_params.get("env", name)).lower() == name.lower()


def _get_handler(name: str, value: Any) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return (
            JSONResponse(value) if _is_known(name, request) else JSONResponse({"detail": f"There is {name} here."}, 404)
        )

    return endpoint


def _post_handler(
    name: str, handle: Callable[[Mapping[str, Any]], Awaitable[Any]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if not _is_known(name, request):
            return JSONResponse({"detail": f"There is {name} here."}, 404)
        try:
            return JSONResponse(await handle(read_message(await request.body() or b"{}")))
        except Refused as refusal:
            status = {"CAPACITY_REACHED": 503, "FACTORY_ERROR": 500, "EXECUTION_ERROR": 500}.get(refusal.code, 422)
            return JSONResponse({"detail": refusal.sentence}, status)

    return endpoint
