"""The quick recipe of ScienceWorld, cut short: from the simulator's own solutions to a trained model and its report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentr_core.store import Store
from flows.flywheel import flywheel

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


def test_the_quick_recipe_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = ROOT / "deployments" / "recipes" / "sciworld-quick.yaml"
    overrides = [
        f"workspace={tmp_path / 'runs'}",
        "instances.train_limit=4",
        "instances.test_limit=2",
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
    rejected = store.query("select count(*) n from rejection where stage = 'expert'")["n"].tolist()
    # Now and then the simulator's own solution takes more steps than ETO grants.
    assert samples == [{"kind": "expert", "n": 4 - rejected[0]}]
    assert store.query("select episodes from v_iterations order by iteration")["episodes"].tolist() == [2, 2]
    assert store.query("select * from v_orphans").empty
    assert store.query("select * from event").empty
