"""Grading of episodes, by rule or from a model's answer: at the end of a rollout, or again for a
recorded episode.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from agentr_core.environment import Environment, checked_flag, checked_number
from agentr_core.episodes.rollout import EpisodeTimer, Helper, call_env, divergence_error, repeat_step
from agentr_core.episodes.transcript import without_summaries
from agentr_core.episodes.units import phase
from agentr_core.errors import ConfigError, IllTypedAnswer, ModelFault
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import Blocking, Grader
from agentr_core.replies import answer_text
from agentr_core.system import run_in_thread
from agentr_core.texts import abbreviate
from agentr_core.types import OUT_OF_ROOM, Answer, Grade, Grading, StopReason, Trajectory


class UnreadableGrade(ModelFault):
    """No grade can be read from a model's answer, which is in `answer`."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message, answer)
        self.answer = answer

    def __str__(self) -> str:
        return str(self.args[0])


async def grade_episode(
    env: Environment, trajectory: Trajectory, helper: Helper, *, seed: int, session: str = ""
) -> tuple[Trajectory, Grading | None]:
    """Grade an episode with the environment's grader. Return the episode with the new reward,
    success and stop reason, and the grading.

    Return the episode unchanged and None if the environment has no grader, or the episode has no
    steps, ended in a disaster, or was cut off by the context, token or time limit. Raises what
    `grade` raises.
    """
    was_cut_off = trajectory.stop in (*OUT_OF_ROOM, StopReason.DISASTER)
    if env.grader is None or was_cut_off or not trajectory.steps:
        return trajectory, None
    grading = await grade(env.grader, trajectory, helper, seed=seed, session=session)
    # If the environment ended the episode, its stop reason becomes that of the grade.
    reward, success = grading.grade.reward, grading.grade.success
    stop = trajectory.stop
    if stop in (StopReason.SUCCESS, StopReason.FAILURE):
        stop = StopReason.SUCCESS if success else StopReason.FAILURE
    last_step = replace(trajectory.steps[-1], reward=reward, success=success)
    return replace(
        trajectory, steps=(*trajectory.steps[:-1], last_step), reward=reward, success=success, stop=stop
    ), grading


def grade_by_rule(env: Environment, trajectory: Trajectory) -> Trajectory:
    """Return an episode with the reward and success of its environment's grader, where no model can
    be asked; unchanged as by `grade_episode`. Raises `ConfigError` if the grader has to ask one.
    """
    if env.grader is None or not trajectory.steps or trajectory.stop is StopReason.DISASTER:
        return trajectory
    grade = env.grader.rule(trajectory)
    if grade is None:
        raise ConfigError(
            f"the grader of {env.name} asks a model of role {env.grader.asks}, but none can be asked here"
        )
    return replace(trajectory, reward=grade.reward, success=grade.success)


# Unlike in `restore`, observations are not compared with the recorded ones: what is scored is what
# was done, and a corrected environment may well answer in other words.
async def regrade_episode(env: Environment, trajectory: Trajectory, helper: Helper, *, seed: int) -> Grading:
    """Return the grade that an environment gives a recorded episode now, beside the recorded one.

    With a grader it is as by `grade_episode`, and the recorded grade if there is nothing to grade.
    Without one, the recorded actions are replayed, and the last reward and success flag count.

    Raises what `grade` raises, and `ReplayDiverged` or `ReplayDrifted` if a replayed step asks a
    model more questions than were recorded.
    """
    recorded_grade = Grade(reward=trajectory.reward, success=trajectory.success)
    if env.grader is not None:
        regraded_trajectory, grading = await grade_episode(env, trajectory, helper, seed=seed)
        return grading or Grading(
            grade=Grade(reward=regraded_trajectory.reward, success=regraded_trajectory.success), before=recorded_grade
        )

    def replay() -> Grade:
        # Where the environment can resume, only the last step is replayed: tools that were called
        # again might answer differently.
        recorded_steps = without_summaries(trajectory.steps)
        prefix = recorded_steps[:-1] if env.has(Environment.resume) else ()
        if prefix:
            env.resume(trajectory.instance, prefix)
        else:
            env.reset(trajectory.instance)
        grade = Grade(reward=0.0, success=False)
        for step in recorded_steps[len(prefix) :]:
            env.hear(step.reply)
            _, reward, terminated, truncated, info = repeat_step(env, step.action, step.answers)
            if info.get("question") is not None:
                raise divergence_error(env, f"{step.action!r} asks a model more often than when it was recorded")
            grade = Grade(reward=max(reward, 0.0), success=info["success"] and reward >= 0)
            if terminated or truncated or reward < 0:
                break
        return grade

    return Grading(grade=await call_env(env, EpisodeTimer(), replay), before=recorded_grade)


async def grade(grader: Grader, trajectory: Trajectory, helper: Helper, *, seed: int, session: str = "") -> Grading:
    """Return the grade of an episode: that of the grader's rule if it gives one, else the one read
    from a model's answer.

    Raises `UnreadableGrade` when no grade can be read from the answer (less its thoughts), or the
    answer was cut at its token limit and might have gone on to say the opposite; `IllTypedAnswer`
    when the grader's grade is malformed; and what `helper` raises. No fault becomes a reward.
    """
    earlier_grade = Grade(reward=trajectory.reward, success=trajectory.success)
    with phase("grade"):
        apply_rule = partial(grader.rule, trajectory)
        rule_grade = (
            await run_in_thread(apply_rule) if isinstance(grader, Blocking) and grader.blocking else apply_rule()
        )
        if rule_grade is not None:
            return Grading(grade=_check_grade(rule_grade, trajectory), before=earlier_grade)
        answer = await helper(grader.question(trajectory), seed=derive_seed(seed, "grade"), session=session)
        if answer.finish_reason == "length":
            raise UnreadableGrade(
                f"{trajectory.instance.key}: {abbreviate(answer.text)} was cut at the token limit, so it is no "
                f"grade; name another model of role {answer.role}, one that answers in a word",
                answer,
            )
        text = answer_text(answer)
        model_grade = None if text is None else grader.read(trajectory, text)
        if model_grade is None:
            raise UnreadableGrade(
                f"{trajectory.instance.key}: no grade can be read from {abbreviate(answer.text)}; "
                f"make the question clearer, or name another model of role {answer.role}",
                answer,
            )
        return Grading(grade=_check_grade(model_grade, trajectory), before=earlier_grade, answer=answer)


def _check_grade(grade: Grade, trajectory: Trajectory) -> Grade:
    subject = f"the grade of {trajectory.instance.key}"
    if not isinstance(grade, Grade):
        raise IllTypedAnswer(f"{subject} is {abbreviate(grade)}; it must be a types.Grade")
    reward = checked_number(grade.reward, f"{subject}: the reward")
    if not 0 <= reward <= 1:
        raise IllTypedAnswer(f"{subject}: the reward is {reward!r}; a grader scales its rewards to [0, 1]")
    return Grade(reward=reward, success=checked_flag(grade.success, f"{subject}: success"))
