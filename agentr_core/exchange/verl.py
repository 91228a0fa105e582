"""Rows for reinforcement learning with verl: the prompt of each instance, and the data that its
reward needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.errors import ConfigError
from agentr_core.exchange.training_set import Origin, TrainingSet, opening
from agentr_core.types import Instance, Sample, SampleKind

FILE = "train.parquet"
_INTERACTION = pa.struct([("name", pa.string()), ("instance_id", pa.string())])
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("split", pa.string()),
                    ("instance_id", pa.string()),
                    ("interaction_kwargs", _INTERACTION),
                    *((name, pa.string()) for name in ("id", "run_id", "recipe", "dataset_id")),
                    ("iteration", pa.int64()),
                ]
            ),
        ),
    ]
)
"""verl's own columns; it reads further ones from `extra_info`. Source: `RLHFDataset` of verl
0.9.1, and the page "Prepare data for post-training" of its documentation."""


def write(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write a row for each instance, in the order of the set. Raises `ConfigError` if no sample
    belongs to an instance.
    """
    rows = _rows(training_set)
    if not rows:
        raise ConfigError(f"{training_set.name} has no sample of an instance to play; choose another format")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / FILE)
    return {"default": FILE}


def told(training_set: TrainingSet) -> str:
    """Return how many prompts there are."""
    return f"{len(_rows(training_set))} prompts"


def tools_elsewhere(training_set: TrainingSet) -> str:
    """Return how many prompts offer tools, which verl reads from a file of its own; empty if
    none.
    """
    rows = _rows(training_set)
    offered = {sample.instance.key for _, sample, _ in _episodes(training_set) if sample.instance and _offers(sample)}
    count = sum(row["reward_model"]["ground_truth"] in offered for row in rows)
    return (
        f"left out are the tools that {count} prompts offer; name them to verl in `data.tool_config_path`"
        if count
        else ""
    )


def _offers(sample: Sample) -> bool:
    return sample.messages[0].role == "tools"


def _rows(training_set: TrainingSet) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for key, sample, origin in _episodes(training_set):
        if sample.instance is not None and sample.kind != SampleKind.JUDGE:
            rows.setdefault(sample.instance.key, _row(key, sample, sample.instance, origin))
    return list(rows.values())


def _episodes(training_set: TrainingSet) -> Iterable[tuple[str, Sample, Origin]]:
    yield from ((row.id, row.sample, row.origin) for row in training_set.samples)
    yield from ((pair.id, pair.preference.chosen, pair.origin) for pair in training_set.pairs)


def _row(key: str, sample: Sample, instance: Instance, origin: Origin) -> dict[str, Any]:
    return {
        "data_source": instance.environment,
        "prompt": [
            {"role": message.role, "content": message.text}
            for message in opening(sample.messages)
            if message.role != "tools"
        ],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": instance.key},
        "extra_info": {
            "index": instance.index,
            "split": instance.split,
            "instance_id": instance.key,
            "interaction_kwargs": {"name": instance.environment, "instance_id": instance.key},
            "id": key,
            **{name: origin.get(name) for name in ("run_id", "recipe", "dataset_id", "iteration")},
        },
    }
