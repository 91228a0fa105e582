"""The grade of an answer: by rule if the rule decides, otherwise by asking a model whether the
answer means the same as a right one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from agentr_core.answers import after_thoughts
from agentr_core.environments.reasoning.grammar import Answers
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.reading import prediction_of
from agentr_core.environments.reasoning.verdicts import verdict
from agentr_core.types import Grade, Instance, Message, Question, Sampling, Trajectory

Judged = Literal["none", "math", "all"]
"""The wrong answers that a model is asked about: none, those in mathematics, or all."""

_JUDGE = "judge"
_SAMPLING = Sampling(temperature=0.0, max_new_tokens=256)
_QUESTION = """\
You compare an answer with the right one.

Question: {question}
Right answers, each of which will do:
{golds}
Given answer: {prediction}

Does the given answer mean the same as one of the right answers? Its wording and notation do not matter. \
Do not solve the question yourself. Say one word: Correct or Incorrect."""


class AnswerGrader:
    """A grader of the answer of an episode.

    Args:
        problem: returns the problem of an instance.
        judged: the answers that a model of role `judge` is asked about, if the rule finds them
            wrong.
        success_from: an answer succeeds if its correctness is above this, in [0, 1].
        answers: how answers are read and compared.
    """

    def __init__(
        self,
        problem: Callable[[Instance], Problem],
        *,
        judged: Judged,
        success_from: float,
        answers: Answers = "plain",
    ) -> None:
        self._problem = problem
        self._answers = answers
        self._judged = judged
        self._success_from = success_from

    @property
    def asks(self) -> str | None:
        """The role of the model that is asked whether answers are right, if one is."""
        return None if self._judged == "none" else _JUDGE

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade by rule; None for an answer that a model has to be asked about. Without
        an answer, no model is asked.
        """
        problem = self._problem(trajectory.instance)
        prediction = prediction_of(trajectory, self._answers)
        reward = problem.correctness(prediction, self._answers)
        success = reward > self._success_from
        asked = self._judged == "all" or self._judged == problem.domain
        return None if prediction and asked and not success else Grade(reward=reward, success=success)

    def question(self, trajectory: Trajectory) -> Question:
        """Return the question of whether an answer means the same as a right one, to be asked at
        temperature 0.
        """
        problem = self._problem(trajectory.instance)
        text = _QUESTION.format(
            question=problem.question,
            golds="\n".join(f"- {gold}" for gold in problem.golds),
            prediction=prediction_of(trajectory, self._answers),
        )
        return Question(role=_JUDGE, messages=(Message(role="user", text=text),), sampling=_SAMPLING)

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        """Return a grade with reward 1 for a reply that finds the answer right after its thoughts,
        or the rule's reward for one that finds it wrong; None if it says neither.
        """
        right = verdict(after_thoughts(reply) or "")
        if right is None:
            return None
        if right:
            return Grade(reward=1.0, success=True)
        problem = self._problem(trajectory.instance)
        prediction = prediction_of(trajectory, self._answers)
        return Grade(reward=problem.correctness(prediction, self._answers), success=False)
