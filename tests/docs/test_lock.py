"""constraints.txt: one version of every package, within what pyproject.toml and constraints.in ask
for, and the versions that these tests run with.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from readme import ROOT

PYTHONS = ("3.11", "3.12", "3.13")


def requirements(file: str) -> list[Requirement]:
    lines = ROOT.joinpath(file).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def lock_versions(python: str) -> dict[NormalizedName, str]:
    """Return the version of each package, by name, for a Python on this system."""
    env = {"python_version": python, "python_full_version": f"{python}.9"}
    pins = [each for each in requirements("constraints.txt") if each.marker is None or each.marker.evaluate(env)]
    names = [canonicalize_name(each.name) for each in pins]
    assert len(set(names)) == len(names)
    return {name: str(each.specifier).removeprefix("==") for name, each in zip(names, pins, strict=True)}


def project_requirements() -> list[Requirement]:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    dependencies = [
        Requirement(text) for text in (*project["dependencies"], *(text for some in extras for text in some))
    ]
    return [each for each in dependencies if each.name != project["name"]]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_has_a_version_that_is_asked_for(python: str) -> None:
    versions = lock_versions(python)
    for each in (*project_requirements(), *requirements("constraints.in")):
        name = canonicalize_name(each.name)
        assert name in versions, f"{each} is not in constraints.txt; run `make lock`"
        assert versions[name] in each.specifier, f"{each} is not what constraints.txt has; run `make lock`"


def test_the_lock_has_exact_versions_and_no_addresses() -> None:
    for each in requirements("constraints.txt"):
        assert [clause.operator for clause in each.specifier] == ["=="], each
        assert each.url is None


def test_what_is_installed_is_what_is_locked() -> None:
    """Builds of one version, such as PyTorch's for CPUs, count as that version."""
    versions = lock_versions(f"{sys.version_info.major}.{sys.version_info.minor}")
    env_versions = {
        canonicalize_name(each.metadata["Name"]): each.version.partition("+")[0] for each in distributions()
    }
    assert "torch" in env_versions
    assert {
        name: env_versions[name]
        for name in versions.keys() & env_versions.keys()
        if env_versions[name] != versions[name]
    } == {}
