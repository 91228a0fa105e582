"""A store file is data: names in it are quoted, and nothing of somebody else's runs, or is lost."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import gallery
import pytest

from agentr_core.errors import ConfigError, StoreError
from agentr_core.store import migrations
from agentr_core.store.care.rewriting import compact, merge_stores, prune, table_sizes
from agentr_core.store.connection import quoted
from agentr_core.store.database import Store

pytestmark = pytest.mark.slow
ODD = (
    "two words",
    'a "quoted" word',
    "it's",
    "one; two",
    "v_one; two",
    "v_mine",
    "V_Other",
    "select",
    "table",
    "Größe",
    "表",
    "x" * 300,
    "a.b",
    "-- dash",
    "/* star */",
    "{table}",
    "%s",
    "$1",
    "two\nlines",
    "kept",
    "incoming",
    "Old",
)
SCHEMAS = ("old", "store", "other", "main 2", 'm"; x')
Rows = dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return gallery.fill(tmp_path_factory.mktemp("filled") / "store.duckdb")


@pytest.fixture
def store(filled: Store, tmp_path: Path) -> Store:
    """A store of the test's own, filled."""
    return Store(Path(shutil.copytree(filled.path.parent, tmp_path / "ws")) / filled.path.name)


def shell(store: Store, *statements: str) -> None:
    """Do what somebody does to the file with another program."""
    with duckdb.connect() as con:
        con.execute(f"attach '{store.path}' as mine; use mine.main")
        for statement in statements:
            con.execute(statement)


def add_odd(store: Store, folder: Path) -> None:
    """Put tables and views with odd names into a store, of all kinds that DuckDB has."""
    (folder / "gone.csv").write_text("a\n1\n")
    shell(
        store,
        *(f"create schema {quoted(name)}" for name in SCHEMAS),
        *(f"create table {quoted(name)}.{quoted(ODD[0])} as select 7 as a" for name in SCHEMAS),
        *(f"create table {quoted(name)} ({quoted(name)} integer, s struct(x integer))" for name in ODD[::2]),
        *(f"insert into {quoted(name)} values (1, {{'x': 2}}), (null, null)" for name in ODD[::2]),
        *(f"create view {quoted(name)} as select {len(name)} as {quoted(name)}" for name in ODD[1::2]),
        "create table zebra (a integer primary key)",
        "create table ant (a integer references zebra (a), twice integer generated always as (a + a), c integer)",
        "create sequence counter; create index beside on zebra (a)",
        "insert into zebra values (nextval('counter')), (nextval('counter'))",
        "insert into ant (a) values (1)",
        "comment on table zebra is 'It''s mine.'",
        "create macro plus_one(x) as x + 1; create type mood as enum ('good', 'bad')",
        "create table gone (a integer); create view of_gone as from gone; drop table gone",
        f"create view of_file as from read_csv('{folder / 'gone.csv'}')",
        "alter table run add column note varchar; update run set note = 'mine'",
    )
    (folder / "gone.csv").unlink()


def somebodys(store: Store) -> Rows:
    """Return all that is in a store beside our rows."""
    with duckdb.connect() as con:
        con.execute(f"attach '{store.path}' as mine (read_only); use mine.main")
        rows_by_kind = {
            kind: con.execute(f"select {columns} from duckdb_{kind}() where not internal order by all").fetchall()
            for kind, columns in (
                ("tables", "schema_name, table_name, comment, sql"),
                ("views", "schema_name, view_name, comment, sql"),
                ("functions", "function_name, macro_definition"),
                ("types", "type_name"),
            )
        }
        # DuckDB does not write ours in the same way each time.
        ours = migrations._view_names(migrations.available()[-1].sql)
        rows_by_kind["views"] = [row for row in rows_by_kind["views"] if row[1] not in ours]
        rows_by_kind["sequences"] = con.execute(
            "select sequence_name, last_value is null from duckdb_sequences()"
        ).fetchall()
        rows_by_kind["indexes"] = con.execute("select index_name, sql from duckdb_indexes()").fetchall()
        odd = [
            *((name, ODD[0]) for name in SCHEMAS),
            *(("main", name) for name in (*ODD[::2], "zebra", "ant")),
        ]
        rows = {
            f"{schema}.{table}": con.execute(f"from {quoted(schema)}.{quoted(table)} order by all").fetchall()
            for schema, table in odd
        }
        rows["note"] = con.execute("select run_id, note from run order by all").fetchall()
        return rows_by_kind | rows


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def back_up(store: Store) -> None:
    copy = store.path.with_name("copy.duckdb")
    store.backup(copy)
    store.path.unlink()
    copy.rename(store.path)


def merge_other(store: Store) -> None:
    other_store = Store(store.path.with_name("other.duckdb"))
    other_store.write(gallery.answered("theirs"))
    assert -merge_stores(store, [other_store]).num_removed_by_table["answered_call"] == 1


@pytest.mark.parametrize(
    "work",
    [compact, back_up, merge_other, lambda store: prune(store, []), table_sizes],
    ids=["compact", "backup", "merge", "prune", "sizes"],
)
def test_what_is_somebody_elses_survives_whatever_it_is_called(
    store: Store, tmp_path: Path, work: Callable[[Store], object]
) -> None:
    add_odd(store, tmp_path)
    before = somebodys(store)
    assert len(ODD) > 20
    work(store)
    assert somebodys(store).keys() == before.keys()
    for name, rows in somebodys(store).items():
        assert rows == before[name], name
    assert Store(store.path).query(f"from {quoted(ODD[1])}").values.tolist() == [[len(ODD[1])]]
    with store.transaction() as con:
        assert con.execute("select nextval('counter')").fetchall() == [(3,)]


def test_a_store_of_an_older_version_is_brought_up_beside_odd_names(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Store(tmp_path / "old.duckdb")
    monkeypatch.setattr(old, "_migrations", migrations.available()[:-1])
    old.write({})
    add_odd(old, tmp_path)
    before = somebodys(old)
    assert Store(old.path).query("from v_orphans").empty
    after = somebodys(old)
    assert after["views"] == before["views"]
    assert {name: rows for name, rows in after.items() if "." in name} == {
        name: rows for name, rows in before.items() if "." in name
    }


def test_rows_that_go_are_refused_while_somebodys_table_refers_to_them(store: Store) -> None:
    shell(
        store, "create table mine (run_id varchar references run (run_id))", "insert into mine select run_id from run"
    )
    store.checkpoint()
    before = sha(store.path)
    with pytest.raises(StoreError, match=r"nothing was changed: a table that is not agentr's refers to rows"):
        prune(store, [gallery.RUN])
    assert sha(store.path) == before


def test_views_under_our_names_are_made_anew_and_never_run(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    shell(
        store,
        "create or replace view v_runs as select 42 as run_id",
        f"create or replace view v_orphans as from read_csv('{tmp_path / 'a.csv'}')",
        "drop view v_steps",
    )
    fresh = Store(store.path)
    assert fresh.rows("select run_id from v_runs") == [(gallery.RUN,)]
    assert fresh.count("select count(*) from v_steps") > 0
    with duckdb.connect(str(store.path), read_only=True) as con:
        assert con.execute("select run_id from v_runs").fetchall() == [(gallery.RUN,)]
        assert con.execute("from v_orphans").fetchall() == []


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("create macro coalesce2(x) as x; create macro max(x) as 999", "in place of DuckDB's max"),
        ('create macro "+"(a, b) as 7', r"in place of DuckDB's \+"),
        ("create macro Unnest(x) as table select 1", "in place of DuckDB's unnest"),
        ("create type json as varchar", "in place of DuckDB's json"),
        ("alter table run rename to r; create view run as from r", "something of its own named 'run'"),
        ("alter table schema_version rename to s; create view schema_version as from s", "named 'schema_version'"),
        ("drop view v_runs; create table V_Runs (a integer)", "something of its own named 'v_runs'"),
        ("alter table run add column n integer default 3", r"table run that agentr did not make \(column 'n'"),
        ("alter table run alter column workspace set default 'x'", r"table run .* \(column 'workspace'"),
        ("alter table run alter column recipe drop not null", r"table run .* \(a constraint differs"),
        ("drop table timing", "has no table timing"),
        (
            "drop table timing; create table timing (timing_id varchar, stage varchar generated always as ('x'))",
            "table timing that agentr did not make",
        ),
    ],
)
def test_what_stands_in_place_of_ours_is_refused_and_left_as_it_is(store: Store, statement: str, said: str) -> None:
    shell(store, statement, "checkpoint")
    before = sha(store.path)
    for attempt in (
        lambda: Store(store.path).query("select 1"),
        lambda: Store(store.path).write({}),
        lambda: Store(store.path).checkpoint(),
        lambda: Store(store.path).version() and compact(Store(store.path)),
    ):
        with pytest.raises(StoreError, match=said) as error:
            attempt()
        assert "\n" not in str(error.value)
    assert sha(store.path) == before


def test_a_table_of_somebodys_where_a_later_version_has_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Store(tmp_path / "old.duckdb")
    old.write({})
    shell(old, "create table Later_Table (a integer)", "checkpoint")
    before = sha(old.path)
    later = migrations.Migration(
        number=migrations.VIEWS_NUMBER + 1, name="later", sql="create table later_table (a integer)"
    )
    all_migrations = (*migrations.available(), later)
    monkeypatch.setattr(migrations, "_load_migrations", lambda: all_migrations)
    monkeypatch.setattr(migrations, "_OWN_TABLES", migrations._OWN_TABLES | {"later_table"})
    with pytest.raises(StoreError, match="something of its own named 'later_table', which is a name of agentr's"):
        Store(old.path).query("select 1")
    assert sha(old.path) == before


def test_no_file_is_reached_through_a_store(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    shell(store, f"create view of_file as from read_csv('{tmp_path / 'a.csv'}')")
    with pytest.raises(ConfigError, match="neither read nor written"):
        store.query("from of_file")
    with store.transaction() as con, pytest.raises(duckdb.PermissionException):
        con.execute(f"copy run to '{tmp_path / 'out.csv'}'")
    with store.reading() as con, pytest.raises(duckdb.InvalidInputException):
        con.execute("set enable_external_access = true")
    assert store.query("from of_file", files=True)["a"].tolist() == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", "ws"}


@pytest.mark.parametrize(("older", "logged"), [(False, True), (True, False)])
def test_merging_leaves_the_other_store_to_the_byte(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool, logged: bool
) -> None:
    file = tmp_path / "theirs" / "other.duckdb"
    other_store = Store(file)
    if older:
        monkeypatch.setattr(other_store, "_migrations", migrations.available()[:-1])
    other_store.write(gallery.answered("first"))
    other_store.checkpoint()
    if logged:
        other_store.write(gallery.answered("second"))
    assert file.with_name("other.duckdb.wal").exists() == logged
    for side in (".lock", ".queue"):
        file.with_name(file.name + side).unlink()
    before = {path.name: (sha(path), path.stat().st_mtime_ns) for path in file.parent.iterdir()}

    merge_stores(store, [Store(file)])

    assert {path.name: (sha(path), path.stat().st_mtime_ns) for path in file.parent.iterdir()} == before
    assert store.missing("answered_call", ["first"]) == []
    assert store.missing("answered_call", ["second"]) == ([] if logged else ["second"])
    assert not list(store.path.parent.glob("*.merged*"))


def test_a_copied_catalogue_is_ours(store: Store) -> None:
    """What a store is compared with must be what it has; else each opening compares in detail."""
    with duckdb.connect(":memory:") as con:
        con.execute(f"attach '{store.path}' as store (read_only); use store.main")
        assert migrations._fingerprint(migrations._catalogue(con, store.path)) == migrations.CATALOGUE_FINGERPRINT
    compact(store)
    with duckdb.connect(":memory:") as con:
        con.execute(f"attach '{store.path}' as store (read_only); use store.main")
        assert migrations._fingerprint(migrations._catalogue(con, store.path)) == migrations.CATALOGUE_FINGERPRINT
