"""What is said about a method of somebody else that is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentr_core.errors import ConfigError
from agentr_core.methods import table


def fail() -> Any:
    raise KeyError("no such\nmodule")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda: fail, "method early: its entry point early:plan names a function, no Method; correct it in the "),
        (fail, r"cannot be imported \(KeyError: 'no such\\nmodule', test_own_methods.py line \d+\); fix or uninstall"),
    ],
)
def test_an_entry_point_that_names_no_method(monkeypatch: pytest.MonkeyPatch, load: Any, said: str) -> None:
    entry = SimpleNamespace(value="early:plan", load=load, name="early")
    monkeypatch.setattr(table, "entry_points", lambda **_: [entry])
    with pytest.raises(ConfigError, match=said):
        table.method_named("early")


def test_a_broken_method_stops_no_run_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(value="early:plan", load=fail, name="broken")
    monkeypatch.setattr(table, "entry_points", lambda **_: [entry])
    assert "broken" in table.method_names()
    assert [method.name for method in table.importable_methods()] == list(table.SHIPPED)
    assert {"train", "evaluate", "collect"} <= table.all_stages().keys()
