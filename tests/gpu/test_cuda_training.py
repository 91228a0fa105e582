"""Training on a GPU, in the trainer's own process as a recipe has it."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE, on_device, only_cuda
from training_jobs import dpo_job, make_job, write_dataset
from transformers import AutoModelForCausalLM

from agentr_core.errors import OutOfMemory
from agentr_core.recipes.training import LaunchConfig
from agentr_core.training.checkpoints import is_complete
from agentr_core.training.job import TrainingJob, TrainingStep
from agentr_core.training.process import train

pytestmark = on_device


def steps(job: TrainingJob) -> list[TrainingStep]:
    history: list[Any] = []
    asyncio.run(train(job, on_progress=history.append))
    assert is_complete(job.output_dir)
    return history


def losses(job: TrainingJob) -> list[float]:
    return [step.loss for step in steps(job)]


@pytest.fixture(autouse=True)
def _hide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def on_the_cpu(job: TrainingJob) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return losses(job)


@pytest.mark.parametrize("packing", [True, False])
def test_losses_and_weights_are_those_of_the_cpu(tiny_model_dir: Path, tmp_path: Path, packing: bool) -> None:
    gpu_job = make_job(tiny_model_dir, tmp_path, name="here", packing=packing)
    cpu_job = make_job(tiny_model_dir, tmp_path, name="there", packing=packing)
    assert losses(gpu_job) == pytest.approx(on_the_cpu(cpu_job), abs=1e-3)
    expected = AutoModelForCausalLM.from_pretrained(cpu_job.output_dir).state_dict()
    for name, weights in AutoModelForCausalLM.from_pretrained(gpu_job.output_dir).state_dict().items():
        torch.testing.assert_close(weights, expected[name], atol=2e-3, rtol=0)


def test_preferences_are_those_of_the_cpu(tiny_model_dir: Path, tmp_path: Path) -> None:
    gpu_job, cpu_job = (dpo_job(tiny_model_dir, tmp_path, name=name) for name in ("here", "there"))
    assert losses(gpu_job) == pytest.approx(on_the_cpu(cpu_job), abs=1e-3)


ADAPTED = {"lora_r": 4, "learning_rate": 1e-2}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({"gradient_checkpointing": False}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param(ADAPTED, id="lora"),
        pytest.param(ADAPTED | {"use_dora": True}, id="dora"),
        pytest.param(
            ADAPTED | {"load_in_4bit": True},
            id="qlora",
            marks=[only_cuda, pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="no bitsandbytes")],
        ),
        pytest.param({"launch": LaunchConfig()}, id="accelerate"),
        pytest.param(
            {"launch": LaunchConfig(deepspeed="zero2")},
            id="zero2",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="no deepspeed"),
        ),
        pytest.param(
            {"launch": LaunchConfig(deepspeed="zero3")},
            id="zero3",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="no deepspeed"),
        ),
    ],
)
def test_bfloat16_learns(tiny_model_dir: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Random rows can only be learned by heart: twelve of them, gone through ten times."""
    history = steps(make_job(tiny_model_dir, tmp_path, epochs=10.0, bf16=True, **settings))
    first, last = (sum(step.loss for step in part) / 3 for part in (history[:3], history[-3:]))
    assert last < 0.9 * first


@only_cuda
def test_a_lack_of_device_memory_is_one_clear_error(save_tiny_model: Any, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", context=16384, hidden_size=1024, num_hidden_layers=8)
    write_dataset(tmp_path / "rows.parquet", [16_000] * 4)
    job = make_job(model, tmp_path, epochs=1.0, gradient_checkpointing=False)
    free, _ = torch.cuda.mem_get_info()
    # Leaves the trainer what the driver needs, and too little for the activations of a step.
    ballast = torch.empty(free - 3 * 2**30, dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfMemory, match=r"training\.gradient_checkpointing=true"):
        asyncio.run(train(job))
    del ballast
    torch.cuda.empty_cache()
    assert not job.output_dir.exists()
