"""Whole episodes as samples: all replies are trained, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentr_core.episodes.transcript import conversations
from agentr_core.protocols.environment import Environment
from agentr_core.runtime.place import Workplace
from agentr_core.samples.identity import sample_id
from agentr_core.samples.stretches import Way, split
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.types import Provenance, Rejection, Sample, SampleKind, Trajectory


def whole_rows(place: Workplace, iteration: int, trajectories: Mapping[str, Trajectory], *, stage: str) -> Rows:
    """Return the rows of a sample of each trajectory, given by id, or of a rejection where one
    gives none.
    """
    iteration_id = place.iteration_id(iteration)
    units: list[Rows] = []
    with place.worlds() as worlds:
        for key, trajectory in trajectories.items():
            env = worlds.of(trajectory.instance)
            for read in whole_samples(env, key, trajectory, place.recipe.data.windowed, stage=stage):
                if isinstance(read, Rejection):
                    units.append(rejection_rows([read], iteration_id=iteration_id))
                else:
                    units.append(sample_rows(sample_id(read), read, iteration_id=iteration_id, trajectory_id=key))
    return merge(units)


def whole_samples(
    env: Environment, key: str, trajectory: Trajectory, windowed: Way, *, stage: str
) -> Iterator[Sample | Rejection]:
    """Yield the samples of a trajectory, each with all its replies trained: one for each
    conversation of it and stretch of that, or a rejection of a conversation.
    """
    for part in (parts := conversations(env, trajectory)):
        extra = {"trajectory": key} | ({"conversation": part.start} if len(parts) > 1 else {})
        whole = Sample(
            kind=SampleKind.GOOD,
            messages=part.messages,
            instance=trajectory.instance,
            provenance=Provenance(good_reward=trajectory.reward, extra=extra),
        )
        dropped = [step.dropped for step in trajectory.steps[part.start : part.end]]
        read = split(whole, dropped, windowed, stage=stage, subject=key)
        yield from [read] if isinstance(read, Rejection) else read
