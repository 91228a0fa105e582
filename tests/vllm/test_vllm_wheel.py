"""One turn of the wheel on a real vLLM, behind `agentr models serve`, which changes weights on the
way.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

from vllm_engine import ROOT, START_SECONDS, TINY
from wheel import agentr, environment, started

from agentr_core.store.database import Store

SMALL = (
    "iterations=1",
    f"model.path={TINY}",
    "model.backend=vllm",
    "model.dtype=float32",
    "model.device=cpu",
    f"model.vllm.start_timeout={START_SECONDS}",
    "instances.train_limit=12",
    "instances.test_limit=4",
    "search.dives=2",
    "search.depth=6",
    "training.max_tokens=2000",
    "training.num_threads=1",
    "evaluation.max_steps=6",
    "evaluation.revision_test.limit=2",
)


def test_one_iteration(engine: Path, tmp_path: Path) -> None:
    env = environment(tmp_path, tmp_path / "prefect", AGENTR_VLLM_ENV=str(engine))
    serve = ("models", "serve", "--model", TINY, "--port", "0", "--device", "cpu", "--logs", tmp_path / "logs")
    timeout = ("-o", f"model.vllm.start_timeout={START_SECONDS}")
    with started(*serve, *timeout, env=env) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "AGENTR_VLLM=" in line:
                break
        else:
            raise AssertionError(server.stderr.read())
        door = lines[-1].strip().rpartition("=")[2]
        overrides = [word for change in (*SMALL, f"workspace={tmp_path / 'runs'}") for word in ("-o", change)]
        recipe = ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml"
        done = agentr("run", recipe, *overrides, env=env | {"AGENTR_VLLM": door}, timeout=2 * START_SECONDS)
        assert done.returncode == 0, done.stderr
        server.send_signal(signal.SIGINT)
        rest = server.stdout.read()
        assert server.wait(timeout=120) == 0
    assert re.search(r"serving \S+/checkpoints/\w+ from now on", rest)
    assert "the replicas have ended" in rest
    counts = Store(tmp_path / "runs" / "store.duckdb").query(
        "select count(*) as drawn, count(*) filter (where len(token_ids) > 0) as sampled from generation "
        "where kind = 'node'"
    )
    assert counts["drawn"][0] == counts["sampled"][0] > 0, "training sees the ids that vLLM sampled"
