"""Options that commands share, and the end of a command that Ctrl-C reaches inside DuckDB."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import flows.cli
from agentr_core.errors import StoreError, UserError
from agentr_core.methods.faults import load
from agentr_core.store.codec.ledger import run_rows
from agentr_core.store.connection import raise_store_errors
from agentr_core.store.database import Store
from flows.cli import cli
from flows.cli.options import IdPrefix

RUNNER = CliRunner()


@pytest.mark.parametrize(("value", "said"), [(" ", "names nothing"), ("3d5", "'3d5' is too short; give at least 6")])
def test_an_id_has_some_characters(value: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        IdPrefix(6).convert(value, None, None)
    assert IdPrefix(3).convert(" 3d5 ", None, None) == "3d5"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "file"),
    [("copy.duckdb", "copy.duckdb"), ("there", "there/store.duckdb"), ("new/one/", "new/one/store.duckdb")],
)
def test_a_backup_is_a_file_or_goes_into_a_folder(target: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    workspace = tmp_path / "runs"
    with Store(workspace / "store.duckdb").transaction():
        pass
    command = ["store", "backup", f"{tmp_path}/{target}", "-w", str(workspace)]
    done = RUNNER.invoke(cli, command, catch_exceptions=False)
    assert done.output.startswith(f"{tmp_path / file}: ")
    assert Store(tmp_path / file).rows("select count(*) from run") == [(0,)]
    with pytest.raises(StoreError, match=rf"^{tmp_path / file} exists already; name another"):
        RUNNER.invoke(cli, command, catch_exceptions=False)


@pytest.mark.slow
def test_a_relative_path_is_told_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("{name: r, model: {path: m}}", encoding="utf-8")
    world, location = "environment={{name: {}, options: {}}}", f" in {tmp_path} "
    for command in (
        ["store", "check", "-w", "here"],
        ["plan", "r.yaml"],
        ["plan", "r.yaml", "-o", world.format("webshop", "{data_dir: shop}")],
        ["plan", "r.yaml", "-o", world.format("textcraft", "{recipes_dir: made}")],
        ["plan", "r.yaml", "-o", world.format("reasoning", "{questions: [q.jsonl]}")],
        ["plan", "r.yaml", "-o", world.format("gateway", "{url: http://127.0.0.1:1, splits: {train: t.jsonl}}")],
    ):
        with pytest.raises(UserError) as error:
            RUNNER.invoke(cli, command, catch_exceptions=False)
        assert location in f"{error.value} ".replace(";", " ;").replace(":", " :"), error.value


def test_a_report_links_to_the_web_alone(tmp_path: Path) -> None:
    done = RUNNER.invoke(cli, ["report", "3d5bfc", "--viewer", "javascript:alert(1)", "-w", str(tmp_path)])
    assert done.exit_code == 2
    assert "begin it with http:// or https://" in done.stderr


@pytest.mark.parametrize("model", ["4711", "my model: naïve #2"])
def test_a_model_to_evaluate_takes_the_place_of_the_one_that_a_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    file = tmp_path / "further.yaml"
    file.write_text("name: further\nmodel: {from_run: abc123, device: cpu}\n")
    (tmp_path / model).mkdir()

    def evaluate_recipe(recipe: Path, overrides: list[str], states: str | None) -> str:
        config = load(recipe, overrides).model
        return f"{config.path}|{config.from_run}"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "flows.local", SimpleNamespace(evaluate_recipe=evaluate_recipe))
    monkeypatch.setattr("flows.cli.recipes.quiet_prefect", lambda: None)
    assert RUNNER.invoke(cli, ["eval", str(file), "--model", model], catch_exceptions=False).output == f"{model}|\n"


def test_a_closed_input_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.cli.options import standard_input

    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.UsageError, match="the standard input is closed"):
        standard_input()


def test_a_file_is_no_workspace(tmp_path: Path) -> None:
    file = tmp_path / "copy.duckdb"
    file.write_bytes(b"")
    done = RUNNER.invoke(cli, ["runs", "-w", str(file)])
    assert "is a file; a workspace is a folder with a file store.duckdb" in str(done.exception)


def test_an_interrupted_query_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(**_: object) -> None:
        with raise_store_errors(tmp_path):
            raise RuntimeError("Query interrupted")

    monkeypatch.setattr(flows.cli.cli, "main", stopped)
    monkeypatch.setattr(sys, "argv", ["agentr", "runs"])
    with pytest.raises(SystemExit) as error:
        flows.cli.main()
    assert error.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def _helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    yield context.command_path, command.get_help(context)
    for name, each in getattr(command, "commands", {}).items():
        yield from _helps(each, click.Context(each, context, name, terminal_width=80, **each.context_settings))


def test_help_names_what_a_recipe_without_a_workspace_and_answers_without_an_opening_get() -> None:
    for command in ("run", "plan", "eval"):
        text = " ".join(RUNNER.invoke(cli, [command, "--help"]).output.split())
        assert "[default: the recipe's, else that in AGENTR_WORKSPACE, else runs]" in text
    assert "turns before the problem. [default: 2; x>=0]" in text


def test_a_node_beyond_the_last_is_told_with_how_many_there_are(tmp_path: Path) -> None:
    counts = dict.fromkeys(("depth", "visits", "value_sum", "dive", "duplicates"), 0)
    blank = {"tree_id": "abc123", "parent": -1, "terminal": False, "merged": (), **counts}
    nodes = [{**blank, "node_index": number} for number in range(3)]
    Store(tmp_path / "store.duckdb").write({"node": nodes})
    done = RUNNER.invoke(cli, ["trace", "abc#7", "-w", str(tmp_path)])
    assert str(done.exception) == f"tree abc in {tmp_path} has 3 nodes; give a number from 0 to 2"


def test_runs_are_listed_for_programs_too(tmp_path: Path) -> None:
    row = run_rows("r" * 16, recipe="x", method="agent-r", config={}, versions={}, workspace=str(tmp_path))
    Store(tmp_path / "store.duckdb").write(row)
    (run,) = json.loads(RUNNER.invoke(cli, ["runs", "--format", "json", "-w", str(tmp_path)]).output)
    assert (run["run_id"], run["recipe"]) == ("r" * 16, "x")


def test_help_fits_a_terminal_of_80_columns_and_cuts_no_summary() -> None:
    for path, text in _helps(cli, click.Context(cli, None, "agentr", terminal_width=80)):
        lines = text.splitlines()
        assert not [line for line in lines if len(line) > 80], path
        summaries = lines[lines.index("Commands:") :] if "Commands:" in lines else []
        assert not [line for line in summaries if line.endswith("...")], path
