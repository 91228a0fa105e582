"""The contract of retrieval servers, and what they do not let in."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from agentr_core.system import LOOPBACK
from agentr_core.tools.search.retriever import Document, Retriever
from agentr_core.tools.search.server import app
from agentr_core.tools.search.tool import MAX_QUERIES, MAX_QUERY_CHARS

RETRIEVER = Retriever.from_documents(
    [
        Document("a", "Ada", "Ada lives by the sea."),
        Document("b", "Sea", "Salt water. " * 50),
        Document("c", "", "Sand."),
    ]
)


def client(base_url: str = "http://localhost:1243", **options: Any) -> httpx.AsyncClient:
    server = app(RETRIEVER, hosts=LOOPBACK, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url=base_url)


async def test_documents_have_ids_and_contents_with_the_title_in_the_first_line() -> None:
    async with client() as http:
        answer = await http.post("/search", json={"query": "ADA"})
        assert answer.json() == [{"id": "a", "contents": "Ada\nAda lives by the sea."}]
        assert (await http.post("/search", json={"query": "sand"})).json() == [{"id": "c", "contents": "Sand."}]
        assert (await http.post("/search", json={"query": "zeppelin"})).json() == []
        assert len((await http.post("/search", json={"query": "sea", "top_n": 1})).json()) == 1


async def test_scores_come_on_request_in_the_same_shape() -> None:
    async with client() as http:
        documents, scores = (await http.post("/search", json={"query": "sea", "return_score": True})).json()
        assert len(documents) == len(scores) == 2
        assert scores[0] >= scores[1] > 0
        body = {"query": ["sea", "sand"], "top_n": 5, "return_score": True}
        batch, batch_scores = (await http.post("/batch_search", json=body)).json()
        assert batch[0] == documents
        assert batch_scores[0] == scores
        assert [len(documents_of_query) for documents_of_query in batch] == [2, 1]
        without = (await http.post("/batch_search", json={**body, "return_score": False})).json()
        assert without == batch


async def test_documents_are_bounded() -> None:
    async with client(document_chars=20) as http:
        (first, second) = (await http.post("/search", json={"query": "sea"})).json()
        assert {len(first["contents"]), len(second["contents"])} <= set(range(21))
        assert "Sea\nSalt water. S..." in (first["contents"], second["contents"])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/search", {"query": " "}, 400),
        ("/search", {"query": ""}, 400),
        ("/search", {}, 422),
        ("/search", {"query": ["sea"]}, 422),
        ("/search", {"query": "sea", "top_n": 0}, 422),
        ("/search", {"query": "sea", "top_n": 101}, 422),
        ("/search", {"query": "s" * (MAX_QUERY_CHARS + 1)}, 422),
        ("/batch_search", {"query": ["sea", "\t"]}, 400),
        ("/batch_search", {"query": "sea"}, 422),
        ("/batch_search", {"query": ["sea"] * (MAX_QUERIES + 1)}, 422),
    ],
)
async def test_what_is_no_query_is_refused_without_repeating_it(path: str, body: Any, status: int) -> None:
    async with client() as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == status
        assert len(answer.content) < 1000


async def test_web_pages_other_names_and_long_bodies_are_refused() -> None:
    async with client() as http:
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
            assert (await http.post("/search", json={"query": "sea"}, headers=headers)).status_code == 403
        assert (await http.get("/health", headers={"Host": "evil.example:1243"})).status_code == 403
        assert (await http.post("/search", content=b" " * (2**20 + 1))).status_code == 413
    for address in ("http://127.0.0.1:1243", "http://[::1]:1243"):
        async with client(address) as http:
            assert (await http.get("/health")).status_code == 200


async def test_health_tells_how_many_searches_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    start, end = threading.Event(), threading.Event()

    def slow(queries: Any, top_k: int) -> Any:
        start.set()
        end.wait(60)
        return [[]]

    monkeypatch.setattr(RETRIEVER, "search", slow)
    async with client(threads=3) as http:
        searching = asyncio.create_task(http.post("/search", json={"query": "sea"}))
        await asyncio.to_thread(start.wait, 60)
        health = (await http.get("/health")).json()
        assert health == {
            "status": "ok",
            "retrievers": {"total": 3, "available": 2},
            "fingerprint": RETRIEVER.fingerprint,
        }
        end.set()
        assert (await searching).json() == []
        assert (await http.get("/health")).json()["retrievers"]["available"] == 3
