"""Benchmarks of speed and memory: ratios and rates with their goals, measured in one run on this
machine.

    python tests/bench/bench.py [--quick] [--clock cpu] [--only NAME ...] [--output bench.jsonl]

Writes one line of JSON for each measure and prints a table. A goal that is missed is reported and
is not an error. With `--clock cpu` seconds are those of the processors, on one thread, so that
other work on the machine decides little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import attending
import choosing
import collecting
import conversing
import crediting
import gateway
import memory
import prefill
import python_calls
import retrieving
import sampling
import storage
import torch
import viewing
from measures import Clock, Measure, table


def main() -> None:
    """Run the benchmarks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sizes that show that it works, and nothing more")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--output", type=Path, default=Path("bench.jsonl"))
    parser.add_argument("--trees", type=int, help="trees of the collection (80; quick: 2)")
    parser.add_argument("--steps", type=int, help="steps of the synthetic store (10,000,000; quick: 2,000)")
    parser.add_argument("--many-trees", type=int, help="trees of the larger run of `memory` (10,000; quick: 20)")
    options = parser.parse_args()
    clock: Clock = time.perf_counter
    if options.clock == "cpu":
        clock = time.process_time
        torch.set_num_threads(1)
    measures: list[Measure] = []
    with options.output.open("w", encoding="utf-8") as lines:
        for name in options.only:
            with tempfile.TemporaryDirectory(prefix=f"bench-{name}-") as folder:
                for measure in BENCHMARKS[name](options, Path(folder), clock):
                    measures.append(measure)
                    lines.write(measure.line() + "\n")
            lines.flush()
    sys.stdout.write(table(measures))


def _collection(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    trees = options.trees or (2 if options.quick else 80)
    search = ["search.dives=1", "search.depth=2"] if options.quick else []
    return collecting.measure(folder, trees=trees, slow_trees=1 if options.quick else 6, search=search, clock=clock)


def _conversing(options: argparse.Namespace, _: Path, clock: Clock) -> list[Measure]:
    count, turns, words = (4, 2, 60) if options.quick else (64, 8, 250)
    return conversing.measure(conversations=count, turns=turns, words=words, clock=clock)


def _choosing(options: argparse.Namespace, _: Path, clock: Clock) -> list[Measure]:
    return choosing.measure(small=options.quick, clock=clock)


def _crediting(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    groups, earlier, part = (2, 1, 8) if options.quick else (96, 4, 16)
    return crediting.measure(folder, groups=groups, earlier=earlier, part=part, clock=clock)


def _gateway(options: argparse.Namespace, _: Path, clock: Clock) -> list[Measure]:
    agents, calls, rounds, streams = (2, 2, 1, 2) if options.quick else (64, 10, 5, 50)
    return gateway.measure(agents=agents, calls=calls, rounds=rounds, streams=streams)


def _attending(options: argparse.Namespace, _: Path, clock: Clock) -> list[Measure]:
    short, long, runs = (20, 40, 1) if options.quick else (500, 1_200, 5)
    return attending.measure(lengths={"short": short, "long": long}, runs=runs, clock=clock)


def _prefill(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    return prefill.measure(folder, n=4 if options.quick else 16, words=60 if options.quick else 800, clock=clock)


def _sampling(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    batches, layers, turns, runs = ((4,), 1, (1,), 1) if options.quick else ((16, 64), 30, (3,), 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return sampling.measure(folder, batches=batches, layers=layers, timed=turns, runs=runs, clock=clock)
    finally:
        torch.set_num_threads(threads)


def _store(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    ingest = 2_000 if options.quick else 100_000
    num_steps = options.steps or (2_000 if options.quick else 10_000_000)
    return storage.measure(folder, ingest=ingest, stored=num_steps, clock=clock)


def _memory(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    many = options.many_trees or (20 if options.quick else 10_000)
    return memory.measure(folder, few=max(1, many // 10), many=many)


def _python_calls(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    return python_calls.measure(calls=20 if options.quick else 200, fresh=1 if options.quick else 10)


def _retrieval(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    documents, queries = (500, 128) if options.quick else (5000, 6400)
    return retrieving.measure(folder, documents=documents, queries=queries, clock=clock)


def _viewer(options: argparse.Namespace, folder: Path, clock: Clock) -> list[Measure]:
    return viewing.measure(folder, steps=options.steps or (2_000 if options.quick else 1_000_000), clock=clock)


BENCHMARKS: dict[str, Callable[[argparse.Namespace, Path, Clock], list[Measure]]] = {
    "collection": _collection,
    "choosing": _choosing,
    "crediting": _crediting,
    "attending": _attending,
    "prefill": _prefill,
    "sampling": _sampling,
    "conversing": _conversing,
    "store": _store,
    "memory": _memory,
    "gateway": _gateway,
    "python_calls": _python_calls,
    "retrieval": _retrieval,
    "viewer": _viewer,
}

if __name__ == "__main__":
    main()
