"""Training with loggers of `report_to` that need no account: Kubeflow's, against a real server, and
TensorBoard.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from training_jobs import dpo_job, make_job
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import rewrite_logs

from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training import requirements
from agentr_core.training.checkpoints import is_complete, read_history
from agentr_core.training.group.learner import open_step_reporter
from agentr_core.training.job import GroupRelative, OnlineJob
from agentr_core.training.process import train
from agentr_core.training.run import run

pytestmark = pytest.mark.slow

Told = list[tuple[str | None, dict[str, Any]]]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Told]:
    """A server that keeps what the logger tells it, with the token it came with; the variables lead
    there.
    """
    statuses: Told = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            statuses.append((self.headers["Authorization"], json.loads(body)["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing: the test says what went wrong."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Controller)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    token = tmp_path / "token"
    token.write_text("secret", encoding="utf-8")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
    yield statuses
    server.shutdown()
    thread.join()
    server.server_close()


async def test_kubeflow_is_told_the_training(controller: Told, tiny_model_dir: Path, tmp_path: Path) -> None:
    job = make_job(tiny_model_dir, tmp_path, report_to=("kubeflow",))
    steps: list[Any] = []
    await train(job, on_progress=steps.append)

    assert is_complete(job.output_dir)
    assert {token for token, _ in controller} == {"Bearer secret"}
    first, last = controller[0][1], controller[-1][1]
    assert {"name": "total_steps", "value": str(len(steps))} in first["metrics"]
    # Transformers adds it itself where its variables are set; that it is named too does not make it
    # two.
    assert [status["progressPercentage"] for _, status in controller].count(100) == 1
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert float(metrics["loss"]) > 0


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
async def test_tensorboard_gets_the_losses_beside_the_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    job = make_job(tiny_model_dir, tmp_path, report_to=("tensorboard",))
    await train(job)
    (file,) = tmp_path.joinpath("out.logs").glob("events.out.tfevents.*")
    assert b"train/loss" in file.read_bytes()


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
async def test_a_logger_that_is_not_named_gets_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    await train(make_job(tiny_model_dir, tmp_path))
    assert not [*tmp_path.rglob("*tfevents*")]


COMMON = {"loss", "learning_rate", "grad_norm", "trained_tokens", "seconds"}
"""What every training logs, under one name."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """The steps and numbers that the logger `recorder` is given, by the names that loggers show."""
    records: list[tuple[int, dict[str, Any]]] = []

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            records.append((state.global_step, rewrite_logs(logs)))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", Recorder)
    available = [*integration_utils.get_available_reporting_integrations(), "recorder"]
    monkeypatch.setattr(requirements, "get_available_reporting_integrations", lambda: available)
    return records


# TRL reads an attribute that transformers renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [make_job, dpo_job])
def test_trainings_on_a_dataset_log_under_one_naming(
    make: Any, recorded: list[tuple[int, dict[str, Any]]], tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = make(tiny_model_dir, tmp_path, report_to=("recorder",))
    job.work_folder.root.mkdir(parents=True)
    run(job, lambda step: None)
    history = read_history(job.output_dir)
    steps = [(step, numbers) for step, numbers in recorded if "train/loss" in numbers]
    assert [step for step, _ in steps] == [report.step for report in history]
    assert all(numbers.keys() >= {f"train/{name}" for name in COMMON} for _, numbers in steps)
    for (_, numbers), report in zip(steps, history, strict=True):
        for name in COMMON:
            assert numbers[f"train/{name}"] == pytest.approx(getattr(report, name)), name
    assert ("train/rewards/chosen" in steps[0][1]) == (make is dpo_job)


def group_job(folder: Path, *report_to: str) -> OnlineJob:
    return OnlineJob(
        model_dir=folder,
        output_dir=folder / "out",
        config=TrainingConfig(report_to=report_to, bf16=False),
        seed=1,
        parent="p",
        objective=GroupRelative(grpo=GrpoConfig(steps=2)),
        experience="i",
    )


def test_kubeflow_is_told_the_steps_of_group_rl(controller: Told, tmp_path: Path) -> None:
    with open_step_reporter(group_job(tmp_path, "kubeflow"), None) as report:
        report(1, {"reward": 0.25, "loss": None})
        report(2, {"reward": 0.5, "loss": 0.125, "eval_success": 0.75})
    first, last = controller[0][1], controller[-1][1]
    assert {"name": "total_steps", "value": "2"} in first["metrics"]
    assert (first["progressPercentage"], last["progressPercentage"]) == (0, 100)
    assert {metric["name"]: metric["value"] for metric in last["metrics"]} == {
        "reward": "0.5",
        "loss": "0.125",
        "eval_success": "0.75",
    }


def test_a_group_training_that_fails_is_not_told_to_be_done(controller: Told, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_step_reporter(group_job(tmp_path, "kubeflow"), None):
        raise RuntimeError
    assert [status["progressPercentage"] for _, status in controller] == [0]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_the_steps_of_group_rl_beside_the_checkpoint(tmp_path: Path) -> None:
    before = dict(os.environ)
    with open_step_reporter(group_job(tmp_path, "tensorboard"), None) as report:
        report(1, {"reward": 0.5, "eval_success": 0.75})
    (file,) = (tmp_path / "out.logs").glob("events.out.tfevents.*")
    assert all(name in file.read_bytes() for name in (b"train/reward", b"eval/success"))
    assert dict(os.environ) == before


def test_of_group_rl_nothing_is_told_where_nobody_is_named(controller: Told, tmp_path: Path) -> None:
    with open_step_reporter(group_job(tmp_path), None) as report:
        report(1, {"reward": 0.25})
    assert not controller
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
