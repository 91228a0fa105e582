"""Published checkpoints: ordinary model directories that appear all at once, with a manifest that
says how they were made.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentr_core.errors import AlarmRaised, ModelDirectoryError, TrainingFault
from agentr_core.models.checkpoint_dir import weights_sha256
from agentr_core.system import flush_to_disk
from agentr_core.training.job import STEP, TrainingStep, write_atomically

MANIFEST = "manifest.json"
HISTORY = "training_history.jsonl"
ADAPTER = "adapter"
"""The folder of a checkpoint's LoRA adapter; the weights beside it have the adapter merged in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """How a checkpoint was made. `job` is the fingerprint of its `Job`.

    `trained_tokens` counts tokens that carried loss, repeats included; `epochs` is the number of
    samples seen divided by the samples of the dataset; `final_loss` is the loss of the last step;
    `seconds` is time spent in training. `ended_by` is the setting that ended the training, empty in
    checkpoints of earlier versions. `files` has the size in bytes of every other file of the
    directory, by its relative path.

    `dataset_hash` and `rows` identify what it was trained on: a dataset, or the steps of
    reinforcement learning, whose rows in the store have the hash `rows`. `parent_weights` and
    `iteration` are those of its job. `rows` and these two are empty in checkpoints of earlier
    versions.
    """

    job: str
    parent: str
    dataset_hash: str
    config: Mapping[str, Any]
    seed: int
    steps: int
    epochs: float
    trained_tokens: int
    final_loss: float
    seconds: float
    versions: Mapping[str, str]
    ended_by: str = ""
    rows: str = ""
    parent_weights: str = ""
    iteration: str = ""
    weights_sha256: str = ""
    files: Mapping[str, int] = field(default_factory=dict)

    def check_ending(self) -> None:
        """Raise `AlarmRaised` if an alarm ended the training."""
        if self.ended_by.startswith("alarms."):
            raise AlarmRaised(
                f"alarm {self.ended_by.removeprefix('alarms.')} ended the training; the weights of step {self.steps}, "
                "the last that were saved before it, are published, and the same command goes on from them"
            )


_MANIFEST: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a published checkpoint.

    Raises `ModelDirectoryError` when there is none or it cannot be read.
    """
    file = path / MANIFEST
    try:
        return _MANIFEST.validate_json(file.read_bytes())
    except FileNotFoundError:
        raise ModelDirectoryError(f"{path} has no {MANIFEST}, so no training finished there; train it again") from None
    except (OSError, ValidationError) as error:
        raise ModelDirectoryError(
            f"{file} cannot be read ({str(error).splitlines()[0]}); train the checkpoint again"
        ) from error


def is_complete(path: Path) -> bool:
    """Return whether a directory is a published checkpoint: it has a valid manifest, and every file
    at the size that the manifest says.
    """
    try:
        manifest = read_manifest(path)
    except ModelDirectoryError:
        return False
    return bool(manifest.files) and _size_by_file(path) == dict(manifest.files)


def read_history(path: Path) -> list[TrainingStep]:
    """Return all optimizer steps of a published checkpoint's training in order, including those
    before an interruption.
    """
    lines = (path / HISTORY).read_text(encoding="utf-8").splitlines()
    return [STEP.validate_json(line) for line in lines]


def publish(staging: Path, destination: Path, manifest: Manifest) -> Manifest:
    """Write the manifest, with hash and sizes filled in, and move a finished directory to its
    destination in one step; return the manifest as written.

    `staging` holds everything but the manifest and is on the file system of `destination`.

    Raises:
        TrainingFault: the destination already exists; it is left as it is.
        ModelDirectoryError: the weights in `staging` are missing or damaged.
        OSError: the file system refuses, for example because it is full.
    """
    for file in staging.rglob("*"):
        if file.is_file():
            flush_to_disk(file)
    complete_manifest = dataclasses.replace(
        manifest, weights_sha256=weights_sha256(staging), files=_size_by_file(staging)
    )
    write_atomically(staging / MANIFEST, _MANIFEST.dump_json(complete_manifest, indent=1))
    if destination.exists():
        raise TrainingFault(
            f"{destination} appeared while this checkpoint was trained; choose another output directory"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging.rename(destination)
    return complete_manifest


def publish_step(staging: Path, output_dir: Path, manifest: Manifest, *, max_folders: int | None) -> None:
    """Publish the weights of an unfinished training as `OUTPUT_DIR@STEP`, beside the folder of the
    finished checkpoint, and remove the oldest such folders until there are at most `max_folders`;
    None keeps all.

    What an interrupted attempt left for that step is replaced. Raises what `publish` raises.
    """
    # The folder's name is the id of that checkpoint.
    folder = output_dir.with_name(f"{output_dir.name}@{manifest.steps}")
    shutil.rmtree(folder, ignore_errors=True)
    publish(staging, folder, manifest)
    if max_folders is not None:
        for old_folder in list(published_steps(output_dir).values())[:-max_folders]:
            shutil.rmtree(old_folder)


def published_steps(output_dir: Path) -> dict[int, Path]:
    """Return the complete folders that `publish_step` wrote for a training, by step, in ascending
    order.
    """
    path_by_suffix = {path.name.rpartition("@")[2]: path for path in output_dir.parent.glob(f"{output_dir.name}@*")}
    path_by_step = {int(step): path for step, path in path_by_suffix.items() if step.isascii() and step.isdecimal()}
    return {step: path_by_step[step] for step in sorted(path_by_step) if is_complete(path_by_step[step])}


def relative_to_cwd(path: Path) -> Path:
    """Return a path relative to the working directory if it lies below that, so that a workspace
    can be moved; otherwise the path as it is.
    """
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path


def _size_by_file(path: Path) -> dict[str, int]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.stat().st_size for file in files if file != path / MANIFEST}
