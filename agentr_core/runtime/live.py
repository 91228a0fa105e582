"""What a run reports while it works, before it is stored as rows: the progress of its stage, and
the steps of a training.

Both are small files in a folder beside the store. A stage reports its progress far more often than
it writes rows, and a training on a dataset stores its steps only with its checkpoint. No run
resumes from these files, so they may be lost, torn or foreign: an unreadable file counts as
missing.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

FOLDER = "live"
_WRITE_INTERVAL_S = 1.0
"""The shortest time between two writes of a file, in seconds."""
_RUN_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
"""The characters of the ids of runs; nothing else becomes part of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """The progress of a run's current stage. `began` and `told` are seconds since 1970;
    `stage_left` and `run_left` are the expected seconds to the end as of `told`, None where not
    known.
    """

    iteration: int
    stage: str
    done: int
    total: int
    note: str
    began: float
    told: float
    stage_left: float | None = None
    run_left: float | None = None


StepValues = tuple[int, float, float | None, float | None]
"""An optimizer step: its number, loss, learning rate and gradient norm."""
_PROGRESS = TypeAdapter(StageProgress)
_STEPS = TypeAdapter(list[StepValues])


def progress_file(workspace: Path, run_id: str) -> Path:
    """Return the file with the progress of a run."""
    return workspace / FOLDER / f"{run_id}.json"


def steps_file(workspace: Path, run_id: str, iteration: int) -> Path:
    """Return the file with the steps of the training at work in an iteration."""
    return workspace / FOLDER / f"{run_id}-{iteration}.jsonl"


def write_progress(file: Path, progress: StageProgress) -> None:
    """Replace the progress file of a run atomically. Errors of the disk are ignored."""
    draft = file.with_suffix(".new")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(progress)), encoding="utf-8")
        draft.replace(file)


def read_progress(workspace: Path, run_id: str) -> StageProgress | None:
    """Return the last progress that a run told; None if there is none."""
    with suppress(OSError, ValidationError):
        if _RUN_ID_CHARS.issuperset(run_id):
            return _PROGRESS.validate_json(progress_file(workspace, run_id).read_bytes())
    return None


def write_step(workspace: Path, run_id: str, iteration: int, step: StepValues | None) -> None:
    """Append a step to the file of a training, unless the file was written within the last second.
    With None, remove the file: the training is over, and its steps are in the store. Errors of the
    disk are ignored.
    """
    file = steps_file(workspace, run_id, iteration)
    with suppress(OSError):
        if step is None:
            file.unlink(missing_ok=True)
        elif not file.exists() or time.time() - file.stat().st_mtime >= _WRITE_INTERVAL_S:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"{json.dumps(step)}\n")


def read_steps(workspace: Path, run_id: str, iteration: int) -> list[StepValues]:
    """Return the steps that a running training has reported, in order; none if its file is missing
    or malformed. After a restart from an intermediate checkpoint, the new steps replace the old
    ones with the same or a higher number.
    """
    steps: list[StepValues] = []
    with suppress(OSError, ValidationError):
        if not _RUN_ID_CHARS.issuperset(run_id):
            return []
        lines, _, _ = steps_file(workspace, run_id, iteration).read_bytes().rpartition(b"\n")
        for step in _STEPS.validate_json(b"[%s]" % lines.replace(b"\n", b",")):
            while steps and steps[-1][0] >= step[0]:
                steps.pop()
            steps.append(step)
    return steps
