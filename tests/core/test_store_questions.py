"""Questions in SQL: answers to the last digit in every format, and nothing that a question can
break.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentr_core.errors import ConfigError
from agentr_core.store.database import Store
from agentr_core.store.questions import FORMATTERS, time_limit, to_csv, to_json, to_table, write_parquet

SEED = 9_007_199_254_740_993
"""The first whole number that a float of 64 bits does not hold."""


@pytest.fixture(scope="module")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one row, to be copied: to make its tables takes most of what a test would."""
    source = Store(tmp_path_factory.mktemp("filled") / "store.duckdb")
    source.write({"rl_validation": [{"trajectory_id": "kept", "step": 1, "iteration_id": "x"}]})
    source.checkpoint()
    return source.path


@pytest.fixture
def store(tmp_path: Path, filled_file: Path) -> Store:
    file = tmp_path / "ws" / "store.duckdb"
    file.parent.mkdir()
    shutil.copy(filled_file, file)
    return Store(file, wait_s=2)


def cells(store: Store, sql: str) -> dict[str, list[str]]:
    """Return the first row of an answer as JSON, CSV and the words of a table."""
    answer = store.answer(sql)
    (_, *rows) = csv.reader(io.StringIO(to_csv(answer)))
    return {
        "json": [str(value) for value in json.loads(to_json(answer), parse_float=str)[0].values()],
        "csv": rows[0],
        "table": [to_table(answer).splitlines()[1].strip()],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sql", "exact"),
    [
        (f"select {SEED}::bigint as seed union all select null order by 1 nulls last", str(SEED)),
        ("select 18446744073709551615::ubigint", "18446744073709551615"),
        ("select 340282366920938463463374607431768211455::uhugeint", "340282366920938463463374607431768211455"),
        ("select 2e-11::double", "2e-11"),
        ("select 0.1::double + 0.2::double", "0.30000000000000004"),
        ("select 1.10::decimal(10, 2)", "1.10"),
        (r"select '\xAA\x00'::blob", "aa00"),
        ("select interval '1 month 2 days 3.5 seconds'", "1 month 2 days 00:00:03.5"),
        ("select '12:00:00+02'::timetz", "12:00:00+02"),
        ("select '0101'::bit", "0101"),
        ("select 'nan'::double", "nan"),
        ("select '2026-01-02'::date", "2026-01-02"),
    ],
)
def test_a_value_is_exact_in_json_and_csv(store: Store, sql: str, exact: str) -> None:
    table = {"0.30000000000000004": "0.300"}.get(exact, exact)
    assert cells(store, sql) == {"json": [exact], "csv": [exact], "table": [table]}


@pytest.mark.parametrize(
    ("value", "said"),
    [("0.5866666666", "0.587"), ("0.0", "0.000"), ("-0.00012345", "-0.000123"), ("1e-5", "1e-05"), ("2e20", "2e+20")],
)
def test_a_table_has_three_decimals(store: Store, value: str, said: str) -> None:
    assert cells(store, f"select {value}::double")["table"] == [said]


@pytest.mark.parametrize("sql", ["describe v_episodes", "DESC V_Episodes;"])
def test_columns_are_described_with_their_comments(store: Store, sql: str) -> None:
    answer = store.answer(sql)
    assert answer.column_names == ["column_name", "column_type", "what"]
    facts = {row["column_name"]: (row["column_type"], row["what"]) for row in answer.to_pylist()}
    assert facts["depth"] == ("BIGINT", "Difficulty class, where the environment has one.")
    assert facts["invalid_actions"][1].startswith("Actions the environment called invalid"), "as its table says"
    assert facts["iteration"][1].startswith("The one that made the model"), "the view's own word comes first"


def test_what_is_not_there_is_not_described(store: Store) -> None:
    with pytest.raises(ConfigError, match="v_episode does not exist"):
        store.answer("describe v_episode")


def test_json_has_numbers_where_they_are_numbers(store: Store) -> None:
    sql = (
        f"select {SEED} as n, 2e-11 as x, 1.10::decimal(5,2) as d, true as b, null as z, [1, null] as l, "
        "{'a': 1} as s"
    )
    assert to_json(store.answer(sql)) == (
        f'[{{"n":{SEED},"x":2e-11,"d":1.10,"b":true,"z":null,"l":[1,null],"s":{{"a":1}}}}]'
    )


def test_column_names_are_distinct(store: Store) -> None:
    answer = store.answer("select 1 as a, 2 as a, 3 as a_1, 4 as A")
    assert answer.column_names == ["a", "a_2", "a_1", "A"]
    assert [column.to_pylist() for column in answer.columns] == [[1], [2], [3], [4]]
    for form in FORMATTERS:
        assert FORMATTERS[form](answer)


def test_frames_are_backed_by_arrow_and_exact(store: Store) -> None:
    frame = store.query(f"select {SEED} as seed, 'x' as t union all select null, null order by 1 nulls last")
    assert frame["seed"].dtype.name == "int64[pyarrow]"
    assert frame["seed"][0] == SEED
    assert frame["seed"].isna().tolist() == [False, True]
    assert store.query("select interval '1 day' as i, 1 as a, 2 as a")["a"].tolist() == [1]


def test_a_table_shows_control_characters_as_marks(store: Store) -> None:
    text = to_table(store.answer("select 'a' || chr(27) || '[2J' || chr(10) || chr(8238) || 'b' as t, 1 as n"))
    assert text == "t                  n\na\\x1b[2J\\n\\u202eb  1\n"


def test_an_answer_without_rows_has_its_names(store: Store) -> None:
    answer = store.answer("select 1 as a, 2 as b where false")
    assert {form: make(answer) for form, make in FORMATTERS.items()} == {
        "table": "a  b\n",
        "json": "[]\n",
        "csv": "a,b\n",
    }


def test_times_beyond_the_calendar_are_no_traceback(store: Store) -> None:
    assert to_csv(store.answer("select timestamp 'infinity' as t")).startswith("t\n")


@pytest.mark.parametrize("sql", ["show tables", "describe run", "explain select 1", "pragma table_info('run')"])
def test_other_questions_are_answered(store: Store, sql: str) -> None:
    assert store.answer(sql).num_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "sql",
    [
        "use memory; detach store; attach '{path}' as store; use store; delete from rl_validation",
        "detach store",
        "copy run to '{path}'",
        "copy (select 1) to '{folder}/out.csv'",
        "export database '{folder}/out'",
        "select * from read_text('{folder}/secret')",
        "select * from '{folder}/secret'",
        "select * from glob('{folder}/*')",
        "set threads = 2",
        "set enable_external_access = true",
        "prepare p as delete from rl_validation",
        "checkpoint store",
        "delete from rl_validation",
        "create table z as select 1",
        "create temp table z as select 1",
        "install httpfs",
        "load httpfs",
        "force install httpfs from 'http://127.0.0.1:1'",
        "attach ':memory:' as other",
        "attach 'http://127.0.0.1:1/other.duckdb' as other",
        "import database '{folder}'",
        "select * from read_csv('http://127.0.0.1:1/a.csv')",
        "select * from 'https://127.0.0.1:1/a.parquet'",
        "select * from read_csv('{folder}/secret')",
        "select * from read_blob('{folder}/secret')",
        "select * from read_json('{folder}/secret')",
        "select * from read_parquet('{folder}/secret')",
        "select * from read_duckdb('{folder}/secret')",
        "select * from parquet_metadata('{folder}/secret')",
        "select * from sniff_csv('{folder}/secret')",
        "select * from query('copy run to ''{folder}/out.csv''')",
        "select * from duckdb_secrets()",
        "create secret s (type s3)",
        "select getenv('HOME')",
        "explain analyze copy run to '{folder}/out.csv'",
        "explain analyze delete from rl_validation",
        "select 1; copy run to '{folder}/out.csv'",
        "begin; delete from rl_validation; commit",
        "set home_directory = '{folder}'",
        "pragma profiling_output = '{folder}/out'",
        "call enable_logging()",
        "update extensions",
    ],
)
def test_a_question_breaks_nothing_and_reaches_no_file(store: Store, tmp_path: Path, sql: str) -> None:
    store.checkpoint()
    (tmp_path / "secret").write_text("s")
    before = store.path.read_bytes()
    with pytest.raises(ConfigError, match="SQL: ") as caught:
        store.query(sql.format(path=store.path, folder=tmp_path))
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "ws"]
    assert store.path.read_bytes() == before
    assert store.missing("rl_validation", ["kept"]) == []


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("create temp table z as select 1", "CREATE is not a query; use a SELECT"),
        ("load httpfs", "LOAD is not a query; use a SELECT"),
        ("attach 'other.duckdb'", "add --files"),
        ("select '\udcff'", "the question is not UTF-8"),
    ],
)
def test_a_refusal_says_what_is_wrong(store: Store, sql: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        store.query(sql)


def test_variables_of_the_program_are_no_tables(store: Store) -> None:
    secret = pa.table({"a": [1]})
    with pytest.raises(ConfigError, match="secret"):
        store.query("select * from secret")
    assert secret.num_rows == 1


def test_files_are_opened_on_request_but_never_the_store_itself(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    store.query(f"copy (select {SEED} as n) to '{out}'", files=True)
    assert out.read_text() == f"n\n{SEED}\n"
    assert store.query(f"select n from '{out}'", files=True)["n"].tolist() == [SEED]
    for sql in (f"copy run to '{store.path}'", f"copy run to '{store.path.parent}/../ws/{store.path.name}'"):
        with pytest.raises(ConfigError, match="is the store itself"):
            store.query(sql, files=True)
    with pytest.raises(ConfigError, match="is not a query"):
        store.query("set threads = 2", files=True)
    with pytest.raises(ConfigError, match="reading only"):
        store.query("delete from rl_validation", files=True)
    assert store.missing("rl_validation", ["kept"]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "$${path}$$",
        "$x${path}$x$",
        '"{path}"',
        "('{half}' || '{rest}')",
        "e'{path}'",
        "'file://{path}'",
        "'file:{path}' (use_tmp_file false)",
        "'{path}.wal'",
        "'{folder}' (format csv, per_thread_output true, overwrite true)",
        "'{folder}/..' (format parquet, partition_by (trajectory_id), overwrite)",
        "/* here */ '{path}'",
    ],
)
@pytest.mark.parametrize("start", ["copy run to ", "explain analyze copy run to "])
def test_with_files_the_store_is_no_target_however_it_is_written(store: Store, start: str, target: str) -> None:
    store.checkpoint()
    path = str(store.path)
    before = store.path.read_bytes()
    clause = target.format(path=path, folder=store.path.parent, half=path[:6], rest=path[6:])
    with pytest.raises(ConfigError, match=r"the store itself|in single quotes"):
        store.answer(start + clause, files=True)
    assert store.path.read_bytes() == before


def test_an_answer_is_an_arrow_table_or_a_frame(store: Store) -> None:
    sql = f"select {SEED} as seed, 'x' as t"
    assert store.answer(sql).to_pylist() == [{"seed": SEED, "t": "x"}]
    assert store.query(sql).to_dict("records") == [{"seed": SEED, "t": "x"}]


def test_an_answer_is_a_polars_frame(store: Store) -> None:
    polars = pytest.importorskip("polars")
    assert polars.from_arrow(store.answer(f"select {SEED} as seed")).to_dicts() == [{"seed": SEED}]


def test_an_answer_is_written_to_parquet_and_read_back(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "new" / "answer.parquet"
    answer = store.answer(f"select {SEED} as seed, [1, null] as l, {{'a': 2e-11}} as s, null::varchar as z")
    write_parquet(answer, file)
    assert pq.read_table(file).equals(answer)
    assert [path.name for path in file.parent.iterdir()] == ["answer.parquet"]


def test_decimals_and_nested_values_keep_their_digits(store: Store) -> None:
    answer = store.answer("select [12345678901234567890.12::decimal(38,2)] as l, map{'k': 2e-11} as m")
    assert json.loads(to_json(answer), parse_float=Decimal) == [
        {"l": [Decimal("12345678901234567890.12")], "m": [["k", Decimal("2e-11")]]}
    ]


@pytest.mark.parametrize("value", [SEED, -SEED, 2**63 - 1, -(2**63)])
def test_parameters_are_exact(store: Store, value: Any) -> None:
    assert store.query("select $v::bigint as v", {"v": value})["v"].tolist() == [value]


LONG = "select count(*) from range(1000000000) a, range(1000) b"


@pytest.mark.slow
def test_a_question_ends_at_its_time_limit_and_the_next_is_answered(store: Store) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"stopped after 0.2 seconds, its time limit; .* --seconds N") as caught:
        store.answer(LONG, seconds=0.2)
    assert time.monotonic() - began < 20
    assert "\n" not in str(caught.value)
    assert store.answer("select 1 as one", seconds=1e12)["one"].to_pylist() == [1]


def test_an_interrupt_of_somebody_else_is_not_taken_for_the_limit(store: Store) -> None:
    with store.reading() as con, pytest.raises(duckdb.InterruptException), time_limit(con, 3600):
        raise duckdb.InterruptException("INTERRUPT Error: Interrupted!")
