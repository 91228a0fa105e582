"""What an environment promises about repeating itself, and whether what it says now is what was
recorded by that.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import StrEnum
from typing import Any

_WORD = re.compile(r"\w+")


class Repeatability(StrEnum):
    """How equal instances and actions lead to equal texts; the attribute `repeatability` of an
    environment.
    """

    EXACT = "exact"
    """To the letter. The promise of an environment that says nothing."""
    UNORDERED = "unordered"
    """Up to the order in which things are listed."""
    NEVER = "never"
    """Not at all: an instance may begin with another text after a restart of its server, or at any
    reset.
    """


def repeatability_of(env: Any) -> Repeatability:
    """Return what an environment promises about repeating itself."""
    return Repeatability(getattr(env, "repeatability", Repeatability.EXACT))


def repeats(seen: str, recorded: str, promise: Repeatability) -> bool:
    """Return whether a text is the recorded one: to the letter, or, where no more is promised, in
    its words.
    """
    if seen == recorded or promise is Repeatability.EXACT:
        return seen == recorded
    return Counter(_WORD.findall(seen)) == Counter(_WORD.findall(recorded))
