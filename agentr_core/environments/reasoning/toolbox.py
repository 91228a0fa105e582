"""The tools of the reasoning world: search and Python, opened once in a process and called through
one toolbox.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from agentr_core.environments.reasoning.grammar import PYTHON, SEARCH
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.protocols import AnswerStore
from agentr_core.recipes.fields import record
from agentr_core.system import LoopThread, data_path
from agentr_core.tools.python.confinement import STRICTEST, Level, Limits, Outcome
from agentr_core.tools.python.tool import PythonTool
from agentr_core.tools.search.retriever import open_retriever
from agentr_core.tools.search.tool import AnswerCache, LocalProvider, Provider, SearchTool, Serper, ServerProvider
from agentr_core.types import ToolCall

_NO_OUTPUT = "The code printed nothing."
_FAILURE_TEXT_BY_STATUS = {
    "timeout": "The code took too long and was ended.",
    "memory": "The code used too much memory and was ended.",
    "killed": "The code was ended.",
}


class Tools:
    """A toolbox of functions, each of which returns a call for a query.

    Args:
        functions: the functions, keyed by the name of the tool.
        blocking: whether any of them waits for something outside the process.
    """

    def __init__(self, functions: Mapping[str, Callable[[str], ToolCall]], *, blocking: bool) -> None:
        self.tools = tuple(functions)
        self.blocking = blocking
        self._functions = dict(functions)

    def call(self, tool: str, query: str) -> ToolCall:
        """Call a tool and return the call with its result; see `protocols.Toolbox`. Raises
        `EnvironmentFault` for an unknown tool.
        """
        if tool not in self._functions:
            raise EnvironmentFault(f"there is no tool {tool!r}; there are {', '.join(self.tools) or 'none'}")
        return self._functions[tool](query)


def python_function(
    run: Callable[[str], Coroutine[Any, Any, Outcome]],
    loop: LoopThread,
    *,
    provider: str,
    parameters: Mapping[str, Any],
) -> Callable[[str], ToolCall]:
    """Return the Python tool as a function for `Tools`.

    Args:
        run: a coroutine function that runs code, such as `PythonTool.run`.
        loop: the event loop in which the tool was started; each call waits for it.
        provider: how code is confined; recorded in each call, with `parameters`.
    """

    def call_python(code: str) -> ToolCall:
        outcome = loop.run(run(code))
        # The text for the model: what went wrong, then what was printed, which may be cut off.
        stdout = outcome.stdout.strip()
        if outcome.status == "ok":
            output = stdout
        elif outcome.status == "empty":
            output = _NO_OUTPUT
        else:
            exception = ""
            # If the code was killed, what it wrote to stderr before does not say why.
            if outcome.status == "exception":
                # The end of a traceback says what happened; its frames are of no use to a model.
                # Without a traceback, take the last line.
                _, frame, rest = f"\n{outcome.stderr.rstrip()}".rpartition('\n  File "')
                lines = rest.splitlines()[1:] if frame else outcome.stderr.strip().splitlines()[-1:]
                exception = "\n".join(dropwhile(lambda line: line.startswith("  "), lines))
            failure = exception or _FAILURE_TEXT_BY_STATUS.get(str(outcome.status), "The code failed.")
            output = "\n".join(filter(None, (failure, outcome.cause, stdout and f"Before that, it printed:\n{stdout}")))
        return ToolCall(
            tool=PYTHON,
            provider=provider,
            parameters=parameters,
            key=code.strip(),
            status=str(outcome.status),
            milliseconds=outcome.ms,
            output=output,
        )

    return call_python


# Values that a forked process cannot share with its parent: threads, connections, process
# pools.

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process makes for itself on first use. Threads share it.

    After a fork the child has copies of its parent's objects, but not the threads that serve them:
    a call would wait for ever for an event loop that no thread runs, or for a lock whose holder is
    gone. So the child forgets the value and makes its own. Source: POSIX `fork`, which copies only
    the calling thread.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values_of_parents: list[T] = []
        self._values: list[T] = []
        self._lock = threading.Lock()
        reference = weakref.ref(self)

        def forget_values() -> None:
            if (owner := reference()) is not None:
                # Kept alive, since its clean-up on garbage collection is left to the parent
                # process.
                owner._values_of_parents += owner._values
                owner._values, owner._lock = [], threading.Lock()

        os.register_at_fork(after_in_child=forget_values)

    def get(self) -> T:
        """Return the value of this process, making it if necessary. Raises what making it raises;
        the next call then tries again.
        """
        with self._lock:
            if not self._values:
                self._values.append(self._make())
            return self._values[0]


# The opened tools of the world: one search and one set of interpreters for all episodes of a
# process.

_TOOLS = (SEARCH, PYTHON)
Searched = Literal["corpus", "web"]
_SEARCHED = ("corpus", "web")


@record
class SourceSearch:
    """What is searched for the questions of one source. The fields are those of `ToolSettings`;
    None keeps the general setting. If any of `searched`, `search_url` and `corpus` is given, it
    replaces all three.
    """

    searched: Searched | None = None
    search_url: str | None = None
    corpus: str | None = None
    web_url: str | None = None
    top_k: int | None = None
    document_chars: int | None = None
    search_timeout_s: float | None = None
    search_answer_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """The available tools and their settings.

    `searched` is a corpus or the web. For a corpus, `search_url` is the address of a retrieval
    server; without one, `corpus`, a JSONL file, is searched in this process, by default the shipped
    encyclopaedia. The web is searched by serper.dev, or a compatible service at `web_url`, with the
    account of `search_api_key`. A search returns up to `top_k` documents, each cut to
    `document_chars` characters. An answer of a server may take `search_timeout_s` seconds, from the
    request to its last byte, and have `search_answer_mib` MiB.

    `sandbox` is a level of the Python tool, or `strictest`, which never selects a level at which
    code can use the user's files. A Python call may take `python_timeout_s` seconds; its CPU time
    is limited to these seconds, rounded up, or to `Limits.cpu_s` if that is more.
    """

    tools: tuple[str, ...] = _TOOLS
    searched: Searched = "corpus"
    search_url: str = ""
    corpus: str = ""
    cache_dir: str = "runs/cache/retrieval"
    web_url: str = Serper.URL
    search_api_key: str = field(default="", repr=False)
    top_k: int = 4
    document_chars: int = 1200
    search_timeout_s: float = 60.0
    search_answer_mib: int = 16
    sandbox: str = STRICTEST
    python_timeout_s: float = 30.0

    def for_source(self, search: SourceSearch) -> ToolSettings:
        """Return these settings changed for the questions of one source; see `SourceSearch`."""
        overrides = {name: value for name, value in vars(search).items() if value is not None}
        default_search = {"searched": "corpus", "search_url": "", "corpus": ""}
        return replace(self, **{**(default_search if default_search.keys() & overrides.keys() else {}), **overrides})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTools:
    """The opened tools, and functions that test them. `reach` returns once the search answers, and
    raises as `SearchTool.reach`. `sandbox` starts the Python tool and returns a description of its
    level, empty without that tool; it raises `SandboxError` if the requested level does not hold
    here.
    """

    toolbox: Tools
    reach: Callable[[], object]
    sandbox: Callable[[], str]


def open_tools(settings: ToolSettings, answers: AnswerStore | None = None) -> OpenTools:
    """Return the tools, which all environments with these settings share until the process ends. A
    forked process opens its own when it first calls them.

    Args:
        answers: a store that keeps answers of servers beyond the process; unused for a corpus in
            this process, which answers faster than any store.

    Raises:
        ConfigError: a tool or sandbox level is unknown, a number is out of its range, the address
            of the server is invalid, the key for the web is missing, or the settings name two
            things to search.
        DataFileError: the corpus is missing or malformed.
    """
    if unknown := [tool for tool in settings.tools if tool not in _TOOLS]:
        raise ConfigError(f"environment.options.tools: there is no tool {unknown[0]}; there are {', '.join(_TOOLS)}")
    if settings.searched not in _SEARCHED:
        raise ConfigError(f"environment.options.searched is {settings.searched!r}; it is {' or '.join(_SEARCHED)}")
    if settings.sandbox not in (STRICTEST, *Level):
        levels = ", ".join((STRICTEST, *Level))
        raise ConfigError(f"environment.options.sandbox is {settings.sandbox!r}; the Python tool has {levels}")
    if len(set(settings.tools)) < len(settings.tools):
        raise ConfigError("environment.options.tools names a tool twice; name each once")
    if not 0 < settings.python_timeout_s < math.inf:
        raise ConfigError(
            f"environment.options.python_timeout_s is {settings.python_timeout_s}; give a number of seconds above 0"
        )
    if settings.document_chars < 1:
        raise ConfigError(f"environment.options.document_chars is {settings.document_chars}; it must be at least 1")
    if not 0 < settings.search_timeout_s < math.inf:
        raise ConfigError(
            f"environment.options.search_timeout_s is {settings.search_timeout_s}; give a number of seconds above 0"
        )
    if settings.search_answer_mib < 1:
        raise ConfigError(f"environment.options.search_answer_mib is {settings.search_answer_mib}; give 1 or more")
    if settings.search_url and (settings.corpus or settings.searched == "web"):
        conflict = "corpus" if settings.corpus else "searched: web"
        raise ConfigError(
            f"environment.options.search_url is {settings.search_url!r} beside {conflict}, and one thing is searched; "
            "leave one of them out"
        )
    functions: dict[str, Callable[[str], ToolCall]] = {}
    reach: Callable[[], object] = str
    sandbox: Callable[[], str] = str
    if SEARCH in settings.tools:
        is_remote = settings.searched == "web" or settings.search_url
        search = _shared_search(settings, answers if is_remote else None)
        search.get()
        functions[SEARCH] = lambda query: search.get().call(query)
        reach = lambda: search.get().reach()  # noqa: E731
    if PYTHON in settings.tools:
        python = _shared_python(settings.sandbox, settings.python_timeout_s)
        functions[PYTHON] = lambda code: python.get().run(code)
        sandbox = lambda: python.get().level.describe()  # noqa: E731
    toolbox = Tools(functions, blocking=bool(functions))
    return OpenTools(toolbox=toolbox, reach=reach, sandbox=sandbox)


@lru_cache(maxsize=64)
def _shared_search(settings: ToolSettings, answers: AnswerStore | None) -> PerProcess[SearchTool]:
    return PerProcess(
        lambda: SearchTool(_provider(settings), cache=AnswerCache(answers), document_chars=settings.document_chars)
    )


@dataclass(frozen=True, slots=True)
class _PythonRunner:
    run: Callable[[str], ToolCall]
    level: Level


@lru_cache(maxsize=4)
def _shared_python(sandbox: str, timeout_s: float) -> PerProcess[_PythonRunner]:
    return PerProcess(
        lambda: _start_python(sandbox, Limits(timeout_s=timeout_s, cpu_s=max(Limits.cpu_s, math.ceil(timeout_s))))
    )


def _provider(settings: ToolSettings) -> Provider:
    top_k, timeout_s, answer_mib = settings.top_k, settings.search_timeout_s, settings.search_answer_mib
    if settings.searched == "web":
        key, url = settings.search_api_key, settings.web_url
        return Serper(key, top_k=top_k, url=url, timeout_s=timeout_s, answer_mib=answer_mib)
    if settings.search_url:
        return ServerProvider(settings.search_url, top_k=top_k, timeout_s=timeout_s, answer_mib=answer_mib)
    corpus = Path(settings.corpus) if settings.corpus else data_path("reasoning", "corpus.jsonl")
    return LocalProvider(open_retriever(corpus, Path(settings.cache_dir)), top_k=top_k)


def _start_python(sandbox: str, limits: Limits) -> _PythonRunner:
    """Start the Python tool and return it once it has tested itself. Raises `SandboxError` if its
    level does not hold.
    """
    loop, process_id = LoopThread(), os.getpid()
    tool = PythonTool(limits, sandbox)
    try:
        loop.run(tool.__aenter__())
    except BaseException:
        loop.close()
        raise

    def stop_python() -> None:
        # A forked process also calls this at its end, but the loop's thread does not exist there.
        if os.getpid() == process_id:
            loop.run(tool.__aexit__(None, None, None))
            loop.close()

    atexit.register(stop_python)
    run = python_function(tool.run, loop, provider=str(tool.level), parameters=asdict(limits))
    return _PythonRunner(run, tool.level)
