"""A checkpoint that was given away, on a real vLLM: it says what the transformers backend says of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from real_model import smollm2
from vllm_engine import TINY, serving, settings

from agentr_core.methods.faults import parse
from agentr_core.models.checkpoint_dir import weights_sha256
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.vllm.replicas import make_launch
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.types import Message, Request, Sampling
from flows.commands.publishing import publish_checkpoint
from tasks import wiring


async def publish_model(folder: Path, base: Path) -> Path:
    """Return what is published of a model after a few steps of cloning the expert."""
    data = {
        "name": "cloned",
        "method": "eto",
        "workspace": str(folder / "runs"),
        "iterations": 1,
        "environment": {"name": "textcraft"},
        "model": {"path": str(base), "device": "cpu", "dtype": "float32"},
        "instances": {"train_limit": 4, "test_limit": 1},
        "eto": {"phases": ["sft"]},
        "data": {"max_length": 2048},
        # Several steps, as the learning rate of the first is zero, whichever demonstrations it has.
        "training": {"learning_rate": 1e-3, "max_tokens": 1500, "bf16": False, "per_device_train_batch_size": 2},
        "evaluation": {"max_steps": 1, "max_new_tokens": 4, "revision_test": {"enabled": False}},
    }
    recipe = parse(data)
    ctx = wiring.quiet_context(wiring.run_reference(recipe), recipe)
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    for name in ("demonstrate", "dataset", "train"):
        await ctx.plan(1).stage(name).work(ctx, 1)
    publish_checkpoint(
        ctx.root, ctx.trained_checkpoint(1).id, folder / "given", base_model="somebody/tiny", licence="apache-2.0"
    )
    return folder / "given"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("base", [lambda: TINY, smollm2], ids=["tiny", "smollm2"])
async def test_a_published_directory_is_served_as_it_is(base: Callable[[], Path], engine: Path, tmp_path: Path) -> None:
    folder = await publish_model(tmp_path, base())
    assert weights_sha256(folder) != weights_sha256(base())
    requests = [
        Request(
            messages=(Message(role="user", text=f"Goal: craft {thing}."),),
            sampling=Sampling(temperature=0.0, max_new_tokens=12),
            seed=0,
        )
        for thing in ("stick", "oak boat", "ladder")
    ]
    async with serving(make_launch(folder, settings()), engine=engine, logs=tmp_path / "logs") as model:
        replies = await model.generate(requests)
    local_model = TransformersModel.load(folder, device="cpu")
    try:
        expected = await local_model.generate(requests)
    finally:
        await local_model.close()
    assert [[reply.token_ids for reply in each] for each in replies] == [
        [reply.token_ids for reply in each] for each in expected
    ]
