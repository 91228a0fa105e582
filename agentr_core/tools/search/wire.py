"""The contract of retrieval servers: `/search`, `/batch_search`, `/health`.

A document is `{"id", "contents"}`, with its title in the first line of the contents. Results are a
list of documents, or for a batch a list of lists; with `return_score`, a pair of the results and
their scores in the same shape.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, Field

MOST_RESULTS: Final = 100
MOST_QUERIES: Final = 256
"""The most queries of a batch."""
MOST_QUERY_CHARS: Final = 2000

Query = Annotated[str, Field(max_length=MOST_QUERY_CHARS)]


class Search(BaseModel):
    """The request body of `/search`."""

    query: Query
    top_n: int = Field(default=10, ge=1, le=MOST_RESULTS)
    return_score: bool = False


class BatchSearch(BaseModel):
    """The request body of `/batch_search`."""

    query: list[Query] = Field(max_length=MOST_QUERIES)
    top_n: int = Field(default=10, ge=1, le=MOST_RESULTS)
    return_score: bool = False


class FoundDocument(BaseModel):
    """A document in an answer."""

    id: str
    contents: str


class Retrievers(BaseModel):
    """The number of searches a server does at once, and the number of free slots now."""

    total: int
    available: int


class Health(BaseModel):
    """The answer of `/health`. Servers with equal fingerprints give equal answers; a server that is
    not ours has no fingerprint.
    """

    status: str
    retrievers: Retrievers
    fingerprint: str = ""
