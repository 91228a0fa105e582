"""What a training's settings need of the machine and its packages, checked before anything heavy is done."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_utils import SchedulerType

from agentr_core.config import TrainingConfig
from agentr_core.errors import ConfigError, TrainingFault


def check_requirements(config: TrainingConfig) -> None:
    """Do nothing if this process can do what the settings ask for.

    Raises:
        ConfigError: a name is unknown, or a package or GPU that was asked for is not there.
        TrainingFault: the GPU has no bfloat16.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.bf16 == "auto":
        raise ConfigError("training.bf16 is still auto; give true or false, or settle the recipe (precision.settled)")
    if config.bf16 and gpus and not torch.cuda.is_bf16_supported():
        raise TrainingFault(f"{torch.cuda.get_device_name()} has no bfloat16; set training.bf16=false")
    schedulers = [kind.value for kind in SchedulerType]
    if config.lr_scheduler_type not in schedulers:
        raise ConfigError(
            f"training.lr_scheduler_type {config.lr_scheduler_type!r} is unknown; choose one of {', '.join(schedulers)}"
        )
    _check_loggers(config.report_to)
    if config.load_in_4bit:
        _check_four_bits(gpus)
    if config.launch is None:
        return
    if config.launch.deepspeed and find_spec("deepspeed") is None:
        raise ConfigError(
            "training.launch.deepspeed needs the package deepspeed; in the checkout, "
            "`pip install -c constraints.txt -e '.[deepspeed]'`"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and here > gpus:
        raise ConfigError(f"training.launch asks for {here} processes on this machine, which has {gpus} GPUs; lower it")


def _check_loggers(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ConfigError(f"training.report_to: {name!r} is unknown; choose among {known}")
        if name not in get_available_reporting_integrations():
            raise ConfigError(f"training.report_to: {name} is not installed; install its package or leave it out")


def _check_four_bits(gpus: int) -> None:
    if not gpus:
        raise ConfigError("training.load_in_4bit (QLoRA) needs a CUDA device, and torch sees none; set it to false")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "training.load_in_4bit (QLoRA) needs bitsandbytes; in the checkout, "
            "`pip install -c constraints.txt -e '.[qlora]'`"
        )
