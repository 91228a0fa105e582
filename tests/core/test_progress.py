"""What a log shows of a stage, its reports, a silence, its end; and what a terminal shows."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from agentr_core.runtime.remaining import Remaining
from tasks import progress


async def test_a_log_tells_a_silence_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SILENCE_S", 0.05)
    buffer = io.StringIO()
    progress.console.set(Console(file=buffer, width=200))
    async with progress.stage_progress("collect", 1, Remaining(stage_s=3725.0, after_s=600.0)) as report:
        report(0, 250, "trees")
        await asyncio.sleep(0.12)
    first, *_, last = buffer.getvalue().splitlines()
    assert first == "iteration 1  collect: 0/250 trees; nothing new for 0 s"
    assert last.startswith("iteration 1  collect: 0/250 trees in ")


async def test_a_line_of_a_log_tells_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    buffer = io.StringIO()
    progress.console.set(Console(file=buffer, width=200))
    async with progress.stage_progress("collect", 1, Remaining(stage_s=3725.0, after_s=600.0)) as report:
        report(1, 250, "trees")
    line = buffer.getvalue().splitlines()[0]
    assert line == "iteration 1  collect: 1/250 trees; 1:02:05 left, 1:12:05 of the run"


BAR = """
import asyncio
from rich.console import Console
from agentr_core.runtime.remaining import Remaining
from tasks import progress

async def main():
    progress.console.set(Console(stderr=True))
    async with progress.stage_progress("demonstrate", 12, Remaining(stage_s=7200.0, after_s=86400.0)) as report:
        for done in (1203, 1204):
            report(done, 1500, "episodes of textcraft [of 3], 71,980 replies, 1,117 tokens/s, batches 94% full")
            await asyncio.sleep(0.3)
    async with progress.stage_progress("dataset", 12, Remaining()):
        await asyncio.sleep(0.3)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_bar_keeps_name_count_and_times_whole(columns: int) -> None:
    master, tty = pty.openpty()
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", BAR], stdin=tty, stdout=tty, stderr=tty, env=os.environ | {"TERM": "xterm"}
    )
    os.close(tty)
    output = b""
    # The end of a terminal whose other side is closed is an error on Linux.
    try:
        while part := os.read(master, 65536):
            output += part
    except OSError:
        pass
    assert child.wait(30) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.startswith("iteration")]
    assert max(map(len, lines)) <= columns
    at_work = [line for line in lines if "1204/1500" in line]
    assert at_work
    for line in at_work:
        assert line.startswith("iteration 12  demonstrate ")
        assert re.search(r" 0:0\d<\d:\d\d:\d\d run<2\d:\d\d:\d\d epi.*…$", line)
    # A stage that counts nothing shows no count.
    assert any(re.fullmatch(r"iteration 12  dataset [━╸╺ ]+ 0:00", line) for line in lines)
