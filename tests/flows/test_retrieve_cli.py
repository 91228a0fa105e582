"""`agentr retrieve serve`: a real server in a process of its own."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
from click.testing import CliRunner
from wheel import started

from agentr_core.errors import DataFileError
from agentr_core.tools.search.tool import SearchTool, ServerProvider
from flows.cli import cli


def test_a_corpus_is_served_until_interrupted(process_env: dict[str, str], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": 1, "title": "Ada", "contents": "Ada lives by the sea."}), "utf-8")
    words = ("retrieve", "serve", corpus, "--port", "0", "--index", tmp_path / "index")
    with started(*words, env=process_env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"1 documents of .*corpus\.jsonl are searched at (http://127\.0\.0\.1:\d+)/search", line)
        assert match, line + (process.stderr.read() if process.stderr else "")
        assert httpx.get(f"{match[1]}/health").json()["status"] == "ok"
        call = SearchTool(ServerProvider(match[1], top_k=3)).call("Ada")
        assert (call.status, call.output) == ("ok", "Ada\nAda lives by the sea.")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path) -> None:
    words = ["retrieve", "serve", str(tmp_path / "none.jsonl"), "--index", str(tmp_path / "index")]
    assert isinstance(CliRunner().invoke(cli, words).exception, DataFileError)
