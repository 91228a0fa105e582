"""Agent-R's matching of what an agent wrote to the nearest action that is possible.

Source: Agent-R (arXiv 2501.11425), its public code. Differences: its guard against repeated
actions, which never takes effect, is left out; characters are not stripped from the matched text,
since that damages legal names; of equally near and equally long actions, the first in alphabetical
order is taken, not an arbitrary one.
"""

from __future__ import annotations

from collections.abc import Sequence

_ROOMS = (
    "hallway",
    "greenhouse",
    "green house",
    "kitchen",
    "bathroom",
    "outside",
    "workshop",
    "art studio",
    "foundry",
    "bedroom",
    "living room",
)
_NO_FOCUS = frozenset(f"focus on {what}" for what in ("agent", "air", *_ROOMS))
_SMALL_WORDS = frozenset(("focus", "on", "in", "to"))


def match(action: str, valid: Sequence[str], surroundings: str) -> str:
    """Return the possible action that shares the most words with `action`, or `action` itself if
    none shares any.

    Args:
        valid: the simulator's list of possible actions.
        surroundings: what the agent sees and has; a focus on something else is no candidate.
    """
    wanted = action.replace("green house", "greenhouse").strip()
    candidates = {each for each in (*valid, *(f"open door to {room}" for room in _ROOMS)) if _fit(each, surroundings)}
    if wanted in candidates:
        return wanted
    words = set(wanted.split())
    shared = {each: len(words.intersection(each.split())) for each in candidates}
    nearest = min(candidates, key=lambda each: (-shared[each], len(each), each))
    return nearest if shared[nearest] else wanted


def _fit(candidate: str, surroundings: str) -> bool:
    if candidate in _NO_FOCUS or ("door" in candidate and "open" not in candidate):
        return False
    if not candidate.startswith("focus on "):
        return True
    return all(word in surroundings for word in candidate.split() if word not in _SMALL_WORDS)
