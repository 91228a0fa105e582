"""Miniatures of the question files that ET-Agent's authors publish, that the loaders in its code
read, and of the corpora that it trains on, and a web search. No question is theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from asgi import running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

WALK = {"id": 7, "problem": "How far?", "question": "How far?", "answer": "9", "solution": "It is $9$.", "url": "u"}
REINFORCED: dict[str, Any] = {
    "data_source": "qa_effi_rl",
    "prompt": [{"content": "Think.", "role": "system"}, {"content": "Who built it?", "role": "user"}],
    "ability": "qa",
    "reward_model": {"ground_truth": ["Ann", "Ann Lee"], "style": "rule"},
    "extra_info": {"index": 3, "need_tools_kwargs": True, "question": "Who built it?", "split": "valid"},
    "metadata": None,
}
BRICKS = {
    **REINFORCED,
    "data_source": "math_dapo",
    "reward_model": {"ground_truth": "34"},
    "extra_info": {"index": 3, "question": "How many bricks?"},
}
CHOICE = {
    "ID": 5,
    "Split": "Test",
    "Domain": "Systems",
    "Format": "Multiple-choice",
    "Question": "Which?",
    "Answer": "B",
}
OPTIONS = {"A": "a queue", "B": "a stack", "C": "a tree", "D": "a heap"}
LISTED = "Which gap?\n Choices:\n(A) 1 eV\n(B) 10 eV\n\n(C) 2 eV\n"
FORMS: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("aime24", WALK, ("9",), "7"),
    ("aime25", {"problem": "How many?", "answer": 70, "id": "0"}, ("70",), "0"),
    ("amc23", {"id": 0, "question": "Where do they meet?", "answer": "27", "url": "u"}, ("27",), "0"),
    (
        "gsm8k",
        {"question": "How much?", "answer": "She has 2 * 9 = <<2*9=18>>18.\n#### 1,018", "idx": 0},
        ("1018",),
        "0",
    ),
    ("math500", {"question": "What is x?", "answer": "\\frac{1}{2}"}, ("\\frac{1}{2}",), ""),
    ("minerva_math", {"problem": "Mass?", "solution": "So \\boxed{3}, or\n\\boxed{1/2}."}, ("1/2",), ""),
    ("svamp", {"Body": "Ann has 3.", "Question": "How many?", "Answer": 3.0}, ("3",), ""),
    ("mawps", {"input": "3 + 0.5?", "target": 3.5}, ("3.5",), ""),
    ("carp_en", {"content": "2 + 2?", "answer": ["4", 4]}, ("4",), ""),
    (
        "olympiadbench",
        {
            "id": 16,
            "context": None,
            "question": "All n?",
            "solution": ["So."],
            "final_answer": ["$2$", "$3$"],
            "unit": None,
        },
        ("$2$, $3$",),
        "16",
    ),
    ("2wiki", {"question": "Where?", "answer": ["New York", "NYC"]}, ("New York", "NYC"), ""),
    ("webwalker", {"question": "何时", "answer": "10月27日"}, ("10月27日",), ""),
    ("gaia", {"id": 1, "task_id": "17b5", "Question": "Which zip?", "answer": "34689", "Level": 2}, ("34689",), "1"),
    ("nq", {"id": "t1", "question": "Who?", "golden_answers": ["Ann"], "metadata": {}}, ("Ann",), "t1"),
    (
        "musique",
        {"id": "m", "question": "By whom?", "answer": "Ann", "answer_aliases": ["Ann Lee"]},
        ("Ann", "Ann Lee"),
        "m",
    ),
    ("csbench", {**CHOICE, "Format": "Assertion", "Answer": True}, ("True",), "5"),
    ("csbench", CHOICE | OPTIONS, ("B", "a stack"), "5"),
    (
        "mmlu-pro",
        {"question_id": 70, "question": "?", "options": ["x", "y"], "answer": "A", "answer_index": 0},
        ("A", "x"),
        "70",
    ),
    ("gpqa", {"question": LISTED, "answer": ["(B)", "10 eV"]}, ("B", "10 eV"), ""),
    ("qa_effi_rl", REINFORCED, ("Ann", "Ann Lee"), "3"),
    (
        "math_dapo",
        BRICKS,
        ("34",),
        "3",
    ),
    ("nq", {**REINFORCED, "reward_model": {"ground_truth": {"target": ["Ann"]}}}, ("Ann",), "3"),
    ("numina-cot", {"id": 4, "question": "2 + 2?", "answer": "4", "source": "elsewhere"}, ("4",), "4"),
]
"""Rows as the files of ET-Agent have them, as the loaders in its code read them, and those of the
corpora that it trains on: source, row, answers, and the row's own id.
"""


def write_rows(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows into a file, in the form that its suffix says."""
    file = folder / name
    if file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=4, ensure_ascii=False), encoding="utf-8")
    elif file.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist([*rows]), file)
    else:
        file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return file


def in_parquet(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as Parquet can hold it: a column has one type, and its objects have a field."""
    answer = row.get("answer")
    one_type = {**row, "answer": list(map(str, answer))} if isinstance(answer, list) else row
    return {name: value for name, value in one_type.items() if value != {}}


def write_forms(folder: Path, split: str) -> list[dict[str, str]]:
    """Write a file for each form, in turn as JSON lines, as a JSON list and as Parquet; return them
    as a recipe names them.
    """
    sets = []
    for number, (source, row, _, _) in enumerate(FORMS):
        suffix = (".jsonl", ".json", ".parquet")[number % 3]
        file = write_rows(folder, f"form-{number}{suffix}", [in_parquet(row) if suffix == ".parquet" else row])
        sets.append({"path": str(file), "source": source, "split": split})
    return sets


def reinforced(question: str, answer: str) -> dict[str, Any]:
    """Return a row of mathematics for reinforcement learning, of split train."""
    extra = {**REINFORCED["extra_info"], "question": question, "split": "train", "index": len(question)}
    gold = {"ground_truth": [answer], "style": "rule"}
    return {**REINFORCED, "data_source": "math_effi_rl", "ability": "math", "reward_model": gold, "extra_info": extra}


@contextmanager
def web() -> Iterator[tuple[str, list[str]]]:
    """Serve a web search that finds one page; lend its address and the queries that it got."""
    queries: list[str] = []

    async def answer(request: Request) -> Response:
        queries.append((await request.json())["q"])
        return JSONResponse({"organic": [{"title": "A page", "link": "http://a.example", "snippet": "found outside"}]})

    with running(Starlette(routes=[Route("/search", answer, methods=["POST"])])) as url:
        yield url, queries
