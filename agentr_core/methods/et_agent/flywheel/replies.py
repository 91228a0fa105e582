"""Reads the replies of editor and reflector: labels in any case; None for what cannot be read."""

from __future__ import annotations

import re
from typing import NamedTuple

from agentr_core.answers import after_thoughts
from agentr_core.environments.reasoning.grammar import tags

STEP_FOUND = "Analysis:"
"""The text that ends a reply to a request for a step without its analysis."""
_STEP = re.compile(r"(?<!corrected )\bstep\W*:\W*(\d{1,9}|no\b)", re.IGNORECASE)
_CORRECTED = re.compile(r"\bcorrected\s+step\W*:\**", re.IGNORECASE)
_THOUGHT = re.compile(r"^\W*thought\s+(\d{1,9})\W*:\**", re.IGNORECASE | re.MULTILINE)
_THINK = re.compile(r"</?think>")


class Redundant(NamedTuple):
    """The number of a redundant step, counted from 1, and the step as it should be."""

    number: int
    step: str


def step_number(reply: str) -> int | None:
    """Return the number after the first label "Step:" that follows the reply's thought, counted
    from 1; 0 for "no".
    """
    found = _STEP.search(after_thoughts(reply, tags=True) or "")
    if found is None:
        return None
    return int(found[1]) if found[1].isdigit() else 0


def redundant_step(reply: str) -> Redundant | None:
    """Return the redundant step that a reply names, with its correction; the number is 0 if the
    reply says that there is none.
    """
    said = after_thoughts(reply, tags=True) or ""
    number, label = step_number(said), _CORRECTED.search(said)
    if number == 0:
        return Redundant(0, "")
    if number is None or label is None or not said[label.end() :].strip():
        return None
    return Redundant(number, said[label.end() :].strip())


def thoughts(reply: str, count: int) -> tuple[str, ...] | None:
    """Return the thoughts that a reply lists after its own, without tags around them; None unless
    there are `count`, numbered in order, and none is empty or contains a tag.
    """
    said = after_thoughts(reply, tags=True) or ""
    labels = list(_THOUGHT.finditer(said))
    if [int(label[1]) for label in labels] != list(range(1, count + 1)):
        return None
    ends = [label.start() for label in labels[1:]] + [len(said)]
    found = tuple(_THINK.sub("", said[label.end() : end]).strip() for label, end in zip(labels, ends, strict=True))
    return None if any(not text or any(tags(text)) for text in found) else found
