"""Checkpoints appear whole or not at all, and a damaged one is never taken for a complete one."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from agentr_core.errors import DataFault, ModelDirectoryError, NonFiniteLoss, TrainingFault
from agentr_core.training.checkpoints import MANIFEST, Manifest, is_complete, publish, read_manifest
from agentr_core.training.run import make_fault


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        job="j",
        parent="p",
        dataset_hash="d",
        config={"learning_rate": 0.1},
        seed=1,
        steps=2,
        epochs=1.0,
        trained_tokens=3,
        final_loss=0.5,
        seconds=1.5,
        versions={"torch": "2"},
    )


@pytest.fixture
def published(tmp_path: Path, tiny_model_dir: Path, manifest: Manifest) -> Path:
    staging = tmp_path / "staging"
    shutil.copytree(tiny_model_dir, staging)
    (staging / "adapter").mkdir()
    (staging / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    publish(staging, tmp_path / "checkpoints" / "one", manifest)
    return tmp_path / "checkpoints" / "one"


def test_a_published_checkpoint_is_complete_and_says_how_it_was_made(
    published: Path, tmp_path: Path, manifest: Manifest
) -> None:
    result = read_manifest(published)

    assert is_complete(published)
    assert not (tmp_path / "staging").exists()
    assert (result.config, result.trained_tokens, result.seconds) == (manifest.config, 3, 1.5)
    assert set(result.files) >= {
        "config.json",
        "model.safetensors",
        "chat_template.jinja",
        "adapter/adapter_config.json",
    }
    assert len(result.weights_sha256) == 64


def test_damage_makes_a_checkpoint_incomplete(published: Path) -> None:
    weights = published / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[:-1])
    assert not is_complete(published)
    weights.write_bytes(whole)
    assert is_complete(published)
    (published / "chat_template.jinja").unlink()
    assert not is_complete(published)


def test_a_directory_without_a_sound_manifest_is_not_complete(
    published: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    assert not is_complete(tmp_path / "nowhere")
    assert not is_complete(tiny_model_dir)
    with pytest.raises(ModelDirectoryError, match="no manifest"):
        read_manifest(tiny_model_dir)

    (published / MANIFEST).write_text('{"job": "j"', encoding="utf-8")
    assert not is_complete(published)
    with pytest.raises(ModelDirectoryError, match="cannot be read"):
        read_manifest(published)


def test_what_is_at_the_destination_is_left_alone(
    published: Path, tiny_model_dir: Path, tmp_path: Path, manifest: Manifest
) -> None:
    before = (published / MANIFEST).read_bytes()
    shutil.copytree(tiny_model_dir, tmp_path / "staging")

    with pytest.raises(TrainingFault, match="another output directory"):
        publish(tmp_path / "staging", published, manifest)
    assert (published / MANIFEST).read_bytes() == before


def test_faults_keep_their_kind_across_the_process(tmp_path: Path) -> None:
    assert make_fault(NonFiniteLoss("step 3"), tmp_path).kind == "NonFiniteLoss"
    assert make_fault(DataFault("row 1"), tmp_path).message == "row 1"
    assert make_fault(torch.OutOfMemoryError("CUDA out of memory. Tried"), tmp_path).kind == "OutOfMemory"
    assert make_fault(MemoryError(), tmp_path).kind == "OutOfMemory"
    unknown = make_fault(ZeroDivisionError("division by zero"), tmp_path)
    assert (unknown.kind, unknown.message) == (
        "TrainingFault",
        "the trainer failed with ZeroDivisionError: division by zero",
    )


def test_a_lack_of_memory_on_the_cpu_is_told_from_torch_itself(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)

    fault = make_fault(caught.value, tmp_path)
    assert fault.kind == "OutOfMemory"
    assert "per_device_train_batch_size" in fault.message


def test_a_full_disk_is_told_also_when_it_is_the_cause_of_another_error(tmp_path: Path) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as full:
            raise RuntimeError("unexpected pos 64 vs 0") from full
    except RuntimeError as error:
        fault = make_fault(error, tmp_path)

    assert fault.kind == "TrainingFault"
    assert f"could not be written to {tmp_path}" in fault.message
    assert "MB left" in fault.message
