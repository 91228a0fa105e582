"""The device that a model in this process runs on, by its name in a recipe."""

from __future__ import annotations

import torch

from agentr_core.errors import ConfigError


def torch_device(name: str, *, field: str = "model.device") -> torch.device:
    """Return the device with a name; "auto" is CUDA if available. Raises `ConfigError` if the
    device does not exist.

    `field` is the name of the setting in error messages.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{field} {name!r} is not a device; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{field} is {name!r}, which this backend does not run on; use auto, cpu or cuda")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"{field} is {name!r}, but torch sees no CUDA device; use auto or cpu")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"{field} is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices, counted from 0; name one "
            "of them, or use auto"
        )
    return device
