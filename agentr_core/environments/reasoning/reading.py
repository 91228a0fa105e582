"""The text, the answer and the token count of a finished reasoning episode."""

from __future__ import annotations

from agentr_core.environments.reasoning.grammar import Answers, final_answer
from agentr_core.types import Trajectory


def text_of(trajectory: Trajectory) -> str:
    """Return the assistant's whole turn: replies, with results between them."""
    return "".join(step.reply + step.observation for step in trajectory.steps)


def is_answered(trajectory: Trajectory) -> bool:
    """Return whether an episode ends with an answer tag."""
    return bool(trajectory.steps) and trajectory.steps[-1].action.startswith("<answer>")


def prediction_of(trajectory: Trajectory, answers: Answers = "plain") -> str:
    """Return the final answer of an episode: that of its answer tag, or without one the last box
    that the model wrote; the empty string if it has neither.
    """
    steps = trajectory.steps
    said = steps[-1].action if is_answered(trajectory) else "".join(step.reply for step in steps)
    return final_answer(said, answers)


def reasoning_tokens(trajectory: Trajectory) -> int | None:
    """Return the number of tokens that the model wrote, not counting results; None if a reply has
    no token ids.
    """
    counts = [len(step.token_ids) for step in trajectory.steps if step.reply]
    return sum(counts) if all(counts) else None
