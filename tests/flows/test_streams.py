"""Two runs that differ in the learning rate alone train on the same rows in the same order: no
random stream and no order is named by an id that contains the run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from turning import turn

from agentr_core.store.database import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("door_installed")]
PLAY = {"max_steps": 3, "max_new_tokens": 6}
SEARCH = {
    "iterations": 2,
    "search": {"dives": 2, "width": 2, "depth": 4, "max_new_tokens": 6},
    "critique": {"max_new_tokens": 6, "unparsable": "bad"},
    "pairs": {"alpha": [0.5], "beta": 0.2},
}
HELPER = {"max_new_tokens": 8}
RECIPES: dict[str, dict[str, Any]] = {
    "verified": {**SEARCH, "splice": {"mode": "verified", "no_error": "reject"}},
    "continued": {**SEARCH, "splice": {"mode": "continued", "no_error": "keep", "continuation": {"samples": 4} | PLAY}},
    "eto": {
        "method": "eto",
        "iterations": 2,
        "eto": {"phases": ["rft", "dpo"], "explore": {"samples": 8} | PLAY, "preferences": {"against": "own"}},
    },
    "et-agent": {
        "method": "et-agent",
        "et_agent": {
            "phases": ["rft"],
            "flywheel": {
                "fresh": 2,
                "rounds": 2,
                "policy": "expand-all",
                "correct": ["C0", "C1"],
                "reflector": HELPER,
                "editor": HELPER,
            }
            | PLAY,
        },
    },
    "grpo": {
        "method": "grpo",
        "grpo": {"steps": 3, "groups": 4, "num_generations": 4, "revision_share": 0.5, "resample": 0} | PLAY,
    },
}
ROWS = """
select i.iteration, d.hash, w.position, s.kind, s.instance_id, s.good_leaf, s.bad_leaf
from dataset d join iteration i using (iteration_id) join dataset_row w using (dataset_id)
join sample s using (sample_id) order by i.iteration, w.position
"""
GROUPS = """
select g.step, g.number, g.instance_id, g.prefix, r.episode, t.reward, list(x.text order by s.position) as replies
from rl_group g join rl_rollout r using (iteration_id, step, number) join trajectory t using (trajectory_id)
left join step s using (trajectory_id) left join text x on x.text_id = s.reply_id
group by all order by g.step, g.number, r.episode
"""


def trained_on(more: dict[str, Any], folder: Path, model: Path, rate: float) -> list[tuple[Any, ...]]:
    """Return what a run with a learning rate trains on, in order; the rate is too small to change
    what later models do.
    """
    folder.mkdir()
    recipe = {
        "name": "door",
        "workspace": str(folder / "runs"),
        "iterations": 1,
        "environment": {"name": "door"},
        "model": {"path": str(model), "device": "cpu", "dtype": "float32", "max_batch": 16, "workers": 1},
        "training": {"learning_rate": rate, "bf16": False, "num_threads": 1},
        "evaluation": {"max_steps": 2, "max_new_tokens": 6, "revision_test": {"enabled": False}},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe | more), encoding="utf-8")
    asyncio.run(turn(file))
    store = Store(folder / "runs" / "store.duckdb")
    return [*store.rows(ROWS), *store.rows(GROUPS)]


@pytest.mark.parametrize(
    "name", ["verified", pytest.param("continued", marks=pytest.mark.long), "eto", "et-agent", "grpo"]
)
def test_runs_of_other_rates_train_on_equal_rows_in_equal_order(name: str, tmp_path: Path, door_model: Path) -> None:
    first, second = (trained_on(RECIPES[name], tmp_path / str(rate), door_model, rate) for rate in (1e-12, 2e-12))
    assert len(first) > 10
    assert first == second
