"""The error tree: its docstring tells the truth, and every error crosses a process boundary."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from agentr_core import errors

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.AgentrError)]
_LINE = re.compile(r"^( *[│├└─ ]*)([A-Z]\w+)(?: \((\w+)\))?", re.MULTILINE)


def parse_tree() -> dict[str, tuple[str | None, str | None]]:
    """Return parent and further base of each class in the tree of the docstring."""
    tree = (errors.__doc__ or "").split("\n\n")[1]
    bases: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for indent, name, extra_base in _LINE.findall(tree):
        above = [(depth, parent) for depth, parent in above if depth < len(indent)]
        bases[name] = (above[-1][1] if above else None, extra_base or None)
        above.append((len(indent), name))
    return bases


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    tree = parse_tree()
    assert set(tree) == {cls.__name__ for cls in CLASSES}
    for cls in CLASSES:
        parent, extra_base = tree[cls.__name__]
        bases = [base.__name__ for base in cls.__bases__]
        assert bases == [parent or "Exception", *([extra_base] if extra_base else [])], cls


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_is_made_of_one_message_and_can_be_sent(cls: type[errors.AgentrError]) -> None:
    error = pickle.loads(pickle.dumps(cls("what, which, what to do")))
    assert type(error) is cls
    assert str(error) == "what, which, what to do"
    assert inspect.getdoc(cls)


def test_the_users_mistakes_are_told_from_ours() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    transient = {cls for cls in CLASSES if issubclass(cls, errors.Transient)}
    assert transient == {
        errors.StoreBusy,
        errors.EnvironmentTimeout,
        errors.EnvironmentUnavailable,
        errors.ModelUnavailable,
        errors.MalformedReply,
        errors.MalformedAnswer,
        errors.ReplayDrifted,
        errors.WorkerLost,
    }
