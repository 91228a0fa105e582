"""How many replies of helpers are unreadable; a stage in which most are is stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from agentr_core.answers import is_unreadable
from agentr_core.errors import ConfigError
from agentr_core.types import Answer, Generation

_log = logging.getLogger(__name__)
_LEAST = 20
"""Fewer replies stop no stage."""


class Readings:
    """Counts the replies of the model of a role in a stage, and those that are unreadable."""

    def __init__(self, role: str, model: str) -> None:
        self._who = f"the {role} ({model})"
        self._replies = 0
        self._unreadable = 0

    def count(self, reply: Answer | Generation) -> None:
        """Count a reply. Raises `ConfigError` once more than half of at least 20 replies are
        unreadable: the others would be, too.
        """
        self._replies += 1
        self._unreadable += is_unreadable(reply)
        if self._replies >= _LEAST and 2 * self._unreadable > self._replies:
            raise ConfigError(
                f"{self}; give it more tokens (max_new_tokens of what it is asked for), start its server with a "
                "reasoning parser, or switch its thinking off (server.extra_body)"
            )

    def log(self) -> None:
        """Log how many replies were unreadable, if any were."""
        if self._unreadable:
            _log.warning("%s", self)

    def __str__(self) -> str:
        return (
            f"{self._unreadable:,} of {self._replies:,} replies of {self._who} were cut at their token limit before "
            "their thought had ended, so nothing of them counts"
        )


@contextmanager
def readings_of(role: str, model: str) -> Iterator[Readings]:
    """Yield the count of the replies of a model, which is logged after the block."""
    readings = Readings(role, model)
    try:
        yield readings
    finally:
        readings.log()
