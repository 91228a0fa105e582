"""The operators of the flywheel, which makes variants of a policy's trajectories round by round.
Given a parent, an operator returns how its child begins, or why there is none.

    question -> fresh trajectories -> [parent -> children by operators] * rounds

Source: ET-Agent (arXiv 2601.06860), self-evolving data flywheel. Operators of a right parent:

    C0  a fresh trajectory
    C1  the editor rewrites the first redundant step; the new one is carried out, and the policy
        goes on
    C2  the editor rewrites all thoughts; calls, results and answer stay the same to the byte

and of a wrong one:

    I0  the editor names the first flawed step, for I1 and I2; it makes no child
    I1  the reflector reviews that step and rewrites it; the new one is carried out, and the policy
        goes on
    I2  the policy goes on after that step, with a hint
    I3  the policy goes on after the whole trajectory, with a hint
    I4  as I3, with the reflector's review in place of the hint
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from agentr_core.environment import Environment
from agentr_core.environments.reasoning.grammar import CALLS, PYTHON, RESULT_OPENS, SEARCH, STOPS, call_in, tags
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes.et_agent import FlywheelConfig
from agentr_core.recipes.fields import DrawingConfig, sampling_of
from agentr_core.replies import after_thoughts, answer_text, begins_with_thought, is_cut_within_thought
from agentr_core.types import Answer, Instance, Message, Question, Span, Step, Trajectory, grown_turn

# Every text that the flywheel shows a model: prompts for editor and reflector, and hints.

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


def prompt_version(name: PromptName) -> str:
    """Return the name of a prompt followed by a hash of its text, as the store has it."""
    return f"{name}@{fingerprint(PROMPTS[name])[:8]}"


def prompt_of(name: PromptName, *, task: str, steps: str, opening: str = "", **blanks: object) -> tuple[Message, ...]:
    """Return the conversation that puts the prompt `name` about a trajectory to a model.

    Args:
        task: the first observation of its episode.
        steps: its steps as text.
        opening: how the reply begins; the model goes on from there.
        blanks: values for the placeholders of the prompt.
    """
    text = f"{PROMPTS[name].format(**blanks) if blanks else PROMPTS[name]}\n\nTask:\n{task}\n\n{steps}"
    prefill = (grown_turn([Span(text=opening)]),) if opening else ()
    return (Message(role="user", text=text), *prefill)


# What an operator returns: a draft, which world and policy complete, or a reason.


class NoChild(NamedTuple):
    """The reason why an operator makes no child, as a short slug, and details."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The beginning of a child.

    `prefix` holds recorded steps. `reply` is a reply of the editor or reflector that is sent to the
    world after them; if it is empty, the policy goes on at once. `position` is the step at which
    the child departs from its parent, or None if it differs as a whole. `finished_child` is a
    finished child, which needs neither world nor policy. `prompt_hash` is the hash of the prompt
    that a model was given for it, or of the hint to the policy.
    """

    prefix: tuple[Step, ...] = ()
    reply: str = ""
    position: int | None = None
    finished_child: Trajectory | None = None
    prompt_hash: str = ""

    @property
    def num_given(self) -> int:
        """The number of the child's first steps that were recorded before; their tools are not
        called again.
        """
        return len(self.prefix if self.finished_child is None else self.finished_child.steps)


def numbered_text(step_form: StepForm, steps: Sequence[Step], num_steps: int | None = None) -> str:
    """Return recorded steps as text, a list of numbered steps: all of them or the first
    `num_steps`.
    """
    ends = step_form.ends(steps)[:num_steps]
    starts = [0, *ends]
    return "\n\n".join(
        f"### Step {number}\n{step_form.text(steps[start:end]).strip()}"
        for number, (start, end) in enumerate(zip(starts, ends, strict=False), start=1)
    )


def step_bounds(step_form: StepForm, steps: Sequence[Step], number: int) -> tuple[int, int] | NoChild:
    """Return the range of recorded steps, start and end position, that numbered step `number` has,
    or `NoChild` if the number is out of range.
    """
    ends = step_form.ends(steps)
    if not 1 <= number <= len(ends):
        return NoChild("step-out-of-range", f"step {number} of {len(ends)}")
    return ([0, *ends][number - 1], ends[number - 1])


def with_reply(step: Step, reply: str) -> Step:
    """Return a recorded step with another reply, marked as not sampled by the policy."""
    return replace(step, reply=reply, token_ids=(), logprobs=None, finish_reason=None, tokenizer=None)


# Steps in worlds where one turn grows: thoughts, calls, results and an answer, in tags.
#
# A thought that the policy is to go on from is a step that was never sent to the world: it has no
# action, and its `valid` is None.

_ACTION_TAGS = (*CALLS, "answer", "result")
"""Tags with which a step acts. The world also answers a model that opens a result itself."""
_THINK_TAG = re.compile(r"</?think>")
_ANSWER_TAG = re.compile(r"</?answer>")


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """The form of steps in worlds with tags. See `StepForm`."""

    domain: Domain
    """The kind of hints that suit the world."""
    form_phrase: str = IN_TAGS
    """The form of a step, as a phrase for prompts."""

    def ends(self, steps: Sequence[Step]) -> list[int]:
        """Return where numbered steps end, as counts of recorded steps: after each result, and at
        the end.
        """
        last = len(steps)
        return [position for position, step in enumerate(steps, start=1) if step.observation or position == last]

    def text(self, steps: Sequence[Step]) -> str:
        """Return replies and results as they follow each other in the turn."""
        return "".join(step.reply + step.observation for step in steps)

    def draft_from_rewrite(self, before: Sequence[Step], text: str) -> Draft | NoChild:
        """Return a draft that goes on with the rewritten step `text`: if it has a call or an
        answer, that is carried out; if not, the policy goes on inside its thought.
        """
        reply = repair_tags(text)
        if isinstance(reply, NoChild):
            return reply
        if call_in(reply) is None:
            return Draft(prefix=(*before, open_step(reply)), position=len(before))
        return Draft(prefix=tuple(before), reply=reply, position=len(before))

    def draft_with_hint(self, steps: Sequence[Step], hint: str) -> Draft:
        """Return a draft that goes on inside a thought with a hint: a new thought after a result,
        or else the last step, reopened, with the hint at its end.
        """
        ends = self.ends(steps)
        if not steps or steps[-1].observation:
            return Draft(prefix=(*steps, open_step(f"<think>{hint}")), position=len(steps))
        start = [0, *ends][-2]
        thought = reopen_thought(self.text(steps[start:]))
        return Draft(prefix=(*steps[:start], open_step(f"{thought}\n{hint}")), position=start)

    def cost(self, trajectory: Trajectory) -> int:
        """Return the number of tool calls that were made."""
        return sum(len(step.tool_calls) for step in trajectory.steps)


def open_step(text: str) -> Step:
    """Return a text that the policy is to go on from, as a step that is not sent to the world."""
    return Step(reply=text, action="", observation="", reward=0.0)


def repair_tags(text: str) -> str | NoChild:
    """Return a rewritten step with proper tags: a thought, then an action up to its first closing
    tag; without an action, an open thought. `NoChild` if it is empty or its call is not closed.
    """
    tag_ends = [text.find(stop) + len(stop) for stop in STOPS if stop != RESULT_OPENS and stop in text]
    body = text[: min(tag_ends, default=len(text))].partition(RESULT_OPENS)[0].strip()
    thought, action = split_thought(body)
    thought = _THINK_TAG.sub("", thought).strip()
    if not thought and not action:
        return NoChild("empty-step")
    reply = f"<think>{thought}</think>\n{action}" if action else f"<think>{thought}"
    if action and call_in(reply) is None:
        return NoChild("unclosed-call", action)
    return reply


def reopen_thought(text: str) -> str:
    """Return the text of a step as an open thought: tags of an answer are removed, its text
    stays.
    """
    bare_text = _ANSWER_TAG.sub("", text)
    head, end_tag, tail = bare_text.rpartition("</think>")
    bare_text = head + tail if end_tag else bare_text
    return (bare_text if "<think>" in bare_text else f"<think>{bare_text}").rstrip()


def split_thought(text: str) -> tuple[str, str]:
    """Return the thought of a step, tags included, and its action from the opening tag on."""
    start = next((tag.start for tag in tags(text) if tag.opens and tag.name in _ACTION_TAGS), len(text))
    return text[:start], text[start:]


def thoughts_of(step_form: TaggedForm, steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Return each numbered step as its thought without tags, and its action with the result."""
    ends = step_form.ends(steps)
    texts = [step_form.text(steps[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [(_THINK_TAG.sub("", thought).strip(), action) for thought, action in map(split_thought, texts)]


def with_thoughts(step_form: TaggedForm, parent: Trajectory, thoughts: Sequence[str]) -> Trajectory | NoChild:
    """Return a trajectory with new thoughts, one for each numbered step; `NoChild` if an action
    would change.

    Actions and results stay the same to the byte, so no tool is called again, and the reward stays
    the same.
    """
    steps, child_steps = parent.steps, []
    ends = step_form.ends(steps)
    for start, end, thought in zip([0, *ends], ends, thoughts, strict=False):
        _, action = split_thought("".join(step.reply for step in steps[start:end]))
        child_steps.append(with_reply(steps[end - 1], f"<think>{thought}</think>\n{action}"))
    actions_before = [action for _, action in thoughts_of(step_form, steps)]
    if [action for _, action in thoughts_of(step_form, child_steps)] != actions_before:
        return NoChild("actions-changed")
    return replace(parent, steps=tuple(child_steps))


# Steps in worlds where reply and observation alternate.


@dataclass(frozen=True, slots=True)
class TurnForm:
    """The form of steps in worlds with alternating turns. See `StepForm`.

    A hint is a reply like any other, so the world answers it: there is no action in it.
    """

    domain: Domain = "steps"
    form_phrase: str = IN_TURNS

    def ends(self, steps: Sequence[Step]) -> list[int]:
        """Return the end of each step: each recorded step is one."""
        return list(range(1, len(steps) + 1))

    def text(self, steps: Sequence[Step]) -> str:
        """Return replies and observations as one text."""
        return "\n".join(f"{step.reply}\nObservation: {step.observation}" for step in steps)

    def draft_from_rewrite(self, before: Sequence[Step], text: str) -> Draft | NoChild:
        """Return a draft that goes on with a rewritten reply, which is carried out."""
        if not text.strip():
            return NoChild("empty-step")
        return Draft(prefix=tuple(before), reply=text.strip(), position=len(before))

    def draft_with_hint(self, steps: Sequence[Step], hint: str) -> Draft:
        """Return a draft that goes on with a hint; a step that ended the episode is left out."""
        prefix = tuple(steps[:-1] if steps and steps[-1].terminated else steps)
        return Draft(prefix=prefix, reply=hint, position=len(prefix))

    def cost(self, trajectory: Trajectory) -> int:
        """Return the number of steps."""
        return len(trajectory.steps)


StepForm = TaggedForm | TurnForm
"""The form of steps in a kind of world: what counts as a step, and how a text becomes one. A
numbered step may consist of several recorded ones, such as a hint and the reply that follows it.

`ends` returns for each numbered step how many recorded steps there are up to its end; `text`
returns recorded steps as text; `draft_from_rewrite` goes on from recorded steps with a rewritten
step, `draft_with_hint` with a hint, for which an answer, or any other end of the episode, is
undone.
"""


def step_form_of(env: Environment, instance: Instance) -> StepForm:
    """Return the form of steps in the world of an instance."""
    if not isinstance(transcript_of(env), Continuation):
        return TurnForm()
    if not isinstance(env, ReasoningWorld):
        return TaggedForm("knowledge")
    # If the world lacks the tool that the hints for its kind of question mention, general hints are
    # used.
    domain = env.problem(instance).domain
    return TaggedForm(domain if {"math": PYTHON, "knowledge": SEARCH}[domain] in env.tools else "steps")


# Parsers of the replies of editor and reflector: labels may have any case; the result is None if a
# reply cannot be read.

STEP_FOUND = "Analysis:"
"""The stop string of a request that needs only the number of the step, not its analysis."""
_STEP_LABEL = re.compile(r"(?<!corrected )\bstep\W*:\W*(\d{1,9}|no\b)", re.IGNORECASE)
_CORRECTED_LABEL = re.compile(r"\bcorrected\s+step\W*:\**", re.IGNORECASE)
_THOUGHT_LABEL = re.compile(r"^\W*thought\s+(\d{1,9})\W*:\**", re.IGNORECASE | re.MULTILINE)


class RedundantStep(NamedTuple):
    """The number of a redundant step, counted from 1, and its corrected text."""

    number: int
    step: str


def parse_step_number(reply: str) -> int | None:
    """Return the number after the first label "Step:" that follows the reply's thought: from 1, or
    0 for "no"; None if there is no such label.
    """
    match = _STEP_LABEL.search(after_thoughts(reply, keep_later_thoughts=True) or "")
    if match is None:
        return None
    return int(match[1]) if match[1].isdigit() else 0


def parse_redundant_step(reply: str) -> RedundantStep | None:
    """Return the redundant step that a reply names, with its correction; with number 0 if the reply
    says that there is none, None if a number or a correction is missing.
    """
    answer = after_thoughts(reply, keep_later_thoughts=True) or ""
    number, label = parse_step_number(answer), _CORRECTED_LABEL.search(answer)
    if number == 0:
        return RedundantStep(0, "")
    if number is None or label is None or not answer[label.end() :].strip():
        return None
    return RedundantStep(number, answer[label.end() :].strip())


def parse_thoughts(reply: str, count: int) -> tuple[str, ...] | None:
    """Return the thoughts that a reply lists after its own, without tags around them; None unless
    there are `count`, numbered in order, and none is empty or contains a tag.
    """
    answer = after_thoughts(reply, keep_later_thoughts=True) or ""
    labels = list(_THOUGHT_LABEL.finditer(answer))
    if [int(label[1]) for label in labels] != list(range(1, count + 1)):
        return None
    ends = [label.start() for label in labels[1:]] + [len(answer)]
    texts = tuple(
        _THINK_TAG.sub("", answer[label.end() : end]).strip() for label, end in zip(labels, ends, strict=True)
    )
    return None if any(not text or any(tags(text)) for text in texts) else texts


LOCATE = "I0"
_PARAGRAPH = re.compile(r"\n\s*\n")


class AskModel(Protocol):
    """A function that puts an operator's question to a model; stored answers are used again."""

    def __call__(self, operator: str, name: PromptName, question: Question) -> Awaitable[Answer]:
        """Return the answer. Raises as `rollout.Helper`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A parent, with all that an operator needs to vary it; `seed` is that of the child."""

    parent: Trajectory
    step_form: StepForm
    config: FlywheelConfig
    seed: int
    consult: AskModel

    @property
    def task(self) -> str:
        """The first observation of the parent's episode."""
        return self.parent.first_observation


Operator = Callable[[Case], Awaitable[Draft | NoChild]]


async def start_fresh(case: Case) -> Draft | NoChild:
    """C0: nothing of the parent is kept."""
    return Draft()


async def trim_step(case: Case) -> Draft | NoChild:
    """C1: the editor rewrites the first redundant step."""
    steps, step_form = case.parent.steps, case.step_form
    messages = prompt_of(
        "redundant-step", task=case.task, steps=numbered_text(step_form, steps), form=step_form.form_phrase
    )
    answer = await case.consult("C1", "redundant-step", _question("editor", case.config.editor, messages))
    redundant = parse_redundant_step(_reply_text(answer))
    if redundant is None or answer.finish_reason == "length":
        return _unreadable_answer(answer)
    if not redundant.number:
        return NoChild("nothing-redundant")
    bounds = step_bounds(step_form, steps, redundant.number)
    if isinstance(bounds, NoChild):
        return bounds
    return _with_prompt_hash(step_form.draft_from_rewrite(steps[: bounds[0]], redundant.step), answer.prompt_hash)


async def rewrite_thoughts(case: Case) -> Draft | NoChild:
    """C2: the editor rewrites all thoughts; what was done stays the same to the byte."""
    step_form = case.step_form
    if not isinstance(step_form, TaggedForm):
        return NoChild("no-thoughts", "the steps of this world have no thoughts apart from what is done")
    parts = thoughts_of(step_form, case.parent.steps)
    listing = "\n\n".join(
        f"Thought {number}:\n{thought}\nDone:\n{action.strip()}" for number, (thought, action) in enumerate(parts, 1)
    )
    messages = prompt_of("thoughts", task=case.task, steps=listing, count=len(parts))
    answer = await case.consult("C2", "thoughts", _question("editor", case.config.editor, messages))
    new_thoughts = parse_thoughts(_reply_text(answer), len(parts))
    if new_thoughts is None or answer.finish_reason == "length":
        return _unreadable_answer(answer)
    child = with_thoughts(step_form, case.parent, new_thoughts)
    return child if isinstance(child, NoChild) else Draft(finished_child=child, prompt_hash=answer.prompt_hash)


async def locate_flaw(case: Case) -> tuple[int, int, int] | NoChild:
    """I0: return the number of the first flawed step, according to the editor, and the start and
    end of its recorded steps.
    """
    steps = case.parent.steps
    messages = prompt_of("flawed-step", task=case.task, steps=numbered_text(case.step_form, steps))
    question = _question("editor", case.config.editor, messages)
    # `STEP_FOUND` is a stop of this request alone.
    sampling = replace(question.sampling, stop=(STEP_FOUND, *question.sampling.stop))
    answer = await case.consult(LOCATE, "flawed-step", replace(question, sampling=sampling))
    stopped_in_thought = answer_text(answer, keep_later_thoughts=True) is None or (
        answer.thinks and "</think>" not in answer.text
    )
    if answer.finish_reason == "stop" and stopped_in_thought:
        # The editor's thought quotes the form of the reply, so that the stop string ended it there;
        # ask again without that stop string.
        answer = await case.consult(LOCATE, "flawed-step", question)
    if is_cut_within_thought(answer):
        return _unreadable_answer(answer)
    number = parse_step_number(_reply_text(answer))
    if not number:
        return NoChild("no-flawed-step")
    bounds = step_bounds(case.step_form, steps, number)
    return bounds if isinstance(bounds, NoChild) else (number, *bounds)


async def correct_flaw(case: Case) -> Draft | NoChild:
    """I1: the reflector reviews the flawed step and rewrites it."""
    location = await locate_flaw(case)
    if isinstance(location, NoChild):
        return location
    number, start, _ = location
    steps = numbered_text(case.step_form, case.parent.steps, number)
    opening = f"Step: {number}\n{STEP_FOUND}"
    messages = prompt_of("flaw-analysis", task=case.task, steps=steps, opening=opening)
    analysis = await case.consult("I1", "flaw-analysis", _question("reflector", case.config.reflector, messages))
    if is_cut_within_thought(analysis):
        return _unreadable_answer(analysis)
    flaw = f"{steps}\n\nWhat is wrong with step {number}:\n{_paragraph(_reply_text(analysis))}"
    messages = prompt_of("corrected-step", task=case.task, steps=flaw, form=case.step_form.form_phrase)
    answer = await case.consult("I1", "corrected-step", _question("reflector", case.config.reflector, messages))
    if answer.finish_reason == "length":
        return NoChild("cut-reply", answer.text[:200])
    # With tags, a single thought is that of the step, unless the reflector itself thinks: then its
    # analysis begins with a thought, too.
    is_tagged, reflector_thinks = isinstance(case.step_form, TaggedForm), begins_with_thought(analysis.text)
    has_one_thought = answer.text.count("<think>") == 1 and answer.text.count("</think>") < 2
    step = (
        answer.text
        if is_tagged and has_one_thought and not reflector_thinks
        else answer_text(answer, keep_later_thoughts=is_tagged) or ""
    )
    return _with_prompt_hash(case.step_form.draft_from_rewrite(case.parent.steps[:start], step), answer.prompt_hash)


async def hint_after_flaw(case: Case) -> Draft | NoChild:
    """I2: a hint after the flawed step."""
    location = await locate_flaw(case)
    if isinstance(location, NoChild):
        return location
    return _hint_draft(case, case.parent.steps[: location[2]])


async def hint_after_all(case: Case) -> Draft | NoChild:
    """I3: a hint after all steps."""
    return _hint_draft(case, case.parent.steps)


async def review_all(case: Case) -> Draft | NoChild:
    """I4: the reflector's review after all steps."""
    steps = numbered_text(case.step_form, case.parent.steps)
    messages = prompt_of("review", task=case.task, steps=steps, opening=REVIEW_OPENS)
    answer = await case.consult("I4", "review", _question("reflector", case.config.reflector, messages))
    review = _paragraph(_reply_text(answer))
    if not review or any(tags(review)):
        return _unreadable_answer(answer)
    draft = case.step_form.draft_with_hint(case.parent.steps, f"{REVIEW_OPENS} {review}")
    return replace(draft, prompt_hash=answer.prompt_hash)


OPERATORS: Mapping[str, Operator] = {
    "C0": start_fresh,
    "C1": trim_step,
    "C2": rewrite_thoughts,
    "I1": correct_flaw,
    "I2": hint_after_flaw,
    "I3": hint_after_all,
    "I4": review_all,
}


def _hint_draft(case: Case, steps: tuple[Step, ...]) -> Draft:
    hint = random.Random(case.seed).choice(HINTS[case.step_form.domain])
    return replace(case.step_form.draft_with_hint(steps, hint), prompt_hash=fingerprint(hint))


def _with_prompt_hash(draft: Draft | NoChild, prompt_hash: str) -> Draft | NoChild:
    return draft if isinstance(draft, NoChild) else replace(draft, prompt_hash=prompt_hash)


def _question(role: str, sampling_config: DrawingConfig, messages: tuple[Message, ...]) -> Question:
    return Question(role=role, messages=messages, sampling=sampling_of(sampling_config))


def _reply_text(answer: Answer) -> str:
    """Return the text of an answer after its thought, empty if it is unreadable. The text itself
    may contain thoughts in tags, since it is about such steps.
    """
    return answer_text(answer, keep_later_thoughts=True) or ""


def _unreadable_answer(answer: Answer) -> NoChild:
    return NoChild("unreadable", f"{answer.role}: {answer.text[:200]}")


def _paragraph(text: str) -> str:
    return _PARAGRAPH.split(text.strip(), maxsplit=1)[0]
