"""Checks whether a file can replace the weights of a server: vLLM only warns about missing ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentr_core.errors import ModelFault
from agentr_core.models.files import read_json, weight_files

_TIED = "lm_head.weight"
"""A checkpoint may hold it even when it is tied to the embedding."""
_SHOWN = 3


def check_replacement(weights: Path, model: Path) -> None:
    """Check that a file, alone in its folder, has the parameters of a model directory, by name and
    shape, and no others. Then vLLM loads the file completely if it loads the directory completely.

    Raises `ModelFault` otherwise.
    """
    try:
        new, own = _shapes([weights]), _shapes(weight_files(model))
    except (OSError, SafetensorError) as error:
        raise ModelFault(f"the weights in {weights} cannot be read: {error}") from error
    if others := sorted(file.name for file in weights.parent.glob("*.safetensors") if file != weights):
        raise ModelFault(f"{weights} must be alone in its folder, which vLLM reads whole, and beside it is {others[0]}")
    if _TIED not in new and read_json(model / "config.json").get("tie_word_embeddings"):
        own.pop(_TIED, None)
    if strangers := sorted(name for name in own.keys() | new.keys() if own.get(name) != new.get(name)):
        raise ModelFault(
            f"the weights in {weights} are not those of {model}: {', '.join(strangers[:_SHOWN])} "
            f"({len(strangers)} of {len(own)})"
        )


def _shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return shapes
