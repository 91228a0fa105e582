"""An environment's promise to repeat itself, and the comparison of its texts with recorded ones
under that promise.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import StrEnum
from typing import Any

_WORD = re.compile(r"\w+")


class Repeatability(StrEnum):
    """The degree to which equal instances and actions give equal texts; the attribute
    `repeatability` of an environment.
    """

    EXACT = "exact"
    """To the letter. The promise of an environment without the attribute."""
    UNORDERED = "unordered"
    """Up to the order in which things are listed."""
    NEVER = "never"
    """Not at all: an instance may begin with a different text after a restart of its server, or at
    any reset.
    """


def repeatability_of(env: Any) -> Repeatability:
    """Return what an environment promises about repeating itself."""
    return Repeatability(getattr(env, "repeatability", Repeatability.EXACT))


def repeats(seen: str, recorded: str, promise: Repeatability) -> bool:
    """Return whether a text repeats the recorded one: to the letter if that is promised, else in
    its words, in any order.
    """
    if seen == recorded or promise is Repeatability.EXACT:
        return seen == recorded
    return Counter(_WORD.findall(seen)) == Counter(_WORD.findall(recorded))
