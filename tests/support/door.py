"""A world in which a model that knows nothing succeeds now and then: a door that some words
open.
"""

from __future__ import annotations

import hashlib
import os
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentr_core.environment import Environment
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.types import Instance, Transition

TRIES = 4


class Door(Environment):
    """Say something; one in four replies opens the door. After four wrong ones it is locked for
    good.

    `pause` is how long a step takes in seconds, for tests that interrupt; the variable DOOR_PAUSE
    says it to processes whose recipe must not differ. `knows` says whether there is an expert, who
    says one wrong word and then the right one.

    The variable DOOR_HOLD names a folder, with which a test keeps a run from ending before it has
    looked: while the folder has a file that is named after the split of a door, that door takes one
    wrong word and waits before the next.
    """

    name = "door"
    instruction = "You stand before a door. Say the word."
    step_limit = 6

    def __init__(self, pause: float = 0.0, knows: bool = False) -> None:
        self._knows = knows
        self._pause = pause or float(os.environ.get("DOOR_PAUSE", "0"))
        self._hold = Path(os.environ["DOOR_HOLD"]) if "DOOR_HOLD" in os.environ else None
        self.blocking = self._pause > 0 or self._hold is not None
        self._split = ""
        self._wrong = 0

    def splits(self) -> tuple[str, ...]:
        return ("train", "dev", "test")

    def instances(self, split: str) -> Sequence[Instance]:
        if split not in self.splits():
            raise ConfigError(f"door has no split {split!r}")
        return [Instance(environment="door", split=split, index=index) for index in range(6)]

    def reset(self, instance: Instance) -> str:
        if instance not in self.instances(instance.split):
            raise EnvironmentFault(f"there is no door {instance.key}")
        self._split = instance.split
        self._wrong = 0
        return f"Door {instance.index} of the {instance.split} house."

    def step(self, action: str) -> Transition:
        time.sleep(self._pause)
        while self._hold and self._wrong and (self._hold / self._split).exists():
            time.sleep(0.02)
        success = action == "open"
        self._wrong += not success
        observation = "It opens." if success else f"Wrong {self._wrong}."
        return Transition(
            observation,
            float(success),
            success or self._wrong == TRIES,
            False,
            {"success": success, "valid": bool(action)},
        )

    def parse(self, reply: str) -> str:
        return "open" if hashlib.sha256(reply.encode()).digest()[0] % 4 == 0 else "wrong"

    def snapshot(self) -> Any:
        return self._wrong

    def restore(self, snapshot: Any) -> None:
        self._wrong = snapshot

    def depth(self, instance: Instance) -> int | None:
        return 1 + instance.index % 2

    def expert(self, instance: Instance) -> Sequence[str] | None:
        words = [str(number) for number in range(99)]
        solution = ("wrong", "open") if self._knows else ()
        return [next(word for word in words if self.parse(word) == action) for action in solution] or None


def install(folder: Path) -> Path:
    """Lay down a package that registers `Door` as any third party would; put the folder on
    `sys.path` to install it.
    """
    return register(folder, "agentr-door", "[agentr.environments]\ndoor = door:Door\n")


def register(folder: Path, package: str, entry_points: str) -> Path:
    """Lay down the metadata of a package with entry points, as an installer does, and return the
    folder.
    """
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return folder


def register_package(folder: Path) -> Path:
    """Lay down the metadata of the package in a folder, as `pip install -e` does elsewhere, and
    return the folder.
    """
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {where}" for name, where in points.items()), ""]
    return register(folder, project["name"], "\n".join(lines))
