"""Replays of recorded steps: what happens now, and where it differs from the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentr_core.episodes.replay import diverged
from agentr_core.episodes.steps import Outcome
from agentr_core.protocols.environment import Environment
from agentr_core.repeating import Repeatability, repeatability_of, repeats
from agentr_core.texts import quoted
from agentr_core.types import PathPair, Step

_QUOTED = 80
"""The most characters of an action or an observation that a message quotes."""


def live(recorded: Step, outcome: Outcome) -> Step:
    """Return a step as it happened now, with the reply, its tokens and its finish reason as
    recorded.
    """
    return replace(
        outcome.step,
        token_ids=recorded.token_ids,
        logprobs=recorded.logprobs,
        finish_reason=recorded.finish_reason,
        tokenizer=recorded.tokenizer,
    )


def check_replay(env: Environment, pair: PathPair, first_observation: str, outcomes: Sequence[Outcome]) -> None:
    """Raise `ReplayDiverged` if the kept steps of a bad path no longer give the recorded
    observations, compared as strictly as the environment promises to repeat itself.
    """
    promise = repeatability_of(env)
    bad = pair.bad.trajectory
    seen = [first_observation, *(outcome.step.observation for outcome in outcomes)]
    known = [bad.first_observation, *(step.observation for step in bad.steps)]
    for number, (now, then) in enumerate(zip(seen, known, strict=False)):
        # A world that promises nothing may begin with another text; a sample keeps the text that
        # its steps followed.
        free = number == 0 and promise is Repeatability.NEVER
        if not (free or repeats(now, then, promise)):
            raise diverged(
                env,
                f"{bad.instance.key}, leaf {pair.bad.leaf} of tree {pair.bad.tree_id}: after {number} steps the "
                f"recording has {quoted(then, _QUOTED)} and the replay {quoted(now, _QUOTED)}",
            )


def divergence(recorded: Sequence[Step], outcomes: Sequence[Outcome], start: int) -> str:
    """Return a message that says where the live observations went wrong: at the first invalid
    action, or else at the first difference.
    """
    differing = [
        (position, outcome)
        for position, (step, outcome) in enumerate(zip(recorded, outcomes, strict=False))
        if position >= start and outcome.step.observation != step.observation
    ]
    if not differing:
        return "all observations are as recorded"
    position, outcome = next((d for d in differing if d[1].step.valid is False), differing[0])
    now, then = outcome.step.observation, recorded[position].observation
    return f"{at(position, outcome.step)} gave {quoted(now, _QUOTED)}, recorded was {quoted(then, _QUOTED)}"


def at(position: int, step: Step) -> str:
    """Return the name of a step for error messages."""
    return f"step {position} ({quoted(step.action, _QUOTED)})"
