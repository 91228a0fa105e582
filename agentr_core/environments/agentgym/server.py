"""A server that offers any environment under AgentGym's HTTP contract."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agentr_core.environment import Environment
from agentr_core.environments.agentgym.wire import WireFormat
from agentr_core.episodes.grading import grade_by_rule
from agentr_core.episodes.rollout import take_step
from agentr_core.errors import AgentrError, EnvironmentRefusal, EnvironmentUnavailable
from agentr_core.http_server import Guard
from agentr_core.types import Instance, Step, StopReason, Trajectory, Transition

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number of 64 bits in a request, which may be a string. The bound is there because a
number with thousands of digits could not even be printed.
"""
_NUMBER = TypeAdapter(Number)
MAX_ENVIRONMENTS = 1024


@dataclass(slots=True)
class Slot:
    """One environment of a client. `last_answer` is the last answer to a step or a reset, None
    before the first; `reward` is the reward of the episode so far.

    `instance_number` is the instance that a reset without a number begins. `episode` is what a
    grader is given at the end of an episode; None before the first reset.
    """

    env: Environment
    instance_number: int = 0
    is_closed: bool = False
    observation: str = ""
    last_answer: Any = None
    reward: float = 0.0
    episode: Trajectory | None = None
    last_used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def graded(self, action: str, transition: Transition) -> Transition:
        """Return the transition of an action, with the reward and success of the environment's
        grader, if it has one, where the episode ends. Raises as `grade_by_rule`.
        """
        env = self.env
        if env.grader is None or self.episode is None:
            return transition
        is_over = transition.terminated or transition.truncated
        step = Step(
            reply=env.reply_with(action),
            action=action,
            observation=transition.observation,
            reward=max(transition.reward, 0.0),
            terminated=is_over,
            success=transition.info["success"],
            disaster=transition.reward < 0,
        )
        self.episode = replace(self.episode, steps=(*self.episode.steps, step))
        if not is_over or step.disaster:
            return transition
        graded = grade_by_rule(env, self.episode)
        return transition._replace(reward=graded.reward, info={**transition.info, "success": graded.success})


class SlotPool:
    """The environments that clients have open, by id.

    Ids begin at a random number, so that an id from before a restart is unknown and refused.

    Args:
        make_env: returns a new environment.
        instances_by_number: the instances that can be asked for, by number.
        idle_s: seconds without use after which an environment is closed, once the next one is
            opened.
        max_slots: the largest number of environments open at once.
    """

    def __init__(
        self,
        make_env: Callable[[], Environment],
        wire: WireFormat,
        instances_by_number: Mapping[int, Instance],
        *,
        idle_s: float,
        max_slots: int = MAX_ENVIRONMENTS,
    ) -> None:
        self._make_env = make_env
        self._wire = wire
        self._instances_by_number = instances_by_number
        self._sorted_numbers = sorted(instances_by_number)
        self._idle_s = idle_s
        self._max_slots = max_slots
        self._num_opening = 0
        self._next_id = secrets.randbelow(2**40)
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
        last_used_before = time.monotonic() - self._idle_s
        with self._lock:
            idle_ids = [
                env_id
                for env_id, slot in self._slots.items()
                if slot.last_used < last_used_before and not slot.lock.locked()
            ]
            idle_slots = [self._slots.pop(env_id) for env_id in idle_ids]
        for slot in idle_slots:
            with slot.lock:
                slot.is_closed = True
                slot.env.close()
        with self._lock:
            if len(self._slots) + self._num_opening >= self._max_slots:
                raise EnvironmentUnavailable(
                    f"{self._max_slots} environments are open, and no more may be; close some, or raise "
                    "--max-environments"
                )
            self._num_opening += 1
            env_id = self._next_id
            self._next_id += 1
        try:
            number = body.get(self._wire.item_key) if self._wire.create_takes_item else None
            slot = Slot(self._make_env(), instance_number=number or 0)
            answer = self._wire.write_id(env_id)
            if self._wire.is_ready_at_create:
                try:
                    answer = self._reset(env_id, slot, self._sorted_numbers[env_id % len(self._sorted_numbers)])
                except BaseException:
                    slot.env.close()
                    raise
            with self._lock:
                self._slots[env_id] = slot
            return answer
        finally:
            with self._lock:
                self._num_opening -= 1

    def reset(self, body: Mapping[str, Any]) -> Any:
        """Begin an instance and return the answer. Raises `EnvironmentRefusal` for an unknown id or
        instance.
        """
        env_id = body[self._wire.id_key]
        number = body[self._wire.item_key]
        with self._locked(env_id) as slot:
            return self._reset(env_id, slot, slot.instance_number if number is None else number)

    def step(self, body: Mapping[str, Any]) -> Any:
        """Carry out an action and return the answer. Raises `EnvironmentRefusal` for an unknown id,
        and for an environment that was never reset.
        """
        env_id = body[self._wire.id_key]
        with self._locked(env_id) as slot:
            if slot.last_answer is None:
                raise EnvironmentRefusal(f"The id {env_id} was never reset.")
            action = self._wire.unwrap_action(body["action"])
            transition = slot.graded(action, take_step(slot.env, action))
            slot.last_answer = self._wire.write_step(transition, previous_reward=slot.reward)
            slot.observation, slot.reward = transition.observation, transition.reward
            return slot.last_answer

    def close(self, body: Mapping[str, Any]) -> bool:
        """Close an environment, and return whether there was one with that id."""
        with self._lock:
            slot = self._slots.pop(body[self._wire.id_key], None)
        if slot is None:
            return False
        with slot.lock:
            slot.is_closed = True
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
            if slot.is_closed:
                raise EnvironmentRefusal(f"The id {env_id} is not valid.")
            yield slot

    def _reset(self, env_id: int, slot: Slot, number: int) -> Any:
        instance = self._instances_by_number.get(number)
        if instance is None:
            raise EnvironmentRefusal(f"The {self._wire.item_key} {number} is not served.")
        slot.observation, slot.reward = slot.env.reset(instance), 0.0
        slot.episode = Trajectory.ended(instance, slot.observation, (), StopReason.STEP_LIMIT)
        slot.last_answer = self._wire.write_first_observation(env_id, slot.observation)
        return slot.last_answer


def number_instances(env: Environment, splits: Sequence[str]) -> dict[int, Instance]:
    """Return the instances of some splits, keyed by the number that clients ask for.

    The number is the instance's index if no two splits share an index, as in TextCraft; otherwise
    it is the instance's position in the splits one after the other. Raises `ConfigError` for an
    unknown split.
    """
    # A split that is named twice counts once: its own indices must not seem to be shared.
    instances = [instance for split in dict.fromkeys(splits) for instance in env.instances(split)]
    instances_by_index = {instance.index: instance for instance in instances}
    return instances_by_index if len(instances_by_index) == len(instances) else dict(enumerate(instances))


def app(
    make_env: Callable[[], Environment],
    wire: WireFormat,
    instances_by_number: Mapping[int, Instance],
    *,
    idle_s: float = 3600.0,
    max_slots: int = MAX_ENVIRONMENTS,
) -> Starlette:
    """Return the ASGI application, which closes its environments at shutdown. For the arguments see
    `SlotPool`.
    """
    pool = SlotPool(make_env, wire, instances_by_number, idle_s=idle_s, max_slots=max_slots)

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

    create_body = create_model("Create", id=(Number | None, None)) if wire.create_takes_item else create_model("Create")
    id_field: dict[str, Any] = {wire.id_key: (Number, ...)}
    reset_body = create_model("Reset", **(id_field | {wire.item_key: (Number | None, None)}))
    step_body = create_model("Step", **id_field, action=(str, ...))
    close_body = create_model("Close", **id_field)
    routes = [
        Route("/", alive),
        Route(f"{wire.prefix}/list_envs", list_envs),
        _get_route(wire, "/observation", lambda env_id: pool.slot(env_id).observation),
        _get_route(wire, "/detail", lambda env_id: pool.slot(env_id).last_answer),
        _post_route(wire, "/create", create_body, pool.create),
        _post_route(wire, "/reset", reset_body, pool.reset),
        _post_route(wire, "/step", step_body, pool.step),
        _post_route(wire, "/close", close_body, pool.close),
    ]
    return Starlette(lifespan=lifespan, middleware=[Middleware(Guard)], routes=routes)


def _post_route(
    wire: WireFormat, path: str, model: type[BaseModel], handle: Callable[[Mapping[str, Any]], Any]
) -> Route:
    """Return the route of a POST request whose body is a `model`."""

    async def endpoint(request: Request) -> Response:
        try:
            body = model.model_validate_json(await request.body() or b"{}").model_dump()
        except ValidationError as error:
            return _invalid_request(error)
        return await _respond(wire, lambda: handle(body))

    return Route(wire.prefix + path, endpoint, methods=["POST"])


def _get_route(wire: WireFormat, path: str, read_slot: Callable[[int], Any]) -> Route:
    """Return the route of a GET request about one environment."""

    async def endpoint(request: Request) -> Response:
        try:
            env_id = _NUMBER.validate_python(request.query_params.get(wire.id_key))
        except ValidationError as error:
            return _invalid_request(error)
        return await _respond(wire, lambda: read_slot(env_id))

    return Route(wire.prefix + path, endpoint)


def _invalid_request(error: ValidationError) -> Response:
    """Return the response to an invalid request. It says what is wrong but does not quote the
    request, which may be long or not text.
    """
    return JSONResponse({"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422)


async def _respond(wire: WireFormat, handle: Callable[[], Any]) -> Response:
    """Run `handle` in a thread and return its result as the response; for an error of the
    environment, an error in the style of the contract.
    """
    try:
        return JSONResponse(await run_in_threadpool(handle))
    except EnvironmentUnavailable as error:
        # Clients treat this status as temporary, and try again.
        return JSONResponse({"error": str(error)}, 503)
    except AgentrError as error:
        if wire.id_key == "id":
            return JSONResponse({"error": str(error)})
        return PlainTextResponse(f"Internal Server Error: {error}", 500)
