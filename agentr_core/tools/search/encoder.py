"""Encodes texts as vectors: the mean of a model's last hidden states."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agentr_core.errors import ConfigError, ModelDirectoryError
from agentr_core.fingerprint import file_sha256
from agentr_core.models.files import weights_sha256

_BATCH: Final = 64
_TOKENIZERS: Final = ("tokenizer.json", "vocab.txt", "tokenizer.model", "spiece.model")

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The form in which an encoder gets texts; the defaults are those of E5, which marks queries
    and passages.

    Source: Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training", 2022.
    """

    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    query_tokens: int = 128
    passage_tokens: int = 512


class Encoder:
    """A transformer of a Hugging Face model directory, in float32. Threads may share it; they take
    turns.
    """

    def __init__(self, path: Path, encoding: Encoding | None = None, *, device: str = "cpu") -> None:
        """Load the model. Raises `ModelDirectoryError` when the directory is incomplete,
        `ConfigError` for a device that does not exist.
        """
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.encoding = encoding or Encoding()
        self.settings = {
            "weights": weights_sha256(path),
            "tokenizer": {name: file_sha256(path / name) for name in _TOKENIZERS if (path / name).is_file()},
            "encoding": self.encoding,
        }
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            model: Any = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            raise ModelDirectoryError(
                f"the encoder in {path} cannot be loaded ({str(error).splitlines()[0]}); name a model directory"
            ) from error
        try:
            self._model = model.eval().to(device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"the encoder cannot be put on device {device!r} ({error}); name another") from error
        self.size = int(model.config.hidden_size)
        self._device = device
        self._turn = threading.Lock()

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return a row of unit length for each query, of shape (texts, `size`)."""
        return self._encode([self.encoding.query_prefix + text for text in texts], self.encoding.query_tokens)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Return a row of unit length for each passage, of shape (texts, `size`)."""
        return self._encode([self.encoding.passage_prefix + text for text in texts], self.encoding.passage_tokens)

    def _encode(self, texts: Sequence[str], most_tokens: int) -> Vectors:
        rows = np.zeros((len(texts), self.size), dtype=np.float32)
        # Texts of similar length go together, so that there is little padding.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            rows[batch] = self._encode_batch([texts[number] for number in batch], most_tokens)
        return rows

    def _encode_batch(self, texts: list[str], most_tokens: int) -> Vectors:
        import torch

        with self._turn, torch.inference_mode():
            inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=most_tokens, return_tensors="pt")
            inputs = inputs.to(self._device)
            hidden = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            vectors: Vectors = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return vectors
