"""What `agentr new` writes is installed by the command that it prints, and its recipe is run."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentr_core.store.database import Store
from flows.cli import cli
from flows.flywheel import flywheel

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMALL = [
    "instances.train_limit=4",
    "instances.test_limit=2",
    "search.depth=4",
    "evaluation.max_steps=3",
    "training.bf16=false",
    "data.use=good",
]


def test_the_command_that_is_printed_installs_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pip puts what is installed into a folder of its own, from where it is read as from others."""
    monkeypatch.chdir(tmp_path)
    output = CliRunner().invoke(cli, ["new", "world", "glass-maze"], catch_exceptions=False).output
    (line,) = re.findall(r"^pip .*$", output, re.M)
    pip = [sys.executable, "-m", *shlex.split(line), "--quiet", "--no-index", "--prefix", str(tmp_path / "prefix")]
    subprocess.run(pip, check=True)
    (site,) = (tmp_path / "prefix").glob("lib/python*/site-packages")
    (path,) = [file.read_text(encoding="utf-8").strip() for file in site.glob("*.pth")]
    assert path == str(tmp_path / "glass-maze")
    # Where the folder itself looks like a package of the same name.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(ROOT), str(site), path])}
    doctor = [sys.executable, "-m", "flows.cli", "env", "doctor", "glass-maze"]
    done = subprocess.run(doctor, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "glass-maze: ok - keeps the contract\n"


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_recipe_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["new", "recipe", "first"], catch_exceptions=False).exit_code == 0
    done = asyncio.run(flywheel("first.yaml", SMALL))
    assert Store(tmp_path / "runs" / "store.duckdb").query("select status from run")["status"].tolist() == ["finished"]
    assert Path(done["report"]).is_file()
