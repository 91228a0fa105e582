"""Queries a second of the search tool's index in this process, and what HTTP leaves of them."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen

import httpx
from measures import Clock, Measure

from agentr_core.tools.search.retriever import open_retriever

_BATCH = 64
_TOP_K = 5


def measure(folder: Path, *, documents: int, queries: int, clock: Clock) -> list[Measure]:
    """Return queries a second in batches of 64 on a seeded corpus of short documents, in process
    and over HTTP.

    By the processors' clock HTTP costs the seconds of both, client and server.
    """
    corpus, texts = _corpus(folder, documents), _queries(queries)
    batches = [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
    retriever = open_retriever(corpus, folder / "index")
    retriever.search(batches[0], _TOP_K)
    in_process = _rate(batches, clock, lambda batch: retriever.search(batch, _TOP_K))
    command = ["retrieve", "serve", str(corpus), "--port", "0", "--index", str(folder / "index")]
    with Popen([sys.executable, "-m", "flows.cli", *command], stdout=PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().rpartition(" ")[2].strip().removesuffix("/search")
            with httpx.Client(base_url=url, timeout=60) as client:

                def ask(batch: list[str]) -> None:
                    body = {"query": batch, "top_n": _TOP_K}
                    client.post("/batch_search", json=body).raise_for_status().json()

                def both_clocks() -> float:
                    return clock() + (_processor_seconds(server.pid) if clock is time.process_time else 0)

                ask(batches[0])
                over_http = _rate(batches, both_clocks, ask)
        finally:
            server.terminate()
    note = f"{documents} documents, {queries} queries in batches of {_BATCH}, {_TOP_K} documents each"
    return [
        Measure(name="retrieval_queries_per_second", value=in_process, unit="1/s", goal=">= 1000", note=note),
        Measure(name="retrieval_queries_per_second_http", value=over_http, unit="1/s", note="one client"),
        Measure(
            name="retrieval_share_left_by_http", value=100 * over_http / in_process, unit="%", note="of that in process"
        ),
    ]


def _rate(batches: list[list[str]], clock: Clock, search: Callable[[list[str]], object]) -> float:
    began = clock()
    for batch in batches:
        search(batch)
    return sum(map(len, batches)) / (clock() - began)


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _words(draw: random.Random, count: int) -> str:
    # Frequent and rare words, as in a language: the number of a word is drawn from a Zipf-like law.
    return " ".join(f"w{int(5000 ** draw.random())}" for _ in range(count))


def _corpus(folder: Path, documents: int) -> Path:
    draw = random.Random(0)
    path = folder / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            record = {"id": str(number), "title": _words(draw, 2), "contents": _words(draw, 60)}
            file.write(json.dumps(record) + "\n")
    return path


def _queries(count: int) -> list[str]:
    draw = random.Random(1)
    return [_words(draw, 8) for _ in range(count)]
