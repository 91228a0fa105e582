"""What the tests of flows share: Prefect's test server, a third-party environment, and a model that knows nothing."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import door
import pytest
from wheel import PATIENCE, environment

from flows.cli import PREFECT_DEFAULTS


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect with a database of its own for all tests that run flows in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PREFECT_DEFAULTS.items():
            patch.setenv(name, value)
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=int(PATIENCE)):
            yield


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """No socket that Prefect left open is found by the garbage collector in somebody else's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    # Nobody looks again at what is alive now: a collection over all of Prefect and torch takes a third of a second.
    gc.freeze()


@pytest.fixture(scope="session")
def door_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package of the door."""
    return door.install(tmp_path_factory.mktemp("packages") / "site")


@pytest.fixture(scope="session")
def door_installed(door_site: Path) -> Iterator[None]:
    """The door among the environments of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(door_site))
        yield


@pytest.fixture(scope="session")
def door_model(save_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for long prompts."""
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "door", context=4096, hidden_size=32, intermediate_size=64
    )


@pytest.fixture(scope="session")
def process_env(door_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for the command line as a process: the door is installed, Prefect's files are the tests' own."""
    return environment(door_site, tmp_path_factory.mktemp("prefect"))
