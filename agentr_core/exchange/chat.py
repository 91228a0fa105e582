"""Conversations as JSON for TRL, for readers of ShareGPT, for LLaMA-Factory, and as AgentTraj."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentr_core.exchange.training_set import TOOL_TURNS, PairRow, SampleRow, TrainingSet, samples_of
from agentr_core.samples.export import export_lines, pair_lines, spans_of
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
    """Write `agentr.jsonl` and `dataset_info.json`. Raises `DataFault` if the turns of a sample do
    not alternate.
    """
    columns = {"messages": "conversations", "system": "system"}
    if training_set.pairs:
        rewards = not lacks_rewards(training_set)
        lines: Iterable[str] = (_dumped(_ranked(pair, rewards=rewards)) for pair in training_set.pairs)
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
    if any(message.spans for sample in samples_of(training_set) for message in sample.messages):
        return "it trains whole turns, and these were grown by continuation; choose parquet, trl or sharegpt"
    if any(message.role in TOOL_TURNS for sample in samples_of(training_set) for message in sample.messages):
        return "it writes calls of tools in a way of its own; export it as trl or sharegpt, or choose parquet"
    prompts = [
        [m.role for m in _unless_system(pair.preference.chosen.messages[: pair.start])] for pair in training_set.pairs
    ]
    if any(
        roles != [("user", "assistant")[n % 2] for n in range(len(roles))] or not len(roles) % 2 for roles in prompts
    ):
        return (
            "user and assistant must take turns in a prompt, and the user must end it; choose parquet, trl or sharegpt"
        )
    return ""


def cutoff(training_set: TrainingSet) -> str:
    """Return at which length LLaMA-Factory cuts, and the length of the longest sample if it is
    known. Source: `DataArguments` of LLaMA-Factory 0.9.5.
    """
    longest = max((len(row.tokens[0]) for row in training_set.samples if row.tokens), default=0)
    own = f"; the longest sample has {longest:,} with the model of its run" if longest else ""
    return f"LLaMA-Factory cuts each line to `cutoff_len` tokens, 2,048 unless that is set{own}"


def lacks_rewards(training_set: TrainingSet) -> str:
    """Return why rewards are left out; empty if all pairs have some.

    LLaMA-Factory reads the file with `datasets`, which a key that is null or missing at first stops
    at its first value.
    """
    pairs = [pair.preference for pair in training_set.pairs]
    count = sum(pair.chosen_reward is None or pair.rejected_reward is None for pair in pairs)
    return f"left out are the rewards, which {count} of {len(pairs)} pairs do not have" if count else ""


def _unless_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[1:] if messages and messages[0].role == "system" else messages


def not_for_agenttraj(training_set: TrainingSet) -> str:
    """Return why AgentTraj cannot hold a training set; empty if it can."""
    if training_set.pairs:
        return "it has no form for preference pairs; choose parquet, trl, sharegpt or atif"
    messages = [message for row in training_set.samples for message in _unless_system(row.sample.messages)]
    if any(message.role not in ("user", "assistant") for message in messages):
        return "its turns are those of a human and of the model, and these have others; choose parquet, trl or sharegpt"
    return ""


def systems_beside(training_set: TrainingSet) -> str:
    """Return how many samples have a system text, for which AgentTraj has no turn; empty if
    none.
    """
    count = sum(row.sample.messages[0].role == "system" for row in training_set.samples)
    return f"{count} samples have a system text in a field `system`, which AgentGym does not read" if count else ""


def write_agenttraj(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `agenttraj.json`, one array."""
    records = [_agenttraj(row) for row in training_set.samples]
    (folder / "agenttraj.json").write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return {"agenttraj": "agenttraj.json"}


def _agenttraj(row: SampleRow) -> dict[str, Any]:
    instance = row.sample.instance
    # AgentGym's own names lack the prefix `agentgym-`.
    world = "" if instance is None else instance.environment.removeprefix("agentgym-")
    messages = row.sample.messages
    spoken = _unless_system(messages)
    return {
        "item_id": row.id if instance is None else f"{world}_{instance.index}",
        "conversations": [
            {
                "from": "gpt" if message.role == "assistant" else "human",
                "loss": message.train if message.role == "assistant" else None,
                "value": message.text,
                **spans_of(message),
            }
            for message in spoken
        ],
        **({"system": messages[0].text} if len(spoken) < len(messages) else {}),
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


def _ranked(pair: PairRow, *, rewards: bool) -> dict[str, Any]:
    before = pair.preference.chosen.messages[: pair.start]
    system = before[0].text if before[0].role == "system" else ""
    (chosen,), (rejected,) = pair.sides
    return {
        "conversations": [_sharegpt(message) for message in before if message.role != "system"],
        "chosen": _sharegpt(chosen),
        "rejected": _sharegpt(rejected),
        "system": system,
        "id": pair.id,
        **({name: getattr(pair.preference, name) for name in ("chosen_reward", "rejected_reward")} if rewards else {}),
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
