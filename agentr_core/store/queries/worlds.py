"""Instances of worlds, and the counts of what an iteration made in each world."""

from __future__ import annotations

from agentr_core.store.database import Store
from agentr_core.types import Instance


def instances_stored(store: Store) -> list[Instance]:
    """Return every instance that something in the store is of, by world, split and index."""
    return [
        Instance(environment=environment, split=split, index=index)
        for environment, split, index in store.rows(
            "select environment, split, instance_index from instance order by all"
        )
    ]


def made_by_world(store: Store, source_id: str, iteration_id: str) -> dict[str, dict[str, int]]:
    """Return how many trees, pairs, episodes, preferences, samples and dataset rows each world gave
    to an iteration, by world and kind; kinds without any are left out.

    Args:
        source_id: the iteration that made the samples.
        iteration_id: the iteration that trains on them.
    """
    found: dict[str, dict[str, int]] = {}
    for world, kind, count in store.rows(_MADE, source_id, iteration_id):
        found.setdefault(world, {})[kind] = count
    return found


_MADE = """
with made as (
    select 1 as place, 'trees' as kind, instance_id from tree where iteration_id = $1
    union all select 2, 'pairs', t.instance_id from pair p join tree t using (tree_id) where p.iteration_id = $1
    union all select 3, 'expert episodes', instance_id from trajectory where iteration_id = $1 and source = 'expert'
    union all select 4, 'explored episodes', instance_id from trajectory where iteration_id = $1 and source = 'rollout'
    union all select 5, 'preference pairs', instance_id from preference where iteration_id = $1
    union all select 6, kind || ' samples', instance_id from sample
        where iteration_id = $1 and instance_id is not null
    union all select 7, 'trained rows', s.instance_id from dataset d join dataset_row w using (dataset_id)
        join sample s using (sample_id) where d.iteration_id = $2 and s.instance_id is not null
)
select i.environment, m.kind, count(*) from made m join instance i using (instance_id)
group by i.environment, m.place, m.kind order by m.place, m.kind
"""
