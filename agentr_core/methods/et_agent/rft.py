"""Which episodes a policy is fine-tuned on before reinforcement learning: right answers in the
strict format, without a failed call.

Source: ET-Agent (arXiv 2601.06860), action-space exploration. Dropping repeated texts and capping
the episodes of a question are our additions.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

from agentr_core.environments.native import is_misread
from agentr_core.environments.reasoning.grammar import strict_fault
from agentr_core.environments.reasoning.reading import text_of
from agentr_core.fingerprint import derive_seed
from agentr_core.samples.filters import Filtered
from agentr_core.types import Rejection, Trajectory

STAGE = "rft"
Episode = tuple[str, Trajectory]
"""A trajectory with its id."""


def fit_for_tuning(
    episodes: Iterable[Episode], *, per_question: int, seed: int, in_tags: Collection[str] | None = None
) -> Filtered[Episode]:
    """Return the episodes to train on, in order, and a rejection with its reason for each of the
    others. Of episodes with one text, the first is kept.

    Reasons are `wrong-answer`, `format`, `failed-call`, `refused-call` (of a tool that does not
    exist or is used up), `duplicate` and `question-cap`.

    Args:
        per_question: the most episodes of an instance, drawn by `seed`; 0 keeps all. A draw keeps
            long and short ones alike, since fine-tuning should widen behaviour.
        in_tags: the ids of episodes that must keep the format and have no refused call; None: all.
            The others are from worlds in turns, where a refused action is a step like any other.
    """
    sound: list[Episode] = []
    rejected: list[Rejection] = []
    first: dict[str, str] = {}
    for name, trajectory in episodes:
        reason, detail = _fault(trajectory, in_tags is None or name in in_tags)
        text = f"{trajectory.instance.key}\n{text_of(trajectory)}"
        if not reason and first.setdefault(text, name) != name:
            reason, detail = "duplicate", f"same text as trajectory {first[text]}"
        if reason:
            rejected.append(_reject(name, reason, detail))
        else:
            sound.append((name, trajectory))
    drawn = _drawn(sound, per_question, seed)
    over = [episode for episode in sound if episode[0] not in drawn]
    rejected += [_reject(name, "question-cap", f"{one.instance.key} keeps {per_question}") for name, one in over]
    return Filtered(tuple(episode for episode in sound if episode[0] in drawn), tuple(rejected))


def _fault(trajectory: Trajectory, tagged: bool) -> tuple[str, str]:
    """Return why an episode is not trained on, with details; empty texts where it is."""
    if not trajectory.success:
        return "wrong-answer", f"reward {trajectory.reward:g}, stopped by {trajectory.stop}"
    if tagged and (fault := strict_fault(text_of(trajectory))):
        return "format", fault
    if unread := next((step.action for step in trajectory.steps if is_misread(step.action)), ""):
        return "format", unread
    failed = next((call for step in trajectory.steps for call in step.tool_calls if call.status != "ok"), None)
    if failed is not None:
        return "failed-call", f"{failed.tool}: {failed.status}"
    refused = [step.action for step in trajectory.steps if tagged and step.valid is False]
    return ("refused-call", refused[0]) if refused else ("", "")


def _drawn(sound: Sequence[Episode], per_question: int, seed: int) -> set[str]:
    """Return the ids of the episodes that the cap leaves, independent of their order and ids."""
    by_question: dict[str, list[tuple[str, str]]] = {}
    for name, trajectory in sound:
        by_question.setdefault(trajectory.instance.key, []).append((text_of(trajectory), name))
    return {
        name
        for key, episodes in by_question.items()
        for _, name in random.Random(derive_seed(seed, "rft", key)).sample(
            sorted(episodes), min(len(episodes), per_question or len(episodes))
        )
    }


def _reject(subject: str, reason: str, detail: str) -> Rejection:
    return Rejection(stage=STAGE, subject=subject, reason=reason, detail=detail)
