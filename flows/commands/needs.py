"""What a run needs, in lines for `agentr plan`: the tokens of an iteration, and memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentr_core import estimates
from agentr_core.estimates import GIB
from agentr_core.methods.table import method_of, plans_of
from agentr_core.recipes import ModelConfig, ModelRole, Recipe, TrainingConfig
from agentr_core.recipes.grpo import on_one_machine
from agentr_core.training.objectives import GroupRelative


def needs(
    recipe: Recipe, shapes: Mapping[ModelRole, estimates.Shape], counts: Mapping[str, tuple[int, int, int]], gpu: float
) -> list[str]:
    """Return the needs of a run as lines: tokens at most, and memory of each GPU.

    Args:
        counts: the numbers of training instances, of held-out episodes and of states of the
            revision test, at most, of each world.
        gpu: the memory of a GPU, in bytes.
    """
    lines = ["each iteration samples at most"]
    for name, world in recipe.worlds().items():
        train, test, states = counts[name]
        where = f"{name}, " if recipe.environments else ""
        for one in estimates.tokens(world, method_of(world).sampled(world, train), test, states):
            lines.append(f"  {where}{one.stage}: {one.replies:,} replies, {one.tokens:,} tokens")
    lines += ["", f"memory, estimated, of a GPU of {_size(gpu)} (another: --gpu-gib)"]
    for role, shape in shapes.items():
        lines += _of_sampling(role, recipe.own_models()[role], shape, gpu)
    if "actor" in shapes:
        lines += _of_training(recipe, shapes["actor"], gpu)
    return lines


def _of_sampling(role: str, model: ModelConfig, shape: estimates.Shape, gpu: float) -> list[str]:
    need = estimates.sampling(shape, model)
    context = model.context_length or shape.context_length
    share = gpu * (model.vllm.gpu_memory_utilization if model.backend == "vllm" else 1.0)
    room = need.sequences(share, context)
    parts = f" on each of {model.vllm.tensor_parallel_size} GPUs" if model.vllm.tensor_parallel_size > 1 else ""
    line = f"  {role}, {model.backend}: {shape.parameters:,} parameters, weights {_size(need.weights)}{parts}, "
    line += f"{_size(need.token)} for each token in keys and values: room for {room:,} sequences of {context:,} tokens"
    return [line] if room else [line, f"    {sampling_advice(model, need, share)}"]


def sampling_advice(model: ModelConfig, need: estimates.Sampling, share: float) -> str:
    """Return what helps a model for which no sequence has room in its share of a GPU's memory."""
    spread = "raise model.vllm.tensor_parallel_size" if model.backend == "vllm" else ""
    if need.weights >= share:
        return f"the weights alone exceed the {_size(share)} that it may take; {spread or 'it needs a larger GPU'}"
    return f"no sequence has room beside the weights; lower model.context_length{spread and f', or {spread}'}"


def _of_training(recipe: Recipe, shape: estimates.Shape, gpu: float) -> list[str]:
    trainings = [plan.training for plan in plans_of(recipe) if plan.training]
    groups = [one for one in trainings if isinstance(one.objective, GroupRelative)]
    lines = []
    if len(groups) < len(trainings) or not trainings:
        config, longest = recipe.training, recipe.data.max_length
        need = estimates.training(shape, config, longest)
        rows = f"{config.per_device_train_batch_size} x {longest:,} tokens"
        lines += _of_one(config, need, rows, gpu, online=False)
    if groups:
        config = on_one_machine(recipe.training)
        # A row is a whole episode.
        longest = max(recipe.grpo.micro_batch_tokens, recipe.model.context_length or shape.context_length)
        need = estimates.group_training(shape, recipe, longest)
        config = replace(config, per_device_train_batch_size=1)
        lines += _of_one(config, need, f"1 x {longest:,} tokens", gpu, online=True)
        lines += _of_both(recipe.model, config, need, gpu)
    return lines


def _of_one(config: TrainingConfig, need: estimates.Training, rows: str, gpu: float, *, online: bool) -> list[str]:
    kind = f"LoRA, {need.trained:,} parameters" if config.lora_r else "all weights"
    spread = f", {config.num_processes} processes" if config.num_processes > 1 else ""
    split = config.launch and (config.launch.deepspeed or ("fsdp" if config.launch.fsdp else ""))
    zero = f" under {split}" if split else ""
    line = (
        f"  {'group RL' if online else 'training'}, {kind}{spread}{zero}: weights {_size(need.weights)}, gradients and "
        f"optimizer {_size(need.states)}, activations of {rows} {_size(need.activations)}: {_size(need.total)} in all"
    )
    if need.host:
        line += f", and {_size(need.host)} of main memory on all machines together"
    return [line] if need.total <= gpu else [line, f"    {training_advice(config, need, gpu, online=online)}"]


def _of_both(model: ModelConfig, config: TrainingConfig, need: estimates.Training, gpu: float) -> list[str]:
    """Return a line about the GPUs on which both a trainer of group RL and a vLLM server are."""
    shared = sorted(set(model.vllm.gpu_numbers) & set(range(config.num_processes))) if model.backend == "vllm" else []
    if not shared:
        return []
    share, named = gpu * model.vllm.gpu_memory_utilization, ", ".join(map(str, shared))
    where = f"  GPU {named}: trainer and sampler"
    if model.takes_turns:
        waits, turns = need.weights + need.states, f"{where} take turns, {_size(need.total)} and {_size(share)}"
        return [f"{turns}; {_size(waits)} of each process wait in main memory while vLLM samples" if waits else turns]
    both = f"{where} together, {_size(need.total + share)}"
    if need.total + share <= gpu:
        return [both]
    return [both, "    that is too much; set model.vllm.sleep=true, lower gpu_memory_utilization, or name other GPUs"]


def training_advice(config: TrainingConfig, need: estimates.Training, gpu: float, *, online: bool) -> str:
    """Return what helps a training that does not fit on a GPU; nothing is named that is done
    already, nor shorter rows where they could not suffice.

    Args:
        online: whether it is group RL, which trains on episodes.
    """
    launch = config.launch
    fsdp = bool(launch and launch.fsdp)
    split = fsdp or bool(launch and launch.deepspeed.startswith("zero3"))
    lighter = {
        "set training.lora_r": not config.lora_r,
        "set training.load_in_4bit=true": config.lora_r > 0 and not (config.load_in_4bit or split or online),
        "set training.launch.deepspeed=zero3-offload": not (need.host or fsdp or config.load_in_4bit),
    }
    shorter = {
        "set training.gradient_checkpointing=true": config.gradient_checkpointing is False,
        "lower training.per_device_train_batch_size": config.per_device_train_batch_size > 1,
        "lower data.max_length": not online,
        "lower grpo.micro_batch_tokens and model.context_length": online,
    }
    fixed = need.total - need.activations
    why, ways = ("that is too much", lighter | shorter)
    if fixed > gpu:
        why, ways = f"that is too much even without activations, {_size(fixed)}", lighter
    return f"{why}; {', or '.join(way for way, helps in ways.items() if helps) or 'it needs a larger GPU'}"


def _size(count: float) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1024:.3g} KiB"
