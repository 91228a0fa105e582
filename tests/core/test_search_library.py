"""The library that indexes words is loaded without JAX, which would reserve the memory of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
from agentr_core.tools.search.retriever import Bm25Ranker
assert "jax" not in sys.modules
((row, _),) = Bm25Ranker.build(["a red door", "a blue cup"]).rank(["doors"], 2)[0]
assert row == 0
"""


@pytest.fixture
def with_jax(tmp_path: Path) -> dict[str, str]:
    """Return variables under which a package `jax` is installed that says when it is asked for a
    result, as JAX then reserves memory.
    """
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(scores, k):\n    print('reserves memory')\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}


def run(program: str, variables: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_library_alone_asks_jax(with_jax: dict[str, str]) -> None:
    assert run("import bm25s", with_jax) == "reserves memory\n"


def test_an_index_does_not_ask_jax(with_jax: dict[str, str]) -> None:
    assert run(PROGRAM, with_jax) == ""


def test_whoever_wants_jax_later_gets_it(with_jax: dict[str, str]) -> None:
    assert run(f"{PROGRAM}\nimport jax.lax\njax.lax.top_k([0], 1)", with_jax) == "reserves memory\n"
    assert run(f"import jax.lax\n{PROGRAM.replace('not in', 'in')}\njax.lax.top_k([0], 1)", with_jax) == (
        "reserves memory\n"
    )


def test_threads_may_need_their_first_index_at_once(with_jax: dict[str, str]) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
together = Barrier(8)
def first(_):
    together.wait()
    from agentr_core.tools.search.retriever import Bm25Ranker
    return len(Bm25Ranker.build(["a red door", "a blue cup"]).rank(["doors"], 2)[0])
with ThreadPoolExecutor(8) as threads:
    print(list(threads.map(first, range(8))))
"""
    assert run(program, with_jax) == f"{[1] * 8}\n"
