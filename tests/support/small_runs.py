"""Small runs of each method on the door, in seconds each and in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import yaml
from turning import turn

from agentr_core.store.database import Store

PLAY = {"max_steps": 3, "max_new_tokens": 6}
SEARCH = {
    "iterations": 2,
    "search": {"dives": 2, "width": 2, "depth": 4, "max_new_tokens": 6},
    "critique": {"max_new_tokens": 6, "unparsable": "bad"},
    "pairs": {"alpha": [0.5], "beta": 0.2},
}
HELPER = {"max_new_tokens": 8}
GROUPS = {"steps": 3, "groups": 4, "num_generations": 4, "revision_share": 0.5, "resample": 0} | PLAY
RECIPES: dict[str, dict[str, Any]] = {
    "verified": {**SEARCH, "splice": {"mode": "verified", "no_error": "reject"}},
    "continued": {**SEARCH, "splice": {"mode": "continued", "no_error": "keep", "continuation": {"samples": 4} | PLAY}},
    "rollback": {**SEARCH, "splice": {"mode": "rollback", "continuation": {"samples": 4} | PLAY}},
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
    "grpo": {"method": "grpo", "grpo": GROUPS},
    "verdict": {
        "method": "grpo",
        "grpo": GROUPS | {"revision_cut": "verdict"},
        "critique": {"max_new_tokens": 6, "votes": 2, "temperature": 1.0},
    },
    "value": {"method": "grpo", "grpo": GROUPS | {"revision_cut": "value"}},
}


def small_run(name: str, folder: Path, model: Path, *, rate: float = 1e-3, seed: int = 0) -> Store:
    """Run a recipe of `RECIPES` to its end in a new folder, and return its store."""
    folder.mkdir()
    recipe = {
        "name": "door",
        "workspace": str(folder / "runs"),
        "iterations": 1,
        "seed": seed,
        "environment": {"name": "door"},
        "model": {"path": str(model), "device": "cpu", "dtype": "float32", "max_batch": 16, "workers": 1},
        "training": {"learning_rate": rate, "bf16": False, "num_threads": 1},
        "evaluation": {"max_steps": 2, "max_new_tokens": 6, "revision_test": {"enabled": False}},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe | RECIPES[name]), encoding="utf-8")
    asyncio.run(turn(file))
    return Store(folder / "runs" / "store.duckdb")
