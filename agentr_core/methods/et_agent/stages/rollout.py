"""Rollouts of a stage of the curriculum: the policy answers each training question several times.

The rollouts are not trained on; their dispersions decide which questions are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.episodes.transcript import Continuation, transcript_of
from agentr_core.errors import ConfigError
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.objectives import acting_in_groups
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.episode_shard import rollout_id
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.rollouts import plan_rollouts, play_rollouts
from agentr_core.types import Instance

STAGE = "rollout"


async def rollout(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the missing rollouts of an iteration; those of another run with the same inputs are
    copied.

    Raises:
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: training and test instances overlap, or the policy is missing.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    wanted = _wanted(place, iteration, await separate_instances(place, iteration))
    plan_rollouts(place, iteration, wanted, stage=STAGE)
    how = acting_in_groups(place.recipe)
    new = await play_rollouts(
        place,
        iteration,
        wanted,
        stage=STAGE,
        name="rollouts",
        sampling=how.sampling,
        max_steps=how.max_steps,
        limits=how.limits,
    )
    return {"rollouts": len(wanted), "new": new}


def check_counts(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` where calls are counted, and the format of tags is asked for, in a world
    of turns, or where a tool has a cost that the world has not, or boxes are asked for where there
    are no questions.
    """
    tools, costs = env.tools if isinstance(env, ReasoningWorld) else None, recipe.et_agent.curriculum.call_costs
    if tools is not None and (unknown := sorted(costs.keys() - set(tools))):
        has = " and ".join(tools) or "none"
        raise ConfigError(f"et_agent.curriculum.call_costs: {env.name} has no tool {unknown[0]}; it has {has}")
    if recipe.et_agent.curriculum.boxed_only and tools is None:
        raise ConfigError(
            f"et_agent.curriculum.boxed_only: {env.name} has no questions that are answered in a box; leave it out"
        )
    if recipe.et_agent.curriculum.counts == "calls" and not isinstance(transcript_of(env), Continuation):
        raise ConfigError(
            f"et_agent.curriculum.counts: calls are counted in one growing turn with tags; episodes of {env.name} are "
            "turns, so set it to steps"
        )


def _wanted(place: Workplace, iteration: int, instances: Sequence[Instance]) -> dict[str, EpisodePlan]:
    """Return the rollouts of an iteration by trajectory id."""
    recipe, iteration_id, policy = place.recipe, place.iteration_id(iteration), place.policy(iteration)
    plans = [
        EpisodePlan(
            instance=instance,
            number=number,
            seed=derive_seed(recipe.seed, STAGE, iteration, instance.key, number),
            repeats=recipe.grpo.repeats,
        )
        for instance in instances
        for number in range(recipe.et_agent.curriculum.rollouts)
    ]
    return {rollout_id(iteration_id, policy.id, plan): plan for plan in plans}
