"""What a run needs, as lines for `agentr plan`: tokens of an iteration, time, and memory."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentr_core import estimates
from agentr_core.estimates import GIB
from agentr_core.methods.table import method_of, plans_of
from agentr_core.models.local.workers import worker_count
from agentr_core.recipes.grpo import on_one_machine
from agentr_core.recipes.models import ModelConfig, ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.reports.wording import duration
from agentr_core.runtime import machine
from agentr_core.training.job import GroupRelative

_MAIN_PROCESS_BYTES = 900 << 20
"""Bytes of memory of the run's own process, with Prefect, its server and the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldCounts:
    """How much a run plays in a world: the numbers of training instances, of held-out episodes and,
    at most, of states of the revision test; and the lengths of episodes, if known.
    """

    train: int
    test: int
    states: int
    lengths: estimates.EpisodeLengths | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRuns:
    """The speed of earlier runs in a workspace: the time that a run of the same recipe took, and
    the rate at which the same model sampled; None if not known.
    """

    run_id: str | None = None
    seconds: float = 0.0
    """The time that run `run_id` took in all its stages; 0 without such a run."""
    tokens_per_second: float | None = None


def need_lines(
    recipe: Recipe,
    shapes: Mapping[ModelRole, estimates.ModelShape],
    counts: Mapping[str, WorldCounts],
    *,
    gpu: float | None,
    longest: int,
    earlier: EarlierRuns,
) -> list[str]:
    """Return the needs of a run as lines: tokens (at most, and likely), time, and memory.

    Args:
        shapes: the sizes of each role's model.
        counts: how much is played in each world, by name.
        gpu: the memory of a GPU of another machine, in bytes; None: this machine's memory counts.
        longest: the tokens of the longest row that is trained on, as far as is known.
        earlier: the speed of earlier runs in the workspace.
    """
    lines = [*_token_lines(recipe, counts, earlier), ""]
    memory = machine.memory() if gpu is None else None
    if memory is not None and not memory.gpu:
        return [*lines, *_main_memory_lines(recipe, shapes, memory, longest)]
    if memory is None:
        most, free = gpu or 0.0, gpu or 0.0
        lines.append(f"memory, estimated, of a GPU of {_size(most)}")
    else:
        most, free = memory.total, memory.free
        lines.append(f"memory, estimated, of {memory.gpu}, {_size(most)}, {_size(free)} free now (another: --gpu-gib)")
    for role, shape in shapes.items():
        model = recipe.own_models()[role]
        lines += _sampling_lines(role, model, shape, most if model.backend == "vllm" else free)
    if "actor" in shapes:
        lines += _training_lines(recipe, shapes["actor"], free, longest)
    return lines


def _token_lines(recipe: Recipe, counts: Mapping[str, WorldCounts], earlier: EarlierRuns) -> list[str]:
    """Return lines with a table of the tokens of an iteration, the source of the likely numbers,
    and the time that the run takes.
    """
    rows: list[tuple[str, int, int, int]] = []
    sources: list[str] = []
    for name, world in recipe.worlds().items():
        world_counts = counts[name]
        prefix = f"{name}, " if recipe.environments else ""
        demands = method_of(world).demands(world, world_counts.train, world_counts.test)
        for estimate in estimates.token_estimates(
            world, demands, world_counts.test, world_counts.states, lengths=world_counts.lengths
        ):
            helper = "" if estimate.role == "actor" else f" ({estimate.role})"
            rows.append((f"{prefix}{estimate.stage}{helper}", estimate.replies, estimate.tokens, estimate.likely))
        if world_counts.lengths:
            sources.append(
                f"  likely{f' in {name}' if recipe.environments else ''}: {world_counts.lengths.source}, of "
                f"{world_counts.lengths.replies:.1f} replies of {world_counts.lengths.tokens:.0f} tokens"
            )
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows), sum(row[3] for row in rows)))
    head = f"{'each iteration samples':<30}{'replies at most':>16}{'tokens at most':>16}{'likely':>16}"
    table = [
        f"  {name:<28}{replies:>16,}{most:>16,}{f'{likely:,}' if likely else '?':>16}"
        for name, replies, most, likely in rows
    ]
    unknown = "  likely: not known without a stored episode, or an expert and the model here"
    likely = rows[-1][3]
    if earlier.run_id:
        time = f"{duration(earlier.seconds)}, as run {earlier.run_id} of this recipe took"
    elif earlier.tokens_per_second and likely:
        sampling = duration(likely * recipe.iterations / earlier.tokens_per_second)
        time = f"{sampling} to sample at this model's {earlier.tokens_per_second:,.0f} tokens/s here, and training"
    else:
        time = "not known before a run of this recipe or model in this workspace"
    return [head, *table, *(sources or [unknown]), f"  time: {time}"]


def _main_memory_lines(
    recipe: Recipe, shapes: Mapping[ModelRole, estimates.ModelShape], memory: machine.Memory, longest: int
) -> list[str]:
    """Return lines with the main memory that sampling by each role and training need here, and
    whether the largest of these amounts fits.
    """
    lines = [f"memory, estimated; here are {_size(memory.total)} without a GPU, {_size(memory.free)} free now"]
    peaks: dict[str, float] = {}
    for role, shape in shapes.items():
        model = recipe.own_models()[role]
        if model.backend == "vllm":
            need = estimates.sampling_memory(shape, model)
            total = model.vllm.replicas * (need.weights + model.vllm.kv_cache_gib * GIB + GIB)
            lines.append(f"  {role}, vllm: {_size(total)}")
        else:
            workers = worker_count(model)
            context = model.context_length or shape.context_length
            process = estimates.sampling_process_memory(shape, model, workers, min(context, longest))
            total = workers * process.total
            lines += _process_lines(f"{role}, {model.backend}: {shape.parameters:,} parameters,", process, workers)
        peaks[role] = total
    if "actor" in shapes and any(plan.training for plan in plans_of(recipe)):
        config = recipe.training
        trainer = estimates.training_process_memory(shapes["actor"], config, longest)
        peaks["training"] = config.num_processes * trainer.total - (config.num_processes - 1) * trainer.parts["saving"]
        lines += _process_lines("training:", trainer, config.num_processes)
    name, most = max(peaks.items(), key=lambda item: item[1], default=("", 0.0))
    if not name or most + _MAIN_PROCESS_BYTES <= memory.free:
        return [*lines, f"  fits: {_size(most + _MAIN_PROCESS_BYTES)} at most, with this process"]
    fewer = "training.launch.num_processes, data.max_length" if name == "training" else "model.workers, model.max_batch"
    remedy = f"lower {fewer}{', or set training.lora_r' if name == 'training' and not recipe.training.lora_r else ''}"
    return [
        *lines,
        f"  does not fit: {name} needs {_size(most + _MAIN_PROCESS_BYTES)}, with this process; free some, or",
        f"    {remedy};",
        "    --gpu-gib asks about a machine with a GPU",
    ]


def _process_lines(label: str, process: estimates.ProcessMemory, number: int) -> list[str]:
    many = "1 process" if number == 1 else f"{number} processes"
    head = f"  {label} {many} of at most {_size(process.total)}"
    parts = [
        f"weights {_size(process.weights)}",
        *(f"{name} {_size(size)}" for name, size in process.parts.items() if size),
    ]
    return [head, *textwrap.wrap(", ".join(parts), 76, initial_indent="    ", subsequent_indent="    ")]


def _sampling_lines(role: str, model: ModelConfig, shape: estimates.ModelShape, gpu: float) -> list[str]:
    need = estimates.sampling_memory(shape, model)
    context = model.context_length or shape.context_length
    share = gpu * (model.vllm.gpu_memory_utilization if model.backend == "vllm" else 1.0)
    room = need.sequences(share, context)
    parts = f" on each of {model.vllm.tensor_parallel_size} GPUs" if model.vllm.tensor_parallel_size > 1 else ""
    line = f"  {role}, {model.backend}: {shape.parameters:,} parameters, weights {_size(need.weights)}{parts}, "
    line += f"{_size(need.token)} for each token in keys and values: room for {room:,} sequences of {context:,} tokens"
    return [line] if room else [line, f"    {sampling_advice(model, need, share)}"]


def sampling_advice(model: ModelConfig, need: estimates.SamplingMemory, share: float) -> str:
    """Return what to change for a model if no sequence fits in its `share` (bytes) of a GPU."""
    spread = "raise model.vllm.tensor_parallel_size" if model.backend == "vllm" else ""
    if need.weights >= share:
        return f"the weights alone exceed the {_size(share)} that it may take; {spread or 'it needs a larger GPU'}"
    return f"no sequence has room beside the weights; lower model.context_length{spread and f', or {spread}'}"


def _training_lines(recipe: Recipe, shape: estimates.ModelShape, gpu: float, longest: int) -> list[str]:
    trainings = [plan.training for plan in plans_of(recipe) if plan.training]
    groups = [training for training in trainings if isinstance(training.objective, GroupRelative)]
    lines = []
    if len(groups) < len(trainings) or not trainings:
        config = recipe.training
        need = estimates.training_memory(shape, config, longest)
        rows = f"{config.per_device_train_batch_size} x {longest:,} tokens"
        lines += _one_training_lines(config, need, rows, gpu, online=False)
    if groups:
        config = on_one_machine(recipe.training)
        # A row is a whole episode.
        row = max(recipe.grpo.micro_batch_tokens, recipe.model.context_length or shape.context_length)
        need = estimates.group_rl_memory(shape, recipe, row)
        config = replace(config, per_device_train_batch_size=1)
        lines += _one_training_lines(config, need, f"1 x {row:,} tokens", gpu, online=True)
        lines += _shared_gpu_lines(recipe.model, config, need, gpu)
    return lines


def _one_training_lines(
    config: TrainingConfig, need: estimates.TrainingMemory, rows: str, gpu: float, *, online: bool
) -> list[str]:
    kind = f"LoRA, {need.trained:,} parameters" if config.lora_r else "all weights"
    spread = f", {config.num_processes} processes" if config.num_processes > 1 else ""
    split = config.launch and (config.launch.deepspeed or ("fsdp" if config.launch.fsdp else ""))
    zero = f" under {split}" if split else ""
    line = (
        f"  {'group RL' if online else 'training'}, {kind}{spread}{zero}: weights {_size(need.weights)}, gradients and "
        f"optimizer {_size(need.states)}, activations of {rows} {_size(need.activations)}: {_size(need.total)} in all"
    )
    if need.host_bytes:
        line += f", and {_size(need.host_bytes)} of main memory on all machines together"
    return [line] if need.total <= gpu else [line, f"    {training_advice(config, need, gpu, online=online)}"]


def _shared_gpu_lines(
    model: ModelConfig, config: TrainingConfig, need: estimates.TrainingMemory, gpu: float
) -> list[str]:
    """Return a line about the GPUs on which both a trainer of group RL and a vLLM server are."""
    gpus = sorted(set(model.vllm.gpu_numbers) & set(range(config.num_processes))) if model.backend == "vllm" else []
    if not gpus:
        return []
    share, gpu_list = gpu * model.vllm.gpu_memory_utilization, ", ".join(map(str, gpus))
    head = f"  GPU {gpu_list}: trainer and sampler"
    if model.shares_gpus:
        waits, turns = need.weights + need.states, f"{head} take turns, {_size(need.total)} and {_size(share)}"
        return [f"{turns}; {_size(waits)} of each process wait in main memory while vLLM samples" if waits else turns]
    both = f"{head} together, {_size(need.total + share)}"
    if need.total + share <= gpu:
        return [both]
    return [both, "    that is too much; set model.vllm.sleep=true, lower gpu_memory_utilization, or name other GPUs"]


def training_advice(config: TrainingConfig, need: estimates.TrainingMemory, gpu: float, *, online: bool) -> str:
    """Return what helps a training that does not fit on a GPU. Settings that are already in effect
    are left out, and shorter rows are, too, where they could not suffice.

    Args:
        online: whether it is group RL, which trains on episodes.
    """
    launch = config.launch
    fsdp = bool(launch and launch.fsdp)
    split = fsdp or bool(launch and launch.deepspeed.startswith("zero3"))
    lighter = {
        "set training.lora_r": not config.lora_r,
        "set training.load_in_4bit=true": config.lora_r > 0 and not (config.load_in_4bit or split or online),
        "set training.launch.deepspeed=zero3-offload": not (need.host_bytes or fsdp or config.load_in_4bit),
    }
    shorter = {
        "set training.gradient_checkpointing=true": config.gradient_checkpointing is False,
        "lower training.per_device_train_batch_size": config.per_device_train_batch_size > 1,
        "lower data.max_length": not online,
        "lower grpo.micro_batch_tokens and model.context_length": online,
    }
    fixed_memory = need.total - need.activations
    problem, remedies = ("that is too much", lighter | shorter)
    if fixed_memory > gpu:
        problem, remedies = f"that is too much even without activations, {_size(fixed_memory)}", lighter
    return (
        f"{problem}; {', or '.join(remedy for remedy, helps in remedies.items() if helps) or 'it needs a larger GPU'}"
    )


def _size(count: float) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1024:.3g} KiB"
