"""Servers that are up at once need room on the GPUs; those that follow one another do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentr_core.methods.faults import load
from agentr_core.recipes.recipe import Recipe
from flows.preflight.checks import faults_of
from flows.preflight.serving import crowded_gpus
from tasks.wiring import load_recipe, make_environment

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
SERVED = "{{backend: vllm, path: {path}, device: {device}, vllm: {{{vllm}}}}}"


def config(path: str, vllm: str = "", device: str = "cuda") -> str:
    return SERVED.format(path=path, vllm=vllm, device=device)


def gpu_faults(recipe: Recipe, *, trains: bool = True) -> list[str]:
    env = make_environment(recipe)
    try:
        return crowded_gpus(recipe, env, trains=trains)
    finally:
        env.close()


@pytest.mark.parametrize(
    ("actor", "judge", "said"),
    [
        (config("m"), config("j"), "models.judge.vllm.gpus: its servers and those of model are up at once, and both "),
        (config("m", "replicas: 2"), config("j", "gpus: [1]"), "want more than all memory of GPU 1; name other GPUs"),
        (config("m"), config("m"), "those of model are up at once"),
        (config("m"), config("j", "gpus: [1]"), ""),
        (config("m", "gpu_memory_utilization: 0.4"), config("j", "gpu_memory_utilization: 0.5"), ""),
        (config("m", device="cpu"), config("j", device="cpu"), ""),
        ("{path: m}", config("j"), ""),
    ],
)
def test_a_judge_of_answers_is_up_beside_the_player(actor: str, judge: str, said: str) -> None:
    environment = "environment={name: reasoning, options: {judged: all}}"
    recipe = load(RECIPES / "reasoning-et-agent-tiny.yaml", [environment, f"model={actor}", f"models.judge={judge}"])
    for trains in (True, False):
        faults = gpu_faults(recipe, trains=trains)
        assert len(faults) == bool(said)
        assert all(said in fault for fault in faults)


def test_a_judge_of_paths_is_asked_when_their_player_is_gone() -> None:
    recipe = load(RECIPES / "textcraft-tiny.yaml", [f"model={config('m')}", f"models.judge={config('j')}"])
    assert gpu_faults(recipe) == []


def test_models_beside_the_player_share_a_server_and_a_door_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [f"models.{role}={config('j')}" for role in ("editor", "reflector")]
    recipe = load(RECIPES / "reasoning-et-agent-tiny.yaml", [f"model={config('m', 'gpus: [1]')}", *changes])
    assert gpu_faults(recipe) == []
    other_recipe = load(RECIPES / "reasoning-et-agent-tiny.yaml", [f"model={config('m', 'gpus: [1]')}", changes[0],
                                                                  f"models.reflector={config('k')}"])  # fmt: skip
    (message,) = gpu_faults(other_recipe)
    assert message.startswith("models.editor.vllm.gpus: its servers and those of models.reflector are up at once")
    assert gpu_faults(other_recipe, trains=False) == [], "an evaluation asks the actor alone"
    monkeypatch.setenv("AGENTR_VLLM", "http://127.0.0.1:8100")
    assert gpu_faults(other_recipe) == []


@pytest.mark.slow
def test_they_are_told_before_anything_starts(tmp_path: Path) -> None:
    path = "data/models/reasoning-tiny"
    environment = "environment={name: reasoning, options: {judged: all}}"
    models = [f"model={config(path)}", f"models.judge={config(path, 'replicas: 2')}"]
    recipe = load_recipe(RECIPES / "reasoning-et-agent-tiny.yaml", [environment, *models, f"workspace={tmp_path}"])
    faults = faults_of(recipe, asks=False).errors
    assert any("those of model are up at once" in str(fault) for fault in faults)
