"""The viewer, started from the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from agentr_core import http_server
from agentr_core.store.queries.runs import find_runs
from agentr_core.system import LOOPBACK, token_for
from agentr_core.texts import count_text
from agentr_core.viewer.bundle import bundle
from agentr_core.viewer.server import app
from flows import interruption
from flows.commands.samples import reading
from tasks.workspaces import find_run, open_store


def serve(
    workspace: Path, *, index: Path | None, host: str, port: int, token: str | None, say: Callable[[str], Any]
) -> None:
    """Serve the pages of a workspace until interrupted. The workspace may be empty or not exist
    yet: its pages appear with its first run.

    If other machines can reach the server, every request needs a token, which is part of the
    printed address: `token`, or a new one. With `token`, requests of this machine always need it.

    Raises `UserError` if it cannot be a workspace, or if the address cannot be listened on.
    """
    store = open_store(workspace, must_exist=workspace.is_file())
    is_local = host in LOOPBACK
    token = token or token_for(host)
    application = app(
        store.path,
        index=index or _index(workspace),
        # Browsers on other machines may use host names that this server does not know.
        hosts=LOOPBACK if is_local else None,
        token=token,
        token_reader=partial(reading, workspace),
    )
    entry = "" if token is None else f"/?token={token}"
    suffix = "" if store.path.exists() else ", and waits for its first run"

    def listening(address: str) -> None:
        say(f"{workspace} is shown at {http_server.address_elsewhere(address)}{entry}{suffix}")

    http_server.serve(application, host=host, port=port, on_listening=listening)


def write(workspace: Path, folder: Path, *, run: str | None, most: int, say: Callable[[str], Any]) -> str:
    """Write the pages of a workspace, or of one of its runs, to a folder; return a line that says
    how many there are. `most` is the maximum number of pages.

    Raises `UserError` if there is no store or no such run, or if the folder is not new or cannot be
    written to.
    """
    store = open_store(workspace, must_exist=True)
    # Raises if there is no store; the first page would only say so.
    find_runs(store, "")
    start = f"/run/{find_run(workspace, run)}" if run else "/"
    application = app(store.path, index=_index(workspace), hosts=LOOPBACK, takes_notes=False)

    def tell(pages: int) -> None:
        if pages % _PROGRESS == 0:
            say(f"{pages} of at most {most} pages")

    result = interruption.run(bundle(application, folder, start=start, max_pages=most, on_page=tell))
    left_out = (
        f"; changed and held-out episodes came first, and at least {result.num_left_out} pages were left out, "
        "--pages takes in others"
        if result.num_left_out
        else ""
    )
    return f"{count_text(result.num_pages, 'page')} in {folder / 'index.html'} and beside it{left_out}"


_PROGRESS = 100
"""Pages after which a line says how many there are."""


def _index(workspace: Path) -> Path:
    return workspace / "indexes" / "texts.sqlite"
