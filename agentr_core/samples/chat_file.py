"""General chat data in a file: one JSON object with a conversation on each line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentr_core.errors import DataFileError
from agentr_core.texts import lone_surrogate, placed, quoted, unreadable
from agentr_core.types import Instance, Message, Provenance, Rejection, Role, Sample, SampleKind, Span, grown_turn

# What a record of other programs says about which of its replies are trained.

FLAGS = ("train", "loss", "weight", "training")
"""The fields that say it: our own and Axolotl's, AgentTraj's, that of OpenAI's fine-tuning, and
Axolotl's of older versions.
"""
_QUOTED_CHARS = 60


def flag(value: Any, name: str) -> bool | None:
    """Return what a field says about training: yes, no, or nothing.

    No is false, 0 and the text "false"; yes is true and 1; null says nothing. A list says what all
    of its members say. Raises `DataFileError` for anything else, a weight between 0 and 1 among it.
    """
    if value is None:
        return None
    if isinstance(value, list):
        verdicts = {flag(member, name) for member in value} - {None}
        if len(verdicts) > 1:
            raise DataFileError(f"{name} says yes and no; a turn is trained as a whole or not at all")
        return verdicts.pop() if verdicts else None
    if value == "false":
        return False
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, int | float) and 0 < value < 1:
        raise DataFileError(f"{name} is {value}; a reply is trained or not, without a weight, so give 0 or 1")
    quoted = repr(value) if len(repr(value)) <= _QUOTED_CHARS else f"{repr(value)[:_QUOTED_CHARS]}..."
    raise DataFileError(f"{name} is {quoted}; it must be true or false, 1 or 0, or null")


def flag_of(fields: Mapping[str, Any], where: str) -> bool | None:
    """Return what the flags among some fields say, None if there are none. Raises `DataFileError`
    for a value that is no flag, and for flags that contradict each other.
    """
    verdicts = {name: flag(fields.get(name), f"{where}: {name}") for name in FLAGS}
    given_flags = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    if len(set(given_flags.values())) > 1:
        raise DataFileError(f"{where}: {' and '.join(given_flags)} contradict each other about training; leave one out")
    return next(iter(given_flags.values()), None)


def flagged(record: Mapping[str, Any], values: Sequence[Any], where: str) -> list[Any]:
    """Return turns with what their record says about training: a flag for all of them, or a list of
    one for each, as `agentr export --format trl` writes it beside token labels.

    Raises `DataFileError` for a list of another length, a value that is no flag, and flags that
    contradict those of a turn.
    """
    flagged_turns = list(values)
    for name in FLAGS:
        flags = record.get(name)
        if isinstance(flags, list) and len(flags) != len(values):
            raise DataFileError(f"{where}: {name} has {len(flags)} flags for {len(values)} turns; give one for each")
        turn_flags = flags if isinstance(flags, list) else [flags] * len(values)
        for index, value in enumerate(turn_flags):
            at = f"{where}, turn {index}"
            verdict = flag(value, f"{where}: {name}" if value is flags else f"{at}: {name}")
            turn = flagged_turns[index]
            if verdict is None or not isinstance(turn, dict):
                continue
            if flag_of(turn, at) not in (None, verdict):
                raise DataFileError(f"{at}: its flag and {name} of the record contradict each other about training")
            flagged_turns[index] = {**turn, "train": verdict}
    return flagged_turns


def untrained(turn: Any) -> Any:
    """Return a turn with the flag that it is not trained, in place of its own."""
    if not isinstance(turn, dict):
        return turn
    return {**{name: value for name, value in turn.items() if name not in FLAGS}, "train": False}


# Trajectories in the agent trajectory interchange format (ATIF) as the turns of a conversation.

OBSERVED_AS = "observation_role"
"""Where `agentr export` notes, in `extra`, what the observation of a step was, unless it was the
user's turn: a tool's, or a part of the assistant's own turn, which the next such step goes on with.
"""
_ATIF_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_OBSERVED = ("user", "tool", "assistant")
_TEXT_PARTS = ("text", "input_text", "output_text", None)


def is_atif(record: Mapping[str, Any]) -> bool:
    """Return whether an object says that it is a trajectory in ATIF."""
    return str(record.get("schema_version", "")).startswith("ATIF-")


def atif_turns(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the steps of a trajectory of ATIF 1.0 to 1.8 as turns with `role` and `content`; an
    observation is the user's turn after its step. Not trained are steps that were copied from an
    earlier trajectory, steps without a call of a model, and those whose `extra.train` says no.

    Raises `DataFileError` if a step calls tools or shows pictures, which a turn of text cannot
    hold, and for any other form.
    """
    if not str(record["schema_version"]).startswith("ATIF-v1."):
        raise DataFileError(f"{where}: schema_version is {record['schema_version']!r}; ATIF-v1.0 to ATIF-v1.8 are read")
    steps = record.get("steps")
    if not isinstance(steps, list) or not steps:
        raise DataFileError(f"{where} has no list of steps; an ATIF trajectory has at least one")
    turns: list[dict[str, Any]] = []
    unfinished = False
    for number, step in enumerate(steps, start=1):
        at = f"{where}, step {number}"
        if not isinstance(step, dict) or step.get("source") not in _ATIF_ROLES:
            raise DataFileError(f"{at}: source must be one of {', '.join(_ATIF_ROLES)}")
        if step.get("tool_calls"):
            raise DataFileError(f"{at} calls tools, which turns of text cannot hold; write the calls into its message")
        extra = step["extra"] if isinstance(step.get("extra"), dict) else {}
        turn: dict[str, Any] = {"role": _ATIF_ROLES[step["source"]], "content": text_of(step.get("message"), at)}
        # A step that was copied, or that no call of a model wrote, is not the model's.
        calls = step.get("llm_call_count")
        if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int | float) or calls < 0):
            raise DataFileError(f"{at}: llm_call_count must be a number from 0 on, or null")
        copied = calls == 0 or flag(step.get("is_copied_context"), f"{at}: is_copied_context") is True
        verdict = False if copied else flag(extra.get("train"), f"{at}: extra.train")
        if verdict is not None:
            turn["train"] = verdict
        role = extra.get(OBSERVED_AS)
        if role not in (None, *_OBSERVED) or (role == "assistant" and turn["role"] != "assistant"):
            raise DataFileError(f"{at}: extra.{OBSERVED_AS} must be one of {', '.join(_OBSERVED)}")
        observation = step.get("observation")
        results = [] if observation is None else observation.get("results") if isinstance(observation, dict) else None
        if not isinstance(results, list):
            raise DataFileError(f"{at}: observation must have a list of results")
        contents = [result.get("content") if isinstance(result, dict) else result for result in results]
        texts = [text_of(content, f"{at}, observation") for content in contents]
        if role != "assistant":
            # Without a role of their own, the results are one turn of the user.
            observed = texts if role or not texts else ["\n".join(texts)]
            turns += [turn, *({"role": role or "user", "content": text} for text in observed)]
            unfinished = False
            continue
        if not unfinished:
            turns.append({"role": "assistant", "content": "", "spans": []})
        spans = [{"text": turn["content"], "train": turn.get("train", True)}]
        spans += [{"text": text, "train": False} for text in texts]
        turns[-1]["spans"] += spans
        turns[-1]["content"] += "".join(span["text"] for span in spans)
        unfinished = bool(texts)
    return turns


def text_of(content: Any, where: str) -> str:
    """Return a content that is a text, or a list of parts that are. Raises `DataFileError` for one
    with anything else.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    if all(isinstance(part, dict) and part.get("type") in _TEXT_PARTS for part in parts):
        texts = [part.get("text") for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise DataFileError(f"{where} has content that is not text; leave the record out")


# Files of records, one JSON object a line or all in one array, and the instances they name.

MOST_DIGITS = 1_000
"""The most digits of a whole number: Python refuses to read or print several thousand."""
_INDEX_DIGITS = 18
"""An index with more digits would not fit the store's integers."""


class World(NamedTuple):
    """The names of a recipe's environment: the one in its instances, and the one in the recipe,
    which a file may use as well.
    """

    name: str
    """Such as `gymnasium-Rooms-v0`."""
    recipe_name: str = ""
    """Such as `gymnasium`; empty where it is the same."""


def records(path: Path, *, setting: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSONL file, or of one array of them, with the numbers of the lines
    they begin in, from 1; blank lines are skipped.

    Args:
        setting: the field of a recipe that names the file, for error messages.

    Raises:
        DataFileError: the file cannot be read, or something in it is not a JSON object.
    """
    for number, entry in entries(path, setting=setting):
        if isinstance(entry, DataFileError):
            raise entry
        yield number, entry


def entries(path: Path, *, setting: str) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    """Yield what `records` does, but an error in place of each line or object for which `records`
    raises it.

    An array that is not JSON ends with its error. Raises `DataFileError` when the file cannot be
    read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = unreadable(error)
        raise DataFileError(f"file {placed(path)} cannot be read: {reason}; set {setting} to a JSONL file") from error
    start = text.lstrip()[:1]
    if start == "[":
        yield from _of_array(text, path)
    elif start == "{" and text.strip().count("\n") and (single := _one_object(text, path)) is not None:
        yield single
    else:
        # Not splitlines(): JSON strings may hold other line ends, such as U+2028, as they are.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                decoder = _Decoder()
                try:
                    yield number, decoder.object_in(decoder.decode(line), path, number)
                except (json.JSONDecodeError, RecursionError) as error:
                    yield (
                        number,
                        DataFileError(f"{path}:{number} is not JSON ({error}); write one object on each line"),
                    )


class _Decoder(json.JSONDecoder):
    """Decodes JSON as Python does, and says what it could not keep: a number with more digits than
    Python reads, or a key that an object has twice.
    """

    def __init__(self) -> None:
        self._faults: list[str] = []
        super().__init__(parse_int=self._parse_int, object_pairs_hook=self._pairs)

    def object_in(self, value: Any, path: Path, line: int) -> dict[str, Any] | DataFileError:
        """Return a value that was just decoded if it is an object with all that was written."""
        faults = [*self._faults]
        self._faults.clear()
        if faults:
            return DataFileError(f"{path}:{line} has {faults[0]}; correct the record")
        if isinstance(value, dict):
            return value
        return DataFileError(f"{path}:{line} is a {type(value).__name__}; write one JSON object on each line")

    def _parse_int(self, text: str) -> int:
        if len(text) <= MOST_DIGITS:
            return int(text)
        self._faults.append(f"a number of {len(text):,} digits, and {MOST_DIGITS:,} are the most")
        return 0

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            self._faults.append(f"the key {quoted(twice, 60)} twice")
        return result


def _of_array(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any] | DataFileError]]:
    decoder, line, position = _Decoder(), 1, text.index("[")
    line += text.count("\n", 0, position)
    while True:
        begin = _next(text, position + 1)
        line += text.count("\n", position, begin)
        if text[begin : begin + 1] == "]" and text[position] == "[":
            position = begin
            break
        try:
            value, end = decoder.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            yield error.lineno, DataFileError(f"{path}:{error.lineno} is not JSON ({error.msg}); correct the array")
            return
        except RecursionError:
            yield line, DataFileError(f"{path}:{line} is nested too deeply to be a record; correct the array")
            return
        yield line, decoder.object_in(value, path, line)
        line += text.count("\n", begin, end)
        position = _next(text, end)
        if text[position : position + 1] != ",":
            break
        line += text.count("\n", end, position)
    if text[position:].strip() != "]":
        yield line, DataFileError(f"{path}:{line} is not JSON after its object; end the array with ] and nothing else")


def _one_object(text: str, path: Path) -> tuple[int, dict[str, Any] | DataFileError] | None:
    """Return the line and the object of a text that is one JSON value over several lines; None for
    any other text.
    """
    decoder, line = _Decoder(), 1 + text[: text.index("{")].count("\n")
    try:
        return line, decoder.object_in(decoder.decode(text), path, line)
    except (json.JSONDecodeError, RecursionError):
        return None


def _next(text: str, position: int) -> int:
    """Return the position of the next character that is not a space."""
    while text[position : position + 1].isspace():
        position += 1
    return position


def instance_of(record: dict[str, Any], where: str, *, world: World, split: str) -> Instance:
    """Return the instance that `instance_id`, `item_id` or `id` names: an index of the given split,
    one after the name of the environment as in `textcraft_12`, or `environment/split/index`.

    Raises `DataFileError` if the id has none of these forms, or names another environment.
    """
    extra = record.get("extra")
    ids = [source.get("instance_id") for source in (record, extra if isinstance(extra, dict) else {})]
    full_keys = [name for name in ids if isinstance(name, str) and name.count("/") >= 2]
    id_value = full_keys[0] if full_keys else record.get("item_id", record.get("id"))
    # Split from the right: the name of a world of Gymnasium may have a slash.
    parts = str(id_value).rsplit("/", 2)
    if len(parts) == 1:
        # AgentGym and ETO write `textcraft_12`.
        name, mark, number = parts[0].rpartition("_")
        is_known = not mark or name in {world_name.removeprefix("agentgym-") for world_name in world}
        parts = [world.name if is_known else name, split, number]
    is_index = len(parts) == 3 and parts[2].isdecimal() and len(parts[2]) <= _INDEX_DIGITS
    if isinstance(id_value, bool) or not is_index:
        raise DataFileError(
            f"{where}: id is {id_value!r}; give the index of an instance of split {split}, or environment/split/index"
        )
    if parts[0] not in world:
        raise DataFileError(f"{where}: id {id_value!r} is of environment {parts[0]}, but the recipe's is {world.name}")
    return Instance(environment=world.name, split=parts[1], index=int(parts[2]))


def number_of(record: dict[str, Any], key: str, where: str) -> float | None:
    """Return the reward in [0, 1] under a key; None if it is missing or null. Raises
    `DataFileError`.
    """
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataFileError(f"{where}: {key} is {value!r}; it must be a number from 0 to 1")
    return float(value)


# The fields of a record beside its texts and flags: which would change what is trained and cannot
# be read, and which are left out.

Use = Literal["expert", "pairs", "general"]
"""What records are read for."""
SYSTEM = ("system", "system_prompt")
"""The fields that have the system text beside the turns."""
_MOST_FIELDS = 100
"""The most fields that are named."""
_LISTS = ("messages", "conversations")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_CALLS = ("tool_calls", "function_call")
_PARTLY = ("train_detail", "training_detail", "loss_scale", "loss_mask", "mask")
"""Fields in which other programs weigh or mask parts of a turn."""
_LABELS = ("labels", "completion_mask", "assistant_masks", "loss_mask")
_VERDICTS = ("label", "kto_tag")
_IDS = ("id", "item_id", "instance_id", "extra.instance_id")
_OF_USE: Mapping[Use, tuple[str, ...]] = {
    "general": (),
    "expert": (*_IDS, "reward"),
    "pairs": (*_IDS, "prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"),
}
_OF_TURNS = ("role", "content", "from", "value", "spans", *FLAGS)
_OF_STEPS = (
    "step_id",
    "source",
    "message",
    "is_copied_context",
    "llm_call_count",
    "extra.train",
    f"extra.{OBSERVED_AS}",
)
_UNFLAGGED = {"id", "kind", "conversations", "system"}
"""The fields of a line that earlier versions exported for LLaMA-Factory, without flags."""


def holds(value: Any) -> bool:
    """Return whether a field holds something: null and what is empty are as if it were missing."""
    return value is not None and value not in ("", [], {})


def check_texts(record: Mapping[str, Any], where: str) -> None:
    """Raise `DataFileError` for a record with more than texts, such as pictures, or with turns in a
    field that is not read.
    """
    for name in _MEDIA:
        if holds(record.get(name)):
            raise DataFileError(f"{where} has {name}, and only texts are read; leave the record out")
    if holds(record.get("history")):
        raise DataFileError(f"{where} has turns in history, too; write all of them into one list")
    if holds(record.get("functions")):
        raise DataFileError(f"{where} defines functions in an old form; write them as tools")


def left_out(record: Mapping[str, Any], use: Use) -> frozenset[str]:
    """Return the names of the fields of a record that hold something and are not read, those
    of turns and steps after the name of their list.
    """
    if is_atif(record):
        return frozenset(_of_atif(record, use))
    turns = next((name for name in _LISTS if holds(record.get(name))), "prompt")
    read = {*_OF_USE[use], *SYSTEM, *FLAGS, "tools", turns, *(("completion",) if turns == "prompt" else ())}
    lists = (turns, "completion", "chosen", "rejected")
    return frozenset(
        [
            *_unread(record, read),
            *(name for key in lists if key in read for name in _of_turns(record.get(key), key)),
        ]
    )


def fields_left_out(path: Path, use: Use, *, setting: str) -> Counter[str]:
    """Return the fields that `left_out` names, and of how many records of a file. Raises as
    `json_lines.records`.
    """
    return Counter(name for _, record in records(path, setting=setting) for name in left_out(record, use))


def named(fields: Mapping[str, int]) -> str:
    """Return in words which fields are left out, and of how many records."""
    counts = [f"{name} ({count:,})" for name, count in sorted(fields.items())]
    more = f" and {len(counts) - _MOST_FIELDS:,} more" if counts[_MOST_FIELDS:] else ""
    return f"fields left out, and of how many records: {', '.join(counts[:_MOST_FIELDS])}{more}"


def _of_turns(values: Any, key: str) -> Iterator[str]:
    # A side of a pair may be one turn alone.
    for turn in _objects(values if isinstance(values, list) else [values]):
        yield from (f"{key}.{name}" for name in _unread(turn, _OF_TURNS))
        role = turn.get("role", turn.get("from"))
        if role not in ("assistant", "gpt"):
            # Only replies are trained.
            yield from (f"{key}.{name} of {role}" for name in FLAGS if turn.get(name) in (True, 1))


def _of_atif(record: Mapping[str, Any], use: Use) -> Iterator[str]:
    yield from _unread(record, ("schema_version", "steps", "agent.tool_definitions", *_OF_USE[use], *FLAGS, *SYSTEM))
    for step in _objects(record.get("steps")):
        yield from (f"steps.{name}" for name in _unread(step, (*_OF_STEPS, "observation")))
        for observation in _objects([step.get("observation")]):
            for result in _objects(observation.get("results")):
                yield from (f"steps.observation.{name}" for name in _unread(result, ("content",)))


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _unread(fields: Mapping[str, Any], read: Collection[str]) -> Iterator[str]:
    """Yield the names of fields that are not read; one of which a part is read by the names of its
    other parts.
    """
    for name, value in fields.items():
        if not holds(value) or name in read:
            continue
        parts = {field_name.partition(".")[2] for field_name in read if field_name.startswith(f"{name}.")}
        if parts and isinstance(value, dict):
            yield from (f"{name}.{part}" for part, content in value.items() if holds(content) and part not in parts)
        else:
            yield name


# The turns of a record: those of OpenAI (`role`, `content`) or ShareGPT (`from`, `value`), those
# of TRL's `prompt` and `completion`, or the steps of ATIF.

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_RESULTS: dict[str, Role] = {"tool": "tool", "observation": "tool"}
"""The roles of a call's result, which are read where a record defines tools."""
_NAMES = (("role", "content"), ("from", "value"))


def conversation(record: dict[str, Any], where: str) -> tuple[Message, ...]:
    """Return the turns of a record, after the tools that it defines and its system text.

    Assistant turns carry loss unless a flag of theirs, or of the record, says no, or they are a
    prompt of TRL. Raises `DataFileError`, also for a record with more than turns of text.
    """
    # Fields that would change what is trained, and that cannot be read.
    check_texts(record, where)
    if all(holds(record.get(side)) for side in ("chosen", "rejected")):
        raise DataFileError(
            f"{where} is a preference pair; import it with --as pairs, or leave chosen and rejected out"
        )
    for name in _VERDICTS:
        if record.get(name) is False:
            raise DataFileError(f"{where}: {name} is false, so its answer is a bad one; leave the record out")
    extra = record.get("extra")
    if is_atif(record) and isinstance(extra, dict) and extra.get("side") == "rejected":
        raise DataFileError(f"{where} is the rejected side of a preference pair; leave it out")
    masks = [name for name in _LABELS if isinstance(record.get(name), list)]
    if masks and not any(isinstance(record.get(name), list) for name in FLAGS):
        raise DataFileError(
            f"{where}: {masks[0]} says which tokens are trained, and whole turns are read; give a list train with a "
            "flag for each turn"
        )
    turns_value = record.get("conversations")
    if (
        record.keys() == _UNFLAGGED
        and isinstance(turns_value, list)
        and not any(isinstance(turn, dict) and any(name in turn for name in FLAGS) for turn in turns_value)
    ):
        raise DataFileError(
            f"{where} was exported for LLaMA-Factory by an earlier version of agentr, without flags, and only its last "
            "reply is to be trained; export it again"
        )
    values = atif_turns(record, where) if is_atif(record) else _turns(record, where)
    return in_context(
        record, turns(flagged(record, values, where), where, tools=defined_tools(record) is not None), where
    )


def in_context(record: Mapping[str, Any], messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """Return turns after the tools and the system text that their record has beside them. Raises
    `DataFileError` if these cannot be read, or a turn of the system says something else.
    """
    texts = {text_of(record[name], f"{where}, {name}") for name in SYSTEM if holds(record.get(name))}
    opening = {message.text for message in messages[:1] if message.role == "system"}
    if len(texts | opening) > 1:
        raise DataFileError(f"{where} has several system texts that differ; leave all but one out")
    system = tuple(Message(role="system", text=_checked_text(text, f"{where}, system")) for text in texts - opening)
    return (*_tools(record, where), *system, *messages)


def turns(values: Any, where: str, *, tools: bool = False) -> tuple[Message, ...]:
    """Return a list of turns as messages; assistant turns carry loss unless a flag of theirs says
    no. Results of calls are turns only where there are `tools`. Raises `DataFileError`.
    """
    if not isinstance(values, list):
        raise DataFileError(f"{where}: there must be a list of turns, not {type(values).__name__}")
    roles = {**_ROLES, **_RESULTS} if tools else _ROLES
    return tuple(_message(value, f"{where}, turn {position}", roles) for position, value in enumerate(values))


def defined_tools(record: Mapping[str, Any]) -> Any:
    """Return the definitions of tools in a record as they are there; None if it has none."""
    agent = record.get("agent")
    definitions = agent.get("tool_definitions") if is_atif(record) and isinstance(agent, dict) else record.get("tools")
    return definitions if holds(definitions) and definitions != "[]" else None


def _turns(record: dict[str, Any], where: str) -> list[Any]:
    lists = [record[name] for name in ("messages", "conversations") if isinstance(record.get(name), list)]
    if len([values for values in lists if values]) > 1 and lists[0] != lists[1]:
        raise DataFileError(f"{where} has both messages and conversations, and they differ; leave one out")
    if lists:
        return next((values for values in lists if values), lists[0])
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*map(untrained, prompt), *completion]
    raise DataFileError(f'{where} has no list of turns under "messages" or "conversations"; add one')


def _tools(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    definitions = defined_tools(record)
    if definitions is None:
        return ()
    if isinstance(definitions, str):
        try:
            definitions = json.loads(definitions)
        except (ValueError, RecursionError):
            raise DataFileError(f"{where}: tools is a text that is not JSON; give a list of functions") from None
    functions = (
        [entry.get("function") if isinstance(entry, dict) else None for entry in definitions]
        if isinstance(definitions, list)
        else []
    )
    if not functions or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in functions):
        raise DataFileError(
            f'{where}: tools must be a list of functions as OpenAI defines them, {{"type": "function", "function": '
            '{"name", ...}}'
        )
    return (Message(role="tools", text=json.dumps(definitions, ensure_ascii=False)),)


def _message(turn: Any, where: str, roles: Mapping[str, Role]) -> Message:
    if isinstance(turn, dict):
        # Fields that would change what is trained, and that a turn of text cannot hold.
        for name in _CALLS:
            if holds(turn.get(name)):
                raise DataFileError(
                    f"{where} has {name}, which a turn of text cannot hold; write the call into its text, as the model "
                    "is to write it"
                )
        for name in _MEDIA:
            if holds(turn.get(name)):
                raise DataFileError(f"{where} has {name}, and only texts are read; leave the record out")
        for name in _PARTLY:
            if holds(turn.get(name)):
                raise DataFileError(f"{where} has {name}, and a turn is trained as a whole or not at all; leave it out")
        for role_key, text_key in _NAMES:
            if isinstance(turn.get(text_key), str | list) and role_key in turn:
                role = turn[role_key]
                if not isinstance(role, str) or role not in roles:
                    raise DataFileError(f"{where}: {role_key} is {role!r} and must be one of {', '.join(roles)}")
                text = _checked_text(text_of(turn[text_key], f"{where}, {text_key}"), f"{where}: {text_key}")
                verdict = flag_of(turn, where)
                if holds(turn.get("spans")):
                    return _grown_turn(turn["spans"], roles[role], text, verdict, where)
                return Message(role=roles[role], text=text, train=roles[role] == "assistant" and verdict is not False)
    raise DataFileError(f'{where}: a turn must be an object with the texts "role" and "content", or "from" and "value"')


def _grown_turn(values: Any, role: Role, text: str, verdict: bool | None, where: str) -> Message:
    """Return the turn of the spans that `agentr export` writes beside its text."""
    if not isinstance(values, list):
        raise DataFileError(f"{where}: spans must be a list, not {type(values).__name__}")
    spans = []
    for index, value in enumerate(values):
        at = f"{where}, span {index}"
        is_text = isinstance(value, dict) and isinstance(value.get("text"), str)
        if not is_text or (train := flag(value.get("train"), f"{at}: train")) is None:
            raise DataFileError(f'{at}: a span must have a "text" and a flag "train"')
        spans.append(Span(text=_checked_text(value["text"], f"{at}: text"), train=train))
    turn = grown_turn(spans)
    if role != "assistant" or turn.text != text:
        raise DataFileError(f"{where}: spans must be the parts of an assistant's text, in order; leave them out")
    if verdict not in (None, turn.train):
        raise DataFileError(f"{where}: its flag and those of its spans contradict each other about training")
    return turn


def _checked_text(text: str, where: str) -> str:
    """Return a text. Raises `DataFileError` if it has half a surrogate pair."""
    if (position := lone_surrogate(text)) is not None:
        raise DataFileError(f"{where} has half a surrogate pair at {position}; correct the text")
    return text


STAGE = "general"


def read_chat(path: Path) -> tuple[tuple[Sample, ...], tuple[Rejection, ...]]:
    """Return the conversations of a file as samples with every assistant turn trained, and the
    rejections of unusable ones.

    A record is `{"messages": [{"role", "content"}, ...]}`, ShareGPT's `{"conversations": [{"from",
    "value"}, ...]}`, TRL's `prompt` and `completion` or a trajectory in ATIF; they are lines of
    JSON or one array. A turn whose flag `train`, `loss` or `weight` says no is not trained. A
    conversation is unusable, and rejected by its line, when its user and assistant turns do not
    alternate from a user turn on (where tools are defined: a reply comes first or after another), a
    turn is empty, or no turn of the assistant is trained.

    Raises:
        DataFileError: the file cannot be read, or a line has a different form; the message names
            file and line.
    """
    samples, rejections = [], []
    for number, record in records(path, setting="data.general.file"):
        messages = conversation(record, f"{path}:{number}")
        fault = fault_of(messages)
        if fault:
            rejections.append(Rejection(stage=STAGE, subject=f"{path.name}:{number}", reason=fault))
        else:
            origin = Provenance(extra={"file": path.name, "line": number})
            samples.append(Sample(kind=SampleKind.GENERAL, messages=messages, instance=None, provenance=origin))
    return tuple(samples), tuple(rejections)


def fault_of(messages: tuple[Message, ...]) -> str:
    """Return in a word why a conversation is unusable; the empty string for one that can be trained
    on.
    """
    if not any(message.train for message in messages):
        return "no-assistant-turn"
    tools = messages[0].role == "tools"
    without_tools = messages[1:] if tools else messages
    roles = [message.role for message in (without_tools[1:] if without_tools[0].role == "system" else without_tools)]
    if tools:
        # A reply comes neither first nor right after another; one may have several results.
        alternate = not any(role == before == "assistant" for before, role in pairwise(("assistant", *roles)))
    else:
        alternate = all(role == ("user", "assistant")[number % 2] for number, role in enumerate(roles))
    if not alternate:
        return "turns-do-not-alternate"
    return "" if all(message.text.strip() for message in messages) else "empty-turn"
