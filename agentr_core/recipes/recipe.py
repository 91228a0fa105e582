"""One runnable configuration: all sections of a recipe together.

Defaults are the numbers of the Agent-R paper (arXiv 2501.11425, sections 4 and A) unless a field
says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence, Sized
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

from agentr_core.errors import DataFault
from agentr_core.fingerprint import default_of, later_field, omitted_fields
from agentr_core.recipes.agent_r import (
    AgentRConfig,
    CritiqueConfig,
    PairsConfig,
    SearchConfig,
    SpliceConfig,
)
from agentr_core.recipes.alarms import AlarmsConfig
from agentr_core.recipes.data import CompareConfig, DataConfig
from agentr_core.recipes.environments import (
    EnvironmentConfig,
    EvaluationConfig,
    InstancesConfig,
    WorldConfig,
    worlds_faults,
)
from agentr_core.recipes.et_agent import EtAgentConfig
from agentr_core.recipes.eto import EtoConfig
from agentr_core.recipes.fields import Count, Natural, SamplingFields, Unit, in_iteration, record
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.models import (
    ModelConfig,
    ModelRole,
    ModelsConfig,
    gpu_faults,
    mask_secrets,
)
from agentr_core.recipes.training import TrainingConfig

# The sections of a recipe that say how it is carried out: where, how much at once, and how many
# errors it may have.


@record
class ErrorsConfig:
    """The episode errors that a stage may have before it stops."""

    budget: Unit = 0.02
    """Share of the stage's episodes that may fail."""
    retries: Natural = 2
    """Further tries of an episode after a transient error."""
    count_as: Literal["out", "zero"] = later_field("out")
    """How an evaluation's episode that failed for good counts in its means: not at all, or as a
    failure with reward 0 (as in ETO). Reports state how many there were. Such an episode is never
    trained on, and no other episode continues from it."""


@record
class SummaryConfig:
    """How a policy sums up a history that fills its context (`context: summary`)."""

    prompt: Annotated[str, Field(min_length=1)] = (
        "You will not see the turns between the task and this one again. Sum up all that you need to go on without "
        "them: what you did and what came of it, what you have and where things are, and what is left to do. Write "
        "the summary alone, and no action."
    )
    """What it is asked with, after the last turn; it also stands before the summary afterwards."""
    max_new_tokens: Count = 256
    """The most tokens of a summary. One that is cut there is gone on from as it is."""


@record
class ScaleConfig:
    """Where trees are grown and episodes played, here or by the workers of a cluster, and how many
    at once.
    """

    runner: Literal["local", "dask", "ray"] = "local"
    address: str = ""
    """The cluster (`tcp://host:8786` for Dask, `ray://host:10001` for Ray); if empty, one is
    started on this machine for each stage."""
    workers: Natural = 0
    """Processes of a cluster that the run starts; 0 leaves their number to the library."""
    shard_size: Count = 32
    """Trees or episodes that are given to a worker, returned and stored together."""
    concurrency: Natural = 0
    """Trees or episodes in flight at once in a process, each with an environment. 0: 512, or as
    many as fill two batches if that is more. A server of environments may hold fewer."""


@record
class Recipe:
    """One runnable configuration."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    method: str = "agent-r"
    """A shipped method (agent-r, eto, grpo, et-agent, compare, compare-runs) or one that
    another package adds."""
    description: str = ""
    workspace: str = "runs"
    """Folder of the store, checkpoints and reports."""
    seed: Natural = 0
    iterations: Count = 3
    promote: Literal["last", "best"] = later_field("last")
    """Which checkpoint an iteration goes on from: that of the previous iteration (`last`), or the
    one that succeeds most often on `evaluation.development` (`best`), among all so far and the
    model that the run begins with."""
    environment: EnvironmentConfig = EnvironmentConfig()
    # Code that lists instances, checks and plans reads the recipe of one world (`in_world`), and so
    # knows nothing of several.
    environments: dict[str, WorldConfig] = later_field(default_factory=dict)
    """Several worlds in which one model acts, by name, in place of `environment` and `instances`.
    """
    model: ModelConfig = ModelConfig()
    """The actor: the model that is improved."""
    models: ModelsConfig = ModelsConfig()
    teacher_iterations: Natural = later_field(0)
    """For how many iterations, from the first on, `models.teacher` collects before the actor takes
    over; 0: for all."""
    instances: InstancesConfig = InstancesConfig()
    context: Literal["stop", "window", "summary"] = later_field("stop")
    """What becomes of an episode or a path whose history outgrows the model's context: it ends
    there; or its oldest exchanges are left out of what the model reads (as published), but never
    the instruction, first observation and first reply; or the model writes a summary, and goes on
    from instruction, first observation and that.
    """
    summary: SummaryConfig = later_field(SummaryConfig())
    agent_r: AgentRConfig = later_field(AgentRConfig())
    search: SearchConfig = SearchConfig()
    critique: CritiqueConfig = CritiqueConfig()
    pairs: PairsConfig = PairsConfig()
    splice: SpliceConfig = SpliceConfig()
    eto: EtoConfig = EtoConfig()
    compare: CompareConfig = CompareConfig()
    grpo: GrpoConfig = later_field(GrpoConfig())
    et_agent: EtAgentConfig = later_field(EtAgentConfig())
    options: dict[str, Any] = later_field(default_factory=dict)
    """Settings of a method that another package adds; the method checks them. Shipped methods have
    sections.
    """
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    errors: ErrorsConfig = ErrorsConfig()
    alarms: AlarmsConfig = later_field(AlarmsConfig())
    scale: ScaleConfig = ScaleConfig()

    def longest_reply(self, max_new_tokens: int) -> int:
        """Return the most tokens of a reply, of which a summary is one, where one that acts may
        have `max_new_tokens`.
        """
        return max(max_new_tokens, self.summary.max_new_tokens) if self.context == "summary" else max_new_tokens

    def model_of(self, role: ModelRole) -> ModelConfig:
        """Return the model of a role: its own, otherwise the actor's."""
        return self.own_models().get(role, self.model)

    def answering_role(self, role: ModelRole) -> ModelRole:
        """Return the role whose model is asked for a role while experience is collected: the role
        itself if the recipe names a model for it, otherwise the one that collects.
        """
        own_models = self.own_models()
        return role if role in own_models else "teacher" if "teacher" in own_models else "actor"

    def own_models(self) -> dict[ModelRole, ModelConfig]:
        """Return the models named in the recipe, by role; roles of the actor are left out."""
        by_role: dict[ModelRole, ModelConfig | None] = {
            "actor": self.model,
            "judge": self.models.judge,
            "reflector": self.models.reflector,
            "editor": self.models.editor,
            "summariser": self.models.summariser,
            "teacher": self.models.teacher,
            "scorer": self.models.scorer,
        }
        return {role: model for role, model in by_role.items() if model is not None}

    @property
    def world_names(self) -> tuple[str, ...]:
        """The names of the worlds of a recipe, in their order."""
        return tuple(self.environments) or (self.environment.name,)

    def world_name(self, environment: str) -> str:
        """Return the name of the world whose instances name an environment; a single world has all
        instances.

        Raises `DataFault` when none of several worlds has that name.
        """
        if self.environments and environment not in self.environments:
            raise DataFault(f"the recipe has no world {environment!r}; it has {', '.join(self.environments)}")
        return environment if self.environments else self.environment.name

    def in_world(self, environment: str) -> Recipe:
        """Return the recipe as it is in one of its worlds: a recipe of that world alone, with the
        world's own settings. A recipe of one world is returned unchanged. Raises as `world_name`.
        """
        name = self.world_name(environment)
        if not self.environments:
            return self
        world = self.environments[name]
        return replace(
            self,
            environments={},
            environment=_with_fields(
                EnvironmentConfig(),
                name=world.name or name,
                options=world.options,
                transcript=world.transcript,
                prompt=world.prompt,
                action=world.action,
            ),
            instances=world.instances,
            search=_with_fields(self.search, world.search),
            eto=_with_fields(self.eto, explore=_with_fields(self.eto.explore, world.explore)),
            evaluation=_with_fields(
                self.evaluation,
                world.evaluation,
                sets={
                    key: evaluation_set
                    for key, evaluation_set in self.evaluation.sets.items()
                    if evaluation_set.environment == name
                },
            ),
        )

    def worlds(self) -> dict[str, Recipe]:
        """Return the recipe as it is in each of its worlds, by name."""
        return {name: self.in_world(name) for name in self.world_names}

    def distinct_iterations(self) -> range:
        """Return the first iterations, counted from 1, whose settings may differ: all later ones
        are as the last of them.
        """
        by_iteration: tuple[Sized, ...] = (
            *(self.pairs.alpha, self.training.num_train_epochs),
            *(self.agent_r.phases, self.eto.phases, self.et_agent.phases),
        )
        return range(1, min(self.iterations, max(map(len, by_iteration))) + 1)

    def over_iterations(self, values: Sequence[S]) -> list[S]:
        """Return a setting's value in each of the distinct iterations, in their order."""
        return [in_iteration(values, iteration) for iteration in self.distinct_iterations()]

    def is_taught(self, iteration: int) -> bool:
        """Return whether the teacher, not the actor, collects experience in an iteration, counted
        from 1. One that goes on from the actor's errors does not.
        """
        if self.models.teacher is None or self.splice.continuation.by == "teacher":
            return False
        return iteration <= (self.teacher_iterations or iteration)

    def alpha(self, iteration: int) -> float:
        """Return the lowest reward of a good path in an iteration, counted from 1."""
        return in_iteration(self.pairs.alpha, iteration)

    def num_train_epochs(self, iteration: int) -> float:
        """Return the epochs trained in an iteration, counted from 1."""
        return in_iteration(self.training.num_train_epochs, iteration)


S = TypeVar("S")
ADAPTER = TypeAdapter(Recipe)
OPTIONAL_SECTIONS = (
    *("agent_r", "search", "critique", "pairs", "splice"),
    *("eto", "compare", "grpo", "et_agent", "iterations", "options"),
)
"""The sections of a recipe that not every method reads."""
SINGLE_WORLD_SECTIONS = ("environment", "instances")
"""The sections that `environments` replaces."""


def display_data(recipe: Recipe) -> dict[str, Any]:
    """Return what `resolved` returns, for display: what looks like a secret is masked."""
    plain = resolved(recipe)
    for model in (plain["model"], *filter(None, plain["models"].values())):
        model["server"]["extra_body"] = mask_secrets(model["server"]["extra_body"])
    return plain


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data with every default filled in; `parse` of it gives the same
    recipe. With several worlds, the sections of a single one are left out.
    """
    plain = dict(ADAPTER.dump_python(recipe, mode="json"))
    for section in SINGLE_WORLD_SECTIONS if recipe.environments else ():
        del plain[section]
    return plain


class FieldValue(NamedTuple):
    """A field of a recipe by its full name, its value as plain data, and whether that is its
    default.
    """

    name: str
    value: Any
    is_default: bool


def field_values(recipe: Recipe) -> list[FieldValue]:
    """Return the fields of a recipe and of all its sections, in order, as `display_data` has
    them.
    """
    return list(_field_values(recipe, display_data(recipe), ""))


def _field_values(section: Any, plain: dict[str, Any], prefix: str, defaults: Any = None) -> Iterator[FieldValue]:
    """Yield the fields of a section, each with whether it is at its default.

    Args:
        prefix: what the names of fields begin with: the path of the section and a dot, or nothing.
        defaults: the same section of a recipe that leaves it out. It has the values of defaults
            that depend on other fields.
    """
    for field in dataclasses.fields(section):
        if field.name not in plain:
            continue
        field_value, value, name = getattr(section, field.name), plain[field.name], f"{prefix}{field.name}"
        default = default_of(field) if defaults is None else getattr(defaults, field.name)
        for key, member, plain_member in _members(field_value, value):
            if dataclasses.is_dataclass(member):
                same = default if isinstance(default, type(member)) else None
                yield from _field_values(member, plain_member, f"{name}.{key}." if key else f"{name}.", same)
            else:
                yield FieldValue(name, value, field_value == default)


def _members(field_value: Any, plain: Any) -> list[tuple[str, Any, Any]]:
    """Return what a field holds, by key, with its plain data: the members of a mapping of sections,
    otherwise the value itself, under the empty key.
    """
    if isinstance(field_value, dict) and field_value and all(map(dataclasses.is_dataclass, field_value.values())):
        return [(str(key), member, plain[str(key)]) for key, member in field_value.items()]
    return [("", field_value, plain)]


def identifying_data(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data without the fields that were added later and have their default
    value.
    """
    plain = resolved(recipe)
    _drop_absent(recipe, plain)
    return plain


def _drop_absent(section: Any, plain: dict[str, Any]) -> None:
    for name in omitted_fields(section):
        del plain[name]
    for name, value in plain.items():
        for _, member, plain_member in _members(getattr(section, name), value):
            if dataclasses.is_dataclass(member):
                _drop_absent(member, plain_member)


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a copy of a recipe with top-level fields changed, unchecked: for programs, not for
    user input.
    """
    return dataclasses.replace(recipe, **changes)


def _with_fields(section: S, changes: Any = None, **extra: Any) -> S:
    """Return a section in which the fields of `changes` that are not None, and those of `extra`,
    replace its own.
    """
    values = {} if changes is None else vars(changes)
    fields = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(section, **fields, **extra)  # type: ignore[type-var]


# What a recipe needs of the servers of its models.


def sampling_sections(recipe: Recipe) -> dict[str, tuple[ModelRole, SamplingFields]]:
    """Return each section of a recipe that asks a model, by name, with the role that it asks; in a
    recipe without a teacher, the actor fills that role. In a flywheel, the model that collects
    fills the roles that have none of their own.
    """
    flywheel, evaluation = recipe.et_agent.flywheel, recipe.evaluation
    return {
        "search": ("teacher" if recipe.is_taught(1) else "actor", recipe.search),
        "critique": ("judge", recipe.critique),
        "splice.continuation": ("teacher", recipe.splice.continuation),
        "eto.expert.thoughts": ("editor", recipe.eto.expert.thoughts),
        "eto.explore": ("teacher", recipe.eto.explore),
        "grpo": ("actor", recipe.grpo),
        "et_agent.flywheel": ("teacher", flywheel),
        "et_agent.flywheel.reflector": (recipe.answering_role("reflector"), flywheel.reflector),
        "et_agent.flywheel.editor": (recipe.answering_role("editor"), flywheel.editor),
        "evaluation": ("actor", evaluation),
        **{f"evaluation.sets.{name}": ("actor", evaluation_set) for name, evaluation_set in evaluation.sets.items()},
    }


def served_sampling_faults(recipe: Recipe) -> list[str]:
    """Return one sentence for each sampling setting that a model's server is not known to accept.

    Backends transformers and vllm accept them all.
    """
    faults = []
    for path, (role, section) in sampling_sections(recipe).items():
        model = recipe.model_of(role)
        if model.backend != "openai":
            continue
        owner = f"models.{role}" if role != "actor" and role in recipe.own_models() else "model"
        faults += [
            f"{path}.{name}: OpenAI's protocol does not know it; leave it out or, if the server has a field of this "
            f"name as vLLM does, name it in {owner}.server.sampling_fields"
            for name in section.beyond_protocol()
            if name not in model.server.sampling_fields
        ]
    return faults


# Faults of a recipe whose fields are each right: parts that do not go together, and secrets.
#
# These rules know no method; `methods.faults` has those that do, and puts all together.


def secrets_in(recipe: Recipe) -> list[str]:
    """Return one sentence for each secret that is written out in a recipe."""
    return [fault for role, model in recipe.own_models().items() for fault in model.secret_faults(_section_of(role))]


def _section_of(role: ModelRole) -> str:
    return "model" if role == "actor" else f"models.{role}"


def faults_of_sections(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe by the rules for all methods, one sentence each."""
    faults = []
    if not recipe.pairs.alpha:
        faults.append("pairs.alpha: give at least one threshold")
    if not recipe.training.num_train_epochs:
        faults.append("training.num_train_epochs: give at least one number")
    faults += recipe.training.faults()
    if recipe.training.max_seconds and recipe.eto.dpo.max_tokens:
        faults.append("eto.dpo.max_tokens: training.max_seconds is a budget already; leave one of the two out")
    if recipe.data.general.share > 0 and not recipe.data.general.file:
        faults.append("data.general.file: a share above 0 needs a file of chat data")
    if recipe.context != "summary" and recipe.summary != SummaryConfig():
        faults.append("summary: has no use without context: summary; set that, or leave the section out")
    faults += recipe.instances.faults()
    single = recipe.environment
    faults += single.prompt.faults("environment", single.transcript)
    faults += single.action.faults("environment", single.transcript)
    faults += _faults_of_worlds(recipe)
    faults += recipe.search.faults()
    faults += recipe.critique.faults()
    faults += recipe.splice.faults()
    faults += recipe.evaluation.faults()
    for world in recipe.worlds().values():
        instances = world.instances
        # In any iteration, also in those by which a run may be continued.
        training_splits = {
            split for first in (1, *instances.from_iteration) for split in instances.at_iteration(first).training_splits
        }
        faults += [
            f"evaluation.sets.{name}.split: {evaluation_set.split!r} is the split that is trained on"
            for name, evaluation_set in world.evaluation.sets.items()
            if evaluation_set.split in training_splits
        ]
    if recipe.scale.runner == "local" and (recipe.scale.address or recipe.scale.workers):
        faults.append("scale.runner: address and workers belong to a cluster; name dask or ray")
    if recipe.scale.address and recipe.scale.workers:
        faults.append("scale.workers: the cluster at scale.address has the workers it has; leave one of the two out")
    return faults


def faults_of_models(recipe: Recipe) -> list[str]:
    """Return what is wrong with the models of a recipe, one sentence each."""
    models = {_section_of(role): model for role, model in recipe.own_models().items()}
    faults = [fault for section, model in models.items() for fault in model.faults(section)]
    faults += gpu_faults(models)
    training, model = recipe.training, recipe.model
    if model.backend == "vllm" and training.lora_r and training.publish == "adapter":
        # vLLM could not serve the run's checkpoints, which would end it after its first training.
        faults += training.vllm_adapter_faults()
        if model.dtype == "float32" and model.device != "cpu":
            faults.append(
                "model.dtype: on a GPU vLLM serves adapters in bfloat16 only; set model.dtype=bfloat16, or "
                "training.publish=merged, or model.device=cpu where there is no GPU"
            )
    return [*faults, *served_sampling_faults(recipe)]


def faults_of_teacher(recipe: Recipe, *, collects: bool, online: bool) -> list[str]:
    """Return why a recipe's teacher has nothing to do, or is missing.

    Args:
        collects: a stage of its method collects with a teacher.
        online: an iteration is group RL.
    """
    goes_on = recipe.splice.continuation.by == "teacher"
    if recipe.models.teacher is None:
        settings = {"teacher_iterations": recipe.teacher_iterations > 0, "splice.continuation.by": goes_on}
        return [f"{field}: name models.teacher, or leave it out" for field, is_set in settings.items() if is_set]
    if goes_on and recipe.teacher_iterations:
        return [
            "teacher_iterations: says for how long the teacher collects, and with splice.continuation.by: teacher it "
            "only goes on from the actor's errors; leave one of the two out"
        ]
    if collects:
        return []
    reason = (
        "reinforcement learning trains on what the trained model samples itself, with the log-probabilities of its own "
        "tokens, which another model's text has not; let it teach with method agent-r or eto first, and go on from "
        "that run with model.from_run"
        if online
        else f"no stage of method {recipe.method} with these settings collects with a model; leave it out"
    )
    return [f"models.teacher: {reason}"]


def faults_of_scorer(recipe: Recipe, *, online: bool) -> list[str]:
    """Return why a recipe's scorer, or what is asked of one, has nothing to do.

    Args:
        online: an iteration is group RL.
    """
    faults = []
    if recipe.models.scorer is not None and not (online and recipe.grpo.distil):
        faults.append("models.scorer: scores what group RL samples (grpo.distil), and nothing here does; leave it out")
    if recipe.grpo.distil and not online:
        faults.append("grpo.distil: no iteration here is group RL; leave it out")
    return faults


def faults_of_choice(recipe: Recipe, *, goes_round: bool) -> list[str]:
    """Return what is wrong with how a run chooses the checkpoint that it goes on from."""
    best = recipe.promote == "best"
    if best and not goes_round:
        return [f"promote: method {recipe.method} has no iterations that go on from one another; leave it out"]
    asking = {"promote": best, "grpo.eval_steps": recipe.grpo.eval_steps > 0}
    faults = recipe.evaluation.development_faults(readers=[field for field, asks in asking.items() if asks])
    faults += [
        f"evaluation.sets.{name}.split: {evaluation_set.split!r} is the split that is tested, and no development set"
        for world in recipe.worlds().values()
        for name, evaluation_set in world.evaluation.sets.items()
        if name == recipe.evaluation.development and evaluation_set.split == world.instances.test
    ]
    return faults


def _faults_of_worlds(recipe: Recipe) -> list[str]:
    faults = worlds_faults(recipe.environments)
    for name, evaluation_set in recipe.evaluation.sets.items():
        path = f"evaluation.sets.{name}.environment"
        if not recipe.environments and evaluation_set.environment:
            faults.append(f"{path}: belongs to a recipe of several environments; leave it out")
        elif name in recipe.environments:
            faults.append(f"evaluation.sets.{name}: a world has this name; choose another")
        elif recipe.environments and evaluation_set.environment not in recipe.environments:
            faults.append(f"{path}: say whose split it is, one of {', '.join(recipe.environments)}")
    if not recipe.environments:
        return faults
    faults += [
        f"{file}: a file is of one world, and environments names several; leave it out"
        for file, is_set in (
            ("eto.expert.file", recipe.eto.expert.file),
            ("eto.preferences.file", recipe.eto.preferences.file),
        )
        if is_set
    ]
    return faults


def unread_sections(recipe: Recipe, method: str, sections: Collection[str]) -> list[str]:
    """Return a sentence for each changed section that the recipe's method does not read."""
    usual = ADAPTER.validate_python({"name": recipe.name})
    unread = [
        section
        for section in OPTIONAL_SECTIONS
        if section not in sections and getattr(recipe, section) != getattr(usual, section)
    ]
    defaults = WorldConfig()
    unread += [
        f"environments.{name}.{field}"
        for name, world in recipe.environments.items()
        for field, section in (("search", "search"), ("explore", "eto"))
        if section not in sections and getattr(world, field) != getattr(defaults, field)
    ]
    return [f"{section}: belongs to another method than {method}; leave it out" for section in unread]
