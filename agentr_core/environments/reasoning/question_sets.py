"""Question sets from files of JSON or Parquet or from folders that the library `datasets` saved,
and the shipped ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as parquet

from agentr_core.environments.reasoning.problems import Problem, problem_of, source_key
from agentr_core.environments.reasoning.scoring import Domain
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes.fields import record
from agentr_core.samples.chat_file import records
from agentr_core.system import data_path
from agentr_core.texts import placed

SHIPPED = ("numbers", "encyclopaedia")
_SETTING = "environment.options.questions"
_JSON = (".jsonl", ".json")
_SUFFIXES = (*_JSON, ".parquet")
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}")
"""The name of a part of a split, as the Hugging Face hub names them."""

QuestionSet = Mapping[str, tuple[Problem, ...]]
"""The problems of each split."""


@record
class QuestionFile:
    """A question set with what its rows do not say themselves; what is given here replaces what
    they say.
    """

    path: str
    source: str = ""
    split: str = ""


def question_file(entry: str | Mapping[str, Any] | QuestionFile) -> QuestionFile:
    """Return an entry of the option `questions`: the name of a set alone, or its fields."""
    if isinstance(entry, QuestionFile):
        return entry
    return QuestionFile(**entry) if isinstance(entry, Mapping) else QuestionFile(path=entry)


@lru_cache(maxsize=8)
def load(sets: tuple[str | QuestionFile, ...], domains: tuple[tuple[str, Domain], ...] = ()) -> QuestionSet:
    """Return the problems of several sets together, split by split, in the order of the sets.

    A set is the name of a shipped one; a file of JSON or Parquet, whose rows name their split;
    a folder of such files, one for each split, which are named after it; or a folder that
    `datasets.save_to_disk` wrote. `problems` says what a row has.

    A row without an id gets its source with a hash of its question and answers, so that a file may
    be cut or put into another order and its ids stay; equal rows are numbered.

    Args:
        domains: the domains of sources that `problems.SOURCES` does not have.

    Raises:
        ConfigError: no set is named, or one twice; a named one does not exist; or `domains` names a
            source that no question has.
        DataFileError: a file is malformed, has no question, or an id twice; or it cannot be said
            what source or domain a row has.
    """
    if not sets:
        raise ConfigError(f"{_SETTING} names no set; name a file, a folder or one of {', '.join(SHIPPED)}")
    files = [question_file(entry) for entry in sets]
    if twice := [path for path, count in Counter(file.path for file in files).items() if count > 1]:
        raise ConfigError(f"{_SETTING} names {twice[0]} twice; name each set once")
    splits: dict[str, list[Problem]] = {}
    domain_of = dict(domains)
    for file in files:
        first_uses: dict[tuple[str, str], str] = {}
        equal: Counter[str] = Counter()
        for split, row, where in _rows(file):
            problem = problem_of(row, where, source=file.source, domains=domain_of)
            if not problem.id:
                # Not the row's number, which changes when a row before it is removed.
                name = f"{problem.source}-{fingerprint(problem.question, problem.golds)[:8]}"
                equal[name] += 1
                problem = replace(problem, id=name if equal[name] == 1 else f"{name}-{equal[name]}")
            before = first_uses.setdefault((split, problem.id), where)
            if before != where:
                raise DataFileError(
                    f"{where}: id {problem.id!r} stands at {before} too; ids must be unique in a split of a set"
                )
            splits.setdefault(split, []).append(problem)
        if not first_uses:
            raise DataFileError(f"{placed(place_of(file.path))} has no question; name another set in {_SETTING}")
    sources = {source_key(problem.source) for problems in splits.values() for problem in problems}
    if unused := [source for source, _ in domains if source_key(source) not in sources]:
        raise ConfigError(f"environment.options.domains: no question has the source {unused[0]}; leave it out")
    return {split: tuple(problems) for split, problems in splits.items()}


def place_of(name: str) -> Path:
    """Return the file or folder of a question set."""
    return data_path("reasoning", name) if name in SHIPPED else Path(name)


def _rows(file: QuestionFile) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield split, row and place of each row of a set."""
    path = place_of(file.path)
    if path.is_file():
        for row, where in _file_rows(path):
            yield file.split or _split(row, where), row, where
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        for split, row, where in _saved_rows(path):
            yield file.split or split or _split(row, where), row, where
    elif files := _split_files(path):
        for part, split in files:
            for row, where in _file_rows(part):
                yield file.split or split, row, where
    else:
        raise ConfigError(
            f"{_SETTING}: there are no questions at {placed(path)}; name a {' or '.join(_SUFFIXES)} file, a folder of "
            f"such files, a folder that `datasets` saved, or one of {', '.join(SHIPPED)}"
        )


def _split_files(folder: Path) -> Sequence[tuple[Path, str]]:
    """Return the files of a folder with the splits that they are named after. Raises `ConfigError`
    when a split has several files that are not its numbered parts.
    """
    files = sorted(file for file in folder.glob("*") if file.suffix in _SUFFIXES)
    named_files = [(file, parts[1] if (parts := _SHARD.fullmatch(file.stem)) else file.stem) for file in files]
    sets = {
        split: {(file.suffix, file.stem == split) for file, name in named_files if name == split}
        for _, split in named_files
    }
    for split, kinds in sets.items():
        if len(kinds) > 1:
            names = " and ".join(file.name for file, name in named_files if name == split)
            raise ConfigError(
                f"{_SETTING}: {placed(folder)} has {names}, all of split {split}; name one of them, with its split: "
                f"[{{path: {named_files[0][0]}, split: {split}}}]"
            )
    return named_files


def _file_rows(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if file.suffix in _JSON:
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
            yield split, row, f"{folder}, row {number} of {split or 'the set'}"


def _split(row: Mapping[str, Any], where: str) -> str:
    """Return the split that a row names, in verl's form in `extra_info`."""
    extra = row.get("extra_info")
    split = row.get("split") or (extra.get("split") if isinstance(extra, Mapping) else None)
    if not isinstance(split, str) or not split:
        fault = "the row has no split" if split is None else f"split is {split!r}"
        raise DataFileError(
            f"{where}: {fault}; name that of the file in the recipe, as in {_SETTING}: "
            "[{path: FILE, split: test}], or in each row"
        )
    return split
