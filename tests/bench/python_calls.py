"""A call of the Python tool against an interpreter that is started for it, with the same packages.

Both are other processes, so that the clock is the wall's; the fastest of each is what other work on
the machine disturbs least.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from measures import Measure

from agentr_core.tools.python.confinement import PACKAGES
from agentr_core.tools.python.tool import PythonTool


def measure(*, calls: int, fresh: int) -> list[Measure]:
    """Return how many times as fast a call is as a fresh interpreter."""
    level, call = asyncio.run(_call(calls))
    start = min(_fresh() for _ in range(fresh))
    note = f"{1000 * call:.1f} ms at level {level}, a fresh interpreter {1000 * start:.0f} ms"
    return [Measure(name="python_call_ratio", value=start / call, unit="times", goal=">= 10", note=note)]


async def _call(calls: int) -> tuple[str, float]:
    async with PythonTool(concurrency=1) as tool:
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            await tool.run("print(1 + 1)")
            seconds.append(time.perf_counter() - began)
        return tool.level, min(seconds)


def _fresh() -> float:
    began = time.perf_counter()
    code = f"import {', '.join(PACKAGES)}\nprint(1 + 1)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - began
