"""Reading conversations from records in the formats of other programs, and files of general chat
data: one JSON object with a conversation on each line, or one array of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentr_core.episodes.transcript import call_text, readable_calls
from agentr_core.errors import DataFileError
from agentr_core.samples import published
from agentr_core.samples.record_files import records
from agentr_core.samples.sessions import AGENT_FIELD, session_as_conversation, unread_fields
from agentr_core.texts import lone_surrogate
from agentr_core.types import Instance, Message, Provenance, Rejection, Role, Sample, SampleKind, Span, grown_turn

# The flags in records that say which replies are trained, in the forms of several programs.

FLAG_FIELDS = ("train", "loss", "weight", "training")
"""The names of the flags: of agentr and Axolotl, AgentTraj, OpenAI's fine-tuning, and older
versions of Axolotl, in this order.
"""
_QUOTED_CHARS = 60


def parse_flag(value: Any, name: str) -> bool | None:
    """Parse the value of a training flag.

    False, 0 and the text "false" give False, true and 1 give True, null gives None. A list gives
    the value that all of its members have, except null ones. Raises `DataFileError` for a list of
    both values, and for anything else, such as a weight between 0 and 1.
    """
    if value is None:
        return None
    if isinstance(value, list):
        values = {parse_flag(member, name) for member in value} - {None}
        if len(values) > 1:
            raise DataFileError(f"{name} says yes and no; a turn is trained as a whole or not at all")
        return values.pop() if values else None
    if value == "false":
        return False
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, int | float) and 0 < value < 1:
        raise DataFileError(f"{name} is {value}; a reply is trained or not, without a weight, so give 0 or 1")
    excerpt = repr(value) if len(repr(value)) <= _QUOTED_CHARS else f"{repr(value)[:_QUOTED_CHARS]}..."
    raise DataFileError(f"{name} is {excerpt}; it must be true or false, 1 or 0, or null")


def train_flag(fields: Mapping[str, Any], where: str) -> bool | None:
    """Return the value of the training flags (`FLAG_FIELDS`) among the fields of a record or turn,
    None if there are none. Raises `DataFileError` for a value that is no flag, and for flags that
    contradict each other.
    """
    flag_by_name = {name: parse_flag(fields.get(name), f"{where}: {name}") for name in FLAG_FIELDS}
    given_flags = {name: is_trained for name, is_trained in flag_by_name.items() if is_trained is not None}
    if len(set(given_flags.values())) > 1:
        raise DataFileError(f"{where}: {' and '.join(given_flags)} contradict each other about training; leave one out")
    return next(iter(given_flags.values()), None)


def with_flags(record: Mapping[str, Any], values: Sequence[Any], where: str) -> list[Any]:
    """Return turns with the training flags of their record put into each as `train`. The record has
    one flag for all turns, or a list with one for each, as `agentr export --format trl` writes.

    Raises `DataFileError` for a list of another length, a value that is no flag, and flags that
    contradict those of a turn.
    """
    flagged_turns = list(values)
    for name in FLAG_FIELDS:
        flags = record.get(name)
        if isinstance(flags, list) and len(flags) != len(values):
            raise DataFileError(f"{where}: {name} has {len(flags)} flags for {len(values)} turns; give one for each")
        turn_flags = flags if isinstance(flags, list) else [flags] * len(values)
        for index, value in enumerate(turn_flags):
            location = f"{where}, turn {index}"
            is_trained = parse_flag(value, f"{where}: {name}" if value is flags else f"{location}: {name}")
            turn = flagged_turns[index]
            if is_trained is None or not isinstance(turn, dict):
                continue
            if train_flag(turn, location) not in (None, is_trained):
                raise DataFileError(
                    f"{location}: its flag and {name} of the record contradict each other about training"
                )
            flagged_turns[index] = {**turn, "train": is_trained}
    return flagged_turns


def without_loss(turn: Any) -> Any:
    """Return a turn with `train` False in place of its own flags; a value that is no object as it
    is.
    """
    if not isinstance(turn, dict):
        return turn
    return {**{name: value for name, value in turn.items() if name not in FLAG_FIELDS}, "train": False}


# Tool calls in separate fields, as in OpenAI's protocol, become part of the reply's text, in the
# form that a model trained on tools writes.


def reply_text(text_before: str, calls: Iterable[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Return the text of a reply: `text_before`, then each call. A call is a name with its
    arguments, as an object or as JSON text.
    """
    text = text_before.strip()
    for name, arguments in calls:
        arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text = call_text(name, arguments_text, before=text)
    return text


def with_written_calls(values: Sequence[Any], where: str) -> list[Any]:
    """Return turns with the calls of each (`tool_calls`) moved into its text, and the results after
    it (`tool_call_id`) sorted into the order of the calls: a chat template does not show to which
    call a result belongs.

    Raises `DataFileError` as `calls_of` does, and for a result whose id is not that of a call of
    the reply before it.
    """
    plain_turns: list[Any] = []
    # The ids of the last reply's calls; None if its calls, if any, are in its text, without ids.
    open_call_ids: list[str] | None = None
    first = 0
    for position, turn in enumerate(values):
        location = f"{where}, turn {position}"
        if not isinstance(turn, dict):
            plain_turns.append(turn)
        elif has_value(turn.get("tool_calls")):
            open_call_ids, text = calls_of(turn, location)
            plain_turns.append({**{name: turn[name] for name in turn if name != "tool_calls"}, "content": text})
            first = len(plain_turns)
        elif open_call_ids is not None and turn.get("role") == "tool" and has_value(key := turn.get("tool_call_id")):
            if str(key) not in open_call_ids:
                raise DataFileError(
                    f"{location} has the result of {key!r}, and no call of the reply before it has that id"
                )
            plain_turns.append(turn)
            # Results of later calls may have come first.
            results = plain_turns[first:]
            plain_turns[first:] = [
                result
                for call_id in dict.fromkeys(open_call_ids)
                for result in results
                if str(result["tool_call_id"]) == call_id
            ]
        else:
            plain_turns.append(turn)
            open_call_ids = [] if "tool_calls" in turn else None
    return plain_turns


def calls_of(turn: Mapping[str, Any], where: str) -> tuple[list[str], str]:
    """Return the ids of the calls in `tool_calls` of a turn, and its text with the calls in it.

    Raises `DataFileError` if the turn is not the assistant's, a call has no name or something other
    than an object as its arguments, or the text itself makes other calls.
    """
    values = turn["tool_calls"]
    if turn.get("role") != "assistant" or not isinstance(values, list):
        raise DataFileError(f"{where}: tool_calls must be a list in a turn of the assistant")
    ids: list[str] = []
    calls: list[tuple[str, Any]] = []
    for number, call in enumerate(values, start=1):
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        # Servers report a call without arguments in these ways, too.
        arguments = {} if arguments in (None, "") else arguments
        if not isinstance(name, str) or not isinstance(_arguments(arguments), dict):
            raise DataFileError(f"{where}: call {number} must have a name, and arguments that are an object")
        ids.append(str(call.get("id")))
        calls.append((name, arguments))
    text = text_of(turn.get("content"), where)
    in_text = [(call.name, dict(call.arguments)) for call in readable_calls(text)]
    if in_text and in_text != [(name, _arguments(arguments)) for name, arguments in calls]:
        raise DataFileError(f"{where}: its text makes other calls than tool_calls; leave one of both out")
    return ids, text if in_text else reply_text(text, calls)


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


# Trajectories in the agent trajectory interchange format (ATIF), converted to turns.

OBSERVATION_ROLE = "observation_role"
"""The key in a step's `extra` in which `agentr export` stores the role of its observation. "tool":
a turn of a tool; "assistant": a span of the assistant turn, which the next agent step continues. It
is left out for a user turn and for the results of calls.
"""
REPLY_TEXT = "reply"
"""The key in a step's `extra` in which `agentr export` stores the text of a reply with calls, if it
cannot be rebuilt from the step's message and calls.
"""
ATIF_VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
"""The versions that are read. In a newer one the meaning of a field may differ."""
_ATIF_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_OBSERVATION_ROLES = ("user", "tool", "assistant")
_TEXT_PARTS = ("text", "input_text", "output_text", None)


def is_atif(record: Mapping[str, Any]) -> bool:
    """Return whether an object is a trajectory in ATIF: by its `schema_version` or, without one, by
    having a list `steps` and an object `agent`.
    """
    version = record.get("schema_version")
    if version is not None:
        return str(version).startswith("ATIF-")
    return isinstance(record.get("steps"), list) and isinstance(record.get("agent"), dict)


def atif_turns(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the steps of a trajectory of ATIF 1.0 to 1.8 as turns with `role` and `content`.

    The results of calls become turns of role `tool`; any other observation becomes a user turn
    after its step, unless `extra` says otherwise (`OBSERVATION_ROLE`). Steps that were copied from
    an earlier trajectory, steps without a call of a model, and those whose `extra.train` is false
    get `train` False.

    Raises `DataFileError` for content that is not text, such as pictures, another version, and a
    malformed trajectory.
    """
    version = record.get("schema_version", ATIF_VERSIONS[-1])
    if version not in ATIF_VERSIONS:
        raise DataFileError(
            f"{where}: schema_version is {version!r}; {ATIF_VERSIONS[0]} to {ATIF_VERSIONS[-1]} are read"
        )
    steps = record.get("steps")
    if not isinstance(steps, list) or not steps:
        raise DataFileError(f"{where} has no list of steps; an ATIF trajectory has at least one")
    turns: list[dict[str, Any]] = []
    turn_is_open = False
    for number, step in enumerate(steps, start=1):
        location = f"{where}, step {number}"
        if not isinstance(step, dict) or step.get("source") not in _ATIF_ROLES:
            raise DataFileError(f"{location}: source must be one of {', '.join(_ATIF_ROLES)}")
        if step.get("step_id", number) != number:
            raise DataFileError(f"{location}: step_id is {step['step_id']!r}; steps are numbered from 1 in their order")
        extra = step["extra"] if isinstance(step.get("extra"), dict) else {}
        turn = atif_turn(step, extra, location)
        role = extra.get(OBSERVATION_ROLE)
        if role not in (None, *_OBSERVATION_ROLES) or (role == "assistant" and turn["role"] != "assistant"):
            raise DataFileError(f"{location}: extra.{OBSERVATION_ROLE} must be one of {', '.join(_OBSERVATION_ROLES)}")
        results = atif_results(step, location)
        if role != "assistant":
            turns += [turn, *_observation_turns(results, role)]
            turn_is_open = False
            continue
        if "tool_calls" in turn:
            raise DataFileError(
                f"{location}: its results are a part of its turn (extra.{OBSERVATION_ROLE}), so it has no calls"
            )
        if not turn_is_open:
            turns.append({"role": "assistant", "content": "", "spans": []})
        spans = [{"text": turn["content"], "train": turn.get("train", True)}]
        spans += [{"text": text, "train": False} for _, text in results]
        turns[-1]["spans"] += spans
        turns[-1]["content"] += "".join(span["text"] for span in spans)
        turn_is_open = bool(results)
    return turns


def atif_turn(step: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the message of a step as a turn: `role`, `content`, and, where the step has them,
    `tool_calls` and the flag `train`. Raises `DataFileError` for a malformed step.
    """
    turn: dict[str, Any] = {"role": _ATIF_ROLES[step["source"]], "content": text_of(step.get("message"), where)}
    if has_value(step.get("tool_calls")):
        calls = [
            {"id": call.get("tool_call_id"), "name": call.get("function_name"), "arguments": call.get("arguments")}
            for call in _objects(step["tool_calls"])
        ]
        if not calls or not all(isinstance(call["id"], str) and isinstance(call["arguments"], dict) for call in calls):
            raise DataFileError(
                f"{where}: each of tool_calls must have a tool_call_id, a function_name, and arguments that are an "
                "object"
            )
        turn["tool_calls"] = calls
        if REPLY_TEXT in extra:
            reply = extra[REPLY_TEXT]
            texts_outside = [call.text_outside for call in readable_calls(reply)[:1]] if isinstance(reply, str) else []
            if texts_outside != [turn["content"]]:
                raise DataFileError(f"{where}: extra.{REPLY_TEXT} says something else than its message; leave it out")
            turn["content"] = reply
    # A step that was copied, or that no call of a model wrote, is not the model's.
    num_llm_calls = step.get("llm_call_count")
    if num_llm_calls is not None and (
        isinstance(num_llm_calls, bool) or not isinstance(num_llm_calls, int | float) or num_llm_calls < 0
    ):
        raise DataFileError(f"{where}: llm_call_count must be a number from 0 on, or null")
    is_copied = num_llm_calls == 0 or parse_flag(step.get("is_copied_context"), f"{where}: is_copied_context") is True
    is_trained = False if is_copied else parse_flag(extra.get("train"), f"{where}: extra.train")
    return turn if is_trained is None else {**turn, "train": is_trained}


def atif_results(step: Mapping[str, Any], where: str) -> list[tuple[str | None, str]]:
    """Return the results in the observation of a step, each as the id of its call (None if it
    answers no call) and its text. Raises `DataFileError` for malformed ones.
    """
    observation = step.get("observation")
    results = [] if observation is None else observation.get("results") if isinstance(observation, dict) else None
    if not isinstance(results, list):
        raise DataFileError(f"{where}: observation must have a list of results")
    ids = {call["tool_call_id"] for call in step.get("tool_calls") or ()}
    pairs = []
    for result in results:
        fields = result if isinstance(result, dict) else {"content": result}
        key = fields.get("source_call_id")
        if key is not None and key not in ids:
            raise DataFileError(f"{where}: source_call_id is {key!r}, and no call of the step has that id")
        pairs.append((key, text_of(fields.get("content"), f"{where}, observation")))
    return pairs


def _observation_turns(results: Sequence[tuple[str | None, str]], role: str | None) -> list[dict[str, Any]]:
    """Return the turns after a step: a `tool` turn for each result of a call, then the other
    results, as one user turn or, if `role` is given, each as a turn of that role.
    """
    result_turns = [{"role": "tool", "content": text, "tool_call_id": key} for key, text in results if key is not None]
    other_texts = [text for key, text in results if key is None]
    texts = other_texts if role or not other_texts else ["\n".join(other_texts)]
    return [*result_turns, *({"role": role or "user", "content": text} for text in texts)]


def text_of(content: Any, where: str) -> str:
    """Return the text of a content: a string as it is, the joined texts of a list of text parts, or
    of one part, and "" for None. Raises `DataFileError` for anything else.
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


# The ids of instances in records.

_INDEX_DIGITS = 18
"""The most digits of an index, so that it fits the store's 64-bit integers."""


class World(NamedTuple):
    """The two names of a recipe's environment; a file may use either."""

    name: str
    """The name in its instances, such as `gymnasium-Rooms-v0`."""
    recipe_name: str = ""
    """The name in the recipe, such as `gymnasium`; empty if it is the same."""


def instance_of(record: dict[str, Any], where: str, *, world: World, split: str) -> Instance:
    """Return the instance that a record names in `instance_id` (also within `extra`), `item_id` or
    `id`. The id is `environment/split/index`, an index of the given split, or such an index after
    the environment's name, as in `textcraft_12`.

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
        name, separator, number = parts[0].rpartition("_")
        is_known = not separator or name in {world_name.removeprefix("agentgym-") for world_name in world}
        parts = [world.name if is_known else name, split, number]
    if AGENT_FIELD in record and not parts[2].isdecimal():
        raise DataFileError(
            f"{where} is a session of {record[AGENT_FIELD]}, which names no instance; give its file the name of one, "
            f"such as {world.recipe_name or world.name}_12.jsonl"
        )
    is_index = len(parts) == 3 and parts[2].isdecimal() and len(parts[2]) <= _INDEX_DIGITS
    if isinstance(id_value, bool) or not is_index:
        raise DataFileError(
            f"{where}: id is {id_value!r}; give the index of an instance of split {split}, or environment/split/index"
        )
    if parts[0] not in world:
        raise DataFileError(f"{where}: id {id_value!r} is of environment {parts[0]}, but the recipe's is {world.name}")
    return Instance(environment=world.name, split=parts[1], index=int(parts[2]))


def number_of(record: dict[str, Any], key: str, where: str) -> float | None:
    """Return the number under a key of a record, such as a reward; None if it is missing or null.
    Raises `DataFileError` if it is not a number in [0, 1].
    """
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataFileError(f"{where}: {key} is {value!r}; it must be a number from 0 to 1")
    return float(value)


# The fields of a record other than its texts and flags: those that make it unusable, since they
# would change what is trained and cannot be read, and those that are ignored.

RecordUse = Literal["expert", "pairs", "general"]
"""What records are read for: expert trajectories, preference pairs or general chat data."""
SYSTEM_FIELDS = ("system", "system_prompt")
"""The fields of a record that may hold the system text."""
_MAX_NAMED_FIELDS = 100
"""How many ignored fields a message names at most."""
_LISTS = ("messages", "conversations")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_CALLS = ("function_call",)
_PARTIAL_LOSS_FIELDS = ("train_detail", "training_detail", "loss_scale", "loss_mask", "mask")
"""Fields in which other programs weight or mask parts of a turn."""
_LABELS = ("labels", "completion_mask", "assistant_masks", "loss_mask")
_QUALITY_FIELDS = ("label", "kto_tag")
_IDS = ("id", "item_id", "instance_id", "extra.instance_id")
_FIELDS_BY_USE: Mapping[RecordUse, tuple[str, ...]] = {
    "general": (),
    "expert": (*_IDS, "reward"),
    "pairs": (*_IDS, "prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"),
}
_TURN_FIELDS = ("role", "content", "from", "value", "spans", "tool_calls", "tool_call_id", *FLAG_FIELDS)
_STEP_FIELDS = (
    "step_id",
    "source",
    "message",
    "is_copied_context",
    "llm_call_count",
    "tool_calls",
    "extra.train",
    f"extra.{OBSERVATION_ROLE}",
    f"extra.{REPLY_TEXT}",
)
_TOOL_CALL_FIELDS = (
    "tool_call_id",
    "function_name",
    "id",
    "type",
    "function.name",
    "function.arguments",
    "name",
    "arguments",
)
_UNFLAGGED_EXPORT_FIELDS = {"id", "kind", "conversations", "system"}
"""All fields of a record that earlier versions of agentr exported for LLaMA-Factory, without
flags.
"""


def has_value(value: Any) -> bool:
    """Return whether a field has a value: None, "", [] and {} count as missing."""
    return value is not None and value not in ("", [], {})


def check_text_only(record: Mapping[str, Any], where: str) -> None:
    """Raise `DataFileError` for a record with media, such as pictures, with turns in `history`, or
    with tools in the old form `functions`; none of these is read.
    """
    for name in _MEDIA:
        if has_value(record.get(name)):
            raise DataFileError(f"{where} has {name}, and only texts are read; leave the record out")
    if has_value(record.get("history")):
        raise DataFileError(f"{where} has turns in history, too; write all of them into one list")
    if has_value(record.get("functions")):
        raise DataFileError(f"{where} defines functions in an old form; write them as tools")


def ignored_fields(record: Mapping[str, Any], use: RecordUse) -> frozenset[str]:
    """Return the names of the fields of a record that have a value and are ignored. The fields of
    turns and steps have the name of their list before them, as in `messages.name`.
    """
    if AGENT_FIELD in record:
        return unread_fields(record)
    if (published_fields := published.unread_fields(record, pairs=use == "pairs")) is not None:
        return published_fields
    if is_atif(record):
        return frozenset(_ignored_in_atif(record, use))
    turns = next((name for name in _LISTS if has_value(record.get(name))), "prompt")
    used_fields = {*_FIELDS_BY_USE[use], *SYSTEM_FIELDS, *FLAG_FIELDS, "tools", turns}
    if turns == "prompt":
        used_fields.add("completion")
    names = set(_unused_fields(record, used_fields))
    for key in used_fields & {turns, "completion", "chosen", "rejected"}:
        names.update(_ignored_in_turns(record.get(key), key))
    return frozenset(names)


def count_ignored_fields(path: Path, use: RecordUse, *, setting: str) -> Counter[str]:
    """Return for each field that `ignored_fields` names the number of records of a file in which it
    is ignored. Raises `DataFileError` as `record_files.records` does.
    """
    return Counter(name for _, record in records(path, setting=setting) for name in ignored_fields(record, use))


def ignored_fields_text(fields: Mapping[str, int]) -> str:
    """Return the text of a message that names the ignored fields with their counts."""
    counts = [f"{name} ({count:,})" for name, count in sorted(fields.items())]
    more = f" and {len(counts) - _MAX_NAMED_FIELDS:,} more" if counts[_MAX_NAMED_FIELDS:] else ""
    return f"fields left out, and of how many records: {', '.join(counts[:_MAX_NAMED_FIELDS])}{more}"


def _ignored_in_turns(values: Any, key: str) -> Iterator[str]:
    # A side of a pair may be one turn alone.
    for turn in _objects(values if isinstance(values, list) else [values]):
        yield from (f"{key}.{name}" for name in _unused_fields(turn, _TURN_FIELDS))
        yield from (f"{key}.tool_calls.{name}" for name in _ignored_in_calls(turn))
        role = turn.get("role", turn.get("from"))
        if role not in ("assistant", "gpt"):
            # Only replies are trained.
            yield from (f"{key}.{name} of {role}" for name in FLAG_FIELDS if turn.get(name) in (True, 1))


def _ignored_in_atif(record: Mapping[str, Any], use: RecordUse) -> Iterator[str]:
    used_fields = (*_FIELDS_BY_USE[use], *FLAG_FIELDS, *SYSTEM_FIELDS)
    yield from _unused_fields(record, ("schema_version", "steps", "agent.tool_definitions", *used_fields))
    for step in _objects(record.get("steps")):
        yield from (f"steps.{name}" for name in _unused_fields(step, (*_STEP_FIELDS, "observation")))
        yield from (f"steps.tool_calls.{name}" for name in _ignored_in_calls(step))
        for observation in _objects([step.get("observation")]):
            for result in _objects(observation.get("results")):
                yield from (
                    f"steps.observation.{name}" for name in _unused_fields(result, ("content", "source_call_id"))
                )


def _ignored_in_calls(turn: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for call in _objects(turn.get("tool_calls")) for name in _unused_fields(call, _TOOL_CALL_FIELDS))


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _unused_fields(fields: Mapping[str, Any], used_fields: Collection[str]) -> Iterator[str]:
    """Yield the names of the fields that have a value and are not in `used_fields`. If only a part
    of an object is used, as with "agent.tool_definitions", yield its other parts in that form.
    """
    for name, value in fields.items():
        if not has_value(value) or name in used_fields:
            continue
        parts = {field_name.partition(".")[2] for field_name in used_fields if field_name.startswith(f"{name}.")}
        if parts and isinstance(value, dict):
            yield from (f"{name}.{part}" for part, content in value.items() if has_value(content) and part not in parts)
        else:
            yield name


# The turns of a record: in the form of OpenAI (`role`, `content`) or ShareGPT (`from`, `value`), in
# TRL's `prompt` and `completion`, or as the steps of ATIF.

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_RESULT_ROLES: dict[str, Role] = {"tool": "tool", "observation": "tool"}
"""The roles of a call's result, which are allowed only if a record defines or calls tools."""
_TURN_KEYS = (("role", "content"), ("from", "value"))


def conversation(record: dict[str, Any], where: str) -> tuple[Message, ...]:
    """Return the conversation of a record or session: the tools that it defines, its system text,
    and its turns.

    Assistant turns carry loss unless a flag of theirs or of the record says no, or they are in a
    TRL `prompt`. Raises `DataFileError` for a malformed record, and for one that cannot be trained
    on as it says, such as one with pictures or token masks.
    """
    # The checks below are for fields that would change what is trained and cannot be read.
    record = published.as_conversation(session_as_conversation(record, where), where)
    check_text_only(record, where)
    if all(has_value(record.get(side)) for side in ("chosen", "rejected")):
        raise DataFileError(
            f"{where} is a preference pair; import it with --as pairs, or leave chosen and rejected out"
        )
    for name in _QUALITY_FIELDS:
        if record.get(name) is False:
            raise DataFileError(f"{where}: {name} is false, so its answer is a bad one; leave the record out")
    extra = record.get("extra")
    if is_atif(record) and isinstance(extra, dict) and extra.get("side") == "rejected":
        raise DataFileError(f"{where} is the rejected side of a preference pair; leave it out")
    masks = [name for name in _LABELS if isinstance(record.get(name), list)]
    turns = record.get("messages") if masks else None
    entries = turns if isinstance(turns, list) else []
    replies = [turn for turn in entries if isinstance(turn, dict) and turn.get("role") == "assistant"]
    # As everywhere, a flag that is null is none.
    has_flags = bool(replies) and all(any(reply.get(name) is not None for name in FLAG_FIELDS) for reply in replies)
    if masks and not has_flags and not any(isinstance(record.get(name), list) for name in FLAG_FIELDS):
        raise DataFileError(
            f"{where}: {masks[0]} says which tokens are trained, and whole turns are read; give a list train with a "
            "flag for each turn"
        )
    turns_value = record.get("conversations")
    if (
        record.keys() == _UNFLAGGED_EXPORT_FIELDS
        and isinstance(turns_value, list)
        and not any(isinstance(turn, dict) and any(name in turn for name in FLAG_FIELDS) for turn in turns_value)
    ):
        raise DataFileError(
            f"{where} was exported for LLaMA-Factory by an earlier version of agentr, without flags, and only its last "
            "reply is to be trained; export it again"
        )
    values = with_flags(record, atif_turns(record, where) if is_atif(record) else _turn_list(record, where), where)
    messages = parse_turns(values, where, tools=defined_tools(record) is not None)
    return with_system_and_tools(record, messages, where)


def with_system_and_tools(record: Mapping[str, Any], messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """Return messages with the tools and the system text of their record put before them. Raises
    `DataFileError` if these are malformed, or there are several system texts that differ.
    """
    texts = {text_of(record[name], f"{where}, {name}") for name in SYSTEM_FIELDS if has_value(record.get(name))}
    own_texts = {message.text for message in messages[:1] if message.role == "system"}
    if len(texts | own_texts) > 1:
        raise DataFileError(f"{where} has several system texts that differ; leave all but one out")
    system = tuple(Message(role="system", text=_valid_text(text, f"{where}, system")) for text in texts - own_texts)
    return (*_tools_message(record, where), *system, *messages)


def parse_turns(values: Any, where: str, *, tools: bool = False) -> tuple[Message, ...]:
    """Return a list of turns as messages; assistant turns carry loss unless a flag of theirs says
    no. Turns of role `tool` are allowed only with `tools`, or if a turn makes calls. Raises
    `DataFileError` for malformed turns.
    """
    if not isinstance(values, list):
        raise DataFileError(f"{where}: there must be a list of turns, not {type(values).__name__}")
    values = with_written_calls(values, where)
    texts = [value.get(text_key) for value in values if isinstance(value, dict) for _, text_key in _TURN_KEYS]
    allows_results = tools or any(isinstance(text, str) and readable_calls(text) for text in texts)
    roles = {**_ROLES, **_RESULT_ROLES} if allows_results else _ROLES
    return tuple(_parse_message(value, f"{where}, turn {position}", roles) for position, value in enumerate(values))


def defined_tools(record: Mapping[str, Any]) -> Any:
    """Return the tool definitions in a record, unparsed; None if it has none."""
    agent = record.get("agent")
    definitions = agent.get("tool_definitions") if is_atif(record) and isinstance(agent, dict) else record.get("tools")
    return definitions if has_value(definitions) and definitions != "[]" else None


def _turn_list(record: dict[str, Any], where: str) -> list[Any]:
    lists = [record[name] for name in ("messages", "conversations") if isinstance(record.get(name), list)]
    if len([values for values in lists if values]) > 1 and lists[0] != lists[1]:
        raise DataFileError(f"{where} has both messages and conversations, and they differ; leave one out")
    if lists:
        return next((values for values in lists if values), lists[0])
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*map(without_loss, prompt), *completion]
    raise DataFileError(f'{where} has no list of turns under "messages" or "conversations"; add one')


def _tools_message(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    definitions = defined_tools(record)
    if definitions is None:
        return ()
    if isinstance(definitions, str):
        try:
            definitions = json.loads(definitions)
        except (ValueError, RecursionError):
            raise DataFileError(f"{where}: tools is a text that is not JSON; give a list of functions") from None
    entries = definitions if isinstance(definitions, list) else []
    functions = [entry.get("function") if isinstance(entry, dict) else None for entry in entries]
    if not functions or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in functions):
        raise DataFileError(
            f'{where}: tools must be a list of functions as OpenAI defines them, {{"type": "function", "function": '
            '{"name", ...}}'
        )
    return (Message(role="tools", text=json.dumps(definitions, ensure_ascii=False)),)


def _parse_message(turn: Any, where: str, roles: Mapping[str, Role]) -> Message:
    if isinstance(turn, dict):
        # Fields that would change what is trained, and that a turn of text cannot represent.
        for name in _CALLS:
            if has_value(turn.get(name)):
                raise DataFileError(
                    f"{where} has {name}, which a turn of text cannot hold; write the call into its text, as the model "
                    "is to write it"
                )
        for name in _MEDIA:
            if has_value(turn.get(name)):
                raise DataFileError(f"{where} has {name}, and only texts are read; leave the record out")
        for name in _PARTIAL_LOSS_FIELDS:
            if has_value(turn.get(name)):
                raise DataFileError(f"{where} has {name}, and a turn is trained as a whole or not at all; leave it out")
        for role_key, text_key in _TURN_KEYS:
            if isinstance(turn.get(text_key), str | list) and role_key in turn:
                role = turn[role_key]
                if not isinstance(role, str) or role not in roles:
                    raise DataFileError(f"{where}: {role_key} is {role!r} and must be one of {', '.join(roles)}")
                text = _valid_text(text_of(turn[text_key], f"{where}, {text_key}"), f"{where}: {text_key}")
                is_trained = train_flag(turn, where)
                if has_value(turn.get("spans")):
                    return _grown_turn(turn["spans"], roles[role], text, is_trained, where)
                return Message(
                    role=roles[role], text=text, train=roles[role] == "assistant" and is_trained is not False
                )
    raise DataFileError(f'{where}: a turn must be an object with the texts "role" and "content", or "from" and "value"')


def _grown_turn(values: Any, role: Role, text: str, is_trained: bool | None, where: str) -> Message:
    """Return an assistant turn with the spans that `agentr export` writes beside its text. Raises
    `DataFileError` if they are malformed, or do not agree with text, role and flag of the turn.
    """
    if not isinstance(values, list):
        raise DataFileError(f"{where}: spans must be a list, not {type(values).__name__}")
    spans = []
    for index, value in enumerate(values):
        location = f"{where}, span {index}"
        is_text = isinstance(value, dict) and isinstance(value.get("text"), str)
        if not is_text or (train := parse_flag(value.get("train"), f"{location}: train")) is None:
            raise DataFileError(f'{location}: a span must have a "text" and a flag "train"')
        spans.append(Span(text=_valid_text(value["text"], f"{location}: text"), train=train))
    turn = grown_turn(spans)
    if role != "assistant" or turn.text != text:
        raise DataFileError(f"{where}: spans must be the parts of an assistant's text, in order; leave them out")
    if is_trained not in (None, turn.train):
        raise DataFileError(f"{where}: its flag and those of its spans contradict each other about training")
    return turn


def _valid_text(text: str, where: str) -> str:
    """Return a text. Raises `DataFileError` if it has half a surrogate pair."""
    if (position := lone_surrogate(text)) is not None:
        raise DataFileError(f"{where} has half a surrogate pair at {position}; correct the text")
    return text


STAGE = "general"


def read_chat(path: Path) -> tuple[tuple[Sample, ...], tuple[Rejection, ...]]:
    """Return the conversations of a file as samples, and the rejections of unusable ones.

    A record is `{"messages": [{"role", "content"}, ...]}`, ShareGPT's `{"conversations": [{"from",
    "value"}, ...]}`, TRL's `prompt` and `completion` or a trajectory in ATIF; they are lines of
    JSON or one array. Assistant turns are trained unless a flag (`FLAG_FIELDS`) says no.
    Conversations are unusable for the reasons of `fault_of`; the subject of a rejection is the
    file's name and the line.

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


def lacks_tools(messages: tuple[Message, ...]) -> bool:
    """Return whether a conversation has results of tools but defines none: a model would be trained
    to call tools that it is not offered.
    """
    return any(message.role == "tool" for message in messages) and messages[0].role != "tools"


def fault_of(messages: tuple[Message, ...]) -> str:
    """Return why a conversation cannot be trained on, as a slug; the empty string if it can.

    The reasons: no assistant turn is trained; it has results of tools that it does not define; user
    and assistant turns do not alternate from a user turn on or, with tools, a reply comes first or
    right after another; a turn is empty.
    """
    if not any(message.train for message in messages):
        return "no-assistant-turn"
    tools = messages[0].role == "tools"
    if lacks_tools(messages):
        return "calls-tools-that-it-does-not-define"
    without_tools = messages[1:] if tools else messages
    roles = [message.role for message in (without_tools[1:] if without_tools[0].role == "system" else without_tools)]
    if tools:
        # One reply may be followed by several results.
        alternate = not any(role == before == "assistant" for before, role in pairwise(("assistant", *roles)))
    else:
        alternate = all(role == ("user", "assistant")[number % 2] for number, role in enumerate(roles))
    if not alternate:
        return "turns-do-not-alternate"
    return "" if all(message.text.strip() for message in messages) else "empty-turn"
