"""Which instances an iteration collects from, and which are held out."""

from __future__ import annotations

import random
from contextlib import suppress

from agentr_core import answers
from agentr_core.config import Recipe
from agentr_core.errors import DataFault, IllTypedAnswer
from agentr_core.fingerprint import derive_seed
from agentr_core.protocols import Environment
from agentr_core.stages.place import Workplace
from agentr_core.stages.threads import check_wanted, in_thread
from agentr_core.store.codec import instance_row
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
    pool = env.instances(recipe.instances.test)
    limit = recipe.instances.test_limit
    if not limit or limit >= len(pool):
        return tuple(pool)
    return tuple(pool[position * len(pool) // limit] for position in range(limit))


async def separate_instances(place: Workplace, iteration: int) -> tuple[Instance, ...]:
    """Return the instances of an iteration, once they and the held-out ones are stored and known to be different.

    Raises `DataFault` as `check_separate`.
    """
    env = place.make_environment()
    try:
        chosen, held_out = training_instances(place.recipe, env, iteration), test_instances(place.recipe, env)
        await in_thread(check_separate, env, chosen, held_out)
        place.store.write({"instance": [instance_row(i, answers.depth(env, i)) for i in (*chosen, *held_out)]})
    finally:
        env.close()
    return chosen


def check_separate(env: Environment, train: tuple[Instance, ...], test: tuple[Instance, ...]) -> None:
    """Raise `DataFault` if a training instance is a test instance, under whatever name.

    An instance that begins with what is no text is compared to none: its episode will be refused. Blocks as `reset` of
    the environment does.
    """
    held_out: dict[str, str] = {}
    for instance in test:
        check_wanted()
        with suppress(IllTypedAnswer):
            held_out[answers.identity(env, instance)] = instance.key
    for instance in train:
        check_wanted()
        twin = None
        with suppress(IllTypedAnswer):
            twin = held_out.get(answers.identity(env, instance))
        if twin is not None:
            raise DataFault(
                f"training instance {instance.key} is test instance {twin}; change instances.train or instances.test"
            )
