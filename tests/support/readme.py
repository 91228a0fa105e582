"""The commands of the README, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [
    line.split("#")[0].strip()
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if line.strip()
]


def command(start: str) -> str:
    """Return the one command that begins so."""
    (found,) = (each for each in COMMANDS if each.startswith(start))
    return found
