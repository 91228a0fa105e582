"""The world as recipes use it: it takes their options, and opens tools and questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.data_files import data_path
from agentr_core.environments.reasoning.grammar import Answers
from agentr_core.environments.reasoning.judge import Judged
from agentr_core.environments.reasoning.open_tools import Searched, ToolSettings, open_tools
from agentr_core.environments.reasoning.question_sets import SHIPPED, load, place_of
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.protocols import Kept
from agentr_core.tools.search import Serper


class Reasoning(ReasoningWorld):
    """Questions from sets, answered by thinking, searching and calculating.

    Args:
        questions: sets, as `question_sets.load` takes them.
        tools, searched, search_url, corpus, cache_dir, web_url, search_api_key, top_k,
            document_chars, search_timeout_s, search_answer_mib, sandbox, python_timeout_s: see
            `ToolSettings`.
        python_calls, search_calls, calls, extra_calls, spare_replies, python_chars, search_chars,
            summarised, judged, success_from, answers: see `Rules`.

    Raises what `question_sets.load`, `open_tools` and `Rules` raise.
    """

    @staticmethod
    def version_of(options: Mapping[str, Any]) -> int:
        """Return 4: since version 2 code that failed is reported in another way, since version 3
        answers are compared by what they mean, and search finds documents in any script, since
        version 4 yes and no are right or wrong as a whole.
        """
        return 4

    def __init__(
        self,
        *,
        questions: Sequence[str] = SHIPPED,
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
        self._settings = ToolSettings(
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
        opened = open_tools(self._settings)
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
        self._reach, self._sandbox = opened.reach, opened.sandbox
        super().__init__(load(tuple(questions)), opened.toolbox, rules)

    @staticmethod
    def variables_of(options: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables that stand in for options. A server's address comes from one only
        where a recipe does not say what is searched: the value of a variable is no part of a run's
        id.
        """
        said = options.get("corpus") or options.get("searched") == "web"
        return {"search_api_key": "SERPER_API_KEY"} | ({} if said else {"search_url": "AGENTR_SEARCH_URL"})

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the question sets, and the corpus if it is searched in this process."""
        sets = [str(place_of(name)) if name in SHIPPED else name for name in options.get("questions", SHIPPED)]
        searches = "search" in options.get("tools", ("search",))
        elsewhere = options.get("search_url") or options.get("searched") == "web"
        own = options.get("corpus", "")
        shipped = searches and not own and not elsewhere
        return (*sets, *([own] if own else [str(data_path("reasoning", "corpus.jsonl"))] if shipped else []))

    def keep_answers(self, kept: Kept) -> None:
        """Keep the answers of search servers; see `protocols.Keeping`."""
        self._toolbox = open_tools(self._settings, kept).toolbox

    def reach(self) -> None:
        """Return once the search answers. Raises `EnvironmentFault` or `UserError` if it does
        not.
        """
        self._reach()

    def sandbox(self) -> str:
        """Return the level at which code of the model runs here; see `protocols.Sandboxed`."""
        return self._sandbox()
