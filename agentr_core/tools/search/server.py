"""An HTTP server for a retriever; `tool` describes its protocol."""

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
from agentr_core.tools.search.retriever import Hit, Retriever, truncate
from agentr_core.tools.search.tool import BatchSearchRequest, Health, RetrieverCounts, SearchRequest

Body = TypeVar("Body", bound=BaseModel)


def app(
    retriever: Retriever,
    *,
    threads: int = 4,
    document_chars: int = 20_000,
    hosts: Collection[str] | None = None,
) -> Starlette:
    """Return the ASGI application that serves a retriever.

    Args:
        threads: the maximum number of searches at a time; further ones wait.
        document_chars: the maximum number of characters of a document in an answer.
        hosts: see `Guard`.
    """
    limiter = CapacityLimiter(threads)

    async def search_all(queries: Sequence[str], top_n: int) -> list[list[Hit]]:
        return await to_thread.run_sync(retriever.search, queries, top_n, limiter=limiter)

    def as_dicts(hits: list[Hit]) -> list[dict[str, str]]:
        return [{"id": hit.document.id, "contents": truncate(hit.document.text, document_chars)} for hit in hits]

    async def search(body: SearchRequest) -> Any:
        (hits,) = await search_all([body.query], body.top_n)
        return [as_dicts(hits), [hit.score for hit in hits]] if body.return_score else as_dicts(hits)

    async def batch_search(body: BatchSearchRequest) -> Any:
        results = await search_all(body.query, body.top_n)
        documents = [as_dicts(hits) for hits in results]
        return [documents, [[hit.score for hit in hits] for hits in results]] if body.return_score else documents

    async def health(request: Request) -> Response:
        num_free = int(limiter.available_tokens)
        report = Health(
            status="ok",
            retrievers=RetrieverCounts(total=threads, available=num_free),
            fingerprint=retriever.fingerprint,
        )
        return JSONResponse(report.model_dump())

    return Starlette(
        middleware=[Middleware(Guard, hosts=hosts)],
        routes=[
            _post_route("/search", SearchRequest, lambda body: [body.query], search),
            _post_route("/batch_search", BatchSearchRequest, lambda body: body.query, batch_search),
            Route("/health", health),
        ],
    )


def _post_route(
    path: str,
    model: type[Body],
    get_queries: Callable[[Body], Sequence[str]],
    handle: Callable[[Body], Awaitable[Any]],
) -> Route:
    """Return the route for POST requests whose body is a `model`. It answers 422 for another body,
    400 for a blank query, and 500 if `handle` raises an `AgentrError`.
    """

    async def endpoint(request: Request) -> Response:
        try:
            body = model.model_validate_json(await request.body())
        except ValidationError as error:
            # The answer does not repeat the input, which may be long and need not be text.
            return JSONResponse(
                {"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422
            )
        blank_positions = [position for position, query in enumerate(get_queries(body)) if not query.strip()]
        if blank_positions:
            return JSONResponse({"detail": f"query {blank_positions[0]} is blank"}, 400)
        try:
            return JSONResponse(await handle(body))
        except AgentrError as error:
            return JSONResponse({"detail": str(error)}, 500)

    return Route(path, endpoint, methods=["POST"])
