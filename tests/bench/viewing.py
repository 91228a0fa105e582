"""How long the slowest page of `agentr view` takes on a large store."""

from __future__ import annotations

import time
from hashlib import md5
from pathlib import Path
from typing import Final

import storage
from measures import Clock, Measure
from starlette.testclient import TestClient

from agentr_core.runtime.live import StageProgress, progress_file, write_progress
from agentr_core.store.database import Store
from agentr_core.store.text_index import TextIndex
from agentr_core.system import LOOPBACK
from agentr_core.viewer.server import app
from tasks.runs import run_locked
from tasks.wiring import RunRef

_LISTS: Final = (
    "/trees?run=run",
    "/trees?run=run&page=1",
    "/pairs?iteration=1",
    "/samples?kind=revision",
    "/rejections",
    "/trajectories",
    "/trajectories?outcome=no+success&source=rollout",
    "/trajectories?evaluation=after&sort=-num_steps",
    "/groups?run=run",
    "/scorings",
    "/regrades?scoring=scoring&change=changed",
    "/differences?before=before&after=after",
    "/differences?before=before&after=after&change=lost",
)
_AT_WORK: Final = Path(__file__).with_name("synthetic_work.sql")
_AT_WORK_PAGES: Final = ("/moving/run/run", "/stage/run/1/train", "/moving/stage/run/2/reinforce")
_TREE, _EPISODE = (md5(name.encode()).hexdigest()[:16] for name in ("tree0", "episode0"))
PAGES: Final = (
    "/run/run",
    *_AT_WORK_PAGES,
    *_LISTS,
    f"/tree/{_TREE}",
    f"/node/{_TREE}/99",
    "/pair/pair0",
    "/sample/sample0",
    f"/trajectory/{_EPISODE}",
    "/group/second/1/0",
    "/means",
    "/search?q=looks+item",
    '/search?q="reply+100"',
    "/",
)
_ROUNDS: Final = 5


def measure(folder: Path, *, steps: int, clock: Clock) -> list[Measure]:
    """Return the time of each of the pages of a synthetic store of about `steps` steps, of each the
    median of several visits, and of its first visit the slowest page's.
    """
    store = Store(folder / "store.duckdb")
    num_steps = storage.fill(store, max(20, steps // storage.STEPS_PER_TREE))
    # A run in its second iteration, after a long training.
    with store.transaction() as con:
        con.execute(_AT_WORK.read_text(encoding="utf-8").replace("$steps", str(num_steps)))
    write_progress(
        progress_file(folder, "run"),
        StageProgress(iteration=2, stage="reinforce", done=9, total=99, note="steps", began=0.0, told=time.time()),
    )
    index = folder / "texts.sqlite"
    start = clock()
    TextIndex(store, index).refresh(budget_s=float("inf"))
    indexing = clock() - start
    # Whoever works on a run holds its lock.
    with run_locked(RunRef(workspace=str(folder), run_id="run")):
        seconds = _visits(store, index, clock)
    medians = {page: sorted(visits)[len(visits) // 2] for page, visits in seconds.items()}
    first_visits = {page: visits[0] for page, visits in seconds.items()}
    slowest, cold = (max(visits, key=lambda page: visits[page]) for visits in (medians, first_visits))
    size = f"in a store of {num_steps:,} steps; its texts were indexed in {indexing:.1f} s"
    return [
        *(
            Measure(
                name=f"viewer {page}", value=medians[page], unit="s", note=f"first visit {first_visits[page]:.3f} s"
            )
            for page in sorted(medians, key=lambda page: -medians[page])
        ),
        Measure(
            name="viewer_slowest_page",
            value=medians[slowest],
            unit="s",
            goal="<= 0.3",
            note=f"{slowest.partition('?')[0]} of {len(seconds)} pages, {size}",
        ),
        Measure(
            name="viewer_slowest_first_visit",
            value=first_visits[cold],
            unit="s",
            goal="<= 0.3",
            note=f"{cold.partition('?')[0]}, when nobody has looked at it before",
        ),
    ]


def _visits(store: Store, index: Path, clock: Clock) -> dict[str, list[float]]:
    """Return the seconds of each visit of each page, the first one first."""
    viewer = app(store.path, index=index, hosts=LOOPBACK)
    # With its lifespan: what the program does before it answers is no visitor's.
    with TestClient(viewer, base_url="http://localhost") as http:
        # Whoever asks for a page has come by the first one.
        http.get("/")
        seconds: dict[str, list[float]] = {page: [] for page in PAGES}
        for _ in range(_ROUNDS):
            for page in PAGES:
                start = clock()
                http.get(page).raise_for_status()
                seconds[page].append(clock() - start)
    return seconds
