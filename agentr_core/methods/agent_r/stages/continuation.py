"""Continuation: from the turn of revision on, the policy itself plays on, several times for each
pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.splicing import UNPLAYABLE, pair_stream, turned_back
from agentr_core.methods.agent_r.stages.critique import pair_id
from agentr_core.runtime.episode_shard import EpisodeShard, rollout_id
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.threads import check_wanted, in_thread
from agentr_core.store.codec import load_trajectories
from agentr_core.types import Critique, PathPair, Rejection, Sampling, Trajectory

STAGE = "continue"


async def continuations(
    place: Workplace, iteration: int, pairs: Sequence[PathPair], critiques: Mapping[str, Critique], *, seed: int
) -> dict[str, dict[str, Trajectory]]:
    """Play what is missing of the tries of judged pairs; return all of them by pair and id of the
    trajectory.

    Pairs that cannot be continued are missing.

    Args:
        critiques: by the id of their pair.
        seed: of the turns of revision.

    Raises:
        ErrorBudgetSpent: more tries failed than the recipe allows; what was played is kept.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    recipe = place.recipe
    config = recipe.splice.continuation
    wanted = await in_thread(_plans, place, iteration, pairs, critiques, seed)
    missing = place.store.missing("trajectory", list(wanted))
    if missing:
        shard = EpisodeShard(
            stage=STAGE,
            evaluation_id="",
            name="revision",
            iteration=iteration,
            checkpoint=place.policy(iteration),
            plans=tuple(wanted[key][1] for key in missing),
            sampling=Sampling(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
            max_steps=config.max_steps,
            done=len(wanted) - len(missing),
            total=len(wanted),
        )
        await place.work_through(shard, STAGE, iteration, "episodes of revision")
    tries: dict[str, dict[str, Trajectory]] = {}
    for key, played in load_trajectories(place.store, list(wanted)).items():
        tries.setdefault(wanted[key][0], {})[key] = played
    return tries


def _plans(
    place: Workplace, iteration: int, pairs: Sequence[PathPair], critiques: Mapping[str, Critique], seed: int
) -> dict[str, tuple[str, EpisodePlan]]:
    """Return pair and plan of each try, by the id of its trajectory."""
    recipe = place.recipe
    samples = recipe.splice.continuation.samples
    iteration_id, policy = place.iteration_id(iteration), place.policy(iteration)
    found: dict[str, tuple[str, EpisodePlan]] = {}
    env = place.make_environment()
    try:
        for index, pair in enumerate(pairs):
            check_wanted()
            key = pair_id(pair)
            if key not in critiques:
                continue
            try:
                prefix = turned_back(pair, critiques[key], env, recipe.splice, seed=seed)
            except UNPLAYABLE:
                # Whoever makes the samples meets it again, and says so.
                continue
            if isinstance(prefix, Rejection):
                continue
            for number in range(samples):
                plan = EpisodePlan(
                    instance=pair.bad.trajectory.instance,
                    # Pairs of an instance may be cut at the same length: numbers tell their
                    # episodes apart.
                    number=index * samples + number,
                    seed=derive_seed(recipe.seed, STAGE, iteration, pair_stream(pair), number),
                    prefix=prefix,
                )
                found[rollout_id(iteration_id, policy.id, plan)] = key, plan
    finally:
        env.close()
    return found
