"""Small homes for ALFWorld: made on the real engine by `data/alfworld/make.py`, or written for
lists alone.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GAMES = {"train": 8, "valid_seen": 2, "valid_unseen": 2}

needs_engine = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("alfworld", "fast_downward", "textworld")),
    reason="ALFWorld's engine is built from source and not installed; `make test-alfworld` does it and runs this",
)


def maker() -> ModuleType:
    """Return the script that makes games."""
    spec = importlib.util.spec_from_file_location("alfworld_make", ROOT / "data" / "alfworld" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write(root: Path, place: str, kind: str = "pick_and_place_simple", **changed: Any) -> Path:
    """Write a game that can be listed but not played; `place` is `split/task/trial`. Return its
    folder.
    """
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    grammar = 'action PutObject { template :: "put {o} in/on {r}"; }'
    content = {"pddl_domain": "(", "pddl_problem": "(", "grammar": grammar, "solvable": True, "walkthrough": ["look"]}
    folder.joinpath("traj_data.json").write_text(json.dumps({"task_type": kind}), encoding="utf-8")
    folder.joinpath("game.tw-pddl").write_text(json.dumps(content | changed), encoding="utf-8")
    return folder
