"""The command line under misuse: one clear sentence, the right exit code, nothing lost."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from prefect.settings import PREFECT_API_URL, temporary_settings
from wheel import LIGHT, PATIENCE, started, wait_for

from agentr_core.errors import ConfigError
from agentr_core.recipes.recipe import Recipe, replace
from agentr_core.runtime.start import start_run
from agentr_core.store.database import Store
from flows import local
from flows.cli import PREFECT_DEFAULTS, cli
from flows.serving import deployments
from tasks import runners, workspaces
from tasks.wiring import load_recipe, quiet_context, run_reference

Answer = Callable[..., str]
HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with nothing in it, in the workspace of the recipe."""
    empty_store = Store(tmp_path / "runs" / "store.duckdb")
    empty_store.write({"instance": []})
    return empty_store


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("pairs.aplha=[0.5]", "pairs.aplha: unknown field"),
        ("pairs.alpha=[0.5, 1.5]", "pairs.alpha.1: give 1 or less (got 1.5)"),
        ("search.width=0", "search.width: give 1 or more (got 0)"),
        ("search.width", "override 'search.width' must look like section.field=value"),
        ("=3", "override '=3' must look like section.field=value"),
        ("workspace=/dev/null", "workspace /dev/null cannot be used: /dev/null is no folder; name another one"),
        ("seed.deep=1", "seed: give a whole number"),
        (
            "environment.name=dour",
            "there is no environment 'dour' (did you mean door?); installed are agentgym-academia, ",
        ),
        ("environment.options.loud=1", "environment door has no option loud; it has pause"),
        ("instances.train=attic", "door has no split 'attic'"),
        ("instances.train=test", "train and test are the same split ('test')"),
        ("model.path=nowhere", "model directory nowhere in "),
    ],
)
def test_a_wrong_field_is_named(refusal: Answer, recipe: Path, override: str, said: str) -> None:
    assert said in refusal("run", recipe, "-o", override)
    assert not (recipe.parent / "runs").exists()


def test_an_option_names_the_workspace_of_a_recipe(refusal: Answer, recipe: Path) -> None:
    assert "workspace /dev/null cannot be used" in refusal("run", recipe, "-w", "/dev/null", "-o", "seed=1")
    for name in ("12", "runs é 😀"):
        result = CliRunner().invoke(cli, ["plan", str(recipe), "-w", name])
        (head,) = (line for line in result.output.splitlines() if line.startswith("recipe "))
        assert head.endswith(f" in {name}")


def test_all_wrong_fields_are_named_together(refusal: Answer, recipe: Path) -> None:
    message = refusal("plan", recipe, "-o", "sede=1", "-o", "search.width=0")

    assert message.endswith(
        "2 faults\n  search.width: give 1 or more (got 0)\n  sede: unknown field (did you mean seed?)"
    )


def test_a_resumed_run_says_which_change_it_would_ignore(refusal: Answer, recipe: Path) -> None:
    message = refusal("run", recipe, "--resume", "abc", "-o", "iterations=3", "-o", "search.width=2")

    assert "-o search.width=2 has no effect" in message


def test_a_resumed_run_takes_other_thresholds(
    store: Store, recipe: Path, door_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_recipe = load_recipe(recipe, ["alarms.reaction=stop", "search.width=3"])
    run = run_reference(first_recipe)
    ctx = quiet_context(run, first_recipe)
    asyncio.run(start_run(ctx))
    recipes: list[Recipe] = []

    def start(flow: object, recipe: Recipe) -> dict[str, str]:
        recipes.append(recipe)
        return {"run_id": "", "table": "", "report": ""}

    monkeypatch.setattr(local, "_run", start)
    local.run_recipe(recipe, ["alarms.cut_replies=null"], resume=run.run_id)

    # All else is what the run began with, the reaction to alarms too.
    assert recipes == [replace(first_recipe, alarms=dataclasses.replace(first_recipe.alarms, cut_replies=None))]
    assert run_reference(recipes[0]) == run


def test_a_missing_recipe_is_named(refusal: Answer, tmp_path: Path) -> None:
    assert refusal("run", tmp_path / "none.yaml").startswith(f"recipe {tmp_path / 'none.yaml'} does not exist")


def test_truncated_weights_are_found_before_the_run(refusal: Answer, recipe: Path, door_model: Path) -> None:
    broken = recipe.parent / "broken"
    shutil.copytree(door_model, broken)
    os.truncate(broken / "model.safetensors", 5000)

    message = refusal("run", recipe, "-o", f"model.path={broken}")

    assert message.startswith(f"weight file {broken / 'model.safetensors'} is truncated or corrupt")
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize("words", [("run",), ("sql", "select 1"), ("runs",), ("report", "a")])
def test_a_corrupt_store_is_left_as_it_is(refusal: Answer, recipe: Path, words: tuple[str, ...]) -> None:
    file = recipe.parent / "runs" / "store.duckdb"
    file.parent.mkdir()
    file.write_bytes(b"not a database " * 2000)
    before = file.read_bytes()

    message = refusal(*words, recipe) if words == ("run",) else refusal(*words, "-w", file.parent)

    assert message.startswith(f"{file} is damaged or no DuckDB file")
    assert file.read_bytes() == before


@pytest.mark.parametrize("words", [("run",), ("sql", "select 1")])
def test_a_store_that_another_process_holds(
    refusal: Answer, recipe: Path, store: Store, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "Store", partial(Store, wait_s=0.2))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, f"{store.path}.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        message = refusal(*words, recipe) if words == ("run",) else refusal(*words, "-w", store.path.parent)

        assert message.startswith(f"{store.path} is held by another process (PID {holder.pid})")
        holder.communicate("\n")
    assert store.query("select count(*) as n from run")["n"][0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "abc"), "no run in .* begins with 'abc'; `agentr runs -w .*` lists them all"),
        (("export", "abc", "out", "--format", "trl"), "'abc' begins the id of no run in .* that has a dataset"),
        (("preview", "abc"), "no sample or trajectory in .* begins with 'abc'"),
        (("sql", "selec 1"), 'SQL: Parser Error: syntax error at or near "selec"'),
        (("sql", "select nix from run"), 'SQL: Binder Error: .*"nix" not found'),
        (("sql", "drop table run"), "SQL: the store is opened for reading only"),
        (("sql", ";"), "SQL: there is no statement to run"),
        (("sql", "select 1; select 2"), "SQL: these are several queries, and only one can be answered; ask them one"),
        (("sql", "select cast('a' as int)"), "SQL: Conversion Error: Could not convert string 'a' to INT32.?$"),
        (("sql", ""), "give one question: QUERY, or --example NAME"),
    ],
)
def test_a_wrong_question_is_answered(refusal: Answer, store: Store, words: tuple[str, ...], said: str) -> None:
    assert re.search(said, refusal(*words, "-w", store.path.parent))


@pytest.mark.parametrize(
    "words",
    [
        ("store", "prune", ""),
        ("store", "prune", "abcde"),
        ("report", " "),
        ("trace", ""),
        ("preview", ""),
        ("export", "", "a", "--format", "trl"),
        ("view", "--bundle", "a", "--run", ""),
        ("report", "abc", "--beside", ""),
    ],
)
def test_too_little_of_an_id_names_nothing(store: Store, words: tuple[str, ...]) -> None:
    answer = CliRunner().invoke(cli, [*words, "-w", str(store.path.parent)])
    assert answer.exit_code == 2
    message = " is too short; give at least 6 " if "abcde" in words else " names nothing; give "
    assert message in answer.output


def test_a_leaderboard_takes_a_run_at_a_time(tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli, ["report", "a" * 6, "b" * 6, "--leaderboard", str(tmp_path / "board.md")])
    assert (answer.exit_code, "--leaderboard takes one RUN" in answer.output) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("store", "schema", ""),
        ("import", "", "a", "--as", "general"),
        ("sql", "select 1", "--output", ""),
        ("eval", "a.yaml", "--answers", ""),
    ],
)
def test_an_empty_path_is_not_the_current_folder(words: tuple[str, ...]) -> None:
    answer = CliRunner().invoke(cli, words)
    assert answer.exit_code == 2
    assert "an empty path names nothing" in answer.output


def test_a_question_may_come_from_a_file_and_a_plan_is_drawn(store: Store) -> None:
    workspace = ("-w", str(store.path.parent))
    answer = CliRunner().invoke(cli, ["sql", "-", *workspace], input="-- how many\nselect 41 + 1 as n")
    assert answer.output.split() == ["n", "42"]
    answer = CliRunner().invoke(cli, ["sql", "explain select 1", *workspace])
    assert len(answer.output.splitlines()) > 3
    answer = CliRunner().invoke(cli, ["sql", "select 1", "--output", "o.xlsx", *workspace])
    assert "o.xlsx: there is no format xlsx" in str(answer.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("view", "--run", "abc"), "--run belongs to --bundle"),
        (("view", "--pages", "9"), "--pages belongs to --bundle"),
        (("view", "--bundle", "new", "--port", "1"), "--port is for serving pages, and --bundle serves none"),
        (("eval", "a.yaml", "--opening", "1"), "--opening belongs to --answers"),
        (("eval", "a.yaml", "--answers", "b", "--states", "abc"), "--states names a model, and --answers asks none"),
        (("import", "a", "b", "--as", "pairs", "--opening", "1"), "--opening belongs to --as expert"),
        (("import", "a", "b", "--as", "general", "-o", "a=1"), "--option is of instances, and general chat has none"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(words: tuple[str, ...], said: str) -> None:
    answer = CliRunner().invoke(cli, words)
    assert answer.exit_code == 2
    assert f"Error: {said}" in answer.output


@pytest.mark.parametrize(
    ("name", "begins"), [("o.csv", b"n\n1\n"), ("o.json", b"["), ("o.parquet", b"PAR1"), ("o", b"n")]
)
def test_the_ending_of_a_file_says_its_format(store: Store, tmp_path: Path, name: str, begins: bytes) -> None:
    file = tmp_path / name
    result = CliRunner().invoke(cli, ["sql", "select 1 n", "-w", str(store.path.parent), "--output", str(file)])
    assert result.exit_code == 0, result.output
    assert file.read_bytes().replace(b"\r", b"").startswith(begins)


@pytest.mark.parametrize("words", [("sql", "select 1"), ("runs",), ("report", "a"), ("preview", "a")])
def test_a_workspace_without_a_store(refusal: Answer, tmp_path: Path, words: tuple[str, ...]) -> None:
    message = refusal(*words, "-w", tmp_path / "none")

    assert message.startswith(f"there is no store at {tmp_path / 'none' / 'store.duckdb'}; run a recipe first")
    assert not (tmp_path / "none").exists()


@pytest.fixture
def readable(refusal: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that Prefect takes, for what `refusal` leaves empty."""
    for name, value in {**PREFECT_DEFAULTS, "PREFECT_LOGGING_LEVEL": "WARNING"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_prefect_server_that_does_not_answer(refusal: Answer, recipe: Path, command: str) -> None:
    address = "http://127.0.0.1:9/api"

    with temporary_settings({PREFECT_API_URL: address}):
        message = refusal(command, recipe)

    assert message.startswith(f"no Prefect server answers at {address}")


def test_a_cluster_that_is_not_installed_is_named(
    refusal: Answer, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "_MODULES", {"ray": "prefect_nowhere"})

    message = refusal("run", recipe, "-o", "scale.runner=ray")

    assert message.startswith("scale.runner is ray, and prefect-nowhere is not installed; `pip install ")
    assert "-e '.[ray]'` in the checkout" in message
    assert not (recipe.parent / "runs").exists()


@pytest.mark.usefixtures("readable")
def test_a_cluster_without_a_server(refusal: Answer, recipe: Path) -> None:
    pytest.importorskip("prefect_dask")

    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        message = refusal("run", recipe, "-o", "scale.runner=dask")

    assert message.startswith("scale.runner dask needs a Prefect server that other processes reach")


@pytest.mark.usefixtures("readable")
def test_serving_without_a_server(refusal: Answer, recipe: Path) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        message = refusal("serve", recipe)

    assert "start one with `prefect server start`" in message


def test_two_recipes_of_one_name_are_not_served(recipe: Path, tmp_path: Path) -> None:
    second = Path(shutil.copy(recipe, tmp_path / "other.yaml"))

    with pytest.raises(ConfigError, match=f"^{recipe} and {second} are both named door, and so would be"):
        deployments([recipe, second])


@pytest.mark.slow
@pytest.mark.usefixtures("readable")
# Prefect leaves the sockets of its event clients to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_run_is_alone_can_be_interrupted_and_goes_on(
    recipe: Path, serving_env: dict[str, str], prefect_server: None, refusal: Answer
) -> None:
    words: tuple[str | Path, ...] = ("run", recipe, *(word for change in LIGHT for word in ("-o", change)))
    store = Store(recipe.parent / "runs" / "store.duckdb")
    # It waits within its trees until it was interrupted, however long the rest takes.
    hold = recipe.parent / "train"
    hold.touch()
    # The first run has a Prefect server of its own, which must end with it.
    with started(*words, env=serving_env | {"DOOR_HOLD": str(hold.parent)}) as process:
        # The lock is older than the store.
        wait_for(process, store.path.exists)
        message = refusal(*words)
        wait_for(process, lambda: bool(store.query("select count(*) as n from node")["n"][0] >= 8), store)

        # To the whole group, as a terminal does.
        os.killpg(process.pid, signal.SIGINT)
        hold.unlink()
        out, err = process.communicate(timeout=PATIENCE)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)

    assert "is already under way in" in message
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted; the same command goes on where it stopped"
    assert "Traceback" not in err
    assert store.query("select status from run")["status"].tolist() == ["running"]
    nodes = set(store.query("select tree_id, node_index, created_at from node").itertuples(index=False))
    assert store.query("select * from v_orphans").empty

    result = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)

    assert (result.exit_code, result.stdout.splitlines()[1]) == (0, "Held-out success")
    assert nodes <= set(store.query("select tree_id, node_index, created_at from node").itertuples(index=False))
    assert store.query("select status from run")["status"].tolist() == ["finished"]
    assert store.query("select * from v_orphans").empty

    (run_id,) = store.query("select run_id from run")["run_id"]
    board = recipe.parent / "board.md"
    report = CliRunner().invoke(
        cli, ["report", run_id[:6], "--leaderboard", str(board), "-w", str(recipe.parent / "runs")]
    )
    assert report.exit_code == 0, report.output
    assert report.stdout.splitlines()[0].startswith("World ")
    assert run_id in board.with_suffix(".jsonl").read_text()
