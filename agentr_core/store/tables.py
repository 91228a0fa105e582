"""What the writing side knows about the tables: their keys, and which columns may change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
"""Rows by table. As an argument of one call they are a unit: all are stored, or none."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: `key` identifies a row; `mutable` are the columns that a later row of the same key
    replaces.

    A row whose `fixed` columns differ from those stored for its key comes from another writer, and
    is refused.
    """

    key: tuple[str, ...]
    mutable: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "run": Table(("run_id",), ("config", "status", "finished_at")),
        "stage_input": Table(("run_id", "stage")),
        "iteration": Table(("iteration_id",), ("checkpoint_in", "checkpoint_out", "status", "finished_at")),
        "instance": Table(("instance_id",)),
        "chosen_instance": Table(("iteration_id", "name", "position")),
        "planned_rollout": Table(("trajectory_id",)),
        "text": Table(("text_id",)),
        "tree": Table(("tree_id",), ("dives_done", "finished"), ("writer",)),
        "node": Table(("tree_id", "node_index"), ("visits", "value_sum", "terminal", "stop")),
        "generation": Table(("kind", "owner_id", "position", "draw")),
        "judgement": Table(("tree_id", "node_index")),
        "oracle_verdict": Table(("tree_id", "node_index")),
        "trajectory": Table(("trajectory_id",), (), ("reward", "success", "stop", "num_steps")),
        "step": Table(("trajectory_id", "position")),
        "derivation": Table(("child_id", "parent_id")),
        "family": Table(("family_id",)),
        "edit": Table(("edit_id",)),
        "answered_call": Table(("call_id",)),
        "tool_call": Table(("kind", "owner_id", "position", "number")),
        "answer": Table(("kind", "owner_id", "position", "purpose", "number")),
        "grade": Table(("kind", "owner_id", "position")),
        "pair": Table(("pair_id",)),
        "critique": Table(("pair_id",)),
        "verdict": Table(("pair_id", "position")),
        "sample": Table(("sample_id",)),
        "message": Table(("sample_id", "position")),
        "message_span": Table(("sample_id", "message", "position")),
        "rejection": Table(("iteration_id", "stage", "subject", "reason")),
        "preference": Table(("preference_id",)),
        "dataset": Table(("dataset_id",)),
        "dataset_row": Table(("dataset_id", "position")),
        "checkpoint": Table(("checkpoint_id",), ("path",)),
        "training_step": Table(("checkpoint_id", "step")),
        "evaluation": Table(("evaluation_id",), ("finished",)),
        "episode": Table(("evaluation_id", "instance_id", "repeat", "cut")),
        "revision_state": Table(("run_id", "position")),
        "metric": Table(("scope", "scope_id", "name"), ("value", "low", "high", "n")),
        "event": Table(("event_id",)),
        "alarm": Table(("alarm_id",)),
        "selection": Table(("iteration_id", "instance_id")),
        "rl_step": Table(("iteration_id", "step")),
        "rl_group": Table(("iteration_id", "step", "number")),
        "rl_rollout": Table(("trajectory_id",)),
        "rl_validation": Table(("trajectory_id",)),
        "rl_credit": Table(("trajectory_id", "position")),
        "timing": Table(("timing_id",)),
    }
)


def merge(units: Iterable[Rows]) -> dict[str, list[Row]]:
    """Return the rows of all units as one, in their order."""
    merged: dict[str, list[Row]] = {}
    for unit in units:
        for table, rows in unit.items():
            merged.setdefault(table, []).extend(rows)
    return merged


def settled(table: str, rows: Sequence[Row], mutable: Collection[str]) -> list[Row]:
    """Return one row per key: the first, with the last values of the columns that may change.

    That is what storing the rows one after the other leaves. In one statement DuckDB takes the
    first of several rows with one key and drops the changes.
    """
    key = TABLES[table].key
    distinct: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        identity = tuple(row[column] for column in key)
        first = distinct.get(identity)
        distinct[identity] = row if first is None else {**first, **{column: row[column] for column in mutable}}
    return list(distinct.values())
