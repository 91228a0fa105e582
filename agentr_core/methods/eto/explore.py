"""Exploration: the policy plays the training instances of an iteration, or goes on from the
expert's first steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentr_core.episodes.rollout import stateful
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.eto import acting
from agentr_core.protocols import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.episode_shard import plan_rollouts, play_rollouts, rollout_id
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Workplace
from agentr_core.stages.dataset import whole_rows
from agentr_core.stages.demonstrate import best_experts
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.types import Instance, Trajectory

EXPLORE = "explore"


def check_state(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` when episodes should end where they repeat themselves and the world does
    not tell its state.
    """
    if recipe.eto.explore.repeats:
        stateful(env, "eto.explore.repeats")


def exploration(place: Workplace, iteration: int, instances: Sequence[Instance]) -> dict[str, EpisodePlan]:
    """Return the episodes of an iteration's exploration by trajectory id.

    Number 0 of an instance is greedy, the others are sampled. Where replies are compared step by
    step, each episode is played from every step of the expert's, or from
    `eto.preferences.forced_steps` of these, spread evenly.

    Raises `DataFault` without a policy.
    """
    iteration_id = place.iteration_id(iteration)
    collector = place.collector(iteration)
    experts: dict[str, Trajectory] = {}
    if place.plan(iteration).pairs and place.recipe.eto.preferences.level != "trajectory":
        experts = {key: episode for key, (_, episode) in best_experts(place, iteration).items()}
    recipe = place.recipe
    plans: list[EpisodePlan] = []
    for instance in instances:
        expert = experts.get(instance.key)
        config = recipe.in_world(instance.environment).eto.explore
        cuts = [0]
        if expert:
            length = len(expert.steps)
            limit = min(recipe.eto.preferences.forced_steps or length, length)
            cuts = [position * length // limit for position in range(limit)]
        plans += [
            EpisodePlan(
                instance=instance,
                number=number,
                seed=derive_seed(recipe.seed, EXPLORE, iteration, instance.key, number),
                prefix=expert.steps[:cut] if expert else (),
                greedy=number == 0,
                max_steps=config.max_steps,
                repeats=config.repeats,
            )
            for cut in cuts
            for number in range(0 if config.greedy else 1, config.samples + 1)
        ]
    return {rollout_id(iteration_id, collector.id, plan): plan for plan in plans}


async def explore(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the missing episodes of an iteration's exploration; those of another run with the same
    inputs are copied.

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: training and test instances overlap, or the policy is missing.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    return (await _explore(place, iteration))[0]


async def explore_and_keep(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the missing episodes of an iteration's exploration, and keep its successes as samples.
    Raises as `explore`.
    """
    told, successes = await _explore(place, iteration)
    place.store.write(whole_rows(place, iteration, successes, stage=EXPLORE))
    return told


async def _explore(place: Workplace, iteration: int) -> tuple[dict[str, Any], dict[str, Trajectory]]:
    """Return the summary of an exploration, and its successes by id."""
    wanted = exploration(place, iteration, await separate_instances(place, iteration))
    plan_rollouts(place, iteration, wanted, stage=EXPLORE)
    how = acting(place.recipe)
    new = await play_rollouts(
        place,
        iteration,
        wanted,
        stage=EXPLORE,
        name="exploration",
        sampling=how.sampling,
        max_steps=how.max_steps,
        limits=how.limits,
    )
    played = load_trajectories(place.store, list(wanted))
    successes = {key: trajectory for key, trajectory in played.items() if trajectory.success}
    return {"episodes": len(wanted), "new": new, "successes": len(successes)}, successes
