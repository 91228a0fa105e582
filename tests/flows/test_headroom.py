"""`agentr headroom`, from sampling to its table: its rows, and how a second call goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentr_core.store.database import Store
from flows.commands.headroom import render
from flows.local import measure_headroom

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server", "door_installed"),
    # Prefect leaves the sockets of its event clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
CHANGES = ("search.temperature=2.0",)


def ask(recipe: Path, sql: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = Store(recipe.parent / "runs" / "store.duckdb").answer(sql).to_pylist()
    return rows


def test_headroom_is_sampled_measured_told_and_gone_on_with(recipe: Path, door_model: Path) -> None:
    first_report = measure_headroom(recipe, CHANGES, episodes=3, instances=2)
    before = ask(recipe, "select trajectory_id from episode")

    second_report = measure_headroom(recipe, CHANGES, episodes=4, instances=3, judged=2, judges=[door_model])

    rows = ask(
        recipe,
        "select e.name, count(*)::int as episodes, count(distinct instance_id)::int as instances "
        "from episode join evaluation e using (evaluation_id) where e.finished group by all order by 1",
    )
    assert {row["name"]: (row["episodes"], row["instances"]) for row in rows} == {
        "headroom-train": (12, 3),
        "headroom-train-greedy": (3, 3),
        "headroom-test": (12, 3),
        "headroom-test-greedy": (3, 3),
    }
    assert {row["trajectory_id"] for row in before} <= {
        row["trajectory_id"] for row in ask(recipe, "select trajectory_id from episode")
    }
    metrics = {
        row["metric"]: row["value"]
        for row in ask(
            recipe, "select metric, value from v_metrics where evaluation = 'headroom-train' and depth is null"
        )
    }
    forecast_means = {
        forecast.name: forecast.expected.mean for prospect in second_report.prospects for forecast in prospect.forecasts
    }
    assert {"mixed_trees", "pairs", "mixed_groups", "successes"} <= set(forecast_means)
    for name, value in forecast_means.items():
        assert metrics[f"forecast/{name}"] == pytest.approx(value)
    assert sum(metrics[f"{kind}@4"] for kind in ("always", "mixed", "never")) == pytest.approx(1)
    assert metrics["reflecting"] == 0
    assert ask(recipe, "select status from run") == [{"status": "finished"}]
    assert ask(recipe, "from v_orphans") == [], "what an iteration that has not begun will choose is not its choice yet"

    # The recipe's judge is the model itself, so both were asked the same.
    judge, second_judge = second_report.judges
    assert (judge.episodes, judge.votes) == (2, 1)
    assert judge.steps >= 2
    assert (second_judge.name, second_judge.read) == (str(door_model), judge.read)
    assert metrics[f"judge/{judge.name}/1/read"] == judge.read.mean
    assert f"judge/{judge.name}/1/right" not in metrics

    table = render(second_report, "table")
    assert "2 lost episodes" in table
    assert "This world has no oracle" in table
    assert all(name in table for name in ("pass@1 %", "pass@4 %", "Mixed %", "forecasts", "agent-r", "eto", "grpo"))
    assert re.search(r"^Instances +Number +Always won %", table, re.MULTILINE), "shares are of how many"
    assert re.search(r"is \S+% and greedy \S+% on \d+ training instances", table)
    plain = json.loads(render(first_report, "json"))
    assert plain["episodes"] == 3
    assert plain["judges"] == []
    assert set(plain["measures"]) == {row["name"] for row in rows}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["search.temperature=0", "search.width=1"], "collects at temperature 0"),
        (["search.temperature=2.0"], "at least 2"),
    ],
)
def test_what_shows_no_contrast_is_refused(recipe: Path, changes: list[str], said: str) -> None:
    from agentr_core.errors import ConfigError

    with pytest.raises(ConfigError, match=said):
        measure_headroom(recipe, changes, episodes=1, instances=1)
