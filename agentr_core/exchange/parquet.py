"""A training set as Parquet that `datasets.load_dataset` opens, with everything that is known about
each row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.exchange.training_set import PairRow, SampleRow, TrainingSet
from agentr_core.types import Message

FILE = "data/train-00000-of-00001.parquet"
_TURNS = pa.list_(
    pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("train", pa.bool_()),
            ("spans", pa.list_(pa.struct([("text", pa.string()), ("train", pa.bool_())]))),
        ]
    )
)
ORIGIN = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "recipe", "dataset_id", "dataset_hash")),
        *((name, pa.int64()) for name in ("iteration", "position")),
        *((name, pa.string()) for name in ("instance_id", "pair_id", "trajectory_id", "tree_id")),
        *((name, pa.int64()) for name in ("good_leaf", "bad_leaf", "cut")),
        *((name, pa.float64()) for name in ("good_reward", "bad_reward")),
    ]
)
"""The columns for the origin of a row, as `origin` names them."""
_SAMPLES = pa.schema(
    [
        ("id", pa.string()),
        ("kind", pa.string()),
        ("messages", _TURNS),
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("tool_calls", pa.string()),
        ("extra", pa.string()),
        *ORIGIN,
    ]
)
_PAIRS = pa.schema(
    [
        ("id", pa.string()),
        ("kind", pa.string()),
        *((name, _TURNS) for name in ("prompt", "chosen", "rejected")),
        *((name, pa.float64()) for name in ("chosen_reward", "rejected_reward")),
        *((name, pa.string()) for name in ("chosen_sample_id", "rejected_sample_id")),
        *ORIGIN,
    ]
)


def write(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write one Parquet file; `tool_calls` and `extra` are JSON."""
    rows = [_pair(pair) for pair in training_set.pairs] or [_sample(row) for row in training_set.samples]
    schema = _PAIRS if training_set.pairs else _SAMPLES
    file = folder / FILE
    file.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
    return {"default": FILE}


def _sample(row: SampleRow) -> dict[str, Any]:
    ids, labels = row.tokens or (None, None)
    return {
        "id": row.id,
        "kind": str(row.sample.kind),
        "messages": _turns(row.sample.messages),
        "input_ids": ids,
        "labels": labels,
        "tool_calls": json.dumps(list(row.tool_calls), ensure_ascii=False),
        "extra": json.dumps(dict(row.sample.provenance.extra), ensure_ascii=False, default=str),
        **row.origin,
    }


def _pair(pair: PairRow) -> dict[str, Any]:
    chosen, rejected = pair.sides
    return {
        "id": pair.id,
        "kind": str(pair.preference.case),
        "prompt": _turns(pair.preference.chosen.messages[: pair.start]),
        "chosen": _turns(chosen),
        "rejected": _turns(rejected),
        "chosen_reward": pair.preference.chosen_reward,
        "rejected_reward": pair.preference.rejected_reward,
        **pair.origin,
    }


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [
        {
            "role": message.role,
            "content": message.text,
            "train": message.train,
            "spans": [{"text": span.text, "train": span.train} for span in message.spans] or None,
        }
        for message in messages
    ]
