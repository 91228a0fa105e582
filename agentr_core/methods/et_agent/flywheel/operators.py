"""The operators of the flywheel, which varies a policy's trajectories round by round: how a child
begins, given its parent, or why there is none.

    question -> fresh trajectories -> [parent -> children by operators] * rounds

Source: ET-Agent (arXiv 2601.06860), self-evolving data flywheel. Operators of a right parent:

    C0  a fresh trajectory
    C1  the editor rewrites the first redundant step; it is carried out, and the policy goes on
    C2  the editor rewrites all thoughts; calls, results and answer stay the same to the byte

and of a wrong one:

    I0  the editor names the first flawed step, for I1 and I2; it makes no child
    I1  the reflector reviews that step and rewrites it; it is carried out, and the policy goes on
    I2  the policy goes on after that step, with a hint
    I3  the policy goes on after the whole trajectory, with a hint
    I4  as I3, with the reflector's review in place of the hint
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from agentr_core.answers import is_unreadable, readable
from agentr_core.environments.reasoning.grammar import tags
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.et_agent.flywheel import prompts
from agentr_core.methods.et_agent.flywheel.drafts import Draft, Manner, Unmade, at_step, numbered
from agentr_core.methods.et_agent.flywheel.prompts import PromptName, asked
from agentr_core.methods.et_agent.flywheel.replies import STEP_FOUND, redundant_step, step_number, thoughts
from agentr_core.methods.et_agent.flywheel.tagged import Tagged, rethought, thoughts_of
from agentr_core.recipes.et_agent import FlywheelConfig
from agentr_core.recipes.sampling import DrawingConfig, sampling_of
from agentr_core.types import Answer, Message, Question, Step, Trajectory

LOCATE = "I0"
_PARAGRAPH = re.compile(r"\n\s*\n")


class Consult(Protocol):
    """A callable that asks a model of another role for an operator; it reuses stored answers."""

    def __call__(self, operator: str, name: PromptName, question: Question) -> Awaitable[Answer]:
        """Return the answer. Raises as `episodes.asking.Helper`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A parent, with what an operator needs to vary it; `seed` is the child's."""

    parent: Trajectory
    manner: Manner
    config: FlywheelConfig
    seed: int
    consult: Consult

    @property
    def task(self) -> str:
        """The first observation of the parent's episode."""
        return self.parent.first_observation


Operator = Callable[[Case], Awaitable[Draft | Unmade]]


async def fresh(case: Case) -> Draft | Unmade:
    """C0: nothing of the parent is kept."""
    return Draft()


async def trimmed(case: Case) -> Draft | Unmade:
    """C1: the editor rewrites the first redundant step."""
    steps, manner = case.parent.steps, case.manner
    told = asked("redundant-step", task=case.task, steps=numbered(manner, steps), form=manner.form)
    answer = await case.consult("C1", "redundant-step", _edit(case.config.editor, told))
    found = redundant_step(_said(answer))
    if found is None or answer.finish_reason == "length":
        return _unreadable(answer)
    if not found.number:
        return Unmade("nothing-redundant")
    place = at_step(manner, steps, found.number)
    if isinstance(place, Unmade):
        return place
    return _hashed(manner.edited(steps[: place[0]], found.step), answer.prompt_hash)


async def rethink(case: Case) -> Draft | Unmade:
    """C2: the editor rewrites all thoughts; what was done stays the same to the byte."""
    manner = case.manner
    if not isinstance(manner, Tagged):
        return Unmade("no-thoughts", "the steps of this world have no thoughts apart from what is done")
    parts = thoughts_of(manner, case.parent.steps)
    shown = "\n\n".join(
        f"Thought {number}:\n{thought}\nDone:\n{action.strip()}" for number, (thought, action) in enumerate(parts, 1)
    )
    told = asked("thoughts", task=case.task, steps=shown, count=len(parts))
    answer = await case.consult("C2", "thoughts", _edit(case.config.editor, told))
    found = thoughts(_said(answer), len(parts))
    if found is None or answer.finish_reason == "length":
        return _unreadable(answer)
    whole = rethought(manner, case.parent, found)
    return whole if isinstance(whole, Unmade) else Draft(whole=whole, prompt_hash=answer.prompt_hash)


async def located(case: Case) -> tuple[int, int, int] | Unmade:
    """I0: return the number of the first flawed step, as the editor sees it, and where it begins
    and ends.
    """
    steps = case.parent.steps
    told = asked("flawed-step", task=case.task, steps=numbered(case.manner, steps))
    question = _edit(case.config.editor, told)
    # `STEP_FOUND` is a stop of this request alone.
    sampling = replace(question.sampling, stop=(STEP_FOUND, *question.sampling.stop))
    answer = await case.consult(LOCATE, "flawed-step", replace(question, sampling=sampling))
    if answer.finish_reason == "stop" and _ends_thinking(answer):
        # The thought quotes the form that it is asked for, so that it was stopped there.
        answer = await case.consult(LOCATE, "flawed-step", question)
    if is_unreadable(answer):
        return _unreadable(answer)
    number = step_number(_said(answer))
    if not number:
        return Unmade("no-flawed-step")
    place = at_step(case.manner, steps, number)
    return place if isinstance(place, Unmade) else (number, *place)


async def corrected(case: Case) -> Draft | Unmade:
    """I1: the reflector reviews the flawed step and rewrites it."""
    found = await located(case)
    if isinstance(found, Unmade):
        return found
    number, start, _ = found
    steps = numbered(case.manner, case.parent.steps, number)
    opening = f"Step: {number}\n{STEP_FOUND}"
    told = asked("flaw-analysis", task=case.task, steps=steps, opening=opening)
    analysis = await case.consult("I1", "flaw-analysis", _reflect(case.config.reflector, told))
    if is_unreadable(analysis):
        return _unreadable(analysis)
    flaw = f"{steps}\n\nWhat is wrong with step {number}:\n{_paragraph(_said(analysis))}"
    told = asked("corrected-step", task=case.task, steps=flaw, form=case.manner.form)
    answer = await case.consult("I1", "corrected-step", _reflect(case.config.reflector, told))
    if answer.finish_reason == "length":
        return Unmade("cut-reply", answer.text[:200])
    # A reflector that thinks does so before its analysis, too.
    step = _step_in(answer, case.manner, thinks=analysis.text.lstrip().startswith("<think>"))
    return _hashed(case.manner.edited(case.parent.steps[:start], step), answer.prompt_hash)


async def step_hint(case: Case) -> Draft | Unmade:
    """I2: a hint after the flawed step."""
    found = await located(case)
    if isinstance(found, Unmade):
        return found
    return _hint(case, case.parent.steps[: found[2]])


async def whole_hint(case: Case) -> Draft | Unmade:
    """I3: a hint after all steps."""
    return _hint(case, case.parent.steps)


async def reviewed(case: Case) -> Draft | Unmade:
    """I4: the reflector's review after all steps."""
    steps = numbered(case.manner, case.parent.steps)
    told = asked("review", task=case.task, steps=steps, opening=prompts.REVIEW_OPENS)
    answer = await case.consult("I4", "review", _reflect(case.config.reflector, told))
    review = _paragraph(_said(answer))
    if not review or any(tags(review)):
        return _unreadable(answer)
    draft = case.manner.hinted(case.parent.steps, f"{prompts.REVIEW_OPENS} {review}")
    return replace(draft, prompt_hash=answer.prompt_hash)


OPERATORS: Mapping[str, Operator] = {
    "C0": fresh,
    "C1": trimmed,
    "C2": rethink,
    "I1": corrected,
    "I2": step_hint,
    "I3": whole_hint,
    "I4": reviewed,
}


def _hint(case: Case, steps: tuple[Step, ...]) -> Draft:
    hint = random.Random(case.seed).choice(prompts.HINTS[case.manner.domain])
    return replace(case.manner.hinted(steps, hint), prompt_hash=fingerprint(hint))


def _hashed(draft: Draft | Unmade, prompt_hash: str) -> Draft | Unmade:
    return draft if isinstance(draft, Unmade) else replace(draft, prompt_hash=prompt_hash)


def _edit(drawing: DrawingConfig, messages: tuple[Message, ...]) -> Question:
    return Question(role="editor", messages=messages, sampling=sampling_of(drawing))


def _reflect(drawing: DrawingConfig, messages: tuple[Message, ...]) -> Question:
    return Question(role="reflector", messages=messages, sampling=sampling_of(drawing))


def _said(answer: Answer) -> str:
    """Return what counts of an answer, which may quote the tags of the steps that it is about."""
    return readable(answer, tags=True) or ""


def _ends_thinking(answer: Answer) -> bool:
    return readable(answer, tags=True) is None or (answer.thinks and "</think>" not in answer.text)


def _step_in(answer: Answer, manner: Manner, *, thinks: bool) -> str:
    """Return the step that an answer consists of. In tags, a single thought is that of the step,
    unless its author `thinks` itself.
    """
    single = answer.text.count("<think>") == 1 and answer.text.count("</think>") < 2
    if isinstance(manner, Tagged) and single and not thinks:
        return answer.text
    return readable(answer, tags=isinstance(manner, Tagged)) or ""


def _unreadable(answer: Answer) -> Unmade:
    return Unmade("unreadable", f"{answer.role}: {answer.text[:200]}")


def _paragraph(text: str) -> str:
    return _PARAGRAPH.split(text.strip(), maxsplit=1)[0]
