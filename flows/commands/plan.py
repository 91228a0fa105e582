"""What a recipe would run: its fields, the stages in their order, and what they need."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from agentr_core import estimates
from agentr_core.environment import Environment
from agentr_core.environments import registry
from agentr_core.estimates import GIB
from agentr_core.methods.comparison import arms_of, sample_recipes
from agentr_core.methods.table import method_of, plan_of, plans_of
from agentr_core.recipes.recipe import (
    OPTIONAL_SECTIONS,
    SINGLE_WORLD_SECTIONS,
    FieldValue,
    Recipe,
    display_data,
    field_values,
)
from agentr_core.runtime.context import Method, Stage
from agentr_core.runtime.equipment import Worlds
from agentr_core.runtime.instances import max_revision_episodes, num_held_out_episodes, training_instances
from agentr_core.runtime.remaining import worked_seconds
from agentr_core.samples.rendering import load_renderer
from agentr_core.store.queries.runs import (
    count_finished_iterations,
    count_finished_runs,
    last_finished_run,
    longest_sample_tokens,
    sampling_rate,
    stage_seconds,
)
from agentr_core.texts import count_text
from flows.commands.needs import EarlierRuns, WorldCounts, need_lines
from flows.preflight.checks import faults_of
from flows.preflight.requirements import weights_missing
from tasks.wiring import load_recipe, make_environment, run_reference
from tasks.workspaces import open_store

_WIDTH = 100
_CONTEXT = 4096
"""The tokens of the longest row if neither the recipe nor a stored or expert episode tells."""
_LOCAL = ("transformers", "vllm")
_OF_BACKENDS = {
    **dict.fromkeys(("path", "from_run", "dtype", "device"), _LOCAL),
    **dict.fromkeys(("workers", "prefix_cache_gib"), ("transformers",)),
    "vllm": ("vllm",),
    "server": ("openai",),
}
"""The fields of a model that only some backends read."""
_OF_LORA = tuple(
    f"training.{name}"
    for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_dora", "publish")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanText:
    """A plan: its summary in lines, and the recipe's sections that each stage reads, by stage."""

    summary: list[str]
    stages: dict[str, tuple[str, ...]]


def describe(path: Path, overrides: Sequence[str], *, gpu_gib: float | None = None, form: str = "text") -> str:
    """Return the plan of a recipe as text or `json`: a summary with what its run needs, the fields
    that it reads, and the stages with the sections that each reads.

    A model's directory may still be missing if the shape of a model of its name is shipped: the
    recipe is then planned for another machine, and the plan says what this one lacks. Raises
    `UserError` for anything else that would stop the run, at once or later; servers are not asked.

    Args:
        gpu_gib: memory of a GPU of another machine, in GiB; None: this machine's memory counts.
    """
    recipe = load_recipe(path, list(overrides))
    method = method_of(recipe)
    plan = _describe(recipe, method, gpu_gib)
    fields = _fields_read(recipe, method, plan.stages)
    names = {field.name for field in fields}
    unread_fields = [field for field in field_values(recipe) if not field.is_default and field.name not in names]
    if form == "json":
        return json.dumps({"recipe": display_data(recipe), "stages": plan.stages, "summary": plan.summary}, indent=2)
    return "\n".join([*plan.summary, "", *_field_lines(fields, unread_fields), *_stage_lines(plan.stages)])


def _describe(recipe: Recipe, method: Method, gpu_gib: float | None) -> _PlanText:
    lacks_weights = _lacks_weights(recipe)
    faults = faults_of(recipe, asks=False)
    lacking = faults.machine if lacks_weights else []
    replace(faults, machine=[] if lacks_weights else faults.machine).raise_any()
    counts = _counts_by_world(recipe)
    train, test = sum(world.train for world in counts.values()), sum(world.test for world in counts.values())
    if method.flow == "compare":
        for maker in sample_recipes(recipe):
            faults_of(maker, asks=False).raise_any()
        return _comparison(recipe, train, test)
    roles = {role for stage in (*method.before, *method.stages) for role in stage.roles}
    paths = {role: Path(model.path) for role, model in recipe.own_models().items() if model.path and role in roles}
    shapes = {role: estimates.read_shape(path) for role, path in paths.items()}
    missing = [
        (path, shapes[role].config_dir) for role, path in paths.items() if weights_missing(recipe.own_models()[role])
    ]
    run = f"a run in {recipe.workspace}" if missing else f"run {run_reference(recipe).run_id} in {recipe.workspace}"
    summary = [
        f"recipe {recipe.name}: {method.title}, {count_text(recipe.iterations, 'iteration')}, {run}",
        *method.describe(recipe, train, test),
        *(_world_line(name, counts[name], share=world.share) for name, world in recipe.environments.items()),
        *([f"a history that outgrows the context: {recipe.context}"] if recipe.context != "stop" else []),
        *(f"still missing: the weights of {path}; counted by {source}" for path, source in missing),
        *(f"not on this machine: {fault}" for fault in dict.fromkeys(lacking)),
        *faults.notes,
        *([] if missing else [f"already done: {_done(recipe)}"]),
        "",
        *need_lines(
            recipe,
            shapes,
            counts,
            gpu=None if gpu_gib is None else gpu_gib * GIB,
            longest=longest_row(recipe, counts),
            earlier=_earlier(recipe),
        ),
    ]
    before = [replace(stage, name=f"{stage.name} base") for stage in method.before]
    stages = [stage for plan in plans_of(recipe) for stage in plan.stages]
    return _PlanText(summary=summary, stages=_sections_by_stage(recipe, [*before, *stages]))


def _counts_by_world(recipe: Recipe) -> dict[str, WorldCounts]:
    """Return, by world, how much a run plays there and how long its episodes are: of those stored
    in the workspace, else of the expert's, else None.
    """
    path, store = Path(recipe.model.path), open_store(Path(recipe.workspace))
    is_local = recipe.model.backend != "openai" and path.is_dir() and not weights_missing(recipe.model)
    renderer = load_renderer(path, at=datetime.now(UTC)) if is_local else None
    counts = {}
    with closing(Worlds(recipe, lambda name: make_environment(recipe.in_world(name)))) as worlds:
        for name, (world, env) in zip(recipe.world_names, worlds, strict=True):
            instances = training_instances(world, env, 1)
            lengths = estimates.stored_lengths(store, recipe, env.name)
            # An environment on a server is not asked, since a plan contacts no server.
            if lengths is None and renderer is not None and not env.has(Environment.reach):
                lengths = estimates.expert_lengths(env, instances, renderer)
            test, states = num_held_out_episodes(world, env), max_revision_episodes(world, env)
            counts[name] = WorldCounts(train=len(instances), test=test, states=states, lengths=lengths)
    return counts


def _earlier(recipe: Recipe) -> EarlierRuns:
    """Return the speed of earlier runs in the workspace."""
    store = open_store(Path(recipe.workspace))
    if not store.path.exists():
        return EarlierRuns()
    run_id = last_finished_run(store, recipe=recipe.name, method=recipe.method, iterations=recipe.iterations)
    stage_times = stage_seconds(store, run_id) if run_id else {}
    stages = [
        (iteration, stage) for iteration in range(recipe.iterations + 1) for stage in plan_of(recipe, iteration).stages
    ]
    # A run that copied results of another run took less time than a new one will.
    whole = run_id is not None and len(worked_seconds(store, run_id, stages)) == len(stage_times)
    return EarlierRuns(
        run_id=run_id if whole else None,
        seconds=sum(seconds for (iteration, _), seconds in stage_times.items() if iteration <= recipe.iterations),
        tokens_per_second=sampling_rate(store, recipe.model.path),
    )


def _lacks_weights(recipe: Recipe) -> bool:
    return any(map(weights_missing, recipe.own_models().values()))


def longest_row(recipe: Recipe, counts: Mapping[str, WorldCounts]) -> int:
    """Return the tokens of the longest training row: of the run's stored samples, else of the
    expert's episodes if only these are trained on, else `data.max_length`, which is also the most.
    `_CONTEXT` if neither is known and `data.max_length` is 0.
    """
    most, store = recipe.data.max_length, open_store(Path(recipe.workspace))
    # A run's id has the hash of its weights, so without them nothing of it is stored.
    has_run = store.path.exists() and not _lacks_weights(recipe)
    stored_length = longest_sample_tokens(store, run_reference(recipe).run_id) if has_run else 0
    of_expert = [world.lengths.longest if world.lengths else 0 for world in counts.values()]
    cloned = recipe.data.use == "expert" and not recipe.data.general.share and all(of_expert)
    longest = stored_length or (max(of_expert) if cloned else most)
    return min(most or longest, longest) or _CONTEXT


def _world_line(name: str, counts: WorldCounts, *, share: float) -> str:
    part = f", {share:.0%} of the training samples" if share else ""
    return f"  {name}: {counts.train} training instances, {counts.test} held-out episodes{part}"


def _comparison(recipe: Recipe, train: int, test: int) -> _PlanText:
    run_id, pool_stages = run_reference(recipe).run_id, plan_of(recipe, 1).stages
    arms = arms_of(recipe, run_id)
    head = f"recipe {recipe.name}: comparison of {len(recipe.compare.arms)} arms, run {run_id} in {recipe.workspace}"
    num_finished = count_finished_runs(
        open_store(Path(recipe.workspace)), [run_reference(arm.recipe).run_id for arm in arms]
    )
    progress = f"already done: {num_finished} of {len(arms)} trainings"
    sample_sources = {
        arm.name: f" (samples of its own, in run {arm.recipe.compare.samples})" for arm in arms if arm.samples_recipe
    }
    arm_lines = [
        f"  {name}: {' '.join(changes)}{sample_sources.get(name, '')}" for name, changes in recipe.compare.arms.items()
    ]
    if not pool_stages:
        runs = f"each arm: a whole run with each of {len(recipe.compare.seeds)} seeds"
        return _PlanText(summary=[head, runs, *arm_lines, progress], stages={})
    summary = [
        head,
        f"the pool: {', '.join(stage.name for stage in pool_stages)} on {train} instances, once",
        f"each arm: {_budget(recipe)}, {len(recipe.compare.seeds)} seeds, then {test} held-out episodes",
        *arm_lines,
        progress,
    ]
    return _PlanText(
        summary=summary, stages=_sections_by_stage(recipe, [*pool_stages, *plan_of(arms[0].recipe, 1).stages])
    )


def _budget(recipe: Recipe) -> str:
    training = recipe.training
    return f"{training.max_tokens} trained tokens" if training.max_tokens else f"{training.max_seconds:g} s of training"


def _sections_by_stage(recipe: Recipe, stages: Iterable[Stage]) -> dict[str, tuple[str, ...]]:
    section_names = dict.fromkeys(SINGLE_WORLD_SECTIONS, "environments") if recipe.environments else {}
    return {stage.name: tuple(dict.fromkeys(section_names.get(name, name) for name in stage.reads)) for stage in stages}


def _fields_read(recipe: Recipe, method: Method, stages: dict[str, tuple[str, ...]]) -> list[FieldValue]:
    """Return the fields of a recipe that its run reads: without those that only other methods, or
    stages that the run does not have, read, and without those that other fields switch off.
    """
    sections = [name for reads in stages.values() for name in reads]
    stage_sections = [name for stage in method.stages for name in stage.reads]
    unused_sections = [section for section in OPTIONAL_SECTIONS if section not in method.sections]
    switched_off = [*_switched_off(recipe), *_roles_not_asked(recipe, method)]
    return [
        field
        for field in field_values(recipe)
        if (
            _is_in_sections(field.name, sections)
            or not _is_in_sections(field.name, (*stage_sections, *unused_sections))
        )
        and not _is_in_sections(field.name, switched_off)
    ]


def _switched_off(recipe: Recipe) -> Iterator[str]:
    """Yield the names of fields and sections that are not read because of other fields' values."""
    for role, model in recipe.own_models().items():
        section = "model" if role == "actor" else f"models.{role}"
        yield from (f"{section}.{name}" for name, backends in _OF_BACKENDS.items() if model.backend not in backends)
    switches = {
        "evaluation.revision_test": recipe.evaluation.revision_test.enabled,
        "eto.expert.thoughts": recipe.eto.expert.thoughts.enabled,
    }
    for section, on in switches.items():
        fields = [] if on else [field.name for field in field_values(recipe) if _is_in_sections(field.name, [section])]
        yield from (name for name in fields if name != f"{section}.enabled")
    conditions = {
        "summary": recipe.context == "summary",
        "splice.continuation": recipe.splice.goes_on,
        "data.general.file": recipe.data.general.share > 0,
        "teacher_iterations": recipe.models.teacher is not None,
        "environment.prompt.examples_file": recipe.environment.prompt.examples > 0,
        **dict.fromkeys(("scale.address", "scale.workers"), recipe.scale.runner != "local"),
        **dict.fromkeys(_OF_LORA, recipe.training.lora_r > 0),
    }
    yield from (name for name, on in conditions.items() if not on)


def _roles_not_asked(recipe: Recipe, method: Method) -> list[str]:
    """Return the sections of the models that no stage and no world asks; an empty list for a
    comparison, whose arms have stages of their own.
    """
    if method.flow == "compare":
        return []
    stages = [*method.before, *(stage for plan in plans_of(recipe) for stage in plan.stages)]
    roles = {role for stage in stages for role in stage.roles}
    if any(registry.asks_models(world.environment.name) for world in recipe.worlds().values()):
        roles |= {"judge", "summariser"}
    return [f"models.{field.name}" for field in dataclasses.fields(recipe.models) if field.name not in roles]


def _is_in_sections(field: str, sections: Iterable[str]) -> bool:
    return any(field == section or field.startswith(f"{section}.") for section in sections)


# Fields are listed apart from the stages: under them, a field would be repeated for each stage that
# reads it, and one that no stage reads would be missing.
def _field_lines(fields: Sequence[FieldValue], unread_fields: Sequence[FieldValue] = ()) -> list[str]:
    """Return fields as lines: one for each field of `fields` that was changed, and for each of
    `unread_fields`, which the run does not read; fields at their defaults share lines, by section.
    """
    lines = [
        "fields that differ from their defaults",
        *(f"  {field.name} = {json.dumps(field.value)}" for field in fields if not field.is_default),
    ]
    if unread_fields:
        lines += ["", "fields that differ from their defaults and that this run does not read"]
        lines += (f"  {field.name} = {json.dumps(field.value)}" for field in unread_fields)
    lines += ["", "fields at their defaults"]
    usual = sorted((field for field in fields if field.is_default), key=_section_of)
    for section, section_fields in groupby(usual, _section_of):
        assignments = ", ".join(
            f"{field.name.removeprefix(f'{section}.')}={json.dumps(field.value)}" for field in section_fields
        )
        lines += textwrap.wrap(
            f"{section}: {assignments}" if section else assignments,
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _section_of(field: FieldValue) -> str:
    return field.name.rpartition(".")[0]


def _stage_lines(stages: dict[str, tuple[str, ...]]) -> list[str]:
    if not stages:
        return []
    width = max(map(len, stages))
    return [
        "",
        "stages, and what each reads",
        *(f"  {name:<{width}}  {', '.join(reads)}" for name, reads in stages.items()),
    ]


def _done(recipe: Recipe) -> str:
    store = open_store(Path(recipe.workspace))
    if not store.path.exists():
        return "nothing yet"
    return count_text(count_finished_iterations(store, run_reference(recipe).run_id), "iteration")
