"""Datasets of token rows, read and checked before any compute is spent on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet

from agentr_core.errors import DataFault
from agentr_core.samples.labels import IGNORED
from agentr_core.training.packing import TokenPair, TokenRow, trained_tokens


def read_rows(file: Path, *, vocabulary: int, context: int, side: str = "") -> list[TokenRow]:
    """Return the checked rows of a .parquet, .arrow or .feather file, in its order.

    Args:
        vocabulary: how many token ids the model knows.
        context: the most tokens the model takes.
        side: the prefix of the two columns, for a file of pairs.

    Raises:
        DataFault: the file cannot be read, or a row is broken; the message names the first such
            row.
    """
    table = _read(file)
    ids, labels = f"{side}input_ids", f"{side}labels"
    missing = [name for name in (ids, labels) if name not in table.column_names]
    if missing:
        raise DataFault(
            f"dataset {file} lacks the columns {', '.join(missing)}; it has {', '.join(table.column_names)}"
        )
    columns = zip(table[ids].to_pylist(), table[labels].to_pylist(), strict=True)
    rows = [TokenRow(tuple(tokens or ()), tuple(flags or ())) for tokens, flags in columns]
    for number, row in enumerate(rows):
        fault = _fault(row, vocabulary=vocabulary, context=context)
        if fault:
            raise DataFault(f"dataset {file}, row {number}{f' ({side[:-1]} side)' if side else ''}: {fault}")
    return rows


def read_pairs(file: Path, *, vocabulary: int, context: int) -> list[TokenPair]:
    """Return the checked pairs of a file, in its order. Arguments and errors are those of
    `read_rows`.
    """
    sides = (read_rows(file, vocabulary=vocabulary, context=context, side=side) for side in ("chosen_", "rejected_"))
    return [TokenPair(*pair) for pair in zip(*sides, strict=True)]


def _read(file: Path) -> Any:
    try:
        if file.suffix == ".parquet":
            return parquet.read_table(file)
        if file.suffix in (".arrow", ".feather"):
            return feather.read_table(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataFault(f"dataset {file} cannot be read ({error}); build it again") from error
    raise DataFault(f"dataset {file} has the unknown type {file.suffix!r}; write .parquet, .arrow or .feather")


def _fault(row: TokenRow, *, vocabulary: int, context: int) -> str:
    if len(row.input_ids) != len(row.labels):
        return f"{len(row.input_ids)} token ids and {len(row.labels)} labels; there must be a label for each token"
    if len(row.input_ids) > context:
        return f"{len(row.input_ids)} tokens do not fit the model's context of {context}; lower data.max_length"
    strangers = [token for token in row.input_ids if not 0 <= token < vocabulary]
    if strangers:
        return (
            f"token id {strangers[0]} is not in the model's vocabulary of {vocabulary}; use the model's own tokenizer"
        )
    pairs = zip(row.input_ids, row.labels, strict=True)
    if any(label not in (IGNORED, token) for token, label in pairs):
        return f"a label is neither its own token id nor {IGNORED}; labels are not shifted"
    if not trained_tokens(row):
        return "no token is trained; leave the row out"
    return ""
