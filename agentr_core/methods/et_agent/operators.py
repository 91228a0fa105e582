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
from agentr_core.replies import after_thoughts, is_unreadable, readable
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


def version(name: PromptName) -> str:
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


class Unmade(NamedTuple):
    """The reason why an operator makes no child, as a short slug, and details."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The beginning of a child.

    `prefix` holds recorded steps. `reply` is a reply of the editor or reflector that is sent to the
    world after them; if it is empty, the policy goes on at once. `position` is the step at which
    the child departs from its parent, or None if it differs as a whole. `whole` is a finished
    child, which needs neither world nor policy. `prompt_hash` is the hash of the prompt that a
    model was given for it, or of the hint to the policy.
    """

    prefix: tuple[Step, ...] = ()
    reply: str = ""
    position: int | None = None
    whole: Trajectory | None = None
    prompt_hash: str = ""

    @property
    def given(self) -> int:
        """The number of the child's first steps that were recorded before; their tools are not
        called again.
        """
        return len(self.prefix if self.whole is None else self.whole.steps)


def numbered(manner: Manner, steps: Sequence[Step], upto: int | None = None) -> str:
    """Return recorded steps as text, a list of numbered steps: all of them or the first `upto`."""
    ends = manner.ends(steps)[:upto]
    starts = [0, *ends]
    return "\n\n".join(
        f"### Step {number}\n{manner.text(steps[start:end]).strip()}"
        for number, (start, end) in enumerate(zip(starts, ends, strict=False), start=1)
    )


def at_step(manner: Manner, steps: Sequence[Step], number: int) -> tuple[int, int] | Unmade:
    """Return the range of recorded steps, start and end position, that numbered step `number` has,
    or `Unmade` if the number is out of range.
    """
    ends = manner.ends(steps)
    if not 1 <= number <= len(ends):
        return Unmade("step-out-of-range", f"step {number} of {len(ends)}")
    return ([0, *ends][number - 1], ends[number - 1])


def rewrite(step: Step, reply: str) -> Step:
    """Return a recorded step with another reply, marked as not sampled by the policy."""
    return replace(step, reply=reply, token_ids=(), logprobs=None, finish_reason=None, tokenizer=None)


# Steps in worlds where one turn grows: thoughts, calls, results and an answer, in tags.
#
# A thought that the policy is to go on from is a step that was never sent to the world: it has no
# action, and its `valid` is None.

_ACTS = (*CALLS, "answer", "result")
"""Tags with which a step acts. The world also answers a model that opens a result itself."""
_THINK = re.compile(r"</?think>")
_ANSWER = re.compile(r"</?answer>")


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """The form of steps in worlds with tags. See `Manner`."""

    domain: Domain
    """The kind of hints that suit the world."""
    form: str = IN_TAGS
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

    def edited(self, before: Sequence[Step], text: str) -> Draft | Unmade:
        """Return a draft that goes on with the rewritten step `text`: if it has a call or an
        answer, that is carried out; if not, the policy goes on inside its thought.
        """
        reply = repaired(text)
        if isinstance(reply, Unmade):
            return reply
        if call_in(reply) is None:
            return Draft(prefix=(*before, opened(reply)), position=len(before))
        return Draft(prefix=tuple(before), reply=reply, position=len(before))

    def hinted(self, steps: Sequence[Step], hint: str) -> Draft:
        """Return a draft that goes on inside a thought with a hint: a new thought after a result,
        or else the last step, reopened, with the hint at its end.
        """
        ends = self.ends(steps)
        if not steps or steps[-1].observation:
            return Draft(prefix=(*steps, opened(f"<think>{hint}")), position=len(steps))
        start = [0, *ends][-2]
        thought = reopened(self.text(steps[start:]))
        return Draft(prefix=(*steps[:start], opened(f"{thought}\n{hint}")), position=start)

    def cost(self, trajectory: Trajectory) -> int:
        """Return the number of tool calls that were made."""
        return sum(len(step.tool_calls) for step in trajectory.steps)


def opened(text: str) -> Step:
    """Return a text that the policy is to go on from, as a step that is not sent to the world."""
    return Step(reply=text, action="", observation="", reward=0.0)


def repaired(text: str) -> str | Unmade:
    """Return a rewritten step with proper tags: a thought, then an action up to its first closing
    tag; without an action, an open thought. `Unmade` if it is empty or its call is not closed.
    """
    ends = [text.find(stop) + len(stop) for stop in STOPS if stop != RESULT_OPENS and stop in text]
    body = text[: min(ends, default=len(text))].partition(RESULT_OPENS)[0].strip()
    thought, action = parted(body)
    thought = _THINK.sub("", thought).strip()
    if not thought and not action:
        return Unmade("empty-step")
    reply = f"<think>{thought}</think>\n{action}" if action else f"<think>{thought}"
    if action and call_in(reply) is None:
        return Unmade("unclosed-call", action)
    return reply


def reopened(text: str) -> str:
    """Return the text of a step as an open thought: tags of an answer are removed, its text
    stays.
    """
    bare = _ANSWER.sub("", text)
    head, end_tag, tail = bare.rpartition("</think>")
    bare = head + tail if end_tag else bare
    return (bare if "<think>" in bare else f"<think>{bare}").rstrip()


def parted(text: str) -> tuple[str, str]:
    """Return the thought of a step, tags included, and its action from the opening tag on."""
    start = next((tag.start for tag in tags(text) if tag.opens and tag.name in _ACTS), len(text))
    return text[:start], text[start:]


def thoughts_of(manner: TaggedForm, steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Return each numbered step as its thought without tags, and its action with the result."""
    ends = manner.ends(steps)
    texts = [manner.text(steps[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [(_THINK.sub("", thought).strip(), action) for thought, action in map(parted, texts)]


def rethought(manner: TaggedForm, parent: Trajectory, thoughts: Sequence[str]) -> Trajectory | Unmade:
    """Return a trajectory with new thoughts, one for each numbered step; `Unmade` if an action
    would change.

    Actions and results stay the same to the byte, so no tool is called again, and the reward stays
    the same.
    """
    steps, child = parent.steps, []
    ends = manner.ends(steps)
    for start, end, thought in zip([0, *ends], ends, thoughts, strict=False):
        _, action = parted("".join(step.reply for step in steps[start:end]))
        child.append(rewrite(steps[end - 1], f"<think>{thought}</think>\n{action}"))
    before = [action for _, action in thoughts_of(manner, steps)]
    if [action for _, action in thoughts_of(manner, child)] != before:
        return Unmade("actions-changed")
    return replace(parent, steps=tuple(child))


# Steps in worlds where reply and observation alternate.


@dataclass(frozen=True, slots=True)
class Turns:
    """The form of steps in worlds with alternating turns. See `Manner`.

    A hint is a reply like any other, so the world answers it: there is no action in it.
    """

    domain: Domain = "steps"
    form: str = IN_TURNS

    def ends(self, steps: Sequence[Step]) -> list[int]:
        """Return the end of each step: each recorded step is one."""
        return list(range(1, len(steps) + 1))

    def text(self, steps: Sequence[Step]) -> str:
        """Return replies and observations as one text."""
        return "\n".join(f"{step.reply}\nObservation: {step.observation}" for step in steps)

    def edited(self, before: Sequence[Step], text: str) -> Draft | Unmade:
        """Return a draft that goes on with a rewritten reply, which is carried out."""
        if not text.strip():
            return Unmade("empty-step")
        return Draft(prefix=tuple(before), reply=text.strip(), position=len(before))

    def hinted(self, steps: Sequence[Step], hint: str) -> Draft:
        """Return a draft that goes on with a hint; a step that ended the episode is left out."""
        prefix = tuple(steps[:-1] if steps and steps[-1].terminated else steps)
        return Draft(prefix=prefix, reply=hint, position=len(prefix))

    def cost(self, trajectory: Trajectory) -> int:
        """Return the number of steps."""
        return len(trajectory.steps)


Manner = TaggedForm | Turns
"""The form of steps in a kind of world: what counts as a step, and how a text becomes one. A
numbered step may consist of several recorded ones, such as a hint and the reply that follows it.

`ends` returns for each numbered step how many recorded steps there are up to its end; `text`
returns recorded steps as text; `edited` goes on from recorded steps with a rewritten step, `hinted`
with a hint, for which an answer, or any other end of the episode, is undone.
"""


def manner_of(env: Environment, instance: Instance) -> Manner:
    """Return the form of steps in the world of an instance."""
    if not isinstance(transcript_of(env), Continuation):
        return Turns()
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
_STEP = re.compile(r"(?<!corrected )\bstep\W*:\W*(\d{1,9}|no\b)", re.IGNORECASE)
_CORRECTED = re.compile(r"\bcorrected\s+step\W*:\**", re.IGNORECASE)
_THOUGHT = re.compile(r"^\W*thought\s+(\d{1,9})\W*:\**", re.IGNORECASE | re.MULTILINE)


class Redundant(NamedTuple):
    """The number of a redundant step, counted from 1, and its corrected text."""

    number: int
    step: str


def step_number(reply: str) -> int | None:
    """Return the number after the first label "Step:" that follows the reply's thought: from 1, or
    0 for "no"; None if there is no such label.
    """
    match = _STEP.search(after_thoughts(reply, tags=True) or "")
    if match is None:
        return None
    return int(match[1]) if match[1].isdigit() else 0


def redundant_step(reply: str) -> Redundant | None:
    """Return the redundant step that a reply names, with its correction; with number 0 if the reply
    says that there is none, None if a number or a correction is missing.
    """
    answer = after_thoughts(reply, tags=True) or ""
    number, label = step_number(answer), _CORRECTED.search(answer)
    if number == 0:
        return Redundant(0, "")
    if number is None or label is None or not answer[label.end() :].strip():
        return None
    return Redundant(number, answer[label.end() :].strip())


def thoughts(reply: str, count: int) -> tuple[str, ...] | None:
    """Return the thoughts that a reply lists after its own, without tags around them; None unless
    there are `count`, numbered in order, and none is empty or contains a tag.
    """
    answer = after_thoughts(reply, tags=True) or ""
    labels = list(_THOUGHT.finditer(answer))
    if [int(label[1]) for label in labels] != list(range(1, count + 1)):
        return None
    ends = [label.start() for label in labels[1:]] + [len(answer)]
    texts = tuple(_THINK.sub("", answer[label.end() : end]).strip() for label, end in zip(labels, ends, strict=True))
    return None if any(not text or any(tags(text)) for text in texts) else texts


LOCATE = "I0"
_PARAGRAPH = re.compile(r"\n\s*\n")


class Consult(Protocol):
    """A function that puts an operator's question to a model; stored answers are used again."""

    def __call__(self, operator: str, name: PromptName, question: Question) -> Awaitable[Answer]:
        """Return the answer. Raises as `rollout.Helper`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A parent, with all that an operator needs to vary it; `seed` is that of the child."""

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
    messages = prompt_of("redundant-step", task=case.task, steps=numbered(manner, steps), form=manner.form)
    answer = await case.consult("C1", "redundant-step", _question("editor", case.config.editor, messages))
    redundant = redundant_step(_reply_text(answer))
    if redundant is None or answer.finish_reason == "length":
        return _unreadable(answer)
    if not redundant.number:
        return Unmade("nothing-redundant")
    bounds = at_step(manner, steps, redundant.number)
    if isinstance(bounds, Unmade):
        return bounds
    return _hashed(manner.edited(steps[: bounds[0]], redundant.step), answer.prompt_hash)


async def rethink(case: Case) -> Draft | Unmade:
    """C2: the editor rewrites all thoughts; what was done stays the same to the byte."""
    manner = case.manner
    if not isinstance(manner, TaggedForm):
        return Unmade("no-thoughts", "the steps of this world have no thoughts apart from what is done")
    parts = thoughts_of(manner, case.parent.steps)
    listing = "\n\n".join(
        f"Thought {number}:\n{thought}\nDone:\n{action.strip()}" for number, (thought, action) in enumerate(parts, 1)
    )
    messages = prompt_of("thoughts", task=case.task, steps=listing, count=len(parts))
    answer = await case.consult("C2", "thoughts", _question("editor", case.config.editor, messages))
    new_thoughts = thoughts(_reply_text(answer), len(parts))
    if new_thoughts is None or answer.finish_reason == "length":
        return _unreadable(answer)
    child = rethought(manner, case.parent, new_thoughts)
    return child if isinstance(child, Unmade) else Draft(whole=child, prompt_hash=answer.prompt_hash)


async def located(case: Case) -> tuple[int, int, int] | Unmade:
    """I0: return the number of the first flawed step, according to the editor, and the start and
    end of its recorded steps.
    """
    steps = case.parent.steps
    messages = prompt_of("flawed-step", task=case.task, steps=numbered(case.manner, steps))
    question = _question("editor", case.config.editor, messages)
    # `STEP_FOUND` is a stop of this request alone.
    sampling = replace(question.sampling, stop=(STEP_FOUND, *question.sampling.stop))
    answer = await case.consult(LOCATE, "flawed-step", replace(question, sampling=sampling))
    ends_thinking = readable(answer, tags=True) is None or (answer.thinks and "</think>" not in answer.text)
    if answer.finish_reason == "stop" and ends_thinking:
        # The editor's thought quotes the form of the reply, so that the stop string ended it there;
        # ask again without that stop string.
        answer = await case.consult(LOCATE, "flawed-step", question)
    if is_unreadable(answer):
        return _unreadable(answer)
    number = step_number(_reply_text(answer))
    if not number:
        return Unmade("no-flawed-step")
    bounds = at_step(case.manner, steps, number)
    return bounds if isinstance(bounds, Unmade) else (number, *bounds)


async def corrected(case: Case) -> Draft | Unmade:
    """I1: the reflector reviews the flawed step and rewrites it."""
    location = await located(case)
    if isinstance(location, Unmade):
        return location
    number, start, _ = location
    steps = numbered(case.manner, case.parent.steps, number)
    opening = f"Step: {number}\n{STEP_FOUND}"
    messages = prompt_of("flaw-analysis", task=case.task, steps=steps, opening=opening)
    analysis = await case.consult("I1", "flaw-analysis", _question("reflector", case.config.reflector, messages))
    if is_unreadable(analysis):
        return _unreadable(analysis)
    flaw = f"{steps}\n\nWhat is wrong with step {number}:\n{_paragraph(_reply_text(analysis))}"
    messages = prompt_of("corrected-step", task=case.task, steps=flaw, form=case.manner.form)
    answer = await case.consult("I1", "corrected-step", _question("reflector", case.config.reflector, messages))
    if answer.finish_reason == "length":
        return Unmade("cut-reply", answer.text[:200])
    # With tags, a single thought is that of the step, unless the reflector itself thinks: then its
    # analysis begins with a thought, too.
    tagged, thinks = isinstance(case.manner, TaggedForm), analysis.text.lstrip().startswith("<think>")
    single = answer.text.count("<think>") == 1 and answer.text.count("</think>") < 2
    step = answer.text if tagged and single and not thinks else readable(answer, tags=tagged) or ""
    return _hashed(case.manner.edited(case.parent.steps[:start], step), answer.prompt_hash)


async def step_hint(case: Case) -> Draft | Unmade:
    """I2: a hint after the flawed step."""
    location = await located(case)
    if isinstance(location, Unmade):
        return location
    return _hint(case, case.parent.steps[: location[2]])


async def whole_hint(case: Case) -> Draft | Unmade:
    """I3: a hint after all steps."""
    return _hint(case, case.parent.steps)


async def reviewed(case: Case) -> Draft | Unmade:
    """I4: the reflector's review after all steps."""
    steps = numbered(case.manner, case.parent.steps)
    messages = prompt_of("review", task=case.task, steps=steps, opening=REVIEW_OPENS)
    answer = await case.consult("I4", "review", _question("reflector", case.config.reflector, messages))
    review = _paragraph(_reply_text(answer))
    if not review or any(tags(review)):
        return _unreadable(answer)
    draft = case.manner.hinted(case.parent.steps, f"{REVIEW_OPENS} {review}")
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
    hint = random.Random(case.seed).choice(HINTS[case.manner.domain])
    return replace(case.manner.hinted(steps, hint), prompt_hash=fingerprint(hint))


def _hashed(draft: Draft | Unmade, prompt_hash: str) -> Draft | Unmade:
    return draft if isinstance(draft, Unmade) else replace(draft, prompt_hash=prompt_hash)


def _question(role: str, drawing: DrawingConfig, messages: tuple[Message, ...]) -> Question:
    return Question(role=role, messages=messages, sampling=sampling_of(drawing))


def _reply_text(answer: Answer) -> str:
    """Return the text of an answer after its thought, empty if it is unreadable. The text itself
    may contain thoughts in tags, since it is about such steps.
    """
    return readable(answer, tags=True) or ""


def _unreadable(answer: Answer) -> Unmade:
    return Unmade("unreadable", f"{answer.role}: {answer.text[:200]}")


def _paragraph(text: str) -> str:
    return _PARAGRAPH.split(text.strip(), maxsplit=1)[0]
