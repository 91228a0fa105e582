"""Trajectories in the agent trajectory interchange format (ATIF) of Harbor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentr_core.exchange.training_set import Origin, TrainingSet, opening, samples_of
from agentr_core.samples.atif_turns import OBSERVED_AS
from agentr_core.types import Sample, Span

VERSION = "ATIF-v1.7"
"""The version that is written; source: RFC 0001 of Harbor and its models of version 0.25."""
_FOLDER = "trajectories"


def write(training_set: TrainingSet, folder: Path) -> Mapping[str, str]:
    """Write a file for each sample, and for each side of a pair, named after its id."""
    (folder / _FOLDER).mkdir()
    for key, sample, origin in _sides(training_set):
        text = json.dumps(trajectory(key, sample, origin), ensure_ascii=False, indent=1)
        (folder / _FOLDER / f"{key}.json").write_text(f"{text}\n", encoding="utf-8")
    return {"default": f"{_FOLDER}/*.json"}


def unmasked(training_set: TrainingSet) -> str:
    """Return what ATIF cannot express about the loss mask of a training set; empty if all replies
    carry loss.
    """
    spared = sum(not span.train for _, sample, _ in _sides(training_set) for span in _replies(sample))
    return f"it has no field for that, and {spared} replies carry none (`extra.train` tells)" if spared else ""


def impossible(training_set: TrainingSet) -> str:
    """Return why ATIF cannot hold a training set; empty if it can: an observation belongs to the
    step of a reply.
    """
    for sample in samples_of(training_set):
        for before, message in pairwise(sample.messages):
            if message.role == "tool" and (before.role not in ("assistant", "tool") or before.spans):
                return (
                    "some results of tools follow no reply that could have called them; choose parquet, trl or sharegpt"
                )
    return ""


def sides_apart(training_set: TrainingSet) -> str:
    """Return that pairs are taken apart; empty if there are none."""
    apart = "each side of a pair is a trajectory of its own (`extra.side`), which `agentr import` does not join again"
    return apart if training_set.pairs else ""


def trajectory(key: str, sample: Sample, origin: Origin) -> dict[str, Any]:
    """Return a sample as a trajectory: the world's response to a reply is the observation of its
    step.
    """
    steps = [{"step_id": number, **step} for number, step in enumerate(_steps(sample), start=1)]
    first = sample.messages[0]
    tools = {"tool_definitions": json.loads(first.text)} if first.role == "tools" else {}
    return {
        "schema_version": VERSION,
        "session_id": origin.get("run_id"),
        "trajectory_id": key,
        "agent": {"name": "agentr", "version": version("agentr"), **tools, "extra": {"recipe": origin.get("recipe")}},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {
            "kind": str(sample.kind),
            "instance_id": None if sample.instance is None else sample.instance.key,
            **origin,
        },
    }


def _sides(training_set: TrainingSet) -> Iterator[tuple[str, Sample, Origin]]:
    yield from ((row.id, row.sample, row.origin) for row in training_set.samples)
    for pair in training_set.pairs:
        yield f"{pair.id}-chosen", pair.preference.chosen, {**pair.origin, "side": "chosen"}
        yield f"{pair.id}-rejected", pair.preference.rejected, {**pair.origin, "side": "rejected"}


def _replies(sample: Sample) -> Iterable[Span]:
    for message in sample.messages:
        if message.role == "assistant":
            yield from message.parts[::2]


def _steps(sample: Sample) -> list[dict[str, Any]]:
    begun = len(opening(sample.messages)) if sample.instance is not None else len(sample.messages)
    steps: list[dict[str, Any]] = []
    for position, message in enumerate(sample.messages):
        if message.role == "assistant":
            for number, part in enumerate(message.parts):
                if number % 2:
                    _observed(steps[-1], part.text)
                else:
                    steps.append(_agent(part, grown=bool(message.spans)))
        elif message.role == "tool":
            steps[-1]["extra"][OBSERVED_AS] = "tool"
            _observed(steps[-1], message.text)
        elif message.role == "user" and position >= begun and _unanswered(steps):
            _observed(steps[-1], message.text)
        elif message.role != "tools":
            steps.append({"source": message.role, "message": message.text})
    return steps


def _unanswered(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last step is a reply with a turn of its own, and no observation yet."""
    last = steps[-1] if steps else {}
    return last.get("source") == "agent" and OBSERVED_AS not in last["extra"] and "observation" not in last


def _agent(reply: Span, *, grown: bool) -> dict[str, Any]:
    ids = list(reply.token_ids or ())
    metrics = {"metrics": {"completion_tokens": len(ids), "completion_token_ids": ids}} if ids else {}
    extra = {"train": reply.train, **({OBSERVED_AS: "assistant"} if grown else {})}
    return {"source": "agent", "message": reply.text, **metrics, "extra": extra}


def _observed(step: dict[str, Any], text: str) -> None:
    step.setdefault("observation", {"results": []})["results"].append({"content": text})
