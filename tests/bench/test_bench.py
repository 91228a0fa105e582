"""Every benchmark runs on its smallest sizes and says what it found; how fast this machine is
proves nothing here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import training_under_load
import viewing
from training_speed import model_flops
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.packing import TokenRow

ROOT = Path(__file__).parents[2]
GOALS: dict[str, str | None] = {
    "trees_per_second_ratio": ">= 20",
    "collection_tokens_per_second": None,
    "collection_share_of_engine_limit": ">= 70",
    "collection_time_outside_generation": "<= 5",
    "choosing_share_49k": "<= 5",
    "choosing_share_262k": "<= 10",
    "credit_share_of_update": "<= 1",
    "training_attention_ratio_short": "> 1",
    "training_attention_ratio_long": "> 1",
    "shared_prefill_ratio": "> 1",
    "shared_prefill_ratio_grouped": "> 1",
    "sampling_decoding_ratio_4": ">= 4",
    "sampling_with_prefill_ratio_4": ">= 5",
    "conversation_cache_ratio": "> 1",
    "conversation_cached_share": None,
    "gateway_call": "<= 5",
    "gateway_first_token": "<= 20",
    "store_ingest": ">= 20000",
    "lineage_query": "< 1",
    "tree_load": "< 2",
    "peak_memory_ratio": "<= 1.2",
    "python_call_ratio": ">= 10",
    "retrieval_queries_per_second": ">= 1000",
    "retrieval_queries_per_second_http": None,
    "retrieval_share_left_by_http": None,
    "viewer_slowest_page": "<= 0.3",
    "viewer_slowest_first_visit": "<= 0.3",
    **dict.fromkeys(f"viewer {page}" for page in viewing.PAGES),
}

WITHOUT = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {gone} else find(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
"""
"""A start of Python in which some packages are not installed."""


@pytest.mark.slow
@pytest.mark.long
def test_a_training_step_beside_a_busy_loop_takes_at_most_twice_its_time(tmp_path: Path) -> None:
    steps = training_under_load.measure(tmp_path, rounds=3)
    assert 0 < steps.ratio <= 2, steps


@pytest.mark.slow
def test_the_quick_run_measures_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has most of what it imports."""
    import bench

    output = tmp_path / "bench.jsonl"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--quick", "--clock", "cpu", "--output", str(output)])
    bench.main()
    stdout = capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {line["name"]: line["goal"] for line in lines} == GOALS
    for line in lines:
        assert line.keys() == {"name", "value", "unit", "goal", "ok"}
        assert line["value"] > 0
        assert f"| {line['name']} |" in stdout
        if line["goal"] is None:
            assert line["ok"] is None
            continue
        sign, number = line["goal"].split()
        holds = line["value"] >= float(number) if ">" in sign else line["value"] <= float(number)
        assert line["ok"] is holds


@pytest.mark.slow
@pytest.mark.long
def test_the_benchmark_of_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    """What it finds there says nothing; that its FLOPs are counted rightly has a test of its
    own.
    """
    output = tmp_path / "gpu.jsonl"
    options = ["--device", "cpu", "--size", "tiny", "--quick", "--peak-tflops", "1", "--output", str(output)]
    process = subprocess.run(
        [sys.executable, "tests/bench/gpu.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=3000
    )
    assert process.returncode == 0, process.stderr
    metrics = {line["name"]: line["value"] for line in map(json.loads, output.read_text().splitlines())}
    assert metrics.keys() >= {"generation_tokens_per_second", "collection_tokens_per_second", "training_lora_mfu"}
    assert "generation_against_continuous_batching" in metrics
    assert all(value > 0 for value in metrics.values())
    # With LoRA a third of the work is spared, and no more is counted.
    for kind, least, most in (("full", 1, 1), ("lora", 0.6, 0.75)):
        per_token = metrics[f"training_{kind}_mfu"] / metrics[f"training_{kind}_tokens_per_second"]
        whole = metrics["training_full_mfu"] / metrics["training_full_tokens_per_second"]
        assert least - 1e-9 <= per_token / whole <= most + 1e-9


@pytest.mark.slow
@pytest.mark.long
def test_the_benchmark_of_a_gpu_runs_where_little_is_installed(tmp_path: Path) -> None:
    """Generation and training are measured without the packages that hold a flywheel together."""
    packages = {
        "duckdb",
        "prefect",
        "vllm",
        "openai",
        "httpx",
        "fastapi",
        "uvicorn",
        "starlette",
        "hypothesis",
        "bm25s",
    }
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(gone=packages), encoding="utf-8")
    output = tmp_path / "gpu.jsonl"
    options = ["--device", "cpu", "--size", "tiny", "--quick", "--peak-tflops", "1", "--output", str(output)]
    process = subprocess.run(
        [sys.executable, "tests/bench/gpu.py", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert process.returncode == 0, process.stderr
    assert re.search("collection is left out: (duckdb|httpx) is not installed here", process.stderr)
    metrics = {line["name"]: line["value"] for line in map(json.loads, output.read_text().splitlines())}
    assert metrics.keys() >= {"generation_tokens_per_second", "training_full_mfu", "training_lora_mfu"}
    assert not any(name.startswith("collection") for name in metrics)
    assert all(value > 0 for value in metrics.values())


def test_flops_of_a_training() -> None:
    config = Qwen3Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=16, vocab_size=100, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    rows = [TokenRow((5,) * 10, (-100,) * 7 + (5,) * 3)]
    projections = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    norms = 2 * 8 + 2 * 4 + 8
    forward = 2 * 10 * (projections + norms) + 2 * 3 * 100 * 8 + 2 * 8 * 10**2
    assert model_flops(model, rows, TrainingConfig()) == 3 * forward
