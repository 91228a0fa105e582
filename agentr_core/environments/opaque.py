"""What worlds have in common that are played elsewhere: on a server, in another library, by an
agent outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentr_core.errors import EnvironmentFault
from agentr_core.types import Instance


class Opaque:
    """A world whose state cannot be copied, and which has no depths and no expert."""

    can_snapshot: ClassVar[bool] = False

    def snapshot(self) -> Any:
        """Raise `EnvironmentFault`."""
        raise EnvironmentFault(f"{type(self).__name__} has no snapshots; a state is restored by replay")

    def restore(self, snapshot: Any) -> None:
        """Raise `EnvironmentFault`."""
        self.snapshot()

    def depth(self, instance: Instance) -> int | None:
        """Return None: nobody tells how hard an instance is."""
        return None

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return None: there is no expert."""
        return None
