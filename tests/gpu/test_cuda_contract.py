"""The contract of every model backend, with the in-process model on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_contract import contract_tests
from devices import DEVICE, on_device

from agentr_core.models.local.transformers import TransformersModel

pytestmark = on_device
CONTRACT = contract_tests()
globals().update(CONTRACT)


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Iterator[TransformersModel]:
    cuda_model = TransformersModel.load(tiny_model_dir, device=DEVICE, max_batch=32)
    yield cuda_model
    asyncio.run(cuda_model.close())


def test_the_whole_contract_is_here() -> None:
    assert len(CONTRACT) >= 10
