"""Peak memory of a collection of many trees against one of a tenth of them, each in a process of
its own.

The model is a script, so that thousands of trees are a matter of minutes; search, environment and
store are real.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path

from measures import Measure

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, run_id_of, start_run
from agentr_core.store.database import Store
from agentr_core.types import Message

ITEMS = ("oak log", "stick", "bone", "sand", "flint", "clay ball", "iron ingot", "string")
_KIBIBYTES_PER_MIB = 1024


def measure(folder: Path, *, few: int, many: int) -> list[Measure]:
    """Return the ratio of the two peaks."""
    small, large = (_peak_mib(folder / str(trees), trees) for trees in (few, many))
    return [
        Measure(
            name="peak_memory_ratio",
            value=large / small,
            unit="x",
            goal="<= 1.2",
            note=f"{many:,} trees {large:,.0f} MiB, {few:,} trees {small:,.0f} MiB",
        )
    ]


def _peak_mib(folder: Path, trees: int) -> float:
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(trees)], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout)


async def _collect(folder: Path, trees: int) -> None:
    recipe = parse(
        {
            "name": "memory",
            "environment": {"name": "textcraft"},
            "model": {"backend": "openai", "server": {"model": "script"}, "max_batch": 256},
            "instances": {"train": "procedural", "train_limit": trees, "test": "test", "test_limit": 1},
            "search": {"dives": 2, "width": 4, "depth": 5, "max_new_tokens": 50},
        }
    )
    ctx = RunContext(
        recipe=recipe,
        method=method_of(recipe),
        run_id=run_id_of(recipe, method_of(recipe)),
        root=folder,
        store=Store(folder / "store.duckdb"),
        make_environment=lambda _: TextCraft(),
        load_model=lambda role, path: ScriptedModel(_reply),
        progress=lambda done, total, note: None,
    )
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await collect(ctx, 1)


def _reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
    rng = random.Random(f"{seed} {number}")
    return (
        f"Thought: let me see what {rng.getrandbits(64):x} brings.\nAction: get {rng.randint(1, 9)} {rng.choice(ITEMS)}"
    )


def _own_peak_mib() -> float:
    """Return the peak of this program. The kernel's other count, `ru_maxrss`, begins with that of
    the parent.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kibibytes) / _KIBIBYTES_PER_MIB


if __name__ == "__main__":
    asyncio.run(_collect(Path(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.write(str(_own_peak_mib()))
