"""Recipes: one YAML file, parsed once into frozen records; every fault is reported, all together.

Defaults are the numbers of the Agent-R paper (arXiv 2501.11425, sections 4 and A) unless a field says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from agentr_core.config_compare import CompareConfig, Use
from agentr_core.config_eto import (
    DpoConfig,
    EtoConfig,
    ExpertConfig,
    ExploreConfig,
    Phase,
    PreferencesConfig,
)
from agentr_core.config_evaluation import (
    EvaluationConfig,
    EvaluationSetConfig,
    RevisionTestConfig,
    evaluation_faults,
)
from agentr_core.config_execution import ErrorsConfig, ScaleConfig
from agentr_core.config_fields import Count, CutReplies, Natural, Temperature, Unit, record
from agentr_core.config_instances import RANGE, InstancesConfig, instances_faults
from agentr_core.config_models import (
    ModelConfig,
    ModelRole,
    ModelsConfig,
    PricesConfig,
    ServerConfig,
    VllmConfig,
    model_faults,
    secret_faults,
    url_fault,
)
from agentr_core.config_splicing import ContinuationConfig, SpliceConfig, splice_faults
from agentr_core.config_text import faults_of_kind, read_yaml
from agentr_core.config_training import (
    VLLM_LORA_RANKS,
    BaseConfig,
    LaunchConfig,
    TrainingConfig,
    training_faults,
    vllm_adapter_faults,
)
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import absent, later
from agentr_core.secret_values import masked
from agentr_core.thresholds import AlphaRule

__all__ = [
    "VLLM_LORA_RANKS",
    "BaseConfig",
    "CompareConfig",
    "ContinuationConfig",
    "CritiqueConfig",
    "DataConfig",
    "DpoConfig",
    "EnvironmentConfig",
    "ErrorsConfig",
    "EtoConfig",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "ExpertConfig",
    "ExploreConfig",
    "GeneralDataConfig",
    "InstancesConfig",
    "LaunchConfig",
    "ModelConfig",
    "ModelRole",
    "ModelsConfig",
    "PairsConfig",
    "Phase",
    "PreferencesConfig",
    "PricesConfig",
    "Recipe",
    "RevisionTestConfig",
    "ScaleConfig",
    "SearchConfig",
    "ServerConfig",
    "SpliceConfig",
    "TrainingConfig",
    "VllmConfig",
    "identifying",
    "load",
    "parse",
    "replace",
    "resolved",
    "url_fault",
]


@record
class EnvironmentConfig:
    """Which environment, and its own options (checked by the environment)."""

    name: str = "textcraft"
    options: dict[str, Any] = field(default_factory=dict)


@record
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


@record
class CritiqueConfig:
    """The first-error critique by the judge (`models.judge`, else the acting model). Source: Agent-R section 3.2."""

    temperature: Temperature = 0.0
    votes: Count = 1
    """Judgements drawn for each step; the majority counts, ties are uncertain."""
    scan_from: Literal["split", "root"] = "split"
    max_new_tokens: Count = 500
    unparsable: Literal["bad", "skip"] = "skip"
    """What a judgement that cannot be parsed means for the scan: an error (as published) or nothing."""


@record
class PairsConfig:
    """Which pairs of paths become revision samples. Source: Agent-R section 3.2, equations 3 to 5."""

    alpha: tuple[Unit, ...] = (0.5, 0.7, 1.0)
    """Least reward of a good path, by iteration; the last one counts for all later iterations."""
    alpha_rule: AlphaRule = later("at_least")
    """`more_than` (as published): the reward lies above alpha, or is the whole reward, which clears an alpha of 1."""
    beta: Unit = 0.2
    beta_rule: Literal["gap", "absolute"] = "gap"
    """`gap`: good reward - bad reward > beta. `absolute`: bad reward < beta < good reward."""
    per_tree: Natural = 0
    """The most pairs kept from one tree; 0 means no cap (as published)."""
    per_bad_leaf: Natural = 0
    """The most pairs kept for one bad path; 0 means no cap (as published)."""
    order: Literal["turns", "shuffled"] = later("turns")
    """Which pairs of a tree come first, and so stay under a cap. `turns`: bad paths take turns, each with the shortest
    good path that it has not had. `shuffled` (as published): by falling reward of the good path, then of the bad one,
    and shuffled by Python's `random` with seed 123, in every tree anew."""


@record
class GeneralDataConfig:
    """General chat data mixed in. `share` is the part of training samples that is general (0.8 in the paper)."""

    file: str = ""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0


@record
class DataConfig:
    """What the training set of an iteration is made of."""

    use: Use = "both"
    """`expert` is behaviour cloning: the environment's expert on the training instances, nothing is searched."""
    good_per_tree: Natural = 0
    """The most good trajectories taken from one tree (in a comparison also from one explored instance), shortest first;
    0 means no cap (as published)."""
    replay: bool = False
    """Whether the samples of earlier iterations are trained on again."""
    max_length: Natural = 8192
    """Samples with more tokens are rejected; never cut."""
    windowed: Literal["stretches", "reject"] = later("stretches")
    """What becomes of a path that was read through a window (`context: window`): a sample for each stretch between two
    drops, whose prompt is what was read; or nothing, with the reason `windowed`. Sides of preference pairs have one
    prompt, and are always rejected."""
    cut_replies: CutReplies = later("keep")
    """What becomes of samples and pairs that train a reply which its token limit cut: kept, without a trained end of
    turn, or rejected. A limit that cuts many is too low: the report has their share."""
    general: GeneralDataConfig = GeneralDataConfig()


@record
class Recipe:
    """One runnable configuration."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    method: str = "agent-r"
    """One that comes along (agent-r, eto, compare, base) or that another package adds."""
    description: str = ""
    workspace: str = "runs"
    """Folder of the store, checkpoints and reports."""
    seed: Natural = 0
    iterations: Count = 3
    environment: EnvironmentConfig = EnvironmentConfig()
    model: ModelConfig = ModelConfig()
    """The actor: the model that is improved."""
    models: ModelsConfig = ModelsConfig()
    instances: InstancesConfig = InstancesConfig()
    context: Literal["stop", "window"] = later("stop")
    """What becomes of an episode or a path whose history outgrows the model's context: it ends there; or its oldest
    exchanges are left out of what is read (as published), of which instruction, first observation and first reply stay.
    """
    search: SearchConfig = SearchConfig()
    critique: CritiqueConfig = CritiqueConfig()
    pairs: PairsConfig = PairsConfig()
    splice: SpliceConfig = SpliceConfig()
    eto: EtoConfig = EtoConfig()
    compare: CompareConfig = CompareConfig()
    options: dict[str, Any] = later(default_factory=dict)
    """Settings of a method that another package adds, which checks them; those that come along have sections."""
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    base: BaseConfig = BaseConfig()
    errors: ErrorsConfig = ErrorsConfig()
    scale: ScaleConfig = ScaleConfig()

    def model_of(self, role: ModelRole) -> ModelConfig:
        """Return the model that has a role: its own, or else the actor's."""
        return self.own_models().get(role, self.model)

    def own_models(self) -> dict[ModelRole, ModelConfig]:
        """Return the models named in the recipe, by role; roles that are the actor's are left out."""
        named: dict[ModelRole, ModelConfig | None] = {
            "actor": self.model,
            "judge": self.models.judge,
            "editor": self.models.editor,
            "summariser": self.models.summariser,
        }
        return {role: model for role, model in named.items() if model is not None}

    def told_apart(self) -> range:
        """Return the iterations, counted from 1, after which nothing new comes: all later ones are as the last."""
        by_iteration = (self.pairs.alpha, self.training.num_train_epochs, self.eto.phases)
        return range(1, min(self.iterations, max(map(len, by_iteration))) + 1)

    def alpha(self, iteration: int) -> float:
        """Return the least reward of a good path in an iteration, counted from 1."""
        return self.pairs.alpha[min(iteration, len(self.pairs.alpha)) - 1]

    def num_train_epochs(self, iteration: int) -> float:
        """Return the epochs trained in an iteration, counted from 1."""
        return self.training.num_train_epochs[min(iteration, len(self.training.num_train_epochs)) - 1]


_ADAPTER = TypeAdapter(Recipe)
OPTIONAL = ("search", "critique", "pairs", "splice", "eto", "compare", "iterations", "options")
"""The sections of a recipe that not every method reads."""


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a YAML file with `a.b=value` overrides applied.

    Raises:
        ConfigError: the file is missing or not YAML, or fields are unknown, ill-typed or out of range; the message
            lists every fault.
    """
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"recipe {path} does not exist; `ls deployments/recipes` shows those that come along"
        ) from None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {path} must be a mapping of fields, not {type(data).__name__}")
    return parse(data, overrides, source=str(path))


def parse(
    data: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe", stored: bool = False
) -> Recipe:
    """Return the recipe of a mapping with overrides applied. Raises `ConfigError` listing every fault.

    A `stored` recipe may be of a version that let secrets be written out; they are not refused any more then.
    """
    merged = _plain_copy(data)
    for override in overrides:
        _apply(merged, override)
    try:
        recipe = _ADAPTER.validate_python(merged)
    except ValidationError as error:
        faults = [f"{'.'.join(str(part) for part in e['loc'])}: {_say(e)}" for e in error.errors()]
        raise ConfigError(f"{source}: {'; '.join(faults)}") from None
    faults = [
        *faults_of_kind(merged, resolved(recipe)),
        *_cross_check(recipe),
        *([] if stored else _secrets_in(recipe)),
    ]
    if faults:
        raise ConfigError(f"{source}: {'; '.join(faults)}")
    return recipe


def shown(recipe: Recipe) -> dict[str, Any]:
    """Return what `resolved` returns for the eyes of people: what looks like a secret is masked."""
    plain = resolved(recipe)
    for model in (plain["model"], *filter(None, plain["models"].values())):
        model["server"]["extra_body"] = masked(model["server"]["extra_body"])
    return plain


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data with every default filled in; `parse` of it gives the same recipe."""
    return dict(_ADAPTER.dump_python(recipe, mode="json"))


def _secrets_in(recipe: Recipe) -> list[str]:
    return [fault for role, model in recipe.own_models().items() for fault in secret_faults(_section_of(role), model)]


def _section_of(role: ModelRole) -> str:
    return "model" if role == "actor" else f"models.{role}"


def identifying(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data without the fields that came later and have their default."""
    plain = resolved(recipe)
    _leave_out(recipe, plain)
    return plain


def _leave_out(section: Any, plain: dict[str, Any]) -> None:
    for name in absent(section):
        del plain[name]
    for name, value in plain.items():
        if dataclasses.is_dataclass(part := getattr(section, name)):
            _leave_out(part, value)


def _cross_check(recipe: Recipe) -> list[str]:
    # Methods stand above recipes, and the table imports none before it is asked for.
    from agentr_core.methods.table import method_of

    faults = []
    try:
        method = method_of(recipe)
    except ConfigError as error:
        return [f"method: {error}"]
    if method.acts:
        for role, model in recipe.own_models().items():
            faults += model_faults(_section_of(role), model)
        faults += _faults_of_served_adapters(recipe)
    faults += _foreign_sections(recipe, method.name, method.sections)
    faults += method.faults(recipe)
    if not recipe.pairs.alpha:
        faults.append("pairs.alpha: give at least one threshold")
    if not recipe.training.num_train_epochs:
        faults.append("training.num_train_epochs: give at least one number")
    faults += training_faults(recipe.training)
    if recipe.training.max_seconds and recipe.eto.dpo.max_tokens:
        faults.append("eto.dpo.max_tokens: training.max_seconds is a budget already; leave one of the two out")
    if recipe.data.general.share > 0 and not recipe.data.general.file:
        faults.append("data.general.file: a share above 0 needs a file of chat data")
    faults += instances_faults(recipe.instances)
    faults += splice_faults(recipe.splice)
    faults += evaluation_faults(recipe.evaluation)
    faults += [
        f"evaluation.sets.{name}.split: {chosen.split!r} is the split that is trained on"
        for name, chosen in recipe.evaluation.sets.items()
        if chosen.split == recipe.instances.train
    ]
    scale = recipe.scale
    if scale.runner == "local" and (scale.address or scale.workers):
        faults.append("scale.runner: address and workers belong to a cluster; name dask or ray")
    if scale.address and scale.workers:
        faults.append("scale.workers: the cluster at scale.address has the workers it has; leave one of the two out")
    return faults


def _faults_of_served_adapters(recipe: Recipe) -> list[str]:
    """Checkpoints that vLLM could not serve would end the run only after its first training."""
    training, model = recipe.training, recipe.model
    if model.backend != "vllm" or not training.lora_r or training.publish != "adapter":
        return []
    faults = vllm_adapter_faults(training)
    if model.dtype == "float32" and model.device != "cpu":
        faults.append(
            "model.dtype: on a GPU vLLM serves adapters in bfloat16 only; set model.dtype=bfloat16, or "
            "training.publish=merged, or model.device=cpu where there is no GPU"
        )
    return faults


def _foreign_sections(recipe: Recipe, method: str, read: Collection[str]) -> list[str]:
    """A section of another method would be read by nobody."""
    plain = _ADAPTER.validate_python({"name": recipe.name})
    return [
        f"{section}: belongs to another method than {method}; leave it out"
        for section in OPTIONAL
        if section not in read and getattr(recipe, section) != getattr(plain, section)
    ]


def _say(error: Any) -> str:
    if error["type"] == "unexpected_keyword_argument":
        return "unknown field"
    if error["type"] == "string_pattern_mismatch" and "api_key_env" in error["loc"]:
        # What stands there may be the key itself.
        return "give the name of an environment variable, in capitals, that holds the key; never the key"
    said = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    # What stands there may hold a secret.
    return said if "extra_body" in error["loc"] else f"{said} (got {_short(repr(error['input']))})"


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {key!r} must look like section.field=value")
    try:
        # A range ends with a bracket that YAML does not know.
        value = text if RANGE.fullmatch(text.strip()) else read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {key!r}: the value is not YAML: {error}") from None
    *parents, last = key.split(".")
    target = data
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    target[last] = value


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_copy(item) for key, item in value.items()}
    return value


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a copy of a recipe with top-level fields changed, unchecked: for programs, not for user input."""
    return dataclasses.replace(recipe, **changes)  # type: ignore[type-var]
