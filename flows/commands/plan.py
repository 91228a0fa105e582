"""What a recipe would run: the stages in their order, and the fields that reach each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentr_core import estimates
from agentr_core.estimates import GIB
from agentr_core.methods.comparison.arms import arms_of, makers_of_samples
from agentr_core.methods.table import method_of, plan_of, plans_of
from agentr_core.recipes import ModelConfig, ModelRole, Recipe, shown
from agentr_core.runtime.description import Training
from agentr_core.runtime.instances import episode_count, state_count, training_instances
from agentr_core.runtime.start import run_id_of
from agentr_core.runtime.worlds import Worlds
from agentr_core.store.queries.iterations import count_finished_iterations
from agentr_core.store.queries.runs import count_finished_runs
from agentr_core.texts import counted
from agentr_core.training.objectives import GroupRelative
from flows.preflight.checks import faults_of
from flows.preflight.requirements import weights_missing
from tasks.wiring import load_recipe, make_environment
from tasks.workspaces import open_store


def describe(path: Path, overrides: Sequence[str], *, gpu_gib: float = 80.0) -> str:
    """Return the plan of a recipe as text: what runs, what it needs, and the fields that reach each
    stage.

    A model's directory may still be missing if the shape of a model of its name is shipped: the
    recipe is then planned for another machine, and the plan says what this one lacks. Raises
    `UserError` for anything else that would stop the run, at once or later; servers are not asked.

    Args:
        gpu_gib: memory of a GPU, in GiB.
    """
    recipe = load_recipe(path, list(overrides))
    plain = shown(recipe)
    method = method_of(recipe)
    if not method.acts:
        return "\n".join([f"recipe {recipe.name}: make a base model", *_section("pretrain", ("base",), plain)])
    away = any(map(weights_missing, recipe.own_models().values()))
    faults = faults_of(recipe, asks=False)
    lacking = faults.machine if away else []
    replace(faults, machine=[] if away else faults.machine).tell()
    counts = _counts(recipe)
    train, test, _ = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    if method.flow == "compare":
        for one in makers_of_samples(recipe):
            faults_of(one, asks=False).tell()
        return "\n".join(_of_comparison(recipe, train, test, plain))
    asked = {role for stage in (*method.before, *method.stages) for role in stage.roles}
    paths = {role: Path(model.path) for role, model in recipe.own_models().items() if model.path and role in asked}
    shapes = {role: estimates.read_shape(path) for role, path in paths.items()}
    missing = [(path, shapes[role].where) for role, path in paths.items() if weights_missing(recipe.own_models()[role])]
    where = f"a run in {recipe.workspace}" if missing else f"run {run_id_of(recipe)} in {recipe.workspace}"
    lines = [
        f"recipe {recipe.name}: {method.title}, {counted(recipe.iterations, 'iteration')}, {where}",
        *method.describe(recipe, train, test),
        *(_world_line(name, *counts[name][:2], share=world.share) for name, world in recipe.environments.items()),
        *([f"a history that outgrows the context: {recipe.context}"] if recipe.context != "stop" else []),
        *(f"still missing: the weights of {path}; counted by {where}" for path, where in missing),
        *(f"not on this machine: {fault}" for fault in dict.fromkeys(lacking)),
        *([] if missing else [f"already done: {_done(recipe)}"]),
        *_needs(recipe, shapes, counts, gpu_gib * GIB),
    ]
    for stage in method.before:
        lines += _section(f"{stage.name} base", stage.reads, plain)
    for stage in method.stages:
        lines += _section(stage.name, stage.reads, plain)
    return "\n".join(lines)


def _counts(recipe: Recipe) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of training instances, of held-out episodes and of states of the revision
    test, at most, of each world.
    """
    with closing(Worlds(recipe, lambda name: make_environment(recipe.in_world(name)))) as worlds:
        found = [
            (len(training_instances(world, env, 1)), episode_count(world, env), state_count(world, env))
            for world, env in worlds
        ]
    return dict(zip(recipe.world_names, found, strict=True))


def _world_line(name: str, train: int, test: int, *, share: float) -> str:
    part = f", {share:.0%} of the training samples" if share else ""
    return f"  {name}: {train} training instances, {test} held-out episodes{part}"


def _of_comparison(recipe: Recipe, train: int, test: int, plain: dict[str, Any]) -> list[str]:
    run_id, made = run_id_of(recipe), plan_of(recipe, 1).stages
    arms = arms_of(recipe, run_id)
    head = f"recipe {recipe.name}: comparison of {len(recipe.compare.arms)} arms, run {run_id} in {recipe.workspace}"
    finished = count_finished_runs(open_store(Path(recipe.workspace)), [run_id_of(arm.recipe) for arm in arms])
    done = f"already done: {finished} of {len(arms)} trainings"
    own = {arm.name: f" (samples of its own, in run {arm.recipe.compare.samples})" for arm in arms if arm.samples}
    named = [f"  {name}: {' '.join(changes)}{own.get(name, '')}" for name, changes in recipe.compare.arms.items()]
    if not made:
        return [head, f"each arm: a whole run with each of {len(recipe.compare.seeds)} seeds", *named, done]
    sections = dict.fromkeys(section for stage in made for section in stage.reads)
    lines = [
        head,
        f"the pool: {', '.join(stage.name for stage in made)} on {train} instances, once",
        f"each arm: {_budget(recipe)}, {len(recipe.compare.seeds)} seeds, then {test} held-out episodes",
        *named,
        done,
        *_section("pool", tuple(sections), plain),
    ]
    for stage in plan_of(arms[0].recipe, 1).stages:
        lines += _section(stage.name, stage.reads, plain)
    return lines


def _budget(recipe: Recipe) -> str:
    training = recipe.training
    return f"{training.max_tokens} trained tokens" if training.max_tokens else f"{training.max_seconds:g} s of training"


def _needs(
    recipe: Recipe, shapes: Mapping[ModelRole, estimates.Shape], counts: Mapping[str, tuple[int, int, int]], gpu: float
) -> list[str]:
    """Return the needs of a run as lines: tokens at most, and memory of each GPU. `counts` are
    those of `_counts`.
    """
    lines = ["", "each iteration samples at most"]
    for name, world in recipe.worlds().items():
        train, test, states = counts[name]
        where = f"{name}, " if recipe.environments else ""
        for one in estimates.tokens(world, method_of(world).sampled(world, train), test, states):
            lines.append(f"  {where}{one.stage}: {one.replies:,} replies, {one.tokens:,} tokens")
    lines += ["", f"memory, estimated, of a GPU of {_size(gpu)} (another: --gpu-gib)"]
    for role, shape in shapes.items():
        lines += _sampling_needs(role, recipe.own_models()[role], shape, gpu)
    if "actor" in shapes:
        lines += _training_needs(recipe, shapes["actor"], gpu)
    return lines


def _sampling_needs(role: str, model: ModelConfig, shape: estimates.Shape, gpu: float) -> list[str]:
    need = estimates.sampling(shape, model)
    context = model.context_length or shape.context_length
    served = model.backend == "vllm"
    room = need.sequences(gpu * (model.vllm.gpu_memory_utilization if served else 1.0), context)
    parts = f" on each of {model.vllm.tensor_parallel_size} GPUs" if model.vllm.tensor_parallel_size > 1 else ""
    line = f"  {role}, {model.backend}: {shape.parameters:,} parameters, weights {_size(need.weights)}{parts}, "
    line += f"{_size(need.token)} for each token in keys and values: room for {room:,} sequences of {context:,} tokens"
    if room:
        return [line]
    return [f"{line}; lower model.context_length, or spread the model by model.vllm.tensor_parallel_size"]


def _training_needs(recipe: Recipe, shape: estimates.Shape, gpu: float) -> list[str]:
    config, longest = recipe.training, recipe.data.max_length
    way_out = (
        "training.launch.deepspeed=zero3 or training.gradient_checkpointing=true, or lower "
        "training.per_device_train_batch_size or data.max_length"
    )
    if all(isinstance(one.objective, GroupRelative) for one in _trainings(recipe)):
        # A row is a whole episode.
        config = replace(config, per_device_train_batch_size=1)
        longest = max(recipe.grpo.micro_batch_tokens, recipe.model.context_length or shape.context_length)
        way_out = "or lower grpo.micro_batch_tokens and model.context_length"
    need = estimates.training(shape, config, longest)
    kind = f"LoRA, {need.trained:,} parameters" if config.lora_r else "all weights"
    spread = f", {config.num_processes} processes" if config.num_processes > 1 else ""
    split = config.launch and (config.launch.deepspeed or ("fsdp" if config.launch.fsdp else ""))
    zero = f" under {split}" if split else ""
    line = (
        f"  training, {kind}{spread}{zero}: weights {_size(need.weights)}, gradients and "
        f"optimizer {_size(need.states)}, activations of {config.per_device_train_batch_size} x "
        f"{longest:,} tokens {_size(need.activations)}: {_size(need.total)} in all"
    )
    if need.host:
        line += f", and {_size(need.host)} of main memory on all machines together"
    if need.total <= gpu:
        return [line]
    return [f"{line}; that is too much: set training.lora_r, {way_out}"]


def _trainings(recipe: Recipe) -> list[Training]:
    return [plan.training for plan in plans_of(recipe) if plan.training]


def _size(count: float) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1024:.3g} KiB"


def _section(stage: str, sections: tuple[str, ...], plain: dict[str, Any]) -> list[str]:
    fields = []
    # A section that a recipe of several worlds does not have itself is listed with each of its
    # worlds.
    for section in dict.fromkeys(name if name.partition(".")[0] in plain else "environments" for name in sections):
        values = plain
        for part in section.split("."):
            values = values[part]
        # A stage may read one field of a section.
        named = (
            {f"{section}.{key}": value for key, value in values.items()}
            if isinstance(values, dict)
            else {section: values}
        )
        fields += [f"  {name} = {json.dumps(value)}" for name, value in named.items()]
    return ["", stage, *fields]


def _done(recipe: Recipe) -> str:
    store = open_store(Path(recipe.workspace))
    if not store.path.exists():
        return "nothing yet"
    return counted(count_finished_iterations(store, run_id_of(recipe)), "iteration")
