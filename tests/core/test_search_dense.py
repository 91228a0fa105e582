"""Search by vectors, with a tiny random encoder and a real FAISS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

from agentr_core.errors import ConfigError, DataFileError, ModelDirectoryError
from agentr_core.tools.search.retriever import DenseRanker, Document, Encoder, Encoding, open_retriever

DOCUMENTS = [Document(str(number), "", text) for number, text in enumerate(("red sea", "a blue house", "old salt"))]
WORDS = ["[PAD]", "[UNK]", "red", "sea", "a", "blue", "house", "old", "salt", "query", "passage", ":"]


@pytest.fixture(scope="module")
def faiss() -> Any:
    return pytest.importorskip("faiss", reason="FAISS is not installed: pip install -e '.[dense]'")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    set_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **size)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def encoder(model: Path) -> Encoder:
    return Encoder(model, Encoding(query_prefix="", passage_prefix="", query_tokens=16, passage_tokens=16))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": d.id, "contents": d.contents}) + "\n" for d in DOCUMENTS), "utf-8")
    return path


def test_vectors_have_unit_length_and_do_not_depend_on_what_is_beside_them(encoder: Encoder) -> None:
    texts = ["red sea", "a blue house a blue house", "salt"]
    together = encoder.queries(texts)
    assert together.shape == (3, 16)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_allclose(encoder.queries([text])[0], row, atol=1e-5)


def test_prefixes_mark_queries_and_passages(model: Path) -> None:
    encoder = Encoder(model, Encoding(query_tokens=16, passage_tokens=16))
    assert np.abs(encoder.queries(["sea"]) - encoder.passages(["sea"])).max() > 1e-3


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError):
        Encoder(tmp_path)


def test_vectors_need_their_encoder(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need the encoder that made them"):
        open_retriever(corpus, tmp_path / "cache", vectors=tmp_path / "v.faiss")


def test_a_document_is_nearest_to_itself_and_vectors_are_made_once(
    faiss: Any, encoder: Encoder, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_retriever = open_retriever(corpus, tmp_path / "cache", encoder=encoder)
    monkeypatch.setattr(DenseRanker, "build", None)
    cached_retriever = open_retriever(corpus, tmp_path / "cache", encoder=encoder)
    assert new_retriever.name == "dense"
    assert new_retriever.fingerprint == cached_retriever.fingerprint
    for retriever in (new_retriever, cached_retriever):
        hits = retriever.search([document.text for document in DOCUMENTS], 2)
        assert [each[0].document for each in hits] == DOCUMENTS
        assert [len(each) for each in hits] == [2, 2, 2]
        assert hits[0][0].score == pytest.approx(1, abs=1e-5)
    assert len(cached_retriever.search(["sea"], 10)[0]) == 3
    assert cached_retriever.search([], 10) == []


def test_vectors_made_elsewhere_are_taken_if_they_fit(
    faiss: Any, encoder: Encoder, corpus: Path, tmp_path: Path
) -> None:
    def write_index(index: Any, rows: Any) -> Path:
        index.add(rows)
        faiss.write_index(index, str(tmp_path / "v.faiss"))
        return tmp_path / "v.faiss"

    passages = encoder.passages([document.text for document in reversed(DOCUMENTS)])
    vectors = write_index(faiss.IndexFlatIP(16), passages)
    retriever = open_retriever(corpus, tmp_path / "cache", encoder=encoder, vectors=vectors)
    assert retriever.search(["red sea"], 1)[0][0].document == DOCUMENTS[2]
    for index, rows, message in (
        (faiss.IndexFlatIP(16), passages[:2], "has 2 vectors of 16 numbers, but the corpus has 3 documents"),
        (faiss.IndexFlatIP(8), passages[:, :8].copy(), "has 3 vectors of 8 numbers"),
        (faiss.IndexFlatL2(16), passages, "a flat index of inner products is needed"),
    ):
        with pytest.raises(DataFileError, match=message):
            open_retriever(corpus, tmp_path / "cache", encoder=encoder, vectors=write_index(index, rows))
    (tmp_path / "v.faiss").write_bytes(b"no index")
    with pytest.raises(DataFileError, match="cannot be read"):
        open_retriever(corpus, tmp_path / "cache", encoder=encoder, vectors=tmp_path / "v.faiss")
