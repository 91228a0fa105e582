"""The turns of a record: those of OpenAI (`role`, `content`) or ShareGPT (`from`, `value`), those
of TRL's `prompt` and `completion`, or the steps of ATIF.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples.atif_turns import atif_turns, is_atif, text_of
from agentr_core.samples.flags import flag, flag_of, flagged, untrained
from agentr_core.samples.record_fields import SYSTEM, check_record, check_turn, holds
from agentr_core.texts import lone_surrogate
from agentr_core.types import Message, Role, Span, grown_turn

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
    check_record(record, where)
    values = atif_turns(record, where) if is_atif(record) else _listed(record, where)
    return in_context(
        record, turns(flagged(record, values, where), where, tools=defined_tools(record) is not None), where
    )


def in_context(record: Mapping[str, Any], spoken: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """Return turns after the tools and the system text that their record has beside them. Raises
    `DataFileError` if these cannot be read, or a turn of the system says something else.
    """
    given = {text_of(record[name], f"{where}, {name}") for name in SYSTEM if holds(record.get(name))}
    own = {message.text for message in spoken[:1] if message.role == "system"}
    if len(given | own) > 1:
        raise DataFileError(f"{where} has several system texts that differ; leave all but one out")
    before = tuple(Message(role="system", text=_whole(text, f"{where}, system")) for text in given - own)
    return (*_tools(record, where), *before, *spoken)


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
    given = agent.get("tool_definitions") if is_atif(record) and isinstance(agent, dict) else record.get("tools")
    return given if holds(given) and given != "[]" else None


def _listed(record: dict[str, Any], where: str) -> list[Any]:
    lists = [record[name] for name in ("messages", "conversations") if isinstance(record.get(name), list)]
    if len([one for one in lists if one]) > 1 and lists[0] != lists[1]:
        raise DataFileError(f"{where} has both messages and conversations, and they differ; leave one out")
    if lists:
        return next((one for one in lists if one), lists[0])
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*map(untrained, prompt), *completion]
    raise DataFileError(f'{where} has no list of turns under "messages" or "conversations"; add one')


def _tools(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    given = defined_tools(record)
    if given is None:
        return ()
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise DataFileError(f"{where}: tools is a text that is not JSON; give a list of functions") from None
    named = [one.get("function") if isinstance(one, dict) else None for one in given] if isinstance(given, list) else []
    if not named or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in named):
        raise DataFileError(
            f'{where}: tools must be a list of functions as OpenAI defines them, {{"type": "function", "function": '
            '{"name", ...}}'
        )
    return (Message(role="tools", text=json.dumps(given, ensure_ascii=False)),)


def _message(turn: Any, where: str, roles: Mapping[str, Role]) -> Message:
    if isinstance(turn, dict):
        check_turn(turn, where)
        for role_key, text_key in _NAMES:
            if isinstance(turn.get(text_key), str | list) and role_key in turn:
                role = turn[role_key]
                if not isinstance(role, str) or role not in roles:
                    raise DataFileError(f"{where}: {role_key} is {role!r} and must be one of {', '.join(roles)}")
                text = _whole(text_of(turn[text_key], f"{where}, {text_key}"), f"{where}: {text_key}")
                verdict = flag_of(turn, where)
                if holds(turn.get("spans")):
                    return _grown(turn["spans"], roles[role], text, verdict, where)
                return Message(role=roles[role], text=text, train=roles[role] == "assistant" and verdict is not False)
    raise DataFileError(f'{where}: a turn must be an object with the texts "role" and "content", or "from" and "value"')


def _grown(values: Any, role: Role, text: str, verdict: bool | None, where: str) -> Message:
    """Return the turn of the spans that `agentr export` writes beside its text."""
    spans = [_span(value, f"{where}, span {place}") for place, value in enumerate(_list_of(values, where))]
    turn = grown_turn(spans)
    if role != "assistant" or turn.text != text:
        raise DataFileError(f"{where}: spans must be the parts of an assistant's text, in order; leave them out")
    if verdict not in (None, turn.train):
        raise DataFileError(f"{where}: its flag and those of its spans contradict each other about training")
    return turn


def _list_of(values: Any, where: str) -> Sequence[Any]:
    if isinstance(values, list):
        return values
    raise DataFileError(f"{where}: spans must be a list, not {type(values).__name__}")


def _span(value: Any, where: str) -> Span:
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        verdict = flag(value.get("train"), f"{where}: train")
        if verdict is not None:
            return Span(text=_whole(value["text"], f"{where}: text"), train=verdict)
    raise DataFileError(f'{where}: a span must have a "text" and a flag "train"')


def _whole(text: str, where: str) -> str:
    """Return a text. Raises `DataFileError` if it has half a surrogate pair."""
    if (place := lone_surrogate(text)) is not None:
        raise DataFileError(f"{where} has half a surrogate pair at {place}; correct the text")
    return text
