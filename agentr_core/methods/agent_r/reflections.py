"""The sentences with which an agent turns back from a mistake. Source: Agent-R section 3.2 (themes;
own wording).
"""

from __future__ import annotations

import random

REFLECTIONS = (
    "That was a mistake; let me choose another way.",
    "My last steps do not lead to the goal; I must rethink them.",
    "Something went wrong here; I will go back to what the task asks.",
    "This approach does not work; I need a different one.",
    "I took a wrong turn and should correct it now.",
    "My decision was wrong; let me look at the task again.",
    "That action did not help; I have to change my plan.",
    "I see the error now and will fix it.",
    "I overlooked something; let me deal with it first.",
    "My judgement was off; I should reconsider the next step.",
    "The result shows that I was wrong; I will try again with care.",
    "I have strayed from the goal; time to find the right path.",
    "What I did was not needed; I will do what is.",
    "These steps failed; I learn from them and go on differently.",
    "I misread the situation; let me read it once more.",
    "The plan so far is flawed; here is a better start.",
    "I should not have done that; let me put it right.",
    "This is not getting me closer; I will take another route.",
    "I made an error and must work out the correction.",
    "Wrong step; back to the last point where all was well.",
)
ACTION = "wait"
"""The dummy action of a revision turn, as published."""
ACKNOWLEDGEMENT = "ok."
"""The user's turn after a revision turn that was not played in the environment."""


def voiced(reply: str) -> bool:
    """Return whether a reply contains one of the reflections, whatever its case and spacing."""
    said = _plain(reply)
    return any(_plain(sentence) in said for sentence in REFLECTIONS)


def revision_text(seed: int, action: str = ACTION, sentences: int = len(REFLECTIONS)) -> str:
    """Return the text of a revision turn: one of the first `sentences` reflections, drawn by the
    seed, and an action.
    """
    return f"Thought: {random.Random(seed).choice(REFLECTIONS[:sentences])}\nAction: {action}"


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")
