"""The commands of the README and the manual, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MANUAL = ROOT / "data" / "manual" / "pages"
TUTORIAL = MANUAL / "tutorial.md"
"""Its commands build on one another: tests/docs/test_manual.py runs them as one."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
BLOCKS: list[tuple[str, str]] = [
    block
    for text in (TEXT, *(page.read_text("utf-8") for page in sorted(MANUAL.rglob("*.md")) if page != TUTORIAL))
    for block in BLOCK.findall(text)
]
COMMANDS = list(
    dict.fromkeys(
        line.split("#")[0].strip()
        for language, text in BLOCKS
        if language == "sh"
        for line in text.splitlines()
        if line.strip()
    )
)


def command(start: str) -> str:
    """Return the one command that begins so."""
    (line,) = (each for each in COMMANDS if each.startswith(start))
    return line
