"""Grading of episodes, by rule or from a model's answer: at the end of a rollout, or again for a
recorded episode.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from agentr_core.environment import Environment, checked_flag, checked_number
from agentr_core.episodes.rollout import EpisodeTimer, Helper, call, diverged, repeat_step
from agentr_core.episodes.transcript import acts_in
from agentr_core.episodes.units import phase
from agentr_core.errors import IllTypedAnswer, ModelFault
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import Blocking, Grader
from agentr_core.replies import readable
from agentr_core.system import in_thread
from agentr_core.texts import abbreviate
from agentr_core.types import OUT_OF_ROOM, Answer, Grade, Grading, StopReason, Trajectory


class UnreadableGrade(ModelFault):
    """No grade can be read from a model's answer, which is in `answer`."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message, answer)
        self.answer = answer

    def __str__(self) -> str:
        return str(self.args[0])


async def graded(
    env: Environment, trajectory: Trajectory, ask: Helper, *, seed: int, session: str = ""
) -> tuple[Trajectory, Grading | None]:
    """Grade an episode with the environment's grader. Return the episode with the new reward,
    success and stop reason, and the grading.

    Return the episode unchanged and None if the environment has no grader, or the episode has no
    steps, ended in a disaster, or was cut off by the context, token or time limit. Raises what
    `grade` raises.
    """
    endless = trajectory.stop in (*OUT_OF_ROOM, StopReason.DISASTER)
    if env.grader is None or endless or not trajectory.steps:
        return trajectory, None
    grading = await grade(env.grader, trajectory, ask, seed=seed, session=session)
    # If the environment ended the episode, its stop reason becomes that of the grade.
    reward, success = grading.grade.reward, grading.grade.success
    stop = trajectory.stop
    if stop in (StopReason.SUCCESS, StopReason.FAILURE):
        stop = StopReason.SUCCESS if success else StopReason.FAILURE
    last = replace(trajectory.steps[-1], reward=reward, success=success)
    return replace(trajectory, steps=(*trajectory.steps[:-1], last), reward=reward, success=success, stop=stop), grading


# Unlike in `restore`, observations are not compared with the recorded ones: what is scored is what
# was done, and a corrected environment may well answer in other words.
async def scored_again(env: Environment, trajectory: Trajectory, ask: Helper, *, seed: int) -> Grading:
    """Return the grade that an environment gives a recorded episode now, beside the recorded one.

    With a grader it is as by `graded`, and the recorded grade if there is nothing to grade. Without
    one, the recorded actions are replayed, and the last reward and success flag count.

    Raises what `grade` raises, and `ReplayDiverged` or `ReplayDrifted` if a replayed step asks a
    model more questions than were recorded.
    """
    before = Grade(reward=trajectory.reward, success=trajectory.success)
    if env.grader is not None:
        again, grading = await graded(env, trajectory, ask, seed=seed)
        return grading or Grading(grade=Grade(reward=again.reward, success=again.success), before=before)

    def replay() -> Grade:
        # Where the environment can resume, only the last step is replayed: tools that were called
        # again might answer differently.
        steps = acts_in(trajectory.steps)
        prefix = steps[:-1] if env.has(Environment.resume) else ()
        if prefix:
            env.resume(trajectory.instance, prefix)
        else:
            env.reset(trajectory.instance)
        grade = Grade(reward=0.0, success=False)
        for step in steps[len(prefix) :]:
            env.hear(step.reply)
            _, reward, terminated, truncated, info = repeat_step(env, step.action, step.answers)
            if info.get("question") is not None:
                raise diverged(env, f"{step.action!r} asks a model more often than when it was recorded")
            grade = Grade(reward=max(reward, 0.0), success=info["success"] and reward >= 0)
            if terminated or truncated or reward < 0:
                break
        return grade

    return Grading(grade=await call(env, EpisodeTimer(), replay), before=before)


async def grade(grader: Grader, trajectory: Trajectory, ask: Helper, *, seed: int, session: str = "") -> Grading:
    """Return the grade of an episode: that of the grader's rule if it gives one, else the one read
    from a model's answer.

    Raises `UnreadableGrade` when no grade can be read from the answer (less its thoughts), or the
    answer was cut at its token limit and might have gone on to say the opposite; `IllTypedAnswer`
    when the grader's grade is malformed; and what `ask` raises. No fault becomes a reward.
    """
    before = Grade(reward=trajectory.reward, success=trajectory.success)
    with phase("grade"):
        rule = partial(grader.rule, trajectory)
        by_rule = await in_thread(rule) if isinstance(grader, Blocking) and grader.blocking else rule()
        if by_rule is not None:
            return Grading(grade=_checked(by_rule, trajectory), before=before)
        answer = await ask(grader.question(trajectory), seed=derive_seed(seed, "grade"), session=session)
        if answer.finish_reason == "length":
            raise UnreadableGrade(
                f"{trajectory.instance.key}: {abbreviate(answer.text)} was cut at the token limit, so it is no "
                f"grade; name another model of role {answer.role}, one that answers in a word",
                answer,
            )
        text = readable(answer)
        model_grade = None if text is None else grader.read(trajectory, text)
        if model_grade is None:
            raise UnreadableGrade(
                f"{trajectory.instance.key}: no grade can be read from {abbreviate(answer.text)}; "
                f"make the question clearer, or name another model of role {answer.role}",
                answer,
            )
        return Grading(grade=_checked(model_grade, trajectory), before=before, answer=answer)


def _checked(grade: Grade, trajectory: Trajectory) -> Grade:
    subject = f"the grade of {trajectory.instance.key}"
    if not isinstance(grade, Grade):
        raise IllTypedAnswer(f"{subject} is {abbreviate(grade)}; it must be a types.Grade")
    reward = checked_number(grade.reward, f"{subject}: the reward")
    if not 0 <= reward <= 1:
        raise IllTypedAnswer(f"{subject}: the reward is {reward!r}; a grader scales its rewards to [0, 1]")
    return Grade(reward=reward, success=checked_flag(grade.success, f"{subject}: success"))
