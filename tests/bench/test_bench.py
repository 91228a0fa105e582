"""Every benchmark runs on its smallest sizes and says what it found; how fast this machine is proves nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOALS = {
    "trees_per_second_ratio": ">= 20",
    "collection_share_of_engine_limit": ">= 70",
    "collection_time_outside_generation": "<= 5",
    "shared_prefill_ratio": "> 1",
    "store_ingest": ">= 20000",
    "lineage_query": "< 1",
    "peak_memory_ratio": "<= 1.2",
}


@pytest.mark.slow
def test_the_quick_run_measures_everything(tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    command = [sys.executable, "tests/bench/bench.py", "--quick", "--clock", "cpu", "--output", str(output)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {line["name"]: line["goal"] for line in lines} == GOALS
    for line in lines:
        assert line.keys() == {"name", "value", "unit", "goal", "ok"}
        assert line["value"] > 0
        assert f"| {line['name']} |" in done.stdout
        sign, number = line["goal"].split()
        holds = line["value"] >= float(number) if ">" in sign else line["value"] <= float(number)
        assert line["ok"] is holds
