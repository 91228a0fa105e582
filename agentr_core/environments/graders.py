"""Graders for a world of your own and for `agentr regrade`: an exact or a numeric answer, a regular
expression, a command, and a rubric that a model reads.

A world names one in its attribute `grader`:

    grader = NumericAnswer(lambda instance: [str(SUMS[instance.index])])

Each is a `protocols.Grader`: its rewards are in [0, 1], and a grader that fails gives no reward.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from agentr_core.environments.reasoning.grammar import boxed
from agentr_core.environments.reasoning.scoring import exact_match
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.replies import after_thoughts, without_thought
from agentr_core.texts import quoted
from agentr_core.types import Grade, Instance, Message, Question, Sampling, Trajectory

GoldsReader = Callable[[Instance], Sequence[str]]
"""A function that returns the right answers of an instance, each of which is enough."""
AnswerReader = Callable[[Trajectory], str]
"""A function that returns the answer of an episode; empty if it gives none."""

_ANSWER_LINE = re.compile(
    r"^[^\w\n]*(?:the |my )?(?:final )?answer(?:(?: is)?[*_ \t]*:| is)[*_ \t]*(.+?)[*_ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![^\W_])(?<!\.)(?P<sign>-?)(?:(?P<whole>\d+) +(?=\d+/\d))?"
    r"(?P<top>(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?)(?:/(?P<bottom>\d+))?(?![\d/])"
)
_FRACTION = r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
_POWER_OF_TEN = r"10\s*(?:\^|\*\*)\s*\{?\s*(-?\d+)\s*\}?"
_PLAIN_NUMBERS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[\N{MINUS SIGN}\N{EN DASH}]", "-"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\[,!;: ]|~)(?=\d{3}(?!\d))", ","),
        (r"(?<![\d.,/])(\d{1,3})[^\S\n](?=\d{3}(?:[^\S\n]\d{3})*(?![\d/]))", r"\1,"),
        (rf"(?<=\d)\s*{_FRACTION}", r" \1\2/\3\4"),
        (_FRACTION, r"\1\2/\3\4"),
        (rf"(?<=\d)\s*(?:\\times|\\cdot|\N{{MULTIPLICATION SIGN}}|[x*])\s*{_POWER_OF_TEN}", r"e\1"),
        (rf"(?<![\w.]){_POWER_OF_TEN}", r"1e\1"),
        (r"-\s*\\?([$€£])\s*(?=[\d.])", r"\1-"),
    )
)
"""Other notations of numbers, and what they become: LaTeX, signs of Unicode, 1 000, -$5."""
_MAX_QUOTED_CHARS = 200


def last_answer(trajectory: Trajectory) -> str:
    r"""Return the answer in the last reply of an episode, its thoughts left out: the content of its
    last `\boxed{...}`, else of its last `<answer>` tag, else of its last line "Answer: ...", else
    the last action as the world parsed it. Empty if there is none.
    """
    if not trajectory.steps:
        return ""
    step = trajectory.steps[-1]
    reply = without_thought(step.reply)
    boxed_answer = boxed(reply)
    if boxed_answer is not None:
        return boxed_answer.strip()
    answers = _ANSWER_TAG.findall(reply) or _ANSWER_LINE.findall(reply) or [step.action]
    return str(answers[-1]).strip()


def answer_within(pattern: str) -> AnswerReader:
    """Return a function that finds the answer in the last reply of an episode, its thoughts left
    out: the first group of the last match of a regular expression, or the whole match if it has no
    group; empty without a match.

    Raises `ConfigError` if `pattern` is not a regular expression.
    """
    regex = _compile_pattern(pattern)

    def answer(trajectory: Trajectory) -> str:
        reply = without_thought(trajectory.steps[-1].reply) if trajectory.steps else ""
        matches = list(regex.finditer(reply))
        return (matches[-1][1 if regex.groups else 0] or "").strip() if matches else ""

    return answer


class _RuleGrader:
    """A grader that asks no model."""

    @property
    def asks(self) -> str | None:
        """None: the rule always decides."""
        return None

    def question(self, trajectory: Trajectory) -> Question:
        """Raise `EnvironmentFault`: there is nothing to ask."""
        raise EnvironmentFault(f"{type(self).__name__} asks no model")

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        """Return None: no reply was asked for."""
        return None


class ExactAnswer(_RuleGrader):
    """Reward 1 if the answer has the same words as a right answer, in the same order; else 0.

    Case, articles and punctuation without a meaning of its own do not matter; see `scoring.words`.
    """

    def __init__(self, golds: GoldsReader, answer: AnswerReader = last_answer) -> None:
        self._golds = golds
        self._answer = answer

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade."""
        answer, golds = self._answer(trajectory), self._golds(trajectory.instance)
        is_right = bool(answer) and exact_match(answer, golds)
        return Grade(reward=float(is_right), success=is_right)


class NumericAnswer(_RuleGrader):
    """Reward 1 if the last number of the answer equals the last number of a right answer, else 0.

    `tolerance` is the largest allowed difference as a share of the right number, or as it is if
    that is 0. A number may have commas or spaces (1,234 or 1 234), an exponent, or be a fraction
    (3/4).

    Raises `ConfigError` if the tolerance is negative, infinite or not a number.
    """

    def __init__(self, golds: GoldsReader, *, tolerance: float = 1e-6, answer: AnswerReader = last_answer) -> None:
        if not 0 <= tolerance < math.inf:
            raise ConfigError(f"tolerance is {tolerance}; it must be a number from 0")
        self._golds = golds
        self._tolerance = tolerance
        self._answer = answer

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade. Raises `EnvironmentFault` if a right answer has no number."""
        number = _last_number(self._answer(trajectory))
        is_right = False
        for gold in self._golds(trajectory.instance):
            gold_number = _last_number(gold)
            if gold_number is None:
                raise EnvironmentFault(f"{trajectory.instance.key}: the right answer {gold!r} has no number")
            if number is not None:
                is_right |= abs(number - gold_number) <= self._tolerance * (abs(gold_number) or 1.0)
        return Grade(reward=float(is_right), success=is_right)


class Pattern(_RuleGrader):
    """Reward 1 if a regular expression matches in the last step of an episode, else 0.

    `where` says which text is searched: the reply without its thoughts, the action, or the
    observation. Raises `ConfigError` for another `where`, or if `pattern` is not a regular
    expression.
    """

    def __init__(self, pattern: str, *, where: Literal["reply", "action", "observation"] = "reply") -> None:
        if where not in ("reply", "action", "observation"):
            raise ConfigError(f"where is {where!r}; it is reply, action or observation")
        self._pattern = _compile_pattern(pattern)
        self._where = where

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade; in an episode without a step, the empty text is searched."""
        text = ""
        if trajectory.steps:
            step = trajectory.steps[-1]
            text = without_thought(step.reply) if self._where == "reply" else getattr(step, self._where)
        is_right = self._pattern.search(text) is not None
        return Grade(reward=float(is_right), success=is_right)


class Command(_RuleGrader):
    """The reward that a shell command prints: a number from 0 to 1 on the last line of its output.
    It reads the episode from standard input, as the JSON of `episode_json`.

    A command that fails, takes longer than `seconds` or prints no such number raises
    `EnvironmentFault`. An episode succeeds if its reward is above `success_from`.
    """

    blocking = True

    def __init__(self, command: str, *, seconds: float = 60.0, success_from: float = 0.5) -> None:
        if not command.strip() or not seconds > 0:
            raise ConfigError("a command needs words, and more than 0 seconds")
        self._command = command
        self._seconds = seconds
        self._success_from = _checked_threshold("success_from", success_from)

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Run the command and return the grade. Raises `EnvironmentFault` if it gives no reward."""
        key = trajectory.instance.key
        # Its own session, so that everything that the command has started can be killed with it.
        process = subprocess.Popen(
            self._command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(json.dumps(episode_json(trajectory)), timeout=self._seconds)
        except subprocess.TimeoutExpired:
            raise EnvironmentFault(f"{key}: the command took more than {self._seconds:g} seconds") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if process.returncode:
            reason = quoted((errors.strip() or output.strip()).rpartition("\n")[2], _MAX_QUOTED_CHARS)
            raise EnvironmentFault(f"{key}: the command ended with status {process.returncode}: {reason}")
        last_line = output.strip().rpartition("\n")[2].strip()
        try:
            reward = float(last_line)
        except ValueError:
            reward = math.nan
        if not 0 <= reward <= 1:
            raise EnvironmentFault(
                f"{key}: the last line of the command's output is {quoted(last_line, _MAX_QUOTED_CHARS)}, "
                f"no number from 0 to 1"
            )
        return Grade(reward=reward, success=reward > self._success_from)


_SCORE_LINE = re.compile(
    r"^[^\w\n]*score[^\w\n]*:[^\w\n-]*(\d+(?:\.\d+)?)(?:\s*/\s*\d+)?[^\w\n]*$", re.IGNORECASE | re.MULTILINE
)
_RUBRIC_PROMPT = """\
You grade the work of an agent by a rubric.

The rubric:
{rubric}

The agent's task:
{task}

What it did, step by step:
{steps}

How well does this meet the rubric? Say why in at most three sentences. Then end with one line, a whole number \
from 0 (not at all) to {scale} (fully):
Score: NUMBER"""


class Rubric:
    """A grade that a model gives by a rubric. The reward is its score, from 0 to 1.

    The score is N in the last line `Score: N` after the thoughts of the model's reply, with N from
    0 to `scale`; the reward is N / `scale`. A reply without such a line gives no grade. `role` is
    the model's role in recipes; an episode succeeds if its reward is above `success_from`.
    """

    def __init__(
        self,
        rubric: str,
        *,
        role: str = "judge",
        scale: int = 10,
        success_from: float = 0.5,
        max_new_tokens: int = 1024,
    ) -> None:
        if not rubric.strip() or scale < 1:
            raise ConfigError("a rubric needs words, and a scale of at least 1")
        self._rubric = rubric.strip()
        self._role = role
        self._scale = scale
        self._success_from = _checked_threshold("success_from", success_from)
        self._sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)

    @property
    def asks(self) -> str | None:
        """The role of the model that reads the rubric."""
        return self._role

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return None, since a model has to be asked, but reward 0 for an episode without a
        step.
        """
        return None if trajectory.steps else Grade(reward=0.0, success=False)

    def question(self, trajectory: Trajectory) -> Question:
        """Return the question for the model: the rubric, the task and all steps, at temperature
        0.
        """
        steps = "\n".join(
            f"[{number}] Agent: {without_thought(step.reply)}\n[{number}] World: {step.observation}"
            for number, step in enumerate(trajectory.steps, start=1)
        )
        text = _RUBRIC_PROMPT.format(
            rubric=self._rubric, task=trajectory.first_observation, steps=steps, scale=self._scale
        )
        return Question(role=self._role, messages=(Message(role="user", text=text),), sampling=self._sampling)

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        """Return the grade in a reply; None if it has no score, or one above `scale`."""
        scores = _SCORE_LINE.findall(after_thoughts(reply) or "")
        if not scores or float(scores[-1]) > self._scale:
            return None
        reward = float(scores[-1]) / self._scale
        return Grade(reward=reward, success=reward > self._success_from)


def episode_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return an episode as plain data: `instance` (its key), `environment`, `split`, `index`,
    `first_observation`, `steps` (each with `reply`, `action`, `observation` and `reward`), and the
    `reward`, `success` and `stop` that it has.
    """
    instance = trajectory.instance
    return {
        "instance": instance.key,
        "environment": instance.environment,
        "split": instance.split,
        "index": instance.index,
        "first_observation": trajectory.first_observation,
        "steps": [
            {"reply": step.reply, "action": step.action, "observation": step.observation, "reward": step.reward}
            for step in trajectory.steps
        ],
        "reward": trajectory.reward,
        "success": trajectory.success,
        "stop": str(trajectory.stop),
    }


def _last_number(text: str) -> float | None:
    for pattern, replacement in _PLAIN_NUMBERS:
        text = pattern.sub(replacement, text)
    numbers = [match for match in _NUMBER.finditer(text) if match["top"]]
    if not numbers:
        return None
    number = numbers[-1]
    value, bottom = float(number["top"].replace(",", "")), float(number["bottom"] or 1)
    value = float(number["whole"] or 0) + (value / bottom if bottom else value)
    return (-value if number["sign"] else value) if math.isfinite(value) else None


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no regular expression: {error}") from None


def _checked_threshold(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 0 and below 1")
    return value
