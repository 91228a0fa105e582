"""Export in Harbor's agent trajectory interchange format (ATIF): one trajectory for each sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from agentr_core.episodes.transcript import readable_calls
from agentr_core.exchange.training_set import Origin, TrainingSet, file_keys, opening_turns, samples_of
from agentr_core.samples.chat_file import OBSERVATION_ROLE, REPLY_TEXT, reply_text
from agentr_core.system import DISTRIBUTION
from agentr_core.types import Message, Sample, Span

VERSION = "ATIF-v1.8"
"""The version that is written; source: RFC 0001 of Harbor and its models of version 0.26."""
_FOLDER = "trajectories"
Logprobs = Sequence[Sequence[float] | None]


def write_atif(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write a file for each sample, named `ID.json` (see `file_keys`), and for each side of a pair,
    `ID-SIDE.json`. Return their glob pattern by the name of the set.
    """
    (folder / _FOLDER).mkdir()
    trajectories = {
        key: trajectory(key, row.sample, row.origin, row.logprobs)
        for key, row in zip(file_keys(training_set), training_set.samples, strict=True)
    }
    for pair in training_set.pairs:
        for side, sample in (("chosen", pair.preference.chosen), ("rejected", pair.preference.rejected)):
            key = f"{pair.id}-{side}"
            trajectories[key] = trajectory(key, sample, {**pair.origin, "side": side})
    for key, record in trajectories.items():
        text = json.dumps(record, ensure_ascii=False, indent=1)
        (folder / _FOLDER / f"{key}.json").write_text(f"{text}\n", encoding="utf-8")
    return {"default": f"{_FOLDER}/*.json"}


def why_impossible(training_set: TrainingSet) -> str:
    """Return why a training set cannot be written in ATIF; empty if it can. In ATIF a tool's result
    belongs to the step of a reply, so none may come without one before it.
    """
    for sample in samples_of(training_set):
        for before, message in pairwise(sample.messages):
            if message.role == "tool" and (before.role not in ("assistant", "tool") or before.spans):
                return (
                    "some results of tools follow no reply that could have called them; choose parquet, trl or sharegpt"
                )
    return ""


def separate_sides_note(training_set: TrainingSet) -> str:
    """Return a note that the sides of pairs become separate trajectories; empty without pairs."""
    warning = "each side of a pair is a trajectory of its own (`extra.side`), which `agentr import` does not join again"
    return warning if training_set.pairs else ""


def infinite_logprobs_note(training_set: TrainingSet) -> str:
    """Return a note on how many replies lose their log-probabilities; empty if none do. Those with
    an infinite value do: JSON has none, and ATIF allows no null in the list.
    """
    count = sum(
        logprobs is not None and not all(map(isfinite, logprobs))
        for row in training_set.samples
        for logprobs in row.logprobs
    )
    reason = "since a token has none that is finite"
    return f"left out are the log-probabilities of {count} replies, {reason}" if count else ""


def trajectory(key: str, sample: Sample, origin: Origin, logprobs: Logprobs = ()) -> dict[str, Any]:
    """Return a sample as a trajectory in ATIF. What the environment answers to a reply is the
    observation of the reply's step; replies that are not trained get `is_copied_context`.

    Args:
        key: the id of the trajectory.
        logprobs: for each reply the natural-log probabilities of its tokens, None where they are
            not known.
    """
    steps = [{"step_id": number, **step} for number, step in enumerate(_steps(sample, logprobs), start=1)]
    first = sample.messages[0]
    tools = {"tool_definitions": json.loads(first.text)} if first.role == "tools" else {}
    metrics = [step["metrics"]["completion_tokens"] for step in steps if "metrics" in step]
    return {
        "schema_version": VERSION,
        "session_id": origin.get("run_id"),
        "trajectory_id": key,
        "agent": {
            "name": "agentr",
            "version": version(DISTRIBUTION),
            **tools,
            "extra": {"recipe": origin.get("recipe")},
        },
        "steps": steps,
        "final_metrics": {
            "total_steps": len(steps),
            **({"total_completion_tokens": sum(metrics)} if metrics else {}),
        },
        "extra": {
            "kind": str(sample.kind),
            "instance_id": None if sample.instance is None else sample.instance.key,
            **origin,
        },
    }


def _steps(sample: Sample, logprobs: Logprobs) -> list[dict[str, Any]]:
    start = len(opening_turns(sample.messages)) if sample.instance is not None else len(sample.messages)
    has_tools = sample.messages[0].role == "tools"
    steps: list[dict[str, Any]] = []
    open_calls: list[str] = []
    reply_logprobs = iter(logprobs)
    for position, message in enumerate(sample.messages):
        if message.role == "assistant" and message.spans:
            open_calls = []
            for number, span in enumerate(message.parts):
                if number % 2:
                    _add_observation(steps[-1], span.text)
                else:
                    steps.append(_reply_step(span, next(reply_logprobs, None)))
                    steps[-1]["extra"][OBSERVATION_ROLE] = "assistant"
        elif message.role == "assistant":
            step = _reply_step(message, next(reply_logprobs, None))
            open_calls = _move_calls(step, number=len(steps) + 1) if has_tools else []
            steps.append(step)
        elif message.role == "tool" and open_calls:
            _add_observation(steps[-1], message.text, source_call_id=open_calls.pop(0))
        elif message.role == "tool":
            steps[-1]["extra"][OBSERVATION_ROLE] = "tool"
            _add_observation(steps[-1], message.text)
        elif message.role == "user" and position >= start and _awaits_observation(steps):
            _add_observation(steps[-1], message.text)
        elif message.role != "tools":
            steps.append({"source": message.role, "message": message.text})
    return steps


def _reply_step(reply: Message | Span, logprobs: Sequence[float] | None) -> dict[str, Any]:
    ids = list(reply.token_ids or ())
    is_complete = logprobs is not None and len(logprobs) == len(ids) and all(map(isfinite, logprobs))
    metrics = {
        "completion_tokens": len(ids),
        "completion_token_ids": ids,
        **({"logprobs": list(logprobs)} if logprobs is not None and is_complete else {}),
    }
    return {
        "source": "agent",
        "message": reply.text,
        **({"metrics": metrics, "llm_call_count": 1} if ids else {}),
        # ATIF says of such steps that they "should not be included in training data".
        **({} if reply.train else {"is_copied_context": True}),
        "extra": {"train": reply.train},
    }


def _move_calls(step: dict[str, Any], *, number: int) -> list[str]:
    """Move the calls in the message of a step to its field `tool_calls`, in place, and return their
    ids. If the reply's text cannot be rebuilt from the fields, it is kept in `extra`. Calls with a
    number that is not finite stay in the message.
    """
    calls = readable_calls(step["message"])
    try:
        json.dumps([dict(call.arguments) for call in calls], allow_nan=False)
    except ValueError:
        # A number in a call is not finite, which JSON cannot express.
        return []
    if not calls:
        return []
    reply, beside = step["message"], calls[0].text_outside
    ids = [f"call_{number}_{index}" for index in range(len(calls))]
    step["message"] = beside
    step["tool_calls"] = [
        {"tool_call_id": key, "function_name": call.name, "arguments": dict(call.arguments)}
        for key, call in zip(ids, calls, strict=True)
    ]
    if reply_text(beside, [(call.name, call.arguments) for call in calls]) != reply:
        step["extra"][REPLY_TEXT] = reply
    return ids


def _awaits_observation(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last step is a reply without an observation yet, and not one whose
    observation is part of the assistant turn or a tool's turn (`OBSERVED_AS`).
    """
    last = steps[-1] if steps else {}
    return last.get("source") == "agent" and OBSERVATION_ROLE not in last["extra"] and "observation" not in last


def _add_observation(step: dict[str, Any], text: str, **fields: str) -> None:
    step.setdefault("observation", {"results": []})["results"].append({**fields, "content": text})
