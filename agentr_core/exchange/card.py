"""The README.md of an export, in the form that the Hugging Face hub and `datasets` read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from agentr_core.exchange.training_set import TrainingSet

_WIDTH = 100
_TYPED = (
    "The head of this file has the types of the columns, so load the folder: `datasets` types a JSON file that it is "
    "given alone from its first 10 MB, and fails where a key that was null until then has a value. Parquet "
    "(`agentr export --format parquet`) has no such limit."
)


def card(
    training_set: TrainingSet,
    files: Mapping[str, str],
    *,
    types: Sequence[Mapping[str, Any]],
    told: str,
    read_with: str,
    unmasked: str,
    notes: Sequence[str],
) -> str:
    """Return the card of an export.

    Args:
        told: how many rows there are, and of what.
        files: the paths in its folder by the name of the set that a reader asks for; the first is
            the default.
        types: `dataset_info` of those of these sets that have no types of their own.
        read_with: how the files are read.
        unmasked: what the files leave out about the loss mask; empty if nothing.
        notes: what else a reader has to know.
    """
    configs = [
        {"config_name": name, "data_files": [{"split": "train", "path": path}], "default": number == 0}
        for number, (name, path) in enumerate(files.items())
    ]
    head = {
        "pretty_name": training_set.name,
        "tags": ["agentr", "agent-trajectories"],
        "configs": configs,
        **({"dataset_info": list(types)} if types else {}),
    }
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, width=_WIDTH)}---",
        f"# {training_set.name}",
        f"{told}, exported by agentr. {read_with}",
        *([f"**Without the loss mask**: {unmasked}."] if unmasked else []),
        *(f"**Note**: {note}." for note in notes),
        *([_TYPED] if types else []),
        "\n".join(f"- {name}: `{fact}`" for name, fact in training_set.facts.items()),
    ]
    return "".join(f"{line}\n\n" for line in lines).rstrip() + "\n"
