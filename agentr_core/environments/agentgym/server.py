"""A server that offers any environment under AgentGym's HTTP contract."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agentr_core.environment import Environment
from agentr_core.environments.agentgym.wire import Wire
from agentr_core.episodes.rollout import take_step
from agentr_core.errors import AgentrError, EnvironmentRefusal, EnvironmentUnavailable
from agentr_core.http_server import Guard
from agentr_core.types import Instance

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number of 64 bits in a request, which may be a string. The bound is there because a
number with thousands of digits could not even be printed.
"""
_NUMBER = TypeAdapter(Number)
MOST_ENVIRONMENTS = 1024


@dataclass(slots=True)
class Slot:
    """One environment of a client. `latest` is the last answer to a step or a reset, None before
    the first; `reward` is the reward of the episode so far.

    `number` is the instance that a reset without a number begins.
    """

    env: Environment
    number: int = 0
    closed: bool = False
    observation: str = ""
    latest: Any = None
    reward: float = 0.0
    last_used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class EnvironmentPool:
    """The environments that clients have open, by id.

    Ids begin at a random number, so that an id from before a restart is unknown and refused.

    Args:
        make: returns a new environment.
        numbers: the instances that can be asked for, by number.
        idle_s: seconds without use after which an environment is closed, once the next one is
            opened.
        limit: the largest number of environments open at once.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        wire: Wire,
        numbers: Mapping[int, Instance],
        *,
        idle_s: float,
        limit: int = MOST_ENVIRONMENTS,
    ) -> None:
        self._make = make
        self._wire = wire
        self._numbers = numbers
        self._order = sorted(numbers)
        self._idle_s = idle_s
        self._limit = limit
        self._opening = 0
        self._next = secrets.randbelow(2**40)
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()

    def ids(self) -> list[int]:
        """Return the ids of the open environments, sorted."""
        with self._lock:
            return sorted(self._slots)

    def create(self, body: Mapping[str, Any]) -> Any:
        """Open an environment and return the answer, after closing idle ones. Raises
        `EnvironmentUnavailable` if too many are open.
        """
        limit = time.monotonic() - self._idle_s
        with self._lock:
            idle = [env_id for env_id, slot in self._slots.items() if slot.last_used < limit and not slot.lock.locked()]
            idle_slots = [self._slots.pop(env_id) for env_id in idle]
        for slot in idle_slots:
            with slot.lock:
                slot.closed = True
                slot.env.close()
        with self._lock:
            if len(self._slots) + self._opening >= self._limit:
                raise EnvironmentUnavailable(
                    f"{self._limit} environments are open, and no more may be; close some, or raise --max-environments"
                )
            self._opening += 1
            env_id = self._next
            self._next += 1
        try:
            number = body.get(self._wire.item) if self._wire.item_at_create else None
            slot = Slot(self._make(), number=number or 0)
            answer = self._wire.write_id(env_id)
            if self._wire.created_ready:
                try:
                    answer = self._reset(env_id, slot, self._order[env_id % len(self._order)])
                except BaseException:
                    slot.env.close()
                    raise
            with self._lock:
                self._slots[env_id] = slot
            return answer
        finally:
            with self._lock:
                self._opening -= 1

    def reset(self, body: Mapping[str, Any]) -> Any:
        """Begin an instance and return the answer. Raises `EnvironmentRefusal` for an unknown id or
        instance.
        """
        env_id = body[self._wire.id_key]
        number = body[self._wire.item]
        with self._locked(env_id) as slot:
            return self._reset(env_id, slot, slot.number if number is None else number)

    def step(self, body: Mapping[str, Any]) -> Any:
        """Carry out an action and return the answer. Raises `EnvironmentRefusal` for an unknown id,
        and for an environment that was never reset.
        """
        env_id = body[self._wire.id_key]
        with self._locked(env_id) as slot:
            if slot.latest is None:
                raise EnvironmentRefusal(f"The id {env_id} was never reset.")
            transition = take_step(slot.env, self._wire.unwrap(body["action"]))
            slot.latest = self._wire.write_step(transition, before=slot.reward)
            slot.observation, slot.reward = transition.observation, transition.reward
            return slot.latest

    def close(self, body: Mapping[str, Any]) -> bool:
        """Close an environment, and return whether there was one with that id."""
        with self._lock:
            slot = self._slots.pop(body[self._wire.id_key], None)
        if slot is None:
            return False
        with slot.lock:
            slot.closed = True
            slot.env.close()
        return True

    def close_all(self) -> None:
        """Close all environments."""
        for env_id in self.ids():
            self.close({self._wire.id_key: env_id})

    def slot(self, env_id: int) -> Slot:
        """Return an open environment and mark it as used now. Raises `EnvironmentRefusal` for an
        unknown id.
        """
        with self._lock:
            slot = self._slots.get(env_id)
        if slot is None:
            raise EnvironmentRefusal(f"The id {env_id} is not valid.")
        slot.last_used = time.monotonic()
        return slot

    @contextmanager
    def _locked(self, env_id: int) -> Iterator[Slot]:
        """Lock an environment for the duration of the block. Raises `EnvironmentRefusal` if it is
        unknown or was just closed.
        """
        slot = self.slot(env_id)
        with slot.lock:
            if slot.closed:
                raise EnvironmentRefusal(f"The id {env_id} is not valid.")
            yield slot

    def _reset(self, env_id: int, slot: Slot, number: int) -> Any:
        instance = self._numbers.get(number)
        if instance is None:
            raise EnvironmentRefusal(f"The {self._wire.item} {number} is not served.")
        slot.observation, slot.reward = slot.env.reset(instance), 0.0
        slot.latest = self._wire.write_first(env_id, slot.observation)
        return slot.latest


def numbered(env: Environment, splits: Sequence[str]) -> dict[int, Instance]:
    """Return the instances of some splits, keyed by the number that clients ask for.

    The number is the instance's index if no two splits share an index, as in TextCraft; otherwise
    it is the instance's position in the splits one after the other. Raises `ConfigError` for an
    unknown split.
    """
    instances = [instance for split in splits for instance in env.instances(split)]
    by_index = {instance.index: instance for instance in instances}
    return by_index if len(by_index) == len(instances) else dict(enumerate(instances))


def app(
    make: Callable[[], Environment],
    wire: Wire,
    numbers: Mapping[int, Instance],
    *,
    idle_s: float = 3600.0,
    limit: int = MOST_ENVIRONMENTS,
) -> Starlette:
    """Return the ASGI application, which closes its environments at shutdown. For the arguments see
    `EnvironmentPool`.
    """
    pool = EnvironmentPool(make, wire, numbers, idle_s=idle_s, limit=limit)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await run_in_threadpool(pool.close_all)

    async def alive(request: Request) -> Response:
        return PlainTextResponse("ok")

    async def list_envs(request: Request) -> Response:
        return JSONResponse(pool.ids())

    create = create_model("Create", id=(Number | None, None)) if wire.item_at_create else create_model("Create")
    key: dict[str, Any] = {wire.id_key: (Number, ...)}
    reset = create_model("Reset", **(key | {wire.item: (Number | None, None)}))
    step = create_model("Step", **key, action=(str, ...))
    close = create_model("Close", **key)
    routes = [
        Route("/", alive),
        Route(f"{wire.prefix}/list_envs", list_envs),
        _get(wire, "/observation", lambda env_id: pool.slot(env_id).observation),
        _get(wire, "/detail", lambda env_id: pool.slot(env_id).latest),
        _post(wire, "/create", create, pool.create),
        _post(wire, "/reset", reset, pool.reset),
        _post(wire, "/step", step, pool.step),
        _post(wire, "/close", close, pool.close),
    ]
    return Starlette(lifespan=lifespan, middleware=[Middleware(Guard)], routes=routes)


def _post(wire: Wire, path: str, model: type[BaseModel], act: Callable[[Mapping[str, Any]], Any]) -> Route:
    """Return the route of a POST request whose body is a `model`."""

    async def endpoint(request: Request) -> Response:
        try:
            body = model.model_validate_json(await request.body() or b"{}").model_dump()
        except ValidationError as error:
            return _malformed(error)
        return await _answer(wire, lambda: act(body))

    return Route(wire.prefix + path, endpoint, methods=["POST"])


def _get(wire: Wire, path: str, look: Callable[[int], Any]) -> Route:
    """Return the route of a GET request about one environment."""

    async def endpoint(request: Request) -> Response:
        try:
            env_id = _NUMBER.validate_python(request.query_params.get(wire.id_key))
        except ValidationError as error:
            return _malformed(error)
        return await _answer(wire, lambda: look(env_id))

    return Route(wire.prefix + path, endpoint)


def _malformed(error: ValidationError) -> Response:
    """Return the response to an invalid request. It says what is wrong but does not quote the
    request, which may be long or not text.
    """
    return JSONResponse({"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422)


async def _answer(wire: Wire, act: Callable[[], Any]) -> Response:
    """Run `act` in a thread and return its result as the response; for an error of the environment,
    an error in the style of the contract.
    """
    try:
        return JSONResponse(await run_in_threadpool(act))
    except EnvironmentUnavailable as error:
        # Clients treat this status as temporary, and try again.
        return JSONResponse({"error": str(error)}, 503)
    except AgentrError as error:
        if wire.id_key == "id":
            return JSONResponse({"error": str(error)})
        return PlainTextResponse(f"Internal Server Error: {error}", 500)
