"""Questions to models of other roles alongside an episode: for a grade after it, or by a step that
cannot go on without an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from agentr_core import answers
from agentr_core.episodes.units import phase
from agentr_core.errors import ConfigError, IllTypedAnswer, ModelFault
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols.abilities import Asking, Graded, Grader
from agentr_core.protocols.environment import Environment
from agentr_core.types import OUT_OF_ROOM, Answer, Grade, Grading, Question, StopReason, Trajectory


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
    return with_grade(trajectory, grading), grading


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


def with_grade(trajectory: Trajectory, grading: Grading) -> Trajectory:
    """Return a trajectory with the reward and success of its grade, its last step included.

    If the environment ended the episode, the stop reason becomes that of the grade.
    """
    reward, success = grading.grade.reward, grading.grade.success
    stop = trajectory.stop
    if stop in (StopReason.SUCCESS, StopReason.FAILURE):
        stop = StopReason.SUCCESS if success else StopReason.FAILURE
    last = replace(trajectory.steps[-1], reward=reward, success=success)
    return replace(trajectory, steps=(*trajectory.steps[:-1], last), reward=reward, success=success, stop=stop)


def _checked(grade: Grade, trajectory: Trajectory) -> Grade:
    what = f"the grade of {trajectory.instance.key}"
    if not isinstance(grade, Grade):
        raise IllTypedAnswer(f"{what} is {answers.shown(grade)}; it must be a types.Grade")
    reward = answers.number(grade.reward, f"{what}: the reward")
    if not 0 <= reward <= 1:
        raise IllTypedAnswer(f"{what}: the reward is {reward!r}; a grader scales its rewards to [0, 1]")
    return Grade(reward=reward, success=answers.flag(grade.success, f"{what}: success"))
