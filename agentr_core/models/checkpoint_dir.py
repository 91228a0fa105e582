"""Hugging Face model directories, checked before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path

from agentr_core.errors import ModelDirectoryError
from agentr_core.model_files import file_sha256, read_json, weight_files

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
    if "model_type" not in read_json(path / "config.json"):
        raise ModelDirectoryError(f"{path / 'config.json'} names no model_type; save the model with save_pretrained")
    files = weight_files(path)
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise ModelDirectoryError(f"{path} has no tokenizer; save it there with tokenizer.save_pretrained")
    if not _has_chat_template(path):
        raise ModelDirectoryError(f"{path} has no chat template; add the model's chat_template.jinja")
    return files


def behaviour_files_sha256(path: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of each small file that decides replies: tokenizer, template, configuration."""
    return {name: file_sha256(path / name) for name in sorted(_TOKENIZER_FILES) if (path / name).is_file()}


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    config = path / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))
