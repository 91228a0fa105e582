"""The shipped trainings, stages and report parts. Methods choose from these, and may add others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.methods.table import method_of
from agentr_core.recipes.agent_r import SpliceConfig
from agentr_core.recipes.eto import EtoConfig
from agentr_core.recipes.fields import in_iteration
from agentr_core.recipes.grpo import (
    SCHEDULE,
    GrpoConfig,
    group_faults,
    grpo_faults,
    on_one_machine,
    online_faults,
    unread_online,
)
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime.context import Demand, Funnel, ReportPart, RolloutConfig, Stage, Training, lazy_import
from agentr_core.training.job import GroupRelative, Preference, PreferenceLoss, Supervised
from agentr_core.training.process import offloads, read_deepspeed

# The shipped trainings, as a recipe configures them.

_DEFAULTS = TrainingConfig()
_DATASET_SETTINGS: dict[str, Any] = {
    "num_train_epochs": _DEFAULTS.num_train_epochs,
    "max_tokens": _DEFAULTS.max_tokens,
    "max_seconds": _DEFAULTS.max_seconds,
    "step_tokens": _DEFAULTS.step_tokens,
}
"""Settings for the length of training on a dataset, at their defaults. Group RL does not read them,
so with these values they do not change the ids of its results either."""


def supervised(recipe: Recipe, iteration: int, *, anew: bool = False) -> Training:
    """Return supervised fine-tuning in an iteration, counted from 1.

    Args:
        anew: start from the model that the run began with, whatever `training.start_from` says.
    """
    return Training(
        objective=Supervised(),
        config=recipe.training,
        num_train_epochs=recipe.num_train_epochs(iteration),
        from_base=anew or recipe.training.start_from == "base",
    )


# A run may have supervised training and group RL (`agent_r.phases`), which need different learning
# rates.
def group_relative(recipe: Recipe, *, anew: bool = False) -> Training:
    """Return group RL, which starts from the latest policy; settings of section `grpo` take
    precedence over section `training`.

    Args:
        anew: start from the model that the run began with instead.
    """
    grpo = recipe.grpo
    schedule_settings = {name: getattr(grpo, name) for name in SCHEDULE}
    schedule_changes: dict[str, Any] = {name: value for name, value in schedule_settings.items() if value is not None}
    schedule = schedule_changes.get("lr_scheduler_type", recipe.training.lr_scheduler_type)
    schedule_changes["lr_scheduler_kwargs"] = scheduler_kwargs_for(schedule, recipe.training)
    config = replace(on_one_machine(recipe.training), **_DATASET_SETTINGS, **schedule_changes)
    return Training(objective=GroupRelative(grpo=grpo), config=config, from_base=anew)


def group_demands(recipe: Recipe, num_test: int) -> dict[str, Demand]:
    """Return upper bounds on what group RL asks of models in an iteration, by purpose (`groups`,
    `cut`, `validate`).

    Args:
        num_test: the number of held-out episodes of all sets; the development set, which is played
            between the steps, is one of these.
    """
    grpo, evaluation = recipe.grpo, recipe.evaluation
    num_episodes = grpo.steps * grpo.groups * (1 + grpo.resample) * grpo.num_generations
    max_tokens = recipe.longest_reply(grpo.max_new_tokens)
    groups = Demand.episodes(num_episodes, steps=grpo.max_steps, max_new_tokens=max_tokens, limits=grpo.limits)
    demands = {"groups": groups}
    if grpo.revision_cut == "verdict":
        num_revisions = grpo.steps * (1 + grpo.resample) * round(grpo.revision_share * grpo.groups)
        num_verdicts = num_revisions * grpo.max_steps * recipe.critique.votes
        demands["cut"] = Demand.questions("judge", num_verdicts, recipe.critique.max_new_tokens)
    if not grpo.eval_steps:
        return demands
    num_validations = num_test * (grpo.steps // grpo.eval_steps)
    max_tokens, limits = recipe.longest_reply(evaluation.max_new_tokens), evaluation.limits
    return demands | {
        "validate": Demand.episodes(
            num_validations, steps=evaluation.max_steps, max_new_tokens=max_tokens, limits=limits
        )
    }


def group_rollout_config(recipe: Recipe) -> RolloutConfig:
    """Return how the policy acts in the episodes of group RL."""
    grpo = recipe.grpo
    sampling = grpo.sampling(temperature=1.0, max_new_tokens=grpo.max_new_tokens)
    return RolloutConfig(sampling=sampling, max_steps=grpo.max_steps, repeats=grpo.repeats, limits=grpo.limits)


def weight_swap_faults(recipe: Recipe) -> list[str]:
    """Return why group RL could not hand the weights of one step to the sampler of the next, one
    sentence each.
    """
    faults = online_faults(recipe.training)
    if recipe.model.backend == "openai":
        faults.append(
            "model.backend: group RL replaces the weights after each step, which a server that others started does not "
            "allow; set it to vllm or transformers, and name a directory in model.path"
        )
    if recipe.model.shares_gpus and _holds_gpu_memory(recipe.training):
        faults.append(
            "model.vllm.sleep: DeepSpeed leaves the GPU to nobody unless weights and optimizer are offloaded; set "
            "training.launch.deepspeed=zero3-offload, or training.launch.fsdp=true in its place"
        )
    if recipe.model.shares_gpus and recipe.grpo.staleness:
        faults.append(
            "grpo.staleness: with model.vllm.sleep, sampler and trainer take turns on the GPU, so nothing is sampled "
            "while a step is trained; leave one of them out"
        )
    reuses_sampler = recipe.model.backend == "vllm" or recipe.iterations > 1
    if reuses_sampler and recipe.training.publish == "adapter":
        faults.append(
            "training.publish: a sampler holds an adapter apart from its model, whose weights group RL replaces; leave "
            "it at merged"
        )
    return faults


def _holds_gpu_memory(training: TrainingConfig) -> bool:
    """Return whether the trainer holds its GPU memory throughout, so that no sampler can use it: it
    does under DeepSpeed without offloading.
    """
    launch = training.launch
    if launch is None or not launch.deepspeed:
        return False
    try:
        return not offloads(read_deepspeed(launch.deepspeed))
    except ConfigError:
        # `requirements` reports an unreadable DeepSpeed configuration.
        return False


def group_rl_faults(recipe: Recipe, *, is_only_phase: bool) -> list[str]:
    """Return what is wrong with a recipe that has iterations of phase `rl`, one sentence each.

    Args:
        is_only_phase: all iterations of the recipe are of phase `rl`.
    """
    faults = grpo_faults(recipe.grpo, recipe.training, recipe.data) if is_only_phase else group_faults(recipe.grpo)
    faults += weight_swap_faults(recipe)
    if recipe.context != "stop":
        faults.append("context: an iteration rl trains whole conversations; leave it out")
    return faults


def summary_faults(recipe: Recipe) -> list[str]:
    """Return a list of one sentence if a recipe has `context: summary`, else an empty list. For
    methods that join parts of different episodes, which summaries do not allow.
    """
    if recipe.context != "summary":
        return []
    return [
        f"context: method {recipe.method} puts parts of different episodes together, and a summary tells of its own "
        "alone; set stop or window, or take method grpo or eto"
    ]


def scheduler_kwargs_for(schedule: str, training: TrainingConfig) -> dict[str, Any]:
    """Return `lr_scheduler_kwargs` for the learning-rate schedule that a section other than
    `training` chooses: those of `training` if both name the same schedule, else the default.
    """
    return training.lr_scheduler_kwargs if schedule == training.lr_scheduler_type else _DEFAULTS.lr_scheduler_kwargs


def preference(recipe: Recipe, num_earlier: int) -> Training:
    """Return preference training; settings of section `eto.dpo` take precedence over section
    `training`. It starts from the latest policy, which is also the reference model.

    Args:
        num_earlier: how many earlier iterations trained on preferences.
    """
    dpo = recipe.eto.dpo
    config = replace(
        recipe.training,
        learning_rate=in_iteration(dpo.learning_rate, num_earlier + 1),
        max_tokens=dpo.max_tokens,
        step_tokens=0,
        per_device_train_batch_size=dpo.per_device_train_batch_size,
        gradient_accumulation_steps=dpo.gradient_accumulation_steps,
        lr_scheduler_type=dpo.lr_scheduler_type,
        lr_scheduler_kwargs=scheduler_kwargs_for(dpo.lr_scheduler_type, recipe.training),
        warmup_ratio=dpo.warmup_ratio,
    )
    loss = PreferenceLoss(
        beta=in_iteration(dpo.beta, num_earlier + 1),
        loss_type=tuple(dpo.loss_type),
        loss_weights=dpo.loss_weights,
        label_smoothing=dpo.label_smoothing,
        ld_alpha=dpo.ld_alpha,
    )
    return Training(
        objective=Preference(preference=loss),
        config=config,
        section="eto.dpo",
        num_train_epochs=in_iteration(dpo.num_train_epochs, num_earlier + 1),
    )


# Phrases that several methods use in what `agentr plan` prints.

MAX_REPEATS = 10
"""The most iterations after those in `values` for which `values_by_iteration` repeats the last
value.
"""


def values_by_iteration(recipe: Recipe, values: Sequence[str]) -> str:
    """Return the values of all iterations as text. The last value is repeated for later iterations;
    in a long run it is given once, with "from then on".
    """
    num_missing = recipe.iterations - len(values)
    if num_missing <= MAX_REPEATS:
        return ", ".join([*values, *[values[-1]] * num_missing])
    return f"{', '.join(values)} from then on"


def groups_phrase(recipe: Recipe, num_instances: int) -> str:
    """Return a phrase for what group RL does in an iteration: its steps, groups and instances."""
    grpo = recipe.grpo
    steps = "1 step" if grpo.steps == 1 else f"{grpo.steps} steps"
    phrase = f"{steps} of {grpo.groups} groups of {grpo.num_generations} episodes of {num_instances} instances"
    if grpo.revision_share:
        phrase += f", at most {grpo.revision_share:.0%} of the groups after a failed beginning of their instance"
        cut_phrases = {
            "random": "",
            "verdict": " up to the judge's first error",
            "value": " up to the largest drop of value",
        }
        phrase += cut_phrases[grpo.revision_cut]
    if grpo.expert_share:
        phrase += f", at most {grpo.expert_share:.0%} after the expert's first steps, where nothing was won"
    if grpo.distil is not None:
        scorer = recipe.models.scorer.label if recipe.models.scorer else "the model that the run begins with"
        phrase += f", whose tokens {scorer} scores (context: {grpo.distil.context})"
    return phrase


def unread_lines(recipe: Recipe) -> list[str]:
    """Return a line with the settings of supervised training that iterations of phase `rl` do not
    read; an empty list if the recipe has none.
    """
    unread_names = unread_online(recipe.training)
    return [f"an iteration rl does not read {', '.join(unread_names)}"] if unread_names else []


COLLECT = Stage(
    name="collect",
    about="Grow the trees of an iteration.",
    work=lazy_import("agentr_core.methods.agent_r.collect:collect"),
    check=lazy_import("agentr_core.methods.agent_r.collect:check_world"),
    reads=("environment", "model", "models.teacher", "teacher_iterations", "instances", "search", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor", "teacher"),
    spreads=True,
    gathers=True,
)
CRITIQUE = Stage(
    name="critique",
    about="Pair the paths of the trees and judge the bad ones.",
    work=lazy_import("agentr_core.methods.agent_r.critique:critique"),
    reads=("model", "models", "pairs", "critique"),
    needs=("gpu",),
    roles=("judge",),
)
SPLICE = Stage(
    name="splice",
    about="Make samples of the judged pairs and of the good paths.",
    work=lazy_import("agentr_core.methods.agent_r.splice:splice_pairs"),
    reads=("environment", "splice"),
    needs=("env",),
    check=lazy_import("agentr_core.methods.agent_r.splice:check_models"),
)
SPLICE_CONTINUED = replace(
    SPLICE,
    about="Make samples of the judged pairs, whose suffixes a model plays, and of the good paths.",
    reads=(*SPLICE.reads, "model", "models.teacher", "teacher_iterations", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor", "teacher"),
    spreads=True,
)
GOOD_PATHS = replace(
    SPLICE,
    about="Make samples of the good paths.",
    work=lazy_import("agentr_core.methods.agent_r.splice:keep_good_paths"),
)
DEMONSTRATE = Stage(
    name="demonstrate",
    about="Play the expert on the training instances of an iteration.",
    work=lazy_import("agentr_core.stages.demonstrate:demonstrate"),
    reads=("environment", "instances", "eto.expert"),
    needs=("env",),
    # The error message for a missing expert depends on the recipe's method.
    check=lambda recipe, env, instances: lazy_import("agentr_core.stages.demonstrate:check_expert")(
        recipe, env, instances, method_of(recipe)
    ),
    gathers=True,
)
CLONE = replace(
    DEMONSTRATE,
    about="Play the expert on the training instances of an iteration, and make samples of its episodes.",
    work=lazy_import("agentr_core.stages.demonstrate:expert_samples"),
)
THINK = Stage(
    name="think",
    about="Have the editor write a thought before each bare action of the expert.",
    work=lazy_import("agentr_core.stages.demonstrate:think"),
    reads=("environment", "model", "models.editor", "eto.expert.thoughts", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("editor",),
    gathers=True,
)
THINK_AND_CLONE = replace(
    THINK,
    about="Have the editor write a thought before each bare action of the expert, and make samples of its episodes.",
    work=lazy_import("agentr_core.stages.demonstrate:think_and_clone"),
)
EXPLORE = Stage(
    name="explore",
    about="Let the policy play the training instances of an iteration.",
    work=lazy_import("agentr_core.methods.eto.preferences:explore"),
    reads=(
        "environment",
        "model",
        "models.teacher",
        "teacher_iterations",
        "instances",
        "eto.explore",
        "errors",
        "scale",
    ),
    needs=("gpu", "env"),
    roles=("actor", "teacher"),
    spreads=True,
    gathers=True,
    check=lazy_import("agentr_core.methods.eto.preferences:check_state"),
)
EXPLORE_AND_KEEP = replace(
    EXPLORE,
    about="Let the policy play the training instances of an iteration, and make samples of its successes.",
    work=lazy_import("agentr_core.methods.eto.preferences:explore_and_keep"),
)
PREFER = Stage(
    name="prefer",
    about="Make the preference pairs of an iteration.",
    work=lazy_import("agentr_core.methods.eto.preferences:prefer"),
    reads=("eto.preferences",),
    needs=("env",),
    check=lazy_import("agentr_core.methods.eto.preferences:check_pairs"),
)
DATASET = Stage(
    name="dataset",
    about="Build the dataset of an iteration.",
    work=lazy_import("agentr_core.stages.dataset:dataset"),
    reads=("data",),
    makes="dataset",
)
TRAIN = Stage(
    name="train",
    about="Train on the dataset of an iteration.",
    work=lazy_import("agentr_core.stages.train:train"),
    reads=("training",),
    needs=("gpu",),
    makes="checkpoint",
)
TRAIN_ON_PAIRS = replace(TRAIN, reads=("training", "eto.dpo"))
REINFORCE = Stage(
    name="reinforce",
    about="Sample groups of episodes and train on them, step by step.",
    work=lazy_import("agentr_core.methods.grpo.train:reinforce"),
    check=lazy_import("agentr_core.methods.grpo.rollouts:check_world"),
    reads=(
        "environment",
        "model",
        "models.scorer",
        "instances",
        "grpo",
        "training",
        "evaluation.development",
        "errors",
    ),
    needs=("gpu", "env"),
    roles=("actor", "scorer"),
    makes="checkpoint",
)
REINFORCE_JUDGED = replace(
    REINFORCE, reads=(*REINFORCE.reads, "models.judge", "critique"), roles=(*REINFORCE.roles, "judge")
)
EVALUATE = Stage(
    name="evaluate",
    about="Evaluate the checkpoint of an iteration; 0 is the model the run began with.",
    work=lazy_import("agentr_core.stages.evaluate:evaluate"),
    reads=("model", "evaluation", "scale"),
    needs=("gpu", "env"),
    roles=("actor",),
    spreads=True,
)
EVALUATE_BASE = replace(EVALUATE, reads=("model", "evaluation"))


def reinforce_stage(grpo: GrpoConfig) -> Stage:
    """Return the stage of group RL: with a judge if revisions are cut at its first error."""
    return REINFORCE_JUDGED if grpo.revision_cut == "verdict" else REINFORCE


def splice_stage(config: SpliceConfig) -> Stage:
    """Return the stage that makes samples from judged pairs, with a model to play on if the splice
    mode needs one.
    """
    return SPLICE_CONTINUED if config.goes_on else SPLICE


def clone_stages(eto: EtoConfig) -> tuple[Stage, ...]:
    """Return the stages that make samples of the expert's episodes, with an editor's thoughts if
    the recipe enables them.
    """
    return (DEMONSTRATE, THINK_AND_CLONE) if eto.expert.thoughts.enabled else (CLONE,)


def demonstrate_stages(eto: EtoConfig) -> tuple[Stage, ...]:
    """Return the stages that play the expert, with an editor's thoughts if the recipe enables them;
    unlike those of `clone_stages`, they make no samples.
    """
    return (DEMONSTRATE, THINK) if eto.expert.thoughts.enabled else (DEMONSTRATE,)


FUNNEL_OF_TREES = Funnel(
    title="From trees to training rows", stages=lazy_import("agentr_core.methods.agent_r.report:tree_funnel")
)
FUNNEL_OF_EXPERT = Funnel(
    title="From the expert's episodes to training rows",
    stages=lazy_import("agentr_core.stages.report:expert_funnel"),
)
FUNNEL_OF_GROUPS = Funnel(
    title="From groups to trained episodes", stages=lazy_import("agentr_core.methods.grpo.report:funnel")
)
REVISIONS = ReportPart(sections=lazy_import("agentr_core.methods.agent_r.report:revision_sections"))
REVISION_SAMPLES = ReportPart(
    sections=lazy_import("agentr_core.methods.agent_r.report:sample_sections"), position="samples"
)
STEPS_OF_GROUPS = ReportPart(sections=lazy_import("agentr_core.methods.grpo.report:step_sections"))
PAIRS = ReportPart(sections=lazy_import("agentr_core.methods.eto.report:pair_sections"))
GROUPS_OF_RUN = ReportPart(sections=lazy_import("agentr_core.methods.grpo.report:run_sections"), position="run")
PAIRS_OF_RUN = ReportPart(sections=lazy_import("agentr_core.methods.eto.report:run_sections"), position="run")
AUDIT_OF_RUN = ReportPart(sections=lazy_import("agentr_core.methods.agent_r.report:run_sections"), position="run")
FIRST_ERROR = lazy_import("agentr_core.methods.agent_r.critique:first_error_in")
HAS_REFLECTION = lazy_import("agentr_core.methods.agent_r.splice:has_reflection")
TREE_ROLLOUT_CONFIG = lazy_import("agentr_core.methods.agent_r:rollout_config")
EXPLORATION_ROLLOUT_CONFIG = lazy_import("agentr_core.methods.eto:rollout_config")
PROSPECT_OF_TREES = lazy_import("agentr_core.methods.agent_r:foresee")
PROSPECT_OF_EXPLORATION = lazy_import("agentr_core.methods.eto:foresee")
