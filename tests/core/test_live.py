"""What a run at work tells beside its store, and what the viewer shows of it as it changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gallery
import httpx
import pytest
from asgi import running
from browser import browse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentr_core.runtime.live import (
    StageProgress,
    progress_file,
    read_progress,
    read_steps,
    steps_file,
    write_progress,
    write_step,
)
from agentr_core.runtime.remaining import Remaining
from agentr_core.store.codec.ledger import run_rows, timing_rows
from agentr_core.store.database import Store
from agentr_core.system import LOOPBACK
from agentr_core.viewer.bundle import bundle
from agentr_core.viewer.server import app
from tasks import progress as told_by
from tasks.runs import run_locked
from tasks.wiring import RunRef

RUN = gallery.RUN


def at(done: int, **other: Any) -> StageProgress:
    now = time.time()
    fields = {"iteration": 1, "stage": "train", "total": 40, "note": "steps", "began": now - 65, "told": now}
    return StageProgress(**{**fields, "done": done, **other})


def test_progress_is_read_as_it_was_told(tmp_path: Path) -> None:
    assert read_progress(tmp_path, "r") is None
    progress = at(3, stage_left=90.0)
    write_progress(progress_file(tmp_path, "r"), progress)
    assert read_progress(tmp_path, "r") == progress
    assert [file.name for file in (tmp_path / "live").iterdir()] == ["r.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"stage": 3}', '{"iteration": "x"}'])
def test_what_cannot_be_read_is_not_there(tmp_path: Path, content: str) -> None:
    for name in ("r.json", "r-1.jsonl"):
        (tmp_path / "live").mkdir(exist_ok=True)
        (tmp_path / "live" / name).write_text(f"{content}\n", encoding="utf-8")
    assert read_progress(tmp_path, "r") is None
    assert read_steps(tmp_path, "r", 1) == []


def test_an_id_from_a_foreign_store_leads_to_no_other_file(tmp_path: Path) -> None:
    write_progress(tmp_path / "secret.json", at(1))
    assert read_progress(tmp_path, "../secret") is None
    (tmp_path / "secret-1.jsonl").write_text("[1, 0.5, null, null]\n", encoding="utf-8")
    assert read_steps(tmp_path, "../secret", 1) == []


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "live").write_text("a file in the place of the folder", encoding="utf-8")
    write_progress(progress_file(tmp_path, "r"), at(1))
    write_step(tmp_path, "r", 1, (1, 0.5, None, None))
    assert read_progress(tmp_path, "r") is None


def test_steps_of_a_training_that_went_back_are_those_of_the_second_try(tmp_path: Path) -> None:
    file = steps_file(tmp_path, "r", 1)
    for step in (1, 2, 3, 2, 3):
        write_step(tmp_path, "r", 1, (step, step / 4, 1e-3, None))
        os.utime(file, (0, 0))
    with file.open("a", encoding="utf-8") as stream:
        stream.write("[4, 0.")
    assert [step for step, *_ in read_steps(tmp_path, "r", 1)] == [1, 2, 3]
    assert read_steps(tmp_path, "r", 2) == []


def test_steps_are_told_once_a_second(tmp_path: Path) -> None:
    for step in range(1, 2000):
        write_step(tmp_path, "r", 1, (step, 0.5, None, None))
    assert 1 <= len(read_steps(tmp_path, "r", 1)) <= 5
    write_step(tmp_path, "r", 1, None)
    assert not steps_file(tmp_path, "r", 1).exists(), "they are rows now"


async def test_a_stage_tells_how_far_it_is_even_while_it_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(told_by, "_LIVE_EVERY_S", 0.01)
    file = progress_file(tmp_path, "r")
    async with told_by.stage_progress("collect", 2, Remaining(stage_s=3725.0, after_s=600.0), file=file) as report:
        report(3, 250, "trees")
        await asyncio.sleep(0.05)
        first = read_progress(tmp_path, "r")
        await asyncio.sleep(0.05)
        second = read_progress(tmp_path, "r")
    assert first is not None
    assert second is not None
    assert (first.iteration, first.stage, first.done, first.total, first.note) == (2, "collect", 3, 250, "trees")
    assert first.stage_left == pytest.approx(3725, abs=5)
    assert first.run_left == pytest.approx(4325, abs=5)
    assert second.told > first.told
    assert second.stage_left is not None
    assert second.stage_left < (first.stage_left or 0)


# Pages.


@pytest.fixture
def store(tmp_path: Path) -> Store:
    gallery_store = gallery.fill(tmp_path / "store.duckdb")
    gallery_store.write(timing_rows(gallery.ITERATION, "collect", {"generate": 9.0, "environment": 0.5}, tokens=100))
    return gallery_store


def shown_by(path: Path) -> ASGIApp:
    return app(path, index=path.with_name("texts.sqlite"), hosts=LOOPBACK)


def client(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(shown_by(path)), base_url="http://localhost")


@contextmanager
def at_work(store: Store) -> Iterator[None]:
    with run_locked(RunRef(workspace=str(store.path.parent), run_id=RUN)):
        yield


def text(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


@pytest.mark.slow
async def test_the_viewer_waits_for_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store.duckdb"
    async with client(path) as http:
        page = await http.get("/")
        assert page.status_code == 200
        assert "Waiting for the first run" in page.text
        assert '<main data-live="/"' in page.text
        assert '<noscript><meta http-equiv="refresh"' in page.text
        assert (await http.get(f"/run/{RUN}")).status_code == 503
        assert not path.parent.exists(), "waiting writes nothing"
        gallery.fill(path)
        assert RUN in (await http.get("/")).text
        assert (await http.get(f"/run/{RUN}")).status_code == 200


@pytest.mark.slow
async def test_the_page_of_a_run_at_work_moves_and_that_of_another_does_not(store: Store) -> None:
    folder = store.path.parent
    write_progress(progress_file(folder, RUN), at(10, stage_left=300.0, run_left=4000.0))
    for step in (1, 2, 3):
        write_step(folder, RUN, 1, (step, 1 / step, 1e-3, 0.5))
        os.utime(steps_file(folder, RUN, 1), (0, 0))
    with at_work(store):
        async with client(store.path) as http:
            page = (await http.get(f"/run/{RUN}")).text
            part = (await http.get(f"/moving/run/{RUN}")).text
            index = (await http.get("/")).text
    assert f'<main data-live="/moving/run/{RUN}" data-state="running 1 train"' in page
    assert '<main data-live="/"' in index
    for page_text in (page, part):
        assert "Iteration 1, train 10 of 40" in text(page_text)
        assert re.search(
            r"1 min [0-5]\d s so far, about [45] min \d\d s left, 1 h 0[67] min of the run", text(page_text)
        )
        assert '<progress max="40" value="10">' in page_text
        assert "Loss by optimizer step." in page_text
        assert "Last episodes" in page_text
    assert len(part) < len(page) / 1.5
    assert "Scores" not in part
    # Nobody works on it any more.
    async with client(store.path) as http:
        page = (await http.get(f"/run/{RUN}")).text
        part = (await http.get(f"/moving/run/{RUN}")).text
    for page_text in (page, part):
        assert "data-live" not in page_text
        assert "so far" not in page_text
        assert "http-equiv" not in page_text


@pytest.mark.slow
async def test_a_stage_has_a_page(store: Store) -> None:
    write_progress(progress_file(store.path.parent, RUN), at(10))
    for step in (1, 2, 3):
        write_step(store.path.parent, RUN, 1, (step, 1 / step, 1e-3, 0.5))
        os.utime(steps_file(store.path.parent, RUN, 1), (0, 0))
    async with client(store.path) as http:
        page = await http.get(f"/stage/{RUN}/1/collect")
        assert page.status_code == 200
        assert "Time 9.5 s" in text(page.text)
        assert "odd" in page.text, "what went wrong in it"
        assert f'href="/stage/{RUN}/1/collect"' in (await http.get(f"/run/{RUN}")).text
        for path in (f"/stage/{RUN}/1/none", f"/stage/{RUN}/7/collect", "/stage/none/1/collect", "/moving/run/none"):
            assert (await http.get(path)).status_code == 404, path
        with at_work(store):
            now = (await http.get(f"/stage/{RUN}/1/train")).text
            elsewhere = (await http.get(f"/stage/{RUN}/1/collect")).text
    assert "Status at work" in text(now)
    assert "10 of 40" in text(now)
    assert "Learning curves" in text(now)
    for sentence in ("10 of 40", "A process is at work", "Learning curves"):
        assert sentence not in text(elsewhere), "what another stage does is not told on the page of one that is over"


@pytest.mark.slow
async def test_settings_that_differ_from_another_run_are_listed(store: Store) -> None:
    def run(run_id: str, seed: int, versions: dict[str, str], **more: Any) -> None:
        config = {"seed": seed, "model": {"path": "tiny", "backend": "transformers"}, **more}
        start = datetime(2026, 1, 3, seed, tzinfo=UTC)
        store.write(
            run_rows(
                run_id, recipe="two", method="eto", config=config, versions=versions, workspace="w", started_at=start
            )
        )

    run("cccc0001", 1, {"torch": "2.13"}, training={"learning_rate": 1e-3})
    run("cccc0002", 2, {"torch": "2.14"}, training={"learning_rate": 1e-4, "token": "hf_secretsecretsecretsecret"})
    async with client(store.path) as http:
        page = (await http.get("/run/cccc0002")).text
        first_page = (await http.get("/run/cccc0001")).text
        diff_page = (await http.get(f"/run/cccc0002?against={RUN}")).text
        assert (await http.get("/run/cccc0002?against=none")).status_code == 200
    rows = [text(row) for row in re.findall(r"<tr>.*?</tr>", page.partition('id="settings"')[2])]
    assert rows[:4] == [
        "seed 2 1",
        "training.learning_rate 0.0001 0.001",
        "training.token *** not there",
        "versions.torch 2.14 2.13",
    ]
    assert "Seed 2" in text(page)
    assert "Model tiny" in text(page)
    assert "secretsecret" not in page
    # The first of its recipe has none before it.
    assert "training.learning_rate" not in first_page.partition("with every default")[0]
    assert f'value="{RUN}" selected' in diff_page


@pytest.mark.slow
async def test_shared_pages_ask_for_nothing(store: Store, tmp_path: Path) -> None:
    write_progress(progress_file(tmp_path, RUN), at(10))
    with at_work(store):
        await bundle(shown_by(store.path), tmp_path / "site", start=f"/run/{RUN}", max_pages=5)
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "10 of 40" in text(page)
    for word in ("data-live", "live.js", 'http-equiv="refresh"'):
        assert word not in page


class Moving:
    """The viewer of a run at work that gets on with each request for what has changed, and ends."""

    def __init__(self, store: Store) -> None:
        self.asked: list[str] = []
        self._store, self._app = store, shown_by(store.path)
        self._lock: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http":
            if path == f"/run/{RUN}" and self._lock is None:
                self._lock = at_work(self._store)
                self._lock.__enter__()
            if path.startswith("/moving/"):
                write_progress(progress_file(self._store.path.parent, RUN), at(20 + len(self.asked)))
                if self.asked.count(path) == 3:
                    self._lock.__exit__(None, None, None)
                    self._store.update("run", {"run_id": RUN, "status": "finished", "finished_at": datetime.now(UTC)})
            self.asked.append(path)
        await self._app(scope, receive, send)


@pytest.mark.slow
def test_in_a_browser_a_page_moves_and_stops_when_the_run_is_done(store: Store, tmp_path: Path) -> None:
    write_progress(progress_file(tmp_path, RUN), at(10))
    moving = Moving(store)
    with running(moving) as address:
        page = browse(f"{address}/run/{RUN}", tmp_path / "profile", seconds=30)
    assert moving.asked.count(f"/moving/run/{RUN}") == 4, "and no more when the run is done"
    assert moving.asked.count(f"/run/{RUN}") == 2, "the whole page once more at its end"
    assert "finished" in text(page).partition("Scores")[0]
    assert "of 40" not in text(page)
    assert json.dumps(page).count("<h2>Scores") == 1
