"""What coding agents are told: each command of AGENTS.md and of the skill is run, in its order and
in an empty folder, as somebody without a checkout would.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from door import register_package
from readme import BLOCK, ROOT

from agentr_core.methods.faults import load
from agentr_core.store.codec.ledger import run_rows
from agentr_core.store.database import Store
from agentr_core.system import data_path
from flows.cli import cli

AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
SKILL = data_path("skills", "agentr", "SKILL.md").read_text(encoding="utf-8")
CHECKOUT = ("make ", ".venv/bin/")
"""What commands begin with that belong to a checkout."""


def commands(text: str) -> list[str]:
    lines = [line for language, block in BLOCK.findall(text) if language == "sh" for line in block.splitlines()]
    return [command for line in lines if (command := re.sub(r"\s+#.*", "", line).strip())]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder, which is empty but for a store without a run's work."""
    Store(tmp_path / "runs" / "store.duckdb").write(
        run_rows("r", recipe="x", method="agent-r", config={}, versions={}, workspace=str(tmp_path))
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("maze", None)


@pytest.mark.slow
@pytest.mark.parametrize("text", [AGENTS, SKILL], ids=["AGENTS.md", "SKILL.md"])
def test_commands_are_run_in_an_empty_folder(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take minutes: recipes are only loaded, and tests/flows/test_templates.py runs one."""
    for command in commands(text):
        program, *words = shlex.split(command.removeprefix("nohup ").partition(" > ")[0])
        if program == "agentr" and words[0] == "run":
            assert load(Path(words[1]))
        elif program == "agentr":
            result = CliRunner().invoke(cli, words, catch_exceptions=False)
            assert result.exit_code == 0, (command, result.output)
            assert result.output.strip(), command
        elif program == "pip":
            monkeypatch.syspath_prepend(str(register_package(folder / words[-1])))
        else:
            assert command.startswith(CHECKOUT), command


@pytest.mark.parametrize("command", [command for command in commands(AGENTS) if command.startswith(CHECKOUT)])
def test_commands_of_a_checkout_name_what_there_is(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        subprocess.run([program, *words, "--dry-run"], cwd=ROOT, capture_output=True, check=True)
        return
    assert (ROOT / program).is_file()
    assert all((ROOT / word).exists() for word in words if "/" in word)


@pytest.mark.parametrize("text", [AGENTS, SKILL], ids=["AGENTS.md", "SKILL.md"])
def test_commands_between_words_are_there(text: str) -> None:
    mentions = re.findall(r"`agentr\s+([a-z][^`]*)`", BLOCK.sub("", text))
    assert mentions
    for words in map(shlex.split, mentions):
        inside = [word for word in words[:2] if word.isalpha() and word.islower()]
        assert CliRunner().invoke(cli, [*inside, "--help"]).exit_code == 0, words


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+(?:\.md|/))`|`(data/\w+/\w+)`", AGENTS))))
def test_paths_are_there(path: tuple[str, str]) -> None:
    assert (ROOT / "".join(path)).exists()


def test_they_are_short_and_the_skill_says_when_to_use_it() -> None:
    assert len(AGENTS.splitlines()) <= 70
    _, front, body = SKILL.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["name"] == "agentr"
    assert len(fields["description"]) <= 1024
    assert len(body.splitlines()) <= 90
