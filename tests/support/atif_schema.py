"""The agent trajectory interchange format, version 1.8, as a JSON schema: what the models of Harbor
0.26 (`harbor.models.trajectories`, RFC 0001) accept, of text alone. `faults` has their further
rules. `make test-atif` asks the models themselves.
"""

from __future__ import annotations

from typing import Any

import jsonschema

_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_MAYBE_NUMBER = {"type": ["number", "null"]}
_MAYBE_INTEGER = {"type": ["integer", "null"]}
_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_MAYBE_OBJECT = {"type": ["object", "null"]}


def _record(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_METRICS = _record(
    [],
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), _MAYBE_INTEGER),
    cost_usd=_MAYBE_NUMBER,
    **dict.fromkeys(("prompt_token_ids", "completion_token_ids"), _INTEGERS),
    logprobs={"type": "array", "items": {"type": "number"}},
    extra=_MAYBE_OBJECT,
)
_CALL = _record(
    ["tool_call_id", "function_name", "arguments"],
    tool_call_id=_TEXT,
    function_name=_TEXT,
    arguments={"type": "object"},
    extra=_MAYBE_OBJECT,
)
_RESULT = _record([], source_call_id=_MAYBE_TEXT, content=_MAYBE_TEXT, extra=_MAYBE_OBJECT)
_STEP = _record(
    ["step_id", "source", "message"],
    step_id={"type": "integer", "minimum": 1},
    timestamp=_MAYBE_TEXT,
    source={"enum": ["system", "user", "agent"]},
    model_name=_MAYBE_TEXT,
    reasoning_effort={"type": ["string", "number", "null"]},
    message=_TEXT,
    reasoning_content=_MAYBE_TEXT,
    tool_calls={"type": "array", "items": _CALL},
    observation=_record(["results"], results={"type": "array", "items": _RESULT}),
    metrics=_METRICS,
    is_copied_context={"type": ["boolean", "null"]},
    llm_call_count={"type": ["integer", "null"]},
    extra=_MAYBE_OBJECT,
)
SCHEMA = _record(
    ["schema_version", "agent", "steps"],
    schema_version={"const": "ATIF-v1.8"},
    session_id=_MAYBE_TEXT,
    trajectory_id=_MAYBE_TEXT,
    agent=_record(
        ["name", "version"],
        name=_TEXT,
        version=_TEXT,
        model_name=_MAYBE_TEXT,
        tool_definitions={"type": ["array", "null"]},
        extra=_MAYBE_OBJECT,
    ),
    steps={"type": "array", "minItems": 1, "items": _STEP},
    notes=_MAYBE_TEXT,
    final_metrics=_record(
        [],
        **dict.fromkeys(
            ("total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_steps"), _MAYBE_INTEGER
        ),
        total_cost_usd=_MAYBE_NUMBER,
        extra=_MAYBE_OBJECT,
    ),
    continued_trajectory_ref=_MAYBE_TEXT,
    extra=_MAYBE_OBJECT,
    subagent_trajectories={"type": ["array", "null"]},
)
_OF_AGENTS = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def faults(trajectory: dict[str, Any]) -> list[str]:
    """Return in what a trajectory breaks the format."""
    messages = [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(trajectory)]
    for number, step in enumerate(trajectory.get("steps", ()), start=1):
        if step.get("step_id") != number:
            messages.append(f"step {number} has step_id {step.get('step_id')}")
        if step.get("source") != "agent":
            messages += [f"step {number} is no agent's and has {name}" for name in _OF_AGENTS if name in step]
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        results = step.get("observation", {"results": []})["results"]
        messages += [
            f"step {number} answers no call"
            for result in results
            if result.get("source_call_id", None) not in {None, *calls}
        ]
    return messages
