"""The contract of every model backend, for backends that are tested in a folder of their own."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "contracts" / "test_chat_models.py"


def contract_tests() -> dict[str, Callable[..., Any]]:
    """Return the tests of the contract by name; each takes a fixture `model`, which the caller's
    folder gives.
    """
    spec = importlib.util.spec_from_file_location("chat_model_contract", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_") and "model" in inspect.signature(test).parameters
    }
