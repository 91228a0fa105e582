"""Episodes of an evaluation that failed for good: kept as rejections, counted as the recipe says,
and never used as data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.runtime.place import Workplace
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.trajectories import Episode, load_episodes
from agentr_core.store.queries.evaluations import is_finished
from agentr_core.store.queries.outcomes import instance_traits, rejected_subjects
from agentr_core.store.tables import Rows
from agentr_core.types import Instance, Rejection, StopReason, Trajectory

STAGE = "evaluate"
REASON = "no-reward"


def lost_rows(
    evaluation_id: str, plans: Iterable[EpisodePlan], played: Iterable[Episode], *, iteration_id: str
) -> Rows:
    """Return a rejection for each planned episode of an evaluation that was not played; its subject
    names the evaluation and the episode.
    """
    done = {_key(episode) for episode in played}
    detail = "the episode has no reward; table event has the error that ended it"
    return rejection_rows(
        [
            Rejection(stage=STAGE, subject=f"{evaluation_id}:{plan.key}", reason=REASON, detail=detail)
            for plan in plans
            if plan.key not in done
        ],
        iteration_id=iteration_id,
    )


def counted_episodes(place: Workplace, evaluation_id: str) -> list[Episode]:
    """Return the episodes over which the means of an evaluation are taken.

    With `errors.count_as: zero` those that failed for good are among them, as failures without a
    step.
    """
    played = load_episodes(place.store, evaluation_id)
    return played if place.recipe.errors.count_as == "out" else [*played, *lost_episodes(place, evaluation_id)]


def ended_episodes(place: Workplace, evaluation_id: str) -> list[Episode]:
    """Return the same; none until the evaluation is finished, since episodes that are won end
    first.
    """
    return counted_episodes(place, evaluation_id) if is_finished(place.store, evaluation_id) else []


def lost_episodes(place: Workplace, evaluation_id: str) -> list[Episode]:
    """Return the episodes of an evaluation that failed for good and were not played since, as
    failures without a step.
    """
    subjects = rejected_subjects(place.store, stage=STAGE, reason=REASON, prefix=f"{evaluation_id}:")
    if not subjects:
        return []
    done = {_key(episode) for episode in load_episodes(place.store, evaluation_id)}
    keys = [subject.removeprefix(f"{evaluation_id}:") for subject in subjects]
    lost = [_failure(key) for key in keys if key not in done]
    traits = instance_traits(place.store, [episode.instance.key for episode in lost])
    return [replace(episode, **asdict(traits[episode.instance.key])) for episode in lost]


def _key(episode: Episode) -> str:
    return episode.instance.episode(episode.repeat, episode.cut)


def _failure(key: str) -> Episode:
    name, _, numbers = key.rpartition("#")
    environment, split, index = name.rsplit("/", 2)
    repeat, _, cut = numbers.partition("@")
    instance = Instance(environment=environment, split=split, index=int(index))
    return Episode(
        trajectory_id="",
        instance=instance,
        repeat=int(repeat),
        cut=int(cut or 0),
        trajectory=Trajectory(
            instance=instance, first_observation="", steps=(), reward=0.0, success=False, stop=StopReason.FAILURE
        ),
    )
