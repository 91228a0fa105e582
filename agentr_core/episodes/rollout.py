"""One episode: a model acts until the environment, or a limit, ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from agentr_core import answers
from agentr_core.episodes.asking import Helper, no_helper
from agentr_core.episodes.conversation import Fits
from agentr_core.episodes.drawing import Ask, draw_within, read_through
from agentr_core.episodes.replay import restore
from agentr_core.episodes.steps import EpisodeTimer, Reply, call, led_elsewhere, step_with
from agentr_core.episodes.transcript import ask_next
from agentr_core.episodes.units import phase
from agentr_core.errors import ConfigError, DataFault, PromptTooLong, Undelivered
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import Environment, Relaying, Stateful
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
        first_observation = await call(env, timer, lambda: restore(env, instance, prefix))
    replies: list[Reply] = []
    stop: StopReason | None = None
    undelivered = 0
    seen: Counter[tuple[str, str]] = Counter()
    while stop is None and len(replies) < max_steps:
        steps = [*prefix, *(reply.outcome.step for reply in replies)]
        drawn_with = derive_seed(seed, "step", len(steps))
        request = ask_next(env, first_observation, steps, sampling, seed=drawn_with, session=f"{instance.key}#{seed}")
        state = await call(env, timer, lambda: state_of(env)) if repeats else ""
        try:
            reply = await _reply(env, request, sample, timer, fits, helper, least=steps[-1].dropped if replies else 0)
        except Undelivered as lost:
            undelivered += 1
            first_observation, stop = _without(
                lost, replies, first_observation, goes_on=undelivered < _UNDELIVERED and (bool(replies) or not prefix)
            )
            continue
        if reply is None:
            stop = StopReason.CONTEXT_LIMIT
            break
        replies.append(reply)
        moment = state, reply.generation.text
        seen[moment] += 1
        stop = reply.outcome.stop or (StopReason.REPEATS if 0 < repeats <= seen[moment] else None)
    return _ended(instance, first_observation, prefix, replies, stop or StopReason.STEP_LIMIT, on_reply)


def _without(
    lost: Undelivered, replies: list[Reply], first_observation: str, *, goes_on: bool
) -> tuple[str, StopReason | None]:
    """Return the first observation and how the episode stops, if it does, after a reply that was
    not delivered; the reply before it leads to what the agent did instead.

    Raises the error as it is, so that the episode is played anew, if there is no reply left or the
    agent is not to go on.
    """
    observation, _, ended, *_ = lost.instead
    if not goes_on or (ended and not replies):
        raise lost
    if not replies:
        return observation, None
    replies[-1] = led_elsewhere(replies[-1], lost)
    return first_observation, replies[-1].outcome.stop


def _ended(
    instance: Instance,
    first_observation: str,
    prefix: Sequence[Step],
    replies: Sequence[Reply],
    stop: StopReason,
    on_reply: Callable[[Reply], None] | None,
) -> Trajectory:
    """Return the trajectory of an episode that is over, after telling of its replies."""
    if on_reply is not None:
        for reply in replies:
            on_reply(reply)
    steps = [*prefix, *(reply.outcome.step for reply in replies)]
    return Trajectory.ended(instance, first_observation, steps, stop)


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
