"""Which device `tests/gpu` runs on."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("AGENTR_TEST_DEVICE", "cuda")
"""The variable makes them run on a CPU, to try the tests themselves; what they prove of a GPU they
prove on a GPU.
"""

on_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
only_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs the memory of a CUDA device")
