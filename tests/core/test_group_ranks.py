"""Processes that share the updates of group RL, with all of the policy each or parts of it: they
train as one process does, go on from a saved state, and end together.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentr_core.errors import ConfigError, ModelDirectoryError, NonFiniteLoss, TrainingFault
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import LaunchConfig, TrainingConfig
from agentr_core.training.group.learner import Learner, ProcessLearner, load_snapshot, make_learner, save_snapshot
from agentr_core.training.group.policy import PolicyRow, Totals

pytestmark = pytest.mark.slow
PLAIN = TrainingConfig(
    learning_rate=1e-3, bf16=False, warmup_ratio=0.0, lr_scheduler_type="linear", num_threads=1, weight_decay=0.1
)
deepspeed = [pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")]
LAUNCHES = [
    pytest.param(LaunchConfig(num_processes=2), id="replicated", marks=pytest.mark.long),
    pytest.param(LaunchConfig(num_processes=2, fsdp=True), id="fsdp"),
    *(
        pytest.param(LaunchConfig(num_processes=2, deepspeed=name), id=f"deepspeed-{name}", marks=deepspeed)
        for name in ("zero2", "zero3", "zero3-offload")
    ),
]
ENDS = """
import os, signal, sys
from pathlib import Path
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import LaunchConfig, TrainingConfig
from agentr_core.training.group.learner import ProcessLearner
if __name__ == "__main__":
    training = TrainingConfig(bf16=False, num_threads=1, launch=LaunchConfig(num_processes=2, fsdp=True))
    ProcessLearner(Path(sys.argv[1]), training, GrpoConfig(), updates=1, max_tokens=9, folder=Path(sys.argv[2]))
    print("loaded", flush=True)
    sys.stdin.read()
"""


def rows(lengths: tuple[int, ...], *, seed: int = 5) -> list[PolicyRow]:
    """Return random rows, each other one a half of an episode."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, 300, (length,), generator=generator).tolist()
        positions = tuple(range(5, length, 3))
        num_sampled = len(positions)
        whole = num_sampled * (1 + number % 2)
        batch.append(PolicyRow(tuple(ids), positions, (-6.0,) * num_sampled, ((-1.0) ** number,) * num_sampled, whole))
    return batch


# Five for two processes; one, so that the other process has nothing to do; and long ones beside a
# short one, in more passes than the other process has.
UPDATES = [rows((20, 50, 80, 110, 140)), rows((30,), seed=6), rows((600, 40, 560), seed=7)]


def train(made: Learner | ProcessLearner, file: Path) -> tuple[list[Totals], dict[str, torch.Tensor]]:
    """Return what the updates measured, and the weights that samplers get after them."""
    totals = [made.update(UPDATES[0])]
    # As if a sampler had its turn meanwhile.
    made.offload()
    made.load_to_gpu()
    made.skip(1)
    totals += [made.update(batch) for batch in UPDATES[1:]]
    made.write_weights(file)
    return totals, load_file(file)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(
    ("lora_r", "loss_type", "beta", "checkpointing"),
    [(0, "dapo", 0.1, True), (4, "grpo", 0.0, False)],
    ids=["all", "lora"],
)
def test_two_processes_train_as_one(
    launch: LaunchConfig,
    lora_r: int,
    loss_type: Any,
    beta: float,
    checkpointing: bool,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    training = dataclasses.replace(
        PLAIN, lora_r=lora_r, learning_rate=1e-2 if lora_r else 1e-3, gradient_checkpointing=checkpointing
    )
    grpo = GrpoConfig(beta=beta, loss_type=loss_type)
    options: dict[str, Any] = {"updates": 4, "max_tokens": 300}
    totals, weights = train(Learner(tiny_model_dir, training, grpo, **options), tmp_path / "one.safetensors")
    split = dataclasses.replace(training, launch=launch)
    with closing(make_learner(tiny_model_dir, split, grpo, folder=tmp_path, **options)) as learner:
        split_totals, split_weights = train(learner, tmp_path / "two.safetensors")
        rate = learner.learning_rate
    assert rate == pytest.approx(0.0)
    for actual, expected in zip(split_totals, totals, strict=True):
        assert actual.tokens == expected.tokens
        assert actual.loss == pytest.approx(expected.loss, abs=1e-5)
        assert actual.kl == pytest.approx(expected.kl, abs=1e-2)
        assert actual.norm == pytest.approx(expected.norm, rel=1e-4)
    assert split_weights.keys() == weights.keys()
    for name, weight in split_weights.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("lora_r", [pytest.param(0, marks=pytest.mark.long), 4], ids=["all", "lora"])
def test_a_saved_state_is_gone_on_from_to_the_same_weights(
    launch: LaunchConfig, lora_r: int, tiny_model_dir: Path, tmp_path: Path
) -> None:
    training = dataclasses.replace(PLAIN, launch=launch, lora_r=lora_r)
    options: dict[str, Any] = {"updates": 4, "max_tokens": 300, "folder": tmp_path}
    with closing(make_learner(tiny_model_dir, training, GrpoConfig(), **options)) as whole:
        whole.update(UPDATES[0])
        for number in (1, 2):
            save_snapshot(tmp_path / "states", number, whole.state, [], ["rows"])
        whole.update(UPDATES[1])
        whole.update(UPDATES[2])
        whole.write_weights(tmp_path / "whole.safetensors")
    assert len({path.stem for path in (tmp_path / "states").iterdir()}) == 1, "only the last one is kept"
    snapshot = load_snapshot(tmp_path / "states")
    assert snapshot is not None
    with closing(make_learner(tiny_model_dir, training, GrpoConfig(), seed=9, **options)) as cut:
        cut.restore(snapshot.learner_state, snapshot.parts_folder)
        cut.update(UPDATES[1])
        cut.update(UPDATES[2])
        cut.write_weights(tmp_path / "cut.safetensors")
    weights = load_file(tmp_path / "whole.safetensors")
    for name, weight in load_file(tmp_path / "cut.safetensors").items():
        assert torch.equal(weight, weights[name]), name


@pytest.fixture
def split(tiny_model_dir: Path, tmp_path: Path) -> Iterator[ProcessLearner]:
    training = dataclasses.replace(PLAIN, launch=LaunchConfig(num_processes=2, fsdp=True))
    with closing(
        ProcessLearner(tiny_model_dir, training, GrpoConfig(), updates=4, max_tokens=300, folder=tmp_path)
    ) as learner:
        yield learner


def test_a_process_that_is_killed_ends_the_others_work_in_a_sentence(split: ProcessLearner) -> None:
    split.update(UPDATES[0])
    process, _ = multiprocessing.active_children()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    for work in (split.update, split.remove_rounding_noise):
        with pytest.raises(TrainingFault, match="shares the updates of the training ended, probably because memory"):
            work(UPDATES[0])
    split.close()
    assert not multiprocessing.active_children()


def test_what_is_not_finite_in_one_process_changes_no_weight_in_any(split: ProcessLearner, tmp_path: Path) -> None:
    split.write_weights(tmp_path / "before.safetensors")
    broken = [UPDATES[0][0]._replace(advantages=(float("nan"),) * len(UPDATES[0][0].positions)), *UPDATES[0][1:]]
    with pytest.raises(NonFiniteLoss, match=r"lower training\.learning_rate"):
        split.update(broken)
    split.write_weights(tmp_path / "after.safetensors")
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())


def test_what_a_process_cannot_load_is_told_as_one_process_tells_it(tmp_path: Path) -> None:
    training = dataclasses.replace(PLAIN, launch=LaunchConfig(num_processes=2, fsdp=True))
    with pytest.raises(ModelDirectoryError, match="cannot be loaded"):
        ProcessLearner(tmp_path / "nothing", training, GrpoConfig(), updates=1, max_tokens=9, folder=tmp_path)
    assert not multiprocessing.active_children()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_deepspeed_configuration_with_a_schedule_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}', encoding="utf-8")
    training = dataclasses.replace(PLAIN, launch=LaunchConfig(num_processes=2, deepspeed=str(file)))
    with pytest.raises(ConfigError, match="has a scheduler of its own; leave it out, for group RL follows"):
        ProcessLearner(tiny_model_dir, training, GrpoConfig(), updates=1, max_tokens=9, folder=tmp_path)


@pytest.mark.long
def test_the_processes_end_with_the_one_that_is_killed(tiny_model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS, encoding="utf-8")
    command = [sys.executable, str(script), str(tiny_model_dir), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loaded\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3, "two processes, and the one that they are forked from"
        process.kill()
    _, survivors = psutil.wait_procs(family, timeout=60)
    assert not survivors
