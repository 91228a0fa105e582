"""A world lacks a package, a program, a file or a server: one sentence says which, in every command
that opens it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from agentr_core.environment import Environment, Instances, missing_part
from agentr_core.environments import registry
from agentr_core.errors import EnvironmentFault, MissingPart
from agentr_core.types import Transition
from flows.cli import cli
from flows.commands import environments

NOWHERE = "http://127.0.0.1:9/"
LACKING: dict[str, tuple[Callable[[], Any], str]] = {
    "package": (
        lambda: import_module("nowhere_to_be_found.parts"),
        "the Python package nowhere_to_be_found, which is not installed: `pip install nowhere_to_be_found`",
    ),
    "file": (
        lambda: Path("/nowhere/games.json").read_text(encoding="utf-8"),
        "/nowhere/games.json, which is not there",
    ),
    "program": (
        lambda: subprocess.run(["no-such-engine"], check=True),
        "the program no-such-engine, which is not found",
    ),
    "server": (lambda: httpx.get(NOWHERE), "a server, and none answers .*Connection refused.*: start it"),
}


def world(act: Callable[[], Any], when: str) -> type[Environment]:
    """Return a world that acts so when it is made, lists its instances, or is reset."""

    class World(Environment):
        name = "world"
        instruction = "Go."

        def __init__(self) -> None:
            if when == "make":
                act()

        def splits(self) -> tuple[str, ...]:
            return ("train", "test")

        def instances(self, split: str) -> Instances:
            if when == "instances":
                act()
            return Instances(self.name, split, range(3) if split == "train" else range(3, 6))

        def reset(self, instance: Any) -> str:
            if when == "reset":
                act()
            return f"Hall {instance.index}."

        def step(self, action: str) -> Transition:
            return Transition("On.", 0.0, False, False, {"success": False})

    return World


@pytest.mark.parametrize("when", ["make", "instances", "reset"])
@pytest.mark.parametrize("part", list(LACKING))
def test_the_same_sentence_in_every_command(monkeypatch: pytest.MonkeyPatch, part: str, when: str) -> None:
    act, need = LACKING[part]
    monkeypatch.setattr(registry, "names", lambda: ("world",))
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "world", world(act, when))
    (diagnosis,) = environments.diagnose("world", {})
    assert (diagnosis["status"], diagnosis["detail"].count("\n")) == ("missing", 0)
    with pytest.raises(MissingPart, match=f"^environment world needs {need}") as error:
        CliRunner().invoke(cli, ["env", "show", "world"], catch_exceptions=False)
    assert str(error.value) == diagnosis["detail"]
    with pytest.raises(MissingPart, match=f"^environment world needs {need}"):
        CliRunner().invoke(cli, ["env", "play", "world"], catch_exceptions=False)


@pytest.mark.parametrize("when", ["make", "instances", "reset"])
def test_another_fault_is_no_missing_part(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def slip() -> None:
        try:
            Path("/nowhere/cache").read_bytes()
        except FileNotFoundError:
            raise KeyError("door") from None

    monkeypatch.setattr(registry, "names", lambda: ("world",))
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "world", world(slip, when))
    (diagnosis,) = environments.diagnose("world", {})
    assert (diagnosis["status"], "KeyError: 'door'" in diagnosis["detail"]) == ("broken", True)
    with pytest.raises(
        EnvironmentFault, match=r"environment world .*\(KeyError: 'door', test_missing_parts.py line \d+\)"
    ):
        CliRunner().invoke(cli, ["env", "show", "world"], catch_exceptions=False)


def test_an_entry_point_without_its_module_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="world", value="nowhere_to_be_found.worlds:World", group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [entry])
    with pytest.raises(EnvironmentFault, match="names a module that is not there; install its package again"):
        registry.make("world", {})
    (diagnosis,) = environments.diagnose("world", {})
    assert diagnosis["status"] == "broken"


@pytest.mark.parametrize(
    "error", [KeyError("x"), ModuleNotFoundError("no name"), FileNotFoundError("no name"), OSError(28, "full")]
)
def test_what_says_nothing_of_the_kind(error: Exception) -> None:
    assert missing_part(error) == ""


@pytest.mark.slow
def test_a_simulator_without_java_is_missing_not_broken() -> None:
    pytest.importorskip("scienceworld")
    (diagnosis,) = environments.diagnose("sciworld", {"java": "/nowhere/java"})
    assert diagnosis["status"] == "missing"
    assert diagnosis["detail"].startswith("Java cannot be run as /nowhere/java (No such file or directory); set")


@pytest.mark.parametrize("command", ["doctor", "show", "play"])
def test_a_server_that_does_not_answer_is_missing_with_what_starts_it(command: str) -> None:
    words = ["env", command, "agentgym-textcraft", "-o", f"url={NOWHERE[:-1]}", "-o", "patience_s=0.1"]
    pattern = rf"{NOWHERE[:-1]} cannot be reached .*refused.*; `agentr env serve textcraft` starts one$"
    if command == "doctor":
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 1
        assert re.match(f"agentgym-textcraft: missing - .*{pattern}", done.output)
        return
    with pytest.raises(MissingPart, match=pattern):
        CliRunner().invoke(cli, words, catch_exceptions=False)
