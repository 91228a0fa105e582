"""A whole training of group RL in two processes, as on two devices: what is sampled, and the
weights, are those of one process; killed or interrupted, it ends as a whole and goes on.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import groups
import pytest
import torch
from safetensors.torch import load_file

from agentr_core.errors import TrainingFault
from agentr_core.methods.grpo import train
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.models import ModelConfig
from agentr_core.store.database import Store
from agentr_core.training.group.learner import Learner

pytestmark = [
    pytest.mark.slow,
    # PEFT asks for an attribute that Transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("door_installed"),
]
FSDP = "num_processes: 2, fsdp: true"
LORA = ", lora_r: 4, learning_rate: 1.0e-2"
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def recipe(folder: Path, model: Path, launch: str, *, more: str = "", watched: bool = False) -> Path:
    """Write the recipe with a section `training.launch`, or without if it is empty; a step has nine
    episodes in three groups, and minibatches of four, four and one.
    """
    grpo = f"grpo: {{num_generations: 3, minibatches: 3, eval_steps: {2 * watched}}}"
    sets = "\nevaluation: {sets: {dev: {split: dev}}, development: dev}" if watched else ""
    launch_line = f"launch: {{{launch}}}" if launch else "launch: null"
    return groups.write(folder, model, more=f"{grpo}\ntraining: {{{launch_line}{more}}}{sets}")


def published_weights(file: Path) -> dict[str, torch.Tensor]:
    (path,) = store_of(file).query("select path from checkpoint where parent_id is not null")["path"]
    weights: dict[str, torch.Tensor] = load_file(Path(path) / "model.safetensors")
    return weights


def store_of(file: Path) -> Store:
    return Store(file.parent / "runs" / "store.duckdb")


def sampled_rows(file: Path) -> list[list[Any]]:
    """Return what was sampled: the tokens of all replies, and the results of all groups."""
    store = store_of(file)
    replies = store.query("select token_ids from generation order by all")["token_ids"]
    results = store.query("select step, number, instance_id, episodes, wins, reward from rl_group order by all")
    return [[list(ids) for ids in replies], results.to_numpy().tolist()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, door_model: Path, door_installed: None) -> Callable[[str], Path]:
    """A function that returns the recipe of a training in one process, of all weights or adapters,
    once it is done.
    """

    @cache
    def trained(kind: str) -> Path:
        file = recipe(tmp_path_factory.mktemp(kind), door_model, "", more=LORA if kind == "lora" else "")
        asyncio.run(groups.trained(file))
        return file

    return trained


@pytest.mark.parametrize(
    ("launch", "kind"),
    [
        pytest.param(FSDP, "all", id="fsdp-all", marks=pytest.mark.long),
        pytest.param(FSDP, "lora", id="fsdp-lora", marks=pytest.mark.long),
        pytest.param("num_processes: 2", "all", id="replicated-all", marks=pytest.mark.long),
        *(
            pytest.param(
                f"num_processes: 2, deepspeed: {name}", kind, id=f"deepspeed-{name}-{kind}", marks=needs_deepspeed
            )
            for name in ("zero2", "zero3")
            for kind in ("all", "lora")
        ),
    ],
)
def test_a_round_in_two_processes_is_that_of_one(
    launch: str, kind: str, alone: Callable[[str], Path], tmp_path: Path, door_model: Path
) -> None:
    """Processes that share a gradient are in tests/core/test_group_rows.py, FSDP is in
    tests/core/test_training_launch.py.
    """
    file = recipe(tmp_path, door_model, launch, more=LORA if kind == "lora" else "")
    asyncio.run(groups.trained(file))
    assert sampled_rows(file) == sampled_rows(alone(kind)), "each step samples with the weights of the one before it"
    weights, before = published_weights(alone(kind)), load_file(door_model / "model.safetensors")
    pair_weights = published_weights(file)
    assert pair_weights.keys() == weights.keys()
    for name, weight in pair_weights.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-4)
    assert max(float((pair_weights[name] - before[name]).abs().max()) for name in pair_weights) > 1e-3
    assert store_of(file).query("select * from v_orphans").empty
    adapter = next((file.parent / "runs" / "checkpoints").glob("*/adapter/adapter_model.safetensors"), None)
    assert (adapter is not None) == (kind == "lora")


@pytest.mark.long
def test_a_process_that_is_killed_ends_the_run_which_then_goes_on_to_the_same_weights(
    alone: Callable[[str], Path], tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last state is that of step 2; the process is killed while all train on step 4."""
    file, update = recipe(tmp_path, door_model, FSDP), train._update

    def killed(learner: Any, rows: Any, job: Any, step: int) -> Any:
        if step == 4:
            pid = multiprocessing.active_children()[1].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        return update(learner, rows, job, step)

    with monkeypatch.context() as patch:
        patch.setattr(train, "_update", killed)
        with pytest.raises(TrainingFault, match=r"shares the updates of the training ended, probably because memory"):
            asyncio.run(groups.trained(file))
    assert not multiprocessing.active_children()
    state = next((tmp_path / "runs" / "checkpoints").glob(".*/checkpoints/*.pt"))
    assert state.name == "step-000002.pt"
    assert any(state.with_suffix(".parts").iterdir())

    trained: list[int] = []

    def noted(learner: Any, rows: Any, job: Any, step: int) -> Any:
        trained.append(step)
        return update(learner, rows, job, step)

    monkeypatch.setattr(train, "_update", noted)
    asyncio.run(groups.trained(file))
    assert trained == [3, 4]
    assert sampled_rows(file) == sampled_rows(alone("all"))
    weights = published_weights(alone("all"))
    for name, weight in published_weights(file).items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-4)
    assert not list((tmp_path / "runs" / "checkpoints").glob(".*"))


@pytest.mark.long
async def test_an_interrupted_run_ends_all_its_processes(
    tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is stopped, so that the others wait for it for ever."""
    file, update, stop_event = recipe(tmp_path, door_model, FSDP), train._update, asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(learner: Any, rows: Any, job: Any, step: int) -> Any:
        if step == 2:
            pid = multiprocessing.active_children()[1].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            loop.call_soon_threadsafe(stop_event.set)
        return update(learner, rows, job, step)

    monkeypatch.setattr(train, "_update", stop)
    training = asyncio.ensure_future(groups.trained(file))
    await asyncio.wait_for(stop_event.wait(), 600)
    training.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert time.monotonic() - began < 60
    assert not multiprocessing.active_children()


def test_trainer_and_sampler_take_turns(
    alone: Callable[[str], Path], tmp_path: Path, door_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that answers only between its new weights and its sleep, and a trainer that works
    only between that sleep and its rest: of the two never both have the device.
    """
    calls: list[str] = []

    def noting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return work(*args, **kwargs)

        return wrapper

    async def sleep(self: TransformersModel) -> None:
        calls.append("sleep")

    for owner, name in (
        (TransformersModel, "reload"),
        (TransformersModel, "generate"),
        (Learner, "__init__"),
        *((Learner, name) for name in ("offload", "load_to_gpu", "update", "write_weights", "state", "write_result")),
    ):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    monkeypatch.setattr(TransformersModel, "sleep", sleep, raising=False)
    monkeypatch.setattr(ModelConfig, "shares_gpus", True)
    file = recipe(tmp_path, door_model, "", watched=True)
    asyncio.run(groups.trained(file))

    word = {"generate": "g", "reload": "L", "sleep": "S", "offload": "R", "load_to_gpu": "W", "__init__": "I"}
    line = "".join(word.get(name, "t") for name in calls)
    assert re.fullmatch(r"SIt+RLg+(SWt+(RLg+)?)+", line), line
    assert line.count("S") == line.count("L") + 1, "each turn of the sampler begins with new weights"
    weights = published_weights(alone("all"))
    assert all(torch.equal(weight, weights[name]) for name, weight in published_weights(file).items())
