"""Estimate the needs of a recipe before anything runs: memory for sampling and training, and an
upper bound on tokens.

Weights, adapters and optimizer states are counted on the model's real layers, built without
allocating memory; activations follow from their widths. `tests/core/test_estimates.py` compares
them with a real trainer's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import whole_episode
from agentr_core.errors import DataFileError, EnvironmentFault
from agentr_core.models.checkpoint_dir import adapter_base, no_model_error
from agentr_core.recipes.grpo import on_one_machine
from agentr_core.recipes.models import ModelConfig, ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime.context import Demand
from agentr_core.samples.rendering import Renderer, count_trained
from agentr_core.stages.demonstrate import expert_trajectory
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import OutputCounts, output_by_kind
from agentr_core.system import data_path
from agentr_core.texts import count_text
from agentr_core.types import Instance

GIB = 1 << 30
_BYTES_BY_DTYPE = {"bfloat16": 2, "float32": 4}
_GPU_WORKSPACE_BYTES = GIB
"""Bytes for kernels, buffers and the logits of a chunk of tokens on a GPU."""
_SAMPLER_BYTES = 460 << 20
"""Bytes of Python, PyTorch, Transformers and buffers in a process that samples on a CPU."""
_TRAINER_BYTES = 620 << 20
"""The same in a process that trains, with TRL and the logits of the trained tokens."""
_NUM_EPISODES_MEASURED = 32
"""Episodes of the expert that are measured, spread evenly over the instances; rounding makes it up
to twice as many.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The size of a model; a stored weight has `weight_bytes` bytes.

    `normalized` and `inputs` are the total input widths of a layer's norms and of its linear
    modules. `cached_layers` counts the layers with full attention, whose keys and values are cached
    for every token. `config_dir` is the directory of the `config.json`.
    """

    parameters: int
    weight_bytes: int
    layers: int
    hidden_size: int
    query_size: int
    key_size: int
    intermediate_size: int
    normalized: int
    inputs: int
    cached_layers: int
    context_length: int
    config_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMemory:
    """Bytes on each GPU of a replica: for the weights, and for the keys and values of one token."""

    weights: int
    token: int

    def sequences(self, budget: float, tokens: int) -> int:
        """Return how many sequences of `tokens` tokens fit beside the weights in a budget of
        bytes.
        """
        return max(0, int((budget - self.weights) // (self.token * tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes on the GPU of each process: for `weights`, for `states` (gradients and AdamW's two
    moments) and for `activations`. `host_bytes` is the main memory, of all processes together, that
    takes what is offloaded.

    `trained` is the number of parameters that change.
    """

    trained: int
    weights: int
    states: int
    activations: int
    host_bytes: int

    @property
    def total(self) -> int:
        """Bytes on a GPU at the peak of a step."""
        return self.weights + self.states + self.activations + _GPU_WORKSPACE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The main memory, in bytes, of a process that computes on a CPU: for the weights, for other
    `parts` by name, and `fixed` for Python and its libraries.
    """

    weights: int
    parts: Mapping[str, int]
    fixed: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.weights + sum(self.parts.values()) + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    """The maximum number of replies and of tokens that a stage samples in an iteration from the
    model of a role. `likely` is the number of tokens to expect, 0 if that is not known.
    """

    stage: str
    replies: int
    tokens: int
    role: ModelRole = "actor"
    likely: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLengths:
    """The mean number of replies of an episode and of tokens of a reply in a world; `source` says
    what they were measured on.

    `longest` is the number of tokens of the longest of the expert's episodes, 0 for episodes of a
    model. `tree_counts` and `verdict_counts` are the stored counts for search trees and for
    verdicts, None if there are none.
    """

    replies: float
    tokens: float
    source: str
    longest: int = 0
    tree_counts: OutputCounts | None = None
    verdict_counts: OutputCounts | None = None


def find_shape(model_dir: Path) -> Path:
    """Return the directory whose `config.json` gives a model's size: the model's own, or that of a
    shipped shape of the same name.

    Raises `ModelDirectoryError` if there is neither.
    """
    if model_dir.is_dir() and any(model_dir.iterdir()):
        config_dir = adapter_base(model_dir) or model_dir
        if not (config_dir / "config.json").is_file():
            raise no_model_error(config_dir)
        return config_dir
    try:
        return data_path("shapes", model_dir.name)
    except DataFileError:
        raise no_model_error(model_dir) from None


def read_shape(model_dir: Path) -> ModelShape:
    """Return the shape of a model from its configuration. Raises `ModelDirectoryError` when it
    cannot be read.
    """
    import torch

    from agentr_core.training.parent import meta_model

    config_dir = find_shape(model_dir)
    model = meta_model(config_dir)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    output = model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not output]
    total_linear_width = sum(module.in_features for module in linears)
    norms_of_heads = any(name.endswith("q_norm") for name, _ in model.named_modules())
    return ModelShape(
        parameters=model.num_parameters(),
        weight_bytes=model.config.dtype.itemsize if model.config.dtype else 4,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        query_size=heads * head_size,
        key_size=key_heads * head_size,
        intermediate_size=config.intermediate_size,
        normalized=2 * config.hidden_size + norms_of_heads * (heads + key_heads) * head_size,
        inputs=total_linear_width // config.num_hidden_layers,
        cached_layers=layer_types.count("full_attention"),
        context_length=config.max_position_embeddings,
        config_dir=config_dir,
    )


def sampling_memory(shape: ModelShape, model: ModelConfig) -> SamplingMemory:
    """Return the memory that a replica of a model needs on each of its GPUs."""
    width = _BYTES_BY_DTYPE[model.dtype]
    parts = model.vllm.tensor_parallel_size if model.backend == "vllm" else 1
    return SamplingMemory(
        weights=shape.parameters * width // parts,
        token=2 * shape.cached_layers * shape.key_size * width // parts,
    )


def training_memory(shape: ModelShape, config: TrainingConfig, max_length: int) -> TrainingMemory:
    """Return the memory that supervised fine-tuning needs on the GPU of each process.

    A trained parameter takes 16 bytes: weight, gradient and AdamW's two moments in 32 bits each, or
    as many bytes in DeepSpeed's mix of 16 and 32 bits. ZeRO-2 spreads all but the weights over the
    processes, ZeRO-3 and FSDP everything; offloading moves all of it to main memory. Source: ZeRO,
    Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1.

    Args:
        max_length: tokens of the longest training row.
    """
    num_trained = shape.parameters
    if config.lora_r:
        from agentr_core.training.parent import add_adapters, meta_model

        model = add_adapters(meta_model(shape.config_dir), config)
        num_trained = sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
    num_frozen = shape.parameters - num_trained if not config.lora_r else shape.parameters
    as_stored = config.bf16 and not config.lora_modules_to_save
    frozen_bytes = 0.55 if config.load_in_4bit else shape.weight_bytes if as_stored else 4
    trained_bytes = (2 if config.launch and config.launch.deepspeed and config.bf16 else 4) * num_trained
    weights = int(num_frozen * frozen_bytes * bool(config.lora_r)) + trained_bytes
    states = 16 * num_trained - trained_bytes
    host_bytes = 0
    zero_config = config.launch.deepspeed if config.launch else ""
    fsdp = bool(config.launch and config.launch.fsdp)
    if zero_config or fsdp:
        states //= config.num_processes
    if zero_config.startswith("zero3") or fsdp:
        weights //= config.num_processes
    if zero_config.endswith("offload") or (fsdp and config.launch and config.launch.fsdp_config.get("cpu_offload")):
        host_bytes, weights, states = (weights + states) * config.num_processes, 0, 0
    # A forward pass keeps for the backward pass, with checkpointing, the inputs of all layers and
    # the intermediate values of one.
    width = 2 if config.bf16 else 4
    hidden_width = width if config.lora_r else 4
    # Norms keep their input in 32 bits and two results, attention its four inputs and outputs, the
    # gated MLP four.
    norm_bytes = (4 + 2 * width) * shape.normalized
    linear_bytes = width * (3 * shape.query_size + 3 * shape.key_size + 4 * shape.intermediate_size)
    # An adapter reads a copy in 32 bits, and dropout makes another, with a mask.
    copy_bytes = (4 * (width < 4) + 5 * bool(config.lora_dropout)) * shape.inputs if config.lora_r else 0
    layer_bytes = norm_bytes + linear_bytes + copy_bytes
    checkpointing = True if config.gradient_checkpointing is None else config.gradient_checkpointing
    bytes_per_token = (
        shape.layers * shape.hidden_size * hidden_width + layer_bytes if checkpointing else shape.layers * layer_bytes
    )
    return TrainingMemory(
        trained=num_trained,
        weights=weights,
        states=states,
        activations=config.per_device_train_batch_size * max_length * bytes_per_token,
        host_bytes=host_bytes,
    )


def group_rl_memory(shape: ModelShape, recipe: Recipe, row_tokens: int) -> TrainingMemory:
    """Return the memory that group RL needs on the GPU of each process: as `training_memory`, with
    forward passes of `row_tokens` tokens and, if `grpo.beta` is not 0, with the reference model.
    """
    config = replace(on_one_machine(recipe.training), per_device_train_batch_size=1)
    need = training_memory(shape, config, row_tokens)
    if not recipe.grpo.beta:
        return need
    # The reference has the number format in which the policy is loaded, and is split likewise.
    reference_bytes = shape.parameters * (shape.weight_bytes if config.lora_r and config.bf16 else 4)
    launch = config.launch
    if launch is None or not (launch.fsdp or launch.deepspeed.startswith("zero3")):
        return replace(need, weights=need.weights + reference_bytes)
    if launch.deepspeed and config.bf16:
        reference_bytes = 2 * shape.parameters
    if need.host_bytes:
        return replace(need, host_bytes=need.host_bytes + reference_bytes)
    return replace(need, weights=need.weights + reference_bytes // config.num_processes)


def min_group_rl_memory(shape: ModelShape, recipe: Recipe) -> int:
    """Return the least memory with which group RL can train, in bytes on the GPU of each process:
    that for passes of `grpo.micro_batch_tokens` tokens. Longer episodes need more.
    """
    return group_rl_memory(shape, recipe, recipe.grpo.micro_batch_tokens).total


def token_estimates(
    recipe: Recipe,
    demands: Mapping[str, Demand],
    num_test_episodes: int,
    num_revision_states: int,
    *,
    lengths: EpisodeLengths | None = None,
) -> list[TokenEstimate]:
    """Return the maximum number of replies and tokens that an iteration samples, one entry for each
    purpose, its evaluation last. With `lengths`, each has the likely number of tokens as well.

    Args:
        demands: the most that the method asks of models, by purpose.
        num_test_episodes: the number of held-out episodes.
        num_revision_states: the number of episodes of the revision test.
    """
    evaluation = recipe.evaluation
    max_tokens, limits = recipe.longest_reply(evaluation.max_new_tokens), evaluation.limits
    test_episodes = Demand.episodes(
        num_test_episodes, steps=evaluation.max_steps, max_new_tokens=max_tokens, limits=limits
    )
    revised_episodes = Demand.episodes(
        num_revision_states, steps=evaluation.revision_test.max_steps, max_new_tokens=max_tokens, limits=limits
    )
    evaluation_demand = replace(
        test_episodes,
        replies=test_episodes.replies + revised_episodes.replies,
        tokens=test_episodes.tokens + revised_episodes.tokens,
    )
    return [
        TokenEstimate(
            stage=purpose,
            replies=demand.replies,
            tokens=demand.tokens,
            role=demand.role,
            likely=_likely(purpose, demand, demands, recipe, lengths) if lengths and demand.replies else 0,
        )
        for purpose, demand in {**demands, "evaluate": evaluation_demand}.items()
    ]


def _likely(
    purpose: str, demand: Demand, demands: Mapping[str, Demand], recipe: Recipe, lengths: EpisodeLengths
) -> int:
    """Return how many tokens models are likely to generate for one purpose, at most
    `demand.tokens`.

    What is not stored is guessed: an episode is longer than the expert's and shorter than its
    limit, and helpers give an eighth of the replies that they may, each an eighth as long as it may
    be.
    """
    if purpose in ("search", "critique"):
        search_demand = demands["search"]
        trees = search_demand.replies // (search_demand.steps * recipe.search.dives * recipe.search.width)
        counts = lengths.tree_counts if purpose == "search" else lengths.verdict_counts
        if counts and lengths.tree_counts:
            return min(demand.tokens, round(trees * counts.tokens / lengths.tree_counts.units))
    if demand.role != "actor":
        return demand.tokens // 64
    replies = demand.replies / demand.steps * min(lengths.replies, demand.steps)
    if lengths.longest:
        # The geometric mean of the expert's length, with weight 3/4, and the limit, with 1/4.
        replies = demand.replies / demand.steps * min(lengths.replies, demand.steps) ** 0.75 * demand.steps**0.25
    return min(demand.tokens, round(replies * min(lengths.tokens, demand.tokens / demand.replies)))


def stored_lengths(store: Store, recipe: Recipe, environment: str) -> EpisodeLengths | None:
    """Return the lengths of what the recipe's model generated in a world, over all runs of the
    workspace that began with this model; None if no episode is stored.
    """
    kinds = output_by_kind(store, recipe.model.path, environment) if store.path.exists() else {}
    if not (counts := kinds.get("step")):
        return None
    return EpisodeLengths(
        replies=counts.replies / counts.units,
        tokens=counts.tokens / counts.replies,
        source=f"{count_text(counts.units, 'stored episode')} of this model",
        tree_counts=kinds.get("node"),
        verdict_counts=kinds.get("judgement"),
    )


def expert_lengths(env: Environment, instances: Sequence[Instance], renderer: Renderer) -> EpisodeLengths | None:
    """Return the lengths of the expert's episodes of some of the instances, in tokens of the
    renderer's model; None if the expert solves none of them.
    """
    num_steps, num_tokens, row_lengths = 0, 0, []
    for instance in instances[:: -(-len(instances) // _NUM_EPISODES_MEASURED) or 1]:
        try:
            trajectory = expert_trajectory(env, instance)
        except EnvironmentFault:
            # The stage that needs the expert's episodes reports it.
            continue
        if trajectory is not None:
            num_steps += len(trajectory.steps)
            row = renderer.render_sample(whole_episode(env, trajectory))
            row_lengths.append(len(row.input_ids))
            num_tokens += count_trained(row.labels)
    if not row_lengths:
        return None
    return EpisodeLengths(
        replies=num_steps / len(row_lengths),
        tokens=num_tokens / num_steps,
        source=f"{count_text(len(row_lengths), 'episode')} of the expert",
        longest=max(row_lengths),
    )


def sampling_process_memory(shape: ModelShape, model: ModelConfig, workers: int, tokens: int) -> ProcessMemory:
    """Return the main memory of each of `workers` processes that sample on a CPU, where the longest
    conversation has `token_estimates` tokens.
    """
    need = sampling_memory(shape, model)
    num_rows = -(-model.max_batch // workers)
    cache_bytes = int(model.prefix_cache_gib * GIB) // workers
    return ProcessMemory(
        weights=need.weights,
        parts={
            f"{num_rows} x {tokens:,} tokens": num_rows * tokens * need.token,
            f"cached prompts of {cache_bytes // need.token:,} tokens": cache_bytes,
            # Linear layers hold a second copy in the layout that oneDNN reads.
            "weights laid out": need.weights if model.dtype == "bfloat16" else 0,
        },
        fixed=_SAMPLER_BYTES,
    )


def training_process_memory(shape: ModelShape, config: TrainingConfig, longest: int) -> ProcessMemory:
    """Return the main memory of the first process of a trainer on a CPU, where the longest row has
    `longest` tokens and each forward pass has one row. The other processes need less, since they
    save nothing.
    """
    # Slow to import.
    from agentr_core.training.packing import ROW_LENGTH, padded_length

    row = max(ROW_LENGTH, padded_length(longest))
    local = replace(
        config,
        per_device_train_batch_size=1,
        gradient_checkpointing=bool(config.gradient_checkpointing),
        load_in_4bit=False,
    )
    need = training_memory(shape, local, row)
    bucket_bytes = 4 * need.trained if config.num_processes > 1 else 0
    return ProcessMemory(
        weights=need.weights,
        parts={
            "gradients and optimizer": need.states + bucket_bytes,
            f"1 x {row:,} tokens": need.activations,
            "saving": 12 * need.trained,
        },
        fixed=_TRAINER_BYTES,
    )
