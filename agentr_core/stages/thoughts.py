"""Thoughts before bare actions: what the editor is asked, and what becomes of its replies.

An episode whose expert gave only actions gets a thought before each. The action stays the same to
the byte, and so does its outcome. The editor sees what the expert had seen by then, and no later
step, so that no thought anticipates what follows. Source: ETO (arXiv 2403.02502, section 4), whose
authors had a large model write thoughts around given actions.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentr_core.answers import readable
from agentr_core.environments.replies import LABEL
from agentr_core.episodes.transcript import AlternatingTurns, transcript_of
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.protocols.abilities import Calling
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.eto import ThoughtsConfig
from agentr_core.recipes.sampling import sampling_of
from agentr_core.types import Answer, Message, Question, Step, Trajectory

VERSION = 1
"""Increase it when the same configuration would ask something else."""
THOUGHT = "Thought:"
PROMPT = """\
An expert did a task step by step, and of each step only the action was written down. Below are what the expert was \
told, the task, what was done so far, and the next action.
Write what the expert thought before that action: one or two sentences in the first person that lead from what was \
known by then to this action. Say nothing that only later steps can show. Write the thought alone, without a label \
and without the action."""
NAME = f"expert-thought@{fingerprint(PROMPT)[:8]}"
"""The name of the prompt with a hash of its text, as it is stored."""
_LABEL = re.compile(r"Action[ \t]*\d*[ \t]*:")
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """An expert's episode, some of whose replies have no thought; `name` tells it apart from others
    of its run, and `seed` is the recipe's.
    """

    env: Environment
    trajectory: Trajectory
    name: str
    run_id: str
    config: ThoughtsConfig
    seed: int


class Asked(NamedTuple):
    """A question to the editor about a step, with the id of its answer."""

    answer_id: str
    subject: str
    question: Question
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughtful:
    """An episode with a thought in each reply. `position` is the first step that had none, None if
    all had one; `prompt_hash` is the hash of all prompts.
    """

    trajectory: Trajectory
    position: int | None
    prompt_hash: str


class Thoughtless(NamedTuple):
    """The reason why an episode gets no thoughts: a slug, and details."""

    reason: str
    detail: str


Written = Thoughtful | Thoughtless


def labelled(env: Environment, reply: str) -> str:
    """Return a reply with a label before its action: a bare action gets one, in the form that the
    world's instruction uses.
    """
    if _LABEL.search(reply):
        return reply
    return LABEL + ("\n" if f"{LABEL}\n" in env.instruction else " ") + reply.strip()


def is_bare(reply: str) -> bool:
    """Return whether a labelled reply has no thought before its action."""
    return not reply[: _action_at(reply)].strip().removeprefix(THOUGHT).strip()


def with_thought(reply: str, thought: str) -> str:
    """Return a bare reply with a thought before its action; from the label on it stays as it is."""
    action = reply[_action_at(reply) :]
    if action.partition(":")[2].startswith("\n"):
        return f"{THOUGHT}\n{thought}\n\n{action}"
    return f"{THOUGHT} {thought}\n{action}"


def thought_in(answer: Answer) -> str:
    """Return the thought in an editor's reply as one paragraph: labels, and an action that follows,
    are left out, and so is what the editor itself thought. The result is empty if there is no
    thought, or if the reply was cut.
    """
    if answer.finish_reason == "length":
        return ""
    said = (readable(answer) or "").strip().removeprefix(THOUGHT)
    label = _LABEL.search(said)
    return " ".join(said[: label.start() if label else None].split())


def check_thoughts(env: Environment) -> None:
    """Raise `ConfigError` for a world whose replies are not a thought and a labelled action."""
    if not isinstance(transcript_of(env), AlternatingTurns) or isinstance(env, Calling):
        raise ConfigError(
            f"eto.expert.thoughts: replies in {env.name} are not a thought and an action after a label; leave it out, "
            "or choose the world's transcript of text"
        )


def writing(bare: Bare) -> Generator[Asked, Answer, Written]:
    """Yield the questions about one episode, step by step, take the answers, and return the episode
    with its thoughts, or why it gets none.
    """
    steps: list[Step] = []
    asked: list[str] = []
    first: int | None = None
    for position, step in enumerate(bare.trajectory.steps):
        spoken = labelled(bare.env, step.reply)
        if not is_bare(spoken):
            steps.append(step)
            continue
        first = position if first is None else first
        for attempt in range(bare.config.tries):
            answer = yield _asked(bare, steps, step, attempt)
            asked.append(answer.prompt_hash)
            thought = thought_in(answer)
            reply = with_thought(spoken, thought)
            if thought and bare.env.parse(reply) == step.action:
                break
        else:
            return Thoughtless("no-thought", f"step {position}: {answer.role}: {answer.text[:_SHOWN]}")
        steps.append(replace(step, reply=reply))
    whole = replace(bare.trajectory, steps=tuple(steps))
    return Thoughtful(trajectory=whole, position=first, prompt_hash=fingerprint(*asked) if asked else "")


def written(bare: Bare, known: Mapping[str, Answer]) -> Written | None:
    """Return the outcome for an episode from known answers; None if an answer is missing."""
    questions = writing(bare)
    try:
        asked = next(questions)
        while asked.answer_id in known:
            asked = questions.send(known[asked.answer_id])
    except StopIteration as end:
        made: Written = end.value
        return made
    return None


def _action_at(reply: str) -> int:
    """Return where the last label begins, which is the one that worlds read, or else the end."""
    return max((label.start() for label in _LABEL.finditer(reply)), default=len(reply))


def _asked(bare: Bare, before: list[Step], step: Step, attempt: int) -> Asked:
    done = "\n".join(f"{each.reply}\nObservation: {each.observation}" for each in before) or "Nothing yet."
    parts = {
        "What the expert was told": bare.env.instruction,
        "Task": bare.trajectory.first_observation,
        "Done so far": done,
        "Next action": step.action,
    }
    text = "\n\n".join([PROMPT, *(f"{title}:\n{words}" for title, words in parts.items())])
    drawing = bare.config
    question = Question(
        role="editor",
        messages=(Message(role="user", text=text),),
        sampling=sampling_of(drawing),
    )
    subject = f"{bare.name} step {len(before)}" + (f" try {attempt + 1}" if attempt else "")
    seed = derive_seed(bare.seed, "thoughts", bare.name, len(before), attempt)
    answer_id = fingerprint("thought", VERSION, bare.run_id, subject, text, question.sampling, seed)
    return Asked(answer_id, subject, question, seed)
