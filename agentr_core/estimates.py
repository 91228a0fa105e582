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
from agentr_core.models.checkpoint_dir import adapter_base, no_model
from agentr_core.recipes.grpo import on_one_machine
from agentr_core.recipes.models import ModelConfig, ModelRole
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime.place import Demand
from agentr_core.samples.rendering import Renderer, trained_tokens
from agentr_core.stages.demonstrate import expert_trajectory
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import OutputCounts, written_in
from agentr_core.system import data_path
from agentr_core.texts import counted
from agentr_core.types import Instance

GIB = 1 << 30
_NUMBER_BYTES = {"bfloat16": 2, "float32": 4}
_WORKSPACE = GIB
"""Bytes for kernels, buffers and the logits of a chunk of tokens on a GPU."""
_SAMPLER = 460 << 20
"""Bytes of Python, PyTorch, Transformers and buffers in a process that samples on a CPU."""
_TRAINER = 620 << 20
"""The same in a process that trains, with TRL and the logits of the trained tokens."""
_LOOKED_AT = 32
"""Episodes of the expert that are measured, spread evenly over the instances; rounding makes it up
to twice as many.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a model; a stored weight has `stored` bytes.

    `normalized` and `inputs` are the total input widths of a layer's norms and of its linear
    modules. `cached_layers` counts the layers with full attention, whose keys and values are cached
    for every token. `where` is the directory of the `config.json`.
    """

    parameters: int
    stored: int
    layers: int
    hidden_size: int
    query_size: int
    key_size: int
    intermediate_size: int
    normalized: int
    inputs: int
    cached_layers: int
    context_length: int
    where: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Bytes on each GPU of a replica: for the weights, and for the keys and values of one token."""

    weights: int
    token: int

    def sequences(self, budget: float, tokens: int) -> int:
        """Return how many sequences of `tokens` tokens fit beside the weights in a budget of
        bytes.
        """
        return max(0, int((budget - self.weights) // (self.token * tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Bytes on the GPU of each process: for `weights`, for `states` (gradients and AdamW's two
    moments) and for `activations`. `host` is the main memory, of all processes together, that takes
    what is offloaded.

    `trained` is the number of parameters that change.
    """

    trained: int
    weights: int
    states: int
    activations: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on a GPU at the peak of a step."""
        return self.weights + self.states + self.activations + _WORKSPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
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
class Tokens:
    """The maximum number of replies and of tokens that a stage samples in an iteration from the
    model of a role. `likely` is the number of tokens to expect, 0 if that is not known.
    """

    stage: str
    replies: int
    tokens: int
    role: ModelRole = "actor"
    likely: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The mean number of replies of an episode and of tokens of a reply in a world; `source` says
    what they were measured on.

    `longest` is the number of tokens of the longest of the expert's episodes, 0 for episodes of a
    model. `of_trees` and `of_verdicts` are the stored counts for search trees and for verdicts,
    None if there are none.
    """

    replies: float
    tokens: float
    source: str
    longest: int = 0
    of_trees: OutputCounts | None = None
    of_verdicts: OutputCounts | None = None


def find_shape(model_dir: Path) -> Path:
    """Return the directory whose `config.json` gives a model's size: the model's own, or that of a
    shipped shape of the same name.

    Raises `ModelDirectoryError` if there is neither.
    """
    if model_dir.is_dir() and any(model_dir.iterdir()):
        where = adapter_base(model_dir) or model_dir
        if not (where / "config.json").is_file():
            raise no_model(where)
        return where
    try:
        return data_path("shapes", model_dir.name)
    except DataFileError:
        raise no_model(model_dir) from None


def read_shape(model_dir: Path) -> Shape:
    """Return the shape of a model from its configuration. Raises `ModelDirectoryError` when it
    cannot be read.
    """
    import torch

    from agentr_core.training.parent import skeleton

    where = find_shape(model_dir)
    model = skeleton(where)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    output = model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not output]
    linear = sum(module.in_features for module in linears)
    norms_of_heads = any(name.endswith("q_norm") for name, _ in model.named_modules())
    return Shape(
        parameters=model.num_parameters(),
        stored=model.config.dtype.itemsize if model.config.dtype else 4,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        query_size=heads * head,
        key_size=key_heads * head,
        intermediate_size=config.intermediate_size,
        normalized=2 * config.hidden_size + norms_of_heads * (heads + key_heads) * head,
        inputs=linear // config.num_hidden_layers,
        cached_layers=kinds.count("full_attention"),
        context_length=config.max_position_embeddings,
        where=where,
    )


def sampling(shape: Shape, model: ModelConfig) -> Sampling:
    """Return the memory that a replica of a model needs on each of its GPUs."""
    width = _NUMBER_BYTES[model.dtype]
    parts = model.vllm.tensor_parallel_size if model.backend == "vllm" else 1
    return Sampling(
        weights=shape.parameters * width // parts,
        token=2 * shape.cached_layers * shape.key_size * width // parts,
    )


def training(shape: Shape, config: TrainingConfig, max_length: int) -> Training:
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
        from agentr_core.training.parent import adapted, skeleton

        model = adapted(skeleton(shape.where), config)
        num_trained = sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
    num_frozen = shape.parameters - num_trained if not config.lora_r else shape.parameters
    as_stored = config.bf16 and not config.lora_modules_to_save
    frozen_bytes = 0.55 if config.load_in_4bit else shape.stored if as_stored else 4
    trained_bytes = (2 if config.launch and config.launch.deepspeed and config.bf16 else 4) * num_trained
    weights = int(num_frozen * frozen_bytes * bool(config.lora_r)) + trained_bytes
    states = 16 * num_trained - trained_bytes
    host = 0
    zero = config.launch.deepspeed if config.launch else ""
    fsdp = bool(config.launch and config.launch.fsdp)
    if zero or fsdp:
        states //= config.num_processes
    if zero.startswith("zero3") or fsdp:
        weights //= config.num_processes
    if zero.endswith("offload") or (fsdp and config.launch and config.launch.fsdp_config.get("cpu_offload")):
        host, weights, states = (weights + states) * config.num_processes, 0, 0
    # A forward pass keeps for the backward pass, with checkpointing, the inputs of all layers and
    # the intermediate values of one.
    width = 2 if config.bf16 else 4
    stream = width if config.lora_r else 4
    # Norms keep their input in 32 bits and two results, attention its four inputs and outputs, the
    # gated MLP four.
    norms = (4 + 2 * width) * shape.normalized
    inside = width * (3 * shape.query_size + 3 * shape.key_size + 4 * shape.intermediate_size)
    # An adapter reads a copy in 32 bits, and dropout makes another, with a mask.
    copies = (4 * (width < 4) + 5 * bool(config.lora_dropout)) * shape.inputs if config.lora_r else 0
    layer = norms + inside + copies
    checkpointing = True if config.gradient_checkpointing is None else config.gradient_checkpointing
    a_token = shape.layers * shape.hidden_size * stream + layer if checkpointing else shape.layers * layer
    return Training(
        trained=num_trained,
        weights=weights,
        states=states,
        activations=config.per_device_train_batch_size * max_length * a_token,
        host=host,
    )


def group_training(shape: Shape, recipe: Recipe, row: int) -> Training:
    """Return the memory that group RL needs on the GPU of each process: as `training`, with forward
    passes of `row` tokens and, if `grpo.beta` is not 0, with the reference model.
    """
    config = replace(on_one_machine(recipe.training), per_device_train_batch_size=1)
    need = training(shape, config, row)
    if not recipe.grpo.beta:
        return need
    # The reference has the number format in which the policy is loaded, and is split likewise.
    reference = shape.parameters * (shape.stored if config.lora_r and config.bf16 else 4)
    launch = config.launch
    if launch is None or not (launch.fsdp or launch.deepspeed.startswith("zero3")):
        return replace(need, weights=need.weights + reference)
    if launch.deepspeed and config.bf16:
        reference = 2 * shape.parameters
    if need.host:
        return replace(need, host=need.host + reference)
    return replace(need, weights=need.weights + reference // config.num_processes)


def reinforcing(shape: Shape, recipe: Recipe) -> int:
    """Return the least memory with which group RL can train, in bytes on the GPU of each process:
    that for passes of `grpo.micro_batch_tokens` tokens. Longer episodes need more.
    """
    return group_training(shape, recipe, recipe.grpo.micro_batch_tokens).total


def tokens(
    recipe: Recipe, demands: Mapping[str, Demand], test: int, states: int, *, lengths: Lengths | None = None
) -> list[Tokens]:
    """Return the maximum number of replies and tokens that an iteration samples, one entry for each
    purpose, its evaluation last. With `lengths`, each has the likely number of tokens as well.

    Args:
        demands: the most that the method asks of models, by purpose.
        test: the number of held-out episodes.
        states: the number of episodes of the revision test.
    """
    evaluation = recipe.evaluation
    max_tokens, limits = recipe.longest_reply(evaluation.max_new_tokens), evaluation.limits
    test_episodes = Demand.episodes(test, steps=evaluation.max_steps, most=max_tokens, limits=limits)
    revised_episodes = Demand.episodes(states, steps=evaluation.revision_test.max_steps, most=max_tokens, limits=limits)
    evaluation_demand = replace(
        test_episodes,
        replies=test_episodes.replies + revised_episodes.replies,
        tokens=test_episodes.tokens + revised_episodes.tokens,
    )
    return [
        Tokens(
            stage=purpose,
            replies=demand.replies,
            tokens=demand.tokens,
            role=demand.role,
            likely=_likely(purpose, demand, demands, recipe, lengths) if lengths and demand.replies else 0,
        )
        for purpose, demand in {**demands, "evaluate": evaluation_demand}.items()
    ]


def _likely(purpose: str, demand: Demand, demands: Mapping[str, Demand], recipe: Recipe, lengths: Lengths) -> int:
    """Return how many tokens models are likely to generate for one purpose, at most
    `demand.tokens`.

    What is not stored is guessed: an episode is longer than the expert's and shorter than its
    limit, and helpers give an eighth of the replies that they may, each an eighth as long as it may
    be.
    """
    if purpose in ("search", "critique"):
        search_demand = demands["search"]
        trees = search_demand.replies // (search_demand.steps * recipe.search.dives * recipe.search.width)
        counts = lengths.of_trees if purpose == "search" else lengths.of_verdicts
        if counts and lengths.of_trees:
            return min(demand.tokens, round(trees * counts.tokens / lengths.of_trees.units))
    if demand.role != "actor":
        return demand.tokens // 64
    replies = demand.replies / demand.steps * min(lengths.replies, demand.steps)
    if lengths.longest:
        # The geometric mean of the expert's length, with weight 3/4, and the limit, with 1/4.
        replies = demand.replies / demand.steps * min(lengths.replies, demand.steps) ** 0.75 * demand.steps**0.25
    return min(demand.tokens, round(replies * min(lengths.tokens, demand.tokens / demand.replies)))


def stored_lengths(store: Store, recipe: Recipe, environment: str) -> Lengths | None:
    """Return the lengths of what the recipe's model generated in a world, over all runs of the
    workspace that began with this model; None if no episode is stored.
    """
    kinds = written_in(store, recipe.model.path, environment) if store.path.exists() else {}
    if not (counts := kinds.get("step")):
        return None
    return Lengths(
        replies=counts.replies / counts.units,
        tokens=counts.tokens / counts.replies,
        source=f"{counted(counts.units, 'stored episode')} of this model",
        of_trees=kinds.get("node"),
        of_verdicts=kinds.get("judgement"),
    )


def expert_lengths(env: Environment, instances: Sequence[Instance], renderer: Renderer) -> Lengths | None:
    """Return the lengths of the expert's episodes of some of the instances, in tokens of the
    renderer's model; None if the expert solves none of them.
    """
    steps, num_tokens, rows = 0, 0, []
    for instance in instances[:: -(-len(instances) // _LOOKED_AT) or 1]:
        try:
            trajectory = expert_trajectory(env, instance)
        except EnvironmentFault:
            # The stage that needs the expert's episodes reports it.
            continue
        if trajectory is not None:
            steps += len(trajectory.steps)
            row = renderer.render_sample(whole_episode(env, trajectory))
            rows.append(len(row.input_ids))
            num_tokens += trained_tokens(row.labels)
    if not rows:
        return None
    return Lengths(
        replies=steps / len(rows),
        tokens=num_tokens / steps,
        source=f"{counted(len(rows), 'episode')} of the expert",
        longest=max(rows),
    )


def process_sampling(shape: Shape, model: ModelConfig, workers: int, tokens: int) -> Process:
    """Return the main memory of each of `workers` processes that sample on a CPU, where the longest
    conversation has `tokens` tokens.
    """
    need = sampling(shape, model)
    rows = -(-model.max_batch // workers)
    cache = int(model.prefix_cache_gib * GIB) // workers
    return Process(
        weights=need.weights,
        parts={
            f"{rows} x {tokens:,} tokens": rows * tokens * need.token,
            f"cached prompts of {cache // need.token:,} tokens": cache,
            # Linear layers hold a second copy in the layout that oneDNN reads.
            "weights laid out": need.weights if model.dtype == "bfloat16" else 0,
        },
        fixed=_SAMPLER,
    )


def process_training(shape: Shape, config: TrainingConfig, longest: int) -> Process:
    """Return the main memory of the first process of a trainer on a CPU, where the longest row has
    `longest` tokens and each forward pass has one row. The other processes need less, since they
    save nothing.
    """
    # Slow to import.
    from agentr_core.training.packing import ROW, padded_length

    row = max(ROW, padded_length(longest))
    local = replace(
        config,
        per_device_train_batch_size=1,
        gradient_checkpointing=bool(config.gradient_checkpointing),
        load_in_4bit=False,
    )
    need = training(shape, local, row)
    bucket_bytes = 4 * need.trained if config.num_processes > 1 else 0
    return Process(
        weights=need.weights,
        parts={
            "gradients and optimizer": need.states + bucket_bytes,
            f"1 x {row:,} tokens": need.activations,
            "saving": 12 * need.trained,
        },
        fixed=_TRAINER,
    )
