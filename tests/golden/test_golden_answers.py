"""The tables of the manual's page on answers, which are made of the pairs that are tested."""

from __future__ import annotations

import re

import pytest
from answers import MATHEMATICS, WORDS, table
from readme import MANUAL


def test_the_manual_has_the_forms_that_are_compared(request: pytest.FixtureRequest) -> None:
    page = MANUAL / "answers.md"
    text = page.read_text(encoding="utf-8")
    for name, kinds in (("mathematics", MATHEMATICS), ("words", WORDS)):
        made = f"<!-- {name} -->\n{table(kinds)}<!-- end -->"
        text, count = re.subn(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, made=made: made, text, flags=re.DOTALL)
        assert count == 1
    if request.config.getoption("--update-golden", default=False):
        page.write_text(text, encoding="utf-8")
    assert text == page.read_text(encoding="utf-8"), "run `pytest tests/golden --update-golden`"
