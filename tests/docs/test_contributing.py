"""CONTRIBUTING.md names what is there."""

import re
import subprocess

import pytest
from readme import ROOT

TEXT = ROOT.joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")


def test_it_is_one_page() -> None:
    assert len(TEXT.splitlines()) < 120


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+\.(?:py|md))`", TEXT))))
def test_files_are_there(path: str) -> None:
    assert any(ROOT.joinpath(folder, path).is_file() for folder in ("", "agentr_core", "tasks"))


@pytest.mark.parametrize("target", re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", TEXT, re.M))
def test_make_has_the_target(target: str) -> None:
    name = "".join(target)
    process = subprocess.run(["make", "-n", name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_every_package_is_on_the_map() -> None:
    packages = {path.parent.name for path in ROOT.joinpath("agentr_core").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)`", TEXT[TEXT.index("| package") : TEXT.index("## From an instance")]))
