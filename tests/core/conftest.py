"""Stores of tests that are not about stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentr_core.store.database import Store

ABOUT_STORES = ("test_store_", "test_foreign_stores")


@pytest.fixture(autouse=True)
def kept_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each store that a test makes keeps its file open between bursts, as in a flow: to open it
    takes longer than most bursts, and is a fifth of what these tests would take.
    """
    if request.path.name.startswith(ABOUT_STORES):
        yield
        return
    make = Store.__init__
    with ExitStack() as stack:

        def make_kept(store: Store, path: Path, wait_s: float = 60) -> None:
            make(store, path, wait_s)
            stack.enter_context(store.keep_open())

        monkeypatch.setattr(Store, "__init__", make_kept)
        yield
