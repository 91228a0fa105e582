"""Shards without trees or episodes, for tests of what carries shards."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentr_core.errors import EnvironmentFault, EnvironmentUnavailable
from agentr_core.runtime.equipment import Checkpoint, Effort, Equipment, Sink

NOWHERE = Checkpoint(id="none", path=Path("nowhere"), weights_sha256="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Returns its texts. The first `deadly` tries of a shard kill the worker; every try leaves a
    file in `folder`. `spent` is what its work says that it took.
    """

    texts: tuple[str, ...]
    folder: Path
    deadly: int = 0
    fault: str = ""
    spent: Effort = field(default_factory=Effort)
    checkpoint: Checkpoint = field(default=NOWHERE)
    done: int = 0

    @property
    def total(self) -> int:
        return len(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def split(self, size: int) -> tuple[Echo, ...]:
        return tuple(replace(self, texts=self.texts[at : at + size]) for at in range(0, len(self.texts), size))

    async def work(self, equipment: Equipment, sink: Sink) -> Effort:
        number = len(list(self.folder.glob(f"{self.texts[0]}-*"))) + 1
        (self.folder / f"{self.texts[0]}-{number}").write_text(str(os.getpid()))
        if number <= self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "passing" and number == 1:
            raise EnvironmentUnavailable("out for a moment")
        if self.fault == "lasting":
            raise EnvironmentFault("broken")
        for text in self.texts:
            row = {"trajectory_id": f"{equipment.run_id} {text}", "iteration_id": "echo", "step": 1}
            sink.add({"rl_validation": [row]})
        return self.spent + Effort(tokens=len(self.texts))
