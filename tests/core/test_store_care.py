"""A store that is written anew: smaller, with the rows of others, without some runs; and whole
whatever happens meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import gallery
import pytest

from agentr_core.errors import StoreError
from agentr_core.models.checkpoint_dir import SHARED_MEMORY, shared_folder_name
from agentr_core.store import migrations
from agentr_core.store.care.rewriting import CONDITIONS, compact, merge_stores, prune, table_sizes
from agentr_core.store.codec.ledger import checkpoint_rows, iteration_rows, run_rows
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.database import Store, snapshot
from agentr_core.store.queries.listings import contradictions, dangling_references
from agentr_core.store.tables import TABLES, merge
from agentr_core.types import Instance, Message, Sample, SampleKind

pytestmark = pytest.mark.slow
LATER, ALONE = "bbbb000000000001", "cccc000000000001"


def rows(store: Store, table: str) -> list[tuple[Any, ...]]:
    return store.rows(f"select * from {table} order by all")


def everything(store: Store) -> Mapping[str, list[tuple[Any, ...]]]:
    with snapshot(store) as state:
        return {table: rows(state, table) for table in (*TABLES, "message", "verdict", "schema_version")}


def add_run(store: Store, run_id: str, *, base: str, parent: str | None = None, word: str = "") -> None:
    """Store a run of one sample that starts from a model, which another run may have made."""
    iteration = f"{run_id}-1"
    sample = Sample(
        kind=SampleKind.GOOD,
        messages=(Message(role="user", text=f"Go.{word}"), Message(role="assistant", text=f"I{word}", train=True)),
        instance=Instance(environment="toy", split="train", index=7),
    )
    config: dict[str, Any] = {}
    unit = [
        run_rows(run_id, recipe="r", method="agent-r", config=config, versions={}, workspace=f"w{word}"),
        iteration_rows(iteration, run_id=run_id, iteration=1, checkpoint_in=base),
        checkpoint_rows(base, path=f"base-{word}", weights_sha256=base, config={}, parent_id=parent),
        sample_rows(f"sample-{run_id}", sample, iteration_id=iteration),
    ]
    store.write(merge(unit))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a row of each kind, and a run that goes on from the checkpoint of the first; it
    is copied for each test.
    """
    full_store = gallery.fill(tmp_path_factory.mktemp("filled") / "store.duckdb")
    add_run(full_store, LATER, base="bbbb-base", parent=gallery.TRAINED)
    return full_store


@pytest.fixture
def store(filled: Store, tmp_path: Path) -> Store:
    """A store of the test's own, filled."""
    return Store(Path(shutil.copytree(filled.path.parent, tmp_path / "ws")) / filled.path.name)


def test_sizes_count_the_rows_of_each_table(store: Store) -> None:
    store.checkpoint()
    sizes = table_sizes(store)
    assert {entry.table: entry.rows for entry in sizes.tables} == {table: len(rows(store, table)) for table in TABLES}
    assert all(entry.size > 0 for entry in sizes.tables if entry.rows)
    assert sum(entry.rows for entry in sizes.tables) > 40


def test_compacting_frees_what_lies_idle_and_changes_no_row(store: Store) -> None:
    store.write(
        {
            "rl_validation": [
                {"trajectory_id": f"t{n}", "step": 1, "iteration_id": os.urandom(400).hex()} for n in range(8000)
            ]
        }
    )
    with store.transaction() as con:
        con.execute("delete from rl_validation where starts_with(trajectory_id, 't') and length(trajectory_id) < 6")
    before, size = everything(store), table_sizes(store)
    assert size.num_unused_bytes >= 0

    result = compact(store)

    assert result.bytes_after < result.bytes_before
    assert result.num_removed_by_table == {}
    assert everything(store) == before
    store.write({"rl_validation": [{"trajectory_id": "new", "step": 1, "iteration_id": "x"}]})
    assert not list(store.path.parent.glob("*.rewritten*"))


def test_every_table_has_a_rule_of_what_stays() -> None:
    assert CONDITIONS.keys() == TABLES.keys()


def test_pruning_keeps_what_other_runs_are_made_of(store: Store) -> None:
    before, odd = everything(store), contradictions(store)
    result = prune(store, [gallery.RUN])

    # The later run is made of the first iteration; the evaluation of the base is of no use to it.
    assert result.needed_iterations == ((gallery.RUN, 1),)
    assert result.unnamed_paths == ()
    assert result.rewrite_result.num_removed_by_table == {
        "iteration": 1,
        "evaluation": 1,
        "trajectory": 1,
        "episode": 1,
    }
    for table in ("run", "tree", "node", "sample", "message", "dataset_row", "checkpoint", "verdict"):
        assert rows(store, table) == before[table]
    assert dangling_references(store) == []
    assert contradictions(store) == odd


def test_pruning_a_run_that_nobody_needs_leaves_nothing_of_it(store: Store) -> None:
    before = everything(store)
    add_run(store, ALONE, base="cccc-base", word="alone")

    result = prune(store, [ALONE])

    assert everything(store) == before
    assert result.rewrite_result.num_removed_by_table == dict.fromkeys(("run", "iteration", "checkpoint", "sample"), 1)
    assert result.needed_iterations == ()


def test_pruning_both_leaves_an_empty_store_and_names_the_weights_that_are_left(store: Store) -> None:
    result = prune(store, [gallery.RUN, LATER])
    assert result.unnamed_paths == ("one",)
    assert {table for table in TABLES if rows(store, table)} == set()


def test_pruning_a_copied_workspace_names_the_weights_in_the_copy(store: Store) -> None:
    folder = store.path.parent / "checkpoints" / gallery.TRAINED
    folder.mkdir(parents=True)
    assert prune(store, [gallery.RUN, LATER], replace_file=False).unnamed_paths == (str(folder),)


def test_pruning_names_every_folder_that_trainings_left(store: Store) -> None:
    root = store.path.parent
    trained, alone = f"{gallery.TRAINED}", "dddd000000000001"
    paths = [
        *(f"checkpoints/{name}" for name in (trained, f"{trained}.logs", f".{trained}.ffff")),
        # Published or begun by an iteration that goes, and killed before a row named it.
        *(f"checkpoints/{name}" for name in (alone, ".eeee000000000001.ffff")),
        "datasets/aaaa00000000d000.parquet",
        f"reports/{gallery.RUN}",
    ]
    other_paths = ["checkpoints/.ffff000000000001.ffff", "checkpoints/.1111000000000001.ffff", "datasets/other.parquet"]
    for name in (*paths, *other_paths):
        (root / name).mkdir(parents=True)
    folder_name = shared_folder_name(root / "checkpoints" / trained)
    (SHARED_MEMORY / folder_name).mkdir()
    manifest = json.dumps({"iteration": gallery.ITERATION})
    (root / "checkpoints" / alone / "manifest.json").write_text(manifest)
    (root / "checkpoints" / ".eeee000000000001.ffff" / "job.json").write_text(manifest)
    (root / "checkpoints" / ".1111000000000001.ffff" / "job.json").write_text(json.dumps({"iteration": f"{ALONE}-1"}))
    add_run(store, ALONE, base="cccc-base", word="alone")
    try:
        result = prune(store, [gallery.RUN, LATER])
    finally:
        (SHARED_MEMORY / folder_name).rmdir()
    assert result.unnamed_paths == tuple(
        sorted([*(str(root / name) for name in paths), str(SHARED_MEMORY / folder_name)])
    )


def test_a_dry_run_changes_nothing(store: Store) -> None:
    before = store.path.read_bytes()
    result = prune(store, [LATER], replace_file=False)
    assert result.rewrite_result.num_removed_by_table["run"] == 1
    store.checkpoint()
    assert store.path.read_bytes() == before
    assert not list(store.path.parent.glob("*.rewritten*"))


def test_a_run_whose_states_or_pool_others_take_stays_whole(store: Store) -> None:
    config = {"compare": {"pool": gallery.RUN}}
    with store.transaction() as con:
        con.execute("update run set config = ? where run_id = ?", [json.dumps(config), LATER])
    result = prune(store, [gallery.RUN])
    assert result.rewrite_result.num_removed_by_table == {}
    assert result.needed_iterations == ((gallery.RUN, 0), (gallery.RUN, 1))


def test_merging_takes_each_row_once(store: Store, tmp_path: Path) -> None:
    source = Store(tmp_path / "other" / "store.duckdb")
    add_run(source, ALONE, base="bbbb-base", word="alone")
    copy = tmp_path / "copy.duckdb"
    store.backup(copy)
    before, source_rows = everything(store), everything(source)

    result = merge_stores(store, [source, Store(copy)])

    assert -result.num_removed_by_table["run"] == 1
    assert "checkpoint" not in result.num_removed_by_table
    assert sorted(rows(store, "sample")) == sorted([*before["sample"], *source_rows["sample"]])
    # The folder of the model is that of this machine, and its parent is known here alone.
    assert rows(store, "checkpoint") == before["checkpoint"]
    assert everything(source) == source_rows
    content = everything(store)
    assert merge_stores(store, [source]).num_removed_by_table == {}
    assert everything(store) == content
    assert dangling_references(store) == []


def test_what_only_the_other_store_knows_is_learnt(store: Store, tmp_path: Path) -> None:
    source = Store(tmp_path / "other" / "store.duckdb")
    add_run(source, ALONE, base="bbbb-base", word="alone")
    merge_stores(source, [store])
    parents = source.rows("select parent_id, path from checkpoint where checkpoint_id = 'bbbb-base'")
    assert parents == [(gallery.TRAINED, "base-alone")]


def test_one_id_with_two_contents_is_refused(store: Store, tmp_path: Path) -> None:
    source = Store(tmp_path / "other" / "store.duckdb")
    add_run(source, ALONE, base="bbbb-base", word="alone")
    copy = tmp_path / "copy.duckdb"
    store.backup(copy)
    with Store(copy).transaction() as con:
        con.execute("update node set value_sum = 0 where node_index = 2")
    before = everything(store)

    with pytest.raises(
        StoreError, match=rf"node {gallery.TREE}, 2 is in both stores and differs in value_sum; nothing"
    ):
        merge_stores(store, [source, Store(copy)])
    assert everything(store) == before
    with pytest.raises(StoreError, match="is the store itself"):
        merge_stores(store, [store])


def test_a_store_of_an_older_version_is_merged(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Store(tmp_path / "old.duckdb")
    with monkeypatch.context() as patch:
        patch.setattr(old, "_migrations", migrations.available()[:-1])
        add_run(old, ALONE, base="bbbb-base", word="alone")
    merge_stores(store, [Store(old.path)])
    assert len(rows(store, "run")) == 3


def test_a_file_that_is_no_store_is_not_merged_and_the_sentence_is_about_it(store: Store, tmp_path: Path) -> None:
    notes, foreign, newer = tmp_path / "notes.txt", tmp_path / "foreign.duckdb", Store(tmp_path / "newer.duckdb")
    notes.write_text("These are notes.")
    empty = tmp_path / "empty.duckdb"
    duckdb.connect(empty).close()
    as_it_was = empty.read_bytes()
    with duckdb.connect(foreign) as con:
        con.execute("create table t (a integer)")
    with newer.transaction() as con:
        con.execute("insert into schema_version (version, name) values (999, 'later')")
    before = everything(store)
    for path, message in (
        *(
            (path, "no store of agentr, or damaged; nothing was merged: name a workspace, or the file of a store")
            for path in (notes, empty)
        ),
        (foreign, "of something else (it has a table 't'); name another workspace or store"),
        (newer.path, "update agentr, or name another workspace or store"),
    ):
        with pytest.raises(StoreError) as caught:
            merge_stores(store, [Store(path)])
        assert str(caught.value).startswith(f"{path} ")
        assert str(caught.value).endswith(message)
    assert everything(store) == before
    assert empty.read_bytes() == as_it_was


def test_a_full_disk_leaves_the_store_as_it_is(store: Store) -> None:
    store.checkpoint()
    before = store.path.read_bytes()
    code = (
        "import resource, signal, sys; from pathlib import Path; from agentr_core.store import Store;"
        "from agentr_core.store.care.rewriting import compact; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); compact(Store(Path(sys.argv[1])))"
    )
    process = subprocess.run([sys.executable, "-c", code, store.path], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "StoreError" in process.stderr
    assert "nothing stored is lost" in process.stderr
    assert store.path.read_bytes() == before
    assert not list(store.path.parent.glob("*.rewritten*"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 300_000


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_kill_leaves_the_store_as_it_is(store: Store, sign: signal.Signals) -> None:
    before = everything(store)
    code = (
        "import os, signal, sys; from pathlib import Path; from agentr_core.store import Store;"
        "from agentr_core.store.care.rewriting import copy, rewrite;"
        # What a shell starts in the background ignores interrupts, and so do its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "rewrite(Store(Path(sys.argv[1])), lambda con: (copy(con), os.kill(os.getpid(), int(sys.argv[2]))))"
    )
    words = [sys.executable, "-c", code, str(store.path), str(int(sign))]
    assert subprocess.run(words, capture_output=True, check=False).returncode != 0
    assert everything(store) == before
    # What a killed process left behind is in nobody's way.
    assert compact(store).num_removed_by_table == {}
    assert not list(store.path.parent.glob("*.rewritten*"))
