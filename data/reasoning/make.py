"""Write the question sets that come along, and the corpus that answers one of them.

    python data/reasoning/make.py

writes the same bytes as lie here. Other sizes, hops and universes go into another folder:

    python data/reasoning/make.py --out runs/reasoning --seed 7 --people 2000 --hops 2 3 4
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from generators import articles, encyclopaedia_problems, number_problems, universe

from agentr_core.environments.reasoning.problems import Problem
from agentr_core.fingerprint import derive_seed

HERE = Path(__file__).resolve().parent


def files(options: argparse.Namespace) -> dict[str, str]:
    """Return the text of each file by its name."""
    entities = universe(options.seed, people=options.people, towns=options.towns)
    subjects = [entity.name for entity in entities.values() if entity.kind != "river"]
    random.Random(derive_seed(options.seed, "split")).shuffle(subjects)
    # No question of one split is about a subject of the other.
    half = len(subjects) // 2
    sizes = {"train": options.train, "test": options.test}
    about = {"train": subjects[:half], "test": subjects[half:]}
    found = {"corpus.jsonl": _lines(articles(entities))}
    made = number_problems(options.seed, "numbers")
    for split, size in sizes.items():
        found[f"numbers/{split}.jsonl"] = _lines(map(row, islice(made, size)))
        asked = encyclopaedia_problems(
            entities, about[split], hops=options.hops, seed=options.seed, prefix=f"encyclopaedia-{split}"
        )
        found[f"encyclopaedia/{split}.jsonl"] = _lines(map(row, islice(asked, size)))
    return found


def row(problem: Problem) -> dict[str, Any]:
    """Return the row of a problem, as a question set has it."""
    return {
        "id": problem.id,
        "question": problem.question,
        "answer": list(problem.golds),
        "source": problem.source,
        "domain": problem.domain,
        "depth": problem.depth,
        "solution": [{key: text for key, text in asdict(move).items() if text} for move in problem.solution],
    }


def arguments(given: list[str]) -> argparse.Namespace:
    """Return the options; by default those of the shipped files."""
    parser = argparse.ArgumentParser(description="Make question sets with derived answers.")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--people", type=int, default=200)
    parser.add_argument("--towns", type=int, default=40)
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--train", type=int, default=300, help="questions of each set for training")
    parser.add_argument("--test", type=int, default=250, help="questions of each set for testing")
    return parser.parse_args(given)


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


if __name__ == "__main__":
    options = arguments(sys.argv[1:])
    for name, text in files(options).items():
        file = options.out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{text.count(chr(10))} rows are in {file}\n")
