"""The tables: their keys, which columns may change, and which records they hold; conversion of
records to rows and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from agentr_core.fingerprint import fingerprint
from agentr_core.recipes.alarms import Crossing
from agentr_core.store.connection import quoted
from agentr_core.store.records import field_types, from_arrow_table
from agentr_core.types import (
    Answer,
    Critique,
    Derivation,
    Generation,
    Grading,
    Instance,
    Judgement,
    Node,
    Rejection,
    Sample,
    ToolCall,
    Trajectory,
)

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
"""Rows by table. As an argument of one call they are a unit: all are stored, or none."""


# Records that only the store has.


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sampled reply: number `number` of the replies to the request with seed `seed`."""

    seed: int
    number: int
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRecord:
    """The fields of a `Draw` that the step made from it lacks."""

    seed: int
    number: int
    prompt_tokens: int
    completion_tokens: int
    thinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeHead:
    """The facts about a tree that do not change while it grows. `checkpoint_id` is the policy that
    searches, `config` plain data.

    `writer` marks the process that stores the rows; rows of another process are refused.
    """

    tree_id: str
    iteration_id: str
    checkpoint_id: str
    config: Any
    instance: Instance
    first_observation: str
    seed: int
    writer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm(Crossing):
    """A threshold that was crossed in a stage of an iteration, and what the recipe does then."""

    iteration_id: str
    stage: str
    reaction: str

    @property
    def id(self) -> str:
        """A hash of iteration, stage, rule and threshold. A threshold that is crossed again in the
        same stage has the same id, and its first row is kept.
        """
        return fingerprint("alarm", self.iteration_id, self.stage, self.name, self.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A person's note on a trajectory."""

    tags: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrade:
    """The result of a scoring for an episode or for a path of a tree; `reward` and `success` are
    None if the `answer` of the grading model has no readable grade.
    """

    reward: float | None
    success: bool | None
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table: `key` identifies a row; `mutable_columns` are the columns that a later row of the
    same key replaces.

    A row whose `fixed_columns` differ from those stored for its key comes from another writer, and
    is refused.

    A table of records has a column for each field of `record`, under the field's name unless
    `column_by_field` has another; `extra_column_types` are the types of its other columns.
    """

    key: tuple[str, ...]
    mutable_columns: tuple[str, ...] = ()
    fixed_columns: tuple[str, ...] = ()
    record: type | None = None
    column_by_field: Mapping[str, str] = field(default_factory=dict)
    extra_column_types: Mapping[str, Any] = field(default_factory=dict)

    @property
    def record_column_types(self) -> Mapping[str, Any]:
        """The types of the columns that hold the record's fields, by column; empty without a
        record.
        """
        return (
            {}
            if self.record is None
            else {self.column_by_field.get(name, name): hint for name, hint in field_types(self.record).items()}
        )

    @property
    def column_types(self) -> Mapping[str, Any]:
        """The types of the columns of a table of records, by column; empty for others."""
        return {**self.record_column_types, **self.extra_column_types}


_ITERATION_COLUMN = {"iteration_id": str}
TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "run": Table(("run_id",), ("config", "status", "finished_at")),
        "stage_input": Table(("run_id", "stage")),
        "iteration": Table(("iteration_id",), ("checkpoint_in", "checkpoint_out", "status", "finished_at")),
        "instance": Table(
            ("instance_id",),
            record=Instance,
            column_by_field={"index": "instance_index"},
            extra_column_types={"instance_id": str, "depth": int | None, "origin_id": str | None},
        ),
        # A table of its own, since a world may give facts of instances that are stored already.
        "instance_facts": Table(
            ("instance_id",), ("facts",), extra_column_types={"instance_id": str, "facts": Mapping[str, Any]}
        ),
        "chosen_instance": Table(("iteration_id", "name", "position")),
        "planned_rollout": Table(("trajectory_id",)),
        "tree": Table(
            ("tree_id",),
            ("dives_done", "finished"),
            ("writer",),
            record=TreeHead,
            extra_column_types={"instance_id": str, "dives_done": int, "finished": bool, "copied_from": str | None},
        ),
        "node": Table(
            ("tree_id", "node_index"),
            ("visits", "value_sum", "terminal", "stop"),
            record=Node,
            column_by_field={"index": "node_index"},
            extra_column_types={
                "tree_id": str,
                "asked": DrawRecord | None,
                "merged": tuple[Draw, ...],
                "grading": Grading | None,
            },
        ),
        "judgement": Table(
            ("tree_id", "node_index"),
            record=Judgement,
            column_by_field={"node": "node_index"},
            extra_column_types={"tree_id": str, "iteration_id": str, "copied_from": str | None},
        ),
        "oracle_verdict": Table(("tree_id", "node_index")),
        "trajectory": Table(
            ("trajectory_id",),
            (),
            ("reward", "success", "stop", "num_steps"),
            record=Trajectory,
            extra_column_types={
                "trajectory_id": str,
                "instance_id": str,
                "num_steps": int,
                "given": int,
                "asked": tuple[DrawRecord | None, ...],
                "grading": Grading | None,
                "source": str,
                **dict.fromkeys(("iteration_id", "evaluation_id", "tree_id", "copied_from"), str | None),
                "leaf": int | None,
            },
        ),
        "note": Table(("trajectory_id",), ("tags", "text"), record=Note, extra_column_types={"trajectory_id": str}),
        "scoring": Table(("scoring_id",)),
        "regrade": Table(
            ("scoring_id", "trajectory_id"),
            record=Regrade,
            extra_column_types={"scoring_id": str, "trajectory_id": str},
        ),
        "leaf_regrade": Table(
            ("scoring_id", "tree_id", "leaf"),
            record=Regrade,
            extra_column_types={
                "scoring_id": str,
                "tree_id": str,
                "leaf": int,
                "old_reward": float,
                "old_success": bool,
            },
        ),
        "derivation": Table(
            ("child_id", "parent_id"),
            record=Derivation,
            column_by_field={"child": "child_id", "parent": "parent_id"},
            extra_column_types=_ITERATION_COLUMN,
        ),
        "family": Table(("family_id",)),
        "edit": Table(
            ("edit_id",),
            record=Answer,
            extra_column_types={
                **dict.fromkeys(("edit_id", "instance_id", "subject", "prompt"), str),
                **_ITERATION_COLUMN,
            },
        ),
        "assessment": Table(
            ("trajectory_id", "purpose", "number"),
            record=Answer,
            extra_column_types={"trajectory_id": str, "purpose": str, "number": int},
        ),
        "answered_call": Table(("call_id",), record=ToolCall, extra_column_types={"call_id": str}),
        "pair": Table(("pair_id",)),
        "critique": Table(
            ("pair_id",),
            record=Critique,
            extra_column_types={"pair_id": str, "nodes": tuple[int, ...], **_ITERATION_COLUMN},
        ),
        "sample": Table(
            ("sample_id",),
            record=Sample,
            extra_column_types={
                "sample_id": str,
                **_ITERATION_COLUMN,
                **dict.fromkeys(("instance_id", "pair_id", "trajectory_id", "tree_id"), str | None),
                **dict.fromkeys(("num_tokens", "num_trained_tokens"), int | None),
            },
        ),
        "rejection": Table(
            ("iteration_id", "stage", "subject", "reason"), record=Rejection, extra_column_types=_ITERATION_COLUMN
        ),
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
        "alarm": Table(("alarm_id",), record=Alarm, extra_column_types={"alarm_id": str}),
        "selection": Table(("iteration_id", "instance_id")),
        "rl_step": Table(("iteration_id", "step")),
        "rl_group": Table(("iteration_id", "step", "number")),
        "rl_rollout": Table(("trajectory_id",)),
        "rl_validation": Table(("trajectory_id",)),
        "rl_credit": Table(("trajectory_id", "position")),
        "rl_score": Table(("trajectory_id", "position")),
        "timing": Table(("timing_id",)),
    }
)


_BATCH_ROWS = 4_096
"""The rows of one Arrow batch, in which a text column has room for 2 GiB."""


def row_of(table: str, record: Any, **extra: Any) -> Row:
    """Return `record` as a row of `table`; `extra` are columns that are no fields of the record."""
    columns = TABLES[table].column_by_field
    return {columns.get(name, name): getattr(record, name) for name in field_types(record.__class__)} | extra


def load_records(
    con: Any, table: str, condition: str, params: Any = (), *, extra_columns: Sequence[str] = ()
) -> list[tuple[Any, ...]]:
    """Return the records of `table` whose rows meet `condition`, an SQL expression that may be
    followed by `order by`. Each item is a tuple: the values of the columns in `extra_columns`, then
    the record.
    """
    table_spec = TABLES[table]
    assert table_spec.record is not None
    result = con.execute(
        f"select {', '.join(map(quoted, [*extra_columns, *table_spec.record_column_types]))} "
        f"from {table} where {condition}",
        params,
    ).to_arrow_table(_BATCH_ROWS)
    names = tuple(field_types(table_spec.record))
    return [
        (*row[: len(extra_columns)], table_spec.record(**dict(zip(names, row[len(extra_columns) :], strict=True))))
        for row in from_arrow_table(result, table_spec.column_types)
    ]


def unit_size(unit: Rows) -> int:
    """Return the number of rows of a unit plus the lengths of the tuples in them: steps, messages,
    replies.
    """
    return sum(
        1 + sum(len(value) for value in row.values() if isinstance(value, tuple))
        for rows in unit.values()
        for row in rows
    )


def merge(units: Iterable[Rows]) -> dict[str, list[Row]]:
    """Return the rows of all units by table, in the order of the units."""
    rows_by_table: dict[str, list[Row]] = {}
    for unit in units:
        for table, rows in unit.items():
            rows_by_table.setdefault(table, []).extend(rows)
    return rows_by_table


def merge_by_key(table: str, rows: Sequence[Row], mutable_columns: Collection[str]) -> list[Row]:
    """Return one row per key: the first, with the last values of the columns that may change.

    That is what storing the rows one after the other leaves. In one statement DuckDB takes the
    first of several rows with one key and drops the changes.
    """
    key = TABLES[table].key
    distinct: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key_values = tuple(row[column] for column in key)
        first = distinct.get(key_values)
        distinct[key_values] = (
            row if first is None else {**first, **{column: row[column] for column in mutable_columns}}
        )
    return list(distinct.values())
