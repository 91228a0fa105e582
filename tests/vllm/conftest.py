"""A real vLLM: `make test-vllm` installs its environment and runs these tests; `make test` skips
them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm_engine import ROOT, TINY, serving, settings

from agentr_core.models.vllm.model import VllmModel
from agentr_core.models.vllm.replicas import ensure_environment, make_launch


@pytest.fixture(scope="session")
def engine() -> Path:
    """The folder of vLLM's environment, complete."""
    if not os.environ.get("AGENTR_TEST_VLLM"):
        pytest.skip("a real vLLM is tested by `make test-vllm`, which installs gigabytes")
    folder = Path(os.environ.get("AGENTR_VLLM_ENV", ROOT / ".venv-vllm"))
    ensure_environment(folder, "cpu", report_line=print)
    return folder


@pytest.fixture(scope="session")
def replicas_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the logs of the server that all tests share."""
    return tmp_path_factory.mktemp("replicas")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def model(engine: Path, replicas_log: Path) -> AsyncIterator[VllmModel]:
    """The tiny model on one replica, which all tests share: to start it takes longest."""
    async with serving(make_launch(TINY, settings()), engine=engine, logs=replicas_log) as vllm_model:
        yield vllm_model
