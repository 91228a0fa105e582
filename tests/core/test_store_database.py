"""The store in one process: bursts, what they refuse, and what they say when something is wrong."""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import duckdb
import gallery
import psutil
import pytest

import agentr_core
from agentr_core.errors import ConfigError, CorruptStore, StoreError
from agentr_core.fingerprint import fingerprint
from agentr_core.store import connection, migrations
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.codec.trajectories import load_critiques, load_trajectories, load_trees, oracle_rows
from agentr_core.store.database import Store, insert_rows, read_consistently, snapshot
from agentr_core.store.records import to_arrow_table
from agentr_core.store.tables import TABLES
from agentr_core.types import Verdict

ROOT = Path(agentr_core.__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ws" / "agentr.duckdb", wait_s=2)


def row(name: str, value: str = "x") -> dict[str, Any]:
    return {"trajectory_id": name, "step": 1, "iteration_id": value}


def metric(name: str, value: float) -> dict[str, object]:
    return {"scope": "run", "scope_id": "r", "name": name, "value": value, "low": None, "high": None, "n": 3}


def test_insert_twice_stores_once_and_keeps_the_first(store: Store) -> None:
    store.write({"rl_validation": [row("a", "one"), row("a", "two")]})
    store.write({"rl_validation": [row("a", "three"), row("b")]})
    assert store.query("select trajectory_id, iteration_id from rl_validation order by 1").values.tolist() == [
        ["a", "one"],
        ["b", "x"],
    ]


def test_write_updates_only_what_may_change_and_the_last_row_of_a_key_counts(store: Store) -> None:
    times: dict[str, str | None] = {"started_at": "2026-01-01", "finished_at": None}
    run = times | {"run_id": "r", "recipe": "a", "method": "m", "config": "{}", "versions": "{}", "workspace": "w"}
    store.write({"run": [run | {"status": "running"}]})
    store.write({"run": [run | {"status": "failed"}, run | {"status": "finished", "recipe": "b"}]})
    assert store.query("select recipe, status from run").values.tolist() == [["a", "finished"]]
    rows = [run | {"run_id": "q", "status": "running"}, run | {"run_id": "q", "status": "failed", "recipe": "b"}]
    store.write({"run": rows})
    assert store.query("select recipe, status from run where run_id = 'q'").values.tolist() == [["a", "failed"]]


def test_upsert_and_update_change_values(store: Store) -> None:
    store.write({"metric": [metric("a", 1.0)]})
    store.write({"metric": [metric("a", 2.0), metric("b", 3.0)]})
    store.update("metric", {"scope": "run", "scope_id": "r", "name": "b", "value": 4.0})
    assert store.query("select name, value, n from metric order by 1").values.tolist() == [["a", 2.0, 3], ["b", 4.0, 3]]
    with pytest.raises(KeyError, match="metric has no row"):
        store.update("metric", {"scope": "run", "scope_id": "r", "name": "c", "value": 4.0})


def test_write_is_all_or_nothing(store: Store) -> None:
    with pytest.raises(duckdb.ConstraintException):
        store.write({"rl_validation": [row("a")], "metric": [metric("a", 1.0) | {"scope": "nonsense"}]})
    assert store.missing("rl_validation", ["a"]) == ["a"]

    def fail_half_way() -> None:
        with store.transaction() as con:
            con.execute("insert into rl_validation (trajectory_id, step, iteration_id) values ('a', 1, 'x')")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert store.missing("rl_validation", ["a"]) == ["a"]


def test_rows_with_different_columns_or_an_unknown_table_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="differ in their columns"):
        store.write({"rl_validation": [row("a"), {"trajectory_id": "b"}]})
    with pytest.raises(KeyError, match="no table"):
        store.write({"texts": []})


def test_missing_keeps_the_order(store: Store) -> None:
    assert store.missing("rl_validation", ["b", "a"]) == ["b", "a"]
    assert not store.path.exists()
    store.write({"rl_validation": [row("a")]})
    assert store.missing("rl_validation", ["c", "a", "b"]) == ["c", "b"]


def test_tables_agree_with_the_schema(store: Store) -> None:
    store.write({})
    keys = store.query(
        "select table_name, constraint_column_names as key from duckdb_constraints() "
        "where constraint_type = 'PRIMARY KEY'"
    )
    keys_by_table = {name: tuple(key) for name, key in keys.values.tolist() if name != "schema_version"}
    assert keys_by_table == {name: table.key for name, table in TABLES.items()}
    columns = store.query("select table_name || '.' || column_name as c from duckdb_columns()")["c"].tolist()
    assert {f"{name}.{column}" for name, table in TABLES.items() for column in table.mutable_columns} <= set(columns)
    assert {f"{name}.created_at" for name in TABLES} <= set(columns)


def test_tables_of_records_are_what_their_types_say(store: Store) -> None:
    """A field that is new needs a migration, and one that may be None a column that may be null."""
    store.write({})
    of_records = {name: table.column_types for name, table in TABLES.items() if table.record is not None}
    for name, hints in of_records.items():
        expected = {
            column: (str(duckdb.from_arrow(to_arrow_table([], [column], hints)).types[0]), NoneType in get_args(hint))
            for column, hint in hints.items()
        }
        table_columns = {
            column: (kind.replace("JSON", "VARCHAR"), not is_required)
            for _, column, kind, is_required, *_ in store.rows(f"select * from pragma_table_info('main.{name}')")
            if column != "created_at"
        }
        assert table_columns == expected, f"write a migration for table {name}"


def test_everything_is_documented(store: Store) -> None:
    store.write({})
    bare = store.query(
        "select table_name from duckdb_tables() where comment is null "
        "union all select view_name from duckdb_views() where comment is null and not internal"
    )
    assert bare.values.tolist() == []


@pytest.mark.parametrize(
    "statement",
    [
        "insert into rl_validation (trajectory_id, step, iteration_id) values ('a', 1, 'b')",
        "drop table rl_validation",
        "delete from rl_validation",
    ],
)
def test_query_refuses_writes(store: Store, statement: str) -> None:
    store.write({"rl_validation": [row("kept")]})
    with pytest.raises(ConfigError, match="for reading only"):
        store.query(statement)
    assert store.missing("rl_validation", ["kept"]) == []


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("selec 1", "syntax error"),
        ("select nope from rl_validation", "nope"),
        ("select * from nope", "nope"),
        ("select cast('x' as int)", "Could not convert"),
        ("", "no statement"),
        ("-- nothing", "no statement"),
        ("select * from 'no-such-file.csv'", "no-such-file"),
        ("select ?", "parameter"),
    ],
)
def test_a_mistake_in_sql_is_one_sentence_of_the_user(store: Store, sql: str, says: str) -> None:
    store.write({})
    with pytest.raises(ConfigError, match=says) as caught:
        store.query(sql)
    assert "\n" not in str(caught.value)


def test_query_takes_parameters(store: Store) -> None:
    store.write({"rl_validation": [row("a", "one"), row("b", "two")]})
    assert store.query("select iteration_id from rl_validation where trajectory_id = ?", ["b"])[
        "iteration_id"
    ].tolist() == ["two"]
    assert store.query("select iteration_id from rl_validation where trajectory_id = $id", {"id": "a"})[
        "iteration_id"
    ].tolist() == ["one"]


def test_bursts_share_an_instance_of_duckdb_and_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[Any] = []
    connect = duckdb.connect

    def connect_and_count(**options: Any) -> Any:
        connections.append(connect(**options))
        return connections[-1]

    store.write({"rl_validation": [row("a")]})
    monkeypatch.setattr(duckdb, "connect", connect_and_count)
    with store.reading() as con:
        con.execute("create temp table mine as select 1")
        assert str(store.path) in {file.path for file in psutil.Process().open_files()}
    assert str(store.path) not in {file.path for file in psutil.Process().open_files()}
    with store.transaction() as con, pytest.raises(duckdb.CatalogException):
        con.execute("from mine")
    assert store.rows("select trajectory_id from rl_validation") == [("a",)]
    assert not connections, "the instance of the first burst serves all"

    # A user's question shuts other files off, and locks what its instance may do.
    assert store.query("select 1 as one")["one"].tolist() == [1]
    store.write({"rl_validation": [row("b")]})
    assert len(connections) == 1
    settings = "select current_setting('threads'), count(*) from rl_validation"
    assert store.rows(settings) == [(1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(connection, "_LARGE_FILE_BYTES", 0)
        assert store.rows(settings) == [(1, 2)]
        threads = store.query("select current_setting('threads') as threads")["threads"]
        assert threads.tolist() == [4], "a user's query of a large file has several threads"
    assert store.rows(settings) == [(1, 2)]


def test_a_relative_path_follows_the_program_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(Path("store.duckdb"), wait_s=2)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        store.write({"rl_validation": [row(name)]})
        assert store.rows("select trajectory_id from rl_validation") == [(name,)]


def test_reading_a_missing_store_creates_nothing(store: Store) -> None:
    with pytest.raises(StoreError, match="no store at"):
        store.query("select 1")
    assert not store.path.parent.exists()


@pytest.mark.parametrize("content", [b"hello world" * 1000, b"", b"\0" * 20_000])
def test_a_file_of_something_else_is_reported_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "agentr.duckdb"
    path.write_bytes(content)
    with pytest.raises(CorruptStore, match="damaged or no DuckDB file") as caught:
        Store(path).query("select 1")
    assert "\n" not in str(caught.value)
    with pytest.raises(CorruptStore):
        Store(path).write({"rl_validation": [row("a")]})
    assert path.read_bytes() == content


@pytest.mark.parametrize(("start", "stop"), [(0, 4096), (4096, 12_288), (12_288, None)])
def test_damage_is_reported(store: Store, start: int, stop: int | None) -> None:
    store.write({"rl_validation": [row("a")]})
    store.checkpoint()
    content = bytearray(store.path.read_bytes())
    content[start:stop] = b"\xff" * len(content[start:stop])
    store.path.write_bytes(content)
    with pytest.raises(CorruptStore):
        store.query("select count(*) from rl_validation")
    with pytest.raises(CorruptStore):
        store.write({"rl_validation": [row("b")]})
    assert store.path.read_bytes() == bytes(content)


def test_a_log_without_its_database_is_not_taken_over(store: Store) -> None:
    store.write({"rl_validation": [row("a")]})
    store.path.unlink()
    with pytest.raises(CorruptStore, match=r"bring .* back"):
        store.write({"rl_validation": [row("b")]})
    assert store.path.with_name(store.path.name + ".wal").exists()


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.duckdb"
    with duckdb.connect(str(path)) as con:
        con.execute("create table holiday (day date)")
    for attempt in (lambda: Store(path).query("select 1"), lambda: Store(path).write({"rl_validation": [row("a")]})):
        with pytest.raises(StoreError, match=r"something else.*'holiday'"):
            attempt()
    with duckdb.connect(str(path)) as con:
        assert con.execute("select table_name from duckdb_tables()").fetchall() == [("holiday",)]


def test_a_newer_schema_is_refused(store: Store) -> None:
    store.write({})
    with store.transaction() as con:
        con.execute("insert into schema_version (version, name) values (9999, 'future')")
    for attempt in (lambda: store.query("select 1"), lambda: store.write({"rl_validation": [row("a")]})):
        with pytest.raises(StoreError, match=r"schema version 9999.*update agentr"):
            attempt()


@pytest.mark.slow
def test_an_older_schema_is_brought_up_by_the_first_who_opens_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        first_migrations = migrations.available()[:1]
        patch.setattr(migrations, "available", lambda: first_migrations)
        with Store(store.path).transaction() as con:
            insert_rows(con, gallery.answered("a"))
            con.execute("create view v_of_before as select 1; create view v_orphans as from v_of_before")
            con.execute("create view mine as from answered_call")
    assert store.query("select count(*) as n from v_orphans")["n"].tolist() == [0]
    # Views under other names are somebody's own, whatever the names begin with.
    assert store.rows("from v_of_before") == [(1,)]
    assert store.count("select count(*) from mine") == 1
    numbers = [migration.number for migration in migrations.available()]
    assert store.query("select version from schema_version order by 1")["version"].tolist() == numbers
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == migrations.VIEWS_NUMBER, "views are made after the tables that they show"
    assert store.missing("answered_call", ["a"]) == []
    with duckdb.connect(str(store.path), read_only=True) as reader:
        assert reader.execute("select call_id from answered_call").fetchall() == [("a",)]


_EPISODES = """
insert into trajectory (trajectory_id, instance_id, num_steps, given, asked, source, instance, first_observation, steps,
    reward, success, stop)
select number::varchar, 'door/train/0', 6, 0, [], 'rollout', {environment: 'door', split: 'train', index: 0}, 'a door',
    [{reply: repeat('reply ' || number || ' ' || step, 9), action: 'open', observation: 'it creaks', reward: 0.5,
        matched: null, valid: step % 2 = 0, terminated: false, success: false, disaster: false,
        token_ids: [number, step], logprobs: [-0.5 * step], finish_reason: 'stop', tokenizer: '4f1c', dropped: 0,
        tool_calls: [], answers: []} for step in range(6)], 0.5, false, 'failure'
from range(4000) episodes (number)
"""


@pytest.mark.slow
def test_a_filled_store_of_before_has_its_rows_when_it_is_brought_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = "select trajectory_id, steps::varchar as steps from trajectory order by trajectory_id::bigint"
    with monkeypatch.context() as patch:
        earlier = tuple(migration for migration in migrations.available() if migration.number < 112)
        patch.setattr(migrations, "available", lambda: earlier)
        with Store(store.path).transaction() as con:
            con.execute(_EPISODES)
            before = con.execute(sql).fetchall()
    assert store.count("select count(*) from v_steps where summary_of is null") == 24_000
    after = store.rows(sql)
    assert [(key, steps.replace(", 'summary_of': NULL, 'state_key': NULL", "")) for key, steps in after] == before
    assert load_trajectories(store, ["7"])["7"].steps[3].token_ids == (7, 3)


def test_views_that_changed_have_a_higher_number() -> None:
    scripts = fingerprint(*(migration.sql for migration in migrations.available()))
    assert (migrations.VIEWS_NUMBER, scripts) == (122, "c2b4638cd2326494"), (
        "stores keep their views until VIEWS is raised"
    )


def test_a_store_of_before_the_records_is_refused_in_one_sentence(tmp_path: Path) -> None:
    old = tmp_path / "old.duckdb"
    with duckdb.connect(str(old)) as con:
        con.execute("create table schema_version (version integer primary key, name varchar, created_at timestamp)")
        con.execute("insert into schema_version values (42, 'views', now())")
        con.execute("create table text (text_id varchar primary key, text varchar)")
    before = old.read_bytes()
    for attempt in (
        lambda: Store(old).query("select 1"),
        lambda: Store(old).write({}),
        lambda: Store(old).backup(tmp_path / "copy.duckdb"),
    ):
        with pytest.raises(StoreError, match=r"schema version 42, which this version .* `agentr sql .* FILE.parquet`$"):
            attempt()
    assert old.read_bytes() == before


@pytest.mark.slow
def test_training_steps_of_before_they_told_their_rate_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        older = tuple(m for m in migrations.available() if m.number <= 100)
        patch.setattr(migrations, "available", lambda: older)
        with Store(store.path).transaction() as con:
            # The number that the views of that version had: what comes later must be above it.
            con.execute("insert into schema_version (version, name) values (101, 'views')")
            con.execute(
                "insert into training_step (checkpoint_id, step, loss, trained_tokens, seconds) "
                "values ('c', 1, 0.5, 2, 3.0)"
            )
    sql = "select step, loss, learning_rate, grad_norm from training_step"
    assert store.rows(sql) == [(1, 0.5, None, None)]


@pytest.mark.slow
def test_a_store_that_the_first_version_of_these_tables_made_is_read(tmp_path: Path) -> None:
    """The file is `gallery.fill` as version 101 stored it; later ones migrate what they change."""
    archive = ROOT / "tests" / "support" / "store_101.duckdb.gz"
    old_store = Store(tmp_path / "kept.duckdb")
    old_store.path.write_bytes(gzip.decompress(archive.read_bytes()))
    with duckdb.connect(str(old_store.path), read_only=True) as con:
        columns: dict[str, list[str]] = {}
        for table, column in con.execute("select table_name, column_name from duckdb_columns()").fetchall():
            columns.setdefault(table, []).append(column)
    new_store = gallery.fill(tmp_path / "fresh.duckdb")
    assert old_store.version() >= migrations.FIRST_NUMBER
    with snapshot(old_store) as old, snapshot(new_store) as new:
        for table in TABLES.keys() & columns.keys():
            names = ", ".join(name for name in columns[table] if name not in ("created_at", "event_id"))
            sql = f"select {names} from {table} order by all"
            assert old.rows(sql) == new.rows(sql), table
    assert load_trajectories(old_store, gallery.ROLLOUTS) == load_trajectories(new_store, gallery.ROLLOUTS)
    assert load_trees(old_store, [gallery.TREE]) == load_trees(new_store, [gallery.TREE])
    assert load_samples(old_store, [gallery.REVISION]) == load_samples(new_store, [gallery.REVISION])
    assert load_critiques(old_store, [gallery.PAIR]) == load_critiques(new_store, [gallery.PAIR])
    old_store.write(gallery.begun("new", "What is written now."))
    assert old_store.rows("select * from v_orphans") == []


@pytest.mark.slow
def test_a_failing_migration_leaves_the_version_before_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write({"rl_validation": [row("a")]})
    all_migrations = migrations.available()
    broken = migrations.Migration(
        number=all_migrations[-1].number + 1, name="broken", sql="create table fresh (a int); select * from nope"
    )
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "available", lambda: (*all_migrations, broken))
        with pytest.raises(duckdb.CatalogException):
            Store(store.path).write({})
    assert store.query("select count(*) as n from duckdb_tables() where table_name = 'fresh'")["n"].tolist() == [0]
    assert store.missing("rl_validation", ["a"]) == []


def test_a_path_that_cannot_be_used_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be made"):
        Store(tmp_path / "file" / "agentr.duckdb").write({})
    with pytest.raises(StoreError):
        Store(tmp_path).query("select 1")


def test_the_file_is_the_whole_store_after_a_checkpoint(store: Store, tmp_path: Path) -> None:
    store.write({"rl_validation": [row("a")]})
    store.checkpoint()
    copy = tmp_path / "copy's name.duckdb"
    copy.write_bytes(store.path.read_bytes())
    assert Store(copy).missing("rl_validation", ["a"]) == []
    with duckdb.connect(str(copy), read_only=True) as con:
        assert con.execute("from v_iterations").fetchall() == []


@pytest.mark.slow
def test_a_full_disk_is_reported_and_nothing_stored_is_lost(store: Store) -> None:
    store.write({"rl_validation": [row("before")]})
    store.checkpoint()
    code = f"""
import os, resource
from pathlib import Path
from agentr_core.errors import CorruptStore, StoreError
from agentr_core.store import Store
store = Store(Path({str(store.path)!r}))
limit = store.path.stat().st_size + 100_000
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for number in range(40):
    try:
        row = {{"trajectory_id": str(number), "step": 1, "iteration_id": os.urandom(100_000).hex()}}
        store.write({{"rl_validation": [row]}})
    except CorruptStore as error:
        raise SystemExit(f"taken for damage: {{error}}")
    except StoreError as error:
        assert "free some disk space" in str(error), error
        print(number, "stored before the disk was full")
        break
else:
    raise SystemExit("the disk was never full")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    keys = [str(number) for number in range(int(done.stdout.split()[0]))]
    assert store.missing("rl_validation", ["before", *keys]) == []
    store.write({"rl_validation": [row("after")]})
    assert store.missing("rl_validation", ["after"]) == []


@pytest.mark.slow
def test_a_backup_is_one_sound_file_with_all_that_was_written(store: Store, tmp_path: Path) -> None:
    store.write({"rl_validation": [row("a")]})
    assert store.path.with_name(store.path.name + ".wal").exists()
    copy = tmp_path / "copy.duckdb"
    store.backup(copy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.duckdb", "ws"]
    with duckdb.connect(str(copy), read_only=True) as con:
        assert con.execute("select trajectory_id from rl_validation").fetchall() == [("a",)]
    store.write({"rl_validation": [row("b")]})
    assert Store(copy).missing("rl_validation", ["a", "b"]) == ["b"]


def test_no_backup_is_made_of_damaged_blocks(store: Store, tmp_path: Path) -> None:
    store.write(
        {
            "rl_validation": [
                {"trajectory_id": f"w{number}", "step": 1, "iteration_id": os.urandom(500).hex()}
                for number in range(3000)
            ]
        }
    )
    store.checkpoint()
    content = bytearray(store.path.read_bytes())
    content[len(content) // 2 :: 4096] = bytes(len(content[len(content) // 2 :: 4096]))
    store.path.write_bytes(content)
    with pytest.raises((CorruptStore, StoreError)):
        Store(store.path).backup(tmp_path / "copy.duckdb")
    assert not list(tmp_path.glob("copy*"))


def test_a_copy_on_a_read_only_disk_can_be_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write({"rl_validation": [row("a")]})
    store.checkpoint()
    os_open = os.open

    def open_read_only(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and str(path).endswith((".queue", ".lock")):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return os_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_read_only)
    assert Store(store.path).query("select trajectory_id from rl_validation")["trajectory_id"].tolist() == ["a"]
    with pytest.raises(StoreError, match="Read-only file system"):
        Store(store.path).write({"rl_validation": [row("b")]})


@pytest.mark.slow
def test_a_backup_replaces_nothing_and_leaves_nothing_half(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        store.backup(tmp_path / "a.duckdb")
    store.write({"rl_validation": [row("a")]})
    target = tmp_path / "taken"
    target.write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        store.backup(target)
    with pytest.raises(StoreError, match="exists already"):
        store.backup(store.path)
    for missing in (tmp_path / "none", target):
        with pytest.raises(StoreError, match=f"{missing} is no folder; make it, or name another file"):
            store.backup(missing / "a.duckdb")
    assert target.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "ws"]


@pytest.mark.slow
def test_a_backup_waits_for_a_writer_and_a_writer_for_it(store: Store, tmp_path: Path) -> None:
    store.write({"rl_validation": [row("a")]})
    code = """
import sys, time
from pathlib import Path
from agentr_core.store import Store
store = Store(Path(sys.argv[1]))
for number in range(200):
    store.write({"rl_validation": [{"trajectory_id": f"w{number}", "step": 1, "iteration_id": "x" * 1000}]})
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(store.path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        counts = []
        for number in range(3):
            writer.stdout.readline()
            copy = tmp_path / f"copy-{number}.duckdb"
            Store(store.path, wait_s=60).backup(copy)
            counts.append(Store(copy).query("select count(*) as n from rl_validation")["n"][0])
        writer.stdout.read()
    assert counts == sorted(counts)
    assert store.query("select count(*) as n from rl_validation")["n"][0] == 201


def test_what_is_written_while_one_state_is_read_is_stored_afterwards(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb", wait_s=1)
    store.write({})
    count = "select count(*) from oracle_verdict"
    with snapshot(store) as state:
        state.write(oracle_rows("t", {1: Verdict.BAD}))
        assert state.count(count) == 0
    assert store.count(count) == 1

    def fails() -> None:
        with snapshot(store) as state:
            state.write(oracle_rows("u", {1: Verdict.GOOD}))
            raise ValueError("no report")

    with pytest.raises(ValueError, match="no report"):
        fails()
    assert store.count(count) == 1


def test_what_a_reading_writes_is_read_by_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb", wait_s=1)
    store.write({})
    counts = []

    def read(state: Store) -> int:
        counts.append(state.count("select count(*) from oracle_verdict"))
        if not counts[-1]:
            state.write(oracle_rows("t", {1: Verdict.BAD}))
        return counts[-1]

    assert read_consistently(store, read) == 1
    assert counts == [0, 1]
    assert read_consistently(store, read) == 1
    assert counts == [0, 1, 1], "once is enough where nothing is written"
