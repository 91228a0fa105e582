"""Datasets that cannot be trained on are refused before a model is loaded, by the number of the
row.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest

from agentr_core.errors import DataFault
from agentr_core.training.run import read_rows

Row = tuple[list[int], list[int]]

GOOD: Row = ([4, 5, 6], [-100, 5, 6])


def write(file: Path, *rows: Row) -> Path:
    table = pa.table({"input_ids": [ids for ids, _ in rows], "labels": [labels for _, labels in rows]})
    (parquet.write_table if file.suffix == ".parquet" else feather.write_feather)(table, str(file))
    return file


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_rows_come_back_as_written(tmp_path: Path, suffix: str) -> None:
    rows = read_rows(write(tmp_path / f"rows{suffix}", GOOD, GOOD), vocabulary=10, context=3)

    assert [(list(row.input_ids), list(row.labels)) for row in rows] == [GOOD, GOOD]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (([4, 5], [4]), "2 token ids and 1 labels"),
        (([4, 5, 6, 7], [-100, -100, 6, 7]), "4 tokens do not fit .* context of 3"),
        (([4, 10], [-100, 10]), "token id 10 is not in the model's vocabulary of 10"),
        (([4, 5, 6], [-100, 6, -100]), "not shifted"),
        (([4, 5], [4, -100]), "no token is trained"),
        (([], []), "no token is trained"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: Row, message: str) -> None:
    file = write(tmp_path / "rows.parquet", GOOD, row)

    with pytest.raises(DataFault, match=f"row 1: .*{message}"):
        read_rows(file, vocabulary=10, context=3)


def test_a_file_that_is_no_dataset_is_named(tmp_path: Path) -> None:
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 half a file")
    bare = tmp_path / "bare.parquet"
    parquet.write_table(pa.table({"text": ["a"]}), bare)
    csv_file = tmp_path / "rows.csv"
    csv_file.write_text("input_ids,labels\n", encoding="utf-8")

    for file, message in (
        (torn, "cannot be read"),
        (bare, "lacks the columns input_ids, labels"),
        (csv_file, "'.csv'"),
    ):
        with pytest.raises(DataFault, match=message):
            read_rows(file, vocabulary=10, context=3)
