"""Replies said anew: the thoughts of spliced and pruned steps, read from where they now stand.

A good suffix was sampled in another state than the one that the kept bad steps lead to, and without
the steps that pruning left out. Its actions are played again, its thoughts are not: they speak of
things that the agent does not hold. So the policy is asked what it says greedily at each such
place, and where that has the same action, it takes the place of the reply. Not in the Agent-R
paper; STaR (arXiv 2203.14465) has a model give reasons for known answers in the same way.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import NamedTuple

from agentr_core import answers
from agentr_core.fingerprint import fingerprint
from agentr_core.protocols import Environment
from agentr_core.types import Answer, Message, Question, Sample, Sampling

NAME = "rethink@1"
"""The name of this kind of question, as it is stored."""


class Anew(NamedTuple):
    """A question to the policy about one reply, with the id of its answer."""

    answer_id: str
    subject: str
    question: Question


def rethinking(
    sample: Sample, env: Environment, sampling: Sampling, *, name: str
) -> Generator[Anew, Answer | None, Sample]:
    """Yield the questions about the trained replies of a sample, turn by turn, take the answers,
    and return the sample with what was said anew.

    Only replies that a model sampled are asked for: turns of revision and an expert's steps stay as
    they are. A reply also stays where the answer is None or cut, or has another action.
    `provenance.extra["rethought"]` counts the others.

    Args:
        sampling: how the policy replies; greedily, so that it says what it believes.
        name: tells the sample apart from all others.
    """
    messages = list(sample.messages)
    count = 0
    for position, message in enumerate(messages):
        if not message.train or message.finish_reason is None:
            continue
        question = Question(role="actor", messages=tuple(messages[:position]), sampling=sampling)
        answer = yield Anew(fingerprint("rethink", NAME, name, position, sampling), f"{name} turn {position}", question)
        if answer is not None and _stands_for(answer, message, env):
            messages[position] = Message(role=message.role, text=answer.text, train=True, finish_reason="stop")
            count += 1
    extra = {**sample.provenance.extra, "rethought": count}
    return replace(sample, messages=tuple(messages), provenance=replace(sample.provenance, extra=extra))


def _stands_for(answer: Answer, message: Message, env: Environment) -> bool:
    if answer.finish_reason != "stop" or answer.text == message.text:
        return False
    return answers.action_in(env, answer.text) == answers.action_in(env, message.text)
