"""Question sets from JSONL or Parquet files or from folders that the library `datasets` saved, and
the shipped ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from agentr_core.data_files import data_path
from agentr_core.environments.reasoning.problems import Problem, problem_of
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.samples.json_lines import records
from agentr_core.texts import placed

SHIPPED = ("numbers", "encyclopaedia")
_SETTING = "environment.options.questions"
_SUFFIXES = (".jsonl", ".parquet")

QuestionSet = Mapping[str, tuple[Problem, ...]]
"""The problems of each split."""


@lru_cache(maxsize=8)
def load(sets: tuple[str, ...]) -> QuestionSet:
    """Return the problems of several sets together, split by split, in the order of the sets.

    A set is the name of a shipped one; a JSONL or Parquet file, whose rows name their split;
    a folder of such files, one for each split, which are named after it; or a folder that
    `datasets.save_to_disk` wrote.

    Raises:
        ConfigError: no set is named, or a named one does not exist.
        DataFileError: a file is malformed, or an id occurs twice.
    """
    if not sets:
        raise ConfigError(f"{_SETTING} names no set; name a file, a folder or one of {', '.join(SHIPPED)}")
    found: dict[str, list[Problem]] = {}
    seen: dict[str, str] = {}
    for name in sets:
        for split, row, where in _rows(name):
            problem = problem_of(row, where)
            if problem.id in seen:
                raise DataFileError(f"{where}: id {problem.id!r} stands at {seen[problem.id]} too; ids must be unique")
            seen[problem.id] = where
            found.setdefault(split, []).append(problem)
    return {split: tuple(problems) for split, problems in found.items()}


def place_of(name: str) -> Path:
    """Return the file or folder of a question set."""
    return data_path("reasoning", name) if name in SHIPPED else Path(name)


def _rows(name: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield split, row and place of each row of a set."""
    path = place_of(name)
    if path.is_file():
        for row, where in _file_rows(path):
            yield _split(row, where), row, where
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        yield from _saved_rows(path)
    elif files := _split_files(path):
        for file in files:
            for row, where in _file_rows(file):
                yield file.stem, row, where
    else:
        raise ConfigError(
            f"{_SETTING}: there are no questions at {placed(path)}; name a {' or '.join(_SUFFIXES)} file, a folder of "
            f"such files, a folder that `datasets` saved, or one of {', '.join(SHIPPED)}"
        )


def _split_files(folder: Path) -> Sequence[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix in _SUFFIXES)


def _file_rows(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if file.suffix == ".jsonl":
        for number, row in records(file, setting=_SETTING):
            yield row, f"{file}:{number}"
    elif file.suffix == ".parquet":
        try:
            rows = parquet.read_table(file).to_pylist()
        except (OSError, pa.ArrowInvalid) as error:
            raise DataFileError(f"file {file} cannot be read: {error}; set {_SETTING} to a Parquet file") from error
        for number, row in enumerate(rows):
            yield row, f"{file}, row {number}"
    else:
        raise ConfigError(f"{_SETTING}: {file} has the type {file.suffix!r}; name a {' or '.join(_SUFFIXES)} file")


def _saved_rows(folder: Path) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    # The library takes a second to import, and few sets need it.
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise DataFileError(f"folder {folder} cannot be read by `datasets`: {error}; save it again") from error
    parts = saved.items() if isinstance(saved, DatasetDict) else [("", saved)]
    for split, dataset in parts:
        for number, row in enumerate(dataset):
            where = f"{folder}, row {number} of {split or 'the set'}"
            yield split or _split(row, where), row, where


def _split(row: Mapping[str, Any], where: str) -> str:
    split = row.get("split")
    if not isinstance(split, str) or not split:
        raise DataFileError(f"{where}: split is {split!r}; a file that is a set of its own names it in each row")
    return split
