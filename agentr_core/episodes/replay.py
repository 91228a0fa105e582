"""Replies and recorded steps, played again: to see where they lead, or to get back to a state."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core import answers
from agentr_core.episodes.steps import Outcome, act
from agentr_core.errors import ReplayDiverged, ReplayDrifted
from agentr_core.protocols.abilities import Resuming
from agentr_core.protocols.environment import Environment
from agentr_core.repeating import Repeatability, repeatability_of, repeats
from agentr_core.texts import quoted
from agentr_core.types import Instance, Step, Transition

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
        observation, _, terminated, truncated, _ = _repeated(env, step)
        if not repeats(observation, step.observation, promise):
            raise diverged(
                env,
                f"{instance.key}: observation {position} after {step.action!r} "
                f"{_differ(observation, step.observation)}",
            )
        if terminated or truncated:
            raise diverged(env, f"{instance.key}: the episode ended at step {position} of a replay")
    return seen


def _repeated(env: Environment, step: Step) -> Transition:
    """Return the transition of a recorded step's action, with the recorded answers of models."""
    transition = answers.repeated(env, step.action, step.answers)
    if transition.info.get("question") is not None:
        raise diverged(env, f"{step.action!r} asks a model more often than when it was recorded")
    return transition


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
