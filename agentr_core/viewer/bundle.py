"""Pages of the viewer as files that need no server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import httpx
from starlette.types import ASGIApp

from agentr_core.errors import ConfigError, StoreError
from agentr_core.system import report_write_errors
from agentr_core.viewer.server import HEADERS

_STATIC: Final = ("page.css", "viewer.css", "keys.js")
_LINK: Final = re.compile(r'(<[a-z]+\b[^<>]*?) (href|src)="(/[^"#]*)(#[^"]*)?"')
"""A link that our templates wrote. Texts from the store are escaped, so none of them looks like
one.
"""
_SERVER_PARTS: Final = re.compile(
    r'<form\b.*?</form>|<nav class="views".*?</nav>|<script src="/static/live.js".*?</noscript>'
    r'|<div class="behind">.*?</div>'
    r'|(?<=<main) data-live="[^<>]*"',
    re.DOTALL,
)
"""The parts of a page that work only with a server."""
_LEFT_OUT_ADDRESSES: Final = re.compile(
    r"/(find|search|tokens)\b|[?&](instance|sort|columns)=|^/differences$|^/\w+\.(csv|json)\b"
)
"""Addresses that are left out: they take queries, are computed on request (tokens also need the
model's tokenizer), or would add a page for each instance.
"""
_CRUMBS: Final = re.compile(r'<p class="crumbs">.*?</p>', re.DOTALL)
"""The breadcrumbs at the head of a page, which name the run that it belongs to."""


@dataclass(frozen=True, slots=True)
class BundleCounts:
    """The number of pages that were written, and of further pages that they linked to."""

    num_pages: int
    num_left_out: int


async def bundle(
    app: ASGIApp, folder: Path, *, start: str, max_pages: int, on_page: Callable[[int], Any] = lambda pages: None
) -> BundleCounts:
    """Write a page, and the pages that it links to, to a new folder; `index.html` is the first. The
    folder appears once it is complete.

    Searches and filters, which need a server, are left out. So are the list of runs and the pages
    of other runs, unless the first page is that list.

    Args:
        max_pages: the maximum number of pages. The kinds of pages take turns; within a kind,
            episodes that changed between two evaluations come first, then other evaluated episodes,
            then the pages nearest to the first one. Links to pages that are left out are removed.
        on_page: called after each page with the number of pages so far.

    Raises:
        ConfigError: the folder exists and is not empty, or there is nothing to show.
        DiskError: a file cannot be written.
        StoreError: a page cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists; name a new folder")
    draft = folder.with_name(f".{folder.name}.new")
    try:
        # Before the pages are made, which may take minutes.
        with report_write_errors(folder):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http:
            pages, num_left_out = await _collect_pages(http, start, max_pages, on_page)
            if not pages:
                raise ConfigError(f"there is nothing at {start}; `agentr runs` lists what there is")
            file_name_by_path = {start: "index.html"}
            for path in pages.keys() - file_name_by_path.keys():
                # Readable, and different for different addresses.
                readable = re.sub("[^A-Za-z0-9]+", "-", path).strip("-")[:60]
                file_name_by_path[path] = f"{readable}-{sha256(path.encode()).hexdigest()[:8]}.html"
            files = {file_name_by_path[path]: _self_contained(text, file_name_by_path) for path, text in pages.items()}
            files |= {name: (await http.get(f"/static/{name}")).text for name in _STATIC}
        with report_write_errors(folder):
            for name, text in files.items():
                draft.joinpath(name).write_text(text, encoding="utf-8")
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return BundleCounts(len(pages), num_left_out)


async def _collect_pages(
    http: httpx.AsyncClient, start: str, max_pages: int, on_page: Callable[[int], Any]
) -> tuple[dict[str, str], int]:
    """Return pages by address, and how many more they link to. Kinds take turns: there are far more
    lists and trajectories than trees, pairs and samples.
    """
    pages: dict[str, str] = {}
    # The rank of each page by its address.
    frontier_by_kind = {_kind(start): {start: _OTHER_RANK}}
    left_out_paths: set[str] = set()
    while frontier_by_kind and len(pages) < max_pages:
        kind = next(iter(frontier_by_kind))
        rank_by_path = frontier_by_kind.pop(kind)
        path = min(rank_by_path, key=rank_by_path.__getitem__)
        rank = rank_by_path.pop(path)
        if rank_by_path:
            frontier_by_kind[kind] = rank_by_path
        response = await http.get(path)
        if response.status_code >= 500:
            raise StoreError(f"the page {path} cannot be made; `agentr store check` says whether the store is sound")
        # The crumbs of a page name its run.
        crumbs = _CRUMBS.search(response.text)
        crumb_links = _links(crumbs[0]) if crumbs and path != start else ()
        if response.status_code != 200 or any(_is_of_other_run(link, start) for link in crumb_links if link != "/"):
            left_out_paths.add(path)
            continue
        pages[path] = response.text
        on_page(len(pages))
        for link in _links(response.text):
            is_new = link not in pages and link not in left_out_paths
            if is_new and not _LEFT_OUT_ADDRESSES.search(link) and not _is_of_other_run(link, start):
                # What a list of changed or evaluated episodes links to inherits its rank.
                link_rank = _rank(link) if _kind(path) != "list" else min(rank, _rank(link))
                rank_of_link = frontier_by_kind.setdefault(_kind(link), {})
                rank_of_link[link] = min(link_rank, rank_of_link.get(link, link_rank))
    return pages, sum(map(len, frontier_by_kind.values()))


_OTHER_RANK: Final = 2


def _rank(path: str) -> int:
    """Return the priority of a page, the lowest first: 0 for a list of differences between two
    evaluations, 1 for a list of an evaluation's episodes, 2 for every other page.
    """
    return 0 if path.startswith("/differences") else 1 if "evaluation=" in path else _OTHER_RANK


def _kind(path: str) -> str:
    """Return the kind of the page at an address, `tree` of `/tree/ID`; lists are of one kind."""
    kind, _, key = urlsplit(path).path[1:].partition("/")
    return kind if key else "list"


def _links(text: str) -> list[str]:
    """Return the addresses that a page links to, without those of its styles and scripts."""
    links = (unescape(link) for *_, link, _ in _LINK.findall(text))
    return [link for link in links if not link.startswith("/static/")]


def _is_of_other_run(link: str, start: str) -> bool:
    """Return whether an address is that of all runs, or names another run than the first page's."""
    if start == "/":
        return False
    url = urlsplit(link)
    run = url.path.removeprefix("/run/") if url.path.startswith("/run/") else None
    run = run or dict(parse_qsl(url.query)).get("run")
    return link == "/" or (run is not None and f"/run/{run}" != start)


def _self_contained(text: str, file_name_by_path: dict[str, str]) -> str:
    """Return a page without the parts that need a server, and with its links pointing to the files
    in `file_name_by_path`; other links are removed.
    """

    def link(match: re.Match[str]) -> str:
        path = unescape(match[3])
        file_name = path.removeprefix("/static/") if path.startswith("/static/") else file_name_by_path.get(path)
        return match[1] if file_name is None else f'{match[1]} {match[2]}="{file_name}{match[4] or ""}"'

    policy = HEADERS["Content-Security-Policy"].partition("; frame-ancestors")[0]
    head = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return _LINK.sub(link, _SERVER_PARTS.sub("", text)).replace("<head>", head, 1)
