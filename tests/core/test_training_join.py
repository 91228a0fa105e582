"""A second machine, played by a second process here, takes part in trainings, and lets go of those
left behind.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers import free_port
from training_jobs import make_job

from agentr_core.recipes.training import LaunchConfig
from agentr_core.training import join
from agentr_core.training.checkpoints import is_complete
from agentr_core.training.job import JOB, TrainingJob
from agentr_core.training.process import train

PATIENCE = 600.0


def two_machines(model: Path, workspace: Path) -> TrainingJob:
    """Return a job for one process on each of two machines, whose output lies in a workspace."""
    launch = LaunchConfig(num_processes=2, num_machines=2, main_process_ip="127.0.0.1", main_process_port=free_port())
    job = make_job(model, workspace, epochs=1.0, per_device_train_batch_size=2, launch=launch)
    return replace(job, output_dir=workspace / "checkpoints" / "out")


def announce(job: TrainingJob) -> Path:
    """Do what a run does before it starts a training."""
    job.work_folder.root.mkdir(parents=True, exist_ok=True)
    job.work_folder.job_file.write_bytes(JOB.dump_json(job))
    return job.work_folder.job_file


@contextmanager
def joiner(workspace: Path) -> Iterator[psutil.Process]:
    """The second machine; what it started is gone soon after it."""
    command = [sys.executable, "-m", "agentr_core.training.join", str(workspace), "1"]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}) as process:
        machine = psutil.Process(process.pid)
        try:
            yield machine
        finally:
            family = machine.children(recursive=True)
            process.kill()
            for child in family:
                if child.is_running():
                    child.kill()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.long
async def test_two_machines_train_together_after_a_training_that_was_left_behind(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = two_machines(tiny_model_dir, tmp_path)
    announce(replace(job, output_dir=job.output_dir.with_name("abandoned"), seed=4))
    reports: list[Any] = []

    with joiner(tmp_path) as machine:
        await asyncio.to_thread(wait_for, machine.children)
        (child,) = machine.children()
        async with asyncio.timeout(PATIENCE):
            await train(job, on_progress=reports.append)
        await asyncio.to_thread(wait_for, lambda: not machine.children())
        assert not child.is_running()
    assert is_complete(job.output_dir)
    assert [step.step for step in reports] == [1, 2, 3]


def test_the_last_training_is_wanted_while_it_is_unfinished_and_wants_this_machine(tmp_path: Path) -> None:
    job = two_machines(tmp_path / "model", tmp_path)
    checkpoints = tmp_path / "checkpoints"
    assert join.latest_unfinished(checkpoints, 1) is None
    file = announce(job)
    assert join.latest_unfinished(checkpoints, 1) == (file, job)
    assert join.latest_unfinished(checkpoints, 2) is None
    second_file = announce(replace(job, seed=4, config=replace(job.config, launch=None)))
    os.utime(second_file, (time.time() + 9,) * 2)
    assert join.latest_unfinished(checkpoints, 1) is None


@pytest.mark.parametrize("then", ["done", "another", "still"])
@pytest.mark.slow
def test_processes_are_ended_when_nobody_wants_them(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = two_machines(tmp_path / "model", tmp_path)
    file = announce(job)
    seconds = 1.0 if then == "still" else PATIENCE
    process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"], stdin=subprocess.PIPE)
    monkeypatch.setattr(join, "start_launcher", lambda *_, **__: process)
    monkeypatch.setattr(join, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(join, "LINGER_SECONDS", 0.1)
    if then == "done":
        monkeypatch.setattr(join, "is_complete", lambda path: True)
    elif then == "another":
        os.utime(announce(replace(job, seed=4)), (time.time() + 9,) * 2)

    join.run_processes(file, job, 1)
    assert process.returncode == (0 if then == "still" else -15)


@pytest.mark.parametrize("arguments", [[], ["workspace"], ["workspace", "0"], ["workspace", "one"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert join.main(arguments) == 2
    assert "MACHINE_RANK" in capsys.readouterr().err
