"""How the processes of a training hold the policy: each all of it, or a part of its weights,
gradients and optimizer, by PyTorch (FSDP 2) or DeepSpeed (ZeRO).

All processes call the same methods in the same order, since most of them wait for the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import Tensor

from agentr_core.errors import ConfigError
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.parent import gathered_tensor, text_config
from agentr_core.training.process import read_deepspeed, splits_weights

_CHECKPOINT_TAG = "state"


# PyTorch and DeepSpeed are called directly: Accelerate ignores FSDP on a CPU, and a Trainer needs
# its rows before it begins.
class Strategy:
    """One process alone, with the whole policy. The other ways to hold it are subclasses.

    `rank` is the number of this process among `num_processes`; `needs_equal_passes`
    says whether all of them must make the same number of passes; `zero3` says whether DeepSpeed
    splits weights while a model is read.
    """

    rank = 0
    num_processes = 1
    needs_equal_passes = False
    zero3 = False

    def __init__(self) -> None:
        device_name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device_name)
        self.optimizer: Any = None
        self._model: Any = None
        self._models: list[Any] = []

    def place(self, model: Any) -> Any:
        """Return a model on this process's device; where weights are split, with only this
        process's part of it.
        """
        return model.to(self.device)

    def prepare(
        self, model: Any, parameter_groups: list[dict[str, Any]], learning_rate: float, *, is_trained: bool = True
    ) -> Any:
        """Return the callable that computes with a model that `place` returned.

        If `is_trained`, `optimizer` is set to AdamW over the parameter groups, with the given
        learning rate.
        """
        self._models.append(model)
        if is_trained:
            self._model, self.optimizer = model, torch.optim.AdamW(parameter_groups, lr=learning_rate)
        return model

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a pass to that of the step; `is_last` marks the step's last pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, parameters: Iterable[Tensor], max_norm: float, *, is_loss_finite: bool) -> float:
        """Clip the gradient to the norm `max_norm`, take an optimizer step, and return the norm
        before clipping. The weights stay unchanged if that norm is not finite or `is_loss_finite`
        is False.
        """
        total_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = float(gathered_tensor(total_norm))
        if is_loss_finite and norm < float("inf"):
            self.optimizer.step()
        return norm

    def zero_grad(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def idle_step(self) -> None:
        """Call the optimizer without a gradient, which changes nothing: PyTorch warns if a schedule
        advances without its optimizer.
        """
        self.optimizer.step()

    def sum_over_processes(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all processes."""
        return list(values)

    def gather_parameters(self, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the given parameters are whole, unless they are DTensors."""
        return nullcontext()

    def save(self, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the model, which is given as `state`, and of the optimizer. If
        several processes hold parts of it, they write these to the folder instead, and return an
        empty dict.
        """
        return {"model": state, "optimizer": self.optimizer.state_dict()}

    def load(self, folder: Path, state: Mapping[str, Any], restore: Callable[[Any], None]) -> None:
        """Go back to the state that `save` returned or wrote; `restore` loads the state of the
        model.
        """
        restore(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def move_state(self, *, to_cpu: bool) -> None:
        """Move models and optimizer to main memory (`to_cpu`), or back to the device."""
        device = torch.device("cpu") if to_cpu else self.device
        for model in self._models:
            model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.ndim:
                    state[name] = value.to(device)


class Replicated(Strategy):
    """Several processes, each with the whole policy; `step` sums their gradients."""

    def __init__(self, rank: int, num_processes: int) -> None:
        super().__init__()
        self.rank, self.num_processes = rank, num_processes

    def step(self, parameters: Iterable[Tensor], max_norm: float, *, is_loss_finite: bool) -> float:
        """As `Strategy.step`, after summing the gradients over all processes."""
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        return super().step(parameters, max_norm, is_loss_finite=is_loss_finite)

    def sum_over_processes(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all processes."""
        sums = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums]


class Fsdp(Replicated):
    """Weights, gradients and optimizer split by PyTorch's `fully_shard`."""

    needs_equal_passes = True

    def __init__(self, rank: int, num_processes: int, training: TrainingConfig) -> None:
        super().__init__(rank, num_processes)
        assert training.launch is not None
        self._settings = dict(training.launch.fsdp_config)
        self._uses_bf16 = training.bf16 is True
        self._cpu_offload = bool(self._settings.get("cpu_offload"))

    def place(self, model: Any) -> Any:
        """Return the model, split: each of its layers is gathered only while it computes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy=self._settings.get("auto_wrap_policy", "transformer_based_wrap"),
            min_num_params=self._settings.get("min_num_params"),
            transformer_cls_names_to_wrap=self._settings.get("transformer_layer_cls_to_wrap"),
        )
        should_wrap = fsdp2_prepare_auto_wrap_policy(plugin, model)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (self.num_processes,)),
            "reshard_after_forward": self._settings.get("reshard_after_forward", True),
        }
        if self._uses_bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self._cpu_offload and self.device.type == "cuda":
            options["offload_policy"] = CPUOffloadPolicy()
        # From the inside out: a module takes the parameters that no module inside it has taken.
        for module in reversed(list(model.modules())):
            if module is not model and should_wrap is not None and should_wrap(module):
                fully_shard(module, **options)
        fully_shard(model, **options)
        return model

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """As `Strategy.backward`. FSDP averages the gradients over all processes in each pass, so
        that none of them holds a whole one; the factor of the loss makes the average a sum.
        """
        (loss * self.num_processes).backward()  # type: ignore[no-untyped-call]

    def step(self, parameters: Iterable[Tensor], max_norm: float, *, is_loss_finite: bool) -> float:
        """As `Strategy.step`; the gradients have been summed already."""
        return Strategy.step(self, parameters, max_norm, is_loss_finite=is_loss_finite)

    def save(self, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Write the parts of all processes to the folder; return an empty dict."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state_parts(), checkpoint_id=folder)
        return {}

    def load(self, folder: Path, state: Mapping[str, Any], restore: Callable[[Any], None]) -> None:
        """Go back to the state that `save` wrote."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        parts = self._state_parts()
        load(parts, checkpoint_id=folder)
        set_state_dict(
            self._model,
            self.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=_state_options(),
        )

    def move_state(self, *, to_cpu: bool) -> None:
        """As `Strategy.move_state`; with `cpu_offload` the parts are in main memory already."""
        if not self._cpu_offload:
            super().move_state(to_cpu=to_cpu)

    def _state_parts(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self.optimizer, options=_state_options())
        return {"model": model, "optimizer": optimizer}


class DeepSpeed(Replicated):
    """Gradients and optimizer, and with ZeRO-3 the weights, split by DeepSpeed."""

    needs_equal_passes = True

    def __init__(self, rank: int, num_processes: int, training: TrainingConfig, model_dir: Path, updates: int) -> None:
        super().__init__(rank, num_processes)
        from deepspeed import comm
        from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

        # On a CPU DeepSpeed would learn of the processes only after splitting the weights.
        comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        assert training.launch is not None
        content = read_deepspeed(training.launch.deepspeed)
        if "scheduler" in content:
            raise ConfigError(
                f"training.launch.deepspeed: {training.launch.deepspeed} has a scheduler of its own; leave it out, for "
                "group RL follows lr_scheduler_type"
            )
        # As long as this object lives, Transformers reads models for ZeRO-3 in parts.
        self._config = HfTrainerDeepSpeedConfig(content)
        self._config.trainer_config_process(_trainer_arguments(training, num_processes))
        self._config.trainer_config_finalize(
            _trainer_arguments(training, num_processes), SimpleNamespace(config=text_config(model_dir)), updates
        )
        self.zero3 = splits_weights(content)
        self._engine: Any = None
        self._has_own_optimizer = "optimizer" in content
        self._has_adapters = bool(training.lora_r)

    def place(self, model: Any) -> Any:
        """Return the model as it is; `prepare` splits it."""
        return model

    def prepare(
        self, model: Any, parameter_groups: list[dict[str, Any]], learning_rate: float, *, is_trained: bool = True
    ) -> Any:
        """Return DeepSpeed's engine around a model; for a frozen model without ZeRO-3, the model
        itself on the device.
        """
        import deepspeed

        if not is_trained:
            if not self.zero3:
                return model.to(self.device)
            # Gathered layer by layer, as the policy is.
            frozen_config = {name: value for name, value in self._config.config.items() if name != "optimizer"}
            return deepspeed.initialize(model=model, config=frozen_config)[0]
        own_optimizer = None if self._has_own_optimizer else torch.optim.AdamW(parameter_groups, lr=learning_rate)
        self._engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=own_optimizer, model_parameters=parameter_groups, config=self._config.config
        )
        self._model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        return self._engine

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """As `Strategy.backward`. DeepSpeed averages the gradients over all processes; the factor
        of the loss makes the average a sum.
        """
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self.num_processes, scale_wrt_gas=False)

    def step(self, parameters: Iterable[Tensor], max_norm: float, *, is_loss_finite: bool) -> float:
        """As `Strategy.step`, but a gradient that is not finite changes the weights, too, and
        DeepSpeed's configuration has the limit of the norm.
        """
        self._engine.step()
        return float(self._engine.get_global_grad_norm() or 0.0)

    def zero_grad(self) -> None:
        """Do nothing: DeepSpeed drops the gradient after each step."""

    def idle_step(self) -> None:
        """Only silence PyTorch's warning about schedules: DeepSpeed counts its own steps."""
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)

    def gather_parameters(self, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the given parameters are whole."""
        if not self.zero3:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(parameters))
        return context

    def save(self, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Write the parts of all processes to the folder; return an empty dict."""
        self._engine.save_checkpoint(
            str(folder), tag=_CHECKPOINT_TAG, save_latest=False, exclude_frozen_parameters=self._has_adapters
        )
        return {}

    def load(self, folder: Path, state: Mapping[str, Any], restore: Callable[[Any], None]) -> None:
        """Go back to the state that `save` wrote."""
        self._engine.load_checkpoint(str(folder), tag=_CHECKPOINT_TAG, load_module_strict=not self._has_adapters)

    def move_state(self, *, to_cpu: bool) -> None:
        """Do nothing: what is offloaded is in main memory already, and the rest stays on the GPU,
        since DeepSpeed moves the states only of its own FusedAdam.
        """


def make_strategy(
    rank: int, training: TrainingConfig, model_dir: Path, *, rendezvous_file: Path, updates: int
) -> Strategy:
    """Join the other processes of a training, and return how this one holds the policy. Waits until
    all of them have joined.

    Args:
        rank: the number of this process, which is also that of its GPU.
        rendezvous_file: the path of a file that does not exist yet, through which the processes
            find each other.
        updates: the number of updates of the training.

    Raises `ConfigError` if a DeepSpeed configuration does not fit group RL.
    """
    launch, num_processes, has_gpu = training.launch, training.num_processes, torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
    # Parameters that FSDP offloads are exchanged in main memory, by Gloo.
    offloads_to_cpu = launch is not None and launch.fsdp and launch.fsdp_config.get("cpu_offload")
    backend = "gloo" if not has_gpu else "cpu:gloo,cuda:nccl" if offloads_to_cpu else "nccl"
    dist.init_process_group(
        backend, init_method=rendezvous_file.absolute().as_uri(), rank=rank, world_size=num_processes
    )
    if launch is not None and launch.deepspeed:
        return DeepSpeed(rank, num_processes, training, model_dir, updates)
    return (
        Fsdp(rank, num_processes, training) if launch is not None and launch.fsdp else Replicated(rank, num_processes)
    )


def _state_options() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(ignore_frozen_params=True, strict=False)


def _trainer_arguments(training: TrainingConfig, num_processes: int) -> Any:
    """Return the attributes of a Trainer's arguments with which DeepSpeed's `auto` fields are
    filled in. One of our steps is one batch to it, however many passes that takes.
    """
    return SimpleNamespace(
        world_size=num_processes,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_grad_norm=training.max_grad_norm,
        learning_rate=training.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=training.weight_decay,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=training.bf16 is True,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 1,
    )
