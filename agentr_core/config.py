"""Recipes: one YAML file, parsed once into frozen records; every fault is reported, all together.

Defaults are the numbers of the Agent-R paper (arXiv 2501.11425, sections 4 and A) unless a field says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from agentr_core.errors import ConfigError

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
_record = dataclass(frozen=True, kw_only=True, config=_STRICT)

Unit = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0, le=5)]


@_record
class EnvironmentConfig:
    """Which environment, and its own options (checked by the environment)."""

    name: str = "textcraft"
    options: dict[str, Any] = field(default_factory=dict)


@_record
class ModelConfig:
    """Which model acts, and how it is run."""

    backend: Literal["transformers"] = "transformers"
    path: str = ""
    """A Hugging Face model directory, relative to the working directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    max_batch: Count = 128
    """The most sequences decoded at once."""
    context_length: Natural = 0
    """0 means: what the model's own configuration says."""


@_record
class InstancesConfig:
    """Which instances are collected from and which are held out."""

    train: str = "train"
    train_limit: Natural = 200
    """How many training instances an iteration collects from; 0 means all. Drawn anew each iteration from the seed."""
    test: str = "test"
    test_limit: Natural = 0
    """How many test instances are evaluated; 0 means all."""


@_record
class SearchConfig:
    """The tree search. Source: Agent-R section 3.1 and its appendix."""

    method: Literal["mcts", "rollouts"] = "mcts"
    """`rollouts` collects the same number of independent episodes instead: `dives * width` for each instance."""
    dives: Count = 8
    width: Count = 4
    depth: Count = 20
    exploration: Annotated[float, Field(ge=0)] = 0.25
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Count = 500
    merge: Literal["reply", "action"] = "reply"
    """Which siblings count as equal: those with the same reply (as published) or with the same parsed action."""


@_record
class CritiqueConfig:
    """The first-error critique by the acting model. Source: Agent-R section 3.2."""

    temperature: Temperature = 0.0
    votes: Count = 1
    """Judgements drawn for each step; the majority counts, ties are uncertain."""
    scan_from: Literal["split", "root"] = "split"
    max_new_tokens: Count = 500
    unparsable: Literal["bad", "skip"] = "skip"
    """What a judgement that cannot be parsed means for the scan: an error (as published) or nothing."""


@_record
class PairsConfig:
    """Which pairs of paths become revision samples. Source: Agent-R section 3.2, equations 3 to 5."""

    alpha: tuple[Unit, ...] = (0.5, 0.7, 1.0)
    """Least reward of a good path, by iteration; the last one counts for all later iterations."""
    beta: Unit = 0.2
    beta_rule: Literal["gap", "absolute"] = "gap"
    """`gap`: good reward - bad reward > beta. `absolute`: bad reward < beta < good reward."""
    per_tree: Natural = 0
    """The most pairs kept from one tree; 0 means no cap (as published)."""
    per_bad_leaf: Natural = 0
    """The most pairs kept for one bad path; 0 means no cap (as published)."""


@_record
class SpliceConfig:
    """How a bad prefix and a good suffix become one conversation."""

    mode: Literal["verified", "blind", "direct"] = "blind"
    """`blind`: as published. `direct`: the whole bad path is kept, no judge. `verified`: the splice is played
    in the environment and kept only if its live reward still clears alpha; observations are the live ones."""
    no_error: Literal["keep", "reject"] = "keep"
    """What to do when the judge finds no bad step: keep the whole bad path (as published) or reject the pair."""


@_record
class GeneralDataConfig:
    """General chat data mixed in. `share` is the part of training samples that is general (0.8 in the paper)."""

    file: str = ""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0


@_record
class DataConfig:
    """What the training set of an iteration is made of."""

    use: Literal["revision", "good", "both", "expert"] = "both"
    """`expert` is behaviour cloning: the environment's expert on the training instances, nothing is searched."""
    good_per_tree: Natural = 0
    """The most good trajectories taken from one tree, shortest first; 0 means no cap (as published)."""
    replay: bool = False
    """Whether the samples of earlier iterations are trained on again."""
    max_length: Natural = 8192
    """Samples with more tokens are rejected; never cut."""
    general: GeneralDataConfig = GeneralDataConfig()


@_record
class TrainingConfig:
    """Supervised fine-tuning; names are Hugging Face's. Source: Agent-R appendix (AdamW, cosine, 3% warm-up)."""

    start_from: Literal["previous", "base"] = "previous"
    num_train_epochs: tuple[Positive, ...] = (3.0, 1.0, 1.0)
    """By iteration; the last one counts for all later iterations."""
    max_tokens: Natural = 0
    """Stop after this many trained (unmasked) tokens in an iteration, or train on until they are reached; 0 means
    `num_train_epochs` decides. Set it to compare methods at an equal budget."""
    learning_rate: Positive = 2e-5
    lr_scheduler_type: str = "cosine"
    warmup_ratio: Unit = 0.03
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Positive = 1.0
    per_device_train_batch_size: Count = 16
    gradient_accumulation_steps: Count = 1
    packing: bool = True
    bf16: bool = True
    lora_r: Natural = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: Positive = 16.0
    num_threads: Natural = 0
    """CPU threads of the trainer; 0 leaves it to torch."""


@_record
class RevisionTestConfig:
    """Recovery from failed prefixes of the base model. Source: Agent-R table 3."""

    enabled: bool = True
    cuts: Count = 1
    """Random cuts for each failed episode of the base model."""
    limit: Natural = 0
    """The most cuts that are played, spread evenly over all; 0 means all."""
    max_steps: Count = 50


@_record
class EvaluationConfig:
    """Held-out evaluation, greedy unless said otherwise."""

    max_steps: Count = 100
    temperature: Temperature = 0.0
    episodes: Count = 1
    """Episodes for each instance; more than one only makes sense at a temperature above 0."""
    max_new_tokens: Count = 500
    revision_test: RevisionTestConfig = RevisionTestConfig()


@_record
class BaseConfig:
    """How a tiny base model is made from expert episodes and oracle-judged steps (recipe `method: base`)."""

    hidden_size: Count = 256
    num_hidden_layers: Count = 4
    head_dim: Count = 64
    intermediate_size: Count = 704
    max_position_embeddings: Count = 2048
    tokens: Count = 20_000_000
    """Tokens seen in training, all of them counted, padding not."""
    batch_tokens: Count = 16_384
    learning_rate: Positive = 1e-3
    warmup_steps: Natural = 100
    judge_share: Unit = 0.2
    """Part of the samples that are judge examples."""
    procedural_share: Unit = 0.5
    """Part of the samples that come from procedural worlds; the others come from the training instances."""
    rename_share: Unit = 0.65
    """Part of the samples of training instances whose items are renamed; those of procedural worlds always are."""
    output: str = ""
    """Where the finished model directory goes."""
    num_threads: Natural = 0


@_record
class ErrorsConfig:
    """How many episode errors a stage may meet before it stops."""

    budget: Unit = 0.02
    """Part of the stage's episodes."""
    retries: Natural = 2
    """Further tries of an episode after a transient error."""


@_record
class Recipe:
    """One runnable configuration."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    method: Literal["agent-r", "base"] = "agent-r"
    description: str = ""
    workspace: str = "runs"
    """Folder of the store, checkpoints and reports."""
    seed: Natural = 0
    iterations: Count = 3
    environment: EnvironmentConfig = EnvironmentConfig()
    model: ModelConfig = ModelConfig()
    instances: InstancesConfig = InstancesConfig()
    search: SearchConfig = SearchConfig()
    critique: CritiqueConfig = CritiqueConfig()
    pairs: PairsConfig = PairsConfig()
    splice: SpliceConfig = SpliceConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    base: BaseConfig = BaseConfig()
    errors: ErrorsConfig = ErrorsConfig()

    def alpha(self, iteration: int) -> float:
        """Return the least reward of a good path in an iteration, counted from 1."""
        return self.pairs.alpha[min(iteration, len(self.pairs.alpha)) - 1]

    def num_train_epochs(self, iteration: int) -> float:
        """Return the epochs trained in an iteration, counted from 1."""
        return self.training.num_train_epochs[min(iteration, len(self.training.num_train_epochs)) - 1]


_ADAPTER = TypeAdapter(Recipe)


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a YAML file with `a.b=value` overrides applied.

    Raises:
        ConfigError: the file is missing or not YAML, or fields are unknown, ill-typed or out of range; the message
            lists every fault.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"recipe {path} does not exist; `ls deployments/recipes` shows those that come along"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {path} must be a mapping of fields, not {type(data).__name__}")
    return parse(data, overrides, source=str(path))


def parse(data: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """Return the recipe of a mapping with overrides applied. Raises `ConfigError` listing every fault."""
    merged = _plain_copy(data)
    for override in overrides:
        _apply(merged, override)
    try:
        recipe = _ADAPTER.validate_python(merged)
    except ValidationError as error:
        faults = [f"{'.'.join(str(part) for part in e['loc'])}: {_say(e)}" for e in error.errors()]
        raise ConfigError(f"{source}: {'; '.join(faults)}") from None
    faults = _cross_check(recipe)
    if faults:
        raise ConfigError(f"{source}: {'; '.join(faults)}")
    return recipe


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data with every default filled in; `parse` of it gives the same recipe."""
    return dict(_ADAPTER.dump_python(recipe, mode="json"))


def _cross_check(recipe: Recipe) -> list[str]:
    faults = []
    if recipe.method == "agent-r" and not recipe.model.path:
        faults.append("model.path: name the directory of the model that acts")
    if recipe.method == "base" and not recipe.base.output:
        faults.append("base.output: name the directory in which the finished model goes")
    if not recipe.pairs.alpha:
        faults.append("pairs.alpha: give at least one threshold")
    if not recipe.training.num_train_epochs:
        faults.append("training.num_train_epochs: give at least one number")
    if recipe.data.general.share > 0 and not recipe.data.general.file:
        faults.append("data.general.file: a share above 0 needs a file of chat data")
    if recipe.instances.train == recipe.instances.test:
        faults.append(f"instances: train and test are the same split ({recipe.instances.train!r})")
    if recipe.evaluation.episodes > 1 and recipe.evaluation.temperature == 0:
        faults.append("evaluation.episodes: more than one episode at temperature 0 would repeat the same one")
    return faults


def _say(error: Any) -> str:
    if error["type"] == "unexpected_keyword_argument":
        return "unknown field"
    return f"{error['msg'][0].lower()}{error['msg'][1:]} (got {error['input']!r})"


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} must look like section.field=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not YAML") from None
    *parents, last = key.split(".")
    target = data
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    target[last] = value


def _plain_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_copy(item) for key, item in value.items()}
    return value


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a copy of a recipe with top-level fields changed, unchecked: for programs, not for user input."""
    return dataclasses.replace(recipe, **changes)  # type: ignore[type-var]
