"""What `auto` comes to: by the processor, in every model and training of a recipe, and in its
id.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asked import asked_for

from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.faults import parse
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime import machine
from agentr_core.runtime.machine import bfloat16_instruction, number_formats, resolve_auto
from agentr_core.training.requirements import check_requirements

WITH = "model name\t: One\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n"
WITHOUT = "model name\t: Other\nflags\t\t: fpu avx512f avx512_vnni\n"
AUTO: dict[str, Any] = {
    "name": "x",
    "model": {"path": "m", "dtype": "auto"},
    "models": {"judge": {"path": "j", "dtype": "auto"}},
    "training": {"bf16": "auto"},
}


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the machine one without a GPU, whose processor Linux describes so."""

    def describe(processor: str) -> None:
        (tmp_path / "cpuinfo").write_text(processor)

    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return describe


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (WITH, "avx512_bf16"),
        (WITHOUT, ""),
        ("flags\t: amx_bf16 avx512_bf16 amx_tile", "amx_bf16"),
        ("Features\t: fp asimd i8mm bf16 dgh", "bf16"),
        ("Features\t: fp asimd asimdhp", ""),
    ],
)
def test_the_processor_says_what_it_has(processor: str, said: str) -> None:
    assert bfloat16_instruction(processor) == said


def test_a_machine_is_described(on: Callable[[str], None]) -> None:
    on("processor\t: 0\nmodel name\t: One of a kind\n")
    facts = machine.machine_facts()
    assert re.fullmatch(r"One of a kind, \d+ of \d+", facts["processor"])
    assert re.fullmatch(r"\d+\.\d GiB", facts["memory"])
    assert "gpu" not in facts
    on("Features\t: fp asimd\n")
    assert machine.machine_facts()["processor"][0] != ","


def test_the_commit_is_that_of_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "agentr_core" / "runtime"
    code.mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(code / "machine.py"))
    assert machine.commit(package="no-such-package") == ""

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (code / "machine.py").write_text("one", encoding="utf-8")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "v1", "-m", "a tag is no commit")
    head = git("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert machine.commit() == head
    (code / "machine.py").write_text("two", encoding="utf-8")
    assert machine.commit() == f"{head}+"


def test_every_auto_is_settled_alike(on: Callable[[str], None]) -> None:
    on(WITH)
    fast = resolve_auto(parse(AUTO))
    assert fast.models.judge is not None
    assert (fast.model.dtype, fast.models.judge.dtype, fast.training.bf16) == ("bfloat16", "bfloat16", True)
    on(WITHOUT)
    slow = resolve_auto(parse(AUTO))
    assert slow.models.judge is not None
    assert (slow.model.dtype, slow.models.judge.dtype, slow.training.bf16) == ("float32", "float32", False)
    assert number_formats(slow).startswith(
        "number formats: actor float32, judge float32, training float32; bfloat16 is "
    )


def test_an_id_is_that_of_what_auto_came_to(on: Callable[[str], None]) -> None:
    def key(recipe: Recipe) -> str:
        return fingerprint(asked_for(recipe))

    data = {**AUTO, "model": {"path": "m", "dtype": "bfloat16"}, "models": {"judge": {"path": "j"}}}
    data["models"]["judge"]["dtype"] = "bfloat16"
    on(WITH)
    digest = key(resolve_auto(parse(AUTO)))
    assert digest == key(parse({**data, "training": {}}))
    on(WITHOUT)
    assert key(resolve_auto(parse(AUTO))) != digest


def test_what_is_written_stays(on: Callable[[str], None]) -> None:
    on(WITHOUT)
    recipe = parse({"name": "x", "model": {"path": "m", "dtype": "bfloat16"}})
    assert resolve_auto(recipe) == recipe
    assert recipe.training.bf16


def test_a_served_model_has_no_format_of_ours(on: Callable[[str], None]) -> None:
    on(WITH)
    recipe = parse({"name": "x", "model": {"backend": "openai", "dtype": "auto", "server": {"model": "m"}}})
    assert resolve_auto(recipe).model.dtype == "float32"
    assert "actor" not in number_formats(resolve_auto(recipe))
    assert number_formats(resolve_auto(recipe), with_training=False) == ""


def test_a_trainer_refuses_what_nobody_settled() -> None:
    training = parse(AUTO).training
    with pytest.raises(ConfigError, match="still auto"):
        check_requirements(training)
    check_requirements(replace(training, bf16=False))


@pytest.mark.parametrize(("gpus", "processors", "expected"), [(0, 1, 1), (0, 2, 2), (0, 64, 4), (3, 64, 3)])
def test_trainers_are_as_many_as_gpus_or_processors(
    on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, gpus: int, processors: int, expected: int
) -> None:
    on(WITH)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(machine, "processors", lambda: processors)
    training = {"bf16": "auto", "step_tokens": 4096, "launch": {"num_processes": "auto"}}
    assert resolve_auto(parse({**AUTO, "training": training})).training.num_processes == expected


@pytest.mark.parametrize(
    ("training", "wrong"),
    [
        ({"launch": {"num_processes": "auto"}}, "set training.step_tokens"),
        ({"step_tokens": 9, "launch": {"num_processes": "auto", "num_machines": 2}}, "auto counts one machine"),
    ],
)
def test_steps_do_not_depend_on_how_many_processors_there_are(training: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse({"name": "x", "model": {"path": "m"}, "training": training})


def test_nor_does_the_number_of_pairs_of_a_step() -> None:
    recipe = {"name": "x", "model": {"path": "m"}, "method": "eto", "eto": {"phases": ["dpo"]}}
    with pytest.raises(ConfigError, match="decide how many pairs a step of preference training has; give a number"):
        parse({**recipe, "training": {"launch": {"num_processes": "auto"}}})
    # What sizes the steps of fine-tuning says nothing about pairs.
    with pytest.raises(ConfigError, match="decide how many pairs a step of preference training has; give a number"):
        parse(
            {
                **recipe,
                "iterations": 2,
                "eto": {"phases": ["sft", "dpo"]},
                "training": {"step_tokens": 4096, "launch": {"num_processes": "auto"}},
            }
        )
    parse({**recipe, "training": {"launch": {"num_processes": 2}}})


@pytest.mark.parametrize("method", [{"method": "grpo"}, {"agent_r": {"phases": ["rl"]}}])
def test_group_rl_takes_its_steps_from_episodes_however_many_processors_share_them(
    on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    on(WITH)
    monkeypatch.setattr(machine, "processors", lambda: 3)
    training = {"launch": {"num_processes": "auto"}}
    recipe = parse({"name": "x", "model": {"path": "m"}, "training": training, **method})
    assert resolve_auto(recipe).training.num_processes == 3
