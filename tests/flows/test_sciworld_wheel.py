"""The quick recipes of ScienceWorld, cut short: from solutions, or from pairs, to a trained model
and its report.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from turning import turn

from agentr_core.store.database import Store

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

SMALL = (
    "instances.train_limit=4",
    "instances.test_limit=2",
    "training.bf16=false",
    "evaluation.max_steps=2",
    "evaluation.max_new_tokens=8",
)


def run(name: str, folder: Path, *overrides: str) -> Store:
    """Run a recipe that comes along to its report; return its store."""
    recipe = ROOT / "deployments" / "recipes" / f"{name}.yaml"
    changes = [*SMALL, f"workspace={folder / 'runs'}", *overrides]
    done = asyncio.run(turn(recipe, *changes))
    assert done.report.is_file()
    return done.store


@pytest.mark.long
def test_the_quick_recipe_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    store = run("sciworld-quick", tmp_path, "training.num_train_epochs=[1]")

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    samples = store.query("select kind, count(*) n from sample group by kind").to_dict("records")
    rejected = store.query("select count(*) n from rejection where stage = 'expert'")["n"].tolist()
    # Now and then the simulator's own solution takes more steps than ETO grants.
    assert samples == [{"kind": "expert", "n": 4 - rejected[0]}]
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [2, 2]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty


@pytest.mark.long
def test_the_preference_iteration_of_eto_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = (
        "iterations=1",
        "training={}",
        "eto.phases=[dpo]",
        "eto.explore.max_steps=2",
        "eto.explore.max_new_tokens=8",
    )
    store = run("sciworld-eto-quick", tmp_path, *short)

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    pairs = store.query("select kind from preference")["kind"].tolist()
    experts = store.query("select count(*) n from trajectory where source = 'expert'")["n"][0]
    assert pairs == ["lose"] * experts, "random words get nowhere"
    assert experts
    assert not store.query("select reward_accuracy from training_step")["reward_accuracy"].isna().any()
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [2, 2]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty
