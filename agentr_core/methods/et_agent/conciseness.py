"""Whether an episode avoided redundant and idle calls, by the votes of a model.

Source of the vote: ET-Agent (arXiv 2601.06860), evaluation; the wording is ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentr_core.answers import after_thoughts
from agentr_core.environments.reasoning.reading import text_of
from agentr_core.types import Message, Question, Sampling, Trajectory

VOTE_TOKENS = 128
"""The most tokens of a vote."""
_SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_new_tokens=VOTE_TOKENS)
_VOTE = re.compile(r"<answer>\W*(yes|no)\b", re.IGNORECASE)
_QUESTION = """\
Somebody answered a question with the help of a search tool and Python. Were all calls of tools of use?

Question: {question}
Right answer: {golds}

What was written:
{text}

A call is redundant if it repeats an earlier one, if its result is not used later, or if it brings the answer no \
nearer. A call is idle if its result has nothing to do with what was asked. Whether the final answer is right does \
not matter. Is there a redundant or an idle call? Say <answer>yes</answer> or <answer>no</answer>."""


def vote(trajectory: Trajectory, golds: Sequence[str]) -> Question:
    """Return the question to the judge, which each vote asks with a seed of its own."""
    text = _QUESTION.format(
        question=trajectory.first_observation, golds=" or ".join(golds), text=text_of(trajectory).strip()
    )
    return Question(role="judge", messages=(Message(role="user", text=text),), sampling=_SAMPLING)


def read_vote(reply: str) -> bool | None:
    """Return whether a reply finds a redundant or idle call; None if it says neither yes nor no
    after its thoughts. The last answer counts.
    """
    said = _VOTE.findall(after_thoughts(reply) or "")
    return said[-1].lower() == "yes" if said else None


def is_concise(votes: Sequence[bool | None]) -> bool | None:
    """Return whether at least as many votes found no redundant or idle call as found one; votes
    that cannot be read do not count, and None if none can: published, such an episode is concise.
    """
    read = [vote for vote in votes if vote is not None]
    return 2 * sum(read) <= len(read) if read else None
