"""What a log shows of a stage: its reports, a silence, its end."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from tasks import progress


async def test_a_log_tells_a_silence_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SILENCE_S", 0.05)
    written = io.StringIO()
    progress.console.set(Console(file=written, width=200))
    async with progress.stage_progress("collect", 1) as report:
        report(0, 250, "trees")
        await asyncio.sleep(0.12)
    first, *_, last = written.getvalue().splitlines()
    assert first == "iteration 1  collect: 0/250 trees; nothing new for 0 s"
    assert last.startswith("iteration 1  collect: 0/250 trees in ")
