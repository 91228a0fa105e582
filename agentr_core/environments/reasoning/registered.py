"""The world as recipes use it: it takes their options, and opens tools and questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.environments.reasoning.grammar import SEARCH, Answers
from agentr_core.environments.reasoning.problems import Judged, source_key
from agentr_core.environments.reasoning.question_sets import (
    SHIPPED,
    QuestionFile,
    QuestionSet,
    load,
    place_of,
    question_file,
)
from agentr_core.environments.reasoning.scoring import Domain
from agentr_core.environments.reasoning.toolbox import OpenTools, Searched, SourceSearch, ToolSettings, open_tools
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.errors import ConfigError
from agentr_core.protocols import AnswerStore, Toolbox
from agentr_core.system import data_path
from agentr_core.tools.search.tool import Serper


class Reasoning(ReasoningWorld):
    """Questions from sets, answered by thinking, searching and calculating.

    Args:
        questions, domains: sets, and the domains of further sources, as `question_sets.load` takes
            them.
        tools, searched, search_url, corpus, cache_dir, web_url, search_api_key, top_k,
            document_chars, search_timeout_s, search_answer_mib, sandbox, python_timeout_s: see
            `ToolSettings`.
        search_by_source: what the questions of some sources search instead, by source.
        python_calls, search_calls, calls, extra_calls, spare_replies, python_chars, search_chars,
            summarised, judged, success_from, answers: see `Rules`.

    Raises what `question_sets.load`, `open_tools` and `Rules` raise, and `ConfigError` where
    `search_by_source` names a source that no question has.
    """

    @staticmethod
    def version_of(options: Mapping[str, Any]) -> int:
        """Return 4: since version 2 code that failed is reported in another way, since version 3
        answers are compared by what they mean, and search finds documents in any script, since
        version 4 yes and no are right or wrong as a whole.
        """
        return 4

    # The registry reads the options of a recipe from this signature, so it is long: records as
    # parameters would put the nesting of the code into every recipe.
    def __init__(
        self,
        *,
        questions: Sequence[str | QuestionFile] = SHIPPED,
        domains: Mapping[str, Domain] | None = None,
        tools: Sequence[str] = ("search", "python"),
        searched: Searched = "corpus",
        search_url: str = "",
        corpus: str = "",
        cache_dir: str = "runs/cache/retrieval",
        web_url: str = Serper.URL,
        search_api_key: str = "",
        top_k: int = 4,
        document_chars: int = 1200,
        search_timeout_s: float = 60.0,
        search_answer_mib: int = 16,
        search_by_source: Mapping[str, SourceSearch] | None = None,
        sandbox: str = "strictest",
        python_timeout_s: float = 30.0,
        python_calls: int = 6,
        search_calls: int = 6,
        calls: int = 0,
        extra_calls: int = 0,
        spare_replies: int = 1,
        python_chars: int = 1000,
        search_chars: int = 5000,
        summarised: bool = False,
        judged: Judged = "none",
        success_from: float = 0.8,
        answers: Answers = "plain",
    ) -> None:
        settings = ToolSettings(
            tools=tuple(tools),
            searched=searched,
            search_url=search_url,
            corpus=corpus,
            cache_dir=cache_dir,
            web_url=web_url,
            search_api_key=search_api_key,
            top_k=top_k,
            document_chars=document_chars,
            search_timeout_s=search_timeout_s,
            search_answer_mib=search_answer_mib,
            sandbox=sandbox,
            python_timeout_s=python_timeout_s,
        )
        rules = Rules(
            python_calls=python_calls,
            search_calls=search_calls,
            calls=calls,
            extra_calls=extra_calls,
            spare_replies=spare_replies,
            python_chars=python_chars,
            search_chars=search_chars,
            summarised=summarised,
            judged=judged,
            success_from=success_from,
            answers=answers,
        )
        files = tuple(map(question_file, questions))
        problems = load(files, tuple((domains or {}).items()))
        self._settings = _settings_of_sources(settings, search_by_source or {}, problems)
        self._open_tools = _open_all(self._settings)
        toolbox, by_source = _toolboxes(self._open_tools)
        super().__init__(problems, toolbox, rules, by_source)

    @staticmethod
    def variables_of(options: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables that stand in for options. A server's address comes from one only
        where a recipe does not say what is searched: the value of a variable is no part of a run's
        id.
        """
        is_local = options.get("corpus") or options.get("searched") == "web"
        return {"search_api_key": "SERPER_API_KEY"} | ({} if is_local else {"search_url": "AGENTR_SEARCH_URL"})

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the question sets, and each corpus that is searched in this process."""
        names = [question_file(entry).path for entry in options.get("questions", SHIPPED)]
        sets = [str(place_of(name)) if name in SHIPPED else name for name in names]
        searches = "search" in options.get("tools", ("search",))
        elsewhere = options.get("search_url") or options.get("searched") == "web"
        corpus = options.get("corpus", "")
        shipped = searches and not corpus and not elsewhere
        source_corpora = [fields.get("corpus") for fields in (options.get("search_by_source") or {}).values()]
        corpora = [corpus or (str(data_path("reasoning", "corpus.jsonl")) if shipped else ""), *source_corpora]
        return (*sets, *dict.fromkeys(corpus for corpus in corpora if corpus))

    def keep_answers(self, kept: AnswerStore) -> None:
        """Keep the answers of search servers."""
        self._toolbox, self._by_source = _toolboxes(_open_all(self._settings, kept))

    def reach(self) -> None:
        """Return once every search answers. Raises `EnvironmentFault` or `UserError` if one does
        not.
        """
        for tools in self._open_tools.values():
            tools.reach()

    def start_hint(self) -> str:
        """Return how a server of documents is started."""
        return "`agentr retrieve serve CORPUS` starts one for documents of yours"

    def sandbox(self) -> str:
        """Return the level at which code of the model runs here."""
        return next(iter(self._open_tools.values())).sandbox()


def _settings_of_sources(
    settings: ToolSettings, searches: Mapping[str, Any], questions: QuestionSet
) -> dict[str, ToolSettings]:
    """Return the settings of the tools by `source_key`; those under the empty string are for all
    other sources, if there are any.
    """
    where = "environment.options.search_by_source"
    if searches and SEARCH not in settings.tools:
        raise ConfigError(f"{where}: {SEARCH} is not among environment.options.tools; add it, or leave this out")
    sources = {source_key(problem.source): problem.source for problems in questions.values() for problem in problems}
    by_source: dict[str, ToolSettings] = {}
    for source, fields in searches.items():
        key = source_key(source)
        if key not in sources:
            raise ConfigError(f"{where}: no question has the source {source}; there are {', '.join(sources.values())}")
        if key in by_source:
            raise ConfigError(f"{where} names {sources[key]} twice; name each source once")
        by_source[key] = settings.of_source(SourceSearch(**fields) if isinstance(fields, Mapping) else fields)
    return ({"": settings} if sources.keys() - by_source.keys() else {}) | by_source


def _open_all(settings: Mapping[str, ToolSettings], kept: AnswerStore | None = None) -> dict[str, OpenTools]:
    open_by_source: dict[str, OpenTools] = {}
    for source, tools in settings.items():
        try:
            open_by_source[source] = open_tools(tools, kept)
        except ConfigError as error:
            if not source:
                raise
            raise ConfigError(f"environment.options.search_by_source.{source}: {error}") from None
    return open_by_source


def _toolboxes(open_by_source: Mapping[str, OpenTools]) -> tuple[Toolbox, Mapping[str, Toolbox]]:
    """Return the toolbox of most questions, and those of the sources that have their own."""
    toolboxes = {source: tools.toolbox for source, tools in open_by_source.items()}
    return toolboxes.get("") or next(iter(toolboxes.values())), toolboxes
