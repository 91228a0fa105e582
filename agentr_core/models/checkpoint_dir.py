"""Hugging Face model directories, checked before anything heavy is loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentr_core.errors import ModelDirectoryError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_FILES = (
    *_VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


def check_model_directory(path: Path) -> tuple[Path, ...]:
    """Return the weight files of a complete model directory, in the order of their names.

    Reads headers only, so it is cheap for large models.

    Raises:
        ModelDirectoryError: the directory, its configuration, weights, tokenizer or chat template is missing or
            damaged; one sentence says which.
    """
    if not path.is_dir():
        raise ModelDirectoryError(f"model directory {path} does not exist; give a Hugging Face model directory")
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ModelDirectoryError(f"{path} holds a LoRA adapter, not a model; merge it into its base model first")
        raise ModelDirectoryError(f"{path} has no config.json; give a Hugging Face model directory")
    if "model_type" not in _read_json(path / "config.json"):
        raise ModelDirectoryError(f"{path / 'config.json'} names no model_type; save the model with save_pretrained")
    files = _weight_files(path)
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise ModelDirectoryError(f"{path} has no tokenizer; save it there with tokenizer.save_pretrained")
    if not _has_chat_template(path):
        raise ModelDirectoryError(f"{path} has no chat template; add the model's chat_template.jinja")
    return files


def weights_sha256(path: Path) -> str:
    """Return the SHA-256 of a model's weights: of the only weight file, or over names and hashes of several.

    Raises `ModelDirectoryError` when there are no sound weights.
    """
    files = _weight_files(path)
    if len(files) == 1:
        return _sha256(files[0])
    together = hashlib.sha256()
    for file in files:
        together.update(f"{file.name}:{_sha256(file)}\n".encode())
    return together.hexdigest()


def behaviour_files_sha256(path: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of each small file that decides replies: tokenizer, template, configuration."""
    return {name: _sha256(path / name) for name in sorted(_TOKENIZER_FILES) if (path / name).is_file()}


def _weight_files(path: Path) -> tuple[Path, ...]:
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelDirectoryError(f"{path / _INDEX} has no weight_map; save the model again")
        names = sorted(set(weight_map.values()))
        held = {name: _tensor_names(path / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in held[name]:
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


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    config = path / "tokenizer_config.json"
    return config.is_file() and bool(_read_json(config).get("chat_template"))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{file} is not readable JSON ({error}); copy it again") from error
    if not isinstance(data, dict):
        raise ModelDirectoryError(f"{file} must hold a JSON object, not a {type(data).__name__}; copy it again")
    return data


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
