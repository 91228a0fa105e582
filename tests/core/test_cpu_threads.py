"""How many threads a training computes on, unless it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from agentr_core.training.run import use_threads


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("wanted", "outer", "gpu", "threads"),
    [(0, None, False, 1), (0, None, True, 2), (0, "2", False, 2), (3, None, False, 3), (3, "2", True, 3)],
)
def test_one_thread_where_nobody_says_otherwise(
    wanted: int, outer: str | None, gpu: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if outer:
        monkeypatch.setenv("OMP_NUM_THREADS", outer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    use_threads(wanted)
    assert torch.get_num_threads() == threads
