"""Episodes that were played and could not be graded: stored apart, until a rerun has them graded.

They are trajectories of their own, with the rewards that they had without a grade, so that no count
of episodes includes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentr_core.episodes.steps import Outcome, Reply
from agentr_core.evaluation.episodes import EpisodePlan, EpisodeResult, count_invalid
from agentr_core.fingerprint import fingerprint
from agentr_core.store import Store
from agentr_core.store.codec.generations import Draw, load_draws
from agentr_core.store.codec.trajectories import load_trajectories

UNGRADED = "ungraded"


def ungraded_id(trajectory_id: str) -> str:
    """Return the id of an episode while it waits for its grade, given its id after that."""
    return fingerprint(UNGRADED, trajectory_id)


def draws_of(result: EpisodeResult) -> dict[int, Draw]:
    """Return the draws of an episode's replies, by position."""
    start = len(result.plan.prefix)
    return {
        position: Draw(seed=reply.seed, number=0, generation=reply.generation)
        for position, reply in enumerate(result.replies, start)
    }


def load_ungraded(store: Store, plans: Mapping[str, EpisodePlan]) -> dict[str, EpisodeResult]:
    """Return the planned episodes that wait for their grade, by the key of their plan.

    Args:
        plans: by `ungraded_id`.

    Raises as `Store.reading`.
    """
    found = load_trajectories(store, list(plans))
    draws = load_draws(store, "step", list(found))
    results = {}
    for key, trajectory in found.items():
        plan = plans[key]
        replies = tuple(
            Reply(
                seed=draw.seed,
                generation=draw.generation,
                outcome=Outcome(
                    step=trajectory.steps[position],
                    stop=trajectory.stop if position + 1 == len(trajectory.steps) else None,
                ),
            )
            for position, (draw,) in sorted(draws.get(key, {}).items())
        )
        results[plan.key] = EpisodeResult(
            plan=plan,
            trajectory=trajectory,
            replies=replies,
            depth=None,
            invalid_actions=count_invalid(replies),
            environment_seconds=None,
            sampling_seconds=None,
        )
    return results
