"""The places of a text: the steps, nodes, samples and verdicts that contain it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentr_core.store.database import Store


class Place(NamedTuple):
    """A row that contains a text."""

    text_id: str
    kind: str
    """trajectory, node, sample or pair."""
    key: str
    """Its id; for a node, the id of its tree."""
    position: int | None
    """The step of a trajectory, the number of a node, the message of a sample, the judged step of a
    pair; None for the first observation of a trajectory.
    """


def places_of_texts(store: Store, text_ids: Sequence[str], limit: int) -> list[Place]:
    """Return at most `limit` places of each text."""
    return [Place(*row) for row in store.rows(_PLACES, list(text_ids), limit)]


_PLACES = """
with wanted as (select unnest($1::varchar[]) as text_id),
found as (
    select reply_id as text_id, 'trajectory' as kind, trajectory_id as key, position from step
        semi join wanted on text_id = reply_id
    union all select observation_id, 'trajectory', trajectory_id, position from step
        semi join wanted on text_id = observation_id
    union all select first_observation_id, 'trajectory', trajectory_id, null from trajectory
        semi join wanted on text_id = first_observation_id
    union all select reply_id, 'node', tree_id, node_index from node semi join wanted on text_id = reply_id
    union all select observation_id, 'node', tree_id, node_index from node semi join wanted on text_id = observation_id
    union all select text_id, 'sample', sample_id, position from message semi join wanted using (text_id)
    union all select text_id, 'sample', sample_id, message from message_span semi join wanted using (text_id)
    union all select reply_id, 'pair', pair_id, position from verdict semi join wanted on text_id = reply_id
)
from found
qualify row_number() over (partition by text_id order by kind = 'sample', kind, key, position) <= $2
order by text_id, kind = 'sample', kind, key, position
"""
