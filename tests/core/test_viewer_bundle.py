"""The viewer's pages as files to share."""

from __future__ import annotations

import re
from pathlib import Path

import gallery
import pytest
from browser import HOSTILE, browse
from finished import finish
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from agentr_core.errors import ConfigError, DiskError, StoreError
from agentr_core.system import LOOPBACK
from agentr_core.viewer.bundle import BundleCounts, bundle
from agentr_core.viewer.server import app

pytestmark = pytest.mark.slow
OTHER = "bbbb000000000001"


async def write_bundle(tmp_path: Path, *, start: str = "/", most: int = 500) -> tuple[BundleCounts, dict[str, str]]:
    """Return what was written of a store with hostile texts, and its pages by file name."""
    store = gallery.fill(tmp_path / "store.duckdb", HOSTILE)
    viewer = app(store.path, index=tmp_path / "texts.sqlite", hosts=LOOPBACK)
    counts = await bundle(viewer, tmp_path / "site", start=start, max_pages=most)
    return counts, {file.name: file.read_text("utf-8") for file in (tmp_path / "site").glob("*.html")}


def links(page: str) -> set[str]:
    return set(re.findall(r'<[a-z]+\b[^<>]*? (?:href|src)="([^"#]+)', page))


async def test_pages_lead_to_files_beside_them(tmp_path: Path) -> None:
    counts, pages = await write_bundle(tmp_path)
    assert counts == BundleCounts(len(pages), 0)
    files = {file.name for file in (tmp_path / "site").iterdir()}
    assert set().union(*map(links, pages.values())) <= files
    for kind in ("run", "trajectory", "tree", "node", "pair", "sample", "preference", "group", "family", "differences"):
        assert [name for name in pages if name.startswith(f"{kind}-")], kind
    assert not [name for name, page in pages.items() if "<form" in page]


async def test_a_page_that_cannot_be_made_is_not_left_out(tmp_path: Path) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("no", status_code=500)(scope, receive, send)

    with pytest.raises(StoreError, match="the page / cannot be made"):
        await bundle(broken, tmp_path / "site", start="/", max_pages=5)
    assert not (tmp_path / "site").exists()


async def test_a_browser_shows_the_files_and_obeys_no_text(tmp_path: Path) -> None:
    _, pages = await write_bundle(tmp_path)
    for kind in ("index.html", "tree-", "trajectory-aaaa"):
        name = next(name for name in pages if name.startswith(kind))
        dom = browse(f"file://{tmp_path}/site/{name}", tmp_path / "profile")
        assert "agentr" in dom
        assert 'id="taken"' not in dom
        assert "<title>taken" not in dom


@pytest.mark.long
async def test_a_bundle_of_a_run_has_no_page_of_another(tmp_path: Path) -> None:
    finish(tmp_path, OTHER, [set(), {1}])
    store = gallery.fill(tmp_path / "store.duckdb")
    # The run goes on from a model of the other one.
    store.update("checkpoint", {"checkpoint_id": gallery.BASE, "parent_id": f"{OTHER}-c1"})
    viewer = app(store.path, index=tmp_path / "texts.sqlite", hosts=LOOPBACK)
    all_counts = await bundle(viewer, tmp_path / "both", start="/", max_pages=500)
    counts = await bundle(viewer, tmp_path / "site", start=f"/run/{gallery.RUN}", max_pages=500)
    pages = {file.name: file.read_text("utf-8") for file in (tmp_path / "site").glob("*.html")}
    assert counts == BundleCounts(len(pages), 0)
    assert counts.num_pages < all_counts.num_pages
    assert [name for name in pages if name.startswith("trajectory-")]
    # The model that it all began with belongs to no run.
    assert [name[:-14] for name in pages if OTHER in name] == [f"checkpoint-{OTHER}-c0"]
    assert not [page for page in pages.values() if "<h1>Runs" in page]
    assert set().union(*map(links, pages.values())) <= {*pages, "page.css", "viewer.css", "keys.js"}
    assert 'class="home"' in pages["index.html"]
    assert f"run-{OTHER}" in "".join(file.name for file in (tmp_path / "both").iterdir())


async def test_few_pages_are_of_all_kinds(tmp_path: Path) -> None:
    """A run has more lists, and more links to trajectories, than anybody shares pages."""

    async def site(scope: Scope, receive: Receive, send: Send) -> None:
        targets = {
            "/run/r": ["/trees?page=1", *(f"/trajectories?page={n}" for n in range(50))],
            "/trees": ["/tree/t", "/pair/p"],
            "/pair/p": ["/sample/s"],
        }.get(scope["path"], [])
        page = "".join(f'<a href="{link}">x</a>' for link in targets)
        await HTMLResponse(f"<html><head></head>{page}</html>")(scope, receive, send)

    assert await bundle(site, tmp_path / "site", start="/run/r", max_pages=10) == BundleCounts(10, 45)
    names = {file.name[:5] for file in (tmp_path / "site").glob("*.html")}
    assert names == {"index", "traje", "trees", "tree-", "pair-", "sampl"}


async def test_no_more_pages_are_written_than_asked_for(tmp_path: Path) -> None:
    counts, pages = await write_bundle(tmp_path, start=f"/run/{gallery.RUN}", most=5)
    assert counts.num_pages == len(pages) == 5
    assert counts.num_left_out > 5
    assert "Iterations" in pages["index.html"]
    assert links(pages["index.html"]) <= {*pages, "page.css", "viewer.css", "keys.js"}
    viewer = app(tmp_path / "store.duckdb", index=tmp_path / "texts.sqlite", hosts=LOOPBACK)
    with pytest.raises(ConfigError, match="already exists; name a new folder"):
        await bundle(viewer, tmp_path / "site", start="/", max_pages=5)
    with pytest.raises(ConfigError, match="there is nothing at /run/x"):
        await bundle(viewer, tmp_path / "other", start="/run/x", max_pages=5)


async def test_changed_and_held_out_episodes_come_first(tmp_path: Path) -> None:
    async def site(scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"].decode()
        targets = {
            "/run/r": ["/trajectories?run=r", "/trajectories?evaluation=e", "/differences?before=b&after=e"],
            "/trajectories": [f"/trajectory/{'h' if 'evaluation' in query else 't'}{n}" for n in range(9)],
            "/differences": ["/trajectory/c0", "/trajectory/c1"],
        }.get(scope["path"], [])
        page = "".join(f'<a href="{link.replace("&", "&amp;")}">x</a>' for link in targets)
        await HTMLResponse(f"<html><head></head>{page}</html>")(scope, receive, send)

    numbers: list[int] = []
    await bundle(site, tmp_path / "site", start="/run/r", max_pages=8, on_page=numbers.append)
    assert numbers == list(range(1, 9))
    names = {file.name.split("-")[1] for file in (tmp_path / "site").glob("trajectory-*.html")}
    assert {"c0", "c1"} <= names
    assert not [name for name in names if name.startswith("t")]


async def test_a_bundle_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, **options: object) -> int:
        raise OSError(28, "No space left on device")

    store = gallery.fill(tmp_path / "store.duckdb")
    viewer = app(store.path, index=tmp_path / "texts.sqlite", hosts=LOOPBACK)
    before = {*tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(DiskError, match="free some disk space"):
            await bundle(viewer, tmp_path / "site", start="/", max_pages=5)
    assert {*tmp_path.iterdir()} == before
