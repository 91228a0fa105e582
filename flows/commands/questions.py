"""Answer SQL queries about a workspace."""

from __future__ import annotations

from pathlib import Path

from agentr_core.errors import ConfigError
from agentr_core.store.queries.runs import ALL_RUNS_SQL
from agentr_core.store.questions import DEFAULT_TIME_LIMIT_S, FORMATTERS, example, examples, write_parquet
from agentr_core.system import write_text
from agentr_core.texts import count_text
from tasks.workspaces import open_store

PARQUET = "parquet"
_PLAN = ["explain_key", "explain_value"]
"""The columns of an answer to EXPLAIN, whose lines are drawn for a terminal."""


def answer(
    workspace: Path,
    query: str,
    form: str | None,
    *,
    example_name: str = "",
    output: Path | None = None,
    files: bool = False,
    seconds: float = DEFAULT_TIME_LIMIT_S,
) -> str:
    """Return the answer to an SQL query as text or, if it is written to a file, a line that says
    so.

    Args:
        query: the SQL; empty if the query is the example `example_name`.
        form: one of `FORMATTERS`, or `parquet`, which needs a file; None: as the file's ending
            says, else a table.
        output: the file that the answer is written to; None: no file.
        files: whether the query may read and write other files.
        seconds: how long the query may take.

    Raises `ConfigError` for wrong SQL or arguments, and `StoreError` if there is no store.
    """
    if bool(query) == bool(example_name):
        raise ConfigError("give one question: QUERY, or --example NAME")
    store = open_store(workspace, must_exist=True)
    file = None if output is None else output.resolve()
    if file and file.name.startswith(store.path.name) and file.parent == store.path.parent.resolve():
        raise ConfigError(f"{output} is the store itself, which is only read; name another file")
    form = form or _form_of(output)
    if form == PARQUET and output is None:
        raise ConfigError("parquet is no text for a terminal; name a file with --output FILE")
    table = store.answer(query or example(example_name).sql, files=files, seconds=seconds)
    if output is None and form == "table" and table.column_names == _PLAN:
        return "\n".join(table["explain_value"].to_pylist()) + "\n"
    if output is None:
        return FORMATTERS[form](table)
    if form == PARQUET:
        write_parquet(table, output)
    else:
        write_text(output, FORMATTERS[form](table))
    return f"{output}: {count_text(table.num_rows, 'row')}\n"


def _form_of(output: Path | None) -> str:
    """Return the format that the ending of a file stands for; a table without a file. Raises
    `ConfigError` for an unknown ending.
    """
    ending = output.suffix.removeprefix(".").lower() if output is not None else ""
    if ending in ("", "txt"):
        return "table"
    if ending == PARQUET or ending in FORMATTERS:
        return ending
    raise ConfigError(f"{output}: there is no format {ending}; give one of the others with --format")


def example_sql(name: str) -> str:
    """Return the SQL of an example. Raises `ConfigError` for an unknown name."""
    return f"{example(name).sql}\n"


def example_list() -> str:
    """Return a line for each example: its name and what it shows."""
    queries = examples()
    width = max(map(len, queries))
    return "".join(f"{name.ljust(width)}  {query.about}\n" for name, query in queries.items())


def runs_of(workspace: Path, form: str = "table") -> str:
    """Return the runs of a workspace in one of the `FORMATTERS`. Raises `StoreError` if there is no
    store.
    """
    store = open_store(workspace, must_exist=True)
    return FORMATTERS[form](store.answer(ALL_RUNS_SQL))
