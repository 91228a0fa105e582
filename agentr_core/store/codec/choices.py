"""The plan of an iteration, to rows and back: the instances chosen for it, and the episodes it is
to play.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentr_core.store.database import Store
from agentr_core.store.tables import Rows
from agentr_core.types import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRollout:
    """An episode that an iteration plans to play, whether or not it was played."""

    trajectory_id: str
    instance: Instance
    number: int
    """Its number among the episodes of its instance; 0 is greedy."""
    forced: int
    """How many of its first steps are the expert's."""

    @property
    def key(self) -> str:
        """Its name in messages; see `Instance.episode`."""
        return self.instance.episode(self.number, self.forced)


def chosen_rows(iteration_id: str, chosen: Mapping[str, Sequence[Instance]]) -> Rows:
    """Return the rows that name the instances of an iteration, by the purpose they are chosen
    for.
    """
    return {
        "chosen_instance": [
            {"iteration_id": iteration_id, "name": name, "position": position, "instance_id": instance.key}
            for name, instances in chosen.items()
            for position, instance in enumerate(instances)
        ]
    }


def load_chosen(store: Store, iteration_id: str) -> dict[str, tuple[Instance, ...]]:
    """Return the instances of an iteration in order, by the purpose they are chosen for; empty
    before they are chosen.
    """
    found: dict[str, list[Instance]] = {}
    for name, environment, split, index in store.rows(_CHOSEN, iteration_id):
        found.setdefault(name, []).append(Instance(environment=environment, split=split, index=index))
    return {name: tuple(instances) for name, instances in found.items()}


def planned_rows(iteration_id: str, planned: Iterable[PlannedRollout]) -> Rows:
    """Return the rows of all episodes that an iteration plans to play, in their order."""
    return {
        "planned_rollout": [
            {
                "trajectory_id": one.trajectory_id,
                "iteration_id": iteration_id,
                "position": position,
                "instance_id": one.instance.key,
                "number": one.number,
                "forced": one.forced,
            }
            for position, one in enumerate(planned)
        ]
    }


def load_planned(store: Store, iteration_id: str) -> list[PlannedRollout]:
    """Return the episodes that an iteration plans to play, in their order."""
    return [
        PlannedRollout(
            trajectory_id=key,
            instance=Instance(environment=environment, split=split, index=index),
            number=number,
            forced=forced,
        )
        for key, environment, split, index, number, forced in store.rows(_PLANNED, iteration_id)
    ]


_CHOSEN = """
select c.name, i.environment, i.split, i.instance_index
from chosen_instance c join instance i using (instance_id)
where c.iteration_id = ?
order by c.name, c.position
"""
_PLANNED = """
select p.trajectory_id, i.environment, i.split, i.instance_index, p.number, p.forced
from planned_rollout p join instance i using (instance_id)
where p.iteration_id = ?
order by p.position
"""
