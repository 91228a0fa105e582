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


def served(path: str, vllm: str = "", device: str = "cuda") -> str:
    return SERVED.format(path=path, vllm=vllm, device=device)


def crowded(recipe: Recipe, *, trains: bool = True) -> list[str]:
    env = make_environment(recipe)
    try:
        return crowded_gpus(recipe, env, trains=trains)
    finally:
        env.close()


@pytest.mark.parametrize(
    ("actor", "judge", "said"),
    [
        (served("m"), served("j"), "models.judge.vllm.gpus: its servers and those of model are up at once, and both "),
        (served("m", "replicas: 2"), served("j", "gpus: [1]"), "want more than all memory of GPU 1; name other GPUs"),
        (served("m"), served("m"), "those of model are up at once"),
        (served("m"), served("j", "gpus: [1]"), ""),
        (served("m", "gpu_memory_utilization: 0.4"), served("j", "gpu_memory_utilization: 0.5"), ""),
        (served("m", device="cpu"), served("j", device="cpu"), ""),
        ("{path: m}", served("j"), ""),
    ],
)
def test_a_judge_of_answers_is_up_beside_the_player(actor: str, judge: str, said: str) -> None:
    judged = "environment={name: reasoning, options: {judged: all}}"
    recipe = load(RECIPES / "reasoning-et-agent-tiny.yaml", [judged, f"model={actor}", f"models.judge={judge}"])
    for trains in (True, False):
        found = crowded(recipe, trains=trains)
        assert len(found) == bool(said)
        assert all(said in fault for fault in found)


def test_a_judge_of_paths_is_asked_when_their_player_is_gone() -> None:
    recipe = load(RECIPES / "textcraft-tiny.yaml", [f"model={served('m')}", f"models.judge={served('j')}"])
    assert crowded(recipe) == []


def test_models_beside_the_player_share_a_server_and_a_door_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [f"models.{role}={served('j')}" for role in ("editor", "reflector")]
    recipe = load(RECIPES / "reasoning-et-agent-tiny.yaml", [f"model={served('m', 'gpus: [1]')}", *both])
    assert crowded(recipe) == []
    other = load(RECIPES / "reasoning-et-agent-tiny.yaml", [f"model={served('m', 'gpus: [1]')}", both[0],
                                                           f"models.reflector={served('k')}"])  # fmt: skip
    (said,) = crowded(other)
    assert said.startswith("models.editor.vllm.gpus: its servers and those of models.reflector are up at once")
    assert crowded(other, trains=False) == [], "an evaluation asks the actor alone"
    monkeypatch.setenv("AGENTR_VLLM", "http://127.0.0.1:8100")
    assert crowded(other) == []


@pytest.mark.slow
def test_they_are_told_before_anything_starts(tmp_path: Path) -> None:
    path = "data/models/reasoning-tiny"
    judged = "environment={name: reasoning, options: {judged: all}}"
    both = [f"model={served(path)}", f"models.judge={served(path, 'replicas: 2')}"]
    recipe = load_recipe(RECIPES / "reasoning-et-agent-tiny.yaml", [judged, *both, f"workspace={tmp_path}"])
    found = faults_of(recipe, asks=False).errors
    assert any("those of model are up at once" in str(fault) for fault in found)
