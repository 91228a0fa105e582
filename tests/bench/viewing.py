"""How long the slowest page of `agentr view` takes on a large store."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Final

import httpx
import storage
from measures import Clock, Measure

from agentr_core.runtime.live import StageProgress, progress_file, tell_progress
from agentr_core.store.database import Store
from agentr_core.store.text_index import TextIndex
from agentr_core.system import LOOPBACK
from agentr_core.viewer.server import app
from tasks.runs import locked
from tasks.wiring import RunRef

_LISTS: Final = (
    "/trees?run=run",
    "/trees?run=run&page=1",
    "/pairs?iteration=1",
    "/samples?kind=revision",
    "/rejections",
)
_AT_WORK: Final = Path(__file__).with_name("synthetic_work.sql")
_AT_WORK_PAGES: Final = ("/moving/run/run", "/stage/run/1/train", "/moving/stage/run/2/reinforce")
_ROUNDS: Final = 3


def measure(folder: Path, *, steps: int, clock: Clock) -> list[Measure]:
    """Return the time of the slowest of the pages of a synthetic store of about `steps` steps: of
    each the median of three visits.
    """
    store = Store(folder / "store.duckdb")
    stored = storage.fill(store, max(20, steps // storage.STEPS_PER_TREE))
    # A run in its second iteration, after a long training.
    with store.transaction() as con:
        con.execute(_AT_WORK.read_text(encoding="utf-8").replace("$steps", str(stored)))
    tell_progress(
        progress_file(folder, "run"),
        StageProgress(iteration=2, stage="reinforce", done=9, total=99, note="steps", began=0.0, told=time.time()),
    )
    index = folder / "texts.sqlite"
    started = clock()
    TextIndex(store, index).refresh(seconds=float("inf"))
    indexing = clock() - started
    # Whoever works on a run holds its lock.
    with locked(RunRef(workspace=str(folder), run_id="run")):
        seconds = asyncio.run(_visits(store, index, clock))
    slowest = max(seconds, key=lambda page: seconds[page])
    return [
        Measure(
            name="viewer_slowest_page",
            value=seconds[slowest],
            unit="s",
            goal="<= 0.3",
            note=f"{slowest.partition('?')[0]} of {len(seconds)} pages, in a store of {stored:,} steps; "
            f"its texts were indexed in {indexing:.1f} s",
        )
    ]


async def _visits(store: Store, index: Path, clock: Clock) -> dict[str, float]:
    transport = httpx.ASGITransport(app(store.path, index=index, hosts=LOOPBACK))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as http:
        pages = ["/", "/run/run", *_AT_WORK_PAGES, *_LISTS, "/search?q=looks+item", '/search?q="reply+100"']
        for page in _LISTS:
            links = re.findall(r' href="(/(?:tree|pair|sample)/\w+)"', (await http.get(page)).text)
            pages += links[:2]
            pages += [f"{link.replace('/tree/', '/node/')}/99" for link in links[:1] if "/tree/" in link]
        return {page: await _median(http, page, clock) for page in pages}


async def _median(http: httpx.AsyncClient, page: str, clock: Clock) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        started = clock()
        (await http.get(page)).raise_for_status()
        seconds.append(clock() - started)
    return sorted(seconds)[_ROUNDS // 2]
