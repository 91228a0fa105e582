"""Answers of a search server are kept in the store of a run: a second run asks nothing, a killed
one asks nothing twice, and no error is kept.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from authors_files import web
from searching import QUESTIONS, counting, play
from wheel import PATIENCE, environment, launched, wait_for

from agentr_core.environments import registry
from agentr_core.environments.reasoning.toolbox import ToolSettings, open_tools
from agentr_core.environments.reasoning.world import Reasoning
from agentr_core.errors import ConfigError
from agentr_core.store.codec.trajectories import AnsweredCalls
from agentr_core.store.database import Store

pytestmark = pytest.mark.slow
SEARCHED = QUESTIONS + 1
"""Different queries of a run: one for each question, and one for all of them."""


def run_searches(root: Path, model: Path, url: str, *, seed: int = 0) -> None:
    command = [sys.executable, "-m", "searching", str(root), str(model), url, str(seed)]
    with launched(command, env=environment(root, root)) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err


@pytest.mark.long
def test_a_second_run_asks_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    with counting() as server:
        run_searches(tmp_path, tiny_model_dir, server.url)
        assert Counter(server.queries).most_common(1)[0][1] == 1
        assert len(server.queries) == SEARCHED
        calls = dict(store.rows("select cached, count(*) from tool_call group by all"))
        assert calls == {False: SEARCHED, True: QUESTIONS - 1}
        assert store.count("select count(*) from answered_call") == SEARCHED

        run_searches(tmp_path, tiny_model_dir, server.url, seed=1)
    assert len(server.queries) == SEARCHED
    calls = dict(store.rows("select cached, count(*) from tool_call group by all"))
    assert calls == {False: SEARCHED, True: 3 * QUESTIONS - 1}
    assert store.rows("from v_orphans") == []


def test_a_killed_run_asks_nothing_twice(tmp_path: Path, tiny_model_dir: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    command = [sys.executable, "-m", "searching", str(tmp_path), str(tiny_model_dir)]
    with counting() as server:
        server.most = 3
        with launched([*command, server.url, "0"], env=environment(tmp_path, tmp_path)) as process:
            wait_for(process, lambda: store.count("select count(*) from answered_call") == 3, store)
        keys = {key for (key,) in store.rows("select key from answered_call")}
        assert store.count("select count(*) from episode") < QUESTIONS
        before = len(server.queries)
        server.released.set()
        # What this process knows of searches, it has from the store.
        asyncio.run(play(tmp_path, tiny_model_dir, server.url, seed=0))
    assert keys == set(server.queries[:3])
    assert not keys & set(server.queries[before:]), "what was answered is not asked again"
    assert set(server.queries[before:]) | keys == set(server.queries)
    assert store.count("select count(*) from answered_call") == SEARCHED
    assert store.count("select count(*) from tool_call") == 2 * QUESTIONS


@pytest.mark.long
def test_an_error_is_not_kept(tmp_path: Path, tiny_model_dir: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    with counting() as server:
        server.refused = {"ada"}
        run_searches(tmp_path, tiny_model_dir, server.url)
        rows = store.rows("select cached, status from tool_call where key = 'ada'")
        assert rows == [(False, "error")] * QUESTIONS
        assert store.count("select count(*) from answered_call where key = 'ada'") == 0
        server.refused.clear()
        before = len(server.queries)
        run_searches(tmp_path, tiny_model_dir, server.url, seed=1)
    assert server.queries[before:] == ["ada"]
    assert store.count("select count(*) from answered_call where key = 'ada' and status = 'ok'") == 1


def test_a_corpus_of_this_process_is_not_kept(tmp_path: Path) -> None:
    answers = AnsweredCalls(Store(tmp_path / "store.duckdb"))
    world = Reasoning(tools=["search"], cache_dir=str(tmp_path / "cache"))
    world.keep_answers(answers)
    world.reset(world.instances("train")[0])
    assert world.step("<search>river</search>").info["tool_calls"][0].status == "ok"
    assert not (tmp_path / "store.duckdb").exists()


def test_a_variable_names_the_server_only_where_a_recipe_does_not_say_what_is_searched(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "title": "Ada", "contents": "Ada lives by the sea."}\n')
    options = {"tools": ["search"], "cache_dir": str(tmp_path / "cache")}
    variables = {"AGENTR_SEARCH_URL": "nowhere", "SERPER_API_KEY": "k"}
    with pytest.raises(ConfigError, match="'nowhere' is not an address"):
        registry.make("reasoning", options, variables)
    registry.make("reasoning", {**options, "searched": "web"}, variables)
    world = registry.make("reasoning", {**options, "corpus": str(corpus)}, variables)
    world.reset(world.instances("train")[0])
    assert "by the sea" in world.step("<search>Ada</search>").observation


def sets_of(folder: Path, *sources: str) -> list[dict[str, str]]:
    """Return a question set for each source, a question each."""
    rows = {source: folder / f"{source}.jsonl" for source in sources}
    for source, file in rows.items():
        file.write_text(json.dumps({"question": f"Who is Ada of {source}?", "answer": "Ada"}) + "\n")
    return [{"path": str(file), "source": source, "split": "test"} for source, file in rows.items()]


def test_one_run_searches_the_web_for_some_sources_a_server_and_corpora_for_others(tmp_path: Path) -> None:
    answers, corpus = AnsweredCalls(Store(tmp_path / "store.duckdb")), tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "title": "Ada", "contents": "Ada is in a file."}\n')
    with counting() as server, web() as (web_url, web_queries):
        options: dict[str, Any] = {
            "questions": sets_of(tmp_path, "aime24", "2wiki", "hotpotqa", "nq"),
            "tools": ["search"],
            "cache_dir": str(tmp_path / "cache"),
            "search_url": server.url,
            "web_url": web_url,
            "search_by_source": {
                "AIME-24": {"searched": "web", "top_k": 1},
                "2wiki": {"corpus": str(corpus)},
                "hotpotqa": {"document_chars": 8},
            },
        }
        assert registry.files_of("reasoning", options).keys() == {
            *(str(tmp_path / f"{source}.jsonl") for source in ("aime24", "2wiki", "hotpotqa", "nq")),
            str(corpus),
        }
        with pytest.raises(ConfigError, match="web search needs the key"):
            registry.make("reasoning", options)
        world = registry.make("reasoning", options, {"SERPER_API_KEY": "k"})
        assert isinstance(world, Reasoning)
        world.reach()
        world.keep_answers(answers)
        calls = []
        for instance in world.instances("test"):
            world.reset(instance)
            calls += world.step("<search>Ada</search>").info["tool_calls"]
    assert [(call.provider, call.output) for call in calls] == [
        ("serper", "A page\nfound outside"),
        ("bm25", "Ada\nAda is in a file."),
        ("server", "Ada\nA..."),
        ("server", "Ada\nAda lives by the sea."),
    ]
    assert (web_queries, server.queries) == (["ada"], ["ada", "ada"])
    assert len(answers.identities()) == 3, "what servers answered is kept, each by itself"


def test_a_search_by_source_that_cannot_be_is_told(tmp_path: Path) -> None:
    sets = sets_of(tmp_path, "aime24", "2wiki")

    def make_world(**options: Any) -> Reasoning:
        world = registry.make("reasoning", {"questions": sets, "cache_dir": str(tmp_path), **options})
        assert isinstance(world, Reasoning)
        return world

    with pytest.raises(ConfigError, match="no question has the source nq; there are aime24, 2wiki"):
        make_world(search_by_source={"nq": {"searched": "web"}})
    with pytest.raises(ConfigError, match="names aime24 twice"):
        make_world(search_by_source={"aime24": {"top_k": 1}, "AIME24": {"top_k": 2}})
    with pytest.raises(ConfigError, match="search is not among environment"):
        make_world(tools=["python"], search_by_source={"aime24": {"top_k": 1}})
    with pytest.raises(ConfigError, match="search_by_source: there is no field python_timeout_s"):
        make_world(search_by_source={"aime24": {"python_timeout_s": 1}})
    with pytest.raises(ConfigError, match=r"search_by_source\.aime24: .* one thing is searched"):
        make_world(tools=["search"], search_by_source={"aime24": {"searched": "web", "search_url": "http://there"}})
    # What no question searches is not opened.
    corpora = {name: {"corpus": str(tmp_path / "corpus.jsonl")} for name in ("aime24", "2wiki")}
    tmp_path.joinpath("corpus.jsonl").write_text('{"id": "a", "contents": "Ada."}\n')
    make_world(tools=["search"], search_url="http://127.0.0.1:9", search_by_source=corpora).reach()


def test_the_web_needs_a_key_and_no_error_shows_it() -> None:
    with pytest.raises(ConfigError, match="needs the key"):
        open_tools(ToolSettings(searched="web"))
    with pytest.raises(ConfigError, match="searched is 'moon'; it is corpus or web"):
        open_tools(ToolSettings(searched="moon"))  # type: ignore[arg-type]
    for options in ({"corpus": "c.jsonl"}, {"searched": "web"}):
        with pytest.raises(ConfigError, match=f"search_url is 'http://there' beside {next(iter(options))}"):
            open_tools(ToolSettings(search_url="http://there", **options))  # type: ignore[arg-type]
    assert "0123456789" not in repr(ToolSettings(search_api_key="0123456789"))
