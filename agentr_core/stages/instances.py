"""Which instances an iteration collects from, and which are held out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress

from agentr_core import answers
from agentr_core.config import EvaluationSetConfig, Recipe
from agentr_core.errors import DataFault, IllTypedAnswer
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import Deriving, Environment
from agentr_core.stages.place import Workplace
from agentr_core.stages.threads import check_wanted, in_thread
from agentr_core.store.codec import instance_row
from agentr_core.store.tables import Row
from agentr_core.types import Instance


def training_instances(recipe: Recipe, env: Environment, iteration: int) -> tuple[Instance, ...]:
    """Return the instances of an iteration: `train_limit` of the training split drawn anew, in their own order."""
    pool = env.instances(recipe.instances.train)
    limit = recipe.instances.train_limit
    if not limit or limit >= len(pool):
        return tuple(pool)
    rng = random.Random(derive_seed(recipe.seed, "instances", iteration))
    return tuple(pool[position] for position in sorted(rng.sample(range(len(pool)), limit)))


def test_instances(recipe: Recipe, env: Environment) -> tuple[Instance, ...]:
    """Return the held-out instances: all of the test split, or `test_limit` spread over it evenly."""
    return _some(env.instances(recipe.instances.test), recipe.instances.test_limit, spread=True)


def set_instances(chosen: EvaluationSetConfig, env: Environment) -> tuple[Instance, ...]:
    """Return the instances of a further evaluation set."""
    return _some(env.instances(chosen.split), chosen.limit, spread=chosen.spread)


def held_out_instances(recipe: Recipe, env: Environment) -> tuple[Instance, ...]:
    """Return every instance that some evaluation plays, each once."""
    sets = (set_instances(chosen, env) for chosen in recipe.evaluation.sets.values())
    return tuple(dict.fromkeys(itertools.chain(test_instances(recipe, env), *sets)))


def episode_count(recipe: Recipe, env: Environment) -> int:
    """Return how many held-out episodes each iteration plays, those of the revision test left out."""
    sets = [chosen for chosen in recipe.evaluation.sets.values() if chosen.models == "all"]
    further = sum(chosen.episodes * len(set_instances(chosen, env)) for chosen in sets)
    return recipe.evaluation.episodes * len(test_instances(recipe, env)) + further


def stored_rows(env: Environment, instances: Iterable[Instance]) -> list[Row]:
    """Return the rows of instances with what their environment says of them."""
    return [
        instance_row(i, answers.depth(env, i), env.origin(i) if isinstance(env, Deriving) else None) for i in instances
    ]


def _some(pool: Sequence[Instance], limit: int, *, spread: bool) -> tuple[Instance, ...]:
    if not limit or limit >= len(pool):
        return tuple(pool)
    return tuple(pool[position * len(pool) // limit if spread else position] for position in range(limit))


async def separate_instances(place: Workplace, iteration: int) -> tuple[Instance, ...]:
    """Return the instances of an iteration, once they and the held-out ones are stored and known to be different.

    Raises `DataFault` as `check_separate`.
    """
    env = place.make_environment()
    try:
        chosen, held_out = training_instances(place.recipe, env, iteration), held_out_instances(place.recipe, env)
        await in_thread(check_separate, env, chosen, held_out)
        place.store.write({"instance": stored_rows(env, (*chosen, *held_out))})
    finally:
        env.close()
    return chosen


def check_separate(env: Environment, train: tuple[Instance, ...], test: tuple[Instance, ...]) -> None:
    """Raise `DataFault` if a training instance is a held-out instance or a variant of one, under whatever name.

    An instance that begins with what is no text is compared to none: its episode will be refused. Blocks as `reset` of
    the environment does.
    """
    held_out: dict[str, str] = {}
    for instance in test:
        check_wanted()
        held_out |= dict.fromkeys(_names(env, instance), instance.key)
    for instance in train:
        check_wanted()
        twin = next((held_out[name] for name in _names(env, instance) if name in held_out), None)
        if twin is not None:
            raise DataFault(
                f"training instance {instance.key} is held-out instance {twin}, or a variant of the same one; change "
                "instances.train, instances.test or evaluation.sets"
            )


def _names(env: Environment, instance: Instance) -> tuple[str, ...]:
    """Return the texts that no training and held-out instance may share."""
    names = [f"origin {env.origin(instance).key}"] if isinstance(env, Deriving) else []
    with suppress(IllTypedAnswer):
        names.append(answers.identity(env, instance))
    return tuple(names)
