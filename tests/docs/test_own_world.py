"""The guide to a world of one's own is followed, step by step."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from door import register, register_package
from readme import BLOCK, MANUAL, ROOT

from agentr_core.methods.faults import parse
from flows.cli import cli
from flows.cli.environments import env_serve

TEXT = (ROOT / "agentr_core" / "environments" / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = BLOCK.findall(TEXT)
IN_THE_MANUAL: list[tuple[str, str]] = BLOCK.findall((MANUAL / "worlds.md").read_text(encoding="utf-8"))


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of the guide, made by its commands and registered as `pip install` would."""
    make, install, *_ = blocks("sh")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, shlex.split(make)[1:], catch_exceptions=False)
    assert install in result.output
    folder = register_package(tmp_path / shlex.split(install)[-1])
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_guide_leads_to_a_world_that_is_sound_and_can_be_played(package: Path) -> None:
    run = CliRunner()
    doctor, play, serve = (shlex.split(text)[1:] for text in blocks("sh")[2:])

    check_result = run.invoke(cli, doctor, catch_exceptions=False)
    assert (check_result.exit_code, check_result.output) == (0, "my-lock: ok - keeps the contract\n")

    # Lock 37 is at 829.
    play_result = run.invoke(cli, play, input="open\ntry 4 4 4\ntry 8 2 9\n", catch_exceptions=False)
    assert "Say: try DIGIT DIGIT DIGIT." in play_result.output
    assert "too low, too high, too low." in play_result.output
    assert play_result.output.endswith("The lock opens.\nThe episode is over: reward 1, success.\n")

    assert serve[:2] == ["env", "serve"]
    assert env_serve.make_context("serve", serve[2:]).params["name"] == "my-lock"


@pytest.mark.parametrize("text", blocks("yaml"))
def test_parts_of_recipes_are_valid(text: str) -> None:
    recipe = parse({"name": "guide", "model": {"path": "m"}, **yaml.safe_load(text)})
    assert recipe.environment.name in ("my-lock", "gymnasium")


def test_the_program_runs() -> None:
    (program,) = blocks("python")
    namespace: dict[str, object] = {}
    exec(program, namespace)
    assert len(namespace["dataset"]) == 374  # type: ignore[arg-type]


def test_the_world_of_the_manual_is_short_and_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,), (points,) = (
        [text for kind, text in IN_THE_MANUAL if kind == language] for language in ("python", "toml")
    )
    assert len(program.splitlines()) <= 30
    (tmp_path / "dial.py").write_text(program, encoding="utf-8")
    ((name, target),) = tomllib.loads(points)["project"]["entry-points"]["agentr.environments"].items()
    monkeypatch.syspath_prepend(str(register(tmp_path, "dial", f"[agentr.environments]\n{name} = {target}\n")))
    result = CliRunner().invoke(cli, ["env", "doctor", name], catch_exceptions=False)
    sys.modules.pop("dial", None)
    assert (result.exit_code, result.output) == (0, "dial: ok - keeps the contract\n")
