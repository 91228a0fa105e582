"""Steps in worlds where one turn grows: thoughts, calls, results and an answer, in tags.

A thought that the policy is to go on from is a step that the world was never given: it has no
action, and nothing says whether it is valid.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentr_core.environments.reasoning.grammar import CALLS, RESULT_OPENS, STOPS, call_in, tags
from agentr_core.methods.et_agent.flywheel.drafts import Draft, Unmade, written
from agentr_core.methods.et_agent.flywheel.prompts import IN_TAGS, Domain
from agentr_core.types import Step, Trajectory

_ACTS = (*CALLS, "answer", "result")
"""Tags with which a step acts. A model that opens a result itself also gets an answer."""
_THINK = re.compile(r"</?think>")
_ANSWER = re.compile(r"</?answer>")


@dataclass(frozen=True, slots=True)
class Tagged:
    """The form of steps in worlds with tags. See `drafts.Manner`."""

    domain: Domain
    form: str = IN_TAGS

    def ends(self, steps: Sequence[Step]) -> list[int]:
        """Return where numbered steps end: at each result, and at the end."""
        last = len(steps)
        return [place for place, step in enumerate(steps, start=1) if step.observation or place == last]

    def text(self, steps: Sequence[Step]) -> str:
        """Return replies with their results as they stand in the turn."""
        return "".join(step.reply + step.observation for step in steps)

    def edited(self, before: Sequence[Step], text: str) -> Draft | Unmade:
        """Return a draft that goes on with a rewritten step: a call or an answer is carried out;
        from anything else the policy goes on inside the thought.
        """
        reply = repaired(text)
        if isinstance(reply, Unmade):
            return reply
        if call_in(reply) is None:
            return Draft(prefix=(*before, opened(reply)), position=len(before))
        return Draft(prefix=tuple(before), reply=reply, position=len(before))

    def hinted(self, steps: Sequence[Step], hint: str) -> Draft:
        """Return a draft that goes on inside a thought that begins or ends with a hint."""
        ends = self.ends(steps)
        if not steps or steps[-1].observation:
            return Draft(prefix=(*steps, opened(f"<think>{hint}")), position=len(steps))
        start = [0, *ends][-2]
        thought = reopened(self.text(steps[start:]))
        return Draft(prefix=(*steps[:start], opened(f"{thought}\n{hint}")), position=start)

    def cost(self, trajectory: Trajectory) -> int:
        """Return how many tool calls were made."""
        return sum(len(step.tool_calls) for step in trajectory.steps)


def opened(text: str) -> Step:
    """Return a text that the policy is to go on from, as a step that the world was not given."""
    return Step(reply=text, action="", observation="", reward=0.0)


def repaired(text: str) -> str | Unmade:
    """Return a rewritten step in its tags: a thought, then an action up to its first closing tag;
    without an action, an open thought.
    """
    ends = [text.find(stop) + len(stop) for stop in STOPS if stop != RESULT_OPENS and stop in text]
    kept = text[: min(ends, default=len(text))].partition(RESULT_OPENS)[0].strip()
    thought, action = parted(kept)
    thought = _THINK.sub("", thought).strip()
    if not thought and not action:
        return Unmade("empty-step")
    reply = f"<think>{thought}</think>\n{action}" if action else f"<think>{thought}"
    if action and call_in(reply) is None:
        return Unmade("unclosed-call", action)
    return reply


def reopened(text: str) -> str:
    """Return a step as an open thought: the tags of the answer are removed, its text stays."""
    bare = _ANSWER.sub("", text)
    head, closed, tail = bare.rpartition("</think>")
    bare = head + tail if closed else bare
    return (bare if "<think>" in bare else f"<think>{bare}").rstrip()


def parted(text: str) -> tuple[str, str]:
    """Return the thought of a step, tags included, and its action from the opening tag on."""
    start = next((tag.start for tag in tags(text) if tag.opens and tag.name in _ACTS), len(text))
    return text[:start], text[start:]


def thoughts_of(manner: Tagged, steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Return each numbered step as its thought without tags, and its action with the result."""
    ends = manner.ends(steps)
    texts = [manner.text(steps[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [(_THINK.sub("", thought).strip(), action) for thought, action in map(parted, texts)]


def rethought(manner: Tagged, parent: Trajectory, thoughts: Sequence[str]) -> Trajectory | Unmade:
    """Return a trajectory with new thoughts, one for each numbered step.

    What was done stays the same to the byte, so no tool is called again and the reward stays the
    same.
    """
    steps, child = parent.steps, []
    ends = manner.ends(steps)
    for start, end, thought in zip([0, *ends], ends, thoughts, strict=False):
        _, action = parted("".join(step.reply for step in steps[start:end]))
        child.append(written(steps[end - 1], f"<think>{thought}</think>\n{action}"))
    before = [action for _, action in thoughts_of(manner, steps)]
    if [action for _, action in thoughts_of(manner, child)] != before:
        return Unmade("actions-changed")
    return replace(parent, steps=tuple(child))
