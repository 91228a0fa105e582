"""Group RL on a GPU: the policy's updates, and the sampler that takes over its weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE, on_device

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.group.learner import Learner
from agentr_core.training.group.policy import PolicyRow, Totals
from agentr_core.types import Message, Request, Sampling

pytestmark = on_device
TRAINING = TrainingConfig(learning_rate=1e-3, bf16=False, warmup_ratio=0.0, lr_scheduler_type="constant")


@pytest.fixture(autouse=True)
def _hide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def sample_rows(model: TransformersModel) -> list[PolicyRow]:
    """Sample replies to prompts of several lengths; every other one is rewarded."""
    sampling = Sampling(temperature=1.0, max_new_tokens=24, logprobs=True)
    requests = [
        Request(messages=(Message(role="user", text="craft oak planks " * k),), sampling=sampling, seed=k)
        for k in range(1, 17)
    ]
    rows = []
    for number, (request, (reply,)) in enumerate(zip(requests, asyncio.run(model.generate(requests)), strict=True)):
        assert reply.logprobs is not None
        prompt, ids = tuple(model.renderer.render_prompt(request.messages)), reply.token_ids
        positions = tuple(range(len(prompt), len(prompt) + len(ids)))
        rows.append(PolicyRow((*prompt, *ids), positions, reply.logprobs, ((-1.0) ** number,) * len(ids), len(ids)))
    return rows


def run_updates(model_dir: Path, rows: list[PolicyRow], **settings: Any) -> tuple[Learner, Totals]:
    training = replace(TRAINING, **settings)
    learner, totals = Learner(model_dir, training, GrpoConfig(), updates=3, max_tokens=24), Totals()
    for _ in range(3):
        totals += learner.update(rows)
    return learner, totals


@pytest.mark.parametrize("lora_r", [0, 4], ids=["all", "lora"])
def test_updates_are_those_of_the_cpu(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, lora_r: int) -> None:
    rows = sample_rows(TransformersModel.load(tiny_model_dir, device="cpu"))
    gpu_learner, totals = run_updates(tiny_model_dir, rows, lora_r=lora_r)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu_learner, expected = run_updates(tiny_model_dir, rows, lora_r=lora_r)
    assert {p.device.type for p in gpu_learner.policy.parameters.values()} == {DEVICE}
    assert {p.device.type for p in cpu_learner.policy.parameters.values()} == {"cpu"}
    assert totals.tokens == expected.tokens > 0
    assert totals.loss == pytest.approx(expected.loss, abs=1e-3)
    assert totals.mean("entropy") == pytest.approx(expected.mean("entropy"), rel=1e-3)
    assert totals.mean("sampler_kl") == pytest.approx(expected.mean("sampler_kl"), abs=1e-3)
    gpu_weights, cpu_weights = (learner.policy.weights(torch.float32) for learner in (gpu_learner, cpu_learner))
    for name, weights in gpu_weights.items():
        torch.testing.assert_close(weights, cpu_weights[name], atol=2e-3, rtol=0)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 2e-3)])
def test_the_sampler_draws_from_the_weights_that_were_trained(
    tiny_model_dir: Path, tmp_path: Path, dtype: str, limit: float
) -> None:
    sampler = TransformersModel.load(tiny_model_dir, device=DEVICE, dtype=dtype)
    before = sample_rows(sampler)
    learner, _ = run_updates(tiny_model_dir, before, bf16=dtype == "bfloat16")
    file = tmp_path / "weights.safetensors"
    learner.write_weights(file, getattr(torch, dtype))
    asyncio.run(sampler.reload(file))
    stale, fresh = (
        learner.policy.accumulate_gradient(rows, [1.0] * len(rows)).mean("sampler_kl")
        for rows in (before, sample_rows(sampler))
    )
    assert fresh < limit < stale


def test_states_resume_where_they_were_saved(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = sample_rows(TransformersModel.load(tiny_model_dir, device=DEVICE))
    learner, _ = run_updates(tiny_model_dir, rows)
    torch.save(learner.state(tmp_path), tmp_path / "state.pt")
    second = Learner(tiny_model_dir, TRAINING, GrpoConfig(), updates=3, max_tokens=24)
    second.restore(torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu"), tmp_path)
    learner.update(rows)
    second.update(rows)
    first_weights, second_weights = (item.policy.weights(torch.float32) for item in (learner, second))
    for name, weights in first_weights.items():
        torch.testing.assert_close(weights, second_weights[name], atol=1e-5, rtol=0)
