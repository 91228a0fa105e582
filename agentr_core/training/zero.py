"""DeepSpeed configurations: shipped ones, by name, or a file of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentr_core.errors import ConfigError, ModelDirectoryError
from agentr_core.models.files import read_json
from agentr_core.texts import placed

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "_data" / "deepspeed", _PACKAGE.parent / "deployments" / "deepspeed")


def names() -> list[str]:
    """Return the names of the shipped configurations."""
    return sorted({file.stem for folder in _FOLDERS for file in folder.glob("*.json")})


def read_zero(name: str) -> dict[str, Any]:
    """Return a DeepSpeed configuration, its "auto" fields still to be filled in by the Hugging Face
    Trainer.

    Args:
        name: one of `names()`, or the path of a JSON file.

    Raises `ConfigError` when there is no such file or it holds no JSON object.
    """
    files = [Path(name), *(folder / f"{name}.json" for folder in _FOLDERS)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        where = placed(Path(name)) if Path(name).suffix else name
        raise ConfigError(
            f"training.launch.deepspeed: there is no file {where}; name one, or choose {', '.join(names())}"
        )
    try:
        return read_json(file)
    except ModelDirectoryError as error:
        raise ConfigError(f"training.launch.deepspeed: {error}") from error


def splits_weights(content: dict[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration splits the weights themselves among processes
    (ZeRO-3).
    """
    zero = content.get("zero_optimization")
    return isinstance(zero, dict) and zero.get("stage") == 3


def offloads(content: dict[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration keeps weights and optimizer in main memory."""
    zero = content.get("zero_optimization")
    parts = [zero.get(name) for name in ("offload_param", "offload_optimizer")] if isinstance(zero, dict) else [None]
    return all(isinstance(part, dict) and part.get("device", "none") != "none" for part in parts)
