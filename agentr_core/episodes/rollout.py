"""One episode: a model acts until the environment, or a limit, ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentr_core import answers
from agentr_core.episodes.asking import Helper, no_helper
from agentr_core.episodes.conversation import Fits
from agentr_core.episodes.drawing import Ask, draw_within, read_through
from agentr_core.episodes.replay import restore
from agentr_core.episodes.steps import EpisodeTimer, Reply, call, led_elsewhere, step_with
from agentr_core.episodes.transcript import ask_next
from agentr_core.episodes.units import phase
from agentr_core.errors import ConfigError, DataFault, PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import Environment, Relaying, Stateful, Undelivered
from agentr_core.types import Instance, Request, Sampling, Step, StopReason, Trajectory

_UNDELIVERED = 100
"""Replies of an episode that may be lost on their way to an agent outside before it is given up."""


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
    """
    timer = timer or EpisodeTimer()
    if fits is not None and isinstance(env, Relaying):
        raise ConfigError("context: an agent outside sends the history that it wants read; leave window out")
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
            reply = await _reply(env, request, sample, timer, fits, helper, least=course.dropped())
        except Undelivered as lost:
            stop = course.without(lost)
            continue
        if reply is None:
            stop = StopReason.CONTEXT_LIMIT
            break
        times = course.add(reply, state)
        stop = reply.outcome.stop or (StopReason.REPEATS if 0 < repeats <= times else None)
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


async def _reply(
    env: Environment,
    request: Request,
    sample: Ask,
    timer: EpisodeTimer,
    fits: Fits | None,
    helper: Helper,
    *,
    least: int,
) -> Reply | None:
    """Return the reply to a request with its outcome; None if there is no room for a reply.

    `least` is how many exchanges were left out for the previous reply.
    """
    try:
        replies, dropped = await draw_within(sample, request, timer, fits, least=least)
    except PromptTooLong as error:
        if isinstance(env, Relaying):
            env.refuse(str(error))
        return None
    except DataFault as error:
        if not isinstance(env, Relaying):
            raise
        # The conversation is the agent's own: it is told, and may go on with another.
        await call(env, timer, partial(env.decline, str(error)))
    led_to = await step_with(env, timer, replies[0], helper, seed=request.seed, session=request.session)
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
