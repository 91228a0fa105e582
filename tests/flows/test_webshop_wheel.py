"""The quick recipes of WebShop, cut short: from expert visits, or from pairs, to a trained model
and its report.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentr_core.store.database import Store
from flows.flywheel import flywheel

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


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
    places = (f"workspace={folder / 'runs'}", f"environment.options.cache_dir={folder / 'cache'}")
    result = asyncio.run(flywheel(str(recipe), [*SMALL, *places, *overrides]))
    assert Path(result["report"]).is_file()
    return Store(folder / "runs" / "store.duckdb")


@pytest.mark.long
def test_the_quick_recipe_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    store = run("webshop-quick", tmp_path, "training.num_train_epochs=[1]")

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    samples = store.query("select kind, count(*) n from sample group by kind").to_dict("records")
    assert samples == [{"kind": "expert", "n": 4}]
    assert store.query("select count(*) n from dataset_row")["n"].tolist() == [4]
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
    store = run("webshop-eto-quick", tmp_path, *short)

    assert store.query("select status from run")["status"].tolist() == ["finished"]
    pairs = store.query("select kind, margin, count(*) n from v_preferences group by all").to_dict("records")
    assert pairs == [{"kind": "lose", "margin": 1.0, "n": 4}], "random words buy nothing"
    assert store.query("select count(*) n from dataset_row")["n"].tolist() == [8]
    assert not store.query("select reward_accuracy from training_step")["reward_accuracy"].isna().any()
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [2, 2]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty
