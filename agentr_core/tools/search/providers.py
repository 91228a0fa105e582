"""Providers of answers to queries: a retriever in this process, a retrieval server, a web
search.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentr_core.errors import ConfigError, MalformedAnswer
from agentr_core.retrying import RetryPolicy
from agentr_core.tools.search.connection import Connection
from agentr_core.tools.search.corpus import Document
from agentr_core.tools.search.retriever import Retriever
from agentr_core.tools.search.wire import MOST_RESULTS, FoundDocument, Health, Search

PATIENCE = RetryPolicy(retries=7, seconds=60)
T = TypeVar("T")


class Provider(Protocol):
    """A source of answers to queries. Threads share it."""

    @property
    def name(self) -> str:
        """The name of the provider, such as bm25, server or serper."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Return the settings that, besides the query, determine the answer. May ask the server;
        raises as `ask`.

        Providers with equal parameters give the same answers, as far as the web does.
        """
        ...

    def ask(self, query: str) -> list[Document]:
        """Return the documents that a query finds, the best first.

        Raises:
            EnvironmentFault: the provider failed this time; see `Connection.post`.
            UserError: the provider cannot be used at all.
        """
        ...


class InProcess:
    """A provider that asks a retriever in this process."""

    def __init__(self, retriever: Retriever, *, top_k: int) -> None:
        self.name = retriever.name
        self.parameters = {"top_k": _checked(top_k), "fingerprint": retriever.fingerprint}
        self._retriever = retriever
        self._top_k = top_k

    def ask(self, query: str) -> list[Document]:
        """See `Provider.ask`."""
        return [hit.document for hit in self._retriever.search([query], self._top_k)[0]]


class RetrievalServer:
    """A provider over a server with the contract in `wire`, such as `agentr retrieve serve`."""

    name = "server"

    def __init__(
        self, url: str, *, top_k: int, timeout_s: float = 60.0, answer_mib: int = 16, policy: RetryPolicy = PATIENCE
    ) -> None:
        self._connection = Connection(url, policy=policy, timeout_s=timeout_s, answer_mib=answer_mib)
        self._top_k = _checked(top_k)
        self._fingerprint = ""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """See `Provider.parameters`: the server's corpus and ranking, or its address if it does not
        say.
        """
        if not self._fingerprint:
            told = _read(Health, self._connection.url, self._connection.get("/health"))
            self._fingerprint = told.fingerprint or self._connection.url
        return {"top_k": self._top_k, "fingerprint": self._fingerprint}

    def ask(self, query: str) -> list[Document]:
        """See `Provider.ask`."""
        answer = self._connection.post("/search", Search(query=query, top_n=self._top_k).model_dump())
        return [
            Document(each.id, "", each.contents) for each in _read(list[FoundDocument], self._connection.url, answer)
        ]


class Serper:
    """A provider that asks Google through serper.dev, whose key costs money. Documents are the
    snippets shown; the pages themselves are not fetched.

    Args:
        key: written `${VARIABLE}` in a recipe.
        language: two letters, such as en.
        country: two letters, such as us.
        a_second: the most requests per second, over all threads.
    """

    URL: Final = "https://google.serper.dev"
    name = "serper"

    def __init__(
        self,
        key: str,
        *,
        top_k: int,
        language: str = "en",
        country: str = "us",
        a_second: float = 2.0,
        url: str = URL,
        timeout_s: float = 20.0,
        answer_mib: int = 16,
        policy: RetryPolicy = PATIENCE,
    ) -> None:
        if not key:
            raise ConfigError("web search needs the key of a serper.dev account; write ${VARIABLE} and export it")
        elsewhere = {} if url == self.URL else {"url": url}
        self.parameters = {"top_k": _checked(top_k), "language": language, "country": country, **elsewhere}
        self._body = {"num": top_k, "hl": language, "gl": country}
        self._top_k = top_k
        self._pace = Pace(a_second)
        self._connection = Connection(
            url, policy=policy, timeout_s=timeout_s, answer_mib=answer_mib, headers={"X-API-KEY": key}, secret=key
        )

    def ask(self, query: str) -> list[Document]:
        """See `Provider.ask`: pages whose snippets differ."""
        self._pace.wait()
        answer = self._connection.post("/search", {"q": query, **self._body})
        organic = answer.get("organic", []) if isinstance(answer, dict) else answer
        found: dict[str, Document] = {}
        for page in _read(list[_Page], self._connection.url, organic):
            found.setdefault(page.snippet, Document(page.link, page.title, page.snippet))
        return [document for snippet, document in found.items() if snippet.strip()][: self._top_k]


class _Page(BaseModel):
    link: str = ""
    title: str = ""
    snippet: str = ""


class Pace:
    """A gate that lets threads through at most a given number of times per second."""

    def __init__(self, a_second: float) -> None:
        if a_second <= 0:
            raise ConfigError("requests a second must be above 0")
        self._apart = 1 / a_second
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when it is the caller's turn."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._apart
        time.sleep(max(0.0, turn - time.monotonic()))


def _read(kind: type[T], where: str, answer: Any) -> T:
    try:
        return TypeAdapter(kind).validate_python(answer)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"])) or "it"
        raise MalformedAnswer(f"{where} did not answer with a list of results: {place}: {fault['msg']}") from None


def _checked(top_k: int) -> int:
    if not 1 <= top_k <= MOST_RESULTS:
        raise ConfigError(f"a search gives from 1 to {MOST_RESULTS} documents, not {top_k}")
    return top_k
