"""What the tests of flows share: Prefect's test server, a third-party environment, and a model that
knows nothing.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import PREFECT
from wheel import PATIENCE, environment, sentence, write_recipe

from flows.cli import PREFECT_DEFAULTS, main


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with all tables of Prefect's and no rows, to be copied. It is made once for all
    processes of the tests: to go through the migrations takes a server twice as long as to start.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    home = folder / "prefect-template"
    with (folder / "prefect-template.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            draft = folder / "prefect-draft"
            env = {**os.environ, "PREFECT_HOME": str(draft)}
            subprocess.run([PREFECT, "server", "database", "upgrade", "-y"], env=env, check=True, capture_output=True)
            draft.rename(home)
    return home / "prefect.db"


@pytest.fixture(scope="session")
def prefect_server(prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prefect with a server and a database of its own for all tests that run flows in this
    process.
    """
    folder = tmp_path_factory.mktemp("prefect-server")
    shutil.copyfile(prefect_database, folder / "prefect-test.db")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PREFECT_DEFAULTS.items():
            patch.setenv(name, value)
        from prefect.testing import utilities

        # Where the harness puts its database.
        patch.setattr(utilities, "mkdtemp", lambda: str(folder))
        with utilities.prefect_test_harness(server_startup_timeout=int(PATIENCE)):
            yield


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """No socket that Prefect left open is found by the garbage collector in somebody else's
    test.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    # Nobody looks again at what is alive now: a collection over all of Prefect and torch takes a
    # third of a second.
    gc.freeze()


@pytest.fixture(scope="session")
def process_env(door_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for the command line as a process: the door is installed, Prefect's files are the
    tests' own.
    """
    return environment(door_site, tmp_path_factory.mktemp("prefect"))


@pytest.fixture
def serving_env(process_env: dict[str, str], prefect_database: Path, tmp_path: Path) -> dict[str, str]:
    """As `process_env`, for processes that start a Prefect server: its database is this test's
    own.
    """
    home = tmp_path / "prefect"
    home.mkdir()
    shutil.copyfile(prefect_database, home / "prefect.db")
    return PREFECT_DEFAULTS | process_env | {"PREFECT_HOME": str(home)}


@pytest.fixture(scope="session")
def served_env(process_env: dict[str, str], prefect_server: None) -> dict[str, str]:
    """As `process_env`, with the Prefect server of this process for all runs: starting one takes as
    long as a run.
    """
    from prefect.settings import PREFECT_API_URL

    return PREFECT_DEFAULTS | process_env | {"PREFECT_API_URL": str(PREFECT_API_URL.value())}


@pytest.fixture
def recipe(tmp_path: Path, door_model: Path, door_installed: None) -> Path:
    """The file of a recipe of the door."""
    return write_recipe(tmp_path, door_model)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Run the command line in this process; return the one sentence with which it refuses."""
    for name in ("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_LOGGING_LEVEL", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "")
    for name in ("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))

    def ask(*words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["agentr", *map(str, words)])
        with pytest.raises(SystemExit) as error:
            main()
        out, err = capsys.readouterr()
        assert (error.value.code, out) == (2, "")
        return sentence(err)

    return ask
