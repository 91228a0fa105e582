"""The files of a Hugging Face model directory: which of them hold its weights, and their hashes."""

from __future__ import annotations

import hashlib
import json
import re
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentr_core.errors import ModelDirectoryError
from agentr_core.fingerprint import file_sha256, fingerprint
from agentr_core.texts import placed

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CHECKPOINTS = "checkpoints"
"""The folder of a workspace that has a folder for each checkpoint trained in it."""
SHARED_MEMORY = Path("/dev/shm")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_RECORDS = ("manifest.json", "job.json")
_YOUNG_SECONDS = 2.0
"""A file of this age may be written again within the grain of its times, which then stay the same.
"""


def checkpoint_folder(workspace: Path, checkpoint_id: str) -> Path:
    """Return the folder of a checkpoint that was trained in a workspace."""
    return workspace / CHECKPOINTS / checkpoint_id


def checkpoint_entries(workspace: Path) -> dict[str, list[Path]]:
    """Return what trainings left in a workspace, by the id of the checkpoint: its folder, that of
    its logs, and those of unfinished work.
    """
    entries: dict[str, list[Path]] = {}
    for entry in sorted((workspace / CHECKPOINTS).glob("*")):
        entries.setdefault(entry.name.removeprefix(".").partition(".")[0], []).append(entry)
    return entries


def iteration_of(folder: Path) -> str:
    """Return the id of the iteration that a training in a folder, finished or not, belongs to;
    empty if the folder does not say.
    """
    for name in _RECORDS:
        if (folder / name).is_file():
            with suppress(OSError, ValueError, AttributeError):
                return str(json.loads((folder / name).read_bytes()).get("iteration", ""))
    return ""


def shared_weights(workspace: Path, checkpoint_id: str) -> list[Path]:
    """Return the folder in memory in which the weights of a training are shared with its samplers,
    if it is there: a process that was killed leaves it.
    """
    folder = SHARED_MEMORY / shared_name(checkpoint_folder(workspace, checkpoint_id))
    return [folder] if folder.is_dir() else []


def shared_name(output_dir: Path) -> str:
    """Return the name of the folder in which the weights of a training are shared: it depends only
    on the folder of the checkpoint, so that a rerun finds what a killed process left.
    """
    return f"agentr-weights-{fingerprint(str(output_dir.absolute()))}"


def adapter_base(path: Path) -> Path | None:
    """Return the model directory that the PEFT adapter in `path` belongs to; None if `path` holds a
    whole model.

    A relative path starts at the working directory, as in PEFT.

    Raises `ModelDirectoryError` if the adapter names a directory that does not exist.
    """
    if (path / "config.json").is_file() or not (path / ADAPTER_CONFIG).is_file():
        return None
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or not Path(base).is_dir():
        raise ModelDirectoryError(
            f"the adapter in {path} belongs to the model {base!r}, which is not a directory here; put its path into "
            f"{path / ADAPTER_CONFIG} as base_model_name_or_path"
        )
    return Path(base)


def weights_sha256(path: Path) -> str:
    """Return the SHA-256 of a model's weights: of its only weight file, or of the names and hashes
    of several.

    For an adapter, it covers the adapter's weights and those of its model.

    Raises `ModelDirectoryError` if there are no sound weights.
    """
    files = weight_files(path)
    base = adapter_base(path)
    if base is not None:
        return hashlib.sha256(f"{weights_sha256(base)}:{_sha256(files[0])}".encode()).hexdigest()
    if len(files) == 1:
        return _sha256(files[0])
    together = hashlib.sha256()
    for file in files:
        together.update(f"{file.name}:{_sha256(file)}\n".encode())
    return together.hexdigest()


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file, which this process remembers: gigabytes take minutes, and every
    stage asks for them.
    """
    state = file.stat()
    if time.time() - max(state.st_mtime, state.st_ctime) < _YOUNG_SECONDS:
        return file_sha256(file)
    return _remembered(file.resolve(), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@lru_cache(maxsize=1024)
def _remembered(file: Path, *_: int) -> str:
    return file_sha256(file)


def no_model(path: Path) -> ModelDirectoryError:
    """Return the error of a path that is no model directory, with the way to make one: of a GGUF
    file, or of the name of a model on the Hub.
    """
    if path.is_file() and _is_gguf(path):
        return ModelDirectoryError(
            f"{path} is a GGUF file; `agentr models import {path} FOLDER` makes a model directory of it"
        )
    if inside := [file for file in sorted(path.glob("*.gguf")) if _is_gguf(file)]:
        source = path if len(inside) == 1 else inside[0]
        return ModelDirectoryError(
            f"{path} has no config.json, but the GGUF file {inside[0].name}; `agentr models import {source} FOLDER` "
            "makes a model directory of it"
        )
    if path.is_dir():
        return ModelDirectoryError(f"{path} has no config.json; give a Hugging Face model directory")
    hint = ""
    if _HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        hint = f"; if it is the name of a model on the Hub, `hf download {path} --local-dir FOLDER` makes one"
    problem = "is a file" if path.is_file() else "does not exist"
    return ModelDirectoryError(f"model directory {placed(path)} {problem}; give a Hugging Face model directory{hint}")


def _is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the weight files of a model or adapter directory, sorted by name; only their headers
    are read.

    Raises `ModelDirectoryError` when there are none, or one is missing, truncated or corrupt.
    """
    if adapter_base(path) is not None:
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise ModelDirectoryError(f"{path} has no {ADAPTER_WEIGHTS}; copy or save the adapter again")
        _tensor_names(path / ADAPTER_WEIGHTS)
        return (path / ADAPTER_WEIGHTS,)
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelDirectoryError(f"{path / _INDEX} has no weight_map; save the model again")
        names = sorted(set(weight_map.values()))
        tensor_names = {name: _tensor_names(path / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in tensor_names[name]:
                raise ModelDirectoryError(
                    f"{path / name} lacks the tensor {tensor!r} of the index; copy the file again"
                )
        return tuple(path / name for name in names)
    if not (path / _SINGLE).is_file():
        if any(path.glob("*.bin")):
            raise ModelDirectoryError(f"{path} has pickled weights only; convert them to safetensors")
        raise ModelDirectoryError(f"{path} has no weights ({_SINGLE} or {_INDEX}); copy or save the model again")
    _tensor_names(path / _SINGLE)
    return (path / _SINGLE,)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ModelDirectoryError` when it has none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{file} is not readable JSON ({error}); copy it again") from error
    if not isinstance(data, dict):
        raise ModelDirectoryError(f"{file} must hold a JSON object, not a {type(data).__name__}; copy it again")
    return data


def _tensor_names(file: Path) -> frozenset[str]:
    if not file.is_file():
        raise ModelDirectoryError(f"weight file {file} is missing though the index names it; copy it again")
    try:
        # Opening checks the header and that the file is as long as the header says.
        with safe_open(file, framework="numpy") as tensors:
            names = frozenset(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ModelDirectoryError(f"weight file {file} is truncated or corrupt ({error}); copy it again") from error
    if not names:
        raise ModelDirectoryError(f"weight file {file} holds no tensors; save the model again")
    return names
