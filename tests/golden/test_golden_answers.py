"""The tables of the manual's page on answers, which are made of the pairs that are tested."""

from __future__ import annotations

import pytest
from answers import MATHEMATICS, WORDS, table
from readme import MANUAL


def test_the_manual_has_the_forms_that_are_compared(request: pytest.FixtureRequest) -> None:
    page = MANUAL / "answers.md"
    text = page.read_text(encoding="utf-8")
    for name, kinds in (("mathematics", MATHEMATICS), ("words", WORDS)):
        opening = f"<!-- {name} -->\n"
        head, _, rest = text.partition(opening)
        _, end, tail = rest.partition("<!-- end -->")
        assert end
        text = head + opening + table(kinds) + end + tail
    if request.config.getoption("--update-golden", default=False):
        page.write_text(text, encoding="utf-8")
    assert text == page.read_text(encoding="utf-8"), "run `pytest tests/golden --update-golden`"
