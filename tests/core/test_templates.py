"""`agentr new`: what it writes works at once, and it overwrites nothing."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from door import register_package
from readme import ROOT

from agentr_core.errors import ConfigError, UserError
from agentr_core.methods import table
from agentr_core.system import data_path
from flows.cli import cli
from flows.commands import templates
from flows.commands.plan import describe


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def agentr(*words: str) -> Result:
    return CliRunner().invoke(cli, [*words], catch_exceptions=False)


@pytest.mark.slow
def test_a_world_keeps_the_contract_and_its_test_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = agentr("new", "world", "glass-maze").output
    assert output.endswith("pip install --no-build-isolation -e glass-maze\nagentr env doctor glass-maze\n")
    monkeypatch.syspath_prepend(str(register_package(folder / "glass-maze")))
    assert agentr("env", "doctor", "glass-maze").output == "glass-maze: ok - keeps the contract\n"
    run = [sys.executable, "-m", "unittest", "-v"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(run, cwd=folder / "glass-maze", env=env, capture_output=True, text=True, check=True)
    assert "TestGlassMaze.test_it_keeps_the_contract) ... ok" in done.stderr or "Ran 2 tests" in done.stderr


@pytest.mark.slow
def test_a_method_has_a_recipe_that_is_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = agentr("new", "method", "glass-bead").output
    assert output.endswith("pip install --no-build-isolation -e glass-bead\nagentr plan glass-bead/glass-bead.yaml\n")
    monkeypatch.syspath_prepend(str(register_package(folder / "glass-bead")))
    assert agentr("plan", "glass-bead/glass-bead.yaml").output.startswith("recipe glass-bead: Glass bead, 1 iteration")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["agent-r", "eto", "grpo", "et-agent"])
def test_a_recipe_is_planned(method: str) -> None:
    output = agentr("new", "recipe", "first", "--method", method).output
    assert output.endswith("agentr plan first.yaml\n")
    assert describe(Path("first.yaml"), []).startswith(f"recipe first: {table.method_named(method).title}, ")


@pytest.mark.slow
def test_a_recipe_may_be_for_another_world() -> None:
    agentr("new", "recipe", "shop", "--world", "webshop", "--method", "eto")
    text = Path("shop.yaml").read_text(encoding="utf-8")
    assert "environment: {name: webshop}" in text
    assert str(data_path("models", "webshop-tiny")) in text
    assert describe(Path("shop.yaml"), [])


def test_a_skill_is_written_where_agents_look() -> None:
    assert agentr("new", "skill").output == ".agents/skills/agentr/SKILL.md\n"
    assert agentr("new", "skill", "mine").output == "mine/agentr/SKILL.md\n"
    assert Path("mine/agentr/SKILL.md").read_bytes() == data_path("skills", "agentr", "SKILL.md").read_bytes()
    with pytest.raises(ConfigError, match="mine/agentr already exists"):
        templates.new_skill(Path("mine"))


REFUSED = [
    ("Maze", "'Maze' cannot name a world; take letters from a to z and digits, with dashes between words"),
    ("../maze", "'../maze' cannot name a world"),
    ("maze_2", "'maze_2' cannot name a world"),
    ("", "'' cannot name a world"),
    ("maze\n", "cannot name a world"),
    ("taken", "taken already exists; choose another name"),
    ("textcraft", "there is a world textcraft already"),
    ("json", "its module would be json, which Python has already"),
    ("class", "its module would be class, which Python has already"),
    ("environment", "its class would be Environment, which a world uses"),
]


@pytest.mark.parametrize(("name", "said"), REFUSED)
def test_a_name_that_cannot_be_one_is_refused(folder: Path, name: str, said: str) -> None:
    (folder / "taken").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError) as error:
        templates.new_world(name)
    assert said in str(error.value)
    assert [path.name for path in folder.iterdir()] == ["taken"]
    assert (folder / "taken").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("name", "world", "method", "said"),
    [
        ("taken", "textcraft", "eto", "taken.yaml already exists; choose another name"),
        ("link", "textcraft", "eto", "link.yaml already exists; choose another name"),
        ("a.yaml", "textcraft", "eto", "'a.yaml' cannot name a recipe"),
        ("a", "textcraf", "eto", "there is no environment 'textcraf' (did you mean textcraft?)"),
        ("a", "textcraft", "etto", "there is no method 'etto' (did you mean eto?)"),
        ("a", "textcraft", "compare", "there is no template for method compare, only for agent-r, et-agent, eto, grpo"),
        ("a", "gymnasium", "eto", "world gymnasium and method eto need more than a template has: "),
    ],
)
def test_a_recipe_that_would_not_be_planned_is_not_written(
    folder: Path, name: str, world: str, method: str, said: str
) -> None:
    (folder / "taken.yaml").write_text("mine", encoding="utf-8")
    (folder / "link.yaml").symlink_to("nowhere")
    with pytest.raises(UserError) as error:
        templates.new_recipe(name, world=world, method=method)
    assert said in str(error.value)
    assert sorted(path.name for path in folder.iterdir()) == ["link.yaml", "taken.yaml"]
    assert (folder / "taken.yaml").read_text(encoding="utf-8") == "mine"


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(file: Path, *words: Any, **options: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(UserError, match=r"maze cannot be written \(No space left"):
        templates.new_world("maze")
    assert not list(folder.iterdir())
