"""What the tests against a real vLLM share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "data" / "models" / "textcraft-tiny"
START_SECONDS = 3600
"""A machine that is busy with other things starts vLLM fifty times slower than an idle one."""
