"""The sections of a recipe that say how models are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.fields import Count, Natural, Positive, Unit, record

_ADAPTER_FIELDS = (
    *("lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_dora", "load_in_4bit"),
    "publish",
)
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM makes room (`--max-lora-rank`); an adapter of another rank gets the next
larger one.
"""


@record
class LaunchConfig:
    """Training through `accelerate launch`; the fields have its names."""

    num_processes: Count | Literal["auto"] = 1
    """Processes on all machines together, the same number on each; a process has one GPU, or shares
    the CPU. `auto`: one for each GPU of this machine; without a GPU, one for each processor, four
    at most."""
    num_machines: Count = 1
    """With more than one, the others are started with `python -m agentr_core.training.join`. Group
    RL trains on one machine, beside its sampler."""
    main_process_ip: str = ""
    """Address of the machine that the run is started on; needed with several machines."""
    main_process_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free port; several machines must use the same one."""
    deepspeed: str = ""
    """`zero2`, `zero3`, `zero3-offload` (see `deployments/deepspeed`) or a DeepSpeed JSON file of
    your own.
    """
    fsdp: bool = later_field(False)
    """Whether PyTorch (FSDP 2), in place of DeepSpeed, splits weights, gradients and optimizer over
    the processes; for fine-tuning on GPUs, and for group RL, not for preferences. Run on no GPU so
    far."""
    fsdp_config: dict[str, Any] = later_field(default_factory=dict)
    """Settings of FSDP by the Trainer's names, such as `{cpu_offload: true}`."""


@record
class TrainingConfig:
    """Supervised fine-tuning; names are Hugging Face's. Source: Agent-R appendix (AdamW, cosine, 3%
    warm-up).
    """

    start_from: Literal["previous", "base"] = "previous"
    num_train_epochs: tuple[Positive, ...] = (3.0, 1.0, 1.0)
    """Epochs of each iteration; the last number counts for all later iterations."""
    max_tokens: Natural = 0
    """Train an iteration until it reaches this many trained (unmasked) tokens, and no further; 0
    means `num_train_epochs` decides. Set it to compare methods at an equal budget."""
    max_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Train an iteration for this many seconds, whatever `num_train_epochs` says: the rows are
    repeated as needed, and the step in which the time runs out is the last one; 0 means no such
    budget. The learning rate follows the time: schedule and warm-up run over the seconds instead of
    steps. Loading and the reference model's pass over pairs are not counted; steps before an
    interruption are, if a checkpoint kept them. How many steps fit depends on the machine, so
    another run gives different weights."""
    learning_rate: Positive = 2e-5
    optim: str = later_field("adamw_torch_fused")
    """The optimizer, by the Trainer's name; some need an additional package."""
    lr_scheduler_type: str = "cosine"
    lr_scheduler_kwargs: dict[str, Any] = later_field(default_factory=dict)
    """Further arguments of the schedule, such as `{num_cycles: 2}` of `cosine_with_restarts`."""
    warmup_ratio: Unit = 0.03
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Positive = 1.0
    per_device_train_batch_size: Count = 16
    gradient_accumulation_steps: Count = 1
    step_tokens: Natural = later_field(0)
    """Tokens of an optimizer step over all processes, instead of a number of samples: a step takes
    samples as long as together they have no more tokens than this. 0: it takes batch size times
    `gradient_accumulation_steps` times the number of processes. Trainers that pack whole rows count
    this way: 128 rows of 8192 tokens are 1048576."""
    packing: bool = True
    bf16: bool | Literal["auto"] = True
    """Mixed precision; `auto`: where the GPU or processor computes bfloat16 fast."""
    fp16: bool = later_field(False)
    """Mixed precision with 16-bit floats and dynamic scaling, on a GPU; `bf16` must be false."""
    attn_implementation: str = later_field("")
    """How attention is computed, by Transformers' name: eager, sdpa, flash_attention_2; empty: as
    Transformers chooses."""
    use_liger_kernel: bool = later_field(False)
    """Liger's fused kernels, on a GPU with the package liger-kernel; for fine-tuning, not for
    preferences."""
    save_steps: Count = later_field(50)
    """Optimizer steps between two checkpoints of an unfinished training: at most this many are lost
    when it is interrupted."""
    save_total_limit: Natural | None = later_field(0)
    """How many of these checkpoints, the newest ones, stay as models of their own beside the
    finished one: its folder with `@` and the step. 0: none; null: all. In group RL, they are those
    of `grpo.save_steps`."""
    gradient_checkpointing: bool | None = None
    """Whether activations are computed twice to save memory; by default on a GPU only."""
    report_to: tuple[str, ...] = ()
    """Where steps are logged besides the store: `tensorboard`, `wandb`, `trackio` or another name
    that the Trainer knows. Every training logs `train/loss`, `train/learning_rate` and
    `train/grad_norm`.
    """
    lora_r: Natural = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: Positive = 16.0
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lora_target_modules: str | tuple[str, ...] = "all-linear"
    """Names of modules, or one pattern, as PEFT takes them."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules that are trained in full besides the adapters."""
    use_dora: bool = False
    """DoRA: the adapter learns direction and magnitude separately."""
    load_in_4bit: bool = False
    """QLoRA: the weights under the adapter in 4 bits; needs CUDA and bitsandbytes."""
    publish: Literal["merged", "adapter"] = "merged"
    """What a LoRA checkpoint is: a whole model with the adapter beside it, or a PEFT directory that
    names its model.
    """
    launch: LaunchConfig | None = None
    """None trains in one plain process, on the first GPU or the CPU."""
    num_threads: Natural = 0
    """CPU threads of each process of the trainer; 0 leaves it to `OMP_NUM_THREADS`; without that
    variable it is one where there is no GPU. Two threads are faster on an idle machine, and many
    times slower beside other programs; two processes (`launch.num_processes`) are faster on both.
    """

    @property
    def num_processes(self) -> int:
        """Return how many processes share the samples of an optimizer step.

        `auto` must have been resolved: see `runtime.machine.resolve_auto`.
        """
        processes = self.launch.num_processes if self.launch else 1
        assert processes != "auto"
        return processes

    @property
    def ended_by(self) -> Literal["max_seconds", "max_tokens", "num_train_epochs"]:
        """Return the name of the field that decides when the training of an iteration is over."""
        if self.max_seconds:
            return "max_seconds"
        return "max_tokens" if self.max_tokens else "num_train_epochs"

    def without_addresses(self) -> TrainingConfig:
        """Return the settings without addresses: what decides the weights, wherever the training
        runs.
        """
        if self.launch is None:
            return self
        launch = dataclasses.replace(self.launch, main_process_ip="", main_process_port=0)
        return dataclasses.replace(self, launch=launch)

    def faults(self) -> list[str]:
        """Return what is wrong with the section `training` of a recipe, one sentence each."""
        defaults = TrainingConfig()
        faults = [
            f"training.{name}: only with LoRA, so set training.lora_r"
            for name in _ADAPTER_FIELDS
            if not self.lora_r and getattr(self, name) != getattr(defaults, name)
        ]
        if self.step_tokens and self.gradient_accumulation_steps != defaults.gradient_accumulation_steps:
            faults.append(
                "training.gradient_accumulation_steps: training.step_tokens says how large a step is; leave one of "
                "them out"
            )
        if self.max_tokens and self.num_train_epochs != defaults.num_train_epochs:
            faults.append(
                "training.num_train_epochs: training.max_tokens says how long it trains; leave one of the two out"
            )
        if self.max_seconds and self.max_tokens:
            faults.append("training.max_seconds: training.max_tokens is a budget already; leave one of the two out")
        if self.fp16 and self.bf16 is not False:
            faults.append("training.fp16: training.bf16 is another mixed precision; set it to false")
        launch = self.launch
        if launch is None:
            return faults
        if launch.num_processes == "auto":
            if launch.num_machines > 1:
                faults.append("training.launch.num_processes: auto counts one machine; give the number on all of them")
        elif launch.num_processes % launch.num_machines:
            faults.append(
                f"training.launch: {launch.num_processes} processes cannot be divided evenly among "
                f"{launch.num_machines} machines; change num_processes or num_machines"
            )
        if launch.num_machines > 1 and not (launch.main_process_ip and launch.main_process_port):
            faults.append("training.launch: several machines need main_process_ip and main_process_port")
        if self.load_in_4bit and launch.deepspeed.startswith("zero3"):
            faults.append("training.load_in_4bit: weights in 4 bits cannot be split by ZeRO-3; use zero2")
        if not launch.fsdp:
            if launch.fsdp_config:
                faults.append(
                    "training.launch.fsdp_config: has no use without training.launch.fsdp; set it, or leave this out"
                )
            return faults
        if launch.deepspeed:
            faults.append("training.launch.fsdp: training.launch.deepspeed splits the training already; leave one out")
        if launch.num_processes == 1:
            faults.append("training.launch.fsdp: one process has nothing to split; raise training.launch.num_processes")
        if self.load_in_4bit:
            faults.append("training.load_in_4bit: weights in 4 bits are not split by FSDP here; use deepspeed zero2")
        return faults

    def vllm_adapter_faults(self) -> list[str]:
        """Return why vLLM could not serve the adapters of a training, one sentence each."""
        remedy = "set training.publish=merged"
        faults = []
        if self.use_dora:
            faults.append(f"training.use_dora: vLLM serves no DoRA adapters; {remedy}")
        if self.lora_modules_to_save:
            faults.append(
                f"training.lora_modules_to_save: vLLM serves no adapters with modules that were trained whole; {remedy}"
            )
        if self.lora_r > VLLM_LORA_RANKS[-1]:
            faults.append(
                f"training.lora_r: vLLM serves adapters up to rank {VLLM_LORA_RANKS[-1]}; lower it, or {remedy}"
            )
        return faults


TRAINER_FIELDS = ("optim", "fp16", "use_liger_kernel")
"""Fields of section `training` that only the Trainer's own loop reads."""
UNREAD_FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dpo": {
            "num_train_epochs": "eto.dpo.num_train_epochs says how long it trains",
            "step_tokens": "eto.dpo.per_device_train_batch_size says how large a step is",
            "packing": "each side of a pair has a row of its own",
            "use_liger_kernel": "preferences are trained without it",
            "lora_dropout": "preferences are trained without dropout, as TRL does by default",
        },
        "grpo": {
            "num_train_epochs": "grpo.steps says how long it trains",
            "max_tokens": "grpo.steps says how long it trains",
            "max_seconds": "grpo.steps says how long it trains",
            "step_tokens": "grpo.groups says how large a step is",
            "per_device_train_batch_size": "grpo.groups says how large a step is",
            "gradient_accumulation_steps": "grpo.micro_batch_tokens says how large a pass is",
            **dict.fromkeys(TRAINER_FIELDS, "group RL has AdamW and bfloat16 of its own"),
            "save_steps": "grpo.save_steps says when it saves",
        },
    }
)
"""Fields of section `training` that a kind of objective does not read, each with the reason. Those
that another section replaces are not among them: the plan of a training has that section's value.
"""


def sharing_faults(training: TrainingConfig, *, back: bool, has_pairs: bool) -> list[str]:
    """Return why the processes of `launch` cannot share the steps over a dataset, one sentence
    each.

    Args:
        back: the recipe goes back to saved weights at an alarm.
        has_pairs: an iteration trains on preference pairs, whose steps `step_tokens` does not size.
    """
    launch, faults = training.launch, []
    if launch is None:
        return []
    if launch.num_processes == "auto" and has_pairs:
        faults.append(
            "training.launch.num_processes: with auto the machine would decide how many pairs a step of preference "
            "training has; give a number"
        )
    elif launch.num_processes == "auto" and not training.step_tokens:
        faults.append(
            "training.launch.num_processes: with auto the machine would decide how many samples a step has; set "
            "training.step_tokens"
        )
    if back and (launch.fsdp or launch.deepspeed.startswith("zero3")):
        faults.append(
            "alarms.reaction: weights that ZeRO-3 or FSDP splits cannot be taken back within a training; set it to "
            "stop, or split less with training.launch.deepspeed=zero2"
        )
    return faults
