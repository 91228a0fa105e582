"""The saved state of a training that samples, written completely or not at all.

They contain no state of a random generator, because each draw has its own seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentr_core.training.job import STEP, TrainingStep
from agentr_core.writing import sync, writing


def save(folder: Path, step: int, learner: dict[str, Any], history: list[TrainingStep]) -> None:
    """Write the state after a step, and remove earlier ones. Raises `DiskError`."""
    file = folder / f"step-{step:06d}.pt"
    draft = file.with_suffix(".new")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "learner": learner, "history": [STEP.dump_json(one).decode() for one in history]}
        with draft.open("wb") as stream:
            torch.save(state, stream)
        # Before the earlier states go, this one must outlast a loss of power.
        sync(draft)
        draft.replace(file)
        sync(folder)
        for old in sorted(folder.glob("step-*.pt"))[:-1]:
            old.unlink()


def load(folder: Path) -> tuple[int, dict[str, Any], list[TrainingStep]] | None:
    """Return the newest saved step, the learner's state after it and the history up to it; None if
    there is none.
    """
    files = sorted(folder.glob("step-*.pt"))
    if not files:
        return None
    state = torch.load(files[-1], weights_only=True, map_location="cpu")
    return state["step"], state["learner"], [STEP.validate_json(line) for line in state["history"]]
