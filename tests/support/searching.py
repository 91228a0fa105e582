"""A run whose policy searches: real world, real store, a search server that counts. As a program,
`python -m searching ROOT MODEL URL SEED`, it plays one evaluation.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asgi import running
from asked import run_id_of

from agentr_core.methods.faults import parse
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.start import start_run
from agentr_core.stages.evaluate import evaluate
from agentr_core.tools.search.retriever import Document, Retriever
from agentr_core.tools.search.server import app
from agentr_core.types import Message
from tasks.wiring import RunRef, quiet_context

QUESTIONS = 6
DOCUMENTS = [Document("a", "Ada", "Ada lives by the sea."), Document("b", "Ben", "Ben has a boat.")]


@dataclass
class SearchLog:
    """A server and what it was asked. It answers `most` searches and holds back the others while
    `held`; queries in `refused` get an error.
    """

    url: str = ""
    queries: list[str] = field(default_factory=list)
    most: int = 10**9
    refused: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def counting() -> Iterator[SearchLog]:
    """Serve the documents with our own server, behind a door that counts."""
    inner, log = app(Retriever.from_documents(DOCUMENTS)), SearchLog()

    async def door(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/search":
            await inner(scope, receive, send)
            return
        message = await receive()
        log.queries.append(json.loads(message["body"])["query"])
        while len(log.queries) > log.most and not log.released.is_set():
            await asyncio.sleep(0.01)
        if log.queries[-1] in log.refused:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"not now"})
            return

        async def replay() -> Any:
            return message

        await inner(scope, replay, send)

    with running(door) as url:
        log.url = url
        try:
            yield log
        finally:
            log.released.set()


def reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
    """Search for the question, then for what all search for, then answer."""
    spans = messages[-1].spans
    if not spans:
        return f"<think>?</think>\n<search>{messages[-1].text}</search>"
    if len(spans) == 2:
        return "<think>?</think>\n<search>Ada</search>"
    return "<think>.</think>\n<answer>\\boxed{the sea}</answer>"


async def play(root: Path, model: Path, url: str, seed: int) -> None:
    """Play the evaluation of a run; what the store has of it is not played again."""
    recipe = parse(
        {
            "name": "searching",
            "seed": seed,
            "workspace": str(root),
            "environment": {"name": "reasoning", "options": {"tools": ["search"], "search_url": url, "top_k": 1}},
            "model": {"path": str(model)},
            "instances": {"train_limit": 1, "test_limit": QUESTIONS},
            "evaluation": {"max_steps": 4, "episodes": 1, "revision_test": {"enabled": False}},
        }
    )
    ctx = quiet_context(RunRef(workspace=str(root), run_id=run_id_of(recipe)), recipe)
    ctx = replace(ctx, load_model=lambda role, path: ScriptedModel(reply))
    await start_run(ctx)
    await evaluate(ctx, 0)


if __name__ == "__main__":
    asyncio.run(play(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
