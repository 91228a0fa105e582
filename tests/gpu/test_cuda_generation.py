"""The in-process model on a CUDA device."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from devices import DEVICE, on_device, only_cuda

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling

pytestmark = on_device


def _requests(temperature: float) -> list[Request]:
    sampling = Sampling(temperature=temperature, max_new_tokens=24, logprobs=True)
    return [
        Request(messages=(Message(role="user", text="craft oak planks " * k),), sampling=sampling, seed=k, n=1 + k % 4)
        for k in range(1, 24)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_replies_as_on_the_cpu(tiny_model_dir: Path, temperature: float) -> None:
    gpu_model, cpu_model = (TransformersModel.load(tiny_model_dir, device=device) for device in (DEVICE, "cpu"))
    requests = _requests(temperature)
    for ours, theirs in zip(
        asyncio.run(gpu_model.generate(requests)), asyncio.run(cpu_model.generate(requests)), strict=True
    ):
        for reply, expected in zip(ours, theirs, strict=True):
            assert reply.token_ids == expected.token_ids
            assert reply.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_invariance(tiny_model_dir: Path, temperature: float) -> None:
    model = TransformersModel.load(tiny_model_dir, device=DEVICE)
    requests = _requests(temperature)
    for request, together in zip(requests, asyncio.run(model.generate(requests)), strict=True):
        (alone,) = asyncio.run(model.generate([request]))
        ((fewer,),) = asyncio.run(model.generate([replace(request, n=1)]))
        assert [g.token_ids for g in alone] == [g.token_ids for g in together]
        assert fewer.token_ids == together[0].token_ids


def test_bfloat16_repeats_itself(tiny_model_dir: Path) -> None:
    model = TransformersModel.load(tiny_model_dir, device=DEVICE, dtype="bfloat16")
    assert asyncio.run(model.generate(_requests(1.0))) == asyncio.run(model.generate(_requests(1.0)))


@only_cuda
async def test_a_closed_model_gives_its_memory_to_other_processes(tiny_model_dir: Path) -> None:
    model = TransformersModel.load(tiny_model_dir, device=DEVICE)
    await model.generate(_requests(1.0))
    reserved_bytes = torch.cuda.memory_reserved(DEVICE)
    allocated_bytes = torch.cuda.memory_allocated(DEVICE)

    await model.close()

    assert torch.cuda.memory_allocated(DEVICE) < allocated_bytes
    assert torch.cuda.memory_reserved(DEVICE) < reserved_bytes
