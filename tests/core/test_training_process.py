"""Fine-tuning from outside: real processes that end well, are killed, cancelled, or fail."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import make_job

from agentr_core.errors import DataFault, ModelDirectoryError, NonFiniteLoss, OutOfMemory, TrainingFault
from agentr_core.training.checkpoints import Manifest, is_complete, read_manifest
from agentr_core.training.job import JOB, TrainingJob, TrainingStep
from agentr_core.training.process import TrainerProcess, train

pytestmark = pytest.mark.slow

Undisturbed = tuple[TrainingJob, Manifest, list[TrainingStep]]

PATIENCE = 600.0
LONG: dict[str, Any] = {"epochs": 40.0, "checkpoint_every": 5}
"""120 steps: seconds of training, so that there is time to kill it."""
PARENT = """
import asyncio, pathlib, sys
from agentr_core.training.process import train
from agentr_core.training.job import JOB
asyncio.run(train(JOB.validate_json(pathlib.Path(sys.argv[1]).read_bytes())))
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def has_checkpoint(job: TrainingJob, step: int) -> bool:
    return (job.work_folder.checkpoints / f"checkpoint-{step}" / "complete").exists()


def worker_of(job: TrainingJob) -> int:
    return int(job.work_folder.lock_file.read_text(encoding="utf-8"))


def alive(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Undisturbed:
    """The weights of the long job, trained without interruption, and what its steps told."""
    job = make_job(tiny_model_dir, tmp_path_factory.mktemp("undisturbed"), **LONG)
    steps: list[Any] = []
    result = asyncio.run(train(job, on_progress=steps.append))
    return job, result, steps


async def test_a_training_tells_each_step_and_is_found_finished_the_next_time(undisturbed: Undisturbed) -> None:
    job, result, steps = undisturbed

    assert [step.step for step in steps] == list(range(1, 121))
    assert steps[-1].total_steps == result.steps == 120
    assert (steps[-1].loss, steps[-1].trained_tokens) == (result.final_loss, result.trained_tokens)
    assert steps[-1].loss < steps[0].loss / 2
    assert is_complete(job.output_dir)
    assert not job.work_folder.root.exists()

    repeat = await train(job, on_progress=lambda step: pytest.fail("trained a second time"))
    assert repeat == result


async def test_a_killed_trainer_is_told_and_the_next_call_goes_on(
    undisturbed: Undisturbed, tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_model_dir, tmp_path, **LONG)
    training = asyncio.ensure_future(train(job))
    await asyncio.to_thread(wait_for, lambda: has_checkpoint(job, 10))
    os.kill(worker_of(job), signal.SIGKILL)

    with pytest.raises(OutOfMemory, match=r"killed by the system, probably .* memory .* checkpoint is kept"):
        await training
    assert not job.output_dir.exists()
    steps: list[Any] = []
    result = await train(job, on_progress=steps.append)
    assert steps[0].step > 10
    assert result.weights_sha256 == undisturbed[1].weights_sha256


async def test_the_log_of_an_earlier_attempt_does_not_explain_the_present_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    work = make_job(tiny_model_dir, tmp_path).work_folder
    work.root.mkdir(parents=True)
    work.log_file.write_text("a rank was ended by SIGKILL\n", encoding="utf-8")
    process: TrainerProcess[None] = TrainerProcess(
        module="agentr_core.training.nowhere",
        work_folder=work,
        job_json=b"{}",
        environment=dict(os.environ),
        parse_event=lambda line: None,
        is_published=lambda: False,
        memory_hint="",
    )

    with pytest.raises(TrainingFault, match=r"exit status 1 and gave no reason(?s:.*)No module named") as caught:
        await process.run(lambda step: None)
    assert "SIGKILL" not in str(caught.value)
    assert "SIGKILL" in work.log_file.read_text(encoding="utf-8")


async def test_when_the_parent_is_killed_the_trainer_ends_and_the_next_call_goes_on(
    undisturbed: Undisturbed, tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_model_dir, tmp_path, **LONG)
    file = tmp_path / "job.json"
    file.write_bytes(JOB.dump_json(job))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file)], cwd=Path(__file__).parents[2])
    wait_for(lambda: has_checkpoint(job, 10))
    worker = worker_of(job)
    parent.kill()
    parent.wait()

    # At once: the lock and the end of the orphan are part of what is tested.
    steps: list[Any] = []
    result = await train(job, on_progress=steps.append)
    assert not alive(worker)
    assert steps[0].step > 10
    assert result.weights_sha256 == undisturbed[1].weights_sha256


async def test_cancelling_ends_the_trainer_and_keeps_its_checkpoints(tiny_model_dir: Path, tmp_path: Path) -> None:
    job = make_job(tiny_model_dir, tmp_path, **LONG)
    training = asyncio.ensure_future(train(job))
    await asyncio.to_thread(wait_for, lambda: has_checkpoint(job, 5))
    worker = worker_of(job)
    training.cancel()

    with pytest.raises(asyncio.CancelledError):
        await training
    assert not alive(worker)
    assert any(job.work_folder.checkpoints.glob("checkpoint-*/complete"))
    assert not job.output_dir.exists()


async def test_a_loss_that_is_not_finite_is_told_with_the_log_and_the_good_checkpoint_stays(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_model_dir, tmp_path, learning_rate=1e30, warmup_ratio=0.0, checkpoint_every=1)

    with pytest.raises(NonFiniteLoss, match=r"step 2 has loss .* is kept(?s:.*)in training_step"):
        await train(job)
    assert has_checkpoint(job, 1)
    assert not job.output_dir.exists()


@pytest.mark.long
async def test_a_damaged_model_is_the_users_mistake(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    with pytest.raises(ModelDirectoryError, match=r"model .*cannot be loaded"):
        await train(make_job(tmp_path / "model", tmp_path))


async def test_a_full_disk_is_one_clear_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    job = make_job(tiny_model_dir, tmp_path, name="small/out", checkpoint_every=1)
    file = tmp_path / "job.json"
    file.write_bytes(JOB.dump_json(job))
    script = f'mount -t tmpfs -o size=1m tmpfs "{small}" && exec "{sys.executable}" -c "$0" "{file}"'
    probe = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(small)], capture_output=True)
    if probe.returncode:
        pytest.skip(f"no private mounts on this machine: {probe.stderr.decode().strip()}")

    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, PARENT], capture_output=True, cwd=Path(__file__).parents[2], text=True
    )
    assert result.returncode == 1
    assert re.search(r"TrainingFault: a checkpoint could not be written to .* has 0\.\d MB left", result.stderr)


async def test_a_missing_input_is_named_before_a_process_is_started(tiny_model_dir: Path, tmp_path: Path) -> None:
    job = make_job(tiny_model_dir, tmp_path)
    job.dataset_file.unlink()
    with pytest.raises(DataFault, match=r"rows\.parquet does not exist"):
        await train(job)
    with pytest.raises(ModelDirectoryError, match=r"no config\.json"):
        await train(make_job(tmp_path / "nowhere", tmp_path))


async def test_a_foreign_directory_at_the_output_is_left_alone(
    undisturbed: Undisturbed, tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_model_dir, tmp_path)
    job.output_dir.mkdir()
    with pytest.raises(TrainingFault, match="not a complete checkpoint"):
        await train(job)

    job.output_dir.rmdir()
    shutil.copytree(undisturbed[0].output_dir, job.output_dir)
    with pytest.raises(TrainingFault, match=f"another training .job {read_manifest(job.output_dir).job}"):
        await train(job)
