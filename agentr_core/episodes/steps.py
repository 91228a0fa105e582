"""One step: the outcome of a reply, and the time that it took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TypeVar

from agentr_core import answers
from agentr_core.episodes.asking import Helper, no_helper
from agentr_core.episodes.units import phase
from agentr_core.errors import EnvironmentTimeout
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols.abilities import Limited, Listening, Relaying, Undelivered
from agentr_core.protocols.environment import Environment
from agentr_core.threads import started
from agentr_core.types import Answer, Generation, Step, StopReason, Transition

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one reply. `stop` is None while the episode goes on."""

    step: Step
    stop: StopReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply drawn with `seed`, and its outcome."""

    seed: int
    generation: Generation
    outcome: Outcome


@dataclass(slots=True)
class EpisodeTimer:
    """Seconds spent in environment calls and seconds spent waiting for replies, summed over all
    calls that were given this timer.
    """

    environment_seconds: float = 0.0
    sampling_seconds: float = 0.0

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Count the time of the block as environment time."""
        start = perf_counter()
        try:
            yield
        finally:
            self.environment_seconds += perf_counter() - start

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the time of the block as waiting for the model."""
        start = perf_counter()
        try:
            yield
        finally:
            self.sampling_seconds += perf_counter() - start


def act(env: Environment, reply: str, *, generation: Generation | None = None, said: Sequence[Answer] = ()) -> Outcome:
    """Return the outcome of a reply in the current state of the environment.

    `generation` says how the reply was sampled, and `said` are recorded answers to what its step
    asks of models. Raises `IllTypedAnswer` for anything that is not as `Transition` says, and
    `ConfigError` if the step asks for more.
    """
    action = _action_in(env, reply)
    return _outcome(reply, action, answers.step(env, action, said), generation, said)


def _action_in(env: Environment, reply: str) -> str:
    """Return the action in a reply, after the environment has heard the reply if it listens."""
    action = answers.action_in(env, reply)
    if isinstance(env, Listening):
        env.hear(reply)
    return action


def _outcome(
    reply: str, action: str, transition: Transition, generation: Generation | None, said: Sequence[Answer] = ()
) -> Outcome:
    """Return the outcome of a step that is done.

    A negative reward is a disaster: the step counts as reward 0 and ends the episode.
    """
    observation, reward, terminated, truncated, info = transition
    disaster = reward < 0
    success = info["success"] and not disaster
    step = Step(
        reply=reply,
        action=action,
        observation=observation,
        reward=0.0 if disaster else reward,
        matched=info.get("matched"),
        valid=info.get("valid"),
        terminated=terminated or truncated,
        success=success,
        disaster=disaster,
        token_ids=generation.token_ids if generation else (),
        logprobs=generation.logprobs if generation else None,
        finish_reason=generation.finish_reason if generation else None,
        tokenizer=generation.tokenizer if generation else None,
        tool_calls=info["tool_calls"],
        answers=tuple(said),
    )
    stop: StopReason | None
    if disaster:
        stop = StopReason.DISASTER
    elif terminated:
        stop = StopReason.SUCCESS if success else StopReason.FAILURE
    else:
        stop = StopReason.STEP_LIMIT if truncated else None
    return Outcome(step=step, stop=stop)


def led_elsewhere(reply: Reply, lost: Undelivered) -> Reply:
    """Return a reply with where it led to after all, since the one after it was not delivered."""
    step = reply.outcome.step
    transition = answers.transition(lost.instead, "what an agent did without a reply")
    return replace(reply, outcome=_outcome(step.reply, step.action, transition, reply.generation, step.answers))


async def step_with(
    env: Environment,
    timer: EpisodeTimer,
    generation: Generation | str,
    helper: Helper = no_helper,
    *,
    seed: int = 0,
    session: str = "",
) -> Outcome:
    """Return the outcome of a generation, or of a reply that was not sampled, in the current state
    of the environment.

    `helper` answers the questions of the step; question number i has seed `derive_seed(seed, "ask",
    i)`.
    """
    said: list[Answer] = []
    reply, drawn = (generation, None) if isinstance(generation, str) else (generation.text, generation)
    with phase("step"):
        action = _action_in(env, reply)
        if drawn is not None and isinstance(env, Relaying):
            env.relay(drawn)
        transition = await call(env, timer, partial(answers.begun, env, action))
        while (question := transition.info.get("question")) is not None:
            with phase("ask"), timer.sampling():
                said.append(await helper(question, seed=derive_seed(seed, "ask", len(said)), session=session))
            transition = await call(
                env, timer, partial(answers.resumed, env, question, answers.readable(said[-1]) or "")
            )
        return _outcome(reply, action, transition, drawn, said)


async def call(env: Environment, timer: EpisodeTimer, function: Callable[[], T]) -> T:
    """Return the result of a function that uses the environment, run in a thread of its own if the
    environment blocks.

    Shared threads are few: a slow answer would hold up other episodes, and the call that lets one
    waiting for an outside agent go on might never get a thread. Raises `EnvironmentTimeout` if the
    call takes longer than the environment allows; its thread may then go on, with nobody to wait
    for it.
    """

    def timed() -> T:
        with timer.environment():
            return function()

    if not env.blocking:
        return timed()
    limit = env.time_limit if isinstance(env, Limited) else None
    try:
        async with asyncio.timeout(limit) as waiting:
            # Without a limit the end of the process waits for the call: an environment that is
            # closed during one may release what it holds only after it.
            return await asyncio.wrap_future(started(timed, name=env.name, daemon=limit is not None))
    except TimeoutError:
        if not waiting.expired():
            raise
        raise EnvironmentTimeout(f"{env.name} gave no answer within {limit:g} seconds, its time_limit") from None
