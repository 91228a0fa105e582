"""The page of the schema is that of the migrations."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from readme import ROOT

from agentr_core.errors import ConfigError
from agentr_core.store.database import Store
from agentr_core.store.queries.schema import Reference, references, relations
from agentr_core.store.tables import TABLES
from flows.cli import cli
from flows.commands.schema import write_schema

KEPT = ROOT / "agentr_core" / "store" / "schema"


def test_the_kept_page_and_picture_are_current(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["store", "schema", str(tmp_path)], catch_exceptions=False)
    assert done.output.split() == [str(tmp_path / name) for name in ("README.md", "schema.svg")]
    for name in ("README.md", "schema.svg"):
        new = (tmp_path / name).read_text(encoding="utf-8")
        assert new == (KEPT / name).read_text(encoding="utf-8"), (
            "write it anew: agentr store schema agentr_core/store/schema"
        )


def test_another_page_of_that_name_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "README.md"
    mine.write_text("# Mine\n")
    with pytest.raises(ConfigError, match="is not a page of the schema; name another folder"):
        write_schema(tmp_path)
    assert mine.read_text() == "# Mine\n"


def test_every_table_and_its_references_are_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    store.write({})
    tables = relations(store)
    assert {table.name for table in tables if not table.view} == {*TABLES, "schema_version"}
    assert {"v_episodes", "v_tokens", "v_pairs", "v_groups", "v_tool_calls", "v_comparisons"} <= {
        table.name for table in tables
    }
    links = set(references(store))
    assert {
        Reference("iteration", "run_id", "run"),
        Reference("node", "tree_id", "tree"),
        Reference("checkpoint", "parent_id", "checkpoint"),
        Reference("preference", "chosen_sample_id", "sample"),
    } <= links
    # All but those that only DuckDB's own version table, or no foreign row, would have.
    assert {table.name for table in tables if not table.view} - {link.table for link in links} - {
        link.to for link in links
    } <= {
        "schema_version",
        "metric",
        "revision_state",
        "answered_call",
    }
