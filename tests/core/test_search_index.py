"""Corpora, BM25 over them, and indexes kept by content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentr_core.errors import DataFileError
from agentr_core.tools.search.retriever import CorpusFile, Document, Retriever, normalise, open_retriever, scan_corpus

DOCUMENTS = (
    Document("a", "Maren Voss", "She was born in Ostrava, in house 7."),
    Document("b", "Ostrava", "A town of the north; its houses are made of stone."),
    Document("c", "", "Stone bridges were built by Maren's father."),
)


def corpus(folder: Path, *lines: Any) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def record(document: Document) -> dict[str, str]:
    return {"id": document.id, "title": document.title, "contents": document.contents}


def hit_ids(retriever: Retriever, query: str, top_k: int = 10) -> list[str]:
    return [hit.document.id for hit in retriever.search([query], top_k)[0]]


def test_documents_are_found_by_their_words() -> None:
    retriever = Retriever.from_documents(DOCUMENTS)
    assert hit_ids(retriever, "Who was BORN in Ostrava?") == ["a", "b"]
    assert hit_ids(retriever, "7") == ["a"], "a digit is a word"
    assert hit_ids(retriever, "housing the stone") == ["b", "a", "c"], "words are stemmed"
    assert hit_ids(retriever, "Maren Voss", top_k=1) == ["a"]
    assert hit_ids(retriever, "who is it") == hit_ids(retriever, "zeppelin") == hit_ids(retriever, "!?") == []


def test_a_batch_answers_as_its_queries_do_alone() -> None:
    retriever = Retriever.from_documents(DOCUMENTS)
    queries = ["stone", "zeppelin", "Maren", "stone"]
    assert retriever.search(queries, 2) == [retriever.search([query], 2)[0] for query in queries]
    assert retriever.search([], 2) == []
    scores = [hit.score for hit in retriever.search(["Ostrava stone"], 3)[0]]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0


@pytest.mark.parametrize("query", ["cafe\u0301", "caf\u00e9", "CAFE\u0301", "\uff23af\u00e9"])
@pytest.mark.parametrize(
    "document", ["Le cafe\u0301 de Flore.", "Le Caf\u00e9 de Flore.", "Le \uff23\uff21\uff26\u00c9."]
)
def test_documents_and_queries_have_one_normal_form(document: str, query: str) -> None:
    retriever = Retriever.from_documents([Document("other", "", "Le bar du coin."), Document("cafe", "", document)])
    assert hit_ids(retriever, query) == hit_ids(retriever, normalise(query)) == ["cafe"]


@pytest.mark.parametrize(
    ("query", "document"),
    [
        ("\uff21\uff22\uff23", "ABC is written wide."),
        ("ABC", "\uff21\uff22\uff23 is written wide."),
        ("stra\u00dfe", "STRASSE"),
        ("\ufb01ve", "five sheep"),
        ("\u91cd\u5e86\u5927\u5b66", "\u91cd\u5e86\u5927\u5b66\u4f4d\u4e8e\u91cd\u5e86\u5e02\u3002"),
        ("\u6771\u4eac\u30bf\u30ef\u30fc", "\u9ad8\u3044\u6771\u4eac\u30bf\u30ef\u30fc\u306b\u884c\u304f"),
        ("\u30bf\u30ef\u30fc", "\uff80\uff9c\uff70"),
        ("\uc11c\uc6b8", "\uc11c\uc6b8\uc740 \ud55c\uad6d\uc758 \uc218\ub3c4\uc774\ub2e4."),
        (
            "\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e",
            "\u0e40\u0e21\u0e37\u0e2d\u0e07\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e\u0e43\u0e2b\u0e0d\u0e48",
        ),
        ("\u8c61", "\u5927\u8c61\u5728\u8dd1"),
    ],
)
def test_documents_in_any_script_are_found(query: str, document: str) -> None:
    retriever = Retriever.from_documents([Document("other", "", "Stone bridges."), Document("it", "", document)])
    assert hit_ids(retriever, query) == ["it"]


def test_neighbours_count_where_words_have_no_spaces() -> None:
    """Each character of the query is in both documents, its words only in the second."""
    parts, whole = "\u5927\u91cd\u8981\u7684\u5b66\u5e86", "\u91cd\u5e86\u5927\u5b66"
    retriever = Retriever.from_documents([Document("scattered", "", parts), Document("whole", "", whole)])
    assert hit_ids(retriever, whole) == ["whole", "scattered"]


def test_of_equal_documents_the_earlier_comes_first() -> None:
    retriever = Retriever.from_documents([Document(str(number), "", "the same words") for number in range(50)])
    assert hit_ids(retriever, "same words", top_k=5) == ["0", "1", "2", "3", "4"]


def test_a_corpus_without_a_word_is_refused() -> None:
    with pytest.raises(DataFileError, match="no document of the corpus has a word"):
        Retriever.from_documents([Document("a", "", "the of and ...")])


def test_a_file_is_read_where_it_lies(tmp_path: Path) -> None:
    # Line ends within JSON strings, blank lines, no line end at the end, an id that is a number.
    odd = Document("9", "Söhne\u2028", "two\nlines")
    path = corpus(tmp_path, record(DOCUMENTS[0]), "", {"id": 9, "title": odd.title, "contents": odd.contents})
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "c", "contents": DOCUMENTS[2].contents}, ensure_ascii=False))
    rows = list(scan_corpus(path))
    assert [document for _, document in rows] == [DOCUMENTS[0], odd, DOCUMENTS[2]]
    documents = CorpusFile(path, np.array([start for start, _ in rows]))
    assert list(documents) == [DOCUMENTS[0], odd, DOCUMENTS[2]]
    assert documents[1:] == [odd, DOCUMENTS[2]]
    assert documents[-1] == DOCUMENTS[2]


def test_an_index_is_made_once_for_a_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = corpus(tmp_path, *map(record, DOCUMENTS))
    first = open_retriever(path, tmp_path / "cache")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    # Nothing is scanned again for the same content under another name.
    monkeypatch.setattr("agentr_core.tools.search.retriever.scan_corpus", None)
    second = open_retriever(copy, tmp_path / "cache")
    assert len(second) == 3
    assert first.fingerprint == second.fingerprint
    assert first.search(["Ostrava stone"], 3) == second.search(["Ostrava stone"], 3)
    assert hit_ids(second, "Ostrava stone") == hit_ids(Retriever.from_documents(DOCUMENTS), "Ostrava stone")
    monkeypatch.undo()
    copy.write_text(json.dumps(record(DOCUMENTS[2])), "utf-8")
    third = open_retriever(copy, tmp_path / "cache")
    assert third.fingerprint != first.fingerprint
    assert hit_ids(third, "stone") == ["c"]
    assert not list((tmp_path / "cache").glob("building-*"))


def test_a_damaged_index_says_so(tmp_path: Path) -> None:
    path = corpus(tmp_path, *map(record, DOCUMENTS))
    open_retriever(path, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").glob("bm25-*")
    (folder / "params.index.json").write_text("{", "utf-8")
    with pytest.raises(DataFileError, match=r"is damaged .*; delete it to have it rebuilt"):
        open_retriever(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"corpus\.jsonl:2 is not JSON"),
        ("[1]", r"corpus\.jsonl:2 is a list; write one JSON object"),
        ({"contents": "x"}, r'corpus\.jsonl:2: "id" is missing'),
        ({"id": True, "contents": "x"}, r'corpus\.jsonl:2: "id" is a bool'),
        ({"id": "x"}, r'corpus\.jsonl:2: "contents" is missing'),
        ({"id": "x", "contents": " "}, r'corpus\.jsonl:2: "contents" is blank'),
        ({"id": "x", "title": ["y"], "contents": "z"}, r'corpus\.jsonl:2: "title" is a list'),
        ({"id": "x", "contents": "\ud800"}, r'corpus\.jsonl:2: "contents" has half a surrogate pair at 0'),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_left(tmp_path: Path, line: Any, said: str) -> None:
    path = corpus(tmp_path, record(DOCUMENTS[0]), line)
    with pytest.raises(DataFileError, match=said):
        open_retriever(path, tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())


def test_a_missing_and_an_empty_corpus_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"corpus .*none\.jsonl does not exist; name a JSONL file"):
        open_retriever(tmp_path / "none.jsonl", tmp_path / "cache")
    with pytest.raises(DataFileError, match="has no document"):
        open_retriever(corpus(tmp_path, ""), tmp_path / "cache")
