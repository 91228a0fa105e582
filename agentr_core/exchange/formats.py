"""The export formats: what each of them writes, and whether it can express which turns carry
loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from agentr_core.errors import ConfigError
from agentr_core.exchange import atif, session_files, verl
from agentr_core.exchange.training_set import (
    TOOL_ROLES,
    PairRow,
    SampleRow,
    TrainingSet,
    count_partly_trained_turns,
    count_untrained_side_turns,
    cut_replies_note,
    export_lines,
    pair_lines,
    rows_text,
    samples_of,
    spans_of,
    tools_of,
    without_tools,
)
from agentr_core.system import new_folder
from agentr_core.types import Message, Sample

# Conversations as JSON, in the formats of TRL, ShareGPT, LLaMA-Factory, AgentTraj, Alpaca and
# XTuner. Each `write_...` function puts files into a folder, and returns their paths in it by the
# name of the set.

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
    files = _write(folder, "messages", _with_origin(samples, export_lines(_samples(samples), "trl", rows=rows)))
    if any(message.spans for row in samples for message in row.sample.messages):
        return files
    return {**files, **_write(folder, "prompt_completion", map(_json_line, _completions(samples)))}


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
        rewards = not missing_rewards_note(training_set)
        lines: Iterable[str] = (_json_line(_pair_record(pair, rewards=rewards)) for pair in training_set.pairs)
        columns |= {"chosen": "chosen", "rejected": "rejected"}
    else:
        lines = export_lines(_samples(training_set.samples), "llamafactory")
    files = _write(folder, _LLAMA_FACTORY, lines)
    info = {
        "file_name": files[_LLAMA_FACTORY],
        "formatting": "sharegpt",
        **({"ranking": True} if training_set.pairs else {}),
        "columns": columns,
        "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
    }
    (folder / "dataset_info.json").write_text(json.dumps({_LLAMA_FACTORY: info}, indent=2) + "\n", encoding="utf-8")
    return files


def why_not_llama_factory(training_set: TrainingSet) -> str:
    """Return why a training set cannot be written for LLaMA-Factory; empty if it can."""
    if any(len(side) != 1 for pair in training_set.pairs for side in pair.sides):
        return "its pairs have one reply on each side, and these have whole episodes; choose parquet, trl or sharegpt"
    if any(message.spans for sample in samples_of(training_set) for message in sample.messages):
        return "it trains whole turns, and these were grown by continuation; choose parquet, trl or sharegpt"
    if any(message.role in TOOL_ROLES for sample in samples_of(training_set) for message in sample.messages):
        return "it writes calls of tools in a way of its own; export it as trl or sharegpt, or choose parquet"
    prompts = [
        [m.role for m in _without_system(pair.preference.chosen.messages[: pair.prompt_length])]
        for pair in training_set.pairs
    ]
    if any(
        roles != [("user", "assistant")[n % 2] for n in range(len(roles))] or not len(roles) % 2 for roles in prompts
    ):
        return (
            "user and assistant must take turns in a prompt, and the user must end it; choose parquet, trl or sharegpt"
        )
    return ""


def cutoff_note(training_set: TrainingSet) -> str:
    """Return a note on the length to which LLaMA-Factory truncates, with the length of the longest
    sample if it is known. Source: `DataArguments` of LLaMA-Factory 0.9.5.
    """
    longest = max((len(row.tokens[0]) for row in training_set.samples if row.tokens), default=0)
    note = f"; the longest sample has {longest:,} with the model of its run" if longest else ""
    return f"LLaMA-Factory cuts each line to `cutoff_len` tokens, 2,048 unless that is set{note}"


def missing_rewards_note(training_set: TrainingSet) -> str:
    """Return a note that the rewards are left out, since some pairs have none; empty if all have
    them.

    LLaMA-Factory reads the file with `datasets`, which fails at the first value of a key that is
    null or missing in all rows before.
    """
    pairs = [pair.preference for pair in training_set.pairs]
    count = sum(pair.chosen_reward is None or pair.rejected_reward is None for pair in pairs)
    return f"left out are the rewards, which {count} of {len(pairs)} pairs do not have" if count else ""


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[1:] if messages and messages[0].role == "system" else messages


def why_not_agenttraj(training_set: TrainingSet) -> str:
    """Return why a training set cannot be written as AgentTraj; empty if it can."""
    if training_set.pairs:
        return "it has no form for preference pairs; choose parquet, trl, sharegpt or atif"
    messages = [message for row in training_set.samples for message in _without_system(row.sample.messages)]
    if any(message.role not in ("user", "assistant") for message in messages):
        return "its turns are those of a human and of the model, and these have others; choose parquet, trl or sharegpt"
    return ""


def system_texts_note(training_set: TrainingSet) -> str:
    """Return a note on how many samples have a system text, for which AgentTraj has no turn; empty
    if none.
    """
    count = sum(row.sample.messages[0].role == "system" for row in training_set.samples)
    return f"{count} samples have a system text in a field `system`, which AgentGym does not read" if count else ""


def write_agenttraj(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `agenttraj.json`, one array with an object for each sample."""
    records = []
    for row in training_set.samples:
        instance, messages = row.sample.instance, row.sample.messages
        # AgentGym's own names lack the prefix `agentgym-`.
        world = "" if instance is None else instance.environment.removeprefix("agentgym-")
        turns = _without_system(messages)
        conversation = [
            {
                "from": "gpt" if message.role == "assistant" else "human",
                "loss": message.train if message.role == "assistant" else None,
                "value": message.text,
                **spans_of(message),
            }
            for message in turns
        ]
        records.append(
            {
                "item_id": row.id if instance is None else f"{world}_{instance.index}",
                "conversations": conversation,
                **({"system": messages[0].text} if len(turns) < len(messages) else {}),
                "id": row.id,
                "kind": str(row.sample.kind),
                **row.origin,
            }
        )
    (folder / "agenttraj.json").write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return {"agenttraj": "agenttraj.json"}


def why_not_exchanges(training_set: TrainingSet) -> str:
    """Return why a training set cannot be written as pairs of input and output (Alpaca, XTuner);
    empty if it can.
    """
    if training_set.pairs:
        return "it has no form for preference pairs; choose parquet, trl, sharegpt or atif"
    for row in training_set.samples:
        if any(message.spans for message in row.sample.messages):
            return "its outputs are whole turns, and these were grown by continuation; choose parquet, trl or sharegpt"
        if any(message.role in TOOL_ROLES for message in row.sample.messages):
            return "it has no place for tools and their results; choose parquet, trl or sharegpt"
        roles = [message.role for message in _exchange_turns(row.sample)]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            return "each input must have an output, and these turns do not alternate; choose parquet, trl or sharegpt"
    return ""


def unanswered_turns_note(training_set: TrainingSet) -> str:
    """Return a note on how many samples end with a turn that is no reply, which is left out; empty
    if none.
    """
    count = sum(row.sample.messages[-1].role != "assistant" for row in training_set.samples)
    return f"left out is the last turn of {count} samples, which has no reply" if count else ""


def alpaca_fields_note(training_set: TrainingSet) -> str:
    """Return a note on how many samples need more than the three fields of Alpaca; empty if none
    do.
    """
    count = sum(len(row.sample.messages) > 2 for row in training_set.samples)
    more = f"{count} samples have earlier turns in `history`, or a system text in `system`"
    return f"{more}, which LLaMA-Factory reads and readers of `instruction` and `output` alone do not" if count else ""


def write_alpaca(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `alpaca.jsonl`: a line for each trained turn, with that turn as `output`."""
    lines = [
        {
            "instruction": exchanges[place][0].text,
            "input": "",
            "output": exchanges[place][1].text,
            "system": system,
            "history": [[prompt.text, reply.text] for prompt, reply in exchanges[:place]],
            "id": row.id,
            "kind": str(row.sample.kind),
            **row.origin,
        }
        for row in training_set.samples
        for system, exchanges in [_exchanges(row.sample)]
        for place in range(len(exchanges))
        if exchanges[place][1].train
    ]
    return _write(folder, "alpaca", map(_json_line, lines))


def write_xtuner(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write `xtuner.jsonl`: a line for each sample, with a loss flag for each output."""
    lines = [
        {
            "conversation": [
                {
                    "system": "" if place else system,
                    "input": prompt.text,
                    "output": reply.text,
                    "output_with_loss": reply.train,
                }
                for place, (prompt, reply) in enumerate(exchanges)
            ],
            "id": row.id,
            "kind": str(row.sample.kind),
            **row.origin,
        }
        for row in training_set.samples
        for system, exchanges in [_exchanges(row.sample)]
    ]
    return _write(folder, "xtuner", map(_json_line, lines))


def _exchanges(sample: Sample) -> tuple[str, list[tuple[Message, Message]]]:
    """Return the system text of a sample (empty for none), and its pairs of user turn and reply."""
    turns, first = _exchange_turns(sample), sample.messages[0]
    system = first.text if first.role == "system" else ""
    return system, list(zip(turns[::2], turns[1::2], strict=True))


def _exchange_turns(sample: Sample) -> Sequence[Message]:
    """Return the turns of a sample after its system text, up to its last reply."""
    turns = _without_system(sample.messages)
    return turns[:-1] if turns[-1].role == "user" else turns


def _completions(samples: Iterable[SampleRow]) -> Iterable[dict[str, Any]]:
    for row in samples:
        messages = without_tools(row.sample)
        turns = [{"role": message.role, "content": message.text} for message in messages]
        for position, message in enumerate(messages):
            if message.train:
                yield {
                    "prompt": turns[:position],
                    "completion": [turns[position]],
                    **tools_of(row.sample),
                    "id": row.id,
                    "kind": str(row.sample.kind),
                    **row.origin,
                }


def _pair_record(pair: PairRow, *, rewards: bool) -> dict[str, Any]:
    prompt = pair.preference.chosen.messages[: pair.prompt_length]
    system = prompt[0].text if prompt[0].role == "system" else ""
    (chosen,), (rejected,) = pair.sides
    return {
        "conversations": [_sharegpt(message) for message in prompt if message.role != "system"],
        "chosen": _sharegpt(chosen),
        "rejected": _sharegpt(rejected),
        "system": system,
        "id": pair.id,
        **({name: getattr(pair.preference, name) for name in ("chosen_reward", "rejected_reward")} if rewards else {}),
        **pair.origin,
    }


def _pair_lines(training_set: TrainingSet, format_name: str) -> Iterable[str]:
    lines = pair_lines([pair.preference for pair in training_set.pairs], format_name)
    for pair, line in zip(training_set.pairs, lines, strict=True):
        # `id` is that of the instance, so that the file can be read back as ready pairs.
        yield _json_line({**json.loads(line), "preference_id": pair.id, **pair.origin})


def _with_origin(rows: Iterable[SampleRow], lines: Iterable[str]) -> Iterable[str]:
    for row, line in zip(rows, lines, strict=True):
        yield _json_line({**json.loads(line), **row.origin})


def _write(folder: Path, name: str, lines: Iterable[str]) -> dict[str, str]:
    file = f"{name}.jsonl"
    with (folder / file).open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)
    return {name: file}


def _samples(rows: Iterable[SampleRow]) -> list[Any]:
    return [row.sample for row in rows]


def _sharegpt(message: Message) -> dict[str, Any]:
    return {"from": "gpt" if message.role == "assistant" else "human", "value": message.text}


def _json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)


# The column types of JSON files, for the metadata at the head of an export's README.md.
#
# `datasets` infers the types of a JSON file from its first 10 MB, and fails at the first value of a
# key that was null or missing until then. The types in the metadata are those of the whole file.

_UNTYPED_KEYS = ("tools", "tool_definitions", "arguments")
"""Keys whose values have no common type: each tool has its own arguments, and integers in a call
may be of any size.
"""
_BATCH = 1000


def column_types(folder: Path, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the `dataset_info` of a README.md for the JSON files of an export: one entry with the
    column types of each set that has such files; empty if there are none.

    Args:
        files: the paths or glob patterns in the folder, by the name of the set.
    """
    # Imported here, since the import takes a second and most commands do not need the library.
    from datasets import DatasetInfo, Features, Json
    from datasets.info import DatasetInfosDict
    from huggingface_hub import DatasetCardData

    infos = DatasetInfosDict()
    for name, pattern in files.items():
        data_files = [file for file in sorted(folder.glob(pattern)) if file.suffix in (".json", ".jsonl")]
        if data_files:
            records = chain.from_iterable(map(_records, data_files))
            schema = pa.schema([])
            while batch := [_without_untyped(record) for record in islice(records, _BATCH)]:
                schema = pa.unify_schemas(
                    [schema, pa.schema(pa.array(batch).type.fields)], promote_options="permissive"
                )
            features = Features.from_arrow_schema(schema)
            infos[name] = DatasetInfo(features=_set_untyped(features, Json()))
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


def _without_untyped(value: Any) -> Any:
    """Return a record with None in place of the values of the keys in `_UNTYPED_KEYS`."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_untyped(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: None if name in _UNTYPED_KEYS else _without_untyped(inner) for name, inner in value.items()}


def _set_untyped(features: Any, kind: Any) -> Any:
    for name, feature in features.items():
        # The feature of a list has that of its values in `feature`.
        inner = getattr(feature, "feature", feature)
        if name in _UNTYPED_KEYS:
            features[name] = kind
        elif isinstance(inner, dict):
            _set_untyped(inner, kind)
    return features


# A training set as a Parquet file for `datasets.load_dataset`, with all columns of its origin.

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
"""The columns for the origin of a row; see `training_set.Origin`."""
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


def write_parquet(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write one Parquet file; its columns `tool_calls` and `extra` have JSON texts."""
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
        "prompt": _turns(pair.preference.chosen.messages[: pair.prompt_length]),
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


# The README.md of an export, in the form that the Hugging Face hub and `datasets` read.

_WIDTH = 100
_TYPED = (
    "The head of this file has the types of the columns, so load the folder: `datasets` types a JSON file that it is "
    "given alone from its first 10 MB, and fails where a key that was null until then has a value. Parquet "
    "(`agentr export --format parquet`) has no such limit."
)


def card(
    training_set: TrainingSet,
    files: Mapping[str, str],
    *,
    types: Sequence[Mapping[str, Any]],
    contents: str,
    read_with: str,
    mask_gap: str,
    notes: Sequence[str],
) -> str:
    """Return the text of an export's README.md: YAML metadata and Markdown.

    Args:
        files: the paths or glob patterns in the folder, by the name of the set that
            `datasets.load_dataset` takes; the first is the default.
        types: `dataset_info` as from `column_types`, for files without types of their own.
        contents: the number and the kind of the rows.
        read_with: a text on how to read the files.
        mask_gap: what the files do not express about the loss mask; empty if nothing.
        notes: further notes for readers.
    """
    configs = [
        {"config_name": name, "data_files": [{"split": "train", "path": path}], "default": number == 0}
        for number, (name, path) in enumerate(files.items())
    ]
    head = {
        "pretty_name": training_set.name,
        **({"license": training_set.licence} if training_set.licence else {}),
        "tags": ["agentr", "agent-trajectories"],
        # Without files, as for sessions, there is no set to load.
        **({"configs": configs} if configs else {}),
        **({"dataset_info": list(types)} if types else {}),
    }
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, width=_WIDTH)}---",
        f"# {training_set.name}",
        f"{contents}, exported by agentr. {read_with}",
        *([f"**Without the loss mask**: {mask_gap}."] if mask_gap else []),
        *(f"**Note**: {note}." for note in notes),
        *([_TYPED] if types else []),
        *(f"## {heading}\n\n{text}" for heading, text in training_set.card_sections.items() if text),
        *(["## Where it is from"] if training_set.card_sections else []),
        "\n".join(f"- {name}: `{fact}`" for name, fact in training_set.facts.items()),
    ]
    return "".join(f"{line}\n\n" for line in lines).rstrip() + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """An export format.

    `write` puts files into a folder and returns their paths or glob patterns, by the name of the
    set. `mask_gap` returns what the format cannot express about the loss mask of a training set,
    and `why_impossible` why the set cannot be written at all; both return "" if there is nothing.
    `contents_text` returns the number and the kind of the rows. Each of `notes` returns a note for
    readers, such as on what is left out, or "".
    """

    write: Callable[[TrainingSet, Path], Mapping[str, str]]
    read_with: str
    mask_gap: Callable[[TrainingSet], str] = lambda _: ""
    why_impossible: Callable[[TrainingSet], str] = lambda _: ""
    contents_text: Callable[[TrainingSet], str] = rows_text
    notes: Sequence[Callable[[TrainingSet], str]] = (cut_replies_note,)

    def notes_on(self, training_set: TrainingSet) -> list[str]:
        """Return all notes of the format that apply to a training set."""
        return [note for notes in self.notes if (note := notes(training_set))]


def export(training_set: TrainingSet, folder: Path, name: str, *, without_mask: bool = False) -> tuple[str, ...]:
    """Write a training set and its README.md into a new folder, and return the paths of all files,
    relative to the folder, sorted. The folder appears only when it is complete.

    Args:
        name: the name of the format, a key of `FORMATS`.
        without_mask: write the set even if the format cannot express which turns carry loss.

    Raises:
        ConfigError: there is no such format, the folder already exists, or the format cannot hold
            the set or its loss mask.
        DiskError: the folder cannot be written; nothing is left of it.
    """
    export_format = FORMATS.get(name)
    if export_format is None:
        raise ConfigError(f"there is no export format {name!r}; choose one of {', '.join(FORMATS)}")
    if reason := export_format.why_impossible(training_set):
        raise ConfigError(f"{training_set.name} cannot be written as {name}: {reason}")
    mask_gap = export_format.mask_gap(training_set)
    if mask_gap and not without_mask:
        raise ConfigError(
            f"{name} cannot say which turns of {training_set.name} carry loss: {mask_gap}; choose another format, or "
            "give --without-mask to write it all the same"
        )
    with new_folder(folder) as draft:
        files = export_format.write(training_set, draft)
        text = card(
            training_set,
            files,
            types=column_types(draft, files),
            contents=export_format.contents_text(training_set),
            read_with=export_format.read_with,
            mask_gap=mask_gap,
            notes=export_format.notes_on(training_set),
        )
        (draft / "README.md").write_text(text, encoding="utf-8")
    return tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))


def _partly_trained_gap(training_set: TrainingSet) -> str:
    count = count_partly_trained_turns(training_set)
    return f"{count} turns carry loss in a part of them, and its flags are for whole turns" if count else ""


def _untrained_side_gap(training_set: TrainingSet) -> str:
    count = count_untrained_side_turns(training_set)
    return f"{count} turns within the sides of pairs carry none, and a trainer masks the prompt alone" if count else ""


def _first_reason(*reasons: Callable[[TrainingSet], str]) -> Callable[[TrainingSet], str]:
    return lambda training_set: next(filter(None, (reason(training_set) for reason in reasons)), "")


_OF_SESSIONS = (session_files.respelt_calls_note, session_files.note_field_note, cut_replies_note)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "parquet": Format(
            write=write_parquet,
            read_with="`datasets.load_dataset(FOLDER)` reads it; `train` of a turn, and `labels`, say what carries "
            "loss.",
            # The labels of a sample end where its reply was cut.
            notes=(lambda training_set: cut_replies_note(training_set) if training_set.pairs else "",),
        ),
        "trl": Format(
            write=write_trl,
            read_with="For TRL 1.16. Rows of `messages` have the token ids and labels of the model of the run, which "
            "its SFT trainer takes as they are: give it a `max_length` that holds them. Rows of `prompt_completion` "
            "have each trained turn with all that comes before it, for any model.",
            mask_gap=_untrained_side_gap,
        ),
        "sharegpt": Format(
            write=write_sharegpt,
            read_with="The flag `train` of a turn says whether it carries loss; Axolotl reads it when it is told "
            "`message_field_training: train`.",
            mask_gap=_first_reason(_partly_trained_gap, _untrained_side_gap),
        ),
        "llama-factory": Format(
            write=write_llama_factory,
            read_with="Name the folder as `dataset_dir`. The last turn of each line is what is trained: LLaMA-Factory "
            "needs `mask_history: true`, and a `cutoff_len` that holds the lines.",
            why_impossible=why_not_llama_factory,
            notes=(cutoff_note, missing_rewards_note, cut_replies_note),
        ),
        "agenttraj": Format(
            write=write_agenttraj,
            read_with="`loss` of a turn says whether it carries loss, as in AgentTraj-L of AgentGym.",
            mask_gap=_partly_trained_gap,
            why_impossible=why_not_agenttraj,
            notes=(system_texts_note, cut_replies_note),
        ),
        "alpaca": Format(
            write=write_alpaca,
            read_with="A line for each trained turn, which is its `output`; the turns before it are context. "
            "LLaMA-Factory needs `mask_history: true`, or it trains these, too.",
            why_impossible=why_not_exchanges,
            notes=(alpaca_fields_note, unanswered_turns_note, cut_replies_note),
        ),
        "xtuner": Format(
            write=write_xtuner,
            read_with="For XTuner 0.2 as `dataset_map_fn=None`; `output_with_loss` says whether an output carries "
            "loss.",
            why_impossible=why_not_exchanges,
            notes=(unanswered_turns_note, cut_replies_note),
        ),
        "atif": Format(
            write=atif.write_atif,
            read_with=f"A file for each trajectory, in the agent trajectory interchange format, {atif.VERSION}; a step "
            "with `is_copied_context` is not to be trained.",
            why_impossible=atif.why_impossible,
            notes=(atif.separate_sides_note, atif.infinite_logprobs_note, cut_replies_note),
        ),
        "claude-code": Format(
            write=session_files.write_claude_code,
            read_with="A session of Claude Code for each sample. `claude --resume ID` goes on with one that is in the "
            "folder of its project, such as `~/.claude/projects/-home-me-work` for `/home/me/work`.",
            mask_gap=session_files.untrained_replies_note,
            why_impossible=session_files.why_impossible,
            notes=_OF_SESSIONS,
        ),
        "codex": Format(
            write=session_files.write_codex,
            read_with="A session of codex for each sample. `codex exec resume ID` goes on with one that is in "
            "`~/.codex/sessions`.",
            mask_gap=session_files.untrained_replies_note,
            why_impossible=session_files.why_impossible,
            notes=(session_files.codex_tools_note, *_OF_SESSIONS),
        ),
        "pi": Format(
            write=session_files.write_pi,
            read_with="A session of pi for each sample. `pi --session FILE` goes on with one.",
            mask_gap=session_files.untrained_replies_note,
            why_impossible=session_files.why_impossible,
            notes=(session_files.pi_tools_note, *_OF_SESSIONS),
        ),
        "verl": Format(
            write=verl.write,
            contents_text=verl.prompts_text,
            read_with="Rows of verl's RLHFDataset: the prompt of each instance once. Replies are sampled anew, so "
            "there is no loss mask; give verl a reward function or an interaction that plays `extra_info`, and a "
            "`data.max_prompt_length` that holds the prompts: longer ones are left out.",
            notes=(verl.tools_note, verl.later_conversations_note),
        ),
    }
)
"""The formats by their name in the option `--format`."""
