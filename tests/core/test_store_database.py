"""The store in one process: bursts, what they refuse, and what they say when something is wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

import agentr_core
from agentr_core.errors import ConfigError, CorruptStore, StoreError
from agentr_core.fingerprint import fingerprint
from agentr_core.store import connection, migrations
from agentr_core.store.codec.ledger import iteration_rows
from agentr_core.store.codec.samples import chosen_rows
from agentr_core.store.codec.trees import load_pairs, oracle_rows
from agentr_core.store.database import Store, settled_state, snapshot
from agentr_core.store.tables import TABLES, merge
from agentr_core.types import Instance, Verdict

ROOT = Path(agentr_core.__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ws" / "agentr.duckdb", wait_s=2)


def text(name: str, value: str = "x") -> dict[str, str]:
    return {"text_id": name, "text": value}


def metric(name: str, value: float) -> dict[str, object]:
    return {"scope": "run", "scope_id": "r", "name": name, "value": value, "low": None, "high": None, "n": 3}


def test_insert_twice_stores_once_and_keeps_the_first(store: Store) -> None:
    store.write({"text": [text("a", "one"), text("a", "two")]})
    store.write({"text": [text("a", "three"), text("b")]})
    assert store.query("select text_id, text from text order by 1").values.tolist() == [["a", "one"], ["b", "x"]]


def test_write_updates_only_what_may_change_and_the_last_row_of_a_key_counts(store: Store) -> None:
    started: dict[str, str | None] = {"started_at": "2026-01-01", "finished_at": None}
    run = started | {"run_id": "r", "recipe": "a", "method": "m", "config": "{}", "versions": "{}", "workspace": "w"}
    store.write({"run": [run | {"status": "running"}]})
    store.write({"run": [run | {"status": "failed"}, run | {"status": "finished", "recipe": "b"}]})
    assert store.query("select recipe, status from run").values.tolist() == [["a", "finished"]]
    both = [run | {"run_id": "q", "status": "running"}, run | {"run_id": "q", "status": "failed", "recipe": "b"}]
    store.write({"run": both})
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
        store.write({"text": [text("a")], "metric": [metric("a", 1.0) | {"scope": "nonsense"}]})
    assert store.missing("text", ["a"]) == ["a"]

    def fail_half_way() -> None:
        with store.transaction() as con:
            con.execute("insert into text (text_id, text) values ('a', 'x')")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert store.missing("text", ["a"]) == ["a"]


def test_rows_with_different_columns_or_an_unknown_table_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="differ in their columns"):
        store.write({"text": [text("a"), {"text_id": "b"}]})
    with pytest.raises(KeyError, match="no table"):
        store.write({"texts": []})


def test_missing_keeps_the_order(store: Store) -> None:
    assert store.missing("text", ["b", "a"]) == ["b", "a"]
    assert not store.path.exists()
    store.write({"text": [text("a")]})
    assert store.missing("text", ["c", "a", "b"]) == ["c", "b"]


def test_tables_agree_with_the_schema(store: Store) -> None:
    store.write({})
    keys = store.query(
        "select table_name, constraint_column_names as key from duckdb_constraints() "
        "where constraint_type = 'PRIMARY KEY'"
    )
    stored = {name: tuple(key) for name, key in keys.values.tolist() if name != "schema_version"}
    assert stored == {name: table.key for name, table in TABLES.items()}
    columns = store.query("select table_name || '.' || column_name as c from duckdb_columns()")["c"].tolist()
    assert {f"{name}.{column}" for name, table in TABLES.items() for column in table.mutable} <= set(columns)
    assert {f"{name}.created_at" for name in TABLES} <= set(columns)


def test_everything_is_documented(store: Store) -> None:
    store.write({})
    bare = store.query(
        "select table_name from duckdb_tables() where comment is null "
        "union all select view_name from duckdb_views() where comment is null and not internal"
    )
    assert bare.values.tolist() == []


@pytest.mark.parametrize(
    "statement", ["insert into text (text_id, text) values ('a', 'b')", "drop table text", "delete from text"]
)
def test_query_refuses_writes(store: Store, statement: str) -> None:
    store.write({"text": [text("kept")]})
    with pytest.raises(ConfigError, match="for reading only"):
        store.query(statement)
    assert store.missing("text", ["kept"]) == []


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("selec 1", "syntax error"),
        ("select nope from text", "nope"),
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
    store.write({"text": [text("a", "one"), text("b", "two")]})
    assert store.query("select text from text where text_id = ?", ["b"])["text"].tolist() == ["two"]
    assert store.query("select text from text where text_id = $id", {"id": "a"})["text"].tolist() == ["one"]


def test_bursts_share_an_instance_of_duckdb_and_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    connect = duckdb.connect

    def counted(**options: Any) -> Any:
        started.append(connect(**options))
        return started[-1]

    store.write({"text": [text("a")]})
    monkeypatch.setattr(duckdb, "connect", counted)
    with store.reading() as con:
        con.execute("create temp table mine as select 1")
        assert str(store.path) in {file.path for file in psutil.Process().open_files()}
    assert str(store.path) not in {file.path for file in psutil.Process().open_files()}
    with store.transaction() as con, pytest.raises(duckdb.CatalogException):
        con.execute("from mine")
    assert store.rows("select text_id from text") == [("a",)]
    assert not started, "the instance of the first burst serves all"

    # A user's question shuts other files off, and locks what its instance may do.
    assert store.query("select 1 as one")["one"].tolist() == [1]
    store.write({"text": [text("b")]})
    assert len(started) == 1
    settings = "select current_setting('threads'), count(*) from text"
    assert store.rows(settings) == [(1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(connection, "_LARGE_BYTES", 0)
        assert store.rows(settings) == [(4, 2)], "a large file is read by several threads"
    assert store.rows(settings) == [(1, 2)]
    assert len(started) == 1


def test_a_relative_path_follows_the_program_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(Path("store.duckdb"), wait_s=2)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        store.write({"text": [text(name)]})
        assert store.rows("select text_id from text") == [(name,)]


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
        Store(path).write({"text": [text("a")]})
    assert path.read_bytes() == content


@pytest.mark.parametrize(("start", "stop"), [(0, 4096), (4096, 12_288), (12_288, None)])
def test_damage_is_reported(store: Store, start: int, stop: int | None) -> None:
    store.write({"text": [text("a")]})
    store.checkpoint()
    content = bytearray(store.path.read_bytes())
    content[start:stop] = b"\xff" * len(content[start:stop])
    store.path.write_bytes(content)
    with pytest.raises(CorruptStore):
        store.query("select count(*) from text")
    with pytest.raises(CorruptStore):
        store.write({"text": [text("b")]})
    assert store.path.read_bytes() == bytes(content)


def test_a_log_without_its_database_is_not_taken_over(store: Store) -> None:
    store.write({"text": [text("a")]})
    store.path.unlink()
    with pytest.raises(CorruptStore, match=r"bring .* back"):
        store.write({"text": [text("b")]})
    assert store.path.with_name(store.path.name + ".wal").exists()


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.duckdb"
    with duckdb.connect(str(path)) as con:
        con.execute("create table holiday (day date)")
    for attempt in (lambda: Store(path).query("select 1"), lambda: Store(path).write({"text": [text("a")]})):
        with pytest.raises(StoreError, match=r"something else.*'holiday'"):
            attempt()
    with duckdb.connect(str(path)) as con:
        assert con.execute("select table_name from duckdb_tables()").fetchall() == [("holiday",)]


def test_a_newer_schema_is_refused(store: Store) -> None:
    store.write({})
    with store.transaction() as con:
        con.execute("insert into schema_version (version, name) values (9999, 'future')")
    for attempt in (lambda: store.query("select 1"), lambda: store.write({"text": [text("a")]})):
        with pytest.raises(StoreError, match=r"schema version 9999.*update agentr"):
            attempt()


@pytest.mark.slow
def test_an_older_schema_is_brought_up_by_the_first_who_opens_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        first = migrations.available()[:1]
        patch.setattr(migrations, "available", lambda: first)
        with Store(store.path).transaction() as con:
            con.execute("insert into text (text_id, text) values ('a', 'hello')")
            con.execute("create view v_of_before as select 1; create view v_orphans as from v_of_before")
            con.execute("create view mine as from text")
    assert store.query("select count(*) as n from v_orphans")["n"].tolist() == [0]
    # Views under other names are somebody's own, whatever the names begin with.
    assert store.rows("from v_of_before") == [(1,)]
    assert store.count("select count(*) from mine") == 1
    numbers = [migration.number for migration in migrations.available()]
    assert store.query("select version from schema_version order by 1")["version"].tolist() == numbers
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == migrations.VIEWS, "views are made after the tables that they show"
    assert store.missing("text", ["a"]) == []
    with duckdb.connect(str(store.path), read_only=True) as other:
        assert other.execute("select text_id from text").fetchall() == [("a",)]


def test_views_that_changed_have_a_higher_number() -> None:
    scripts = fingerprint(*(migration.sql for migration in migrations.available()))
    assert (migrations.VIEWS, scripts) == (45, "f358140209ca441b"), "stores keep their views until VIEWS is raised"


@pytest.mark.slow
def test_steps_and_nodes_of_before_new_columns_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        older = tuple(m for m in migrations.available() if m.number <= 5)
        patch.setattr(migrations, "available", lambda: older)
        with Store(store.path).transaction() as con:
            con.execute("insert into text (text_id, text) values ('t', 'hello')")
            con.execute(
                "insert into tree (tree_id, iteration_id, instance_id, checkpoint_id, seed, config, "
                "first_observation_id, dives_done, finished) "
                "values ('a', 'i', 'toy/train/0', 'c', 1, '{}', 't', 1, true)"
            )
            con.execute(
                "insert into node (tree_id, node_index, parent, depth, reply_id, action, observation_id, reward, "
                "visits, value_sum, terminal, dive, duplicates) "
                "values ('a', 1, 0, 1, 't', 'go', 't', 0.5, 1, 0.5, false, 0, 1)"
            )
    found = store.query("select action, matched is null, valid is null, observation from v_nodes")
    assert found.values.tolist() == [["go", True, True, "hello"]]
    assert store.query("select matched, valid from v_steps").empty


@pytest.mark.slow
def test_training_steps_of_before_they_told_their_rate_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        older = tuple(m for m in migrations.available() if m.number <= 40)
        patch.setattr(migrations, "available", lambda: older)
        with Store(store.path).transaction() as con:
            # The number that the views of that version had: what comes later must be above it.
            con.execute("insert into schema_version (version, name) values (42, 'views')")
            con.execute(
                "insert into training_step (checkpoint_id, step, loss, trained_tokens, seconds) "
                "values ('c', 1, 0.5, 2, 3.0)"
            )
    asked = "select step, loss, learning_rate, grad_norm from training_step"
    assert store.rows(asked) == [(1, 0.5, None, None)]


@pytest.mark.slow
def test_pairs_of_before_they_had_places_get_them_and_one_kind_of_id(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        older = tuple(m for m in migrations.available() if m.number <= 14)
        patch.setattr(migrations, "available", lambda: older)
        with Store(store.path).transaction() as con:
            for pair, tree, bad in (("p9", "a", 7), ("p1", "b", 5), ("p3", "a", 4)):
                con.execute(
                    "insert into pair (pair_id, iteration_id, tree_id, good_leaf, bad_leaf, shared_steps, good_reward, "
                    "bad_reward, gap) values (?, 'i', ?, 2, ?, 1, 1.0, 0.0, 1.0)",
                    [pair, tree, bad],
                )
            for stage, subject in (("splice", "a:2:4"), ("splice", "a:2"), ("pairs", "a:2:4")):
                con.execute("insert into rejection values ('i', ?, ?, 'why', '', now())", [stage, subject])
    assert {tree: [p.bad_leaf for p in pairs] for tree, pairs in load_pairs(store, "i").items()} == {
        "a": [7, 4],
        "b": [5],
    }
    subjects = store.query("select stage, subject from rejection order by all")
    assert subjects.values.tolist() == [["pairs", "a:2:4"], ["splice", "a:2"], ["splice", "p3"]]


@pytest.mark.slow
def test_choices_of_iterations_that_never_began_go_and_others_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        older = tuple(m for m in migrations.available() if m.number <= 29)
        patch.setattr(migrations, "available", lambda: older)
        begun = iteration_rows("begun", run_id="r", iteration=1)
        choices = [
            chosen_rows(key, {"train": [Instance(environment="toy", split="train", index=3)]})
            for key in ("begun", "foreseen")
        ]
        Store(store.path).write(merge([begun, *choices]))
    assert store.query("select iteration_id from chosen_instance")["iteration_id"].tolist() == ["begun"]


def test_a_failing_migration_leaves_the_version_before_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write({"text": [text("a")]})
    known = migrations.available()
    broken = migrations.Migration(
        number=known[-1].number + 1, name="broken", sql="create table fresh (a int); select * from nope"
    )
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "available", lambda: (*known, broken))
        with pytest.raises(duckdb.CatalogException):
            Store(store.path).write({})
    assert store.query("select count(*) as n from duckdb_tables() where table_name = 'fresh'")["n"].tolist() == [0]
    assert store.missing("text", ["a"]) == []


def test_a_path_that_cannot_be_used_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be made"):
        Store(tmp_path / "file" / "agentr.duckdb").write({})
    with pytest.raises(StoreError):
        Store(tmp_path).query("select 1")


def test_the_file_is_the_whole_store_after_a_checkpoint(store: Store, tmp_path: Path) -> None:
    store.write({"text": [text("a")]})
    store.checkpoint()
    copy = tmp_path / "copy's name.duckdb"
    copy.write_bytes(store.path.read_bytes())
    assert Store(copy).missing("text", ["a"]) == []
    with duckdb.connect(str(copy), read_only=True) as con:
        assert con.execute("from v_iterations").fetchall() == []


@pytest.mark.slow
def test_a_full_disk_is_reported_and_nothing_stored_is_lost(store: Store) -> None:
    store.write({"text": [text("before")]})
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
        store.write({{"text": [{{"text_id": str(number), "text": os.urandom(100_000).hex()}}]}})
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
    stored = [str(number) for number in range(int(done.stdout.split()[0]))]
    assert store.missing("text", ["before", *stored]) == []
    store.write({"text": [text("after")]})
    assert store.missing("text", ["after"]) == []


def test_a_backup_is_one_sound_file_with_all_that_was_written(store: Store, tmp_path: Path) -> None:
    store.write({"text": [text("a")]})
    assert store.path.with_name(store.path.name + ".wal").exists()
    copy = tmp_path / "copy.duckdb"
    store.backup(copy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.duckdb", "ws"]
    with duckdb.connect(str(copy), read_only=True) as con:
        assert con.execute("select text_id from text").fetchall() == [("a",)]
    store.write({"text": [text("b")]})
    assert Store(copy).missing("text", ["a", "b"]) == ["b"]


def test_no_backup_is_made_of_damaged_blocks(store: Store, tmp_path: Path) -> None:
    store.write({"text": [{"text_id": f"w{number}", "text": os.urandom(500).hex()} for number in range(3000)]})
    store.checkpoint()
    content = bytearray(store.path.read_bytes())
    content[len(content) // 2 :: 4096] = bytes(len(content[len(content) // 2 :: 4096]))
    store.path.write_bytes(content)
    with pytest.raises((CorruptStore, StoreError)):
        Store(store.path).backup(tmp_path / "copy.duckdb")
    assert not list(tmp_path.glob("copy*"))


def test_a_copy_on_a_read_only_disk_can_be_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write({"text": [text("a")]})
    store.checkpoint()
    opened = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and str(path).endswith((".queue", ".lock")):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert Store(store.path).query("select text_id from text")["text_id"].tolist() == ["a"]
    with pytest.raises(StoreError, match="Read-only file system"):
        Store(store.path).write({"text": [text("b")]})


def test_a_backup_replaces_nothing_and_leaves_nothing_half(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        store.backup(tmp_path / "a.duckdb")
    store.write({"text": [text("a")]})
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        store.backup(taken)
    with pytest.raises(StoreError, match="exists already"):
        store.backup(store.path)
    for missing in (tmp_path / "none", taken):
        with pytest.raises(StoreError, match=f"{missing} is no folder; make it, or name another file"):
            store.backup(missing / "a.duckdb")
    assert taken.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "ws"]


@pytest.mark.slow
def test_a_backup_waits_for_a_writer_and_a_writer_for_it(store: Store, tmp_path: Path) -> None:
    store.write({"text": [text("a")]})
    code = """
import sys, time
from pathlib import Path
from agentr_core.store import Store
store = Store(Path(sys.argv[1]))
for number in range(200):
    store.write({"text": [{"text_id": f"w{number}", "text": "x" * 1000}]})
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(store.path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        counts = []
        for number in range(3):
            writer.stdout.readline()
            copy = tmp_path / f"copy-{number}.duckdb"
            Store(store.path, wait_s=60).backup(copy)
            counts.append(Store(copy).query("select count(*) as n from text")["n"][0])
        writer.stdout.read()
    assert counts == sorted(counts)
    assert store.query("select count(*) as n from text")["n"][0] == 201


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
    seen = []

    def read(state: Store) -> int:
        seen.append(state.count("select count(*) from oracle_verdict"))
        if not seen[-1]:
            state.write(oracle_rows("t", {1: Verdict.BAD}))
        return seen[-1]

    assert settled_state(store, read) == 1
    assert seen == [0, 1]
    assert settled_state(store, read) == 1
    assert seen == [0, 1, 1], "once is enough where nothing is written"
