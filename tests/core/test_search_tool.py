"""The search tool: one answer for what asks the same, statuses, and real servers that fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asgi import running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentServerError,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    MalformedAnswer,
)
from agentr_core.models.connections import MIB
from agentr_core.store.codec.trajectories import AnsweredCalls
from agentr_core.store.database import Store
from agentr_core.system import RetryPolicy
from agentr_core.tools.search.retriever import Document, Retriever, format_documents, normalise
from agentr_core.tools.search.server import app
from agentr_core.tools.search.tool import (
    AnswerCache,
    CallCombiner,
    LocalProvider,
    RateLimiter,
    SearchTool,
    Serper,
    ServerProvider,
)
from agentr_core.types import ToolCall

DOCUMENTS = [Document("a", "Ada", "Ada lives by the sea."), Document("b", "", "The sea is salt water.")]
KEY = "0123456789abcdef"
ONE_TRY = RetryPolicy(retries=0, seconds=1)
Answer = Callable[[Request], Response]


class Counting:
    """A provider that counts what it is asked, waits to be let go on, and may fail."""

    name = "counting"

    def __init__(self) -> None:
        self.parameters = {"top_k": 2}
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.fault: Exception | None = None

    def ask(self, query: str) -> list[Document]:
        self.asked.append(query)
        assert self.go_on.wait(60)
        if self.fault is not None:
            raise self.fault
        return DOCUMENTS if query != "nothing" else []


@contextmanager
def answering(*answers: Answer) -> Iterator[tuple[str, list[Request]]]:
    """Run a web server that gives these answers in turn, the last one again and again; lend its
    address and the requests that it saw.
    """
    requests: list[Request] = []

    async def answer(request: Request) -> Response:
        await request.body()
        requests.append(request)
        return answers[min(len(requests), len(answers)) - 1](request)

    with running(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])) as url:
        yield url, requests


def pages(*snippets: str) -> Answer:
    results = [{"title": f"T{n}", "link": f"http://{n}.example", "snippet": text} for n, text in enumerate(snippets)]
    return lambda _: JSONResponse({"organic": results})


def status(code: int, words: str = "no", **headers: str) -> Answer:
    return lambda _: Response(words, code, {name.replace("_", "-"): value for name, value in headers.items()})


def test_a_call_is_a_record_of_what_was_asked_and_found() -> None:
    retriever = Retriever.from_documents(DOCUMENTS)
    call = SearchTool(LocalProvider(retriever, top_k=2), document_chars=12).call(" Salt\nSEA ")
    assert call == ToolCall(
        tool="search",
        provider="bm25",
        parameters={"top_k": 2, "fingerprint": retriever.fingerprint, "document_chars": 12},
        key="salt sea",
        status="ok",
        milliseconds=call.milliseconds,
        output="The sea i...\n\nAda\nAda l...",
    )
    assert 0 < call.milliseconds < 60_000


@pytest.mark.parametrize(
    ("query", "said"), [("", "blank"), (" \n", "blank"), ("x" * 2001, "more than 2000"), ("\ud800", "not valid text")]
)
def test_what_is_no_query_is_told_so_and_nobody_is_asked(query: str, said: str) -> None:
    provider = Counting()
    call = SearchTool(provider).call(query)
    assert call.status == "invalid"
    assert said in call.output
    assert provider.asked == []


def test_equal_queries_are_asked_once() -> None:
    provider = Counting()
    tool = SearchTool(provider)
    calls = [tool.call(query) for query in ("Who is  Ada?", "who is ada?", "WHO IS \uff21da?", "who is ada")]
    assert provider.asked == ["who is ada?", "who is ada"]
    assert [call.cached for call in calls] == [False, True, True, False]
    assert len({call.output for call in calls}) == 1
    assert [tool.call("nothing").status, tool.call("nothing").cached] == ["empty", True]


def test_equal_queries_under_way_are_asked_once() -> None:
    provider = Counting()
    provider.go_on.clear()
    tool = SearchTool(provider)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(tool.call, "Ada") for _ in range(8)]
        while not provider.asked:
            time.sleep(0.001)
        provider.go_on.set()
        assert sorted(call.result(60).cached for call in calls) == [False, *[True] * 7]
    assert provider.asked == ["ada"]


def test_a_failure_reaches_all_who_wait_and_is_not_kept(tmp_path: Path) -> None:
    provider = Counting()
    provider.fault = EnvironmentUnavailable("the server sleeps")
    tool = SearchTool(provider, cache=AnswerCache(AnsweredCalls(Store(tmp_path / "s.duckdb"))))
    with pytest.raises(EnvironmentUnavailable, match="the server sleeps"):
        tool.call("Ada")
    provider.fault = EnvironmentServerError("wrong key")
    with pytest.raises(EnvironmentServerError, match="wrong key"):
        tool.call("Ada")
    provider.fault = None
    assert [(call.status, call.cached) for call in (tool.call("Ada"), tool.call("Ada"))] == [
        ("ok", False),
        ("ok", True),
    ]
    assert provider.asked == ["ada"] * 3


def test_memory_is_bounded_by_what_was_used_longest_ago() -> None:
    provider = Counting()
    tool = SearchTool(provider, cache=AnswerCache(max_answers=2))
    for query in ("a", "b", "a", "c", "a", "b"):
        tool.call(query)
    assert provider.asked == ["a", "b", "c", "b"]


def test_answers_outlive_a_process_in_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    provider = Counting()
    first_call = SearchTool(provider, cache=AnswerCache(AnsweredCalls(store))).call("Ada")
    second_call = SearchTool(provider, cache=AnswerCache(AnsweredCalls(store))).call("ADA")
    assert provider.asked == ["ada"]
    assert second_call == replace(first_call, cached=True, milliseconds=second_call.milliseconds)
    ((tool, name, key, call_status),) = store.rows("select tool, provider, key, status from answered_call")
    assert (tool, name, key, call_status) == ("search", "counting", "ada", "ok")
    assert store.rows("from v_orphans") == []


def test_what_is_wanted_at_one_time_goes_through_together() -> None:
    arrival, release = threading.Event(), threading.Event()
    batches: list[list[str]] = []

    def work(calls: Sequence[ToolCall]) -> dict[str, ToolCall]:
        batches.append([call.key for call in calls])
        arrival.set()
        assert release.wait(60)
        if "bad" in batches[-1] and len(batches) == 2:
            raise EnvironmentUnavailable("busy")
        return {call.identity: replace(call, output=call.key.upper()) for call in calls if call.key != "none"}

    combiner = CallCombiner(work)
    with ThreadPoolExecutor(4) as threads:
        first_future = threads.submit(combiner.submit, ToolCall(tool="t", key="a"))
        assert arrival.wait(60)
        futures = {key: threads.submit(combiner.submit, ToolCall(tool="t", key=key)) for key in ("bad", "b", "none")}
        while len(combiner._waiting_calls) < 3:
            time.sleep(0.001)
        release.set()
        assert first_future.result(60).output == "A"  # type: ignore[union-attr]
        answers = {key: future.result() for key, future in futures.items() if future.exception(60) is None}
    assert len(answers) == 2, "who worked for the others failed; these tried again"
    assert {key: call and call.output for key, call in answers.items()} == {
        key: text for key, text in {"bad": "BAD", "b": "B", "none": None}.items() if key in answers
    }
    assert batches[0] == ["a"]
    assert sorted(batches[1]) == ["b", "bad", "none"]


def test_other_parameters_are_another_question() -> None:
    cache = AnswerCache()
    base, top_three = Counting(), Counting()
    top_three.parameters = {"top_k": 3}
    for provider, chars in ((base, 100), (top_three, 100), (base, 50), (base, 100)):
        SearchTool(provider, cache=cache, document_chars=chars).call("Ada")
    assert (len(base.asked), len(top_three.asked)) == (2, 1)


@pytest.mark.slow
def test_a_retrieval_server_answers_as_its_retriever_does() -> None:
    retriever = Retriever.from_documents(DOCUMENTS)
    with running(app(retriever)) as url:
        server_tool = SearchTool(ServerProvider(url, top_k=2))
        local_tool = SearchTool(LocalProvider(retriever, top_k=2))
        for query in ("the sea", "Ada", "zeppelin", " "):
            remote_call, local_call = server_tool.call(query), local_tool.call(query)
            assert (remote_call.status, remote_call.output) == (local_call.status, local_call.output)
        assert server_tool.call("Ada").parameters["fingerprint"] == retriever.fingerprint


def test_a_server_that_is_not_ours_is_known_by_its_address() -> None:
    health = {"status": "healthy", "retrievers": {"total": 1, "available": 1}}
    with answering(lambda _: JSONResponse(health)) as (url, _):
        assert ServerProvider(url, top_k=2).parameters == {"top_k": 2, "fingerprint": url}


@pytest.mark.slow
def test_what_may_pass_is_tried_again_and_what_may_not_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("agentr_core.tools.search.tool.time.sleep", waits.append)
    busy = [status(503), status(429, retry_after="7"), status(500)]
    with answering(*busy, pages("found")) as (url, requests):
        call = SearchTool(Serper(KEY, top_k=3, url=url)).call("q")
        assert (call.status, call.output, len(requests)) == ("ok", "T0\nfound", 4)
        assert max(waits) >= 7
    with answering(status(503, "down")) as (url, requests):
        with pytest.raises(EnvironmentUnavailable, match="/search answered 503: down"):
            SearchTool(Serper(KEY, top_k=3, url=url)).call("q")
        assert len(requests) == 8
    with answering(status(400, "too odd")) as (url, requests):
        assert SearchTool(Serper(KEY, top_k=3, url=url)).call("q").status == "error"
        assert len(requests) == 1


@pytest.mark.slow
def test_an_answer_that_does_not_come_in_time_is_a_timeout() -> None:
    def late(_: Request) -> Response:
        time.sleep(1)
        return JSONResponse({})

    with answering(late) as (url, _):
        began = time.monotonic()
        with pytest.raises(EnvironmentTimeout, match=r"gave no answer within 0\.1 s"):
            SearchTool(Serper(KEY, top_k=3, url=url, timeout_s=0.1, policy=ONE_TRY)).call("q")
        assert time.monotonic() - began < 0.9


@pytest.mark.slow
def test_the_time_limit_is_for_the_whole_answer_and_not_for_each_part_of_it() -> None:
    async def drops() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.05)

    with answering(lambda _: StreamingResponse(drops())) as (url, _):
        began = time.monotonic()
        with pytest.raises(EnvironmentTimeout, match=r"gave no answer within 0\.4 s"):
            SearchTool(ServerProvider(url, top_k=3, timeout_s=0.4, policy=ONE_TRY)).call("q")
        assert time.monotonic() - began < 2


LARGE = b'{"organic": []}' + b" " * MIB


@pytest.mark.parametrize(
    ("content", "packed", "error", "said"),
    [
        (LARGE, None, EnvironmentFault, "it has more than 1 MiB; raise environment.options.search_answer_mib"),
        (gzip.compress(LARGE, mtime=0), "gzip", EnvironmentFault, "it has more than 1 MiB"),
        (zlib.compress(LARGE), "deflate", EnvironmentFault, "it has more than 1 MiB"),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip", MalformedAnswer, "it is cut off"),
        (b"{}", "gzip", MalformedAnswer, "it cannot be unpacked"),
        (b"{}", "br", MalformedAnswer, "it is packed as 'br', which was not asked for"),
    ],
)
def test_a_large_answer_is_not_read_to_its_end(
    content: bytes, packed: str | None, error: type[Exception], said: str
) -> None:
    headers = {"content-encoding": packed} if packed else {}
    with answering(lambda _: Response(content, headers=headers)) as (url, requests):
        with pytest.raises(error, match=said):
            Serper(KEY, top_k=3, url=url, answer_mib=1, policy=ONE_TRY).ask("q")
        assert requests[0].headers["accept-encoding"] == "gzip"


def test_a_packed_answer_is_read() -> None:
    content = gzip.compress(json.dumps({"organic": [{"snippet": "one"}]}).encode())
    with answering(lambda _: Response(content, headers={"content-encoding": "gzip"})) as (url, _):
        assert [document.contents for document in Serper(KEY, top_k=3, url=url).ask("q")] == ["one"]


def test_a_server_that_is_gone_is_a_fault_and_no_result() -> None:
    with running(Starlette()) as url:
        pass
    tool = SearchTool(ServerProvider(url, top_k=2, policy=ONE_TRY))
    for use in (tool.reach, lambda: tool.call("q")):
        with pytest.raises(EnvironmentUnavailable, match="cannot be reached"):
            use()


def test_serper_is_asked_with_the_key_and_pages_with_one_snippet_are_one() -> None:
    with answering(pages("one", "two", "one", "", "three")) as (url, requests):
        call = SearchTool(Serper(KEY, top_k=2, url=url, country="de", language="de")).call("Was ist 1+1?")
    assert call.output == "T0\none\n\nT1\ntwo"
    assert call.parameters == {"top_k": 2, "language": "de", "country": "de", "url": url, "document_chars": 1200}
    (request,) = requests
    assert request.headers["x-api-key"] == KEY
    assert KEY not in str(call)


def test_serper_without_results_is_empty() -> None:
    with answering(lambda _: JSONResponse({"searchParameters": {}})) as (url, _):
        assert SearchTool(Serper(KEY, top_k=2, url=url)).call("q").status == "empty"


@pytest.mark.parametrize("body", [[1], {"organic": "x"}, {"organic": [{"title": 3}]}])
def test_an_answer_in_another_form_is_a_fault(body: Any) -> None:
    with (
        answering(lambda _: JSONResponse(body)) as (url, _),
        pytest.raises(MalformedAnswer, match="not answer with a list of results"),
    ):
        Serper(KEY, top_k=2, url=url).ask("q")


def test_a_refused_key_is_the_users_mistake_and_is_not_repeated() -> None:
    with answering(status(403, f"key {KEY} is unknown")) as (url, _):
        with pytest.raises(EnvironmentServerError, match="refuses the key") as caught:
            SearchTool(Serper(KEY, top_k=2, url=url)).call("q")
        assert KEY not in str(caught.value)
        assert "***" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"), [(402, "pay"), (400, "Not enough credits"), (400, "The quota of this month is used up.")]
)
def test_an_empty_account_is_told_to_the_user_and_not_to_the_model(code: int, words: str) -> None:
    with answering(status(code, words)) as (url, requests):
        with pytest.raises(EnvironmentServerError, match=f"has no credit left .{code}: {words}.; pay for more"):
            SearchTool(Serper(KEY, top_k=2, url=url)).call("q")
        assert len(requests) == 1
        if code == 400:
            assert SearchTool(ServerProvider(url, top_k=2)).call("q").status == "error", "which has no account"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Serper("", top_k=2), "needs the key"),
        (lambda: Serper("a b", top_k=2), "the key for .* has spaces"),
        (lambda: Serper(KEY, top_k=0), "from 1 to 100 documents, not 0"),
        (lambda: Serper(KEY, top_k=1, a_second=0), "above 0"),
        (lambda: ServerProvider("localhost", top_k=2), "it must look like http://127.0.0.1:1243"),
    ],
)
def test_settings_are_checked_at_once(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_threads_share_a_pace() -> None:
    pace = RateLimiter(100)
    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: pace.wait(), range(11)))
    assert time.monotonic() - began >= 0.1


def test_texts_in_normal_form_and_bounded() -> None:
    assert normalise("  \uff23++  or\tC ") == "c++ or c"
    assert format_documents(DOCUMENTS, document_chars=10_000) == "Ada\nAda lives by the sea.\n\nThe sea is salt water."
    for chars in range(1, 30):
        assert all(len(part) <= chars for part in format_documents(DOCUMENTS, document_chars=chars).split("\n\n"))
