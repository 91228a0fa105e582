"""Shipped recipes are found by name in any folder, with the data that they name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from agentr_core.errors import ConfigError
from agentr_core.methods.faults import load
from agentr_core.system import shipped_recipes
from flows.cli import cli

ROOT = Path(__file__).parents[2]
PACKED = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"][
    "force-include"
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder: one without a checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_a_shipped_recipe_with_its_data() -> None:
    recipe = load(Path("textcraft-agent-r-rl-tiny"), ["seed=3"])
    assert (recipe.name, recipe.seed) == ("textcraft-agent-r-rl-tiny", 3)
    assert Path(recipe.model.path).samefile(ROOT / "data" / "models" / "textcraft-tiny")


def test_what_the_folder_has_goes_before_what_is_shipped(elsewhere: Path) -> None:
    (elsewhere / "data" / "models" / "textcraft-tiny").mkdir(parents=True)
    assert load(Path("textcraft-tiny")).model.path == "data/models/textcraft-tiny"
    (elsewhere / "textcraft-tiny").write_text("name: own\nmodel: {path: m}", encoding="utf-8")
    assert load(Path("textcraft-tiny")).name == "own"


def test_a_file_of_your_own_does_not_find_shipped_data(elsewhere: Path) -> None:
    (elsewhere / "own.yaml").write_text("name: own\nmodel: {path: data/models/textcraft-tiny}", encoding="utf-8")
    assert load(Path("own.yaml")).model.path == "data/models/textcraft-tiny"


def test_a_name_that_is_wrong_is_told_which_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"does not exist \(did you mean textcraft-tiny\?\); `agentr recipes` lists"):
        load(Path("textcraft-tinny"))


def test_they_are_listed_with_what_they_do() -> None:
    output = CliRunner().invoke(cli, ["recipes"], catch_exceptions=False).output
    assert all(f"{name} " in output for name in shipped_recipes())
    assert "agent-r: " in output


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_wheel_has_the_data_that_a_recipe_names(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    paths = [text for text in _texts(yaml.safe_load(text)) if text.startswith("data/")]
    assert not [path for path in paths if not any(path == root or path.startswith(f"{root}/") for root in PACKED)]
    assert all((ROOT / path).exists() for path in PACKED)


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.slow
@pytest.mark.long
def test_an_installed_wheel_runs_without_a_checkout(elsewhere: Path) -> None:
    """It needs a network, for the package that builds wheels."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", "dist", ROOT], check=True, timeout=600
    )
    (wheel,) = (elsewhere / "dist").iterdir()
    zipfile.ZipFile(wheel).extractall(elsewhere / "site")
    env = {**os.environ, "PYTHONPATH": str(elsewhere / "site")}
    # A whole run, with as little as the recipe allows.
    little = ["instances.train_limit=2", "instances.test_limit=2", "evaluation.revision_test.enabled=false"]
    changes = [word for change in little for word in ("-o", change)]
    program = "import sys; from flows.cli import main; sys.argv[0] = 'agentr'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "textcraft-eto-tiny", "-w", "runs", *changes],
        env=env,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Held-out success" in done.stdout
