"""What the tests against a real vLLM share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentr_core.methods.faults import parse
from agentr_core.models.vllm.model import VllmModel
from agentr_core.models.vllm.replicas import Launch, Replicas
from agentr_core.recipes.models import ModelConfig

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
    return parse({"name": "test", "model": model}).model


@asynccontextmanager
async def serving(launch: Launch, *, engine: Path, logs: Path) -> AsyncIterator[VllmModel]:
    """Lend a model once its replicas answer; they end with the block."""
    model = VllmModel(launch, Replicas(launch, python=engine / "bin" / "python", logs=logs))
    try:
        async with asyncio.timeout(START_SECONDS + 60):
            await model.ready()
        yield model
    finally:
        await model.close()
