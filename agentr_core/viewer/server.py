"""The viewer's pages over HTTP."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from jinja2 import Environment
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentr_core.episodes.transcript import turn_texts
from agentr_core.errors import StoreBusy, UserError
from agentr_core.http_server import Guard, TokenGuard
from agentr_core.reports import document
from agentr_core.reports.html import jinja_environment
from agentr_core.samples.rendering import RenderedToken
from agentr_core.store.database import Store, snapshot
from agentr_core.store.queries.listings import LISTINGS, load_note, write_note
from agentr_core.store.queries.trees import sampled_tokens, trajectory_head
from agentr_core.store.tables import Note
from agentr_core.store.text_index import TextIndex
from agentr_core.texts import goal_in
from agentr_core.viewer import pages
from agentr_core.viewer.lists import MAX_FILE_ROWS, list_file, number
from agentr_core.viewer.pages import MAX_SEARCH_CHARS, PAGE_ROWS, Page, node, search_page

# Limits on what a browser may do with the pages.

HEADERS: Final = {
    # These pages show texts of models and worlds: whatever the texts contain, none of it is run,
    # loaded or sent.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


_REPORT_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
"""The content security policy of a report, which is one file with its style in it and no script."""
_REPORT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
"""The names of the folders and pages of reports."""


# Escaping and this policy each suffice alone; a test with a browser tries both.
class SecurityHeadersApp:
    """A wrapper that adds headers to the answers of an application, which keep the shown texts from
    running or loading anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


_WAIT_FOR_TEXTS_S: Final = 0.15
_WAIT_FOR_STORE_S: Final = 10.0
MakePage = Callable[[Store, Request], Page | None]
TokenReader = Callable[[Store, str, str], Callable[[], list[list[RenderedToken]]]]
"""Looks up a sample or trajectory in a store by kind and id, and returns a function that reads its
conversations token by token without the store.
"""


def app(
    store: Path,
    *,
    index: Path,
    hosts: Collection[str] | None,
    token: str | None = None,
    token_reader: TokenReader | None = None,
    takes_notes: bool = True,
) -> ASGIApp:
    """Return the application that shows the store at a path, and changes nothing in it but the
    notes.

    Args:
        index: the file of the search index of its texts; created if missing.
        hosts: the host names that a request may be for; None allows any.
        token: the token that a browser must present; None admits every request.
        token_reader: how samples and trajectories are read token by token; None shows no tokens.
        takes_notes: whether notes of trajectories are shown and taken.
    """
    viewer = _Viewer(Store(store, wait_s=_WAIT_FOR_STORE_S), index, token_reader, takes_notes=takes_notes)
    routes = [
        Route("/", viewer.page(lambda store, _: pages.runs(store))),
        Route("/find", viewer.page(lambda store, request: pages.find(store, request.query_params.get("q", "")[:100]))),
        Route("/search", viewer.search),
        Route("/means", viewer.page(lambda store, _: pages.means(store))),
        Route("/scorings", viewer.page(lambda store, r: pages.scorings(store, r.query_params.get("run", "")))),
        Route("/static/{name}", _static),
        Route("/report/{run}/{name}.html", viewer.report),
        Route(
            "/run/{key}",
            viewer.page(lambda store, r: pages.run(store, r.path_params["key"], r.query_params.get("against", ""))),
        ),
        Route(
            "/stage/{key}/{iteration:int}/{stage}",
            viewer.page(
                lambda store, r: pages.stage(store, *(r.path_params[x] for x in ("key", "iteration", "stage")))
            ),
        ),
        Route("/moving/run/{key}", viewer.page(_live_page)),
        Route("/moving/stage/{key}/{iteration:int}/{stage}", viewer.page(_live_page)),
        *([Route("/notes/{key}", viewer.note, methods=["GET", "POST"])] if takes_notes else []),
        Route("/node/{tree}/{node:int}", viewer.page(_node)),
        Route("/group/{iteration}/{step:int}/{number:int}", viewer.page(_group)),
        *(Route(f"/tokens/{kind}/{{key}}", viewer.tokens(kind)) for kind in ("sample", "trajectory") if token_reader),
        *(Route(f"/{name}", viewer.page(_list_page(name))) for name in LISTINGS),
        *(
            Route(f"/{name}.{file_format}", viewer.file(name, file_format))
            for name in LISTINGS
            for file_format in _FILE_TYPES
        ),
        *(Route(f"/{kind}/{{key}}", viewer.page(_detail_page(make))) for kind, make in pages.DETAIL_PAGES.items()),
    ]
    application: ASGIApp = Starlette(
        routes=routes,
        lifespan=viewer.lifespan,
        exception_handlers={404: viewer.not_found, UserError: viewer.store_error},
    )
    if token is not None:
        application = TokenGuard(
            application,
            token,
            why="open the address that `agentr view` printed; it has the token",
            refusal=lambda scope, status, why: PlainTextResponse(f"{why}\n", status),
            cookie="agentr_view",
        )
    return SecurityHeadersApp(Guard(application, hosts, linked=True, posts=takes_notes))


class _Viewer:
    """The endpoints of the pages. A search also adds new texts to the index in the background."""

    def __init__(self, store: Store, index: Path, token_reader: TokenReader | None, *, takes_notes: bool) -> None:
        self._store = store
        self._index = TextIndex(store, index)
        self._reports = store.path.parent / "reports"
        self._read_tokens = token_reader
        self._templates = templates(shows_tokens=token_reader is not None, takes_notes=takes_notes)
        # In each form: without it, another program of this machine could post, too.
        self._form_key = secrets.token_urlsafe(16)
        self._indexing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Warm up the store in the background, and stop all background work when the application
        ends.
        """
        warm_up = asyncio.create_task(run_in_threadpool(self._warm_up))
        yield
        warm_up.cancel()
        if self._indexing is not None:
            self._indexing.cancel()

    def _warm_up(self) -> None:
        """Query the store once, so that the first visitor does not wait: DuckDB loads a library for
        the first query with a parameter, and the first access checks the whole schema.
        """
        # If the store cannot be read, the pages say why.
        with suppress(UserError), snapshot(self._store) as store_snapshot:
            pages.runs(store_snapshot)

    def page(self, make: MakePage) -> Callable[[Request], Response]:
        """Return an endpoint that makes a page from one snapshot of the store; 404 for None."""

        def endpoint(request: Request) -> Response:
            with snapshot(self._store) as store_snapshot:
                page = make(store_snapshot, request)
            return self._respond(request, page)

        return endpoint

    async def note(self, request: Request) -> Response:
        """Answer a GET request with the form for the note of a trajectory; store the note that a
        POST request sends.
        """
        key = request.path_params["key"]
        stored_note = await run_in_threadpool(load_note, self._store, key)
        if stored_note is None:
            return self.not_found(request, LookupError())
        if request.method == "POST":
            form = dict(parse_qsl((await request.body()).decode("utf-8", "replace"), keep_blank_values=True))
            if not secrets.compare_digest(form.get("key", "").encode(), self._form_key.encode()):
                reason = "The form is of a viewer that has ended; load its page again."
                return self._render("message", 403, title="Nothing was stored", text=reason)
            tags = tuple(dict.fromkeys(tag for part in form.get("tags", "").split(",") if (tag := part.strip())))
            if len(tags) > _MAX_TAGS or max(map(len, (*tags, ""))) > _MAX_TAG_CHARS:
                reason = f"A trajectory has at most {_MAX_TAGS} tags of {_MAX_TAG_CHARS} characters each."
                return self._render("message", 400, title="Nothing was stored", text=reason)
            new_note = Note(tags=tags, text=form.get("text", "").replace("\r\n", "\n")[:_MAX_NOTE_CHARS])
            await run_in_threadpool(write_note, self._store, key, new_note)
            return RedirectResponse(f"/notes/{key}", 303)
        head = await run_in_threadpool(trajectory_head, self._store, key)
        page = self._render("notes", 200, head=head, note=stored_note, key=self._form_key, most_chars=_MAX_NOTE_CHARS)
        # With `no-referrer`, a browser would not name the origin of the form.
        page.headers["Referrer-Policy"] = "same-origin"
        return page

    def file(self, name: str, file_format: str) -> Callable[[Request], Response]:
        """Return an endpoint that answers with a whole list as a file."""

        def endpoint(request: Request) -> Response:
            with snapshot(self._store) as store_snapshot:
                text = list_file(store_snapshot, name, file_format, query_of(request))
            if text is None:
                reason = f"This list has more than {MAX_FILE_ROWS:,} rows; narrow it by filters, or ask `agentr sql`."
                return self._render("message", 413, title="Too many rows", text=reason)
            headers = {"Content-Disposition": f'attachment; filename="{name}.{file_format}"'}
            return Response(text, media_type=_FILE_TYPES[file_format], headers=headers)

        return endpoint

    def tokens(self, kind: str) -> Callable[[Request], Response]:
        """Return an endpoint that shows every token of a sample or a trajectory, or in a sentence
        why it cannot.
        """

        def endpoint(request: Request) -> Response:
            assert self._read_tokens is not None
            key, why, conversations, sampled_replies = request.path_params["key"], "", [], []
            with snapshot(self._store) as store_snapshot:
                page = pages.DETAIL_PAGES[kind](store_snapshot, key)
                if page is None:
                    return self.not_found(request, LookupError())
                if kind == "trajectory":
                    sampled_replies = sampled_tokens(store_snapshot, key)
                try:
                    read = self._read_tokens(store_snapshot, kind, key)
                except UserError as error:
                    why = str(error)
            try:
                conversations = [] if why else read()
            except UserError as error:
                why = str(error)
            replies = pages.locate_replies(conversations, sampled_replies)
            step = request.query_params.get("step", "")
            reply = replies.get(int(step)) if step.isascii() and step.isdecimal() and len(step) < 7 else None
            if reply is not None:
                # Only the prompt of the step and its reply.
                conversations = [conversations[reply.conversation][: reply.end]]
                replies = {
                    position: earlier._replace(conversation=0)
                    for position, earlier in replies.items()
                    if earlier.conversation == reply.conversation and earlier.end <= reply.end
                }
            logprobs = {
                (reply_range.conversation, reply_range.start + number): logprob
                for reply_range in replies.values()
                for number, logprob in enumerate(reply_range.sampled.logprobs)
            }
            token_values = {"kind": kind, "key": key, "asked": step, "reply": reply, "logprobs": logprobs}
            return self._render("tokens", 200, **page.values, **token_values, conversations=conversations, why=why)

        return endpoint

    def report(self, request: Request) -> Response:
        """Answer with the file of a page of a run's reports, unchanged."""
        run, name = request.path_params["run"], request.path_params["name"]
        page = self._reports / run / f"{name}.html"
        if not (_REPORT_NAME.fullmatch(run) and _REPORT_NAME.fullmatch(name) and page.is_file()):
            return self.not_found(request, LookupError())
        return HTMLResponse(page.read_bytes(), headers={"Content-Security-Policy": _REPORT_POLICY})

    async def search(self, request: Request) -> Response:
        """Answer a search from the index, and continue to add new texts to the index."""
        words = request.query_params.get("q", "").strip()[:MAX_SEARCH_CHARS]
        complete = await self._refresh_index()
        return await run_in_threadpool(self._search_results, request, words, complete)

    def not_found(self, request: Request, error: Exception) -> Response:
        """Answer a request for an address that shows nothing."""
        return self._render("message", 404, title="Nothing here", text="This store has nothing at that address.")

    def store_error(self, request: Request, error: Exception) -> Response:
        """Answer a request when the store cannot be read, or is not there yet."""
        if not self._store.path.exists():
            return self._render("runs", 200 if request.url.path == "/" else 503, **pages.runs(None).values)
        status = 503 if isinstance(error, StoreBusy) else 500
        return self._render("message", status, title="The store cannot be read", text=str(error))

    async def _refresh_index(self) -> bool:
        """Add new texts to the index, waiting only a moment and then going on in the background;
        return whether the index has all texts.
        """
        if self._indexing is None or self._indexing.done():
            self._indexing = asyncio.create_task(self._index_all_texts())
        done, _ = await asyncio.wait([self._indexing], timeout=_WAIT_FOR_TEXTS_S)
        for task in done:
            task.result()
        return bool(done)

    async def _index_all_texts(self) -> None:
        while not await run_in_threadpool(self._index.refresh, budget_s=1):
            pass

    def _search_results(self, request: Request, words: str, complete: bool) -> Response:
        page_text = request.query_params.get("page", "")
        page = min(int(page_text), 10_000) if page_text.isascii() and page_text.isdigit() else 0
        matches = self._index.search(words, offset=page * PAGE_ROWS, limit=PAGE_ROWS)
        with snapshot(self._store) as store_snapshot:
            page_with_results = search_page(store_snapshot, words, matches, page=page, complete=complete)
        return self._respond(request, page_with_results)

    def _respond(self, request: Request, page: Page | None) -> Response:
        if page is None:
            return self.not_found(request, LookupError())
        if page.redirect_to is not None:
            return RedirectResponse(page.redirect_to, 303)
        return self._render(page.template, 200, **page.values)

    def _render(self, template: str, status: int, **values: object) -> Response:
        return HTMLResponse(self._templates.get_template(f"{template}.html.jinja").render(**values), status)


@cache
def templates(*, shows_tokens: bool, takes_notes: bool) -> Environment:
    """Return the templates of the pages, which link to what the viewer has: tokens, if it reads a
    tokenizer, and notes, if it takes any.
    """
    jinja_env = jinja_environment("agentr_core.viewer")
    # As in reports: markup made by `plots` from numbers.
    jinja_env.filters.update(inline_svg=lambda figure: Markup(figure.svg))
    jinja_env.filters.update(
        number=number, fact=_fact, goal=goal_in, results=turn_texts, turns=pages.token_turns, token=pages.token_text
    )
    jinja_env.globals.update(page_path=document.page_path, list_path=document.list_path, group_path=document.group_path)
    jinja_env.globals.update(stage_path=document.stage_path)
    # Only some pages change while they are shown.
    jinja_env.globals.update(moves=None, most_steps=_MAX_STEPS)
    jinja_env.globals.update(shows_tokens=shows_tokens, takes_notes=takes_notes)
    for name in jinja_env.list_templates():
        # Compiled now, so that the first visitor does not wait for it.
        jinja_env.get_template(name)
    return jinja_env


def _fact(value: Any) -> str:
    """Return a fact of an ancestry as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _list_page(name: str) -> MakePage:
    return lambda store, request: pages.listing(store, name, query_of(request))


def query_of(request: Request) -> dict[str, str]:
    """Return the query of a request. Several values of `columns`, as the boxes of a form send them,
    are joined by commas; of any other parameter the last value counts.
    """
    query: dict[str, str] = {}
    for key, value in request.query_params.multi_items():
        query[key] = f"{query[key]},{value}" if key == "columns" and key in query else value
    return query


def _detail_page(make: pages.MakeDetailPage) -> MakePage:
    return lambda store, request: make(store, request.path_params["key"])


def _live_page(store: Store, request: Request) -> Page | None:
    params = request.path_params
    return pages.live_page(store, params["key"], params.get("iteration"), params.get("stage", ""))


def _node(store: Store, request: Request) -> Page | None:
    return node(store, request.path_params["tree"], request.path_params["node"])


def _group(store: Store, request: Request) -> Page | None:
    params = request.path_params
    return pages.group(store, params["iteration"], params["step"], params["number"])


_MAX_TAGS: Final = 20
_MAX_TAG_CHARS: Final = 60
_MAX_NOTE_CHARS: Final = 10_000
_FILE_TYPES: Final = {"csv": "text/csv", "json": "application/json"}
"""The formats of a list as a file, with their types."""
_MAX_STEPS: Final = 200
"""The rows of the table of the steps of reinforcement learning on the page of a run."""
_STATIC: Final = {
    "page.css": ("agentr_core.reports", "templates/page.css", "text/css"),
    "viewer.css": ("agentr_core.viewer", "static/viewer.css", "text/css"),
    "keys.js": ("agentr_core.viewer", "static/keys.js", "text/javascript"),
    "live.js": ("agentr_core.viewer", "static/live.js", "text/javascript"),
}
"""The files that pages load: package, path and type."""


def _static(request: Request) -> Response:
    entry = _STATIC.get(request.path_params["name"])
    if entry is None:
        return Response(status_code=404)
    package, path, media_type = entry
    return Response(files(package).joinpath(path).read_bytes(), media_type=media_type)
