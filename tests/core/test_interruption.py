"""What signals do to a run: the first ends it in order, a late one at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

STUBBORN = """
import asyncio, os, signal, sys, time
from flows import interruption
interruption._REPEATED_SIGNAL_SECONDS = float(sys.argv[1])
async def stubborn():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        print("in order", flush=True)
try:
    interruption.run(stubborn())
except KeyboardInterrupt:
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("seconds", "code", "out", "err"), [(60, 3, "in order\n", ""), (0.01, 130, "", "interrupted at once\n")]
)
def test_a_second_signal_is_the_same_wish_or_an_urgent_one(seconds: float, code: int, out: str, err: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", STUBBORN, str(seconds)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, out, err)


def test_what_no_signal_ends_is_returned_or_raised() -> None:
    from flows import interruption

    async def fails() -> None:
        raise ValueError("the cause")

    async def works() -> int:
        return 7

    assert interruption.run(works()) == 7
    with pytest.raises(ValueError, match="the cause"):
        interruption.run(fails())
