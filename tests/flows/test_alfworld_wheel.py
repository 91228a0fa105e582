"""The quick recipes of ALFWorld, cut short: from walkthroughs, or from pairs, to a trained model
and its report.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from houses import GAMES, ROOT, maker, needs_engine

from agentr_core.store.database import Store
from flows.flywheel import flywheel

pytestmark = [
    needs_engine,
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


def run(name: str, folder: Path, *overrides: str) -> Store:
    """Run a recipe that comes along to its report, in four homes; return its store."""
    maker().make(folder / "homes", GAMES | {"train": 4})
    recipe = ROOT / "deployments" / "recipes" / f"{name}.yaml"
    small = [
        f"workspace={folder / 'runs'}",
        f"environment.options.data_dir={folder / 'homes'}",
        f"environment.options.cache_dir={folder / 'cache'}",
        "training.bf16=false",
        "evaluation.max_steps=2",
        "evaluation.max_new_tokens=8",
    ]
    result = asyncio.run(flywheel(str(recipe), [*small, *overrides]))
    assert Path(result["report"]).is_file()
    return Store(folder / "runs" / "store.duckdb")


def test_the_quick_recipe_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    store = run("alfworld-quick", tmp_path, "training.num_train_epochs=[1]")

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    samples = store.query("select kind, count(*) n from sample group by kind").to_dict("records")
    assert samples == [{"kind": "expert", "n": 4}]
    assert store.query("select success from trajectory where source = 'expert'")["success"].tolist() == [True] * 4
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [2, 2]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty


def test_the_preference_iteration_of_eto_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = (
        "iterations=1",
        "training={}",
        "eto.phases=[dpo]",
        "eto.explore.max_steps=2",
        "eto.explore.max_new_tokens=8",
    )
    store = run("alfworld-eto-quick", tmp_path, *short)

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    assert store.query("select kind from preference")["kind"].tolist() == ["lose"] * 4, "random words get nowhere"
    assert not store.query("select reward_accuracy from training_step")["reward_accuracy"].isna().any()
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [2, 2]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty
