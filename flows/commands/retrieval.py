"""Serve searches of a corpus over HTTP, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentr_core import http_server
from agentr_core.system import LOOPBACK
from agentr_core.tools.search.retriever import open_retriever
from agentr_core.tools.search.server import app


def serve(
    corpus: Path,
    *,
    cache: Path,
    encoder: Path | None,
    vectors: Path | None,
    device: str,
    host: str,
    port: int,
    threads: int,
    say: Callable[[str], Any],
) -> None:
    """Serve searches of a corpus until interrupted; its index is made first if there is none.

    Raises `UserError` for a corpus, an encoder or vectors that cannot be used, and for an address
    that cannot be listened on.
    """
    model = None
    if encoder is not None:
        from agentr_core.tools.search.retriever import Encoder

        model = Encoder(encoder, device=device)
    retriever = open_retriever(corpus, cache, encoder=model, vectors=vectors)
    # Clients on other machines may use host names that this server does not know.
    hosts = LOOPBACK if host in LOOPBACK else None
    http_server.serve(
        app(retriever, threads=threads, hosts=hosts),
        host=host,
        port=port,
        on_listening=lambda address: say(f"{len(retriever)} documents of {corpus} are searched at {address}/search"),
    )
