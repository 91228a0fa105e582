"""The types of the columns of JSON files, for the head of an export's README.md.

`datasets` types a JSON file from its first 10 MB, and stops at the first value of a key that was
null or missing until then. The types in the head hold for the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

_ANY = ("tools", "tool_definitions")
"""Keys whose values have no common type: each tool names its own arguments."""
_BATCH = 1000


def column_types(folder: Path, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return `dataset_info` for the JSON files of an export: the features of each set, by the name
    that a reader asks for.
    """
    # The library takes a second to import, and most commands do without.
    from datasets import DatasetInfo, Features, Json
    from datasets.info import DatasetInfosDict
    from huggingface_hub import DatasetCardData

    infos = DatasetInfosDict()
    for name, pattern in files.items():
        found = [file for file in sorted(folder.glob(pattern)) if file.suffix in (".json", ".jsonl")]
        if found:
            features = Features.from_arrow_schema(_schema(chain.from_iterable(map(_records, found))))
            infos[name] = DatasetInfo(features=_with_any(features, Json()))
    head = DatasetCardData()
    infos.to_dataset_card_data(head)
    types = head.to_dict().get("dataset_info", [])
    return types if isinstance(types, list) else [types]


def _records(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as stream:
        if file.suffix == ".jsonl":
            yield from map(json.loads, stream)
            return
        value = json.load(stream)
    yield from value if isinstance(value, list) else [value]


def _schema(records: Iterable[Any]) -> pa.Schema:
    rest = iter(records)
    schema = pa.schema([])
    while batch := [_without_any(record) for record in islice(rest, _BATCH)]:
        schema = pa.unify_schemas([schema, pa.schema(pa.array(batch).type.fields)], promote_options="permissive")
    return schema


def _without_any(value: Any) -> Any:
    """Return a record without the values that have no common type; its lists have none."""
    if not isinstance(value, dict):
        return value
    return {name: None if name in _ANY else _without_any(inner) for name, inner in value.items()}


def _with_any(features: Any, kind: Any) -> Any:
    for name, inner in features.items():
        if name in _ANY:
            features[name] = kind
        elif isinstance(inner, dict):
            _with_any(inner, kind)
    return features
