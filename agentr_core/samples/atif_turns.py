"""Trajectories in the agent trajectory interchange format (ATIF) as the turns of a conversation."""

from __future__ import annotations

from typing import Any

from agentr_core.errors import DataFileError

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def is_atif(record: dict[str, Any]) -> bool:
    """Return whether an object says that it is a trajectory in ATIF."""
    return str(record.get("schema_version", "")).startswith("ATIF-")


def atif_turns(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the steps of a trajectory of ATIF 1.0 to 1.8 as turns with `role` and `content`; an
    observation is the user's turn after its step. Reasoning in a field of its own is left out.

    Raises `DataFileError` if a step calls tools or shows pictures, which a turn of text cannot
    hold, and for any other form.
    """
    if not str(record["schema_version"]).startswith("ATIF-v1."):
        raise DataFileError(f"{where}: schema_version is {record['schema_version']!r}; ATIF-v1.0 to ATIF-v1.8 are read")
    steps = record.get("steps")
    if not isinstance(steps, list) or not steps:
        raise DataFileError(f"{where} has no list of steps; an ATIF trajectory has at least one")
    turns: list[dict[str, Any]] = []
    for number, step in enumerate(steps, start=1):
        turns += _turns(step, f"{where}, step {number}")
    return turns


def _turns(step: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(step, dict) or step.get("source") not in _ROLES:
        raise DataFileError(f"{where}: source must be one of {', '.join(_ROLES)}")
    if step.get("tool_calls"):
        raise DataFileError(f"{where} calls tools, which turns of text cannot hold; write the calls into its message")
    turn: dict[str, Any] = {"role": _ROLES[step["source"]], "content": _text(step.get("message"), where)}
    extra = step.get("extra")
    if isinstance(extra, dict) and extra.get("train") is False:
        turn["train"] = False
    seen = step.get("observation")
    if seen is None:
        return [turn]
    results = seen.get("results") if isinstance(seen, dict) else None
    if not isinstance(results, list):
        raise DataFileError(f"{where}: observation must have a list of results")
    texts = [_text(one.get("content") if isinstance(one, dict) else one, f"{where}, observation") for one in results]
    return [turn, {"role": "user", "content": "\n".join(texts)}]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise DataFileError(f"{where} has content that is not text; leave the trajectory out")
