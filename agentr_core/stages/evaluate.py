"""Evaluation of a checkpoint: the held-out instances, and recovery from the base model's failures."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Any

from agentr_core.errors import DataFault
from agentr_core.evaluation.episodes import EpisodePlan, EpisodeResult, episode_plans
from agentr_core.evaluation.episodes import evaluate as play_all
from agentr_core.evaluation.metrics import success_rate
from agentr_core.evaluation.revision import revision_plans
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.pool import EnvironmentPool
from agentr_core.stages.collect import CONCURRENCY, speed
from agentr_core.stages.instances import test_instances
from agentr_core.stages.place import Checkpoint, Workplace
from agentr_core.store import Writer
from agentr_core.store.codec import Draw, episode_rows, evaluation_rows, instance_row, load_episodes, rejection_rows
from agentr_core.store.tables import Rows
from agentr_core.types import Sampling

STAGE = "evaluate"
VERSION = 1
TEST, REVISION = "test", "revision_test"


def evaluation_id(place: Workplace, iteration: int, name: str) -> str:
    """Return the id of an evaluation of the checkpoint that an iteration made (0: the base model)."""
    recipe = place.recipe
    return fingerprint("evaluation", VERSION, place.iteration_id(iteration), name, recipe.evaluation, recipe.instances)


async def evaluate(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play what is missing of the evaluations of an iteration's checkpoint; return the success of each.

    The revision test continues failed episodes of the base model.

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: the checkpoint is not there, or iteration 0 was not evaluated before.
    """
    checkpoint = place.trained(iteration)
    config = place.recipe.evaluation
    env = place.make_environment()
    try:
        instances = test_instances(place.recipe, env)
        place.store.write({"instance": [instance_row(i, env.depth(i)) for i in instances]})
    finally:
        env.close()
    plans = episode_plans(
        instances, episodes=config.episodes, seed=derive_seed(place.recipe.seed, "evaluate", iteration)
    )
    scores = {TEST: await _play(place, iteration, TEST, plans, checkpoint, config.max_steps)}
    if config.revision_test.enabled:
        base = load_episodes(place.store, evaluation_id(place, 0, TEST))
        if instances and not base:
            raise DataFault(f"run {place.run_id} has no episodes of its first model yet; evaluate iteration 0 first")
        cuts, rejected = revision_plans(
            [episode.trajectory for episode in base], cuts=config.revision_test.cuts, seed=place.recipe.seed
        )
        place.store.write(rejection_rows(rejected, iteration_id=place.iteration_id(iteration)))
        limit = min(config.revision_test.limit or len(cuts), len(cuts))
        cuts = tuple(cuts[position * len(cuts) // limit] for position in range(limit))
        scores[REVISION] = await _play(place, iteration, REVISION, cuts, checkpoint, config.revision_test.max_steps)
    return scores


async def _play(
    place: Workplace,
    iteration: int,
    name: str,
    plans: tuple[EpisodePlan, ...],
    checkpoint: Checkpoint,
    max_steps: int,
) -> dict[str, Any]:
    recipe = place.recipe
    key = evaluation_id(place, iteration, name)
    iteration_id = place.iteration_id(iteration)

    def head(finished: bool) -> Rows:
        return evaluation_rows(
            key,
            iteration_id=iteration_id,
            checkpoint_id=checkpoint.id,
            name=name,
            split=recipe.instances.test,
            config=recipe.evaluation,
            finished=finished,
        )

    place.store.write(head(False))
    stored = load_episodes(place.store, key)
    done = {(e.instance.key, e.repeat, e.cut) for e in stored}
    open_plans = [p for p in plans if (p.instance.key, p.number, len(p.prefix)) not in done]
    if open_plans:
        pool = EnvironmentPool(place.make_environment)
        seconds = 0.0
        with place.timed(f"{STAGE} {name}", iteration) as clock, closing(pool) as environments:
            async with place.sampling(checkpoint.path) as batcher, Writer(place.store) as writer:

                def keep(result: EpisodeResult) -> None:
                    nonlocal seconds
                    seconds += result.environment_seconds
                    writer.add(_rows(result, key, iteration_id))
                    done.add((result.plan.instance.key, result.plan.number, len(result.plan.prefix)))
                    place.progress(len(done), len(plans), f"episodes of {name}, {speed(batcher)}")

                await play_all(
                    open_plans,
                    environments,
                    batcher.sample,
                    max_steps=max_steps,
                    sampling=Sampling(
                        temperature=recipe.evaluation.temperature, max_new_tokens=recipe.evaluation.max_new_tokens
                    ),
                    errors=recipe.errors,
                    concurrency=CONCURRENCY,
                    on_error=place.on_error(writer, STAGE, iteration),
                    on_result=keep,
                    total=len(plans),
                )
                clock.add_batcher(batcher)
            clock.add({"environment": seconds, "store": writer.seconds})
    place.store.write(head(True))
    successes = [episode.trajectory.success for episode in load_episodes(place.store, key)]
    return asdict(success_rate(successes)) if successes else {"n": 0}


def _rows(result: EpisodeResult, key: str, iteration_id: str) -> Rows:
    plan = result.plan
    start = len(plan.prefix)
    return episode_rows(
        fingerprint("episode", key, plan.key),
        result.trajectory,
        evaluation_id=key,
        iteration_id=iteration_id,
        repeat=plan.number,
        cut=start,
        invalid_actions=result.invalid_actions,
        environment_seconds=result.environment_seconds,
        sampling_seconds=result.sampling_seconds,
        draws={
            start + position: Draw(seed=reply.seed, number=0, generation=reply.generation)
            for position, reply in enumerate(result.replies)
        },
    )
