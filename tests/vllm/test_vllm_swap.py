"""Weights that a real vLLM takes in place: what it says then is what they say in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import secrets
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import groups
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from vllm_engine import START_SECONDS, TINY, serving, settings

from agentr_core.errors import ModelUnavailable
from agentr_core.methods.grpo.train import reinforce
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.vllm.model import VllmModel
from agentr_core.models.vllm.replicas import make_launch
from agentr_core.types import Generation, Message, Request, Sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # peft reads an attribute that transformers renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
# Longer than the blocks of a prefix cache: keys and values of other weights would be heard.
LONG = "".join(f"{number} oak log, " for number in range(60))
REQUESTS = [
    Request(
        messages=(Message(role="user", text=f"{LONG}craft {number} oak planks"),),
        sampling=Sampling(max_new_tokens=16, temperature=0.0, logprobs=True),
        seed=5,
    )
    for number in (1, 2, 3)
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the replica says."""
    return tmp_path_factory.mktemp("swap-logs") / "replica-0.log"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(engine: Path, log: Path) -> AsyncIterator[VllmModel]:
    launch = dataclasses.replace(make_launch(TINY, settings()), key=secrets.token_hex(16))
    async with serving(launch, engine=engine, logs=log.parent) as model:
        yield model


def other_weights(folder: Path, seed: int) -> Path:
    """Return a file with the weights of the tiny model, each a little changed."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(TINY / "model.safetensors")
    new_tensors = {
        name: value + 0.1 * value.float().std().nan_to_num(0.1) * torch.randn(value.shape, generator=generator)
        for name, value in tensors.items()
    }
    save_file({name: value.float() for name, value in new_tensors.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


async def in_process(weights: Path | None, context: int) -> list[list[Generation]]:
    model = TransformersModel.load(TINY, device="cpu", context_length=context)
    try:
        if weights is not None:
            await model.reload(weights)
        return await model.generate(REQUESTS)
    finally:
        await model.close()


def assert_same(served: list[list[Generation]], own: list[list[Generation]]) -> None:
    for (first,), (second,) in zip(served, own, strict=True):
        assert first.token_ids == second.token_ids
        assert first.logprobs == pytest.approx(second.logprobs, abs=2e-3)


async def test_replies_after_each_replacement_are_those_of_the_new_weights(served: VllmModel, tmp_path: Path) -> None:
    batches = [await served.generate(REQUESTS)]
    assert_same(batches[0], await in_process(None, served.context_length))
    for seed in (1, 2):
        file = other_weights(tmp_path / f"step-{seed}", seed)
        await served.reload(file)
        batches.append(await served.generate(REQUESTS))
        assert_same(batches[-1], await in_process(file, served.context_length))
    logprobs = [[reply.logprobs for (reply,) in replies] for replies in batches]
    assert logprobs[0] != logprobs[1] != logprobs[2]
    # Back to the weights of the start, all is as it was.
    folder = tmp_path / "start"
    folder.mkdir()
    shutil.copyfile(TINY / "model.safetensors", folder / "model.safetensors")
    await served.reload(folder / "model.safetensors")
    assert_same(await served.generate(REQUESTS), batches[0])


async def test_a_replica_that_is_killed_comes_back_with_the_weights_that_it_had_taken(
    served: VllmModel, log: Path, tmp_path: Path
) -> None:
    file = other_weights(tmp_path / "step-3", 3)
    await served.reload(file)
    replies = await served.generate(REQUESTS)
    engines = re.findall(r"\(EngineCore pid=(\d+)\)", log.read_text())
    os.kill(int(engines[-1]), signal.SIGKILL)
    with pytest.raises(ModelUnavailable):
        await served.generate(REQUESTS)
    async with asyncio.timeout(START_SECONDS + 60):
        assert_same(await served.generate(REQUESTS), replies)
    assert len(set(re.findall(r"\(EngineCore pid=(\d+)\)", log.read_text()))) > len(set(engines))


@pytest.mark.parametrize(("lora_r", "rate"), [(0, 1e-3), (4, 1e-2)])
async def test_a_step_of_group_rl_is_sampled_with_the_weights_of_the_one_before(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora_r: int, rate: float
) -> None:
    monkeypatch.setenv("AGENTR_VLLM_ENV", str(engine))
    monkeypatch.delenv("AGENTR_VLLM", raising=False)
    more = f"""
environment: {{name: textcraft}}
model: {{backend: vllm, vllm: {{start_timeout: {START_SECONDS}}}}}
instances: {{train_limit: 14}}
grpo: {{steps: 2, groups: 6, num_generations: 6, max_steps: 12, max_new_tokens: 72, repeats: 2, minibatches: 1}}
training: {{learning_rate: {rate}, lora_r: {lora_r}, lr_scheduler_type: constant, warmup_ratio: 0.0}}
"""
    ctx = await groups.begun(groups.write(tmp_path, TINY, more=more))
    state_dicts: list[dict[str, torch.Tensor]] = []
    reload = VllmModel.reload

    async def reload_and_keep(model: VllmModel, weights: Path) -> None:
        state_dicts.append(load_file(weights))
        await reload(model, weights)

    monkeypatch.setattr(VllmModel, "reload", reload_and_keep)
    await reinforce(ctx, 1)

    steps = ctx.store.query("select * from rl_step order by step")
    assert steps["step"].tolist() == [1, 2]
    assert (steps["trained_tokens"] > 0).all()
    first, second = state_dicts
    max_change = max((second[name] - weight).abs().max().item() for name, weight in first.items())
    assert max_change > rate / 10, "step 1 changed the weights"
    # From the policy that sampled to what the trainer has, before its update.
    assert steps["sampler_kl"].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    rows = ctx.store.query("select distinct step, policy from rl_group order by step")
    assert rows["policy"].str[-2:].tolist() == ["@0", "@1"]
    (checkpoint,) = ctx.store.query("select path from checkpoint where parent_id is not null")["path"]
    assert (Path(checkpoint) / "model.safetensors").is_file()
    assert (Path(checkpoint) / "adapter").is_dir() == bool(lora_r)
