"""TextCraft as its real server behaves: which commands of no use it lists differs from one process
to the next.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import ClassVar

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.types import Instance

GOAL = "\n\nGoal: "
# The environment variable that, if it is set, ends a process where a search returns to a node.
MORTAL = "RESTLESS_MORTAL"


class Restless(TextCraft):
    """Lists one command more than an instance has, which follows from the process, as from a hash
    seed.

    A mortal process ends without an answer when it is to begin a training instance for the third
    time: a server may have done so once when it made its environment.
    """

    name = "restless"
    begun: ClassVar[Counter[Instance]] = Counter()

    def reset(self, instance: Instance) -> str:
        if MORTAL in os.environ and instance.split == "train":
            self.begun[instance] += 1
            if self.begun[instance] == 3:
                os._exit(1)
        further = self._further(instance)
        commands, goal = super().reset(instance).split(GOAL)
        return f"{commands}\n{further}{GOAL}{goal}"

    def _further(self, instance: Instance) -> str:
        candidates = [candidate for candidate in self.instances(instance.split) if candidate != instance]
        alternative = random.Random(f"{os.getpid()} {instance.key}").choice(candidates)
        return super().reset(alternative).split(GOAL)[0].splitlines()[1]


def install(folder: Path) -> Path:
    """Lay down a package that registers `Restless` as any third party would; put the folder on
    `sys.path`.
    """
    info = folder / "agentr_restless-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentr-restless\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentr.environments]\nrestless = restless:Restless\n")
    return folder
