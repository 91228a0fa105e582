"""Which instances an iteration collects from, and which are held out."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from agentr_core.environment import Environment
from agentr_core.errors import ConfigError, DataFault, EnvironmentFault, IllTypedAnswer, Transient
from agentr_core.fingerprint import derive_seed
from agentr_core.recipes.environments import TEST, EvaluationSetConfig, InstancesConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import Product, RunContext, Stage
from agentr_core.store.codec.samples import chosen_instance_rows, load_chosen_instances
from agentr_core.store.codec.trajectories import instance_row
from agentr_core.store.queries.runs import iteration_products, iteration_state, outside_trainings
from agentr_core.store.tables import Rows, merge
from agentr_core.system import raise_if_cancelled, run_in_thread
from agentr_core.types import Instance

MAX_INSTANCES = 1_000_000
"""The most instances of a whole split: worlds with renamed or invented goals have splits without
end, of which a recipe takes a part.
"""
_CANDIDATES_PER_INSTANCE = 100
"""The search for instances of a given depth or length looks at this many for each one wanted."""
_MAX_VARIANTS = 100
"""At most this many instances are looked at to find one whose origin was not chosen yet."""
TRAIN = "train"
SELECTED = "selected"
"""Names in the store for what the instances of an iteration are chosen for: it collects from all,
and trains on the selected ones if it selects any.
"""


def training_instances(recipe: Recipe, env: Environment, iteration: int) -> tuple[Instance, ...]:
    """Return the training instances of an iteration: `train_limit` of the training splits, split by
    split, each in its order.

    They are drawn anew for each iteration, or once for all iterations (`instances.draw`), from
    those that `instances.only` names, in the shares of `instances.depths`, and only with as many
    steps of the expert as `instances.expert_steps` allows; each setting has the value that
    `instances.from_iteration` gives it in that iteration. Raises `ConfigError` if a split lacks an
    instance that is named, has too few suitable ones, or is too large to be taken whole.
    """
    config = recipe.instances.at_iteration(iteration)
    rng = random.Random(derive_seed(recipe.seed, "instances", 1 if config.draw == "fixed" else iteration))
    chosen: list[Instance] = []
    for split, limit in config.training_splits.items():
        split_config = replace(config, train=split, train_limit=limit)
        instances = _named_instances(env.instances(split), split_config)
        if split_config.depths or split_config.expert_steps:
            chosen += _suitable_instances(instances, split_config, env, rng)
        elif not limit or limit >= len(instances):
            chosen += _whole_split(instances, split, "instances.train_limit")
        else:
            chosen += [instances[position] for position in sorted(rng.sample(range(len(instances)), limit))]
    return _checked_distinct(chosen)


def _checked_distinct(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return instances unchanged. Raises `IllTypedAnswer` if one occurs twice."""
    all_ = tuple(instances)
    if len(set(all_)) < len(all_):
        twice = Counter(all_).most_common(1)[0][0]
        raise IllTypedAnswer(
            f"environment {twice.environment} lists instance {twice.key} twice; `instances` must return each once"
        )
    return all_


def _suitable_instances(
    instances: Sequence[Instance], config: InstancesConfig, env: Environment, rng: random.Random
) -> tuple[Instance, ...]:
    """Return `train_limit` random instances, in the shares of `depths`, that the expert solves in a
    number of steps within `expert_steps`. Raises `ConfigError` if too few are found.
    """
    # How many are missing of each depth; of depth None, if any depth will do.
    num_missing: dict[int | None, int] = {None: config.train_limit}
    if config.depths:
        shares = itertools.accumulate(config.depths.values(), initial=0.0)
        bounds = [round(share * config.train_limit) for share in shares]
        num_missing = {
            depth: high - low for depth, (low, high) in zip(config.depths, itertools.pairwise(bounds), strict=True)
        }
    num_candidates = min(len(instances), _CANDIDATES_PER_INSTANCE * config.train_limit)
    positions: list[int] = []
    for position in rng.sample(range(len(instances)), num_candidates):
        if not any(num_missing.values()):
            break
        depth = env.depth(instances[position]) if config.depths else None
        if not num_missing.get(depth):
            continue
        if config.expert_steps is not None:
            replies, (fewest, most) = env.expert(instances[position]), config.expert_steps
            if replies is None or not fewest <= len(replies) <= most:
                continue
        num_missing[depth] -= 1
        positions.append(position)
    if any(num_missing.values()):
        fields = [name for name in ("depths", "expert_steps") if getattr(config, name)]
        missing = ", ".join(
            f"{count}{'' if depth is None else f' of depth {depth}'}" for depth, count in num_missing.items() if count
        )
        raise ConfigError(
            f"instances.{' and instances.'.join(fields)}: of {num_candidates:,} instances of split {config.train}, too "
            f"few are as wanted ({missing} are missing); change {'these' if len(fields) > 1 else 'this'}, or lower "
            "instances.train_limit"
        )
    return tuple(instances[position] for position in sorted(positions))


def _named_instances(instances: Sequence[Instance], config: InstancesConfig) -> Sequence[Instance]:
    """Return the instances of a split that `instances.only` names; all if it names none. Raises
    `ConfigError` if one of a list is missing, or all of a range.
    """
    numbers = config.numbers()
    if not config.only:
        return instances
    highest = numbers[-1] if isinstance(numbers, range) else max(numbers)
    if highest < len(instances) and all(instances[number].index == number for number in numbers):
        # A split that counts from 0 may hold billions of instances, and need not be searched.
        return [instances[number] for number in sorted(numbers)]
    indices = numbers if isinstance(numbers, range) else frozenset(numbers)
    named = [instance for instance in instances if instance.index in indices]
    missing = sorted(set(numbers) - {instance.index for instance in named}) if isinstance(indices, frozenset) else []
    if missing or not named:
        which = f"no instance {', '.join(map(str, missing[:5]))}" if missing else f"none of {config.only}"
        least, most = min(i.index for i in instances), max(i.index for i in instances)
        raise ConfigError(
            f"instances.only: split {config.train} of the environment has {which}; it has {len(instances)} instances, "
            f"numbered from {least} to {most}"
        )
    return named


def test_instances(recipe: Recipe, env: Environment) -> tuple[Instance, ...]:
    """Return the held-out instances: the whole test split, or `test_limit` instances spread evenly
    over it. Raises `ConfigError` for a whole split that is too large.
    """
    config = recipe.instances
    instances = env.instances(config.test)
    return _checked_distinct(
        _limited_instances(instances, config.test, config.test_limit, "instances.test_limit", env, spread=True)
    )


def instances_of_set(chosen: EvaluationSetConfig, env: Environment) -> tuple[Instance, ...]:
    """Return the instances of a further evaluation set. Raises as `test_instances`."""
    instances = env.instances(chosen.split)
    return _checked_distinct(
        _limited_instances(instances, chosen.split, chosen.limit, "limit of the set", env, spread=chosen.spread)
    )


def held_out_instances(recipe: Recipe, env: Environment) -> tuple[Instance, ...]:
    """Return every instance that an evaluation plays, each once."""
    return tuple(dict.fromkeys(itertools.chain(*_list_held_out(recipe, env).values())))


def _list_held_out(recipe: Recipe, env: Environment) -> dict[str, tuple[Instance, ...]]:
    further = {name: instances_of_set(chosen, env) for name, chosen in recipe.evaluation.sets.items()}
    return {TEST: test_instances(recipe, env), **further}


def held_out_by_set(ctx: RunContext) -> dict[str, tuple[Instance, ...]]:
    """Return the held-out instances by evaluation set. The first caller chooses and stores them;
    later ones load them.

    The test instances of several worlds form one set. The arms of a comparison use those of the
    comparison's run.
    """
    base_iteration_id = ctx.source_id(0)
    if choice := load_chosen_instances(ctx.store, base_iteration_id):
        return choice
    chosen: dict[str, tuple[Instance, ...]] = {TEST: ()}
    rows: list[Rows] = []
    with ctx.worlds() as worlds:
        for recipe, env in worlds:
            sets = _list_held_out(recipe, env)
            rows.append(instance_rows(env, dict.fromkeys(itertools.chain(*sets.values()))))
            chosen |= {**sets, TEST: chosen[TEST] + sets[TEST]}
    ctx.store.write({**merge(rows), **chosen_instance_rows(base_iteration_id, chosen)})
    return chosen


def num_held_out_episodes(recipe: Recipe, env: Environment) -> int:
    """Return how many held-out episodes each iteration plays, not counting those of the revision
    test.
    """
    sets = [chosen for chosen in recipe.evaluation.sets.values() if chosen.models == "all"]
    further = sum(chosen.episodes * len(instances_of_set(chosen, env)) for chosen in sets)
    return recipe.evaluation.episodes * len(test_instances(recipe, env)) + further


def max_revision_episodes(recipe: Recipe, env: Environment) -> int:
    """Return the largest number of episodes of the revision test that an iteration may play: that
    if the base model fails everywhere.
    """
    config = recipe.evaluation.revision_test
    if not config.enabled:
        return 0
    cuts = config.cuts * recipe.evaluation.episodes * len(test_instances(recipe, env))
    return min(config.limit or cuts, cuts)


def instance_rows(env: Environment, instances: Collection[Instance]) -> Rows:
    """Return the rows of instances, with depth, origin and facts from their environment."""
    facts = [(i, env.facts(i)) for i in instances if env.has(Environment.facts)]
    return {
        "instance": [instance_row(i, env.depth(i), env.origin(i)) for i in instances],
        "instance_facts": [{"instance_id": i.key, "facts": description} for i, description in facts if description],
    }


def _whole_split(instances: Sequence[Instance], split: str, field: str) -> tuple[Instance, ...]:
    if len(instances) > MAX_INSTANCES:
        raise ConfigError(f"split {split} has {len(instances):,} instances, too many to take them all; set {field}")
    return tuple(instances)


def _limited_instances(
    instances: Sequence[Instance], split: str, limit: int, field: str, env: Environment, *, spread: bool
) -> tuple[Instance, ...]:
    """Return the first `limit` instances of a split or, with `spread`, one from each of `limit`
    stretches of equal length. A split may list the variants of each instance in a fixed cycle, so
    that evenly spaced instances would come from few origins: of each stretch, the first instance
    whose origin was chosen least often is taken.
    """
    if not limit or limit >= len(instances):
        return _whole_split(instances, split, field)
    if not spread:
        return tuple(instances[position] for position in range(limit))
    origin_counts: Counter[Instance] = Counter()
    chosen: list[Instance] = []
    for number in range(limit):
        start, end = (boundary * len(instances) // limit for boundary in (number, number + 1))
        stretch = [instances[position] for position in range(start, min(end, start + _MAX_VARIANTS))]
        instance = min(stretch, key=lambda candidate: origin_counts[env.origin(candidate)])
        origin_counts[env.origin(instance)] += 1
        chosen.append(instance)
    return tuple(chosen)


# The choice is stored: a later stage that chose again would have to open every world, and might
# choose differently.
async def chosen_instances(ctx: RunContext, iteration: int) -> tuple[Instance, ...]:
    """Return the instances of an iteration, once these and the held-out ones are stored and checked
    not to overlap.

    Later stages of the iteration load what its first one chose. Raises `DataFault` as
    `check_no_overlap`.
    """
    iteration_id = ctx.iteration_id(iteration)
    if choice := load_chosen_instances(ctx.store, iteration_id):
        return choice[TRAIN]
    instances, rows = await _choose_instances(ctx, iteration)
    ctx.store.write({**rows, **chosen_instance_rows(iteration_id, {TRAIN: instances})})
    return instances


async def planned_instances(ctx: RunContext, iteration: int) -> tuple[Instance, ...]:
    """Return the instances that an iteration chose or will choose; see `chosen_instances`.

    The instances are stored, but not as the choice of the iteration: one that has not begun has no
    row that the choice could refer to.
    """
    if choice := load_chosen_instances(ctx.store, ctx.iteration_id(iteration)):
        return choice[TRAIN]
    instances, rows = await _choose_instances(ctx, iteration)
    ctx.store.write(rows)
    return instances


async def _choose_instances(ctx: RunContext, iteration: int) -> tuple[tuple[Instance, ...], Rows]:
    """Return the instances of an iteration, and the rows of these and of the held-out ones."""
    instances: list[Instance] = []
    rows: list[Rows] = []
    with ctx.worlds() as worlds:
        for recipe, env in worlds:
            chosen, test_set = training_instances(recipe, env, iteration), held_out_instances(recipe, env)
            await run_in_thread(check_no_overlap, env, chosen, test_set)
            rows.append(instance_rows(env, (*chosen, *test_set)))
            instances += chosen
    return tuple(instances), merge(rows)


async def trained_instances(ctx: RunContext, iteration: int) -> tuple[Instance, ...]:
    """Return the instances that an iteration trains on: those that one of its stages selected, or
    all if none selects. Raises as `chosen_instances`.
    """
    return load_chosen_instances(ctx.store, ctx.iteration_id(iteration)).get(SELECTED) or await chosen_instances(
        ctx, iteration
    )


def check_no_overlap(
    env: Environment, train: tuple[Instance, ...], test: tuple[Instance, ...], *, resets: bool = True
) -> None:
    """Raise `DataFault` if a training instance is a held-out instance, or a variant of one, under
    any name. Without `resets` only origins are compared, and no instance is reset.

    An instance whose reset fails or returns no text is compared by its origin alone: its episodes
    will fail, and count against the error budget. Blocks as the environment's `reset` does, and
    raises its transient faults.
    """
    held_out_key_by_text: dict[str, str] = {}
    for instance in test:
        raise_if_cancelled()
        held_out_key_by_text |= dict.fromkeys(_identifying_texts(env, instance, resets), instance.key)
    for instance in train:
        raise_if_cancelled()
        held_out_key = next(
            (
                held_out_key_by_text[name]
                for name in _identifying_texts(env, instance, resets)
                if name in held_out_key_by_text
            ),
            None,
        )
        if held_out_key is not None:
            raise DataFault(
                f"training instance {instance.key} is held-out instance {held_out_key}, or a variant of the same one; "
                "change instances.train, instances.test or evaluation.sets"
            )


def _identifying_texts(env: Environment, instance: Instance, resets: bool) -> tuple[str, ...]:
    """Return the texts that a training instance must not share with a held-out one: its origin and,
    with `resets`, its identity.
    """
    names = [f"origin {env.origin(instance).key}"]
    if not resets:
        return tuple(names)
    try:
        names.append(env.identity(instance))
    except EnvironmentFault as fault:
        if isinstance(fault, Transient):
            raise
    return tuple(names)


# How far the experience of an iteration has been turned into a checkpoint.


def has_begun(ctx: RunContext, iteration: int) -> bool:
    """Return whether an iteration is in the store."""
    return iteration_state(ctx.store, ctx.iteration_id(iteration)) is not None


def closed_stages(ctx: RunContext, iteration: int) -> Sequence[Stage]:
    """Return the stages of an iteration that must not add anything more, because a dataset or
    checkpoint was already made from their data, in this run or in another.
    """
    plan = ctx.plan(iteration)
    drawn_on_stages = ctx.method.drawn_on_stages(ctx) if iteration else ()
    ids = iteration_products(ctx.store, ctx.iteration_id(iteration))
    products: dict[Product, str | None] = {"dataset": ids.dataset_id, "checkpoint": ids.checkpoint_id}
    stages = plan.settled_stages(frozenset(product for product, key in products.items() if key is not None))
    if any(training.iteration == iteration for training in outside_trainings(ctx.store, ctx.run_id)):
        stages = plan.stages[
            : 1 + max(position for position, stage in enumerate(plan.stages) if stage.makes == "checkpoint")
        ]
    return [stage for stage in plan.stages if stage in stages or stage in drawn_on_stages]
