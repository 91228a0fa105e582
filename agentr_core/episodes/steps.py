"""One step: the outcome of a reply, and the time that it took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar

from agentr_core import answers
from agentr_core.episodes.transcript import Fits, droppable, fewest_dropped, windowed
from agentr_core.episodes.units import phase
from agentr_core.errors import ConfigError, EnvironmentTimeout, IllTypedAnswer, ModelFault, PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import Asking, Environment, Graded, Grader, Limited, Listening, Relaying, Undelivered
from agentr_core.system import started
from agentr_core.texts import cause
from agentr_core.types import (
    OUT_OF_ROOM,
    Answer,
    Generation,
    Grade,
    Grading,
    Instance,
    Question,
    Request,
    Step,
    StopReason,
    Trajectory,
    Transition,
)

# Environments that many episodes share, one episode at a time.


class SharedEnvironments:
    """A pool of environments to lend, each made when all others of its world are lent out. One that
    met an exception is closed and not lent again.

    `make` makes a new environment of a world, given the name that the world's instances use.
    """

    def __init__(self, make: Callable[[str], Environment]) -> None:
        self._make = make
        self._idle: dict[str, list[Environment]] = {}

    @asynccontextmanager
    async def lend(self, instance: Instance) -> AsyncIterator[Environment]:
        """Lend an environment of an instance's world for the block."""
        idle = self._idle.setdefault(instance.environment, [])
        with phase("environment start"):
            env = idle.pop() if idle else await asyncio.to_thread(self._make, instance.environment)
        try:
            yield env
        except BaseException as error:
            if isinstance(env, Relaying):
                env.release(f"its run had a fault: {cause(error)}" if isinstance(error, Exception) else "its run ended")
            env.close()
            raise
        if isinstance(env, Relaying):
            await asyncio.to_thread(env.release)
        idle.append(env)

    def close(self) -> None:
        """Close the environments that are not in use. Calling it twice is harmless."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


# Questions to models of other roles alongside an episode: for a grade after it, or by a step that
# cannot go on without an answer.


class Helper(Protocol):
    """A function that puts questions to the models of other roles."""

    def __call__(self, question: Question, *, seed: int, session: str) -> Awaitable[Answer]:
        """Return the answer. Raises as `ChatModel.generate` does."""
        ...


def steps_ask(env: Environment) -> bool:
    """Return whether steps of an environment may ask a model, as its options stand.

    An environment that asks only with some options says so in an attribute `asks_in_steps`.
    """
    return isinstance(env, Asking) and bool(getattr(env, "asks_in_steps", True))


async def no_helper(question: Question, *, seed: int, session: str) -> Answer:
    """Raise `ConfigError`: no model can be asked here."""
    raise ConfigError(f"the environment asks a model of role {question.role}, but no model can be asked here")


async def graded(
    env: Environment, trajectory: Trajectory, ask: Helper, *, seed: int, session: str = ""
) -> tuple[Trajectory, Grading | None]:
    """Return an episode with the reward that the environment's grader gives it, and the grade.

    The episode stays as it is, without a grade, if there is no grader, or no end to grade: no step,
    a disaster, or a limit that cut it off. Raises as `grade` does.
    """
    grader = env.grader if isinstance(env, Graded) else None
    endless = trajectory.stop in (*OUT_OF_ROOM, StopReason.DISASTER)
    if grader is None or endless or not trajectory.steps:
        return trajectory, None
    grading = await grade(grader, trajectory, ask, seed=seed, session=session)
    # If the environment ended the episode, its stop reason becomes that of the grade.
    reward, success = grading.grade.reward, grading.grade.success
    stop = trajectory.stop
    if stop in (StopReason.SUCCESS, StopReason.FAILURE):
        stop = StopReason.SUCCESS if success else StopReason.FAILURE
    last = replace(trajectory.steps[-1], reward=reward, success=success)
    return replace(trajectory, steps=(*trajectory.steps[:-1], last), reward=reward, success=success, stop=stop), grading


async def grade(grader: Grader, trajectory: Trajectory, ask: Helper, *, seed: int, session: str = "") -> Grading:
    """Return the grade of an episode: by rule if one decides, else read from a model's answer.

    Raises `ModelFault` when no grade can be read from what follows the answer's thoughts, or it was
    cut at its token limit and may have gone on to say the opposite; and as `ask` does: no fault
    becomes a reward.
    """
    before = Grade(reward=trajectory.reward, success=trajectory.success)
    with phase("grade"):
        ruled = grader.rule(trajectory)
        if ruled is not None:
            return Grading(grade=_checked(ruled, trajectory), before=before)
        answer = await ask(grader.question(trajectory), seed=derive_seed(seed, "grade"), session=session)
        if answer.finish_reason == "length":
            raise ModelFault(
                f"{trajectory.instance.key}: {answers.shown(answer.text)} was cut at the token limit, so it is no "
                f"grade; name another model of role {answer.role}, one that answers in a word"
            )
        said = answers.readable(answer)
        read = None if said is None else grader.read(trajectory, said)
        if read is None:
            raise ModelFault(
                f"{trajectory.instance.key}: no grade can be read from {answers.shown(answer.text)}; "
                f"make the question clearer, or name another model of role {answer.role}"
            )
        return Grading(grade=_checked(read, trajectory), before=before, answer=answer)


def _checked(grade: Grade, trajectory: Trajectory) -> Grade:
    what = f"the grade of {trajectory.instance.key}"
    if not isinstance(grade, Grade):
        raise IllTypedAnswer(f"{what} is {answers.shown(grade)}; it must be a types.Grade")
    reward = answers.number(grade.reward, f"{what}: the reward")
    if not 0 <= reward <= 1:
        raise IllTypedAnswer(f"{what}: the reward is {reward!r}; a grader scales its rewards to [0, 1]")
    return Grade(reward=reward, success=answers.flag(grade.success, f"{what}: success"))


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


# Replies of a model, drawn within the room of its context.

Ask = Callable[[Request], Awaitable[list[Generation]]]
"""Returns `request.n` replies. Raises `PromptTooLong` when this request, and not another of its
batch, is too long.
"""


async def draw_within(
    sample: Ask, request: Request, timer: EpisodeTimer, fits: Fits | None, *, least: int = 0
) -> tuple[list[Generation], int]:
    """Return the replies to a request, and how many of its oldest exchanges were left out to make
    it fit.

    Args:
        fits: None leaves nothing out.
        least: how many were left out for the previous reply; the number never falls.

    Raises `PromptTooLong` when there is no room for a reply even so.
    """
    most = 0 if fits is None else droppable(request.messages)
    dropped = 0 if fits is None else fewest_dropped(request.messages, fits, least=least)
    while True:
        try:
            shown = replace(request, messages=windowed(request.messages, dropped)) if dropped else request
            return await draw(sample, shown, timer), dropped
        except PromptTooLong:
            # A server may count more tokens than we do.
            if dropped >= most:
                raise
            dropped += 1


def read_through(outcome: Outcome, dropped: int) -> Outcome:
    """Return the outcome of a reply that was drawn from a conversation without its `dropped` oldest
    exchanges.
    """
    return replace(outcome, step=replace(outcome.step, dropped=dropped)) if dropped else outcome


async def draw(sample: Ask, request: Request, timer: EpisodeTimer) -> list[Generation]:
    """Return the replies to a request. Raises `ModelFault` when their number is not the one asked
    for.
    """
    with phase("generate"), timer.sampling():
        generations = await sample(request)
        if len(generations) != request.n:
            raise ModelFault(f"session {request.session}: {request.n} replies were asked for, {len(generations)} came")
        return generations
