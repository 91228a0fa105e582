"""Training through Accelerate: one process or several give the same numbers; killed, cancelled, out
of memory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsdp_on_cpu
import psutil
import pytest
import torch
from training_jobs import dpo_job, make_job, random_row, write_dataset
from transformers import AutoModelForCausalLM

from agentr_core.errors import ConfigError, OutOfMemory
from agentr_core.recipes.training import LaunchConfig
from agentr_core.training import process
from agentr_core.training.checkpoints import is_complete
from agentr_core.training.job import JOB, TrainingJob
from agentr_core.training.packing import make_plan
from agentr_core.training.process import train

pytestmark = pytest.mark.slow

Trained = tuple[list[float], Path]

PATIENCE = 600.0
ROOT = Path(__file__).parents[2]
EPOCHS = 17 / 12
SMALL = """
import asyncio, pathlib, resource, sys
from agentr_core.training.process import train
from agentr_core.training.job import JOB
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
asyncio.run(train(JOB.validate_json(pathlib.Path(sys.argv[1]).read_bytes())))
"""
"""A training whose processes may have only so many bytes of memory each."""
LAST_LOOK = """
import os
leave = os._exit
def look(status):
    import gc
    from torch.nn.parallel import DistributedDataParallel
    with open(os.path.join({folder!r}, "left-" + os.environ["RANK"]), "w") as file:
        file.write(str(sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects())))
    leave(status)
os._exit = look
"""
"""Note how many models with a group of processes there are when a process leaves."""
ENDLESS = """
import sys, threading
if "accelerate.commands.launch" not in sys.orig_argv:
    threading.Thread(target=threading.Event().wait).start()
"""


async def losses(job: TrainingJob) -> list[float]:
    steps: list[Any] = []
    await train(job, on_progress=steps.append)
    assert is_complete(job.output_dir)
    return [step.loss for step in steps]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Trained:
    """A training in one plain process: the losses of its steps, and its model. Its last step has
    one sample.
    """
    job = make_job(tiny_model_dir, tmp_path_factory.mktemp("alone"), epochs=EPOCHS)
    return asyncio.run(losses(job)), job.output_dir


def assert_same_weights(one: Path, other: Path, tolerance: float) -> None:
    other_weights = AutoModelForCausalLM.from_pretrained(other).state_dict()
    for name, weights in AutoModelForCausalLM.from_pretrained(one).state_dict().items():
        torch.testing.assert_close(weights, other_weights[name], atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> tuple[list[float], Path, Path]:
    """The same training in two processes: the losses of its steps, its model, and a folder in which
    each process noted what it left.
    """
    folder = tmp_path_factory.mktemp("two")
    (folder / "sitecustomize.py").write_text(LAST_LOOK.format(folder=str(folder)), encoding="utf-8")
    settings: dict[str, Any] = {"launch": LaunchConfig(num_processes=2), "per_device_train_batch_size": 2}
    job = make_job(tiny_model_dir, folder, epochs=EPOCHS, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        return asyncio.run(losses(job)), job.output_dir, folder


def test_several_processes_train_as_one_on_the_same_batch(alone: Trained, two: tuple[list[float], Path, Path]) -> None:
    """In the last step of one sample, one of the two has nothing to do."""
    assert two[0] == pytest.approx(alone[0], abs=1e-4)
    assert_same_weights(two[1], alone[1], 1e-3)


async def test_preferences_in_two_processes_train_as_in_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The last step has half as many pairs as the others; neither process takes others to it."""
    single = dpo_job(tiny_model_dir, tmp_path, name="one", epochs=1.0, per_device_train_batch_size=4)
    settings: dict[str, Any] = {"launch": LaunchConfig(num_processes=2), "per_device_train_batch_size": 2}
    double = dpo_job(tiny_model_dir, tmp_path, name="two", epochs=1.0, **settings)

    assert await losses(double) == pytest.approx(await losses(single), abs=1e-5)
    assert_same_weights(double.output_dir, single.output_dir, 1e-4)


def test_a_process_leaves_with_what_is_left_of_its_group(two: tuple[list[float], Path, Path]) -> None:
    """To drop it may be to wait for ever: twice in 85 trainings on a busy machine, and then
    always.
    """
    assert [(two[2] / f"left-{rank}").read_text(encoding="utf-8") for rank in "01"] == ["1", "1"]


@pytest.mark.parametrize("lora_r", [0, pytest.param(4, marks=pytest.mark.long)])
async def test_fsdp_in_two_processes_trains_as_one(
    lora_r: int, alone: Trained, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch splits weights over Gloo, too; that Accelerate leaves it out on a CPU is undone
    here.
    """
    shutil.copyfile(fsdp_on_cpu.__file__, tmp_path / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    launch = LaunchConfig(num_processes=2, fsdp=True, fsdp_config={"reshard_after_forward": True})
    settings: dict[str, Any] = {"launch": launch, "per_device_train_batch_size": 2, "lora_r": lora_r}
    job = make_job(tiny_model_dir, tmp_path, epochs=EPOCHS, **settings)
    job_losses = await losses(job)
    if lora_r:
        whole = make_job(tiny_model_dir, tmp_path, name="whole", epochs=EPOCHS, lora_r=lora_r)
        assert job_losses == pytest.approx(await losses(whole), abs=1e-4)
        assert_same_weights(job.output_dir, whole.output_dir, 1e-3)
        return
    assert job_losses == pytest.approx(alone[0], abs=1e-4)
    assert_same_weights(job.output_dir, alone[1], 1e-3)


@pytest.mark.parametrize(
    ("launch", "others"),
    [
        pytest.param(None, 0, id="alone"),
        pytest.param(LaunchConfig(num_processes=2), 3, id="two", marks=pytest.mark.long),
    ],
)
async def test_what_is_published_waits_for_no_process(
    launch: LaunchConfig | None, others: int, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process that trains has a thread that its end waits for, and that never ends."""
    (tmp_path / "sitecustomize.py").write_text(ENDLESS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "LINGER_SECONDS", 1.0)
    family: list[psutil.Process] = []
    job = make_job(tiny_model_dir, tmp_path, epochs=EPOCHS, launch=launch)

    def remember(step: Any) -> None:
        worker = psutil.Process(int(job.work_folder.lock_file.read_text(encoding="utf-8")))
        family[:] = [worker, *worker.children(recursive=True)]

    await train(job, on_progress=remember)
    assert is_complete(job.output_dir)
    assert len(family) == 1 + others
    _, survivors = await asyncio.to_thread(psutil.wait_procs, family, timeout=PATIENCE / 4)
    assert not survivors


@pytest.mark.long
async def test_a_killed_lora_training_under_accelerate_goes_on_to_the_same_weights(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"epochs": 20.0, "checkpoint_every": 5, "lora_r": 4, "launch": LaunchConfig()}
    whole = make_job(tiny_model_dir, tmp_path, name="whole", **settings)
    reference = await train(whole)
    job = make_job(tiny_model_dir, tmp_path, name="cut", **settings)
    training = asyncio.ensure_future(train(job))
    deadline = time.monotonic() + PATIENCE
    while not (job.work_folder.checkpoints / "checkpoint-10" / "complete").exists():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)
    worker = psutil.Process(int(job.work_folder.lock_file.read_text(encoding="utf-8")))
    rank = worker.children(recursive=True)[-1]
    assert "agentr_core.training.rank" in rank.cmdline()
    os.kill(rank.pid, signal.SIGKILL)

    with pytest.raises(OutOfMemory, match=r"killed by the system, probably .* memory .* checkpoint is kept"):
        await training
    steps: list[Any] = []
    result = await train(job, on_progress=steps.append)
    assert steps[0].step > 10
    assert result.weights_sha256 == reference.weights_sha256


@pytest.mark.long
async def test_the_processes_end_with_the_training_that_was_cancelled(tiny_model_dir: Path, tmp_path: Path) -> None:
    job = make_job(tiny_model_dir, tmp_path, epochs=400.0, launch=LaunchConfig(num_processes=2))
    event = asyncio.Event()
    training = asyncio.ensure_future(train(job, on_progress=lambda step: event.set()))
    await asyncio.wait_for(event.wait(), PATIENCE)
    worker = psutil.Process(int(job.work_folder.lock_file.read_text(encoding="utf-8")))
    family = worker.children(recursive=True)
    # The launcher names the module, too.
    assert sum("agentr_core.training.rank" in process.cmdline() for process in family) == 3
    training.cancel()

    with pytest.raises(asyncio.CancelledError):
        await training
    _, survivors = await asyncio.to_thread(psutil.wait_procs, family, timeout=PATIENCE)
    assert not survivors
    assert not job.output_dir.exists()


def test_a_lack_of_memory_is_one_clear_error_and_the_good_checkpoint_stays(
    save_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The scores of one long sample alone are more than the processes may have (RLIMIT_DATA)."""
    model = save_tiny_model(tmp_path / "model", context=16384, vocab_size=100_000, num_hidden_layers=1)
    lengths = [30, 30, 30]
    last = make_plan([1, 1, 1], per_step=1, epochs=1, max_tokens=0, seed=3).steps[-1][0]
    lengths[last] = 16_000
    write_dataset(tmp_path / "rows.parquet", lengths)
    job = make_job(model, tmp_path, epochs=1.0, per_device_train_batch_size=1, checkpoint_every=1)
    num_labels = sum(label >= 0 for label in random_row(16_000, last)[1])
    file = tmp_path / "job.json"
    file.write_bytes(JOB.dump_json(job))

    result = subprocess.run(
        [sys.executable, "-c", SMALL, str(file), str(num_labels * 100_000 * 4)],
        capture_output=True,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert result.returncode == 1
    error = result.stderr[result.stderr.rindex("OutOfMemory:") :]
    assert "set training.gradient_checkpointing=true, or lower training.per_device_train_batch_size" in error
    assert "its last intermediate checkpoint is kept" in error
    assert (job.work_folder.checkpoints / "checkpoint-2" / "complete").exists()
    assert not job.output_dir.exists()


async def test_a_setting_that_cannot_be_met_is_told_before_training(tiny_model_dir: Path, tmp_path: Path) -> None:
    job = make_job(tiny_model_dir, tmp_path, report_to=("tensorbord",))
    with pytest.raises(ConfigError, match=r"training\.report_to: 'tensorbord' is unknown"):
        await train(job)
    assert not any(job.work_folder.checkpoints.glob("*"))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3-offload"])
async def test_deepspeed_trains_as_the_plain_process_does(
    alone: Trained, tiny_model_dir: Path, tmp_path: Path, name: str, processes: int
) -> None:
    launch = LaunchConfig(num_processes=processes, deepspeed=name)
    samples: dict[str, Any] = {"per_device_train_batch_size": 4 // processes}
    job = make_job(tiny_model_dir, tmp_path, epochs=EPOCHS, launch=launch, **samples)

    assert await losses(job) == pytest.approx(alone[0], abs=1e-3)
    assert_same_weights(job.output_dir, alone[1], 2e-3)
