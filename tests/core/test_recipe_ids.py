"""What a recipe of version 269e248 asked for has the same ids now: fields that came later do not
count while unset.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from asked import asked_for, run_id_of

from agentr_core.environments import registry
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.faults import parse
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.start import input_files, input_hashes
from tasks.wiring import load_recipe

COMPARISON = {"compare": {"arms": {"a": ["data.use=good"]}}, "training": {"max_tokens": 10}}


def recipe(method: str, more: dict[str, Any]) -> Recipe:
    return parse({"name": "old", "method": method, "model": {"path": "m"}, **more})


@pytest.mark.parametrize(
    ("method", "more", "known"),
    [
        ("agent-r", {"splice": {"mode": "verified"}}, "3ec749b24017d233"),
        ("eto", {}, "e3f8ccafc92cd64e"),
        ("compare", COMPARISON, "fcc78bee724dbbdb"),
    ],
)
def test_old_recipes_keep_their_ids(method: str, more: dict[str, Any], known: str) -> None:
    assert fingerprint(asked_for(recipe(method, more))) == known


def test_sections_keep_their_ids() -> None:
    plain = recipe("agent-r", {})
    assert fingerprint(plain.search) == "f15d8090396629d1"
    assert fingerprint(plain.evaluation, plain.instances) == "33009ecf949de8b8"
    assert fingerprint(plain.data) == "450423b13146e934"


def test_labels_read_in_another_way_make_another_run_and_other_trees(tiny_model_dir: Path) -> None:
    def ids(action: dict[str, Any], *, several: bool = False) -> tuple[str, str]:
        world = {"action": action} if action else {}
        worlds = {"environments": {"textcraft": world}} if several else {"environment": {"name": "textcraft", **world}}
        full_recipe = recipe("agent-r", {"model": {"path": str(tiny_model_dir)}, **worlds})
        plain = asked_for(full_recipe)
        inputs = input_hashes(full_recipe, plain, weights={}, files={}, prompts={}, started_at=datetime.now(UTC))
        return run_id_of(full_recipe), inputs["collect"]

    for several in (False, True):
        plain_ids, published_ids = ids({}, several=several), ids({"labels": "published"}, several=several)
        assert ids({"labels": "lenient"}, several=several) == plain_ids
        assert plain_ids[0] != published_ids[0]
        assert plain_ids[1] != published_ids[1]


def test_only_a_world_that_says_other_things_now_gets_other_ids() -> None:
    version = registry.version_of
    assert [version(name, {}) for name in ("textcraft", "webshop", "sciworld", "nowhere")] == [1, 1, 1, 1]
    assert version("sciworld", {"setting": "eto"}) == 2


def test_another_question_in_a_file_makes_another_run_and_other_rollouts(tiny_model_dir: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "questions.jsonl", tmp_path / "sets"
    folder.mkdir()
    row = '{"id": "1", "split": "train", "question": "%s", "golds": ["2"], "source": "s", "domain": "math"}\n'
    settings = {
        "model": {"path": str(tiny_model_dir)},
        "environment": {"name": "reasoning", "options": {"questions": [str(file), str(folder)]}},
    }

    def ids() -> tuple[str, str]:
        full_recipe = recipe("et-agent", settings)
        files = input_files(full_recipe)
        inputs = input_hashes(
            full_recipe, asked_for(full_recipe), weights={}, files=files, prompts={}, started_at=datetime.now(UTC)
        )
        return run_id_of(full_recipe), inputs["rollout"]

    ids_by_run = []
    for question, other_question in (("1+1", "1+1"), ("4-2", "1+1"), ("4-2", "2/1")):
        file.write_text(row % question, encoding="utf-8")
        (folder / "test.jsonl").write_text(row % other_question, encoding="utf-8")
        ids_by_run.append(ids())
    assert len({run for run, _ in ids_by_run}) == len({rollout for _, rollout in ids_by_run}) == 3


def test_a_recipe_that_names_no_workspace_takes_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(__file__).parents[2] / "deployments" / "recipes" / "textcraft-tiny.yaml"
    assert load_recipe(file, []).workspace == "runs"
    monkeypatch.setenv("AGENTR_WORKSPACE", "elsewhere")
    assert load_recipe(file, []).workspace == "elsewhere"
    for workspace in ("mine", "runs"):
        assert load_recipe(file, [f"workspace={workspace}"]).workspace == workspace


def test_limits_of_episodes_make_other_rollouts_and_evaluations_only_where_they_are_set(tiny_model_dir: Path) -> None:
    def ids(**limits: float) -> tuple[str, str]:
        full_recipe = recipe("et-agent", {"model": {"path": str(tiny_model_dir)}, "grpo": limits, "evaluation": limits})
        inputs = input_hashes(
            full_recipe, asked_for(full_recipe), weights={}, files={}, prompts={}, started_at=datetime.now(UTC)
        )
        return inputs["rollout"], fingerprint(full_recipe.evaluation)

    none, tokens, seconds = ids(), ids(max_episode_tokens=4096), ids(max_episode_seconds=1200.0)
    assert ids(max_episode_tokens=0, max_episode_seconds=0.0) == none
    assert len({none[0], tokens[0], seconds[0]}) == len({none[1], tokens[1], seconds[1]}) == 3


def test_greedy_episodes_are_the_same_for_each_seed_where_a_world_repeats_itself(tiny_model_dir: Path) -> None:
    def ids(seed: int, world: str = "textcraft", **options: Any) -> dict[str, str]:
        sets = {"greedy": {"split": "dev"}, "sampled": {"split": "dev", "episodes": 2, "temperature": 1.0}}
        settings = {
            "seed": seed,
            "model": {"path": str(tiny_model_dir)},
            "environment": {"name": world, "options": options},
            "evaluation": {"sets": sets},
        }
        full_recipe = recipe("agent-r", settings)
        return input_hashes(
            full_recipe, asked_for(full_recipe), weights={}, files={}, prompts={}, started_at=datetime.now(UTC)
        )

    def differ(world: str, **options: Any) -> set[str]:
        first, second = ids(0, world, **options), ids(1, world, **options)
        return {stage for stage in first if stage.startswith("evaluate") and first[stage] != second[stage]}

    everything = {"evaluate", "evaluate/greedy", "evaluate/sampled"}
    assert differ("textcraft") == {"evaluate/sampled"}
    assert differ("openenv", url="http://127.0.0.1:1") == {"evaluate/sampled"}
    assert differ("openenv", url="http://127.0.0.1:1", repeatability="never") == everything
    assert differ("reasoning") == everything, "its grader may ask a model"
    assert len({*ids(0).values()}) == len(ids(0))
