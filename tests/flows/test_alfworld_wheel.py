"""The quick recipe of ALFWorld, cut short: from the walkthroughs of real games to a trained model and its report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from houses import GAMES, ROOT, maker, needs_engine

from agentr_core.store import Store
from flows.flywheel import flywheel

pytestmark = [
    needs_engine,
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


def test_the_quick_recipe_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    maker().make(tmp_path / "homes", GAMES | {"train": 4})
    recipe = ROOT / "deployments" / "recipes" / "alfworld-quick.yaml"
    overrides = [
        f"workspace={tmp_path / 'runs'}",
        f"environment.options.data_dir={tmp_path / 'homes'}",
        f"environment.options.cache_dir={tmp_path / 'cache'}",
        "training.num_train_epochs=[1]",
        "training.bf16=false",
        "evaluation.max_steps=2",
        "evaluation.max_new_tokens=8",
    ]

    result = asyncio.run(flywheel(str(recipe), overrides))

    assert Path(result["report"]).is_file()
    store = Store(tmp_path / "runs" / "store.duckdb")
    assert store.query("select status from run")["status"].tolist() == ["finished"]
    samples = store.query("select kind, count(*) n from sample group by kind").to_dict("records")
    assert samples == [{"kind": "expert", "n": 4}]
    assert store.query("select success from trajectory where source = 'expert'")["success"].tolist() == [True] * 4
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [2, 2]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty
