"""What the tests against a real vLLM share."""

from __future__ import annotations

from pathlib import Path

from agentr_core import recipes
from agentr_core.recipes import ModelConfig

ROOT = Path(__file__).parents[2]
TINY = ROOT / "data" / "models" / "textcraft-tiny"
START_SECONDS = 3600
"""A machine that is busy with other things starts vLLM fifty times slower than an idle one."""


def settings(**vllm: object) -> ModelConfig:
    """Return the model section of a recipe for the tiny model, in float32, so that replies
    repeat.
    """
    model = {
        "backend": "vllm",
        "path": str(TINY),
        "device": "cpu",
        # What the contract asks for.
        "context_length": 512,
        "vllm": {"start_timeout": START_SECONDS, **vllm},
    }
    return recipes.parse({"name": "test", "model": model}).model
