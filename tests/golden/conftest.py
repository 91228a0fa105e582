"""`pytest tests/golden --update-golden` writes the golden files anew; without the option they are
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Compare = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", default=False, help="write golden files anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Compare:
    """Return a function (file name, text) that compares the text with a file beside the test, or
    writes it.
    """
    folder = Path(__file__).parent
    update = request.config.getoption("--update-golden", default=False)

    def compare(name: str, text: str) -> None:
        path = folder / name
        if update:
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{name} is missing; run `pytest tests/golden --update-golden` and look at what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs; see tests/golden/conftest.py"

    return compare
