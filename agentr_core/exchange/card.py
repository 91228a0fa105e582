"""The README.md of an export, in the form that the Hugging Face hub and `datasets` read."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from agentr_core.exchange.training_set import TrainingSet

_WIDTH = 100


def card(training_set: TrainingSet, files: Mapping[str, str], *, told: str, read_with: str, unmasked: str) -> str:
    """Return the card of an export.

    Args:
        told: how many rows there are, and of what.
        files: the paths in its folder by the name of the set that a reader asks for; the first is
            the default.
        read_with: how the files are read.
        unmasked: what the files leave out about the loss mask; empty if nothing.
    """
    configs = [
        {"config_name": name, "data_files": [{"split": "train", "path": path}], "default": number == 0}
        for number, (name, path) in enumerate(files.items())
    ]
    head = {"pretty_name": training_set.name, "tags": ["agentr", "agent-trajectories"], "configs": configs}
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, width=_WIDTH)}---",
        f"# {training_set.name}",
        f"{told}, exported by agentr. {read_with}",
        *([f"**Without the loss mask**: {unmasked}."] if unmasked else []),
        "\n".join(f"- {name}: `{fact}`" for name, fact in training_set.facts.items()),
    ]
    return "".join(f"{line}\n\n" for line in lines).rstrip() + "\n"
