"""The judge's prompt, worded to fit any environment. Source: Agent-R section 3.2 (own wording)."""

from __future__ import annotations

from collections.abc import Sequence

from agentr_core.types import Message

JUDGE_INSTRUCTION = """\
You check the work of an agent. Below are its task, what it has done so far, and its next action with what came of it.
Judge the next action only. Give your reason in a line, then your word in a line of its own:
Judgement: Good, if the action clearly helps towards the goal
Judgement: Bad, if it clearly harms, fails, or does not belong to the task
Judgement: Uncertain, if neither is clear"""


def judge_messages(
    first_observation: str, log: Sequence[tuple[str, str]], action: str, observation: str
) -> tuple[Message, ...]:
    """Return the conversation that asks for one verdict; the reply ends with a line `Judgement:
    ...`.

    Args:
        first_observation: the first observation of the episode.
        log: (action, observation) of the steps before the judged one, oldest first; no thoughts.
        action: the judged action, as the environment's parser read it.
        observation: the observation that followed it.
    """
    done = "".join(f"Action: {before}\nObservation: {seen}\n" for before, seen in log) or "Nothing yet.\n"
    text = (
        f"{JUDGE_INSTRUCTION}\n\nTask:\n{first_observation}\n\nSo far:\n{done}\n"
        f"Next:\nAction: {action}\nObservation: {observation}"
    )
    return (Message(role="user", text=text),)
