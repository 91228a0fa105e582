"""Every text that the flywheel shows a model: prompts for editor and reflector, and hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from agentr_core.fingerprint import fingerprint
from agentr_core.types import Message, Span, grown_turn

PromptName = Literal["redundant-step", "thoughts", "flawed-step", "flaw-analysis", "corrected-step", "review"]
Domain = Literal["math", "knowledge", "steps"]

IN_TAGS = (
    "in the same tags: the thought in <think> and </think>, then at most one call in <search> or <python>, or the "
    "answer in <answer>. Never write a <result>: tools do that"
)
IN_TURNS = "in the form that the assistant's own steps have, with one action in it"

_FLAWED = """\
An assistant worked on a task step by step and did not get it right. Its steps are numbered below.
Name the first flawed step. A step is flawed if its logic is wrong, if it thinks on where it should act, if it does \
what was done or known before, or if its call or action does not fit what is needed there.
Reply in this form:
Step: the number of that step
Analysis: what is wrong with it, as one paragraph of plain text"""

PROMPTS: Mapping[PromptName, str] = {
    "redundant-step": """\
An assistant worked on a task step by step and got it right. Its steps are numbered below.
Name the first step that does more than the task needs: its reasoning is long-winded, repeats itself or is more \
complicated than it has to be, or its call or action was done before or brings nothing that is not known.
If there is no such step, reply with this line alone:
Step: no
Otherwise reply in this form, each label at the beginning of a line:
Step: the number of that step
Analysis: why it is more than needed, as one paragraph
Corrected Step: the whole step as it should be, {form}""",
    "thoughts": """\
An assistant worked on a task and got it right. Its thoughts are numbered below, each with what it did then.
Write each thought anew: leave out what is repeated, beside the point or wrong, and keep the reasoning that leads to \
what was done. What was done stays as it is; do not write it down.
Reply with all {count} thoughts in their order, each after its label at the beginning of a line, without any tags:
Thought 1: the first thought, written anew""",
    "flawed-step": _FLAWED,
    "flaw-analysis": _FLAWED,
    "corrected-step": """\
An assistant works on a task step by step. Below are its steps so far, and what is wrong with the last one.
Write that last step anew so that the fault is gone. Write nothing but the step, {form}.""",
    "review": """\
An assistant worked on a task step by step and did not get it right. Its steps are numbered below.
Say as the assistant, in one paragraph and in the first person, where you went wrong and what you should look at \
again. Do not give a new answer.""",
}
REVIEW_OPENS = "Let me go over this again."

HINTS: Mapping[Domain, Sequence[str]] = {
    "math": (
        "Wait, I should check this calculation with a few lines of Python before I trust it.",
        "Hold on, I may have set this up wrongly; let me read the question once more and compute it anew in Python.",
        "Hmm, that number looks doubtful, so I will work it out in another way and compare.",
        "Wait, I have left out a condition perhaps; let me list what is given and solve it again with Python.",
        "Hold on, I guessed there; this is better computed than guessed.",
        "Hmm, let me put this result back into the question and see whether it fits.",
    ),
    "knowledge": (
        "Wait, I am not sure that this answers what was asked; let me search for it in other words.",
        "Hold on, I may have followed the wrong name; I will look the first one up again.",
        "Hmm, nothing that I found says so; let me search for the fact itself.",
        "Wait, there is one link in this chain that I did not check, so I will search for it now.",
        "Hold on, let me think again about what I need to know, and make a new search for it.",
        "Hmm, that passage may be about something else; I should look for another one.",
    ),
    "steps": (
        "Wait, this does not lead where I want; let me think again about what is missing.",
        "Hold on, I should look at what I have before I go on.",
        "Hmm, the last thing I did brought me no further, so I will try another way.",
        "Wait, I may have mixed up the order; let me plan the remaining steps anew.",
        "Hold on, let me read the task once more and see what it really asks for.",
        "Hmm, I have overlooked something; I will go back to what is given.",
    ),
}


def version(name: PromptName) -> str:
    """Return the name of a prompt with a hash of its words, as it is stored."""
    return f"{name}@{fingerprint(PROMPTS[name])[:8]}"


def asked(name: PromptName, *, task: str, steps: str, opening: str = "", **blanks: object) -> tuple[Message, ...]:
    """Return the conversation that asks for something about a trajectory.

    Args:
        task: the first observation of its episode.
        steps: what was done, as text.
        opening: how the reply begins; the model goes on from there.
        blanks: values for the blanks of the prompt.
    """
    text = f"{PROMPTS[name].format(**blanks) if blanks else PROMPTS[name]}\n\nTask:\n{task}\n\n{steps}"
    begun = (grown_turn([Span(text=opening)]),) if opening else ()
    return (Message(role="user", text=text), *begun)
