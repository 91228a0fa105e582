"""The saved state of a training that samples, written completely or not at all.

They contain no state of a random generator, because each draw has its own seed. Processes that hold
parts of the state write these into a folder beside its file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentr_core.training.job import STEP, TrainingStep
from agentr_core.writing import sync, writing


class Snapshot(NamedTuple):
    """The state after a step: that of the learner, with the folder of the parts that processes
    hold, the history up to it, and the hashes of what it was made of; none in a state of an earlier
    version.
    """

    step: int
    learner: dict[str, Any]
    parts: Path
    history: list[TrainingStep]
    made_of: list[str]


def save(
    folder: Path,
    step: int,
    state: Callable[[Path], dict[str, Any]],
    history: list[TrainingStep],
    made_of: Sequence[str],
) -> None:
    """Write the state after a step, and remove earlier ones.

    Args:
        state: returns that of the learner; it may write parts of it to a folder, which it makes.

    Raises `DiskError`.
    """
    file = folder / f"step-{step:06d}.pt"
    draft = file.with_suffix(".new")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_parts(file), ignore_errors=True)
        learner = state(_parts(file))
        lines = [STEP.dump_json(one).decode() for one in history]
        with draft.open("wb") as stream:
            torch.save({"step": step, "learner": learner, "history": lines, "made_of": list(made_of)}, stream)
        # Before the earlier states go, this one must outlast a loss of power.
        for written in (draft, *(path for path in _parts(file).rglob("*") if path.is_file())):
            sync(written)
        draft.replace(file)
        sync(folder)
        for old in sorted(folder.glob("step-*.pt"))[:-1]:
            old.unlink()
        for parts in folder.glob("step-*.parts"):
            if parts != _parts(file):
                shutil.rmtree(parts)


def load(folder: Path) -> Snapshot | None:
    """Return the newest saved state; None if there is none."""
    files = sorted(folder.glob("step-*.pt"))
    if not files:
        return None
    state = torch.load(files[-1], weights_only=True, map_location="cpu")
    history = [STEP.validate_json(line) for line in state["history"]]
    return Snapshot(state["step"], state["learner"], _parts(files[-1]), history, state.get("made_of", []))


def remove(folder: Path) -> None:
    """Remove all saved states."""
    shutil.rmtree(folder, ignore_errors=True)


def _parts(file: Path) -> Path:
    return file.with_suffix(".parts")
