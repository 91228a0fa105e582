"""The core is not cut more finely than it is today, and its parts do not import in circles.

The numbers only ever fall: whoever makes one smaller lowers it here.
"""

import tomllib
from pathlib import Path

import grain
import pytest
from readme import ROOT

OWN_NAMES = 4.6
"""Names from other modules of the core, in 100 lines."""
USED_ONCE = 332
"""Private functions that are used in one place of their module; each should have a reason."""
FACADES = {
    # The README and its readers' notebooks import `Store` from here.
    "agentr_core/store",
    # Entry points of the installed package name their worlds.
    "agentr_core/environments/alfworld",
    "agentr_core/environments/crafting",
    "agentr_core/environments/gateway",
    "agentr_core/environments/reasoning",
    "agentr_core/environments/sciworld",
    "agentr_core/environments/webshop",
}
"""Packages that only re-export."""


def test_modules_look_up_no_more_names() -> None:
    assert grain.own_names_per_100_lines(ROOT, "agentr_core") <= OWN_NAMES


def test_no_more_helpers_are_used_once() -> None:
    assert len(grain.used_once(ROOT, "agentr_core")) <= USED_ONCE


def test_no_package_only_re_exports() -> None:
    assert grain.facades(ROOT, "agentr_core") == FACADES


@pytest.mark.parametrize("kind", ["layers", "acyclic_siblings"])
def test_contracts_have_no_exceptions(kind: str) -> None:
    settings = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contracts = [contract for contract in settings["contracts"] if contract["type"] == kind]
    assert contracts
    assert "exclude_type_checking_imports" not in settings
    assert not [contract for contract in contracts if {"ignore_imports", "skip_descendants", "depth"} & contract.keys()]


def test_circles_are_looked_for_everywhere() -> None:
    settings = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = [entry for entry in settings["contracts"] if entry["type"] == "acyclic_siblings"]
    assert set(contract["ancestors"]) == set(settings["root_packages"])


def test_a_name_counts_once_and_a_module_by_its_attributes(tmp_path: Path) -> None:
    files = {
        "a/__init__.py": '"""A."""\n\nfrom a.b import c\n',
        "a/b.py": "def c() -> None:\n    _d()\n\n\ndef _d() -> None:\n    pass\n",
        "a/e.py": "import a.b\nfrom a import b as f\nfrom a.b import c\n\nf.c(f.c, f.d)\n_d = a.b.c\n",
        "a/g.py": "from a.b import c\n",
    }
    for name, text in files.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(text, encoding="utf-8")
    assert grain.facades(tmp_path, "a") == {"a"}
    # `f.c`, `f.d`, `a.b.c` and `c`; the package and a module of one line are not asked.
    assert grain.own_names_per_100_lines(tmp_path, "a") == 100 * 4 / 16
    # Another module has a name like it, which is no use of it.
    assert grain.used_once(tmp_path, "a") == ["_d"]
