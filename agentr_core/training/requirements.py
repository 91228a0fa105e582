"""Checks what a training's settings require: names that its libraries know, and features of the
machine.

All faults are reported together before a run samples its first reply, and again by each process of
a trainer, which may run on another machine.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Final

import torch
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from agentr_core.errors import ConfigError
from agentr_core.recipes.training import TrainingConfig
from agentr_core.texts import faults_message
from agentr_core.training.process import read_deepspeed, splits_weights

_ATTENTION_NAMES: Final = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_FSDP_FIELDS: Final = (
    "auto_wrap_policy",
    "cpu_offload",
    "min_num_params",
    "reshard_after_forward",
    "state_dict_type",
    "transformer_layer_cls_to_wrap",
)
"""The fields of the Trainer's `fsdp_config` that have an effect with FSDP 2 and our checkpoints."""
_STEPS_IN_BACKWARD: Final = re.compile("lomo|layerwise")
_PACKAGES_BY_OPTIMIZER: Final = {
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "schedule_free": "schedulefree",
    "torch_4bit": "torchao",
    "torch_8bit": "torchao",
    "anyprecision": "torchdistx",
    "grokadamw": "grokadamw",
    "stable_adamw": "optimi",
    "8bit": "bitsandbytes",
    "bnb": "bitsandbytes",
    "32bit": "bitsandbytes",
    "ademamix": "bitsandbytes",
}
"""The packages that optimizers need, by a part of the optimizer's name; the first match counts."""


PREFERENCE_SECTION = "eto.dpo"
"""The section of a recipe that configures preference training."""


def check_requirements(config: TrainingConfig) -> None:
    """Check that this process can do what the settings ask for. Raises a `ConfigError` that lists
    every fault, or says that a setting is still `auto`.
    """
    if config.bf16 == "auto":
        raise ConfigError(
            "training.bf16 is still auto; give true or false, or resolve it first (`runtime.machine.resolve_auto`)"
        )
    if faults := [*name_faults(config), *machine_faults(config)]:
        raise ConfigError(faults_message(faults))


def name_faults(config: TrainingConfig, *, section: str = "training") -> list[str]:
    """Return the faults of the settings that do not depend on the machine, one sentence each.

    Args:
        section: the section of the recipe with the learning-rate schedule; `PREFERENCE_SECTION`
            also checks for preference training.
    """
    faults = _schedule_faults(config, section)
    optimizers = [kind.value for kind in OptimizerNames if not _STEPS_IN_BACKWARD.search(kind.value)]
    if config.optim not in optimizers:
        reason = "takes its steps inside the backward pass" if _STEPS_IN_BACKWARD.search(config.optim) else "is unknown"
        faults.append(f"training.optim: {config.optim!r} {reason}; choose among {', '.join(optimizers)}")
    if config.attn_implementation and config.attn_implementation not in _ATTENTION_NAMES:
        choices = ", ".join(_ATTENTION_NAMES)
        faults.append(
            f"training.attn_implementation: {config.attn_implementation!r} is unknown; choose among {choices}"
        )
    if config.attn_implementation.startswith("flash_attention") and not (config.bf16 or config.fp16):
        faults.append(
            f"training.attn_implementation: {config.attn_implementation} computes in 16 bits only; set training.bf16 "
            "or training.fp16, or choose sdpa"
        )
    if config.use_liger_kernel and section == PREFERENCE_SECTION:
        faults.append("training.use_liger_kernel: preferences are trained without it; leave it out")
    for name in config.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            choices = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            faults.append(f"training.report_to: {name!r} is unknown; choose among {choices}")
    if config.launch and config.launch.fsdp:
        if section == PREFERENCE_SECTION:
            faults.append("training.launch.fsdp: preferences are trained without it; use training.launch.deepspeed")
        if unknown := sorted(set(config.launch.fsdp_config) - set(_FSDP_FIELDS)):
            faults.append(
                f"training.launch.fsdp_config: {', '.join(unknown)} is unknown here; choose among "
                f"{', '.join(_FSDP_FIELDS)}"
            )
    if config.launch and config.launch.deepspeed:
        try:
            content = read_deepspeed(config.launch.deepspeed)
        except ConfigError as error:
            return [*faults, str(error)]
        if config.load_in_4bit and splits_weights(content) and not config.launch.deepspeed.startswith("zero3"):
            faults.append(
                f"training.load_in_4bit: weights in 4 bits cannot be split by ZeRO-3, as {config.launch.deepspeed} "
                "asks for; use stage 2"
            )
    return faults


def machine_faults(config: TrainingConfig, *, online: bool = False) -> list[str]:
    """Return what this machine lacks for the settings, one sentence each.

    Args:
        online: whether they are those of group RL, which uses PyTorch's FSDP without Accelerate.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    faults = []
    if config.bf16 is True and num_gpus and not torch.cuda.is_bf16_supported():
        faults.append(f"{torch.cuda.get_device_name()} has no bfloat16; set training.bf16=false")
    faults += _kernel_faults(config, num_gpus)
    available = get_available_reporting_integrations()
    faults += [
        f"training.report_to: {name} is not installed; install its package or leave it out"
        for name in config.report_to
        if name in INTEGRATION_TO_CALLBACK and name not in available
    ]
    if config.load_in_4bit:
        if not num_gpus:
            faults.append("training.load_in_4bit (QLoRA) needs a CUDA device, and torch sees none; set it to false")
        if find_spec("bitsandbytes") is None:
            faults.append(
                "training.load_in_4bit (QLoRA) needs bitsandbytes; in the checkout, "
                "`pip install -c constraints.txt -e '.[qlora]'`"
            )
    launch = config.launch
    if launch is None:
        return faults
    if launch.deepspeed and find_spec("deepspeed") is None:
        faults.append(
            "training.launch.deepspeed needs the package deepspeed; in the checkout, "
            "`pip install -c constraints.txt -e '.[deepspeed]'`"
        )
    if launch.fsdp and not num_gpus and not online:
        faults.append(
            "training.launch.fsdp needs CUDA devices, since Accelerate leaves it out on a CPU without a word; use "
            "training.launch.deepspeed there, or leave it out"
        )
    num_local_processes = config.num_processes // launch.num_machines
    if num_gpus and num_local_processes > num_gpus:
        faults.append(
            f"training.launch asks for {num_local_processes} processes, one for each GPU, and the number of GPUs here "
            f"is {num_gpus}; lower it, or use num_processes=auto"
        )
    return faults


def gpu_memory() -> int:
    """Return the memory of the first GPU in bytes; 0 without a GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def _kernel_faults(config: TrainingConfig, num_gpus: int) -> list[str]:
    """Return what this machine lacks for the optimizer, dtype and kernels, one sentence each."""
    faults = []
    package = next((package for infix, package in _PACKAGES_BY_OPTIMIZER.items() if infix in config.optim), None)
    if package and find_spec(package) is None:
        faults.append(f"training.optim: {config.optim} needs the package {package}; install it, or choose another")
    if config.fp16 and not num_gpus:
        faults.append("training.fp16 needs a CUDA device, and torch sees none; set it to false")
    kernels = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    is_available = kernels.get(config.attn_implementation)
    if is_available is not None and not is_available():
        faults.append(
            f"training.attn_implementation: {config.attn_implementation} needs a CUDA device and its package of "
            "flash-attn; install it, or choose sdpa"
        )
    if config.use_liger_kernel and not (num_gpus and find_spec("liger_kernel")):
        faults.append(
            "training.use_liger_kernel needs a CUDA device and the package liger-kernel; install it, or set it to false"
        )
    return faults


def _schedule_faults(config: TrainingConfig, section: str) -> list[str]:
    """Return why a learning-rate schedule cannot be used, at most one sentence. It is created as
    the Trainer does, for an optimizer with a single parameter.
    """
    name, field = config.lr_scheduler_type, f"{section}.lr_scheduler_type"
    kinds = [kind.value for kind in SchedulerType]
    if name not in kinds:
        return [f"{field} {name!r} is unknown; choose one of {', '.join(kinds)}"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=1,
            num_training_steps=2,
            scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs),
        )
    except (TypeError, ValueError) as error:
        return [f"{field}: {name} takes other arguments ({error}); give them in training.lr_scheduler_kwargs"]
    if not hasattr(scheduler, "lr_lambdas"):
        return [f"{field}: {name} follows the losses of evaluations, which no trainer makes here; choose another"]
    return []
