"""How much longer a training step takes beside another program that keeps one core busy.

    python tests/bench/training_under_load.py [--threads N ...] [--rounds 3]

Each number of threads trains the shipped tiny model in the trainer's own process, on rows of equal
length. A busy loop comes and goes while it trains, so that both kinds of steps are taken in turns.
Prints the median seconds of a step without and with it, and their ratio. If threads shared the
cores fairly and never waited for one another, a training on all cores would have a ratio of 1 + 1 /
cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet
from measures import Measure, table

from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.job import TrainingJob
from agentr_core.training.process import train

MODEL = Path("data/models/textcraft-tiny")
STEPS_A_TURN = 6
"""Optimizer steps until the busy loop comes or goes; the first one of a turn has part of both and
is not counted.
"""
_ROWS, _TOKENS = 8, 500
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""It ends with its parent, however that ends."""


class Steps(NamedTuple):
    """Median seconds of a training step, alone and beside a busy loop."""

    alone: float
    beside: float

    @property
    def ratio(self) -> float:
        return self.beside / self.alone


class BusyLoop:
    """A process that keeps one core busy while it is on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def turn(self) -> None:
        """Start it, or end it if it runs."""
        if self._process is not None:
            self.end()
        else:
            self._process = subprocess.Popen([sys.executable, "-c", _BUSY], start_new_session=True)

    def end(self) -> None:
        """End it. Calling it twice is harmless."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def measure(folder: Path, *, rounds: int, **settings: object) -> Steps:
    """Return the seconds of steps of one training, in which each of both kinds has `rounds`
    turns.
    """
    steps = 1 + 2 * rounds * STEPS_A_TURN
    job = _job(folder, steps, settings)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    load, last = BusyLoop(), 0.0

    def on_step(step: Any) -> None:
        nonlocal last
        took, last = step.seconds - last, step.seconds
        # The first step compiles.
        turn, place = divmod(step.step - 2, STEPS_A_TURN)
        if place > 0:
            seconds[turn % 2 == 1].append(took)
        if place == STEPS_A_TURN - 1:
            load.turn()

    try:
        asyncio.run(train(job, on_progress=on_step))
    finally:
        load.end()
    return Steps(statistics.median(seconds[False]), statistics.median(seconds[True]))


def _job(folder: Path, steps: int, settings: dict[str, object]) -> TrainingJob:
    rows = _ROWS * steps
    ids = [list(range(3, 3 + _TOKENS))] * rows
    labels = [[-100] * (_TOKENS // 2) + row[_TOKENS // 2 :] for row in ids]
    parquet.write_table(pa.table({"input_ids": ids, "labels": labels}), folder / "rows.parquet")
    return TrainingJob(
        model_dir=MODEL,
        dataset_file=folder / "rows.parquet",
        output_dir=folder / "out",
        config=TrainingConfig(per_device_train_batch_size=_ROWS, **settings),  # type: ignore[arg-type]
        num_train_epochs=1.0,
        seed=0,
        parent="parent",
        dataset_hash="rows",
        checkpoint_every=0,
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    options = parser.parse_args()
    measures = []
    for threads in options.threads:
        with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
            steps = measure(Path(folder), rounds=options.rounds, num_threads=threads)
        name = f"training_step_threads_{threads}" if threads else "training_step"
        measures += [
            Measure(name=name, value=steps.alone, unit="s", note="nothing beside it but what the machine does anyway"),
            Measure(name=f"{name}_beside_busy_loop", value=steps.beside, unit="s"),
            Measure(name=f"{name}_ratio", value=steps.ratio, unit="times", goal="<= 2"),
        ]
    sys.stdout.write(table(measures))


if __name__ == "__main__":
    main()
