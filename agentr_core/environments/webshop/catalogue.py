"""A catalogue prepared for use: products by row and the search index, kept on disk under the hash
of their files.

What is read once is written to `<cache>/<hash>`: `products.jsonl` with the offset of each line, the
rows that have an instruction, and the search index. A process reads a product when it is needed and
memory-maps the index, so a million products take little memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from agentr_core.environments.webshop import index
from agentr_core.environments.webshop.files import CatalogueFiles, Product, read_products
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.fingerprint import fingerprint
from agentr_core.tools.search.bm25 import Bm25
from agentr_core.writing import content_sha256, publish

VERSION = 1
"""Raise it when the same files would give a different catalogue or index."""

_PRODUCTS, _STARTS, _INSTRUCTED, _WISHED, _INDEX = (
    "products.jsonl",
    "starts.npy",
    "instructed.npy",
    "wished.npy",
    "index",
)
_PRODUCT = TypeAdapter(Product)
_CACHED_PRODUCTS = 4096
_CACHED_QUERIES = 4096


class Catalogue:
    """Products by row, in the order of their file, and search over them. Safe to share between
    threads.
    """

    def __init__(self, folder: Path) -> None:
        """Open a finished catalogue. Raises `DataFileError` when it is damaged."""
        try:
            self._starts = np.load(folder / _STARTS)
            self.instructed: Sequence[int] = np.load(folder / _INSTRUCTED).tolist()
            self.wished: Sequence[int] = np.load(folder / _WISHED).tolist()
        except (OSError, ValueError, EOFError) as error:
            raise DataFileError(f"catalogue {folder} is damaged ({error}); delete it to have it rebuilt") from error
        self._folder = folder
        self.product = lru_cache(_CACHED_PRODUCTS)(self._product)
        ranking = Bm25.load(folder / _INDEX, index.WORDS)

        def search(query: str) -> tuple[int, ...]:
            (found,) = ranking.rank([query], index.MAX_RESULTS)
            return tuple(row for row, _ in found)

        self.search = lru_cache(_CACHED_QUERIES)(search)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _product(self, row: int) -> Product:
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        try:
            with (self._folder / _PRODUCTS).open("rb") as lines:
                lines.seek(start)
                return _PRODUCT.validate_json(lines.read(end - start))
        except (OSError, ValidationError) as error:
            raise DataFileError(f"catalogue {self._folder} is damaged; delete it to have it rebuilt") from error


def open_catalogue(files: CatalogueFiles, limit: int, cache: Path) -> Catalogue:
    """Return the catalogue of some files, built if the cache has none of their content.

    Args:
        limit: the number of entries of the product file that count; 0 means all.
        cache: a folder; it is made if necessary.

    Raises:
        DataFileError: a file is cut off or malformed; no unfinished catalogue is left behind.
        ConfigError: the cache folder cannot be made.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"environment.options.cache_dir: {cache} cannot be made ({error}); name another") from error
    paths = [files.products, files.attributes, *([files.wishes] if files.wishes else [])]
    folder = cache / fingerprint("webshop", VERSION, limit, [content_sha256(path, cache) for path in paths])
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as draft:
            _build(files, limit, Path(draft) / "catalogue")
            publish(Path(draft) / "catalogue", folder)
    return Catalogue(folder)


def _build(files: CatalogueFiles, limit: int, folder: Path) -> None:
    folder.mkdir()
    starts, instructed, wished = [0], [], []

    def documents() -> Iterator[str]:
        with (folder / _PRODUCTS).open("wb") as lines:
            for row, product in enumerate(read_products(files, limit)):
                starts.append(starts[-1] + lines.write(_PRODUCT.dump_json(product) + b"\n"))
                if product.instruction:
                    instructed.append(row)
                if product.wishes:
                    wished.append(row)
                yield index.document(product)
        if len(starts) == 1:
            raise DataFileError(f"catalogue file {files.products} has no product; download it again")

    Bm25.build(documents(), index.WORDS).save(folder / _INDEX)
    np.save(folder / _STARTS, np.array(starts, dtype=np.int64))
    np.save(folder / _INSTRUCTED, np.array(instructed, dtype=np.int64))
    np.save(folder / _WISHED, np.array(wished, dtype=np.int64))
