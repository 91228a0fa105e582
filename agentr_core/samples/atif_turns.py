"""Trajectories in the agent trajectory interchange format (ATIF) as the turns of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentr_core.errors import DataFileError
from agentr_core.samples.flags import flag

OBSERVED_AS = "observation_role"
"""Where `agentr export` notes, in `extra`, what the observation of a step was, unless it was the
user's turn: a tool's, or a part of the assistant's own turn, which the next such step goes on with.
"""
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
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
        turn, observed_as, texts = _read(step, f"{where}, step {number}")
        if observed_as != "assistant":
            turns += [turn, *({"role": observed_as, "content": text} for text in texts)]
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


def _read(step: Any, where: str) -> tuple[dict[str, Any], str, list[str]]:
    """Return the turn of a step, the role of its observation, and the texts of that."""
    if not isinstance(step, dict) or step.get("source") not in _ROLES:
        raise DataFileError(f"{where}: source must be one of {', '.join(_ROLES)}")
    if step.get("tool_calls"):
        raise DataFileError(f"{where} calls tools, which turns of text cannot hold; write the calls into its message")
    extra = step["extra"] if isinstance(step.get("extra"), dict) else {}
    turn: dict[str, Any] = {"role": _ROLES[step["source"]], "content": text_of(step.get("message"), where)}
    verdict = False if _another_wrote(step, where) else flag(extra.get("train"), f"{where}: extra.train")
    if verdict is not None:
        turn["train"] = verdict
    role = extra.get(OBSERVED_AS)
    if role not in (None, *_OBSERVED) or (role == "assistant" and turn["role"] != "assistant"):
        raise DataFileError(f"{where}: extra.{OBSERVED_AS} must be one of {', '.join(_OBSERVED)}")
    texts = _observations(step.get("observation"), where)
    return turn, role or "user", texts if role or not texts else ["\n".join(texts)]


def _another_wrote(step: Mapping[str, Any], where: str) -> bool:
    """Return whether a step is not what the model wrote in this trajectory."""
    calls = step.get("llm_call_count")
    if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int | float) or calls < 0):
        raise DataFileError(f"{where}: llm_call_count must be a number from 0 on, or null")
    return calls == 0 or flag(step.get("is_copied_context"), f"{where}: is_copied_context") is True


def _observations(seen: Any, where: str) -> list[str]:
    if seen is None:
        return []
    results = seen.get("results") if isinstance(seen, dict) else None
    if not isinstance(results, list):
        raise DataFileError(f"{where}: observation must have a list of results")
    return [text_of(one.get("content") if isinstance(one, dict) else one, f"{where}, observation") for one in results]
