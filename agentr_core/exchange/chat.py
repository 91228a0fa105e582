"""Conversations as JSON for TRL, for readers of ShareGPT, for LLaMA-Factory, and as AgentTraj."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentr_core.exchange.training_set import PairRow, SampleRow, TrainingSet
from agentr_core.samples.export import export_lines, pair_lines
from agentr_core.types import Message

_LLAMA_FACTORY = "agentr"
"""The name of the data set in `dataset_info.json`."""


def write_trl(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `preference.jsonl` for pairs; for samples `messages.jsonl` and, if no turn was grown by
    continuation, `prompt_completion.jsonl`. Raises `DataFault` for a sample without tokens.
    """
    if training_set.pairs:
        return _write(folder, "preference", _pair_lines(training_set, "trl"))
    samples = training_set.samples
    rows = {row.id: row.tokens for row in samples if row.tokens is not None}
    written = _write(folder, "messages", _with_origin(samples, export_lines(_samples(samples), "trl", rows=rows)))
    if any(message.spans for row in samples for message in row.sample.messages):
        return written
    return {**written, **_write(folder, "prompt_completion", map(_dumped, _completions(samples)))}


def write_sharegpt(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `sharegpt.jsonl` for samples, `preference.jsonl` for pairs."""
    if training_set.pairs:
        return _write(folder, "preference", _pair_lines(training_set, "sharegpt"))
    lines = export_lines(_samples(training_set.samples), "sharegpt")
    return _write(folder, "sharegpt", _with_origin(training_set.samples, lines))


def write_llama_factory(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `agentr.jsonl` and `dataset_info.json`. Raises `DataFault` if turns do not
    alternate.
    """
    columns = {"messages": "conversations", "system": "system"}
    if training_set.pairs:
        lines: Iterable[str] = (_dumped(_ranked(pair)) for pair in training_set.pairs)
        columns |= {"chosen": "chosen", "rejected": "rejected"}
    else:
        lines = export_lines(_samples(training_set.samples), "llamafactory")
    written = _write(folder, _LLAMA_FACTORY, lines)
    info = {
        "file_name": written[_LLAMA_FACTORY],
        "formatting": "sharegpt",
        **({"ranking": True} if training_set.pairs else {}),
        "columns": columns,
        "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
    }
    (folder / "dataset_info.json").write_text(json.dumps({_LLAMA_FACTORY: info}, indent=2) + "\n", encoding="utf-8")
    return written


def not_for_llama_factory(training_set: TrainingSet) -> str:
    """Return why LLaMA-Factory cannot read a training set; empty if it can."""
    if any(len(side) != 1 for pair in training_set.pairs for side in pair.sides):
        return "its pairs have one reply on each side, and these have whole episodes; choose parquet, trl or sharegpt"
    if any(message.spans for row in training_set.samples for message in row.sample.messages):
        return "it trains whole turns, and these were grown by continuation; choose parquet, trl or sharegpt"
    return ""


def write_agenttraj(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `agenttraj.json`, one array."""
    records = [_agenttraj(row) for row in training_set.samples]
    (folder / "agenttraj.json").write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return {"agenttraj": "agenttraj.json"}


def _agenttraj(row: SampleRow) -> dict[str, Any]:
    instance = row.sample.instance
    # AgentGym's own names lack the prefix `agentgym-`.
    world = "" if instance is None else instance.environment.removeprefix("agentgym-")
    return {
        "item_id": row.id if instance is None else f"{world}_{instance.index}",
        "conversations": [
            {
                "from": "gpt" if message.role == "assistant" else "human",
                "loss": message.train if message.role == "assistant" else None,
                "value": message.text,
            }
            for message in row.sample.messages
        ],
        "id": row.id,
        "kind": str(row.sample.kind),
        **row.origin,
    }


def _completions(samples: Iterable[SampleRow]) -> Iterable[dict[str, Any]]:
    for row in samples:
        turns = [_openai(message) for message in row.sample.messages]
        for position, message in enumerate(row.sample.messages):
            if message.train:
                yield {
                    "prompt": turns[:position],
                    "completion": [turns[position]],
                    "id": row.id,
                    "kind": str(row.sample.kind),
                    **row.origin,
                }


def _ranked(pair: PairRow) -> dict[str, Any]:
    before = pair.preference.chosen.messages[: pair.start]
    system = before[0].text if before[0].role == "system" else ""
    (chosen,), (rejected,) = pair.sides
    return {
        "conversations": [_sharegpt(message) for message in before if message.role != "system"],
        "chosen": _sharegpt(chosen),
        "rejected": _sharegpt(rejected),
        "system": system,
        "id": pair.id,
        **pair.origin,
    }


def _pair_lines(training_set: TrainingSet, form: str) -> Iterable[str]:
    lines = pair_lines([pair.preference for pair in training_set.pairs], form)
    for pair, line in zip(training_set.pairs, lines, strict=True):
        # `id` is that of the instance, so that the file can be read back as ready pairs.
        yield _dumped({**json.loads(line), "preference_id": pair.id, **pair.origin})


def _with_origin(rows: Iterable[SampleRow], lines: Iterable[str]) -> Iterable[str]:
    for row, line in zip(rows, lines, strict=True):
        yield _dumped({**json.loads(line), **row.origin})


def _write(folder: Path, name: str, lines: Iterable[str]) -> dict[str, str]:
    file = f"{name}.jsonl"
    with (folder / file).open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)
    return {name: file}


def _samples(rows: Iterable[SampleRow]) -> list[Any]:
    return [row.sample for row in rows]


def _openai(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.text}


def _sharegpt(message: Message) -> dict[str, Any]:
    return {"from": "gpt" if message.role == "assistant" else "human", "value": message.text}


def _dumped(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)
