"""Comparisons: their arms, a recipe for each arm and seed, and the pool that arms train on.

The arms of method `compare` take their samples from one pool: the comparison's own run, in which
they were made once. So the arms differ only in what they are trained on and how. The run of the
comparison makes the pool and trains nothing; the run of an arm makes nothing and trains on the
pool. An arm that judges, pairs or splices in another way takes its samples from a pool of its own,
which has the same trees.

The arms of method `compare-runs` collect for themselves, each in a run with its own method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentr_core.errors import ConfigError
from agentr_core.methods.catalogue import (
    CLONE,
    COLLECT,
    CRITIQUE,
    DATASET,
    EVALUATE,
    EVALUATE_BASE,
    EXPLORE_AND_KEEP,
    FUNNEL_OF_EXPERT,
    FUNNEL_OF_TREES,
    GOOD_PATHS,
    HAS_REFLECTION,
    PAIRS,
    PREFER,
    REVISION_SAMPLES,
    REVISIONS,
    SPLICE,
    THINK_AND_CLONE,
    TRAIN_ON_PAIRS,
    TREE_ROLLOUT_CONFIG,
    clone_stages,
    preference,
    splice_stage,
    summary_faults,
    supervised,
)
from agentr_core.methods.faults import parse, unread_reason
from agentr_core.methods.table import method_named, method_names, method_of, plan_of
from agentr_core.recipes.data import DataConfig, Use
from agentr_core.recipes.eto import EtoConfig, eto_faults
from agentr_core.recipes.recipe import ADAPTER, OPTIONAL_SECTIONS, Recipe, replace, resolved
from agentr_core.reports.comparison import BASE_NAME
from agentr_core.runtime.context import Method, Plan, Stage, lazy_import
from agentr_core.runtime.machine import resolve_auto
from agentr_core.runtime.start import run_id_of
from agentr_core.texts import faults_message
from agentr_core.types import Sample, SampleKind

ARM_FIELDS = ("data.", "training.", "eto.dpo.")
"""Prefixes of the fields that an arm may change, except for those in `POOL_FIELDS` and
`BUDGET_FIELDS`. They decide neither what is in the pool nor how the arm is evaluated.
"""
SAMPLE_FIELDS = ("critique.", "pairs.", "splice.")
"""Prefixes of the fields that decide how samples are made from trees. An arm that changes one has
samples of its own, made from the trees of the pool.
"""
POOL_FIELDS = ("data.windowed", "data.scoring")
# A budget in tokens fixes the number of steps in advance, on any machine. How many steps fit into a
# budget in seconds depends on the machine and its load.
BUDGET_FIELDS = ("training.max_tokens", "training.max_seconds", "eto.dpo.max_tokens")
COMPARE_RUNS = "compare-runs"
FIXED_FIELDS = ("name", "workspace", "seed", "environment", "model", "instances.test", "evaluation", "compare", "scale")
"""Fields, or prefixes of fields, that no arm of `compare-runs` may change."""
KINDS_BY_USE: Mapping[str, frozenset[str]] = {
    "revision": frozenset({"revision"}),
    "good": frozenset({"good"}),
    "both": frozenset({"revision", "good"}),
    "both+expert": frozenset({"revision", "good", "expert"}),
    "expert": frozenset({"expert"}),
    "successes": frozenset({"successes"}),
    "rft": frozenset({"expert", "successes"}),
    "preferences": frozenset(),
}
"""The kinds of samples in a pool that an arm trains on, by its `data.use`; with `preferences`, it
trains on pairs, not samples."""
TREE_KINDS = frozenset({"revision", "good"})
"""The kinds of samples that are made from trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm with one seed: the recipe of its run.

    `is_whole_run` is true for a run that collects for itself, false for one that trains on the
    pool.
    """

    name: str
    seed: int
    recipe: Recipe
    is_whole_run: bool = False
    samples_recipe: Recipe | None = None
    """The recipe of the run that makes the arm's samples from the trees of the pool; None if its
    samples are in the pool.
    """


def arms_of(recipe: Recipe, pool: str = "") -> tuple[Arm, ...]:
    """Return each arm with each seed, in the order of the recipe, seed by seed within an arm.

    Args:
        pool: the id of the comparison's run, to be named in the recipes of its arms.

    Raises a single `ConfigError` that lists all faults of the comparison.
    """
    return _whole_run_arms(recipe) if recipe.method == COMPARE_RUNS else _pool_arms(recipe, pool)


def _pool_arms(recipe: Recipe, pool: str) -> tuple[Arm, ...]:
    faults = _faults_of_seeds(recipe)
    if not (recipe.training.max_tokens or recipe.training.max_seconds):
        faults.append(
            "training.max_tokens: give the number of trained tokens that every arm gets, or its time as "
            "training.max_seconds"
        )
    if not KINDS_BY_USE[recipe.data.use] or KINDS_BY_USE[recipe.data.use] - TREE_KINDS:
        faults.append(
            f"data.use: {recipe.data.use} is for an arm; here it says what the pool makes of trees: both, or only good "
            "(nobody is judged)"
        )
    if recipe.eto.phases != EtoConfig().phases:
        faults.append("eto.phases: has no use in a comparison; leave it out")
    if recipe.eto.preferences.level != "trajectory":
        faults.append(
            "eto.preferences.level: a comparison takes trajectory, since its exploration also gives whole successes"
        )
    arms: list[Arm] = []
    for name, changes in recipe.compare.arms.items():
        forbidden_changes = [
            change
            for change in changes
            if not change.startswith((*ARM_FIELDS, *SAMPLE_FIELDS)) or change.startswith((*BUDGET_FIELDS, *POOL_FIELDS))
        ]
        faults += [
            f"compare.arms.{name}: {change!r} is the same for all arms; an arm changes fields of data, training and "
            "eto.dpo, or of critique, pairs and splice, and not the budget"
            for change in forbidden_changes
        ]
        if forbidden_changes:
            continue
        try:
            arms += _arms_by_seed(recipe, name, pool)
        except ConfigError as error:
            faults.append(str(error))
    uses = {arm.name: arm.recipe.data.use for arm in arms}
    if recipe.data.use == "good":
        faults += [
            f"compare.arms.{name}: trains on revisions, and with data.use good the pool has none; set data.use to both"
            for name, use in uses.items()
            if "revision" in KINDS_BY_USE[use]
        ]
    if faults:
        raise ConfigError(faults_message(faults, f"recipe {recipe.name}"))
    return tuple(arms)


def sample_recipes(recipe: Recipe) -> tuple[Recipe, ...]:
    """Return the recipes of the runs that make samples for arms that do not take theirs from the
    pool, each recipe once. Raises `ConfigError` as `arms_of`.
    """
    recipes: list[Recipe] = []
    for arm in arms_of(recipe):
        if arm.samples_recipe and not any(
            _makes_same_samples(arm.samples_recipe, other) and arm.samples_recipe.data == other.data
            for other in recipes
        ):
            recipes.append(arm.samples_recipe)
    return tuple(recipes)


def with_arms(recipe: Recipe, arm_names: Sequence[str]) -> Recipe:
    """Return the recipe with only the named arms. Raises `ConfigError` if it lacks one of them."""
    unknown = [name for name in arm_names if name not in recipe.compare.arms]
    if unknown:
        available = ", ".join(recipe.compare.arms) or "none"
        raise ConfigError(f"recipe {recipe.name} has no arm {', '.join(map(repr, unknown))}; it has {available}")
    arms = {name: changes for name, changes in recipe.compare.arms.items() if name in arm_names}
    return replace(recipe, compare=dataclasses.replace(recipe.compare, arms=arms))


def _arms_by_seed(recipe: Recipe, name: str, pool: str) -> list[Arm]:
    """Return the named arm with each seed. Raises `ConfigError` if its changes are not valid or its
    training does not read one of them.
    """
    samples_recipe, samples_run_id = _samples_recipe(recipe, name, pool), ""
    if samples_recipe is not None:
        samples_run_id = run_id_of(samples_recipe, method_of(samples_recipe)) if pool else "unknown"
    arms = []
    for seed in recipe.compare.seeds:
        settings = resolved(recipe)
        settings |= {
            "name": f"{recipe.name}.{name}",
            "seed": seed,
            "compare": {"pool": pool or "unknown", "samples": samples_run_id},
        }
        settings["eto"]["dpo"]["max_tokens"] = recipe.training.max_tokens
        arm_recipe = resolve_auto(
            parse(settings, recipe.compare.arms[name], source=f"compare.arms.{name}", stored=True)
        )
        arms.append(Arm(name=name, seed=seed, recipe=arm_recipe, samples_recipe=samples_recipe))
    if arms:
        first_recipe, changes = arms[0].recipe, recipe.compare.arms[name]
        field_paths = [change.partition("=")[0].split(".") for change in changes if change.startswith("training.")]
        field_names = dict.fromkeys(field for _, field, *_ in field_paths)
        reasons = {
            field: unread_reason(field, getattr(first_recipe.training, field), plan_of(first_recipe, 1).training)
            for field in field_names
        }
        faults = [
            f"compare.arms.{name}: training.{field}: {reason}; leave it out"
            for field, reason in reasons.items()
            if reason
        ]
        if faults:
            raise ConfigError(faults_message(faults))
    return arms


def _samples_recipe(recipe: Recipe, name: str, pool: str) -> Recipe | None:
    """Return the recipe of the run that makes an arm's samples from the trees of a pool; None if
    its samples are in the pool. Raises `ConfigError` if the arm changes how samples are made from
    trees but does not train on such samples.
    """
    changes = recipe.compare.arms[name]
    sample_changes = [change for change in changes if change.startswith(SAMPLE_FIELDS)]
    if not sample_changes:
        return None
    other_changes = [change for change in changes if change not in sample_changes]
    settings = resolved(recipe) | {"name": f"{recipe.name}.samples"}
    settings["compare"] = {"arms": {name: other_changes}, "seeds": [recipe.seed], "trees": pool}
    samples_recipe = resolve_auto(parse(settings, sample_changes, source=f"compare.arms.{name}", stored=True))
    use = arms_of(samples_recipe)[0].recipe.data.use
    if not KINDS_BY_USE[use] & TREE_KINDS:
        raise ConfigError(
            f"compare.arms.{name}: {sample_changes[0]!r} is about samples of trees, and data.use {use} has none"
        )
    if _makes_same_samples(samples_recipe, recipe):
        return None
    # An arm that trains only on good paths needs no judge.
    return (
        replace(samples_recipe, data=dataclasses.replace(samples_recipe.data, use="good"))
        if use == "good"
        else samples_recipe
    )


def _makes_same_samples(first: Recipe, second: Recipe) -> bool:
    """Return whether two recipes have the same settings for making samples from trees. Which kinds
    of samples they make (`data.use`) may differ.
    """
    return (first.critique, first.pairs, first.splice) == (second.critique, second.pairs, second.splice)


def _whole_run_arms(recipe: Recipe) -> tuple[Arm, ...]:
    faults = _faults_of_seeds(recipe)
    arms: list[Arm] = []
    for name, changes in recipe.compare.arms.items():
        forbidden_changes = [change for change in changes if change.startswith(FIXED_FIELDS)]
        faults += [
            f"compare.arms.{name}: {change!r} is the same for all arms, or comes from compare.seeds; leave it out"
            for change in forbidden_changes
        ]
        if not forbidden_changes:
            try:
                arms += [
                    Arm(name=name, seed=seed, recipe=_whole_run_recipe(recipe, name, seed), is_whole_run=True)
                    for seed in recipe.compare.seeds
                ]
            except ConfigError as error:
                faults.append(str(error))
    if faults:
        raise ConfigError(faults_message(faults, f"recipe {recipe.name}"))
    return tuple(arms)


def _whole_run_recipe(recipe: Recipe, name: str, seed: int) -> Recipe:
    """Return the recipe of an arm's run: the comparison's recipe with the arm's changes, and with
    the defaults in sections that the arm's method does not read. Raises `ConfigError` if the arm
    does not name one method, or its recipe is not valid.
    """
    changes = recipe.compare.arms[name]
    methods = [change.removeprefix("method=").strip() for change in changes if change.startswith("method=")]
    available = [method for method in method_names() if method not in ("compare", COMPARE_RUNS, "base")]
    if len(methods) != 1 or methods[0] not in available:
        raise ConfigError(
            f"compare.arms.{name}: name the method of its run once, as method=NAME, one of {', '.join(available)}"
        )
    sections = method_named(methods[0]).sections
    settings, defaults = resolved(recipe), resolved(ADAPTER.validate_python({"name": recipe.name}))
    settings |= {section: defaults[section] for section in OPTIONAL_SECTIONS if section not in sections}
    settings |= {"name": f"{recipe.name}.{name}", "seed": seed}
    return resolve_auto(parse(settings, changes, source=f"compare.arms.{name}", stored=True))


def _faults_of_seeds(recipe: Recipe) -> list[str]:
    """Return what is wrong with the section `compare`, in a comparison of either kind: with the
    names of its arms, its seeds, and fields that are not for users.
    """
    compare, faults = recipe.compare, []
    faults += [
        f"compare.{field}: comparisons set it for their arms; leave it out"
        for field in ("pool", "samples")
        if getattr(compare, field)
    ]
    if not compare.arms:
        faults.append("compare.arms: name at least one")
    if BASE_NAME in compare.arms:
        faults.append(
            f"compare.arms.{BASE_NAME}: reports call the model so that all arms begin with; take another name"
        )
    if not compare.seeds:
        faults.append("compare.seeds: name at least one")
    if len(set(compare.seeds)) < len(compare.seeds):
        faults.append("compare.seeds: a seed comes twice, and would count twice")
    return faults


FUNNEL_OF_POOL = dataclasses.replace(FUNNEL_OF_TREES, title="From the pool to training rows")


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of the one iteration of a comparison, or of one of its arms."""
    if not recipe.compare.pool:
        return Plan(stages=pool_stages(recipe), funnel=FUNNEL_OF_TREES)
    use = recipe.data.use
    training = preference(recipe, 0) if use == "preferences" else supervised(recipe, iteration)
    return Plan(
        stages=(DATASET, TRAIN_ON_PAIRS, EVALUATE),
        training=training,
        phase=f"data.use {use}",
        takes_sample=sample_filter(use),
        funnel=FUNNEL_OF_EXPERT if use == "expert" else FUNNEL_OF_POOL,
    )


def pool_stages(recipe: Recipe) -> tuple[Stage, ...]:
    """Return the stages that make a comparison's pool, in order."""
    arms = arms_of(recipe)
    uses = {arm.recipe.data.use for arm in arms if arm.samples_recipe is None}
    return stages_for(recipe, uses, lends_trees=any(arm.samples_recipe for arm in arms))


def stages_for(recipe: Recipe, uses: Collection[str], *, lends_trees: bool) -> tuple[Stage, ...]:
    """Return the stages that make what arms train on, in order.

    Args:
        uses: the values of `data.use` of these arms.
        lends_trees: whether other runs make samples from the trees of this one.
    """
    kinds = frozenset[str]().union(*(KINDS_BY_USE[use] for use in uses))
    preferences = recipe.eto.preferences
    pair_source = preferences.source if "preferences" in uses else None
    needs_search = not TREE_KINDS.isdisjoint(kinds)
    needs_judge = recipe.data.use != "good"
    needs_expert = "expert" in kinds or (pair_source == "exploration" and preferences.against == "expert")
    stages = {
        COLLECT: needs_search or lends_trees or (pair_source == "trees" and not preferences.trees),
        CRITIQUE: needs_search and needs_judge,
        splice_stage(recipe.splice) if needs_judge else GOOD_PATHS: needs_search,
        **dict.fromkeys(clone_stages(recipe.eto), needs_expert),
        EXPLORE_AND_KEEP: "successes" in kinds or pair_source == "exploration",
        PREFER: pair_source is not None,
    }
    return tuple(stage for stage, needed in stages.items() if needed)


def sample_filter(use: Use) -> Callable[[Sample], bool]:
    """Return a function that tells whether an arm with this `data.use` trains on a sample of the
    pool. With `preferences`, it is false for every sample, since such an arm trains on pairs.

    A good path of a tree and a successful explored episode have the same kind, but only the former
    has a tree id.
    """

    def is_taken(sample: Sample) -> bool:
        is_explored = sample.kind == SampleKind.GOOD and not sample.provenance.tree_id
        return ("successes" if is_explored else str(sample.kind)) in KINDS_BY_USE[use]

    return is_taken


def _drop_arm_fields(recipe: Recipe, settings: dict[str, Any]) -> None:
    """Remove the fields that arms may change from the data that a comparison's run id is made from,
    since they do not affect the pool. The data of an arm are left as they are.
    """
    if not recipe.compare.pool:
        del settings["training"], settings["eto"]["dpo"]
        # Fields at their defaults are left out, so that existing ids stay the same.
        names = [path.removeprefix("data.") for path in POOL_FIELDS]
        changed = {name: getattr(recipe.data, name) for name in names}
        changed = {name: value for name, value in changed.items() if value != getattr(DataConfig(), name)}
        settings["data"] = {"use": recipe.data.use, **changed} if changed else recipe.data.use


def _faults(recipe: Recipe) -> list[str]:
    # A comparison can make pairs from its own trees, so it need not name a run that has some.
    faults = eto_faults(recipe.eto, own_trees=True) + summary_faults(recipe)
    if recipe.data.suffixes == "exchanged" and "revision" not in KINDS_BY_USE[recipe.data.use]:
        faults.append(f"data.suffixes: exchanges those of revisions, and data.use {recipe.data.use} has none")
    if recipe.data.replay:
        faults.append("data.replay: a comparison has no earlier iterations; leave it out")
    return faults


def _check_arms(recipe: Recipe) -> None:
    if recipe.compare.trees:
        raise ConfigError(f"recipe {recipe.name}: compare.trees: comparisons set it for their samples; leave it out")
    arms_of(recipe)


METHOD = Method(
    name="compare",
    title="comparison",
    flow="compare",
    sections=("search", "critique", "pairs", "splice", "eto", "compare"),
    stages=(
        COLLECT,
        CRITIQUE,
        SPLICE,
        CLONE,
        THINK_AND_CLONE,
        EXPLORE_AND_KEEP,
        PREFER,
        DATASET,
        TRAIN_ON_PAIRS,
        EVALUATE,
    ),
    plan=plan,
    before=(EVALUATE_BASE,),
    faults=_faults,
    check_recipe=_check_arms,
    trained_recipes=lambda recipe: [recipe] if recipe.compare.pool else [arm.recipe for arm in arms_of(recipe)],
    trim_identity=_drop_arm_fields,
    rollout_config=TREE_ROLLOUT_CONFIG,
    has_reflection=HAS_REFLECTION,
    drawn_on_stages=lazy_import("agentr_core.methods.comparison.report:used_stages"),
    report=(REVISIONS, PAIRS, REVISION_SAMPLES),
    without_expert=(
        "name a file of demonstrations in eto.expert.file, or do without it: no arm with data.use expert, both+expert "
        "or rft, and eto.preferences.against own"
    ),
)


# Methods that collect for themselves cannot learn from one pool. Here the arms share the model that
# they begin with and the instances on which they are evaluated; how much each sampled and trained
# is reported beside its scores. The run of an arm is an ordinary one, with its own iterations and
# reports.


def _check_whole_run_arms(recipe: Recipe) -> None:
    arms_of(recipe)


WHOLE_RUNS_METHOD = Method(
    name=COMPARE_RUNS,
    title="comparison of whole runs",
    flow="compare",
    sections=OPTIONAL_SECTIONS,
    stages=(),
    # The comparison itself does not collect, train or evaluate.
    plan=lambda recipe, iteration: Plan(stages=()),
    check_recipe=_check_whole_run_arms,
    trained_recipes=lambda recipe: [arm.recipe for arm in arms_of(recipe)],
    shared_stages=(),
)
