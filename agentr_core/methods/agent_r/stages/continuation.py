"""Continuation: after the revision turn the policy itself plays on, several times for each pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.cutting import UNPLAYABLE, unplayable
from agentr_core.methods.agent_r.pairing import pair_id
from agentr_core.methods.agent_r.splicing import pair_stream, turned_back
from agentr_core.recipes.sampling import sampling_of
from agentr_core.runtime.episode_shard import rollout_id
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.rollouts import play_rollouts
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.threads import check_wanted, in_thread
from agentr_core.types import Critique, PathPair, Rejection, Step, Trajectory

STAGE = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The continuation of a judged pair: its steps up to the revision turn, or why there are none,
    and its tries, by trajectory id.
    """

    begun: tuple[Step, ...] | Rejection
    tries: Mapping[str, Trajectory]


async def continuations(
    place: Workplace, iteration: int, pairs: Sequence[PathPair], critiques: Mapping[str, Critique], *, seed: int
) -> dict[str, Continued]:
    """Play the missing tries of judged pairs; return all judged pairs, by id.

    Args:
        critiques: by the id of their pair.
        seed: of the revision turns.

    Raises:
        ErrorBudgetSpent: more tries failed than the recipe allows; what was played is kept.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    config = place.recipe.splice.continuation
    judged = {pair_id(pair): pair for pair in pairs if pair_id(pair) in critiques}
    begun = await in_thread(_begun, place, judged, critiques, seed)
    wanted = _plans(place, iteration, pairs, begun)
    await play_rollouts(
        place,
        iteration,
        {key: plan for key, (_, plan) in wanted.items()},
        stage=STAGE,
        name="revision",
        sampling=sampling_of(config),
        max_steps=config.max_steps,
    )
    tries: dict[str, dict[str, Trajectory]] = {}
    for key, played in load_trajectories(place.store, list(wanted)).items():
        tries.setdefault(wanted[key][0], {})[key] = played
    return {key: Continued(begun=steps, tries=tries.get(key, {})) for key, steps in begun.items()}


def _begun(
    place: Workplace, pairs: Mapping[str, PathPair], critiques: Mapping[str, Critique], seed: int
) -> dict[str, tuple[Step, ...] | Rejection]:
    """Return, for each pair, its played steps up to the revision turn, or why there are none."""
    begun: dict[str, tuple[Step, ...] | Rejection] = {}
    with place.worlds() as worlds:
        for key, pair in pairs.items():
            check_wanted()
            env = worlds.of(pair.bad.trajectory.instance)
            try:
                begun[key] = turned_back(pair, critiques[key], env, place.recipe.splice, seed=seed)
            except UNPLAYABLE as error:
                begun[key] = unplayable(key, error)
    return begun


def _plans(
    place: Workplace, iteration: int, pairs: Sequence[PathPair], begun: Mapping[str, tuple[Step, ...] | Rejection]
) -> dict[str, tuple[str, EpisodePlan]]:
    """Return the pair id and the plan of each try, by trajectory id."""
    samples = place.recipe.splice.continuation.samples
    iteration_id, collector = place.iteration_id(iteration), place.collector(iteration)
    found: dict[str, tuple[str, EpisodePlan]] = {}
    of_tree: defaultdict[str, count[int]] = defaultdict(count)
    for pair in pairs:
        # Numbered by tree, so that a tree that is grown later does not change them.
        key, index = pair_id(pair), next(of_tree[pair.bad.tree_id])
        prefix = begun.get(key)
        if prefix is None or isinstance(prefix, Rejection):
            continue
        for number in range(samples):
            plan = EpisodePlan(
                instance=pair.bad.trajectory.instance,
                # Pairs of an instance may be cut at the same length: numbers tell their episodes
                # apart.
                number=index * samples + number,
                seed=derive_seed(place.recipe.seed, STAGE, iteration, pair_stream(pair), number),
                prefix=prefix,
            )
            found[rollout_id(iteration_id, collector.id, plan)] = key, plan
    return found
