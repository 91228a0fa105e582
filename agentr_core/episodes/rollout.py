"""One episode: a model acts until the environment, or a limit, ends it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from agentr_core import answers
from agentr_core.episodes.steps import (
    Ask,
    EpisodeTimer,
    Helper,
    Outcome,
    Reply,
    act,
    call,
    draw_within,
    led_elsewhere,
    no_helper,
    read_through,
    step_with,
)
from agentr_core.episodes.transcript import Fits, TokensOf, ask_next, transcript_of
from agentr_core.episodes.units import phase
from agentr_core.errors import ConfigError, DataFault, PromptTooLong, ReplayDiverged, ReplayDrifted
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import (
    Environment,
    Relaying,
    Repeatability,
    Resuming,
    Stateful,
    Undelivered,
    repeatability_of,
    repeats,
)
from agentr_core.texts import quoted
from agentr_core.types import (
    NO_LIMITS,
    Answer,
    EpisodeLimits,
    Generation,
    Instance,
    Message,
    Question,
    Request,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)

# Replies and recorded steps, played again: to see where they lead, or to get back to a state.

_QUOTED = 120
"""The most characters of an observation in an error."""


def play(
    env: Environment, instance: Instance, replies: Sequence[str], *, recorded: Sequence[Step] = ()
) -> tuple[str, tuple[Outcome, ...]]:
    """Return the first observation and the live outcomes of given replies, up to the one that ends
    the episode.

    The outcomes may differ from recorded ones: this is how a spliced path is verified. Of the first
    replies, which are those of `recorded` steps, models that the world asks give the recorded
    answers; raises `ConfigError` when it asks in others.
    """
    first_observation = answers.reset(env, instance)
    outcomes: list[Outcome] = []
    for position, reply in enumerate(replies):
        said = recorded[position].answers if position < len(recorded) else ()
        outcomes.append(act(env, reply, said=said))
        if outcomes[-1].stop is not None:
            break
    return first_observation, tuple(outcomes)


def restore(env: Environment, instance: Instance, steps: Sequence[Step], *, first_observation: str = "") -> str:
    """Put the environment into the state after recorded steps by replaying their actions; return
    the first observation.

    Observations are compared as strictly as the environment promises to repeat itself. If one
    differs, or the episode ends on the way, this raises `ReplayDiverged` or, for an environment
    that does not promise to repeat itself to the letter, `ReplayDrifted`, which is transient. An
    empty `first_observation` is not compared. An environment that is `Resuming` is given the steps,
    and nothing is replayed.
    """
    promise = repeatability_of(env)
    replayed = () if isinstance(env, Resuming) else steps
    seen = answers.resume(env, instance, steps) if isinstance(env, Resuming) else answers.reset(env, instance)
    if first_observation and not repeats(seen, first_observation, promise):
        raise diverged(env, f"{instance.key}: first observation {_differ(seen, first_observation)}")
    for position, step in enumerate(replayed):
        # With the recorded answers of models.
        transition = answers.repeated(env, step.action, step.answers)
        if transition.info.get("question") is not None:
            raise diverged(env, f"{step.action!r} asks a model more often than when it was recorded")
        observation, _, terminated, truncated, _ = transition
        if not repeats(observation, step.observation, promise):
            raise diverged(
                env,
                f"{instance.key}: observation {position} after {step.action!r} "
                f"{_differ(observation, step.observation)}",
            )
        if terminated or truncated:
            raise diverged(env, f"{instance.key}: the episode ended at step {position} of a replay")
    return seen


def diverged(env: Environment, what: str) -> ReplayDiverged:
    """Return the error of a replay that led elsewhere; it is transient unless the environment
    promises to repeat itself to the letter.
    """
    if repeatability_of(env) is Repeatability.EXACT:
        return ReplayDiverged(
            f"{what}; the environment is not deterministic, or its data or version changed since the recording"
        )
    return ReplayDrifted(f"{what}; {env.name} does not promise to repeat itself to the letter")


def _differ(seen: str, recorded: str) -> str:
    return f"was recorded as {quoted(recorded, _QUOTED)} and is now {quoted(seen, _QUOTED)}"


_UNDELIVERED = 100
"""Replies of an episode that may be lost on their way to an agent outside before it is given up."""
T = TypeVar("T")


async def episode(
    instance: Instance,
    env: Environment,
    sample: Ask,
    *,
    max_steps: int,
    sampling: Sampling,
    seed: int,
    prefix: Sequence[Step] = (),
    repeats: int = 0,
    fits: Fits | None = None,
    on_reply: Callable[[Reply], None] | None = None,
    timer: EpisodeTimer | None = None,
    helper: Helper = no_helper,
    limits: EpisodeLimits = NO_LIMITS,
    tokens_of: TokensOf | None = None,
) -> Trajectory:
    """Return the episode the model plays after `prefix`, whose steps come first in the trajectory.

    Args:
        max_steps: the most replies of the model; those of the prefix are not counted.
        repeats: end the episode once the model has given one reply in one state this many times; 0
            never does. Any other number needs a `Stateful` environment.
        seed: reply number i of the model is drawn with seed `derive_seed(seed, "step", len(prefix)
            + i)`.
        prefix: recorded steps to replay first; raises `ReplayDiverged` if they lead elsewhere.
        fits: if given, a conversation that does not fit is read through a window; without it the
            episode ends.
        on_reply: is called for each reply of the model once the episode is over. A reply that an
            agent outside did not get is none.
        helper: answers the questions of steps to models of other roles.
        limits: the most tokens, those of the prefix included, and the most seconds.
        tokens_of: counts tokens; needed if these are limited.
    """
    bounds, timer = _Bounds(env, limits, tokens_of, fits), timer or EpisodeTimer()
    with phase("restore" if prefix else "reset"):
        course = _Course(await call(env, timer, lambda: restore(env, instance, prefix)), prefix)
    session = f"{instance.key}#{seed}"
    stop: StopReason | None = None
    while stop is None and len(course.replies) < max_steps:
        steps = course.steps()
        drawn_with = derive_seed(seed, "step", len(steps))
        request = ask_next(env, course.first_observation, steps, sampling, seed=drawn_with, session=session)
        state = await call(env, timer, lambda: state_of(env)) if repeats else ""
        try:
            request = bounds.within(request, course.first_observation)
            reply = await _reply(env, request, sample, timer, bounds, helper, least=course.dropped())
        except Undelivered as lost:
            stop = course.without(lost)
            continue
        except _CutOff as cut:
            stop = cut.tell(env)
            continue
        times = course.add(reply, state)
        stop = _end(reply, request, sampling) or (StopReason.REPEATS if 0 < repeats <= times else None)
    course.tell(on_reply)
    return Trajectory.ended(instance, course.first_observation, course.steps(), stop or StopReason.STEP_LIMIT)


@dataclass(slots=True)
class _Course:
    """An episode so far: its first observation, the recorded steps, and the replies of the
    model.
    """

    first_observation: str
    prefix: Sequence[Step]
    replies: list[Reply] = field(default_factory=list)
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    undelivered: int = 0

    def steps(self) -> list[Step]:
        """Return all steps."""
        return [*self.prefix, *(reply.outcome.step for reply in self.replies)]

    def dropped(self) -> int:
        """Return how many exchanges were left out for the last reply."""
        return self.replies[-1].outcome.step.dropped if self.replies else 0

    def add(self, reply: Reply, state: str) -> int:
        """Add a reply, and return how often it was given in its state."""
        self.replies.append(reply)
        moment = state, reply.generation.text
        self.seen[moment] += 1
        return self.seen[moment]

    def without(self, lost: Undelivered) -> StopReason | None:
        """Go on with what an agent did without a reply, and return how the episode stops, if it
        does: the step before leads there.

        Raises the error as it is, so that the episode is played anew, if no reply of the model is
        left that could lead there, or too many were lost.
        """
        self.undelivered += 1
        ended = lost.instead.terminated
        if self.undelivered > _UNDELIVERED or (not self.replies and (self.prefix or ended)):
            raise lost
        if self.replies:
            self.replies[-1] = led_elsewhere(self.replies[-1], lost)
            return self.replies[-1].outcome.stop
        self.first_observation = lost.instead.observation
        return None

    def tell(self, on_reply: Callable[[Reply], None] | None) -> None:
        """Call a function for each reply."""
        if on_reply is not None:
            for reply in self.replies:
                on_reply(reply)


class _CutOff(Exception):
    """An episode can have no further reply; `stop` is the reason."""

    def __init__(self, stop: StopReason, why: str) -> None:
        super().__init__(why)
        self.stop = stop

    def tell(self, env: Environment) -> StopReason:
        """Return the reason, after an agent outside was told."""
        if isinstance(env, Relaying):
            env.refuse(str(self))
        return self.stop


class _Bounds:
    """The bounds of an episode: its window, its tokens, and its time, which begins now.

    Only waiting for models is given up when the time is over: a call of the environment may go on
    in a thread, and the next episode needs the environment.
    """

    def __init__(self, env: Environment, limits: EpisodeLimits, tokens_of: TokensOf | None, fits: Fits | None) -> None:
        if isinstance(env, Relaying) and fits is not None:
            raise ConfigError("context: an agent outside sends the history that it wants read; leave window out")
        if isinstance(env, Relaying) and limits.tokens:
            raise ConfigError("max_episode_tokens: an agent outside has conversations of its own; leave it out")
        self.fits = fits
        self._env, self._limits, self._tokens_of = env, limits, tokens_of
        self._ends = asyncio.get_running_loop().time() + limits.seconds if limits.seconds else None
        self._opening: int | None = None

    def within(self, request: Request, first_observation: str) -> Request:
        """Return a request for a reply with no more tokens than are left. Raises `_CutOff` if none
        are, or the time is over.
        """
        self._check_time()
        if not self._limits.tokens:
            return request
        if self._opening is None:
            self._opening = self._count(transcript_of(self._env).prompt(self._env, first_observation, ()))
        left = self._limits.tokens - (self._count(request.messages) - self._opening)
        if left < 1:
            raise _CutOff(StopReason.TOKEN_LIMIT, f"the episode has had its {self._limits.tokens:,} tokens")
        sampling = request.sampling
        return replace(request, sampling=replace(sampling, max_new_tokens=min(left, sampling.max_new_tokens)))

    def sampling(self, sample: Ask) -> Ask:
        """Return a sampler that raises `_CutOff` when the time is over."""

        async def in_time(request: Request) -> list[Generation]:
            return await self._in_time(sample(request))

        return in_time

    def helping(self, helper: Helper) -> Helper:
        """Return a helper that raises `_CutOff` when the time is over."""

        async def in_time(question: Question, *, seed: int, session: str) -> Answer:
            return await self._in_time(helper(question, seed=seed, session=session))

        return in_time

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._ends) as waiting:
                return await work
        except TimeoutError:
            if waiting.expired():
                self._check_time()
            raise

    def _check_time(self) -> None:
        if self._ends is not None and asyncio.get_running_loop().time() >= self._ends:
            raise _CutOff(StopReason.TIME_LIMIT, f"the episode has had its {self._limits.seconds:g} seconds")

    def _count(self, messages: tuple[Message, ...]) -> int:
        if self._tokens_of is None:
            raise ConfigError("max_episode_tokens: nothing counts the tokens here; leave it out")
        return self._tokens_of(messages)


def _end(reply: Reply, request: Request, sampling: Sampling) -> StopReason | None:
    """Return how a reply ends the episode, if it does. What fails because it was cut at the last
    token of the episode ends by that limit.
    """
    stop, capped = reply.outcome.stop, request.sampling.max_new_tokens < sampling.max_new_tokens
    cut = capped and reply.generation.finish_reason == "length"
    return StopReason.TOKEN_LIMIT if cut and stop is StopReason.FAILURE else stop


async def _reply(
    env: Environment,
    request: Request,
    sample: Ask,
    timer: EpisodeTimer,
    bounds: _Bounds,
    helper: Helper,
    *,
    least: int,
) -> Reply:
    """Return the reply to a request with its outcome. Raises `_CutOff` if there is no room for one.

    `least` is how many exchanges were left out for the previous reply.
    """
    try:
        replies, dropped = await draw_within(bounds.sampling(sample), request, timer, bounds.fits, least=least)
    except PromptTooLong as error:
        raise _CutOff(StopReason.CONTEXT_LIMIT, str(error)) from None
    except DataFault as error:
        if not isinstance(env, Relaying):
            raise
        # The conversation is the agent's own: it is told, and may go on with another.
        await call(env, timer, partial(env.decline, str(error)))
    led_to = await step_with(env, timer, replies[0], bounds.helping(helper), seed=request.seed, session=request.session)
    return Reply(seed=request.seed, generation=replies[0], outcome=read_through(led_to, dropped))


def state_of(env: Environment) -> str:
    """Return the current state of an environment as a text. Raises `ConfigError` if the environment
    does not report it.
    """
    return answers.text(stateful(env).state(), f"{env.name}: its state")


def stateful(env: Environment, setting: str = "repeats") -> Stateful:
    """Return an environment that tells its state. Raises `ConfigError`, which names the setting
    that needs it, if this one does not.
    """
    if not isinstance(env, Stateful):
        raise ConfigError(f"environment {env.name} does not tell its state; leave {setting} out")
    return env
