"""What small runs of each method train on and leave in the views, seed by seed: whoever moves code
shows here that it does what it did. Values may differ in the last digits on another processor.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from references import dataset_hashes, view_hashes
from small_runs import RECIPES, small_run


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("door_installed")
@pytest.mark.parametrize("name", RECIPES)
def test_rows_and_views_of_three_seeds(
    name: str, tmp_path: Path, door_model: Path, golden: Callable[[str, str], None]
) -> None:
    seeds = {}
    for seed in range(3):
        store = small_run(name, tmp_path / str(seed), door_model, seed=seed)
        seeds[seed] = {"datasets": dataset_hashes(store), "views": view_hashes(store)}
    golden(f"run-{name}.json", json.dumps(seeds, indent=1) + "\n")
