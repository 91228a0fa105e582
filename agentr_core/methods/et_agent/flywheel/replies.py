"""Reads the replies of editor and reflector: labels in any case; None for what cannot be read."""

from __future__ import annotations

import re
from typing import NamedTuple

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
    """Return the number after the first label "Step:", counted from 1; 0 for "no"."""
    found = _STEP.search(reply)
    if found is None:
        return None
    return int(found[1]) if found[1].isdigit() else 0


def redundant_step(reply: str) -> Redundant | None:
    """Return the redundant step that a reply names, with its correction; the number is 0 if the
    reply says that there is none.
    """
    number, label = step_number(reply), _CORRECTED.search(reply)
    if number == 0:
        return Redundant(0, "")
    if number is None or label is None or not reply[label.end() :].strip():
        return None
    return Redundant(number, reply[label.end() :].strip())


def thoughts(reply: str, count: int) -> tuple[str, ...] | None:
    """Return the thoughts of a reply, without thought tags around them; None unless there are
    `count`, numbered in order, and none is empty or contains a tag.
    """
    labels = list(_THOUGHT.finditer(reply))
    if [int(label[1]) for label in labels] != list(range(1, count + 1)):
        return None
    ends = [label.start() for label in labels[1:]] + [len(reply)]
    found = tuple(_THINK.sub("", reply[label.end() : end]).strip() for label, end in zip(labels, ends, strict=True))
    return None if any(not text or any(tags(text)) for text in found) else found
