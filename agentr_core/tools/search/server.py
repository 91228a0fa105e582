"""A retriever over HTTP; see `wire` for the contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentr_core.errors import AgentrError
from agentr_core.http_server import Guard
from agentr_core.tools.search.retriever import Hit, Retriever, cut
from agentr_core.tools.search.tool import BatchSearch, Health, Retrievers, Search

Asked = TypeVar("Asked", bound=BaseModel)


def app(
    retriever: Retriever,
    *,
    threads: int = 4,
    document_chars: int = 20_000,
    hosts: Collection[str] | None = None,
) -> Starlette:
    """Return the ASGI application.

    Args:
        threads: the number of searches done at once; others wait.
        document_chars: the most characters of a document in an answer.
        hosts: see `Guard`.
    """
    limiter = CapacityLimiter(threads)

    async def find(queries: Sequence[str], top_n: int) -> list[list[Hit]]:
        return await to_thread.run_sync(retriever.search, queries, top_n, limiter=limiter)

    def shown(hits: list[Hit]) -> list[dict[str, str]]:
        return [{"id": hit.document.id, "contents": cut(hit.document.text, document_chars)} for hit in hits]

    async def search(asked: Search) -> Any:
        (hits,) = await find([asked.query], asked.top_n)
        return [shown(hits), [hit.score for hit in hits]] if asked.return_score else shown(hits)

    async def batch_search(asked: BatchSearch) -> Any:
        found = await find(asked.query, asked.top_n)
        documents = [shown(hits) for hits in found]
        return [documents, [[hit.score for hit in hits] for hits in found]] if asked.return_score else documents

    async def health(request: Request) -> Response:
        free = int(limiter.available_tokens)
        told = Health(
            status="ok", retrievers=Retrievers(total=threads, available=free), fingerprint=retriever.fingerprint
        )
        return JSONResponse(told.model_dump())

    return Starlette(
        middleware=[Middleware(Guard, hosts=hosts)],
        routes=[
            _post("/search", Search, lambda asked: [asked.query], search),
            _post("/batch_search", BatchSearch, lambda asked: asked.query, batch_search),
            Route("/health", health),
        ],
    )


def _post(
    path: str,
    model: type[Asked],
    queries: Callable[[Asked], Sequence[str]],
    answer: Callable[[Asked], Awaitable[Any]],
) -> Route:
    """Return the route of a request whose body is a `model`; blank queries are refused."""

    async def endpoint(request: Request) -> Response:
        try:
            asked = model.model_validate_json(await request.body())
        except ValidationError as error:
            # The error leaves out the input, which need not be text and may be long.
            return JSONResponse(
                {"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422
            )
        blank = [position for position, query in enumerate(queries(asked)) if not query.strip()]
        if blank:
            return JSONResponse({"detail": f"query {blank[0]} is blank"}, 400)
        try:
            return JSONResponse(await answer(asked))
        except AgentrError as error:
            return JSONResponse({"detail": str(error)}, 500)

    return Route(path, endpoint, methods=["POST"])
