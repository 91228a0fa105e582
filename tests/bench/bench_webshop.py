"""What a large WebShop catalogue costs: building it, opening it, searching it; against the memory
of its parsed files.

Each measurement has a process of its own, whose peak memory is what it says. Products have the
length of real ones: about 200 words, drawn from 50,000 as unevenly as words are.

    python tests/bench/bench_webshop.py [PRODUCTS]
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

from agentr_core.environments.webshop.goals import find_files, open_catalogue

WORDS = 50_000


def write(folder: Path, count: int) -> None:
    """Write the files of a catalogue of random words."""
    rng = random.Random(0)
    weights = list(accumulate(1 / rank for rank in range(1, WORDS + 1)))
    words = [f"w{number}" for number in range(WORDS)]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, cum_weights=weights, k=length))

    with (folder / "items_shuffle.json").open("w") as stream:
        for number in range(count):
            options = {"size": [{"value": text(2)} for _ in range(4)], "color": [{"value": text(1)} for _ in range(6)]}
            product = {
                "asin": f"B{number:09}",
                "name": text(15),
                "category": "garden",
                "query": text(2),
                "product_category": text(4),
                "full_description": text(100),
                "small_description": [text(15) for _ in range(5)],
                "pricing": "$9.99",
                "customization_options": options,
            }
            stream.write(("[" if not number else ",\n") + json.dumps(product))
        stream.write("]")
    (folder / "items_ins_v2.json").write_text("{}")


def measure_process(what: str, folder: Path) -> tuple[float, float]:
    """Return the CPU seconds and the peak memory in MiB of one thing done in a process of its
    own.
    """
    done = subprocess.run([sys.executable, __file__, what, str(folder)], capture_output=True, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def do(what: str, folder: Path) -> None:
    start = time.process_time()
    if what == "parse":
        products = json.loads((folder / "items_shuffle.json").read_text())
        assert products
    elif what != "import":
        catalogue = open_catalogue(find_files(folder, "", wishes=False), 0, folder / "cache")
        if what == "search":
            start = time.process_time()
            rng = random.Random(1)
            for _ in range(100):
                rows = catalogue.search(" ".join(f"w{rng.randint(1, 3000)}" for _ in range(8)))
                assert all(catalogue.product(row).asin for row in rows[:10])
    print(json.dumps([time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))  # noqa: T201


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, count)
        _, floor = measure_process("import", folder)
        seconds, parse_peak = measure_process("parse", folder)
        lines = [f"{count} products, {(folder / 'items_shuffle.json').stat().st_size / 2**20:.0f} MiB of JSON"]
        lines.append(
            f"parse   {seconds:7.1f} s  {parse_peak - floor:7.0f} MiB (the baseline: all products as Python objects)"
        )
        for step in ("build", "open", "search"):
            seconds, peak = measure_process(step, folder)
            ratio = (peak - floor) / (parse_peak - floor)
            lines.append(f"{step:7} {seconds:7.1f} s  {peak - floor:7.0f} MiB = {ratio:.2f} of the baseline")
        on_disk = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
        lines.append(f"on disk {on_disk / 2**20:.0f} MiB; `search` is 100 searches with a page of results each")
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    if len(sys.argv) > 2:
        do(sys.argv[1], Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
