"""Evaluation of a checkpoint: the held-out instances, and recovery from the base model's failures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agentr_core.errors import DataFault
from agentr_core.evaluation.episodes import EpisodePlan, episode_plans
from agentr_core.evaluation.metrics import counted_reward, mean_reward, success_rate
from agentr_core.evaluation.revision import revision_plans
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.stages.episode_shard import EpisodeShard
from agentr_core.stages.instances import test_instances
from agentr_core.stages.place import Checkpoint, Workplace
from agentr_core.stages.shards import carry_out
from agentr_core.store import Writer
from agentr_core.store.codec import evaluation_rows, instance_row, load_episodes, metric_rows, rejection_rows
from agentr_core.store.codec.trajectories import Episode
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Sampling

STAGE = "evaluate"
VERSION = 1
TEST, REVISION = "test", "revision_test"


def evaluation_id(place: Workplace, iteration: int, name: str) -> str:
    """Return the id of an evaluation of the checkpoint that an iteration made (0: the base model)."""
    recipe = place.recipe
    iteration_id = place.iteration_id(iteration) if iteration else place.source_id(0)
    return fingerprint("evaluation", VERSION, iteration_id, name, recipe.evaluation, recipe.instances)


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
            [episode.trajectory for episode in base], cuts=config.revision_test.cuts, seed=_cut_seed(place)
        )
        place.store.write(rejection_rows(rejected, iteration_id=place.iteration_id(iteration)))
        limit = min(config.revision_test.limit or len(cuts), len(cuts))
        cuts = tuple(cuts[position * len(cuts) // limit] for position in range(limit))
        scores[REVISION] = await _play(place, iteration, REVISION, cuts, checkpoint, config.revision_test.max_steps)
    return scores


def _cut_seed(place: Workplace) -> int:
    """Return the seed of the cuts of the revision test: all arms of a comparison go on from the same ones."""
    row = place.one("select (config->>'$.seed')::bigint from run where run_id = ?", place.recipe.compare.pool)
    return place.recipe.seed if row is None else int(row[0])


def _best_of(key: str, played: list[Episode], disaster_counts: float) -> list[Rows]:
    """Return the success and reward of the best of each instance's episodes as metrics, where it has several.

    Who picks the best one has looked at the environment's reward: a bound, and a baseline of the ETO paper.
    """
    by_instance: dict[str, list[Episode]] = {}
    for episode in played:
        by_instance.setdefault(episode.instance.key, []).append(episode)
    most = max(map(len, by_instance.values()), default=0)
    if most < 2:
        return []
    success = success_rate([any(e.trajectory.success for e in episodes) for episodes in by_instance.values()])
    reward = mean_reward(
        [max(counted_reward(e.trajectory, disaster_counts) for e in episodes) for episodes in by_instance.values()]
    )
    return [
        metric_rows("evaluation", key, f"best_of_{most}_{name}", e.mean, low=e.low, high=e.high, n=e.n)
        for name, e in (("success", success), ("reward", reward))
    ]


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
    open_plans = tuple(p for p in plans if (p.instance.key, p.number, len(p.prefix)) not in done)
    if open_plans:
        shard = EpisodeShard(
            stage=STAGE,
            evaluation_id=key,
            name=name,
            iteration=iteration,
            checkpoint=checkpoint,
            plans=open_plans,
            sampling=Sampling(
                temperature=recipe.evaluation.temperature, max_new_tokens=recipe.evaluation.max_new_tokens
            ),
            max_steps=max_steps,
            done=len(done),
            total=len(plans),
        )
        with place.timed(f"{STAGE} {name}", iteration) as clock:
            async with Writer(place.store) as writer:
                clock.add_effort(await carry_out(shard, place, place.spread, writer, f"episodes of {name}"))
            clock.add({"store": writer.seconds})
    played = load_episodes(place.store, key)
    best = _best_of(key, played, recipe.evaluation.disaster_counts) if name == TEST else []
    place.store.write(merge([head(True), *best]))
    successes = [episode.trajectory.success for episode in played]
    return asdict(success_rate(successes)) if successes else {"n": 0}
