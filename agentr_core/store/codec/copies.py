"""Trees, judgements and rollouts of other runs, copied with all their rows under ids of this
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.store.database import Store
from agentr_core.store.tables import Rows

OF_DATASETS = "dataset"
"""The stage whose input is the contents of the general data; no reply depends on them."""
OF_FILES = "files"
"""What stands as a stage for the contents of all files that a run reads."""


def stage_input_rows(run_id: str, inputs: Mapping[str, str]) -> Rows:
    """Return a row for each stage of a run, with the hash of the inputs that determine what it
    makes.
    """
    return {
        "stage_input": [{"run_id": run_id, "stage": stage, "input_id": input_id} for stage, input_id in inputs.items()]
    }


def known_input(store: Store, run_id: str, stage: str) -> str | None:
    """Return the hash of the inputs of a stage as a run stored it; None if it stored none."""
    rows = store.rows("select input_id from stage_input where run_id = ? and stage = ?", run_id, stage)
    return next((key for (key,) in rows), None)


def runs_alike(store: Store, run_id: str, stage: str) -> list[str]:
    """Return the other runs with the same inputs of a stage, the oldest first."""
    return [run for (run,) in store.rows(_ALIKE, run_id, stage)]


def copy_trees(store: Store, originals: Mapping[str, str], *, iteration_id: str) -> list[str]:
    """Copy finished trees as trees of an iteration; return the ids of the copies.

    A tree that is already stored under its new id, finished or not, is left as it is.

    Args:
        originals: the id of the tree to copy, by the id of its copy.
    """
    with store.transaction() as con:
        rows = con.execute(_TREES_TO_COPY, [list(originals), list(originals.values())]).fetchall()
        new, old = [key for key, _ in rows], [key for _, key in rows]
        con.execute(_COPY_TREE, [new, old, iteration_id])
        con.execute(_COPY_NODES, [new, old])
        for sql in _COPY_OF_STEPS:
            con.execute(sql, [new, old, "node"])
    return new


def copy_judgements(store: Store, tree_ids: Sequence[str], run_id: str, *, iteration_id: str) -> int:
    """Copy another run's judgements of the same trees, where this run has none; return the number
    of nodes.

    Trees are the same if one is a copy of the other, or both are copies of a third.
    """
    with store.transaction() as con:
        rows = con.execute(_JUDGEMENTS_TO_COPY, [run_id, list(tree_ids)]).fetchall()
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        if rows:
            con.execute(_COPY_JUDGEMENTS, [*columns, iteration_id])
            con.execute(_COPY_REPLIES, columns)
    return len(rows)


def copy_rollouts(store: Store, originals: Mapping[str, str], *, iteration_id: str) -> list[str]:
    """Copy stored rollouts as rollouts of an iteration; return the ids of the copies.

    A rollout that is already stored under its new id is left as it is.

    Args:
        originals: the id of the trajectory to copy, by the id of its copy.
    """
    with store.transaction() as con:
        rows = con.execute(_ROLLOUTS_TO_COPY, [list(originals), list(originals.values())]).fetchall()
        new, old = [key for key, _ in rows], [key for _, key in rows]
        con.execute(_COPY_TRAJECTORY, [new, old, iteration_id])
        con.execute(_COPY_STEPS, [new, old])
        for sql in _COPY_OF_STEPS:
            con.execute(sql, [new, old, "step"])
    return new


_PAIRS = "with ids as (select unnest(?) as new_id, unnest(?) as old_id)"
_ALIKE = """
select other.run_id from stage_input mine join stage_input other using (stage, input_id)
where mine.run_id = ? and stage = ? and other.run_id <> mine.run_id
order by other.created_at, other.run_id
"""
_TREES_TO_COPY = f"""
{_PAIRS}
select new_id, old_id from ids join tree t on t.tree_id = old_id
where t.finished and new_id not in (select tree_id from tree)
"""
_COPY_TREE = f"""
insert into tree by name
{_PAIRS}
select t.* exclude (created_at) replace (new_id as tree_id, ? as iteration_id, null as writer,
    coalesce(t.copied_from, t.tree_id) as copied_from)
from tree t join ids on t.tree_id = old_id
"""
_COPY_NODES = f"""
insert into node by name
{_PAIRS}
select n.* exclude (created_at) replace (new_id as tree_id) from node n join ids on n.tree_id = old_id
"""
_COPY_OWNED = f"""
insert into {{table}} by name
{_PAIRS}
select g.* exclude (created_at) replace (new_id as owner_id) from {{table}} g join ids on g.owner_id = old_id
where g.kind = ?
"""
_COPY_OF_STEPS = [_COPY_OWNED.format(table=table) for table in ("generation", "tool_call", "answer", "grade")]
_JUDGEMENTS_TO_COPY = """
select mine.tree_id, other.tree_id, j.node_index
from tree mine
join tree other on coalesce(other.copied_from, other.tree_id) = coalesce(mine.copied_from, mine.tree_id)
join iteration i on i.iteration_id = other.iteration_id and i.run_id = ?
join judgement j on j.tree_id = other.tree_id
where mine.tree_id in (select unnest(?)) and mine.tree_id <> other.tree_id
    and (mine.tree_id, j.node_index) not in (select (tree_id, node_index) from judgement)
"""
_NODES = "with ids as (select unnest(?) as new_id, unnest(?) as old_id, unnest(?) as place)"
_COPY_JUDGEMENTS = f"""
insert into judgement by name
{_NODES}
select j.* exclude (created_at) replace (new_id as tree_id, ? as iteration_id,
    coalesce(j.copied_from, j.tree_id) as copied_from)
from judgement j join ids on j.tree_id = old_id and j.node_index = place
"""
_COPY_REPLIES = f"""
insert into generation by name
{_NODES}
select g.* exclude (created_at) replace (new_id as owner_id)
from generation g join ids on g.owner_id = old_id and g.position = place
where g.kind = 'judgement'
"""
_ROLLOUTS_TO_COPY = f"""
{_PAIRS}
select new_id, old_id from ids join trajectory t on t.trajectory_id = old_id
where t.source = 'rollout' and new_id not in (select trajectory_id from trajectory)
"""
_COPY_TRAJECTORY = f"""
insert into trajectory by name
{_PAIRS}
select t.* exclude (created_at) replace (new_id as trajectory_id, ? as iteration_id,
    coalesce(t.copied_from, t.trajectory_id) as copied_from)
from trajectory t join ids on t.trajectory_id = old_id
"""
_COPY_STEPS = f"""
insert into step by name
{_PAIRS}
select s.* exclude (created_at) replace (new_id as trajectory_id) from step s join ids on s.trajectory_id = old_id
"""
