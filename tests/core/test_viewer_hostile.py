"""Hostile texts on the viewer's pages, in a real browser: nothing of them is run, loaded or taken
for markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import gallery
import httpx
import pytest
from asgi import running
from browser import HOSTILE, browse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentr_core.store.database import Store
from agentr_core.store.text_index import TextIndex
from agentr_core.system import LOOPBACK
from agentr_core.viewer.server import SecurityHeadersApp, app

pytestmark = pytest.mark.slow
ELEMENTS = re.compile(r"<(?:script|img|iframe|base|style|meta http-equiv|object|embed)\b[^>]*>|\son\w+=\"|javascript:")
"""What no page has, but for the one script it loads and what stands in a text."""


class PathRecorder:
    """Passes requests on, and notes their paths."""

    def __init__(self, app: ASGIApp) -> None:
        self.paths: list[str] = []
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.paths.append(scope["path"])
        await self._app(scope, receive, send)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    gallery_store = gallery.fill(tmp_path_factory.mktemp("ws") / "store.duckdb", HOSTILE)
    TextIndex(gallery_store, gallery_store.path.with_name("texts.sqlite")).refresh(budget_s=60)
    return gallery_store


@pytest.fixture(scope="module")
def viewer(store: Store) -> PathRecorder:
    return PathRecorder(app(store.path, index=store.path.with_name("texts.sqlite"), hosts=LOOPBACK))


@pytest.fixture(scope="module")
def address(viewer: PathRecorder) -> Iterator[str]:
    with running(viewer) as where:
        yield where


PAGES = [*gallery.PAGES, f"/search?q={HOSTILE[:60]}", f"/trajectories?source={HOSTILE[:60]}&run={HOSTILE[:60]}"]


@pytest.mark.parametrize("page", PAGES)
def test_markup_in_texts_is_text(page: str, address: str) -> None:
    """Whether or not there is a browser."""
    path, _, query = page.partition("?")
    answer = httpx.get(f"{address}{path}", params=dict(part.split("=", 1) for part in query.split("&") if part))
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self';")
    assert "unsafe" not in policy
    # The texts stand there, escaped; of their marks of direction and colour none is left.
    markup = answer.text.replace('<script src="/static/keys.js" defer></script>', "")
    inside_tags = re.sub(r">[^<]*<", "><", markup)
    assert not ELEMENTS.findall(re.sub(r'(value|title|aria-label)="[^"]*"', "", inside_tags))
    assert not {"\u202e", "\u2066", "\x1b"} & set(answer.text)
    assert "49" not in re.findall(r"x(?:</a>|&lt;/a&gt;)(..)", answer.text)


@pytest.mark.parametrize(
    "pages", [gallery.PAGES[2::5], pytest.param(gallery.PAGES, marks=pytest.mark.long)], ids=["some", "all"]
)
def test_a_browser_runs_and_loads_nothing_of_it(
    pages: Sequence[str], address: str, viewer: PathRecorder, tmp_path: Path
) -> None:
    """Of all pages it is the test of markup that shows it."""
    for page in pages:
        html = browse(f"{address}{page}", tmp_path / "profile")
        assert "agentr" in html
        assert 'id="taken"' not in html, page
        assert "<title>taken" not in html, page
    # The page's own script and styles came from here, and nothing that a text asks for.
    assert {"/static/keys.js", "/static/page.css", "/static/viewer.css"} <= set(viewer.paths)
    assert not [path for path in viewer.paths if "taken" in path]


def test_the_policy_holds_where_escaping_would_fail(tmp_path: Path) -> None:
    """The same browser obeys the texts where the policy is not, and does not where it is."""

    async def unescaped(scope: Scope, receive: Receive, send: Send) -> None:
        page = f"<!doctype html><title>t</title><p>{HOSTILE}" if scope["path"] == "/" else ""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": page.encode()})

    for has_headers in (False, True):
        recorder = PathRecorder(SecurityHeadersApp(unescaped) if has_headers else unescaped)
        with running(recorder) as url:
            browse(f"{url}/", tmp_path / f"profile{has_headers}")
        # A page may load style sheets from its own address, and nothing that runs or is drawn.
        assert {"/taken-script", "/taken-image", "/taken-frame"}.isdisjoint(recorder.paths) == has_headers
