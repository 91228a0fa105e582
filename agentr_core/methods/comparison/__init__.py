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
    IN_TREES,
    PAIRS,
    PREFER,
    REVISION_SAMPLES,
    REVISIONS,
    SPLICE,
    THINK_AND_CLONE,
    TRAIN_ON_PAIRS,
    VOICED,
    cloning,
    preference,
    splice_stage,
    summary_faults,
    supervised,
)
from agentr_core.methods.faults import parse, why_unread
from agentr_core.methods.table import method_named, method_of, names, plan_of
from agentr_core.recipes.data import DataConfig, Use
from agentr_core.recipes.eto import EtoConfig, eto_faults
from agentr_core.recipes.recipe import ADAPTER, OPTIONAL, Recipe, replace, resolved
from agentr_core.reports.comparison import BASE
from agentr_core.runtime.machine import settle
from agentr_core.runtime.place import Method, Plan, Stage, imported
from agentr_core.runtime.start import run_id_of
from agentr_core.texts import fault_list
from agentr_core.types import Sample, SampleKind

OPEN = ("data.", "training.", "eto.dpo.")
"""Prefixes of the fields that an arm may change, except for those in `OF_POOL` and `BUDGET`. They
decide neither what is in the pool nor how the arm is evaluated.
"""
OF_SAMPLES = ("critique.", "pairs.", "splice.")
"""Prefixes of the fields that decide how samples are made from trees. An arm that changes one has
samples of its own, made from the trees of the pool.
"""
OF_POOL = ("data.windowed", "data.scoring")
# A budget in tokens fixes the number of steps in advance, on any machine. How many steps fit into a
# budget in seconds depends on the machine and its load.
BUDGET = ("training.max_tokens", "training.max_seconds", "eto.dpo.max_tokens")
RUNS = "compare-runs"
SAME = ("name", "workspace", "seed", "environment", "model", "instances.test", "evaluation", "compare", "scale")
"""Fields, or prefixes of fields, that no arm of `compare-runs` may change."""
TAKEN: Mapping[str, frozenset[str]] = {
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
OF_TREES = frozenset({"revision", "good"})
"""The kinds of samples that are made from trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm with one seed: the recipe of its run.

    `whole` is true for a run that collects for itself, false for one that trains on the pool.
    """

    name: str
    seed: int
    recipe: Recipe
    whole: bool = False
    samples: Recipe | None = None
    """The recipe of the run that makes the arm's samples from the trees of the pool; None if its
    samples are in the pool.
    """


def arms_of(recipe: Recipe, pool: str = "") -> tuple[Arm, ...]:
    """Return each arm with each seed, in the order of the recipe, seed by seed within an arm.

    Args:
        pool: the id of the comparison's run, to be named in the recipes of its arms.

    Raises a single `ConfigError` that lists all faults of the comparison.
    """
    return _whole_arms(recipe) if recipe.method == RUNS else _pool_arms(recipe, pool)


def _pool_arms(recipe: Recipe, pool: str) -> tuple[Arm, ...]:
    faults = _faults_of_seeds(recipe)
    if not (recipe.training.max_tokens or recipe.training.max_seconds):
        faults.append(
            "training.max_tokens: give the number of trained tokens that every arm gets, or its time as "
            "training.max_seconds"
        )
    if not TAKEN[recipe.data.use] or TAKEN[recipe.data.use] - OF_TREES:
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
        strange = [
            change
            for change in changes
            if not change.startswith((*OPEN, *OF_SAMPLES)) or change.startswith((*BUDGET, *OF_POOL))
        ]
        faults += [
            f"compare.arms.{name}: {change!r} is the same for all arms; an arm changes fields of data, training and "
            "eto.dpo, or of critique, pairs and splice, and not the budget"
            for change in strange
        ]
        if strange:
            continue
        try:
            arms += _of_each_seed(recipe, name, pool)
        except ConfigError as error:
            faults.append(str(error))
    uses = {arm.name: arm.recipe.data.use for arm in arms}
    if recipe.data.use == "good":
        faults += [
            f"compare.arms.{name}: trains on revisions, and with data.use good the pool has none; set data.use to both"
            for name, use in uses.items()
            if "revision" in TAKEN[use]
        ]
    if faults:
        raise ConfigError(fault_list(faults, f"recipe {recipe.name}"))
    return tuple(arms)


def makers_of_samples(recipe: Recipe) -> tuple[Recipe, ...]:
    """Return the recipes of the runs that make samples for arms that do not take theirs from the
    pool, each recipe once. Raises `ConfigError` as `arms_of`.
    """
    makers: list[Recipe] = []
    for arm in arms_of(recipe):
        if arm.samples and not any(_alike(arm.samples, maker) and arm.samples.data == maker.data for maker in makers):
            makers.append(arm.samples)
    return tuple(makers)


def with_arms(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """Return the recipe with only the named arms. Raises `ConfigError` if it lacks one of them."""
    unknown = [name for name in names if name not in recipe.compare.arms]
    if unknown:
        available = ", ".join(recipe.compare.arms) or "none"
        raise ConfigError(f"recipe {recipe.name} has no arm {', '.join(map(repr, unknown))}; it has {available}")
    arms = {name: changes for name, changes in recipe.compare.arms.items() if name in names}
    return replace(recipe, compare=dataclasses.replace(recipe.compare, arms=arms))


def _of_each_seed(recipe: Recipe, name: str, pool: str) -> list[Arm]:
    """Return the named arm with each seed. Raises `ConfigError` if its changes are not valid or its
    training does not read one of them.
    """
    samples, run = _spliced(recipe, name, pool), ""
    if samples is not None:
        run = run_id_of(samples, method_of(samples)) if pool else "unknown"
    arms = []
    for seed in recipe.compare.seeds:
        plain = resolved(recipe)
        plain |= {"name": f"{recipe.name}.{name}", "seed": seed, "compare": {"pool": pool or "unknown", "samples": run}}
        plain["eto"]["dpo"]["max_tokens"] = recipe.training.max_tokens
        arm_recipe = settle(parse(plain, recipe.compare.arms[name], source=f"compare.arms.{name}", stored=True))
        arms.append(Arm(name=name, seed=seed, recipe=arm_recipe, samples=samples))
    if arms:
        arm, changes = arms[0].recipe, recipe.compare.arms[name]
        field_paths = [change.partition("=")[0].split(".") for change in changes if change.startswith("training.")]
        fields = dict.fromkeys(field for _, field, *_ in field_paths)
        reasons = {field: why_unread(field, getattr(arm.training, field), plan_of(arm, 1).training) for field in fields}
        faults = [
            f"compare.arms.{name}: training.{field}: {reason}; leave it out"
            for field, reason in reasons.items()
            if reason
        ]
        if faults:
            raise ConfigError(fault_list(faults))
    return arms


def _spliced(recipe: Recipe, name: str, pool: str) -> Recipe | None:
    """Return the recipe of the run that makes an arm's samples from the trees of a pool; None if
    its samples are in the pool. Raises `ConfigError` if the arm changes how samples are made from
    trees but does not train on such samples.
    """
    changes = recipe.compare.arms[name]
    sample_changes = [change for change in changes if change.startswith(OF_SAMPLES)]
    if not sample_changes:
        return None
    rest = [change for change in changes if change not in sample_changes]
    plain = resolved(recipe) | {"name": f"{recipe.name}.samples"}
    plain["compare"] = {"arms": {name: rest}, "seeds": [recipe.seed], "trees": pool}
    maker = settle(parse(plain, sample_changes, source=f"compare.arms.{name}", stored=True))
    use = arms_of(maker)[0].recipe.data.use
    if not TAKEN[use] & OF_TREES:
        raise ConfigError(
            f"compare.arms.{name}: {sample_changes[0]!r} is about samples of trees, and data.use {use} has none"
        )
    if _alike(maker, recipe):
        return None
    # An arm that trains only on good paths needs no judge.
    return replace(maker, data=dataclasses.replace(maker.data, use="good")) if use == "good" else maker


def _alike(first: Recipe, second: Recipe) -> bool:
    """Return whether two recipes have the same settings for making samples from trees. Which kinds
    of samples they make (`data.use`) may differ.
    """
    return (first.critique, first.pairs, first.splice) == (second.critique, second.pairs, second.splice)


def _whole_arms(recipe: Recipe) -> tuple[Arm, ...]:
    faults = _faults_of_seeds(recipe)
    arms: list[Arm] = []
    for name, changes in recipe.compare.arms.items():
        strange = [change for change in changes if change.startswith(SAME)]
        faults += [
            f"compare.arms.{name}: {change!r} is the same for all arms, or comes from compare.seeds; leave it out"
            for change in strange
        ]
        if not strange:
            try:
                arms += [
                    Arm(name=name, seed=seed, recipe=_whole(recipe, name, seed), whole=True)
                    for seed in recipe.compare.seeds
                ]
            except ConfigError as error:
                faults.append(str(error))
    if faults:
        raise ConfigError(fault_list(faults, f"recipe {recipe.name}"))
    return tuple(arms)


def _whole(recipe: Recipe, name: str, seed: int) -> Recipe:
    """Return the recipe of an arm's run: the comparison's recipe with the arm's changes, and with
    the defaults in sections that the arm's method does not read. Raises `ConfigError` if the arm
    does not name one method, or its recipe is not valid.
    """
    changes = recipe.compare.arms[name]
    methods = [change.removeprefix("method=").strip() for change in changes if change.startswith("method=")]
    possible = [method for method in names() if method not in ("compare", RUNS, "base")]
    if len(methods) != 1 or methods[0] not in possible:
        raise ConfigError(
            f"compare.arms.{name}: name the method of its run once, as method=NAME, one of {', '.join(possible)}"
        )
    sections = method_named(methods[0]).sections
    plain, defaults = resolved(recipe), resolved(ADAPTER.validate_python({"name": recipe.name}))
    plain |= {section: defaults[section] for section in OPTIONAL if section not in sections}
    plain |= {"name": f"{recipe.name}.{name}", "seed": seed}
    return settle(parse(plain, changes, source=f"compare.arms.{name}", stored=True))


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
    if BASE in compare.arms:
        faults.append(f"compare.arms.{BASE}: reports call the model so that all arms begin with; take another name")
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
        takes=taking(use),
        funnel=FUNNEL_OF_EXPERT if use == "expert" else FUNNEL_OF_POOL,
    )


def pool_stages(recipe: Recipe) -> tuple[Stage, ...]:
    """Return the stages that make a comparison's pool, in order."""
    arms = arms_of(recipe)
    uses = {arm.recipe.data.use for arm in arms if arm.samples is None}
    return stages_for(recipe, uses, lends_trees=any(arm.samples for arm in arms))


def stages_for(recipe: Recipe, uses: Collection[str], *, lends_trees: bool) -> tuple[Stage, ...]:
    """Return the stages that make what arms train on, in order.

    Args:
        uses: the values of `data.use` of these arms.
        lends_trees: whether other runs make samples from the trees of this one.
    """
    kinds = frozenset[str]().union(*(TAKEN[use] for use in uses))
    preferences = recipe.eto.preferences
    pair_source = preferences.source if "preferences" in uses else None
    searched = not OF_TREES.isdisjoint(kinds)
    judged = recipe.data.use != "good"
    cloned = "expert" in kinds or (pair_source == "exploration" and preferences.against == "expert")
    stages = {
        COLLECT: searched or lends_trees or (pair_source == "trees" and not preferences.trees),
        CRITIQUE: searched and judged,
        splice_stage(recipe.splice) if judged else GOOD_PATHS: searched,
        **dict.fromkeys(cloning(recipe.eto), cloned),
        EXPLORE_AND_KEEP: "successes" in kinds or pair_source == "exploration",
        PREFER: pair_source is not None,
    }
    return tuple(stage for stage, needed in stages.items() if needed)


def taking(use: Use) -> Callable[[Sample], bool]:
    """Return a function that tells whether an arm with this `data.use` trains on a sample of the
    pool. With `preferences`, it is false for every sample, since such an arm trains on pairs.

    A good path of a tree and a successful explored episode have the same kind, but only the former
    has a tree id.
    """

    def takes(sample: Sample) -> bool:
        explored = sample.kind == SampleKind.GOOD and not sample.provenance.tree_id
        return ("successes" if explored else str(sample.kind)) in TAKEN[use]

    return takes


def _identify(recipe: Recipe, plain: dict[str, Any]) -> None:
    """Remove the fields that arms may change from the data that a comparison's run id is made from,
    since they do not affect the pool. The data of an arm are left as they are.
    """
    if not recipe.compare.pool:
        del plain["training"], plain["eto"]["dpo"]
        # Fields at their defaults are left out, so that existing ids stay the same.
        use, windowing = recipe.data.use, recipe.data.windowed
        plain["data"] = use if windowing == DataConfig().windowed else {"use": use, "windowed": windowing}


def _faults(recipe: Recipe) -> list[str]:
    # A comparison can make pairs from its own trees, so it need not name a run that has some.
    faults = eto_faults(recipe.eto, own_trees=True) + summary_faults(recipe)
    if recipe.data.suffixes == "exchanged" and "revision" not in TAKEN[recipe.data.use]:
        faults.append(f"data.suffixes: exchanges those of revisions, and data.use {recipe.data.use} has none")
    if recipe.data.replay:
        faults.append("data.replay: a comparison has no earlier iterations; leave it out")
    return faults


def _settle(recipe: Recipe) -> None:
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
    settle=_settle,
    trained=lambda recipe: [recipe] if recipe.compare.pool else [arm.recipe for arm in arms_of(recipe)],
    identify=_identify,
    acting=IN_TREES,
    voiced=VOICED,
    drawn_on=imported("agentr_core.methods.comparison.report:drawn_on"),
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


def _settle_whole(recipe: Recipe) -> None:
    arms_of(recipe)


WHOLE_RUNS = Method(
    name=RUNS,
    title="comparison of whole runs",
    flow="compare",
    sections=OPTIONAL,
    stages=(),
    # The comparison itself does not collect, train or evaluate.
    plan=lambda recipe, iteration: Plan(stages=()),
    settle=_settle_whole,
    trained=lambda recipe: [arm.recipe for arm in arms_of(recipe)],
    taken_over=(),
)
